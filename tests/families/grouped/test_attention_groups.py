"""Layers of several cache groups over one pool, in every backend: each reads and writes its own pages, and none behind a window."""

import random as chance

import pytest
import torch

from attention.steps import CPU, QUIET, STEP_BOUNDS, Geometry, Text, exact_attention, random
from holdfast.attention.backend import Batch, LayerStep
from holdfast.attention.declarations import AttentionSpec
from holdfast.cache.chunks import chunk_shapes
from holdfast.cache.groups import HOLE
from holdfast.cache.spec import CacheSpec, mixed_cache
from holdfast.cache.storage import PageStorage
from holdfast.config import Limits
from holdfast.families.grouped.declarations import TritonPagedDeclaration
from holdfast.families.grouped.native_backend import NativePagedAttention
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.families.grouped.torch_backend import TorchPagedAttention
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import KV_FORMATS
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner.step_inputs import BatchBuffers

GEOMETRY = Geometry(windows=(None, 6, 6, 11, 6, None, 6, 6), page_tokens=4)
"""Three groups: of 2, 5 and 1 layers."""
WANTED_LAYERS = (0, 1, 3)
"""One of each group: logits of every second row are wanted."""
MAX_LEN = 80
NUM_PAGES = 60


class Pages:
    """A pool that gives pages out in any order and takes back what no later token sees; it is spoiled then."""

    def __init__(self, spec: CacheSpec, storage: PageStorage, spoil: float) -> None:
        self.groups, self.storage, self.spoil = spec.cache_groups(), storage, spoil
        self.shapes = chunk_shapes(spec, NUM_PAGES)
        self.free = list(range(NUM_PAGES))
        self.dice = chance.Random(1)

    def prepare(self, sequence: Sequence, start: int, end: int) -> None:
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for place in range(min(group.first_page(start), len(table))):
                if table[place] != HOLE:
                    self.give_back(table[place])
                    table[place] = HOLE
            while len(table) < group.pages_for(end):
                table.append(self.free.pop(self.dice.randrange(len(self.free))))

    def give_back(self, page: int) -> None:
        tokens = self.storage.spec.page_tokens
        for group, shape in zip(self.storage.spec.groups, self.shapes, strict=True):
            for layer in group.layers:
                for number in shape.numbers([page]).tolist():
                    for plane in self.storage.planes(layer).values():
                        plane[number * tokens : (number + 1) * tokens] = self.spoil
        self.free.append(page)


def specs_of(spec: CacheSpec, device_kind: str) -> tuple[AttentionSpec, ...]:
    return tuple(
        GroupedAttentionSpec(
            layer,
            GEOMETRY.num_heads,
            GEOMETRY.head_dim**-0.5,
            window,
            MAX_LEN,
            "float32",
            device_kind,
            group=spec.group_of(index),
        )
        for index, (layer, window) in enumerate(zip(spec.layers, GEOMETRY.windows, strict=True))
    )


def exact(text: Text, window: int | None) -> torch.Tensor:
    widths = [GEOMETRY.num_heads, GEOMETRY.num_kv_heads, GEOMETRY.num_kv_heads]
    q, k, v = text.qkv.unflatten(-1, (-1, GEOMETRY.head_dim)).split(widths, dim=1)
    return exact_attention(q, k, v, window)


@pytest.mark.parametrize("backend_type", [TorchPagedAttention, NativePagedAttention, TritonPagedAttention])
@QUIET
def test_backend_with_cache_groups_reads_pages_of_each_layer(backend_type):
    is_triton = backend_type is TritonPagedAttention
    spec = mixed_cache([KV_FORMATS["float32"]] * 8, 2, 16, 4, GEOMETRY.windows, MAX_LEN)
    assert [len(group.layers) for group in spec.groups] == [2, 1, 5]
    assert max(group.chunks_per_page for group in spec.groups) > 2
    storage = PageStorage(spec, NUM_PAGES, CPU, Ledger())
    for layer in range(8):
        for plane in storage.planes(layer).values():
            plane.fill_(float("nan") if backend_type is TorchPagedAttention else 1e4)
    specs = specs_of(spec, "cuda" if is_triton else "cpu")
    backend = TritonPagedAttention(specs, storage, STEP_BOUNDS, 1) if is_triton else backend_type(specs, storage)
    buffers = BatchBuffers(
        Limits(4, 64, MAX_LEN, 4), CPU, Ledger(), is_shared=not is_triton, shapes=chunk_shapes(spec, NUM_PAGES)
    )
    pages = Pages(spec, storage, float("nan") if backend_type is TorchPagedAttention else 1e4)
    lengths = [71, 33, 5]
    texts = [[Text(GEOMETRY, length, [], seed=8 * n + layer) for layer in range(8)] for n, length in enumerate(lengths)]
    sequences = [
        Sequence(n, [0] * length, length, SamplingParams(), seed=0, max_tokens=1, tables=[[] for _ in spec.groups])
        for n, length in enumerate(lengths)
    ]
    outputs = [[torch.full((length, 96), float("nan")) for _ in range(8)] for length in lengths]
    done, dice = [0] * 3, chance.Random(0)
    while any(count < length for count, length in zip(done, lengths, strict=True)):
        items = []
        for n, length in enumerate(lengths):
            end = min(length, done[n] + dice.choice([1, 1, 3, 9, 17]))
            if end > done[n]:
                pages.prepare(sequences[n], done[n], end)
                items.append(ScheduledSequence.of(sequences[n], done[n], end - done[n]))
        step = LiveStep(tuple(items))
        batch = buffers.fill(step, list(range(0, step.num_tokens, 2)))
        plan = backend.plan(batch)
        for layer in range(8):
            out = run(backend, batch, plan, layer, texts, items, specs)
            if layer in WANTED_LAYERS and len(items) < 3:
                wanted = run(backend, batch, plan, layer, texts, items, specs, wanted_only=True)
                torch.testing.assert_close(wanted, out[::2], rtol=2e-5, atol=2e-5)
            row = 0
            for item in items:
                n, start, count = item.sequence.sequence_id, item.start, item.num_new_tokens
                outputs[n][layer][start : start + count] = out[row : row + count]
                row += count
        for item in items:
            done[item.sequence.sequence_id] += item.num_new_tokens
    assert any(HOLE in table for sequence in sequences for table in sequence.tables)
    for n, own in enumerate(texts):
        for layer, window in enumerate(GEOMETRY.windows):
            expected = exact(own[layer], window)
            torch.testing.assert_close(outputs[n][layer].double(), expected, rtol=2e-5, atol=2e-5)


def run(backend, batch: Batch, plan, layer: int, texts, items, specs, wanted_only: bool = False) -> torch.Tensor:
    parts = [
        texts[item.sequence.sequence_id][layer].qkv[item.start : item.start + item.num_new_tokens] for item in items
    ]
    qkv = torch.cat(parts)
    q = qkv.new_full((len(qkv), GEOMETRY.num_heads, GEOMETRY.head_dim), float("nan"))
    out = qkv.new_full((len(qkv), 96), float("nan"))
    backend.write(qkv, batch, None, None, layer, q)
    wanted = TritonPagedDeclaration().scratch(specs, STEP_BOUNDS)
    scratch = {spec.name: torch.full(spec.shape, float("nan")) for spec in wanted}
    return backend.attend(q, LayerStep(layer, plan, scratch), out, wanted_only)


def test_projections_differ_between_layers() -> None:
    """Or a layer that reads another's pages would go unnoticed."""
    assert not torch.equal(random(3, 4, seed=0), random(3, 4, seed=1))
