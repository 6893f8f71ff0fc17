"""Salts in every way of asking: requests share a cached prefix exactly if they have the same salt."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from engine.fakes import HIDDEN_SIZE, Gate, make_engine
from holdfast.api.async_llm import AsyncLLM
from holdfast.api.llm import LLM
from holdfast.engine.engine import Engine
from holdfast.engine.pooling import Pooling
from holdfast.loading.planning.open_model import PoolingSettings
from holdfast.request.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=2)
PROMPT = "A prompt of several pages. " * 2
MESSAGES = [{"role": "user", "content": PROMPT}]
SALTS = (None, "a", "ab", "b", "s" * 255 + "1", "s" * 255 + "2")


def engine() -> Engine:
    return make_engine(pooling=Pooling(PoolingSettings(is_embedding=True), "fake", HIDDEN_SIZE))


def given(salt: str | None, **prompt: Any) -> Any:
    return prompt if salt is None else {**prompt, "cache_salt": salt}


SYNC_WAYS: dict[str, Callable[[LLM, str | None], object]] = {
    "generate": lambda llm, salt: llm.generate(given(salt, prompt=PROMPT), PARAMS),
    "generate of ids": lambda llm, salt: llm.generate(given(salt, prompt_token_ids=list(PROMPT.encode())), PARAMS),
    "stream": lambda llm, salt: list(llm.stream(PROMPT, PARAMS, cache_salt=salt)),
    "stream_chat": lambda llm, salt: list(llm.stream_chat(MESSAGES, PARAMS, cache_salt=salt)),
    "embed": lambda llm, salt: llm.embed(given(salt, prompt=PROMPT)),
}


async def read(outputs: Any) -> None:
    async for _ in outputs:
        pass


async def prepared(llm: AsyncLLM, preparing: Any) -> None:
    await read(llm.answer(await preparing))


ASYNC_WAYS: dict[str, Callable[[AsyncLLM, str | None], Any]] = {
    "generate": lambda llm, salt: read(llm.generate(PROMPT, PARAMS, cache_salt=salt)),
    "generate of a dict": lambda llm, salt: read(llm.generate(given(salt, prompt=PROMPT), PARAMS)),
    "chat": lambda llm, salt: read(llm.chat(MESSAGES, PARAMS, cache_salt=salt)),
    "stream": lambda llm, salt: read(llm.stream(PROMPT, PARAMS, cache_salt=salt)),
    "stream_chat": lambda llm, salt: read(llm.stream_chat(MESSAGES, PARAMS, cache_salt=salt)),
    "prepare": lambda llm, salt: prepared(llm, llm.prepare(PROMPT, PARAMS, cache_salt=salt)),
    "prepare_chat": lambda llm, salt: prepared(llm, llm.prepare_chat(MESSAGES, PARAMS, cache_salt=salt)),
    "embed": lambda llm, salt: llm.embed(PROMPT, cache_salt=salt),
    "scoring": lambda llm, salt: prepared(llm, llm.prepare_score(llm.scoring([PROMPT], ["short"], cache_salt=salt), 0)),
}


def check(hits: list[int]) -> None:
    """Nothing is found by the first of each salt, and something by the second."""
    assert hits[: len(SALTS)] == [0] * len(SALTS)
    assert all(hits[len(SALTS) :])


@pytest.mark.parametrize("way", SYNC_WAYS)
def test_llm_shares_prefixes_by_salt(way):
    made = engine()
    llm, hits = LLM.from_engine(made), []
    for salt in SALTS * 2:
        before = made.stats().num_prefix_hit_tokens
        SYNC_WAYS[way](llm, salt)
        hits.append(made.stats().num_prefix_hit_tokens - before)
    llm.shutdown()
    check(hits)


@pytest.mark.parametrize("way", ASYNC_WAYS)
def test_async_llm_shares_prefixes_by_salt(way):
    async def main() -> list[int]:
        hits = []
        async with AsyncLLM.from_engine(engine()) as llm:
            for salt in SALTS * 2:
                before = llm.stats().num_prefix_hit_tokens
                await ASYNC_WAYS[way](llm, salt)
                hits.append(llm.stats().num_prefix_hit_tokens - before)
        return hits

    check(asyncio.run(main()))


def test_async_llm_salt_of_the_call_wins_over_the_prompt():
    async def main() -> list[bytes]:
        async with AsyncLLM.from_engine(engine()) as llm:
            both = await llm.prepare(given("own", prompt=PROMPT), PARAMS, cache_salt="call")
            return [both.cache_salt, (await llm.prepare(given("own", prompt=PROMPT), PARAMS)).cache_salt]

    assert asyncio.run(main()) == [b"call", b"own"]


def test_async_llm_abort_of_several_ends_each_of_them():
    """Twice, and among names of no request; the third goes on."""

    async def main() -> list[str | None]:
        made = engine()
        async with AsyncLLM.from_engine(made) as llm:
            gate = Gate(made)
            long = SamplingParams(temperature=0.0, max_tokens=40)

            async def last(name: str) -> str | None:
                return [output async for output in llm.generate(f"{name} x", long, name)][-1].outputs[0].finish_reason

            tasks = [asyncio.create_task(last(name)) for name in "abc"]
            while llm.health().num_commands + llm.health().num_unfinished_requests < 3:
                await asyncio.sleep(0.005)
            await llm.abort(["no caller", "a", "b"])
            await llm.abort(iter(["b", "a"]))
            gate.open()
            reasons = await asyncio.gather(*tasks)
            assert (llm.stats().num_running, llm.stats().num_waiting) == (0, 0)
            assert llm.stats().kv_usage == 0
        llm.shutdown()
        return reasons

    assert asyncio.run(main()) == ["abort", "abort", "length"]
