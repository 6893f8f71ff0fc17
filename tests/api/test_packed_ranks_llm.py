"""LLM on two ranks with packed weights, kept as stored and expanded: the tokens of one process with the same weights stored plain."""

from pathlib import Path

import pytest

from holdfast import LLM, SamplingParams
from loading.packed.packed_models import MODELS, MOE, make_packed, plain_of
from loading.test_kept_blocks import tensors_of, write_pair

pytest.importorskip("gguf")
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([1, 5, 9, 12, 30], [3, 14, 15, 9, 26, 5])]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def tokens_of(model: Path, **options: object) -> list[list[int]]:
    """Greedy tokens after each prompt."""
    with LLM(str(model), **(OPTIONS | options)) as llm:
        return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("packed_weights", ["as_stored", pytest.param("expanded", marks=pytest.mark.slow)])
def test_llm_packed_experts_on_two_ranks_give_the_tokens_of_one(packed_weights: str, tmp_path: Path) -> None:
    """Act-order: every rank has the scales of all groups, and its own part of the order."""
    folder = make_packed(tmp_path / "model", *MODELS["gptq"], **MOE)
    ranks = {"tensor_parallel_size": 2, "tensor_parallel_sums": "exact"}
    assert tokens_of(folder, packed_weights=packed_weights, **ranks) == tokens_of(plain_of(folder))


def test_llm_blocks_on_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    blocks, plain = write_pair(tmp_path, tensors_of("Q4_0"))
    ranks = {"tensor_parallel_size": 2, "tensor_parallel_sums": "exact"}
    kept = {"packed_weights": "as_stored", "packed_activations": "full", "tokenizer": "none"}
    assert tokens_of(blocks, **kept, **ranks) == tokens_of(plain, tokenizer="none")
