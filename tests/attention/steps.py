"""Steps for attention backends: fused projections of mixed sequences, their pages, and what comes out in float64."""

import random as chance
from dataclasses import dataclass

import torch

from holdfast.attention.backend import AttentionSpec
from holdfast.attention.batch import Batch, SequenceRows
from holdfast.cache.spec import CacheSpec, uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.kernels.write_heads import HeadNorm, Rotary, write_heads_reference
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import KV_FORMATS
from kernels.exactness import random

CPU = torch.device("cpu")


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

    @property
    def cache(self) -> CacheSpec:
        return uniform_cache(
            len(self.windows), KV_FORMATS[self.kv_dtype], self.num_kv_heads, self.head_dim, self.page_tokens
        )

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(
            AttentionSpec(layer, self.num_heads, self.head_dim**-0.5, window, self.max_model_len, self.dtype, CPU)
            for layer, window in zip(self.cache.layers, self.windows, strict=True)
        )

    def storage(self, num_pages: int) -> PageStorage:
        """Pages full of NaN."""
        storage = PageStorage(self.cache, num_pages, CPU, Ledger())
        for layer in range(len(self.windows)):
            for name in ("k", "v"):
                storage.plane(layer, name).fill_(float("nan"))
        return storage

    def head_norm(self) -> HeadNorm:
        q, k = random(2, self.head_dim, seed=3).to(self.dtype)
        return HeadNorm(q, k, 1e-5)

    def rotary(self) -> Rotary:
        angle = torch.outer(torch.arange(self.max_model_len), 0.7 ** torch.arange(self.head_dim // 2)).float()
        cos, sin = angle.cos(), angle.sin()
        return Rotary(torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype))


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
            head_norm = HeadNorm(head_norm.q_weight_D.double(), head_norm.k_weight_D.double(), head_norm.eps)
        if rotary is not None:
            rotary = Rotary(rotary.cos_LD.double(), rotary.sin_LD.double())
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


def make_batch(geometry: Geometry, parts: list[tuple[Text, int, int]]) -> tuple[Batch, torch.Tensor]:
    """A step over tokens [start, end) of each text, and its fused projections."""
    positions, slots, sequences, row = [], [], [], 0
    for text, start, end in parts:
        positions += range(start, end)
        tokens = geometry.page_tokens
        slots += [text.pages[i // tokens] * tokens + i % tokens for i in range(start, end)]
        sequences.append(SequenceRows(row, end - start, start, text.pages))
        row += end - start
    batch = Batch(
        torch.zeros(row, dtype=torch.int64), torch.tensor(positions), torch.tensor(slots), tuple(sequences), None
    )
    return batch, torch.cat([text.qkv[start:end] for text, start, end in parts])


def run_layer(backend, qkv, batch, head_norm=None, rotary=None, layer=0) -> torch.Tensor:
    """One layer of one step, every row attending."""
    return backend.attend(backend.write(qkv, batch, head_norm, rotary, layer), layer, backend.plan(batch.sequences))


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
        out = run_layer(backend, qkv, batch, head_norm, rotary, layer)
        assert out.shape == (batch.num_rows, geometry.num_heads * geometry.head_dim)
        assert out.dtype == geometry.dtype
        row = 0
        for text, start, end in step:
            outputs[made.index(text)][start:end] = out[row : row + end - start]
            row += end - start
    return outputs
