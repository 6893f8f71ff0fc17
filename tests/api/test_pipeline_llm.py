"""LLM over the stages of a pipeline: processes on a CPU with gloo; answers and accounts are those of one process."""

import pytest

from api.test_ranks_llm import EXACT, OPTIONS, answers, pids_of
from cli.cli_models import make_model
from engine.test_core_process import is_gone
from holdfast import LLM


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_model(tmp_path_factory.mktemp("stages") / "tiny", num_hidden_layers=4))


@pytest.fixture(scope="module")
def alone(model) -> list:
    with LLM(model, **OPTIONS) as llm:
        return answers(llm)


@pytest.mark.slow
def test_two_stages_answer_as_one_process(model, alone):
    with LLM(model, pipeline_parallel_size=2, **OPTIONS) as llm:
        pids = pids_of(llm)
        assert llm.engine.core.run_ahead == 1
        assert answers(llm) == alone
        assert answers(llm) == alone, "with prefixes that are cached"
        (other,) = llm.memory.ranks
        assert 0 < other.held_bytes <= other.planned_bytes
    assert all(map(is_gone, pids))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor_size", "num_stages"), [(1, 3), (2, 2)])
def test_more_ranks_answer_as_one_process(model, alone, tensor_size, num_stages):
    sizes = {"tensor_parallel_size": tensor_size, "pipeline_parallel_size": num_stages}
    with LLM(model, **sizes, **(EXACT if tensor_size > 1 else OPTIONS)) as llm:
        pids = pids_of(llm)
        assert len(pids) == tensor_size * num_stages - 1
        assert answers(llm) == alone
    assert all(map(is_gone, pids))


@pytest.mark.slow
def test_two_stages_with_turboquant_and_proposals(model):
    options = OPTIONS | {"kv_cache_dtype": "turboquant_k8v4", "speculative": "ngram:3"}
    with LLM(model, **options) as llm:
        expected = answers(llm)
    with LLM(model, pipeline_parallel_size=2, **options) as llm:
        assert answers(llm) == expected
