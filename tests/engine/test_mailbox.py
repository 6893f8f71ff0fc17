import asyncio

import pytest

from holdfast.engine.engine_thread import Mailbox
from holdfast.request.outputs import CompletionDelta


def delta(index: int, token: int, finish_reason=None) -> CompletionDelta:
    return CompletionDelta("r", index, "x", (token,), None, finish_reason, None)


def test_a_slow_reader_gets_everything_merged():
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


def test_a_wake_up_that_comes_late_is_passed_over():
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


def test_an_error_comes_in_place_of_the_rest():
    async def work():
        mailbox = Mailbox(1)
        mailbox.put(delta(0, 1))
        mailbox.fail(ValueError("why"))
        mailbox.wake()
        with pytest.raises(ValueError, match="why"):
            await mailbox.take()

    asyncio.run(work())
