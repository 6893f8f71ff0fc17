"""Memory maps: pages by group like the pool, in this process and from another."""

import asyncio
import time

import pytest

from engine.fakes import Gate, make_engine, run_all
from engine.simulated_world import World
from engine.simulation import Simulation
from engine.test_core_process import children_find_tests, make_remote
from for_each import for_each
from holdfast.api.async_llm import AsyncLLM
from holdfast.cache.groups import HOLE
from holdfast.engine.engine import Engine
from holdfast.engine.memory_map import MAX_WAITING_SHOWN, CoreMap, MemoryMap
from holdfast.errors import EngineDeadError
from holdfast.request.sampling_params import SamplingParams

__all__ = ["children_find_tests", "make_remote"]
LONG = SamplingParams(temperature=0.0, max_tokens=60)


def look(engine: Engine) -> CoreMap:
    engine.core.ask_map()
    found = engine.core.take_map()
    assert found is not None
    assert engine.core.take_map() is None, "once"
    return found


def test_pages_follow_a_request(run_ahead):
    engine = make_engine()
    before = look(engine)
    assert (before.num_pages, before.num_free, before.sequences) == (96, 96, ())
    engine.add_request("a", "abcdefghij", SamplingParams(temperature=0.0, max_tokens=10, priority=3))
    (waiting,) = look(engine).sequences
    assert (waiting.phase, waiting.pages, waiting.num_prompt_tokens, waiting.priority) == ("waiting", (0,), 10, 3)
    engine.step()
    seen = look(engine)
    (one,) = seen.sequences
    assert (one.phase, one.num_output_tokens, one.num_computed_tokens) == ("decode", 1, 10)
    assert one.pages == (seen.groups[0].num_in_use,) == (3,)
    assert seen.num_free + seen.groups[0].num_in_use + seen.groups[0].num_cached == 96
    run_all(engine)
    after = look(engine)
    assert after.groups[0].num_in_use == 0
    assert after.groups[0].num_cached == 4, "19 tokens were computed, in pages of four"


def test_those_that_wait_are_listed_in_order_and_not_all():
    engine = make_engine(max_num_seqs=1, max_queue=500)
    for number in range(100):
        engine.add_request(str(number), "abc", SamplingParams(max_tokens=4, priority=-(number % 7)))
    engine.step()
    seen = look(engine)
    assert seen.num_waiting == 99
    assert len(seen.sequences) == 1 + MAX_WAITING_SHOWN
    assert [one.priority for one in seen.sequences] == sorted(one.priority for one in seen.sequences)
    named = engine.front.named_map(seen)
    assert named.requests[0].request_id == "6"
    engine.abort("6")
    assert "6" not in [one.request_id for one in engine.front.named_map(seen).requests]


@for_each("seed", [2, 3, 6, 7, 10, 11])
def test_groups_are_counted_as_their_pages_change_hands(seed):
    simulation = Simulation(seed, World.from_seed(seed))
    step, num_looks = simulation.step, 0

    def stepped(*values, **named) -> None:
        nonlocal num_looks
        step(*values, **named)
        scheduler = simulation.scheduler
        for sequence in scheduler.running:
            held = tuple(sum(page != HOLE for page in table) for table in sequence.tables)
            assert scheduler.pages_held(sequence) == held
        pages = {page for one in scheduler.running for table in one.tables for page in table if page != HOLE}
        if not scheduler.num_in_flight:
            assert sum(scheduler.pool.num_owned_by_group) == len(pages)
            num_looks += 1
        assert sum(scheduler.pool.num_cached_by_group) == scheduler.pool.num_cached

    simulation.step = stepped
    simulation.run(400)
    assert num_looks > 50


async def maps(llm: AsyncLLM, engine: Engine) -> list[MemoryMap]:
    """Looks while a request runs, and afterwards."""
    found = [await llm.memory_map()]
    stream = llm.stream("abcdefghij", LONG, "mine")
    async for _ in stream:
        found.append(await llm.memory_map())
        await asyncio.sleep(0.07)
    await asyncio.sleep(0.25)
    found.append(await llm.memory_map())
    return found


def check_maps(found: list[MemoryMap]) -> None:
    first, *running, last = found
    assert first.num_free == first.num_pages
    assert any(one.request_id == "mine" and one.pages[0] >= 3 for seen in running for one in seen.requests)
    assert any(one.tokens_per_second > 0 for seen in running for one in seen.requests)
    assert (last.requests, last.num_in_use) == ((), 0)
    assert last.num_free + last.num_cached == last.num_pages


def test_memory_map_in_process_shows_page_holders():
    engine = make_engine(max_model_len=128, clock=time.monotonic)
    engine.runner.on_step = lambda step: time.sleep(0.01)

    async def main() -> list[MemoryMap]:
        async with AsyncLLM.from_engine(engine) as llm:
            return await maps(llm, engine)

    check_maps(asyncio.run(main()))


def test_memory_map_of_core_process_shows_page_holders(make_remote):
    engine = make_remote("slow")

    async def main() -> list[MemoryMap]:
        async with AsyncLLM.from_engine(engine) as llm:
            return await maps(llm, engine)

    check_maps(asyncio.run(main()))


def test_long_step_does_not_delay_callers():
    engine = make_engine(clock=time.monotonic)
    gate = Gate(engine)

    async def main() -> None:
        async with AsyncLLM.from_engine(engine) as llm:
            known = await llm.memory_map()
            reading = asyncio.ensure_future(anext(llm.stream("abc", LONG)))
            while not gate.started.acquire(blocking=False):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.2)
            began = time.monotonic()
            looks = await asyncio.gather(*(llm.memory_map(0.1) for _ in range(5)))
            assert time.monotonic() - began < 1.0
            assert looks == [known] * 5
            assert llm.health().num_commands == 1, "one question for all of them"
            gate.open()
            await reading
            newer = await llm.memory_map()
            assert newer is not None
            assert known is not None
            assert newer.taken_at > known.taken_at

    asyncio.run(main())


def test_memory_map_of_dead_engine_raises():
    engine = make_engine()

    async def main() -> None:
        llm = AsyncLLM.from_engine(engine)
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            await llm.memory_map()

    asyncio.run(main())
