"""Driver: calls share steps and read their own; whatever ends a call, nothing of it is left behind."""

import signal
import threading

import pytest

from engine.fakes import assert_at_rest, make_engine, solo, text_of, tokens_of
from for_each import for_each
from holdfast.engine.driver import Driver
from holdfast.engine.outputs import DeltaBuffer, OutputAssembler
from holdfast.errors import EngineDeadError, RequestError
from holdfast.request.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("run_ahead")

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


class Sink(list):
    add = list.append


def test_driver_two_calls_share_steps_and_read_their_own():
    engine = make_engine()
    driver = Driver(engine)
    one, two = Sink(), Sink()
    with driver.call() as first, driver.call() as second:
        assert first.try_submit(engine.prepare("one", PARAMS), one)
        assert second.try_submit(engine.prepare("two", PARAMS), two)
        while first.num_unfinished:
            first.pump()
        assert second.num_unfinished == 0
    assert (tokens_of(one), text_of(one)) == solo("one", PARAMS)
    assert (tokens_of(two), text_of(two)) == solo("two", PARAMS)
    assert len(engine.runner.steps) == 8
    assert_at_rest(engine)


@for_each("error", [None, ValueError, KeyboardInterrupt])
def test_driver_leaving_call_aborts_only_its_requests(error):
    engine = make_engine(max_num_seqs=2)
    driver = Driver(engine)
    kept, left = Sink(), [Sink() for _ in range(3)]

    def leave():
        with driver.call() as call:
            for sink in left:
                call.try_submit(engine.prepare("left", PARAMS), sink)
            call.pump()
            call.pump()
            if error is not None:
                raise error

    with driver.call() as other:
        other.try_submit(engine.prepare("kept", PARAMS), kept)
        if error is None:
            leave()
        else:
            with pytest.raises(error):
                leave()
        assert all(sink[-1].finish_reason == "abort" for sink in left)
        assert engine.stats().num_unfinished_requests == 1
        while other.num_unfinished:
            other.pump()
    assert (tokens_of(kept), text_of(kept)) == solo("kept", PARAMS)
    assert_at_rest(engine)


def test_driver_leaves_no_step_in_flight_when_the_last_call_ends():
    """Steps of others go on when one ends."""
    engine = make_engine(run_ahead=1)
    driver = Driver(engine)
    with driver.call() as other:
        other.try_submit(engine.prepare("kept", SamplingParams(max_tokens=50)), Sink())
        with driver.call() as call:
            call.try_submit(engine.prepare("x", SamplingParams(max_tokens=50)), Sink())
            call.pump()
            call.pump()
        assert engine.scheduler.num_in_flight > 0
        other.pump()
    assert engine.scheduler.num_in_flight == 0
    assert engine.scheduler.pool.num_available == engine.runner.num_pages


def test_driver_full_queue_returns_false_and_leaves_no_trace():
    engine = make_engine(max_queue=2)
    driver = Driver(engine)
    with driver.call() as call:
        assert [call.try_submit(engine.prepare("x", PARAMS), Sink()) for _ in range(4)] == [True, True, False, False]
        assert call.num_unfinished == 2
        call.pump()
        assert call.try_submit(engine.prepare("x", PARAMS), Sink())
    assert driver.num_unfinished == 0
    assert_at_rest(engine)


def test_another_refusal_is_an_error_and_leaves_no_trace():
    engine = make_engine()
    driver = Driver(engine)

    def refuse(sequence):
        raise RequestError("value.empty", name="x")

    engine.scheduler.add = refuse
    with driver.call() as call:
        with pytest.raises(RequestError):
            call.try_submit(engine.prepare("x", PARAMS), Sink())
        assert call.num_unfinished == 0
    assert driver.num_unfinished == 0


def test_ctrl_c_between_queueing_and_hearing_of_it_leaks_nothing():
    engine = make_engine()
    driver = Driver(engine)
    add = engine.scheduler.add

    def interrupted(sequence):
        signal.raise_signal(signal.SIGINT)
        add(sequence)

    engine.scheduler.add = interrupted
    with pytest.raises(KeyboardInterrupt), driver.call() as call:
        call.try_submit(engine.prepare("x", PARAMS), Sink())
    assert driver.num_unfinished == 0
    assert_at_rest(engine)


def test_death_is_raised_after_every_request_failed():
    engine = make_engine()
    driver = Driver(engine)
    sinks = [Sink(), Sink()]

    def fail(step):
        raise OSError("gone")

    with driver.call() as first, driver.call() as second:
        first.try_submit(engine.prepare("x", PARAMS), sinks[0])
        second.try_submit(engine.prepare("x", PARAMS), sinks[1])
        engine.runner.on_step = fail
        with pytest.raises(EngineDeadError, match="gone"):
            first.pump()
        assert [sink[-1].finish_reason for sink in sinks] == ["error", "error"]
        with pytest.raises(EngineDeadError, match="gone"):
            second.pump()
        assert second.num_unfinished == 0


def test_take_says_when_it_is_over():
    engine = make_engine()
    driver, buffer = Driver(engine), DeltaBuffer()
    with driver.call() as call:
        call.try_submit(engine.prepare("x", SamplingParams(max_tokens=2)), buffer)
        call.pump()
        deltas, is_over = call.take(buffer)
        assert (len(deltas), is_over) == (1, False)
        call.pump()
        deltas, is_over = call.take(buffer)
        assert (len(deltas), is_over) == (1, True)


def test_threads_take_turns():
    engine = make_engine(max_queue=200)
    driver = Driver(engine)
    found: dict[str, tuple[list[int], str]] = {}

    def work(prompt: str) -> None:
        assembler = OutputAssembler(prompt, [], 1)
        with driver.call() as call:
            while not call.try_submit(engine.prepare(prompt, PARAMS), assembler):
                call.pump()
            while call.num_unfinished:
                call.pump()
        completion = assembler.output().outputs[0]
        found[prompt] = completion.token_ids, completion.text

    prompts = [f"thread {number}" for number in range(16)]
    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {prompt: solo(prompt, PARAMS) for prompt in prompts}
    assert_at_rest(engine)


def test_prefixes_are_forgotten_between_two_steps():
    engine = make_engine()
    driver = Driver(engine)
    in_step, may_go_on = threading.Event(), threading.Event()
    execute, forgotten_at = engine.runner.execute, []

    def slow(step):
        in_step.set()
        assert may_go_on.wait(10)
        return execute(step)

    def forget():
        driver.reset_prefix_cache()
        forgotten_at.append(len(engine.runner.steps))

    engine.runner.execute = slow
    with driver.call() as call:
        call.try_submit(engine.prepare("one", PARAMS), Sink())
        stepping, forgetting = threading.Thread(target=call.pump), threading.Thread(target=forget)
        stepping.start()
        assert in_step.wait(10)
        forgetting.start()
        forgetting.join(0.1)
        assert forgotten_at == []
        may_go_on.set()
        stepping.join(10)
        forgetting.join(10)
    assert forgotten_at == [1]
