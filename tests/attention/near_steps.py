"""Steps over near pages beside quantized ones: pages that come and go, poison wherever nothing may look, and float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attention.steps import BEYOND, Geometry, Text, exact_attention, logit_rows, make_batch, quantized
from holdfast.attention.backend import Batch, LayerStep
from holdfast.attention.declarations import StepBounds
from holdfast.cache.groups import HOLE
from holdfast.cache.storage import PageStorage
from holdfast.families.grouped.declarations import TritonPagedDeclaration
from holdfast.families.grouped.spec import GroupedAttentionSpec, NearSpec
from holdfast.families.grouped.torch_backend import TorchPagedAttention
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.kernels.attention.key_bias import KeyBias, make_key_turns
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary, write_kv_reference
from holdfast.quant.kv_quantize import rotate_heads
from kernels.exactness import random
from red_zones import RedZones

BOUNDS = StepBounds(max_num_seqs=8, max_num_rows=320, page_tokens=16)
NAN = float("nan")


@dataclass(frozen=True)
class NearGeometry(Geometry):
    """A model whose quantized layers have near pages, which are group 1."""

    block_tokens: int = 64
    first_tokens: int = 16
    near_page: int = 16
    has_bias: bool = False
    """Codes leave out a bias of the keys."""
    has_mean: bool = False
    """A mean is subtracted from the keys."""

    @property
    def specs(self) -> tuple[GroupedAttentionSpec, ...]:
        return tuple(
            replace(
                spec,
                has_key_bias=self.has_bias,
                near=NearSpec(self.block_tokens, 1, self.near_page, self.first_tokens if spec.window is None else 0)
                if spec.cache.format.is_quantized
                else None,
            )
            for spec in super().specs
        )

    @property
    def num_near_pages(self) -> int:
        """Pages of the pool that the texts of a test share."""
        return 8 * (BOUNDS.max_num_rows // self.near_page + 2 * self.block_tokens // self.near_page + 2)

    def bias(self, layer: int) -> torch.Tensor:
        return random(self.num_kv_heads, self.head_dim, seed=70 + layer, scale=3.0)

    def mean(self, layer: int) -> torch.Tensor:
        """In the space of the keys' codes."""
        return random(self.num_kv_heads, self.head_dim, seed=80 + layer, scale=2.0)

    def key_biases(self) -> list[KeyBias | None]:
        if not self.has_bias:
            return [None] * len(self.windows)
        frequency = 0.7 ** torch.arange(self.head_dim // 2)
        turns = make_key_turns(frequency, 1.0, self.max_model_len, self.dtype, self.device)
        return [KeyBias(self.bias(layer).to(self.device), turns) for layer in range(len(self.windows))]

    def k_means(self) -> list[torch.Tensor | None] | None:
        if not self.has_mean:
            return None
        return [self.mean(layer).to(self.device) for layer in range(len(self.windows))]

    def build(self, backend_type, storage: "NearStorage", num_sms: int = 1, batch_invariant: bool = False):
        """A backend over its storage."""
        tables = {"k_means": self.k_means(), "key_biases": self.key_biases(), "sinks": self.sinks}
        if backend_type is TorchPagedAttention:
            return TorchPagedAttention(self.specs, storage, **tables)  # type: ignore[arg-type]
        return TritonPagedAttention(self.specs, storage, BOUNDS, num_sms, batch_invariant, **tables)  # type: ignore[arg-type]

    def scratch(self) -> dict[str, torch.Tensor]:
        """Full of NaN."""
        specs = TritonPagedDeclaration().scratch(self.specs, BOUNDS)
        return {spec.name: torch.full(spec.shape, NAN, device=self.device) for spec in specs}


class NearStorage:
    """Codes in an ordinary storage; near planes amid red zones, full of NaN, and which pages texts hold."""

    def __init__(self, geometry: NearGeometry, num_pages: int) -> None:
        self.geometry = geometry
        self.codes: PageStorage = geometry.storage(num_pages)
        self.spec = self.codes.spec
        self.zones = RedZones(geometry.device)
        shape = geometry.num_near_pages * geometry.near_page, geometry.num_kv_heads, geometry.head_dim
        self._near = {
            (layer, name): self.zones.allocate(*shape, dtype=geometry.dtype).fill_(NAN)
            for layer in range(len(geometry.windows))
            for name in ("near_k", "near_v")
        }
        self._free = torch.randperm(geometry.num_near_pages, generator=torch.Generator().manual_seed(1)).tolist()
        self._tables: dict[int, list[int]] = {}

    def plane(self, layer: int, name: str) -> torch.Tensor:
        return self._near[layer, name] if name.startswith("near") else self.codes.plane(layer, name)

    def table(self, text: Text) -> list[int]:
        return self._tables.setdefault(id(text), [])

    def hold(self, text: Text, start: int, end: int) -> None:
        """Take pages for the rows of a step, which are NaN until they are written."""
        table, size = self.table(text), self.geometry.near_page
        table += [HOLE] * (-(-end // size) - len(table))
        for place in range(start // size, -(-end // size)):
            if table[place] == HOLE:
                table[place] = self._free.pop()
                self._poison(table[place])

    def give_back(self, text: Text, end: int) -> None:
        """After a step: pages before the open block, except those of the first tokens; other sequences write NaN there.

        What a kept page has behind the first tokens is NaN too, once no row sees it.
        """
        size, block, first = self.geometry.near_page, self.geometry.block_tokens, self.geometry.first_tokens
        kept = -(-first // size) if any(window is None for window in self.geometry.windows) else 0
        table = self.table(text)
        if kept and end >= block and first % size:
            self._poison(table[kept - 1], first % size)
        for place in range(kept, min(len(table), end // block * block // size)):
            if table[place] != HOLE:
                self._poison(table[place])
                self._free.insert(0, table[place])
                table[place] = HOLE

    def _poison(self, page: int, first: int = 0) -> None:
        size = self.geometry.near_page
        for plane in self._near.values():
            plane[page * size + first : (page + 1) * size] = NAN


def near_batch(
    geometry: NearGeometry,
    storage: NearStorage,
    parts: list[tuple[Text, int, int]],
    num_rows: int | None = None,
    wanted: list[int] | None = None,
    num_prompt: int = 0,
) -> tuple[Batch, torch.Tensor]:
    """A step like that of `make_batch`, with near pages for its rows."""
    batch, qkv = make_batch(geometry, parts, num_rows, None, num_prompt)
    size, slots = geometry.near_page, []
    for text, start, end in parts:
        storage.hold(text, start, end)
        slots += [storage.table(text)[i // size] * size + i % size for i in range(start, end)]
    slots += (batch.num_rows - len(slots)) * [-1]
    assert batch.page_tables is not None
    length = max(len(storage.table(text)) for text, _, _ in parts) + 1
    near_table = torch.full((len(parts) + 1, length), BEYOND)
    sequences = []
    for sequence, (text, _, _) in zip(batch.sequences, parts, strict=True):
        held = list(storage.table(text))
        near_table[sequence.table_row, : len(held)] = torch.tensor([BEYOND if page == HOLE else page for page in held])
        sequences.append(sequence._replace(tables=(text.pages, held)))
    both = torch.stack((batch.slots_GT[0], torch.tensor(slots, device=geometry.device)))
    tables = (*batch.page_tables, near_table.to(geometry.device, torch.int32))
    logits = None if wanted is None else logit_rows(wanted, sequences, geometry.device)
    return replace(batch, slots_GT=both, sequences=tuple(sequences), page_tables=tables, logits=logits), qkv


def run_near_layer(
    geometry: NearGeometry,
    storage: NearStorage,
    backend,
    batch: Batch,
    qkv: torch.Tensor,
    head_norm: HeadNorm | None = None,
    rotary: Rotary | None = None,
    layer: int = 0,
    wanted_only: bool = False,
) -> torch.Tensor:
    """One layer of one step, in memory that is NaN before it. Codes that no row may see are NaN while it attends."""
    num_heads, head_dim = geometry.num_heads, geometry.head_dim
    q = qkv.new_full((batch.num_rows, num_heads, head_dim), NAN)
    out = qkv.new_full((batch.num_rows, num_heads * head_dim), NAN)
    backend.write(qkv, batch, head_norm, rotary and rotary.at(batch.positions_T), layer, q)
    slots, size = torch.tensor(hidden_slots(geometry, batch, layer), dtype=torch.int64), geometry.page_tokens
    pages, tokens = slots // size, slots % size
    stored = storage.codes.planes(layer).values() if len(slots) else ()
    # Pages of codes lie head by head.
    planes = [plane.view(-1, geometry.num_kv_heads, size, *plane.shape[2:]) for plane in stored]
    held = [plane[pages, :, tokens] for plane in planes]
    for plane in planes:
        plane[pages, :, tokens] = 255 if plane.dtype == torch.uint8 else NAN
    scratch = geometry.scratch() if isinstance(backend, TritonPagedAttention) else {}
    result = backend.attend(q, LayerStep(layer, backend.plan(batch), scratch), out, wanted_only)
    for plane, before in zip(planes, held, strict=True):
        plane[pages, :, tokens] = before
    storage.zones.check()
    return result


def hidden_slots(geometry: NearGeometry, batch: Batch, layer: int) -> list[int]:
    """Slots of codes that no row of the step sees: of the last own block, and of the first tokens without a window."""
    if geometry.specs[layer].near is None:
        return []
    slots, size, block = [], geometry.page_tokens, geometry.block_tokens
    for sequence in batch.sequences:
        hidden = set(range((sequence.end - 1) // block * block, sequence.end))
        if geometry.windows[layer] is None:
            hidden |= set(range(min(geometry.first_tokens, sequence.end)))
        slots += [sequence.tables[0][i // size] * size + i % size for i in sorted(hidden)]
    return slots


def run_near_steps(
    backend, geometry: NearGeometry, storage: NearStorage, made: list[Text], steps, head_norm=None, rotary=None
) -> list[list[torch.Tensor]]:
    """By layer and text: the outputs of every token, put together from the steps."""
    width = geometry.num_heads * geometry.head_dim
    outputs = [[torch.full((len(text.qkv), width), NAN) for text in made] for _ in geometry.windows]
    for step in steps:
        batch, qkv = near_batch(geometry, storage, step)
        for layer, found in enumerate(outputs):
            out = run_near_layer(geometry, storage, backend, batch, qkv, head_norm, rotary, layer).cpu().float()
            for sequence, (text, start, end) in zip(batch.sequences, step, strict=True):
                found[made.index(text)][start:end] = out[sequence.row_start : sequence.row_start + end - start]
        for text, _, end in step:
            storage.give_back(text, end)
    return outputs


def store_all(
    geometry: NearGeometry, storage: NearStorage, backend, made: Sequence[Text], head_norm=None, rotary=None
) -> None:
    """Write every token of the texts but attend to none; then near pages are as after the step before the last token."""
    for text in made:
        for start in range(0, len(text.qkv), BOUNDS.max_num_rows // 2):
            end = min(start + BOUNDS.max_num_rows // 2, len(text.qkv))
            batch, qkv = near_batch(geometry, storage, [(text, start, end)])
            for layer in range(len(geometry.windows)):
                q = qkv.new_empty(batch.num_rows, geometry.num_heads, geometry.head_dim)
                backend.write(qkv, batch, head_norm, rotary and rotary.at(batch.positions_T), layer, q)


def exact_near(
    text: Text, layer: int = 0, head_norm: HeadNorm | None = None, rotary: Rotary | None = None
) -> torch.Tensor:
    """Attention of every token in float64, [L, H * D]: each row chooses for each token between its code and its near row."""
    geometry, num_tokens = text.geometry, len(text.qkv)
    assert isinstance(geometry, NearGeometry)
    kv_format, window, dtype = geometry.formats[layer], geometry.windows[layer], geometry.dtype
    planes = [torch.empty(num_tokens, geometry.num_kv_heads, geometry.head_dim, dtype=dtype) for _ in range(2)]
    if head_norm is not None:
        head_norm = HeadNorm(head_norm.q_weight_D.cpu(), head_norm.k_weight_D.cpu(), head_norm.eps)
    tables = None if rotary is None else Rotary(rotary.cos_TP.cpu(), rotary.sin_TP.cpu())
    q = write_kv_reference(text.qkv, torch.arange(num_tokens), *planes, head_norm, tables)
    k, v = planes
    if not kv_format.is_quantized:
        return exact_attention(q, k, v, window, geometry.sinks[layer], geometry.softcap)
    assert kv_format.key_bits is not None
    assert kv_format.value_bits is not None
    mean = geometry.mean(layer) if geometry.has_mean else None
    bias = turned_bias(geometry, layer, num_tokens)
    own_q, code_k, code_v = quantized(q, k, v, kv_format, mean)
    rotated_bias = rotate_heads(bias) if kv_format.key_bits < 8 else bias
    near_k = (k.double() + bias).to(dtype)
    near_k = rotate_heads(near_k) if kv_format.key_bits < 8 else near_k
    near_k = (near_k if mean is None else near_k.float() - mean).to(dtype)
    near_v = v if kv_format.value_bits == 8 else rotate_heads(rotate_heads(v).to(dtype).double())
    position = torch.arange(num_tokens)
    own = position // geometry.block_tokens * geometry.block_tokens
    is_near = position >= own.unsqueeze(1)
    if window is None:
        is_near |= position < geometry.first_tokens
    return mixed_attention(geometry, layer, own_q, (code_k.double() + rotated_bias, code_v), (near_k, near_v), is_near)


def mixed_attention(
    geometry: NearGeometry,
    layer: int,
    q: torch.Tensor,
    codes: tuple[torch.Tensor, torch.Tensor],
    near: tuple[torch.Tensor, torch.Tensor],
    is_near: torch.Tensor,
) -> torch.Tensor:
    """[L, H * D] in float64, with keys and values of one kind or of the other by row and token."""
    group, num_tokens, window = geometry.num_heads // geometry.num_kv_heads, len(q), geometry.windows[layer]
    code_k, code_v, near_k, near_v = (x.double().repeat_interleave(group, 1) for x in (*codes, *near))
    scores = [torch.einsum("nhd,lhd->hnl", q.double(), k) * geometry.head_dim**-0.5 for k in (code_k, near_k)]
    scores = torch.where(is_near, scores[1], scores[0])
    scores = scores if geometry.softcap is None else geometry.softcap * torch.tanh(scores / geometry.softcap)
    distance = torch.arange(num_tokens).unsqueeze(1) - torch.arange(num_tokens)
    seen = (distance >= 0) & (distance < (num_tokens if window is None else window))
    scores = scores.masked_fill(~seen, float("-inf"))
    sums, sinks = scores.logsumexp(-1, keepdim=True), geometry.sinks[layer]
    if sinks is not None:
        sums = torch.logaddexp(sums, sinks.cpu().double().view(-1, 1, 1))
    weights = (scores - sums).exp()
    parts = ((weights * ~is_near, code_v), (weights * is_near, near_v))
    return sum(torch.einsum("hnl,lhd->nhd", some, v) for some, v in parts).flatten(1)  # type: ignore[union-attr]


def turned_bias(geometry: NearGeometry, layer: int, num_tokens: int) -> torch.Tensor:
    """[L, K, D] in float64, in the model's coordinates; zeros if pages hold keys with their bias."""
    shape = num_tokens, geometry.num_kv_heads, geometry.head_dim
    if not geometry.has_bias:
        return torch.zeros(shape, dtype=torch.float64)
    first, second = geometry.bias(layer).double().chunk(2, dim=-1)
    frequency = (0.7 ** torch.arange(geometry.head_dim // 2)).double()
    angle = torch.outer(torch.arange(num_tokens).double(), frequency).unsqueeze(1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def texts_of(geometry: NearGeometry, lengths: list[int], seed: int = 0) -> tuple[list[Text], NearStorage]:
    """Texts on scattered pages of codes, and the storage for them."""
    counts = [-(-length // geometry.page_tokens) for length in lengths]
    num_pages = sum(counts) + 4
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    made = []
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        made.append(Text(geometry, length, [order.pop() for _ in range(count)], seed=seed + 10 + index))
    return made, NearStorage(geometry, num_pages)
