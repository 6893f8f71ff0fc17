"""Readers that go at every token, streaming or not, queued, in their prompt, in their answer, with four completions at once.

After each: what the request held is free at most two steps later, and its neighbour's tokens are those that it has alone.
"""

import asyncio

import pytest

from engine.fakes import Gate, answer_of, assert_at_rest, make_engine
from engine.leaving import (
    CASES,
    MOST_STEPS,
    MOST_STEPS_LATER,
    NEIGHBOUR,
    SAMPLE,
    SIZES,
    Case,
    advance,
    neighbours_answer,
    num_held,
    started,
    until,
)
from holdfast.api.async_llm import AsyncLLM
from holdfast.request.sampling_params import SamplingParams


async def leave(case: Case) -> int:
    """Run a case; how many steps later the pages were free."""
    engine = make_engine(run_ahead=case.run_ahead, **{**SIZES, "max_num_seqs": 1 if case.kind == "queued" else 8})
    gate, pool = Gate(engine), engine.scheduler.pool
    async with AsyncLLM.from_engine(engine) as llm:

        async def read(prompt: str, params: SamplingParams):
            if case.streams:
                return [delta async for delta in llm.stream(prompt, params)]
            return [output async for output in llm.generate(prompt, params)][-1]

        async def whole():
            return [output async for output in llm.generate("neighbour", NEIGHBOUR)][-1]

        neighbour = asyncio.ensure_future(whole())
        await started(gate)
        prompt = "p" * 200 if case.kind == "prefill" else "victim"
        params = SamplingParams(temperature=0.0, max_tokens=80 if case.kind != "prefill" else 8)
        params.n = 4 if case.kind == "four" else 1
        victim = asyncio.ensure_future(read(prompt, params))
        await until(lambda: llm.health().num_commands == 1)
        await advance(gate, 1 + case.num_steps)
        victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        num_later = 0
        while engine.scheduler.num_waiting or pool.num_owned_by_group[0] != num_held(engine):
            num_later += 1
            assert num_later <= MOST_STEPS_LATER, f"{case}: {pool.num_owned_by_group[0]} pages are held"
            await advance(gate, 1)
        assert len(engine.scheduler.running) == 1
        gate.open()
        assert answer_of(await neighbour) == neighbours_answer(), case
    assert_at_rest(engine)
    return num_later


def leave_all(cases: list[Case]) -> list[int]:
    async def run() -> list[int]:
        return [await asyncio.wait_for(leave(case), 30) for case in cases]

    return asyncio.run(run())


def test_abandoned_requests_free_pages_in_time_for_a_sample() -> None:
    assert len(SAMPLE) >= 40
    assert {case.kind for case in SAMPLE} == set(MOST_STEPS)
    assert max(leave_all(SAMPLE)) <= MOST_STEPS_LATER


@pytest.mark.slow
@pytest.mark.parametrize("kind", MOST_STEPS)
def test_abandoned_requests_free_pages_in_time_at_each_token(kind: str) -> None:
    assert len(CASES) >= 600
    assert max(leave_all([case for case in CASES if case.kind == kind])) <= MOST_STEPS_LATER
