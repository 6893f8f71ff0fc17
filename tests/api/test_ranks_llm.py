"""LLM on several ranks: processes on a CPU with gloo; answers, accounts and ends are those of one process."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import httpx
import pytest

from cli.cli_models import MAIN, make_model
from engine.test_core_process import is_gone
from holdfast import LLM, AsyncLLM, SamplingParams
from holdfast.engine.core import EngineCore
from holdfast.engine.ranked_runner import RankedRunner
from holdfast.errors import ConfigError, EngineDeadError, HoldfastError
from holdfast.request.structured import StructuredOutputs

OPTIONS = {"device": "cpu", "dtype": "float32", "memory_limit": "1GiB", "max_model_len": 64}
EXACT = OPTIONS | {"tensor_parallel_sums": "exact"}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([1, 5, 9, 12], [1, 3], [1, 7, 7, 2], [9] * 20, [4, 4])]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.9, seed=3, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1),
    SamplingParams(temperature=0.7, top_p=0.8, seed=5, max_tokens=9, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, max_tokens=6, structured_outputs=StructuredOutputs(choice=["ab", "ba"])),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_model(tmp_path_factory.mktemp("ranks") / "tiny"))


def answers(llm: LLM) -> list:
    outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs, one.error) for one in outputs]


def pids_of(llm: LLM) -> list[int]:
    core = llm.engine.core
    assert isinstance(core, EngineCore)
    assert isinstance(core.runner, RankedRunner)
    return core.runner.pids


@pytest.fixture(scope="module")
def alone(model) -> list:
    with LLM(model, **OPTIONS) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def vectors(model) -> list[list[float]]:
    with LLM(model, **OPTIONS) as llm:
        return embeddings(llm)


def embeddings(llm: LLM) -> list[list[float]]:
    return [one.outputs.embedding for one in llm.embed(PROMPTS, use_tqdm=False)]


def test_llm_two_ranks_match_one_process(model, alone, vectors):
    with LLM(model, tensor_parallel_size=2, **EXACT) as llm:
        pids = pids_of(llm)
        assert answers(llm) == alone
        assert answers(llm) == alone, "with prefixes that are cached"
        assert embeddings(llm) == vectors
        (other,) = llm.memory.ranks
        assert other.rank == 1
        assert 0 < other.held_bytes <= other.planned_bytes
        assert llm.memory.as_dict()["ranks"] == [other._asdict()]
    assert len(pids) == 1
    assert all(map(is_gone, pids))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "stages"), [(1, 2), (2, 2)])
def test_llm_stages_with_ranks_match_one_process(model, alone, tensor, stages):
    with LLM(model, tensor_parallel_size=tensor, pipeline_parallel_size=stages, **EXACT) as llm:
        pids = pids_of(llm)
        assert answers(llm) == alone
        assert [rank.rank for rank in llm.memory.ranks] == list(range(1, tensor * stages))
    assert len(pids) == tensor * stages - 1
    assert all(map(is_gone, pids))


@pytest.mark.slow
def test_llm_default_model_on_three_ranks_matches_one(model):
    """Nine heads, three of keys: of this many ranks it can have three. Dummy weights where it was not downloaded."""
    options = OPTIONS | {"memory_limit": "6GiB", "dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=8)
    found = []
    for size in (1, 3):
        with LLM(None, tensor_parallel_size=size, tensor_parallel_sums="exact", **options) as llm:
            found.append([one.outputs[0].token_ids for one in llm.generate(PROMPTS, params, progress=False)])
    assert found[0] == found[1]


@pytest.mark.slow
def test_serve_with_two_ranks_answers(model, alone, tmp_path):
    words = (
        *("serve", model, "--port", "0", "--device", "cpu", "--dtype", "float32", "--memory-limit", "1GiB"),
        *("--max-model-len", "64", "--tensor-parallel-size", "2", "--tensor-parallel-sums", "exact"),
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", MAIN, *words], stdout=log, stderr=log)
    try:
        until, found = time.monotonic() + 120, None
        while found is None:
            assert time.monotonic() < until, (tmp_path / "log").read_text()
            assert process.poll() is None, (tmp_path / "log").read_text()
            found = re.search(r"http://127\.0\.0\.1:(\d+)", (tmp_path / "log").read_text())
            time.sleep(0.1)
        address = found[0]
        names = httpx.get(f"{address}/v1/models", timeout=60).json()["data"]
        body = {"model": names[0]["id"], "prompt": PROMPTS[0]["prompt_token_ids"], "temperature": 0, "max_tokens": 12}
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == len(alone[0][0]), answer
        ranks = httpx.get(f"{address}/memory", timeout=60).json()["memory"]["ranks"]
        assert [rank["rank"] for rank in ranks] == [1]
        descendants = [child for pid in children_of(process.pid) for child in (pid, *children_of(pid))]
        process.terminate()
        assert process.wait(30) == 0
        assert len(descendants) >= 1
        assert all(map(is_gone, descendants))
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_llm_two_engines_with_ranks_alternate(model, alone):
    with LLM(model, tensor_parallel_size=2, **EXACT) as one, LLM(model, tensor_parallel_size=2, **EXACT) as other:
        streams = [one.stream(PROMPTS[0], PARAMS[0]), other.stream(PROMPTS[0], PARAMS[0])]
        tokens: list[list[int]] = [[], []]
        for deltas in zip(*streams, strict=True):
            for place, delta in enumerate(deltas):
                tokens[place] += delta.token_ids
        assert tokens == [alone[0][0]] * 2
        pids = pids_of(one) + pids_of(other)
    assert all(map(is_gone, pids))


@pytest.mark.slow
def test_llm_core_process_with_ranks_matches_one_process(model, alone):
    with LLM(model, tensor_parallel_size=2, core_process=True, **EXACT) as llm:
        assert answers(llm) == alone
        assert [rank.rank for rank in llm.memory.ranks] == [1]
        pid = llm.engine.core.pid
        children = children_of(pid)
        assert children
    assert is_gone(pid)
    assert all(map(is_gone, children))


def children_of(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


@pytest.mark.slow
def test_async_llm_with_ranks_matches_one_process(model, alone):
    async def ask() -> list[int]:
        llm = AsyncLLM(model, tensor_parallel_size=2, **EXACT)
        try:
            return [output async for output in llm.generate(PROMPTS[0], PARAMS[0])][-1].outputs[0].token_ids
        finally:
            llm.shutdown()

    assert asyncio.run(ask()) == alone[0][0]


@pytest.mark.slow
def test_llm_dropped_engine_ends_its_ranks(model):
    llm = LLM(model, tensor_parallel_size=2, **OPTIONS)
    pids, before = pids_of(llm), threading.active_count()
    del llm
    gc.collect()
    assert all(map(is_gone, pids))
    assert threading.active_count() < before


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_llm_killed_or_stopped_rank_is_an_engine_error(model, how):
    llm = LLM(model, tensor_parallel_size=2, **OPTIONS)
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    next(stream)
    (pid,) = pids_of(llm)
    began = time.monotonic()
    os.kill(pid, how)
    with pytest.raises(EngineDeadError, match=r"rank 1 was killed|rank 1 was silent"):
        list(stream)
    assert time.monotonic() - began < 2.5
    assert is_gone(pid)
    with pytest.raises(EngineDeadError):
        llm.generate("more")
    llm.shutdown()


@pytest.mark.slow
def test_llm_ranks_start_from_a_script_without_main_guard(model, tmp_path):
    """Ranks are started as modules of ours: no caller imports the script again."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            from holdfast import LLM, SamplingParams
            print("once")
            llm = LLM({model!r}, tensor_parallel_size=2, **{EXACT!r})
            print(llm.generate([1, 5, 9, 12], SamplingParams(temperature=0.0, max_tokens=4))[0].outputs[0].token_ids)
        """)
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    lines = ended.stdout.splitlines()
    assert lines[0] == "once"
    assert len(lines) == 2
    assert lines[1].count(",") == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 3}, "3"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, "tiny has 2 layers"),
        ({"tensor_parallel_size": 2, "device": "cuda:9"}, "cuda:9"),
    ],
)
def test_llm_indivisible_ranks_are_refused_before_start(model, options, words):
    began, before = time.monotonic(), set(children_of(os.getpid()))
    with pytest.raises(HoldfastError) as caught:
        LLM(model, **(OPTIONS | options))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert set(children_of(os.getpid())) <= before
    assert time.monotonic() - began < 20


def test_llm_world_size_of_another_launcher_is_refused(model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="WORLD_SIZE=4"):
        LLM(model, tensor_parallel_size=2, **OPTIONS)


@pytest.mark.slow
def test_llm_ranks_started_by_torchrun_serve_one_engine(model, alone, tmp_path):
    """Like the one before program in every process: rank 0 answers, the other serves it and ends with it; a second engine finds no caller."""
    script = tmp_path / "launched.py"
    script.write_text(
        textwrap.dedent(f"""
            from holdfast import LLM, SamplingParams
            from holdfast.errors import ConfigError
            llm = LLM({model!r}, tensor_parallel_size=2, **{EXACT!r})
            params = SamplingParams(temperature=0.0, max_tokens=12)
            print(llm.generate({PROMPTS[0]!r}, params, progress=False)[0].outputs[0].token_ids, flush=True)
            llm.shutdown()
            try:
                LLM({model!r}, tensor_parallel_size=2, **{EXACT!r})
            except ConfigError as error:
                print(error.code, flush=True)
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert ended.stdout.splitlines() == [str(alone[0][0]), "rank.second_engine"]
