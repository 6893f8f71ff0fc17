"""Steps for attention backends: fused projections of mixed sequences, their pages, and what comes out in float64."""

import random as chance
from dataclasses import dataclass, replace

import torch

from holdfast.attention.batch import Batch, LogitRows, SequenceRows
from holdfast.attention.declarations import TritonPagedDeclaration
from holdfast.attention.spec import AttentionSpec, StepBounds
from holdfast.attention.triton_paged import TritonPagedAttention
from holdfast.cache.spec import CacheSpec, uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.kernels.write_heads import HeadNorm, Rotary, write_heads_reference
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import KV_FORMATS
from kernels.exactness import random

CPU = torch.device("cpu")
BEYOND = 2**30
"""What rows of the page table hold behind a sequence's pages: whoever reads there falls far outside of every plane."""

STEP_BOUNDS = StepBounds(max_num_seqs=8, max_num_rows=2048, page_tokens=16)


@dataclass(frozen=True)
class Geometry:
    """What a model and its settings decide."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    page_tokens: int = 4
    windows: tuple[int | None, ...] = (None,)
    """Of each layer."""
    kv_dtype: str = "float32"
    dtype: torch.dtype = torch.float32
    max_model_len: int = 256
    device: torch.device = CPU

    @property
    def cache(self) -> CacheSpec:
        return uniform_cache(
            len(self.windows), KV_FORMATS[self.kv_dtype], self.num_kv_heads, self.head_dim, self.page_tokens
        )

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        dtype = str(self.dtype).removeprefix("torch.")
        return tuple(
            AttentionSpec(
                layer, self.num_heads, self.head_dim**-0.5, window, self.max_model_len, dtype, self.device.type
            )
            for layer, window in zip(self.cache.layers, self.windows, strict=True)
        )

    def storage(self, num_pages: int) -> PageStorage:
        """Pages full of NaN."""
        storage = PageStorage(self.cache, num_pages, self.device, Ledger())
        for layer in range(len(self.windows)):
            for name in ("k", "v"):
                storage.plane(layer, name).fill_(float("nan"))
        return storage

    def head_norm(self) -> HeadNorm:
        q, k = random(2, self.head_dim, seed=3).to(self.device, self.dtype)
        return HeadNorm(q, k, 1e-5)

    def rotary(self) -> Rotary:
        angle = torch.outer(torch.arange(self.max_model_len), 0.7 ** torch.arange(self.head_dim // 2)).float()
        cos, sin = angle.cos().to(self.device, self.dtype), angle.sin().to(self.device, self.dtype)
        return Rotary(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


class Text:
    """One sequence: the projections of all its tokens, for one layer, and its pages."""

    def __init__(self, geometry: Geometry, num_tokens: int, pages: list[int], seed: int) -> None:
        width = (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
        self.qkv = random(num_tokens, width, seed=seed, scale=1.5).to(geometry.dtype)
        self.pages = pages
        self.geometry = geometry

    def exact(
        self, window: int | None, head_norm: HeadNorm | None = None, rotary: Rotary | None = None
    ) -> torch.Tensor:
        """Attention of every token in float64, over keys and values as the pages hold them: [L, H * D]."""
        geometry, num_tokens = self.geometry, len(self.qkv)
        planes = [
            torch.empty(num_tokens, geometry.num_kv_heads, geometry.head_dim, dtype=getattr(torch, geometry.kv_dtype))
            for _ in range(2)
        ]
        if head_norm is not None:
            head_norm = HeadNorm(
                head_norm.q_weight_D.cpu().double(), head_norm.k_weight_D.cpu().double(), head_norm.eps
            )
        if rotary is not None:
            rotary = Rotary(rotary.cos_LD.cpu().double(), rotary.sin_LD.cpu().double())
        positions = torch.arange(num_tokens)
        q = write_heads_reference(self.qkv.double(), positions, positions, *planes, head_norm, rotary)
        group = geometry.num_heads // geometry.num_kv_heads
        k, v = (plane.double().repeat_interleave(group, 1) for plane in planes)
        scores = torch.einsum("nhd,lhd->hnl", q, k) * geometry.head_dim**-0.5
        distance = positions.unsqueeze(1) - positions
        seen = (distance >= 0) & (distance < (num_tokens if window is None else window))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hnl,lhd->nhd", weights, v).flatten(1)


def texts(geometry: Geometry, lengths: list[int], consecutive: bool, seed: int = 0) -> tuple[list[Text], int]:
    """Sequences on pages that lie in a row, or are scattered among each other and among pages that nobody has."""
    counts = [-(-length // geometry.page_tokens) for length in lengths]
    num_pages = sum(counts) + 4
    order = list(range(num_pages))
    if not consecutive:
        chance.Random(seed).shuffle(order)
    made = []
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own, order = order[:count], order[count:]
        made.append(Text(geometry, length, own, seed=seed + 10 + index))
    return made, num_pages


def make_batch(
    geometry: Geometry, parts: list[tuple[Text, int, int]], num_rows: int | None = None, wanted: list[int] | None = None
) -> tuple[Batch, torch.Tensor]:
    """A step over tokens [start, end) of each text, padded to `num_rows`, and its fused projections; `wanted` rows or all."""
    positions, slots, sequences, row = [], [], [], 0
    page_table = torch.full((len(parts) + 1, max(len(text.pages) for text, _, _ in parts) + 1), BEYOND)
    for index, (text, start, end) in enumerate(parts):
        positions += range(start, end)
        tokens = geometry.page_tokens
        slots += [text.pages[i // tokens] * tokens + i % tokens for i in range(start, end)]
        table_row = len(parts) - index  # not that of its place in the step
        page_table[table_row, : len(text.pages)] = torch.tensor(text.pages)
        sequences.append(SequenceRows(row, end - start, start, text.pages, table_row))
        row += end - start
    num_padding = 0 if num_rows is None else num_rows - row
    qkv = torch.cat([text.qkv[start:end] for text, start, end in parts])
    padding = torch.full((num_padding, qkv.shape[1]), float("nan"), dtype=qkv.dtype)
    batch = Batch(
        torch.zeros(row + num_padding, dtype=torch.int64, device=geometry.device),
        torch.tensor(positions + num_padding * [0], device=geometry.device),
        torch.tensor(slots + num_padding * [-1], device=geometry.device),
        tuple(sequences),
        None if wanted is None else logit_rows(wanted, sequences, geometry.device),
        page_table.to(geometry.device, torch.int32),
    )
    return batch, torch.cat((qkv, padding)).to(geometry.device)


def logit_rows(wanted: list[int], sequences: list[SequenceRows], device: torch.device = CPU) -> LogitRows:
    """These rows, each a sequence of one."""
    singles = []
    for index, row in enumerate(wanted):
        owner = next(one for one in sequences if one.row_start <= row < one.row_start + one.num_rows)
        position = owner.start + row - owner.row_start
        singles.append(SequenceRows(index, 1, position, owner.pages, owner.table_row))
    return LogitRows(torch.tensor(wanted, dtype=torch.int64, device=device), tuple(singles))


def build(backend_type, geometry: Geometry, storage: PageStorage, num_sms: int = 1, batch_invariant: bool = False):
    """A backend over its storage; Triton's for a small machine, so that the interpreter is done soon."""
    if backend_type is not TritonPagedAttention:
        return backend_type(geometry.specs, storage)
    return TritonPagedAttention(geometry.specs, storage, STEP_BOUNDS, num_sms, batch_invariant)


def on_triton(geometry: Geometry, device: torch.device) -> Geometry:
    """Where Triton runs: float32 in its interpreter, half precision on a GPU."""
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    return replace(geometry, device=device, dtype=dtype, kv_dtype=str(dtype).removeprefix("torch."))


def run_layer(
    geometry: Geometry,
    backend,
    qkv: torch.Tensor,
    batch: Batch,
    head_norm: HeadNorm | None = None,
    rotary: Rotary | None = None,
    layer: int = 0,
    plan=None,
    wanted_only: bool = False,
) -> torch.Tensor:
    """One layer of one step, in memory that is NaN before it."""
    num_heads, head_dim = geometry.num_heads, geometry.head_dim
    q = qkv.new_full((batch.num_rows, num_heads, head_dim), float("nan"))
    out = qkv.new_full((batch.num_rows, num_heads * head_dim), float("nan"))
    backend.write(qkv, batch, head_norm, rotary, layer, q)
    return backend.attend(q, layer, plan or backend.plan(batch), scratch_for(geometry), out, wanted_only)


def scratch_for(geometry: Geometry) -> tuple[torch.Tensor, ...]:
    """What Triton's declaration asks for, full of NaN; others do not look at it."""
    specs = TritonPagedDeclaration().scratch(geometry.specs, STEP_BOUNDS)
    return tuple(torch.full(spec.shape, float("nan"), device=geometry.device) for spec in specs)


def steps_of(made: list[Text], chunk: int, seed: int = 0) -> list[list[tuple[Text, int, int]]]:
    """Every text in chunks of at most `chunk` tokens, several texts to a step, in changing company."""
    dice = chance.Random(seed)
    done = [0] * len(made)
    steps = []
    while any(count < len(text.qkv) for count, text in zip(done, made, strict=True)):
        step = []
        for index in dice.sample(range(len(made)), len(made)):
            end = min(done[index] + dice.randint(1, chunk), len(made[index].qkv))
            if end > done[index] and (dice.random() < 0.7 or not step):
                step.append((made[index], done[index], end))
                done[index] = end
        if step:
            steps.append(step)
    return steps


def run_steps(
    backend, geometry: Geometry, made: list[Text], steps, head_norm=None, rotary=None, layer=0
) -> list[torch.Tensor]:
    """What the backend gives for every token of every text, put together from the steps."""
    outputs = [torch.full((len(text.qkv), geometry.num_heads * geometry.head_dim), float("nan")) for text in made]
    for step in steps:
        batch, qkv = make_batch(geometry, step)
        out = run_layer(geometry, backend, qkv, batch, head_norm, rotary, layer)
        assert out.shape == (batch.num_rows, geometry.num_heads * geometry.head_dim)
        assert out.dtype == geometry.dtype
        row = 0
        for text, start, end in step:
            outputs[made.index(text)][start:end] = out[row : row + end - start].cpu()
            row += end - start
    return outputs
