"""EngineThread and Mailbox: commands between two steps, readers in any loop, and an end for everybody."""

import asyncio
import threading

import pytest

from engine.fakes import Gate, assert_at_rest, make_engine, solo, text_of, tokens_of
from error_codes import raises_code
from for_each import for_each
from holdfast.engine.engine_thread import EngineThread, Mailbox
from holdfast.errors import EngineDeadError, RequestError
from holdfast.request.outputs import CompletionDelta
from holdfast.request.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("run_ahead")


def delta(index: int, token: int, finish_reason=None) -> CompletionDelta:
    return CompletionDelta("r", index, "x", (token,), None, finish_reason, None)


def test_mailbox_slow_reader_gets_merged_deltas():
    async def work():
        mailbox = Mailbox(2)
        for token in range(1000):
            mailbox.put(delta(token % 2, token))
        mailbox.wake()
        deltas, is_last = await mailbox.take()
        assert [len(item.token_ids) for item in deltas] == [500, 500]
        assert not is_last
        mailbox.put(delta(0, 1, "length"))
        assert not mailbox.is_complete
        mailbox.put(delta(1, 2, "stop"))
        assert mailbox.is_complete
        mailbox.wake()
        deltas, is_last = await mailbox.take()
        assert [item.finish_reason for item in deltas] == ["length", "stop"]
        assert is_last

    asyncio.run(work())


def test_mailbox_late_wake_is_ignored():
    async def work():
        mailbox = Mailbox(1)
        mailbox.put(delta(0, 1))
        mailbox.wake()
        await mailbox.take()
        mailbox.wake()
        waiting = asyncio.ensure_future(mailbox.take())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        mailbox.put(delta(0, 2))
        mailbox.wake()
        deltas, _ = await waiting
        assert deltas[0].token_ids == (2,)

    asyncio.run(work())


def test_mailbox_failure_replaces_unread_deltas():
    async def work():
        mailbox = Mailbox(1)
        mailbox.put(delta(0, 1))
        mailbox.fail(ValueError("why"))
        mailbox.wake()
        with pytest.raises(ValueError, match="why"):
            await mailbox.take()

    asyncio.run(work())


PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


def run(work) -> None:
    """A test that would hang fails."""
    asyncio.run(asyncio.wait_for(work(), 30))


def ended(thread: EngineThread) -> None:
    thread.stop()
    thread.join()
    assert_at_rest(thread.engine)
    assert thread.health().num_unfinished_requests == 0


async def read(mailbox: Mailbox):
    heard, is_last = [], False
    while not is_last:
        deltas, is_last = await mailbox.take()
        heard += deltas
    return heard


def submitted(thread: EngineThread, prompt: str, name: str | None = None, params: SamplingParams = PARAMS) -> Mailbox:
    mailbox = Mailbox(params.n)
    thread.submit(thread.engine.prepare(prompt, params), name, mailbox)
    return mailbox


def test_requests_are_answered():
    async def work():
        thread = EngineThread(make_engine())
        heard = await read(submitted(thread, "Hello"))
        assert (tokens_of(heard), text_of(heard)) == solo("Hello", PARAMS)
        ended(thread)

    run(work)


def test_engine_thread_wakes_every_reader_of_a_loop():
    """Two readers wait at once; each step has something for both, and ends both at once."""

    async def work():
        engine = make_engine()
        gate = Gate(engine)
        thread = EngineThread(engine)
        several = SamplingParams(temperature=0.0, max_tokens=8, n=3)
        mailboxes = [submitted(thread, "one"), submitted(thread, "two"), submitted(thread, "three", params=several)]
        gate.started.acquire()
        assert thread.stats().num_waiting + thread.stats().num_running == 5
        reading = asyncio.gather(*map(read, mailboxes))
        await asyncio.sleep(0.01)
        gate.open()
        heard = await asyncio.wait_for(reading, 10)
        assert [tokens_of(own) for own in heard[:2]] == [solo(prompt, PARAMS)[0] for prompt in ("one", "two")]
        assert sorted(delta.index for delta in heard[2] if delta.finish_reason) == [0, 1, 2]
        assert (thread.stats().num_waiting, thread.stats().num_running) == (0, 0)
        ended(thread)

    run(work)


def test_engine_thread_refusal_reaches_only_its_reader():
    async def work():
        engine = make_engine()
        gate = Gate(engine)
        thread = EngineThread(engine)
        first, second = submitted(thread, "one", "same name"), submitted(thread, "two", "same name")
        gate.open()
        with raises_code("request.request_id_in_use", RequestError):
            await read(second)
        assert tokens_of(await read(first)) == solo("one", PARAMS)[0]
        ended(thread)

    run(work)


def test_withdrawal_takes_effect_before_the_next_step(run_ahead):
    async def work():
        engine = make_engine()
        gate = Gate(engine)
        thread = EngineThread(engine)
        kept, gone = submitted(thread, "kept"), submitted(thread, "gone")
        gate.started.acquire()
        gate.open(2)
        gate.started.acquire()
        gate.started.acquire()
        thread.withdraw(gone)
        gate.open()
        await read(kept)
        ran = [{sequence_id for sequence_id, _, _ in step} for step in engine.runner.steps]
        assert ran[: 3 + run_ahead] == [{0, 1}] * (3 + run_ahead)
        assert ran[3 + run_ahead :] == [{0}] * (5 - run_ahead)
        ended(thread)

    run(work)


def test_late_withdrawal_spares_a_new_request_of_its_name():
    async def work():
        thread = EngineThread(make_engine())
        old = submitted(thread, "old", "name")
        await read(old)
        new = submitted(thread, "new", "name")
        thread.withdraw(old)
        assert tokens_of(await read(new)) == solo("new", PARAMS)[0]
        ended(thread)

    run(work)


def test_abort_by_name_gives_the_reader_an_end(run_ahead):
    async def work():
        engine = make_engine()
        gate = Gate(engine)
        thread = EngineThread(engine)
        mailbox = submitted(thread, "x", "name", SamplingParams(n=2, max_tokens=20))
        gate.started.acquire()
        thread.abort("name")
        thread.abort("unknown")
        gate.open()
        heard = await read(mailbox)
        assert [delta.finish_reason for delta in heard[-2:]] == ["abort", "abort"]
        ended(thread)
        assert len(engine.runner.steps) == 1 + run_ahead, "what runs ahead has to end"

    run(work)


def test_engine_thread_that_is_idle_leaves_no_step_in_flight():
    async def work():
        engine = make_engine(run_ahead=1)
        thread = EngineThread(engine)
        for number in range(2):
            gate = Gate(engine)
            mailbox = submitted(thread, "x", f"name {number}", SamplingParams(max_tokens=50))
            gate.started.acquire()
            thread.abort(f"name {number}")
            gate.open()
            await read(mailbox)
            for _ in range(1000):
                if engine.scheduler.num_in_flight == 0:
                    break
                await asyncio.sleep(0.005)
            assert engine.scheduler.num_in_flight == 0
            assert engine.scheduler.pool.num_available == engine.runner.num_pages
        ended(thread)

    run(work)


def test_engine_thread_reader_of_closed_loop_is_aborted():
    engine = make_engine()
    gate = Gate(engine)
    thread = EngineThread(engine)

    async def leave():
        submitted(thread, "left behind", params=SamplingParams(max_tokens=100))

    asyncio.run(leave())
    gate.open()
    for _ in range(2000):
        if not engine.has_unfinished():
            break
        threading.Event().wait(0.01)
    assert len(engine.runner.steps) <= 2
    ended(thread)


def test_engine_thread_serves_several_loops():
    thread = EngineThread(make_engine())
    found = {}

    def loop(prompt: str) -> None:
        async def work():
            found[prompt] = tokens_of(await read(submitted(thread, prompt)))

        asyncio.run(work())

    loops = [threading.Thread(target=loop, args=(f"loop {number}",)) for number in range(4)]
    for one in loops:
        one.start()
    for one in loops:
        one.join()
    assert found == {prompt: solo(prompt, PARAMS)[0] for prompt in found}
    assert len(found) == 4
    ended(thread)


def test_drain_finishes_what_there_is_and_takes_no_more():
    async def work():
        engine = make_engine()
        gate = Gate(engine)
        thread = EngineThread(engine)
        mailbox = submitted(thread, "x")
        gate.started.acquire()
        thread.drain()
        with pytest.raises(EngineDeadError, match="shutting down"):
            submitted(thread, "y")
        gate.open()
        assert tokens_of(await read(mailbox)) == solo("x", PARAMS)[0]
        thread.join()
        assert_at_rest(engine)
        assert not thread.health().is_alive

    run(work)


def test_engine_thread_stop_aborts_queued_and_running():
    async def work():
        engine = make_engine(max_num_seqs=1)
        gate = Gate(engine)
        thread = EngineThread(engine)
        mailboxes = [submitted(thread, "x") for _ in range(3)]
        gate.started.acquire()
        thread.stop()
        gate.open()
        heard = [await read(mailbox) for mailbox in mailboxes]
        assert [deltas[-1].finish_reason for deltas in heard] == ["abort"] * 3
        thread.join()
        assert_at_rest(engine)
        thread.stop()
        thread.join()

    run(work)


@for_each("where", ["execute", "finish", "schedule"])
def test_engine_thread_death_reaches_every_reader(where):
    async def work():
        engine = make_engine(max_num_seqs=1)
        gate = Gate(engine)

        def fail(*arguments):
            raise OSError("device lost")

        def wait_and_fail(step):
            gate.wait(step)
            fail()

        if where == "execute":
            engine.runner.on_step = wait_and_fail
        elif where == "finish":
            engine.scheduler.finish = fail
        thread = EngineThread(engine)
        mailboxes = [submitted(thread, "x", params=SamplingParams(max_tokens=1)) for _ in range(3)]
        gate.started.acquire()
        if where == "schedule":
            engine.scheduler.schedule = fail
        # This one is still on its way in when the engine dies.
        mailboxes.append(submitted(thread, "late"))
        gate.open()
        if where == "schedule":
            # Its only step was good.
            assert len(tokens_of(await read(mailboxes.pop(0)))) == 1
        for mailbox in mailboxes:
            with pytest.raises(EngineDeadError, match="device lost"):
                await asyncio.wait_for(read(mailbox), 10)
        thread.join()
        assert not thread.health().is_alive
        with pytest.raises(EngineDeadError, match="device lost"):
            submitted(thread, "later")
        thread.stop()
        thread.join()

    run(work)


def test_health_is_the_age_of_the_last_step():
    async def work():
        now = [100.0]
        engine = make_engine()
        gate = Gate(engine)
        thread = EngineThread(engine, clock=lambda: now[0])
        assert (thread.health().is_alive, thread.health().seconds_since_progress) == (True, 0.0)
        now[0] += 50
        assert thread.health().seconds_since_progress == 0.0, "nothing to do is no hang"
        mailbox = submitted(thread, "x")
        gate.started.acquire()
        assert thread.health().num_unfinished_requests == 1
        assert thread.health().seconds_since_progress == 0.0
        now[0] += 85
        assert thread.health().seconds_since_progress == 85.0
        gate.open(1)
        gate.started.acquire()
        assert thread.health().seconds_since_progress == 0.0
        gate.open()
        await read(mailbox)
        ended(thread)
        now[0] += 5
        assert thread.health().seconds_since_progress == 0.0

    run(work)


def test_engine_thread_resets_prefix_cache():
    async def work():
        thread = EngineThread(make_engine())
        prompt = "a prompt of some length"
        await read(submitted(thread, prompt))
        assert (await read(submitted(thread, prompt)))[-1].num_cached_tokens > 0
        thread.reset_prefix_cache()
        assert (await read(submitted(thread, prompt)))[-1].num_cached_tokens == 0
        ended(thread)

    run(work)
