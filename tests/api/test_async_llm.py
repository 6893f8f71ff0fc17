"""AsyncLLM: many readers of one batch; a caller that leaves takes its request along, and every end reaches its reader."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.fakes import Gate, answer_of, assert_at_rest, make_engine, solo, text_of, tokens_of
from error_codes import raises_code
from holdfast.api.async_llm import AsyncLLM
from holdfast.errors import EngineDeadError, PromptError, QueueFullError, RequestError
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.memory.report import MemoryReport
from holdfast.request.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=100)
ACCOUNT = MemoryReport((), 0, "none", 1, 1, 1)
MESSAGES = [{"role": "user", "content": "Hi"}]


def run(work: Callable, **options):
    """Run a test with an AsyncLLM, which must leave nothing behind."""
    engine = make_engine(**options)

    async def main():
        async with AsyncLLM.from_engine(engine) as llm:
            return await asyncio.wait_for(work(llm, engine), 30)

    result = asyncio.run(main())
    if not engine.is_dead:
        assert_at_rest(engine)
    return result


async def last(outputs):
    return [output async for output in outputs][-1]


def num_known(llm: AsyncLLM) -> int:
    """Requests that the engine has, or will have after the step in progress."""
    return llm.health().num_commands + llm.health().num_unfinished_requests


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def test_async_llm_outputs_grow_and_the_last_is_finished():
    async def work(llm, engine):
        outputs = [output async for output in llm.generate("Hello", PARAMS, "mine")]
        assert answer_of(outputs[-1]) == solo("Hello", PARAMS)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(set(lengths))
        assert all(outputs[-1].outputs[0].text.startswith(output.outputs[0].text) for output in outputs)
        assert {output.request_id for output in outputs} == {"mine"}
        assert (outputs[-1].prompt, outputs[-1].prompt_token_ids) == ("Hello", list(b"Hello"))

    run(work)


def test_chat_and_streams():
    async def work(llm, engine):
        assert answer_of(await last(llm.chat(MESSAGES, PARAMS))) == solo("user: Hi\nassistant: ", PARAMS)
        bare = await last(llm.chat(MESSAGES, PARAMS, chat_template_kwargs={"add_generation_prompt": False}))
        assert bare.prompt == "user: Hi\n"
        deltas = [delta async for delta in llm.stream("Hello", PARAMS)]
        assert (tokens_of(deltas), text_of(deltas)) == solo("Hello", PARAMS)
        deltas = [delta async for delta in llm.stream_chat(MESSAGES, PARAMS)]
        assert (tokens_of(deltas), text_of(deltas)) == solo("user: Hi\nassistant: ", PARAMS)

    run(work)


def test_async_llm_100_requests_run_as_one_batch():
    async def work(llm, engine):
        gate = Gate(engine)
        prompts = [f"request {number}" for number in range(100)]
        tasks = [asyncio.create_task(last(llm.generate(prompt, PARAMS))) for prompt in prompts]
        await until(lambda: num_known(llm) == 100)
        gate.open()
        outputs = await asyncio.gather(*tasks)
        assert [answer_of(output) for output in outputs] == [solo(prompt, PARAMS) for prompt in prompts]
        assert len({output.request_id for output in outputs}) == 100
        assert max(map(len, engine.runner.steps)) == 100
        assert len(engine.runner.steps) <= 12

    run(work, max_num_seqs=128, max_num_batched_tokens=2048, num_pages=1000, max_queue=128)


def test_async_llm_100_requests_preempt_in_little_memory():
    async def work(llm, engine):
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=30)
        prompts = [f"request {number}" for number in range(100)]
        outputs = await asyncio.gather(*(last(llm.generate(prompt, params)) for prompt in prompts))
        assert [answer_of(output) for output in outputs] == [solo(prompt, params) for prompt in prompts]
        assert engine.stats().num_preemptions > 0

    run(work, num_pages=40, max_queue=128)


@pytest.mark.each_value
@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "exception", "drop"])
@pytest.mark.parametrize("num_read", [1, 3])
def test_async_llm_leaving_reader_aborts_within_a_step(how, num_read):
    async def work(llm, engine):
        neighbour = asyncio.create_task(last(llm.generate("neighbour", LONG)))
        gate = Gate(engine)
        heard = []

        async def read():
            async for output in llm.generate("left", LONG):
                heard.append(output)
                if len(heard) == num_read and how == "break":
                    break
                if len(heard) == num_read and how == "exception":
                    raise ValueError("reader failed")

        async def read_by_hand():
            outputs = llm.generate("left", LONG)
            for _ in range(num_read):
                heard.append(await anext(outputs))
            if how == "aclose":
                await outputs.aclose()

        task = asyncio.create_task(read_by_hand() if how in ("aclose", "drop") else read())
        while len(heard) < num_read:
            gate.open(1)
            await asyncio.sleep(0.001)
        if how == "cancel":
            task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
        expected = {"cancel": asyncio.CancelledError, "exception": ValueError}.get(how, type(None))
        assert isinstance(results[0], expected)
        await until(lambda: llm.health().num_commands or llm.health().num_unfinished_requests == 1)
        num_steps = len(engine.runner.steps)
        gate.open()
        output = await neighbour
        assert answer_of(output) == solo("neighbour", LONG)
        assert all(len(step) == 1 for step in engine.runner.steps[num_steps + 1 :]), "more than the step in flight"

    run(work)


def test_async_llm_cancel_before_the_first_token_frees_all():
    async def work(llm, engine):
        gate = Gate(engine)
        tasks = [asyncio.create_task(last(llm.generate(f"task {number}", LONG))) for number in range(20)]
        for number, task in enumerate(tasks):
            if number % 2:
                await asyncio.sleep(0)
            task.cancel()
        assert all(
            isinstance(result, asyncio.CancelledError)
            for result in await asyncio.gather(*tasks, return_exceptions=True)
        )
        gate.open()
        await until(lambda: not engine.has_unfinished() and not llm.health().num_commands)

    run(work)


def test_async_llm_slow_reader_gets_missed_tokens_at_once():
    async def work(llm, engine):
        outputs = llm.generate("slow", LONG)
        seen = [await anext(outputs)]
        await until(lambda: not engine.has_unfinished())
        seen += [output async for output in outputs]
        assert len(seen) <= 3, "what was missed comes at once"
        assert answer_of(seen[-1]) == solo("slow", LONG)

    run(work)


def test_async_llm_slow_reader_does_not_delay_others():
    async def work(llm, engine):
        slow = llm.generate("slow", LONG)
        await anext(slow)
        assert answer_of(await last(llm.generate("fast", PARAMS))) == solo("fast", PARAMS)
        await slow.aclose()

    run(work)


def test_async_llm_refused_request_raises_in_its_reader():
    async def work(llm, engine):
        with raises_code("request.prompt_empty", PromptError):
            await last(llm.generate("", PARAMS))
        with raises_code("request.token_outside_vocabulary", RequestError, value=10000):
            await last(llm.generate("x", SamplingParams(stop_token_ids=[10000])))
        gate = Gate(engine)
        tasks = [asyncio.create_task(last(llm.generate("x", PARAMS, "same"))) for _ in range(2)]
        tasks += [asyncio.create_task(last(llm.generate("x", PARAMS))) for _ in range(4)]
        await until(lambda: num_known(llm) == 6)
        gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = sorted(type(result).__name__ for result in results)
        assert kinds.count("RequestError") == 1
        assert {"RequestOutput", "RequestError"} <= set(kinds) <= {"RequestOutput", "RequestError", "QueueFullError"}
        assert isinstance(results[1], RequestError)

    run(work, max_queue=3)


def test_async_llm_full_queue_raises_queue_full_error():
    async def work(llm, engine):
        gate = Gate(engine)
        first = asyncio.create_task(last(llm.generate("first", PARAMS)))
        await asyncio.to_thread(gate.started.acquire)
        tasks = [asyncio.create_task(last(llm.generate("x", PARAMS))) for _ in range(5)]
        await until(lambda: llm.health().num_commands == 5)
        gate.open()
        results = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert [isinstance(result, QueueFullError) for result in results] == [False] * 4 + [True] * 2

    run(work, max_queue=3, max_num_seqs=1)


def test_async_llm_abort_by_request_id():
    async def work(llm, engine):
        gate = Gate(engine)
        task = asyncio.create_task(last(llm.generate("x", LONG, "name")))
        await asyncio.to_thread(gate.started.acquire)
        await llm.abort("name")
        await llm.abort("no caller")
        gate.open()
        output = await task
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")

    run(work)


def test_async_llm_failed_request_is_an_output_with_error():
    async def work(llm, engine):
        execute = engine.runner.execute

        def broken(step):
            from holdfast.request.sequence import NO_TOKEN, SequenceResult, StepResult

            results = execute(step).results
            bad = [item.sequence.num_prompt_tokens == 3 for item in step.scheduled]
            return StepResult(tuple(SequenceResult.of(NO_TOKEN) if b else r for b, r in zip(bad, results, strict=True)))

        engine.runner.execute = broken
        good, bad = await asyncio.gather(last(llm.generate("good", PARAMS)), last(llm.generate("bad", PARAMS)))
        assert answer_of(good) == solo("good", PARAMS)
        assert (bad.finished, bad.outputs[0].finish_reason) == (True, "error")
        assert "not finite" in bad.error

    run(work)


def test_async_llm_dead_engine_raises_for_every_reader():
    async def work(llm, engine):
        gate = Gate(engine)
        tasks = [asyncio.create_task(last(llm.generate(f"task {number}", LONG))) for number in range(10)]
        await asyncio.to_thread(gate.started.acquire)

        def fail(step):
            raise OSError("device lost")

        engine.runner.on_step = fail
        gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) and "device lost" in str(result) for result in results)
        assert len(set(map(id, results))) == 10
        assert not llm.health().is_alive
        with pytest.raises(EngineDeadError, match="device lost"):
            await last(llm.generate("later", PARAMS))

    run(work)


def test_async_llm_drain_finishes_running_requests():
    async def work(llm, engine):
        gate = Gate(engine)
        task = asyncio.create_task(last(llm.generate("x", PARAMS)))
        await asyncio.to_thread(gate.started.acquire)
        draining = asyncio.create_task(llm.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await last(llm.generate("y", PARAMS))
        gate.open()
        assert answer_of(await task) == solo("x", PARAMS)
        await draining
        with pytest.raises(EngineDeadError, match="was shut down"):
            llm.generate("z", PARAMS)

    run(work)


def test_async_llm_shutdown_ends_every_reader():
    async def work(llm, engine):
        gate = Gate(engine)
        tasks = [asyncio.create_task(last(llm.generate(f"task {number}", LONG))) for number in range(5)]
        await asyncio.to_thread(gate.started.acquire)
        await until(lambda: num_known(llm) == 5)
        gate.open()
        llm.shutdown()
        llm.shutdown()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {result.outputs[0].finish_reason for result in results} <= {"abort", "length"}

    run(work)


def test_async_llm_shutdown_while_tokenizing_is_no_cancellation():
    async def work(llm, engine):
        proceed = threading.Event()
        prepare = engine.prepare

        def slow(*arguments, **options):
            assert proceed.wait(20)
            return prepare(*arguments, **options)

        engine.prepare = slow
        tasks = [asyncio.create_task(last(llm.generate("x", PARAMS))) for _ in range(4)]
        await asyncio.sleep(0.05)
        tasks[3].cancel()
        llm.shutdown()
        proceed.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 3 + [asyncio.CancelledError]

    run(work)


def test_async_llm_runs_in_several_loops_in_turn():
    llm = AsyncLLM.from_engine(make_engine())
    for number in range(3):
        prompt = f"loop {number}"
        assert answer_of(asyncio.run(last(llm.generate(prompt, PARAMS)))) == solo(prompt, PARAMS)
    llm.shutdown()


def test_async_llm_dropped_ends_its_thread():
    before = threading.active_count()
    llm = AsyncLLM.from_engine(make_engine())
    asyncio.run(last(llm.generate("x", PARAMS)))
    assert threading.active_count() > before
    del llm
    gc.collect()
    for _ in range(200):
        if threading.active_count() <= before:
            break
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_async_llm_without_shutdown_lets_the_program_exit():
    code = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from engine.fakes import make_engine
from holdfast.api.async_llm import AsyncLLM
from holdfast.request.sampling_params import SamplingParams
llm = AsyncLLM.from_engine(make_engine())
async def work():
    async for output in llm.generate("x", SamplingParams(max_tokens=100)):
        return
asyncio.run(work())
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


def test_async_llm_exposes_tokenizer_memory_and_stats():
    async def work(llm, engine):
        assert llm.tokenizer is engine.tokenizer
        assert llm.memory is ACCOUNT
        assert llm.default_sampling_params().temperature == 0.6
        prompt = "a prompt of some length"
        await last(llm.generate(prompt, PARAMS))
        assert (await last(llm.generate(prompt, PARAMS))).num_cached_tokens > 0
        llm.reset_prefix_cache()
        assert (await last(llm.generate(prompt, PARAMS, cache_salt="x"))).num_cached_tokens == 0
        assert llm.stats().num_requests == 3
        assert llm.health().seconds_since_progress < 20

    run(work, generation=GenerationDefaults(temperature=0.6), memory=ACCOUNT)


def test_async_llm_unseeded_requests_repeat_in_another_run():
    """Unseeded requests repeat when the same program runs again."""

    async def work(llm, engine):
        params = SamplingParams(max_tokens=6)
        outputs = await asyncio.gather(*(last(llm.generate("same prompt", params)) for _ in range(8)))
        return [output.outputs[0].token_ids for output in outputs]

    assert run(work) == run(work)
