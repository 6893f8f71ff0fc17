"""Prefix hits inside a page, on a GPU: pages are copied without an allocation, and what follows is as without a cache."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from holdfast.cache.chunks import chunk_shapes
from holdfast.cache.compressed import compressed_cache
from holdfast.cache.storage import PageStorage
from holdfast.engine.scheduler import Scheduler
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import ALL_KV_FORMATS
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence, SequenceResult
from holdfast.request.step import RowCopy
from holdfast.runner.build import BuiltRunner
from kernels.exactness import same_bits
from runner.gpu_traffic import build_dummy

pytestmark = pytest.mark.gpu

BLOCK, NUM_TOKENS = 128, 900
PROMPT = [(7919 * place + place * place // 7) % 900 + 8 for place in range(NUM_TOKENS)]
PARAMS = SamplingParams(temperature=0.0, logprobs=20)


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


class Served:
    """A runner behind the real scheduler, one sequence at a time."""

    def __init__(self, built: BuiltRunner) -> None:
        self.built, runner = built, built.runner
        self.scheduler = Scheduler(runner.limits, built.storage.num_pages, True, 10, groups=runner.groups)
        self.copies: list[RowCopy] = []
        """Copies that the last sequence got."""
        self._numbers = count()

    def answer(self, prompt: list[int], *, use_prefix_cache: bool = True) -> tuple[Sequence, SequenceResult]:
        """Compute a prompt, and its next token."""
        sequence = Sequence(next(self._numbers), list(prompt), len(prompt), PARAMS, 0, 1)
        sequence.use_prefix_cache = use_prefix_cache
        self.scheduler.add(sequence)
        self.copies = []
        while True:
            live = self.scheduler.schedule()
            assert live is not None
            self.copies += [copy for one in live.step.admitted for copy in one.copies]
            self.built.runner.launch(live.step)
            result = self.built.runner.collect()
            self.scheduler.complete(live, [own.token_ids for own in result.results])
            if sequence.num_output_tokens:
                self.scheduler.finish(sequence)
                self.scheduler.check()
                return sequence, result.results[0]

    def rows(self, group: int, page: int, num_rows: int) -> Iterator[torch.Tensor]:
        """The first rows of a page, in every plane of each layer of a group."""
        storage = self.built.storage
        spec, shape = storage.spec, chunk_shapes(storage.spec, storage.num_pages)[group]
        slots = [
            shape.number([page], row // spec.page_tokens) * spec.page_tokens + row % spec.page_tokens
            for row in range(num_rows)
        ]
        for layer in spec.groups[group].layers:
            for plane in storage.planes(layer).values():
                yield plane.view(len(plane), -1).view(torch.uint8)[slots]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_prefix_hits_at_every_block_match_no_cache(kv_dtype: str, tmp_path: Path) -> None:
    built = build_dummy(tmp_path, "compressed", kv_cache_dtype=kv_dtype)
    try:
        check_hits(Served(built))
    finally:
        built.release()


def check_hits(served: Served) -> None:
    """At each block the open rows are those of their source, and the next token is that of the whole prompt."""
    assert served.scheduler.prefix.block_tokens == BLOCK
    served.answer(PROMPT)
    for end in range(BLOCK, NUM_TOKENS, BLOCK):
        prompt = [*PROMPT[: end + 1], end]
        sequence, found = served.answer(prompt)
        assert sequence.num_cached_tokens == end
        assert [copy.num_rows for copy in served.copies] == [end // BLOCK], "entries of 128"
        for copy in served.copies:
            pages = zip(
                served.rows(copy.group, copy.source, copy.num_rows),
                served.rows(copy.group, copy.target, copy.num_rows),
                strict=True,
            )
            assert all(same_bits(*pair) for pair in pages), f"{end=}"
        _, expected = served.answer(prompt, use_prefix_cache=False)
        right = dict(expected.logprobs[0].top)
        common = [(logprob, right[token]) for token, logprob in found.logprobs[0].top if token in right]
        assert len(common) >= 8
        assert all(one == pytest.approx(other, abs=0.05) for one, other in common), f"{end=}"
