"""Models with gated delta nets through LLM: tokens alone, in company, in pieces, preempted, forked, after cached prefixes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from holdfast import LLM, SamplingParams
from models.tiny_states import STATE_MODELS, VOCAB, save_state_model

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "tokenizer": "none",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "page_tokens": 16,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LENGTHS = (1, 30, 64, 65, 129, 190)


@cache
def folder(name: str) -> str:
    path = Path(mkdtemp())
    save_state_model(name, path)
    return str(path)


@contextmanager
def opened(name: str = "3.5", **options: Any) -> Iterator[LLM]:
    llm = LLM(model=folder(name), **(OPTIONS | options))
    try:
        yield llm
    finally:
        llm.shutdown()


def prompts() -> list[dict[str, list[int]]]:
    dice = random.Random(11)
    return [{"prompt_token_ids": [dice.randrange(3, VOCAB) for _ in range(length)]} for length in LENGTHS]


def tokens(llm: LLM, requests: list[dict[str, list[int]]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(answer.token_ids) for output in llm.generate(requests, params) for answer in output.outputs]


@cache
def alone(name: str) -> list[list[int]]:
    """Each prompt by itself, whole, in an engine without a prefix cache."""
    with opened(name, max_num_seqs=1, max_num_batched_tokens=256, enable_prefix_caching=False) as llm:
        return [tokens(llm, [prompt])[0] for prompt in prompts()]


@pytest.mark.parametrize("name", STATE_MODELS)
def test_tokens_in_company_and_pieces_are_those_alone(name: str) -> None:
    with opened(name) as llm:
        assert tokens(llm, prompts()) == alone(name)
        assert tokens(llm, prompts()) == alone(name), "after cached prefixes"


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 65, "max_num_seqs": 7},
        {"state_snapshots": 0},
        {"state_snapshots": 1, "snapshot_tokens": 64},
        {"state_snapshots": 40, "snapshot_tokens": 64},
        {"kv_cache_memory": "150KiB", "enable_prefix_caching": False},
        {"page_tokens": 64},
        {"max_step_stretch": "auto"},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
def test_tokens_do_not_depend_on_settings(options: dict[str, Any]) -> None:
    with opened(**options) as llm:
        for _ in range(2):
            assert tokens(llm, prompts()) == alone("3.5")


def test_forks_continue_the_state_of_their_prompt() -> None:
    """Greedy answers of one prompt are alike, whether they fork, find its pages, or compute it."""
    with opened() as llm:
        found = tokens(llm, prompts(), replace(GREEDY, n=3))
    assert found == [answer for answer in alone("3.5") for _ in range(3)]


def test_sampled_forks_differ_and_repeat() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=3, seed=5)
    with opened() as llm:
        first = tokens(llm, prompts()[:3], params)
    with opened(max_num_seqs=1, enable_prefix_caching=False) as llm:
        assert tokens(llm, prompts()[:3], params) == first
    assert len({tuple(answer) for answer in first}) > 3


def test_prefixes_are_found_where_a_snapshot_was_taken() -> None:
    dice = random.Random(2)
    shared = [dice.randrange(3, VOCAB) for _ in range(150)]
    requests = [{"prompt_token_ids": [*shared, *(dice.randrange(3, VOCAB) for _ in range(20))]} for _ in range(3)]
    with opened(enable_prefix_caching=False) as llm:
        expected = [tokens(llm, [one])[0] for one in requests]
    with opened(state_snapshots=4, snapshot_tokens=64) as llm:
        assert [tokens(llm, [one])[0] for one in requests] == expected
        outputs = llm.generate(requests, GREEDY)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [128] * 3


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8_block"])
def test_quantized_projections_run(scheme: str) -> None:
    """Convolutions, gates and norms stay plain; tokens do not depend on company."""
    with opened("next", quantization=scheme) as llm:
        together = tokens(llm, prompts()[1::2])
    with opened("next", quantization=scheme, max_num_seqs=1, enable_prefix_caching=False) as llm:
        assert [tokens(llm, [prompt])[0] for prompt in prompts()[1::2]] == together


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "turboquant_k8v4", "turboquant_3bit_nc"])
def test_quantized_pages_run(kv_cache_dtype: str) -> None:
    with opened(kv_cache_dtype=kv_cache_dtype, page_tokens=None) as llm:
        together = tokens(llm, prompts()[1::2])
    with opened(kv_cache_dtype=kv_cache_dtype, page_tokens=None, max_num_seqs=1, enable_prefix_caching=False) as llm:
        assert [tokens(llm, [prompt])[0] for prompt in prompts()[1::2]] == together
