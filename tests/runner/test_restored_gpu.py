"""Prefix hits inside a page, on a GPU: pages are copied without an allocation, and what follows is as without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cli.cli_models import write_tokenizer
from holdfast.api.llm import LLM
from holdfast.cache.compressed import compressed_cache
from holdfast.cache.storage import PageStorage
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import ALL_KV_FORMATS
from holdfast.request.sampling_params import SamplingParams
from kernels.exactness import same_bits
from runner.gpu_traffic import SMALL, write_model

pytestmark = pytest.mark.gpu

NUM_TOKENS = 900
PROMPT = [(7919 * place + place * place // 7) % 900 + 8 for place in range(NUM_TOKENS)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=5)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_ds_v4"])
def test_copied_pages_are_equal_and_nothing_is_allocated(kv_dtype: str) -> None:
    ratios = (0, 4, 128, 4)
    formats = (ALL_KV_FORMATS[kv_dtype],) * len(ratios)
    cache = compressed_cache(formats, 512, 64, 128, ratios, frozenset({1, 3}), 128, 16)
    storage = PageStorage(cache, 6, torch.device("cuda"), Ledger())
    for columns in storage._columns:
        columns.random_(0, 256)
    before = [columns.clone() for columns in storage._columns]
    storage.copy_pages([(0, 1)])
    torch.cuda.synchronize()
    num_allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    storage.copy_pages([(5, 2), (2, 3)])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == num_allocated
    for columns, old in zip(storage._columns, before, strict=True):
        assert same_bits(columns, old[:, [0, 0, 5, 5, 4, 5]])


def answer(llm: LLM, prompt: list[int]) -> tuple[list[int], list[Any]]:
    (output,) = llm.generate([{"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)
    own = output.outputs[0]
    return list(own.token_ids), list(own.logprobs or ())


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_prefix_hits_at_every_block_match_no_cache(kv_dtype: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "compressed")
    write_tokenizer(folder)
    options = {**SMALL, "kv_cache_dtype": kv_dtype, "model": str(folder)}
    with LLM(**options) as llm:
        scheduler = llm.engine.scheduler
        assert scheduler.prefix.block_tokens == 128
        answer(llm, PROMPT)
        found = []
        for end in range(128, NUM_TOKENS, 128):
            before = scheduler.num_prefix_hit_tokens
            found.append(answer(llm, [*PROMPT[: end + 1], end]))
            assert scheduler.num_prefix_hit_tokens - before == end
    with LLM(**options, enable_prefix_caching=False) as llm:
        expected = [answer(llm, [*PROMPT[: end + 1], end]) for end in range(128, NUM_TOKENS, 128)]
    for (_, logprobs), (_, wanted) in zip(found, expected, strict=True):
        first, right = logprobs[0], wanted[0]
        common = first.keys() & right.keys()
        assert len(common) >= 3
        for token in common:
            assert first[token].logprob == pytest.approx(right[token].logprob, abs=0.05)
