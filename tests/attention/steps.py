"""Steps for attention backends: fused projections of mixed sequences, their pages, and what comes out in float64."""

import random as chance
from dataclasses import dataclass, replace

import pytest
import torch

from holdfast.attention.backend import Batch, LayerStep, LogitRows, SequenceRows
from holdfast.attention.declarations import AttentionSpec, StepBounds
from holdfast.cache.spec import CacheSpec, LayerCache
from holdfast.cache.storage import PageStorage
from holdfast.families.grouped.declarations import TritonPagedDeclaration
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary, write_kv_reference
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import KV_FORMATS, KVFormat
from holdfast.quant.kv_quantize import dequantize_keys, dequantize_values, quantize_keys, quantize_values, rotate_heads
from kernels.exactness import random
from kernels.paged_cases import odd_sinks

CPU = torch.device("cpu")
BEYOND = 2**30
"""What rows of the page table hold behind a sequence's pages: any caller that reads there falls far outside of every plane."""

# Numpy, on which the interpreter runs, warns where minus infinity is the right answer.
QUIET = pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
STEP_BOUNDS = StepBounds(max_num_seqs=8, max_num_rows=2048, page_tokens=16)


@dataclass(frozen=True)
class Geometry:
    """What a model and its settings decide."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    page_tokens: int = 4
    windows: tuple[int | None, ...] = (None,)
    """For each layer."""
    kv_dtype: str = "float32"
    """For every layer, or of each where several are named: "float32 fp8 float32"."""
    dtype: torch.dtype = torch.float32
    max_model_len: int = 256
    device: torch.device = CPU
    softcap: float | None = None
    has_sinks: bool = False
    has_lane: bool = False
    """All rows are of prompts, which may read quantized pages through the lane."""

    @property
    def formats(self) -> list[KVFormat]:
        """For each layer."""
        names = self.kv_dtype.split()
        return [KV_FORMATS[name] for name in (names * len(self.windows) if len(names) == 1 else names)]

    @property
    def cache(self) -> CacheSpec:
        layers = (
            LayerCache(layer, "attention", kv_format, self.num_kv_heads, self.head_dim)
            for layer, kv_format in enumerate(self.formats)
        )
        return CacheSpec(self.page_tokens, tuple(layers))

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        dtype = str(self.dtype).removeprefix("torch.")
        return tuple(
            GroupedAttentionSpec(
                layer,
                self.num_heads,
                self.head_dim**-0.5,
                window,
                self.max_model_len,
                dtype,
                self.device.type,
                softcap=self.softcap,
                has_sinks=self.has_sinks,
                has_lane=self.has_lane and layer.format.is_quantized,
            )
            for layer, window in zip(self.cache.layers, self.windows, strict=True)
        )

    @property
    def sinks(self) -> list[torch.Tensor | None]:
        """For each layer, on its device."""
        if not self.has_sinks:
            return [None] * len(self.windows)
        return [odd_sinks(self.num_heads, seed=layer).to(self.device) for layer in range(len(self.windows))]

    def storage(self, num_pages: int) -> PageStorage:
        """Pages full of NaN; a byte of codes is one too where it is a number, and its scale always is."""
        storage = PageStorage(self.cache, num_pages, self.device, Ledger())
        for layer, cache in enumerate(self.cache.layers):
            for plane in cache.planes:
                storage.plane(layer, plane.name).fill_(255 if plane.dtype == "uint8" else float("nan"))
        return storage

    def head_norm(self) -> HeadNorm:
        q, k = random(2, self.head_dim, seed=3).to(self.device, self.dtype)
        return HeadNorm(q, k, 1e-5)

    def rotary(self) -> Rotary:
        """A row for each position: a step takes those of its tokens."""
        angle = torch.outer(torch.arange(self.max_model_len), 0.7 ** torch.arange(self.head_dim // 2)).float()
        cos, sin = angle.cos().to(self.device, self.dtype), angle.sin().to(self.device, self.dtype)
        return Rotary(cos, sin)


class Text:
    """One sequence: the projections of all its tokens, for one layer, and its pages."""

    def __init__(self, geometry: Geometry, num_tokens: int, pages: list[int], seed: int) -> None:
        width = (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
        self.qkv = random(num_tokens, width, seed=seed, scale=1.5).to(geometry.dtype)
        self.pages = pages
        self.geometry = geometry

    def exact(
        self,
        window: int | None,
        head_norm: HeadNorm | None = None,
        rotary: Rotary | None = None,
        layer: int = 0,
        k_mean: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of every token in float64, over keys and values as the pages hold them: [L, H * D]."""
        geometry, num_tokens = self.geometry, len(self.qkv)
        kv_format = geometry.formats[layer]
        computed = geometry.dtype if kv_format.is_quantized else torch.float64
        stored = geometry.dtype if kv_format.is_quantized else getattr(torch, kv_format.key_dtype)
        planes = [torch.empty(num_tokens, geometry.num_kv_heads, geometry.head_dim, dtype=stored) for _ in range(2)]
        if head_norm is not None:
            weights = head_norm.q_weight_D.cpu().to(computed), head_norm.k_weight_D.cpu().to(computed)
            head_norm = HeadNorm(*weights, head_norm.eps)
        if rotary is not None:
            rotary = Rotary(rotary.cos_TP.cpu().to(computed), rotary.sin_TP.cpu().to(computed))
        q = write_kv_reference(self.qkv.to(computed), torch.arange(num_tokens), *planes, head_norm, rotary)
        k, v = planes
        if kv_format.is_quantized:
            q, k, v = quantized(q, k, v, kv_format, k_mean)
        return exact_attention(q, k, v, window, geometry.sinks[layer], geometry.softcap)


def quantized(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_format: KVFormat, k_mean: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries as they are attended with, and keys and values as their codes have them; values in their own space."""
    key_bits, value_bits, head_dim = kv_format.key_bits, kv_format.value_bits, k.shape[-1]
    assert key_bits is not None
    assert value_bits is not None
    if key_bits < 8:
        q, k = rotate_heads(q).to(q.dtype), rotate_heads(k)
    k = k if k_mean is None else k.float() - k_mean
    k = dequantize_keys(quantize_keys(k, key_bits), key_bits, head_dim)
    v = dequantize_values(quantize_values(rotate_heads(v) if value_bits < 8 else v, value_bits), value_bits, head_dim)
    return q, k, rotate_heads(v) if value_bits < 8 else v


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """[L, H * D] in float64, of [L, H, D] to twice [L, K, D]."""
    num_tokens, num_heads, head_dim = q.shape
    k, v = (x.double().repeat_interleave(num_heads // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * head_dim**-0.5
    positions = torch.arange(num_tokens)
    distance = positions.unsqueeze(1) - positions
    seen = (distance >= 0) & (distance < (num_tokens if window is None else window))
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    sums = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        sums = torch.logaddexp(sums, sinks.cpu().double().view(-1, 1, 1))
    weights = (scores - sums).exp()
    return torch.einsum("hnl,lhd->nhd", weights, v).flatten(1)


def texts(geometry: Geometry, lengths: list[int], consecutive: bool, seed: int = 0) -> tuple[list[Text], int]:
    """Sequences on pages that lie in a row, or are scattered among each other and among pages that no one has."""
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
    geometry: Geometry,
    parts: list[tuple[Text, int, int]],
    num_rows: int | None = None,
    wanted: list[int] | None = None,
    num_prompt: int = 0,
) -> tuple[Batch, torch.Tensor]:
    """A step over tokens [start, end) of each text, padded to `num_rows`, and its fused projections; `wanted` rows or all.

    The first `num_prompt` of every text are its prompt; then pages behind the window of the first row are given back.
    """
    positions, slots, sequences, row = [], [], [], 0
    page_table = torch.full((len(parts) + 1, max(len(text.pages) for text, _, _ in parts) + 1), BEYOND)
    for index, (text, start, end) in enumerate(parts):
        positions += range(start, end)
        tokens = geometry.page_tokens
        slots += [text.pages[i // tokens] * tokens + i % tokens for i in range(start, end)]
        table_row = len(parts) - index  # not that of its place in the step
        page_table[table_row, : len(text.pages)] = torch.tensor(text.pages)
        if num_prompt and geometry.windows[0] is not None:
            page_table[table_row, : max(0, start - geometry.windows[0] + 1) // tokens] = BEYOND
        sequences.append(
            SequenceRows(row, end - start, start, (text.pages,), table_row, start < num_prompt or geometry.has_lane)
        )
        row += end - start
    num_padding = 0 if num_rows is None else num_rows - row
    qkv = torch.cat([text.qkv[start:end] for text, start, end in parts])
    padding = torch.full((num_padding, qkv.shape[1]), float("nan"), dtype=qkv.dtype)
    batch = Batch(
        torch.zeros(row + num_padding, dtype=torch.int64, device=geometry.device),
        torch.tensor(positions + num_padding * [0], device=geometry.device),
        torch.tensor([slots + num_padding * [-1]], device=geometry.device),
        tuple(sequences),
        None if wanted is None else logit_rows(wanted, sequences, geometry.device),
        (page_table.to(geometry.device, torch.int32),),
    )
    return batch, torch.cat((qkv, padding)).to(geometry.device)


def logit_rows(wanted: list[int], sequences: list[SequenceRows], device: torch.device = CPU) -> LogitRows:
    """These rows, each a sequence of one."""
    singles = []
    for index, row in enumerate(wanted):
        owner = next(one for one in sequences if one.row_start <= row < one.row_start + one.num_rows)
        position = owner.start + row - owner.row_start
        singles.append(SequenceRows(index, 1, position, owner.tables, owner.table_row))
    return LogitRows(torch.tensor(wanted, dtype=torch.int64, device=device), tuple(singles))


def build(backend_type, geometry: Geometry, storage: PageStorage, num_sms: int = 1, batch_invariant: bool = False):
    """A backend over its storage; Triton's for a small machine, so that the interpreter is done soon."""
    if backend_type is not TritonPagedAttention:
        return backend_type(geometry.specs, storage, sinks=geometry.sinks)
    return TritonPagedAttention(geometry.specs, storage, STEP_BOUNDS, num_sms, batch_invariant, sinks=geometry.sinks)


def on_triton(geometry: Geometry, device: torch.device) -> Geometry:
    """Where Triton runs: float32 in its interpreter, half precision on a GPU and beside codes."""
    dtype = (
        torch.float16 if device.type == "cuda" or any(form.is_quantized for form in geometry.formats) else torch.float32
    )
    plain = str(dtype).removeprefix("torch.")
    names = [form.name if form.is_quantized else plain for form in geometry.formats]
    return replace(geometry, device=device, dtype=dtype, kv_dtype=" ".join(names))


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
    backend.write(qkv, batch, head_norm, rotary and rotary.at(batch.positions_T), layer, q)
    step = LayerStep(layer, plan or backend.plan(batch), scratch_for(geometry))
    return backend.attend(q, step, out, wanted_only)


def scratch_for(geometry: Geometry) -> dict[str, torch.Tensor]:
    """What Triton's declaration asks for, full of NaN; others do not look at it."""
    specs = TritonPagedDeclaration().scratch(geometry.specs, STEP_BOUNDS)
    return {spec.name: torch.full(spec.shape, float("nan"), device=geometry.device) for spec in specs}


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


TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


def check_rows(geometry: Geometry, lengths: list[int], num_rows: list[int], **options) -> TileWork:
    """The last rows of each text, in one step behind all that is stored; the work of that step in the first layer."""
    made, num_pages = texts(geometry, lengths, consecutive=False)
    head_norm, rotary = geometry.head_norm(), geometry.rotary()
    backend = build(TritonPagedAttention, geometry, geometry.storage(num_pages), **options)
    parts = [(text, len(text.qkv) - count, len(text.qkv)) for text, count in zip(made, num_rows, strict=True)]
    batch, qkv = make_batch(geometry, parts)
    plan = backend.plan(batch)
    for layer, window in enumerate(geometry.windows):
        store(geometry, backend, made, head_norm, rotary, layer)
        out = run_layer(geometry, backend, qkv, batch, head_norm, rotary, layer, plan).cpu().double()
        tolerance = TOLERANCE[geometry.dtype]
        for text, rows in zip(made, out.split(num_rows), strict=True):
            exact = text.exact(window, head_norm, rotary, layer)[-len(rows) :]
            torch.testing.assert_close(rows, exact, rtol=tolerance, atol=tolerance)
    return next(iter(plan.work.values()))


def store(geometry: Geometry, backend, made: list[Text], head_norm=None, rotary=None, layer: int = 0) -> None:
    """All keys and values, without attending to any."""
    batch, qkv = make_batch(geometry, [(text, 0, len(text.qkv)) for text in made])
    unused = qkv.new_empty(batch.num_rows, geometry.num_heads, geometry.head_dim)
    backend.write(qkv, batch, head_norm, rotary and rotary.at(batch.positions_T), layer, unused)
