"""LLM over three stages of a pipeline, processes on a CPU with gloo: answers of one process, and the end where a stage dies."""

import os
import signal
import sys
import time
from typing import Any

import pytest

from api.test_ranks_llm import OPTIONS, PROMPTS, answers, pids_of
from cli.cli_models import make_model
from engine import unlike_rank
from engine.rank_groups import with_tests
from engine.test_core_process import is_gone
from holdfast import LLM, SamplingParams
from holdfast.engine import build as engine_build
from holdfast.errors import EngineDeadError
from holdfast.runner.build import RunnerBuild

pytestmark = pytest.mark.slow
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_model(tmp_path_factory.mktemp("stages") / "tiny", num_hidden_layers=4))


def test_llm_three_stages_match_one_process(model):
    with LLM(model, **OPTIONS) as llm:
        alone = answers(llm)
    with LLM(model, pipeline_parallel_size=3, **OPTIONS) as llm:
        pids = pids_of(llm)
        assert llm.engine.core.run_ahead == 2
        assert answers(llm) == alone
        assert answers(llm) == alone, "with prefixes that are cached"
        assert [rank.rank for rank in llm.memory.ranks] == [1, 2]
        assert all(0 < rank.held_bytes <= rank.planned_bytes for rank in llm.memory.ranks)
    assert all(map(is_gone, pids))


def test_llm_two_stages_with_turboquant_and_drafts_match_one(model):
    options = OPTIONS | {"kv_cache_dtype": "turboquant_k8v4", "speculative": "ngram:3"}
    with LLM(model, **options) as llm:
        expected = answers(llm)
    with LLM(model, pipeline_parallel_size=2, **options) as llm:
        assert answers(llm) == expected


def test_llm_stages_pad_steps_to_their_common_sizes(model, monkeypatch):
    """As GPUs find them by comparing products; each rank finds others here."""
    options: dict[str, Any] = OPTIONS | {"max_num_batched_tokens": 72}
    with LLM(model, **options) as llm:
        alone = answers(llm)
    build_ranks, command = engine_build.build_ranks, (sys.executable, "-P", "-m", "engine.unlike_rank")
    monkeypatch.setenv("PYTHONPATH", with_tests(dict(os.environ))["PYTHONPATH"])
    monkeypatch.setenv(unlike_rank.UNLIKE, "rows 5 24 64 72")
    monkeypatch.setattr(
        engine_build, "build_ranks", lambda *reported, **named: build_ranks(*reported, command=command, **named)
    )
    monkeypatch.setattr(RunnerBuild, "_compare_products", RunnerBuild._compare_products)  # as it was, in the end
    unlike_rank.take_sizes(5, 16, 64, 72)
    with LLM(model, pipeline_parallel_size=3, **options) as llm:
        runner: Any = llm.engine.core.runner  # type: ignore[union-attr]
        assert runner.inner.row_sizes == (5, 64, 72)
        assert answers(llm) == alone


def test_llm_pipeline_drops_results_of_closed_streams(model):
    """A stream is left with a step in every stage; what follows is answered as if no caller had been there."""
    with LLM(model, **OPTIONS) as llm:
        alone = answers(llm)
    with LLM(model, pipeline_parallel_size=3, **OPTIONS) as llm:
        streams = [llm.stream(prompt, LONG) for prompt in PROMPTS[:3]]
        for stream in streams:
            next(stream)
        for stream in streams:
            stream.close()
        assert answers(llm) == alone


@pytest.mark.parametrize("rank", [1, 2], ids=["the middle", "the last"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_llm_dead_stage_raises_and_ends_all_stages(model, how, rank):
    llm = LLM(model, pipeline_parallel_size=3, **OPTIONS)
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    pids = pids_of(llm)
    began = time.monotonic()
    os.kill(pids[rank - 1], how)
    with pytest.raises(EngineDeadError, match=rf"rank {rank} was killed|rank {rank} was silent"):
        list(stream)
    assert time.monotonic() - began < 2.5
    llm.shutdown()
    assert all(map(is_gone, pids))
    assert time.monotonic() - began < 5.0
