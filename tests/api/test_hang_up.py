"""A reader that leaves an AsyncLLM on a CPU: the forward pass stops at the next layer, and later answers are the same."""

import asyncio
from pathlib import Path

import pytest

from api.test_shared_prompts import opened
from holdfast.api.async_llm import AsyncLLM
from holdfast.engine.admission import TokensPrompt
from holdfast.engine.core import EngineCore
from holdfast.engine.engine import Engine
from holdfast.request.sampling_params import SamplingParams
from holdfast.runner.runner import Runner

PROMPT = TokensPrompt(prompt_token_ids=[7 + place % 90 for place in range(70)])
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)


async def answer(llm: AsyncLLM) -> tuple[list[int], list[float]]:
    """Tokens of the prompt's answer and their log-probabilities."""
    outputs = [output async for output in llm.generate(PROMPT, PARAMS)]
    chosen = outputs[-1].outputs[0]
    assert chosen.logprobs is not None
    ids = list(chosen.token_ids)
    return ids, [at[token_id].logprob for token_id, at in zip(ids, chosen.logprobs, strict=True)]


def runner_of(engine: Engine) -> Runner:
    assert isinstance(engine.core, EngineCore)
    assert isinstance(engine.core.runner, Runner)
    return engine.core.runner


async def leave_at_layer(engine: Engine, llm: AsyncLLM, num_layers: int) -> list[int]:
    """Have a reader leave after so many layers of its first step; layers that began in all."""
    model, loop = runner_of(engine).model, asyncio.get_running_loop()
    check, reader, gone = model.before_layer, asyncio.create_task(answer(llm)), asyncio.Event()
    assert check is not None
    begun: list[int] = []

    async def leave() -> None:
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        gone.set()

    def before_layer() -> None:
        begun.append(len(begun))
        if len(begun) == num_layers:
            asyncio.run_coroutine_threadsafe(leave(), loop).result(timeout=20)
        check()

    model.before_layer = before_layer
    await asyncio.wait_for(gone.wait(), 20)
    while llm.stats().num_running:
        await asyncio.sleep(0.005)
    model.before_layer = check
    return begun


@pytest.mark.parametrize("family", ["qwen3", pytest.param("latent", marks=pytest.mark.slow), "compressed_small"])
def test_async_llm_left_in_a_step_stops_at_the_next_layer(family: str, tmp_path: Path) -> None:
    async def work(engine: Engine) -> tuple[list[int], tuple[list[int], list[float]]]:
        async with AsyncLLM.from_engine(engine) as llm:
            begun = await leave_at_layer(engine, llm, 2)
            engine.scheduler.check()
            assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_pages
            return begun, await answer(llm)

    async def fresh(engine: Engine) -> tuple[list[int], list[float]]:
        async with AsyncLLM.from_engine(engine) as llm:
            return await answer(llm)

    with opened(tmp_path, family, "auto", "cpu") as engine:
        assert runner_of(engine).model.num_layers >= 2
        begun, found = asyncio.run(work(engine))
    assert begun == [0, 1], "a layer began after the reader had left"
    with opened(tmp_path, family, "auto", "cpu") as engine:
        assert found == asyncio.run(fresh(engine))
