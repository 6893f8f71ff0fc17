"""Adapters of the kernels over latents, selected tokens and compressed entries: each tile, format and scope, and their references.

T rows, N query heads, L latent, R rotated elements, X = L + R, S tokens, V value elements, K places of a list
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch

from holdfast.families.compressed import torch_backend as torch_compressed
from holdfast.families.compressed.torch_backend import OnlineSoftmax
from holdfast.families.latent import torch_backend as torch_latent
from holdfast.families.latent.torch_backend import attend_latents
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent import latent_prefill
from holdfast.kernels.latent.compressed_attention import compressed_attention, compressed_attention_reference
from holdfast.kernels.latent.compressed_scopes import CompressedCall
from holdfast.kernels.latent.latent_attention import (
    latent_attention,
    latent_attention_reference,
    sparse_attention,
    sparse_attention_reference,
)
from holdfast.kernels.latent.latent_geometry import compressed_splits, sparse_splits
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes, SparseRows, read_latents, store_latents
from holdfast.kernels.latent.latent_prefill import attend_up_projected_reference, attend_up_projected_triton
from holdfast.kernels.up_projection import CHUNK_STEP, UpProjection, expanded_specs
from holdfast.quant.kv_quantize import rotate_heads
from kernels.compressed_cases import (
    PADDING,
    CompressedCase,
    compressed_case,
    partial_dtype,
    scopes_on,
)
from kernels.compressed_cases import Sizes as CompressedSizes
from kernels.every_attention import PEAK_NATS, Attention, Memory, Poison, Step, World
from kernels.exactness import random
from kernels.latent_cases import LatentCase, cut_work
from kernels.latent_page_cases import QUANTIZED_LATENTS, make_latent_planes, on_device, unsplit_attention
from kernels.sparse_cases import BEFORE
from kernels.tiled_cases import BEYOND, NAN, amid
from red_zones import RedZones

CPU = torch.device("cpu")
BYTES = {Poison.NAN: 0xFF, Poison.ZEROS: 0x00, Poison.LEFTOVERS: 0x35}
"""Bytes of free slots and pages; 0x35 is a small number in every type of a plane."""
MANY_SMS = 12
"""So many multiprocessors want the lists of a few rows split."""
TAKES = frozenset({"prefill", "peak", "splits"})


class Sizes(NamedTuple):
    """Sizes of a layer and its pages."""

    name: str = "plain"
    num_heads: int = 3
    latent_dim: int = 32
    rope_dim: int = 16
    page: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def rotates(self) -> bool:
        return self.name.startswith("turboquant")

    @property
    def group(self) -> int:
        """Elements of a latent that share a scale."""
        return {"fp8_ds_mla": 128, "fp8_ds_v4": 64}.get(self.name, self.latent_dim)

    def on(self, device: torch.device) -> "Sizes":
        """A GPU would multiply float32 as tf32."""
        return self._replace(dtype=torch.float16) if device.type == "cuda" and self.dtype == torch.float32 else self


def queries(step: Step, num_heads: int, width: int) -> torch.Tensor:
    """[T, N, X]: all have a common part, which a peak meets. Beside uneven tokens they are small."""
    q_TNX = 0.5 + 0.5 * random(step.num_rows, num_heads, width, seed=step.seed + 1)
    return q_TNX * (0.01 if step.uneven else 1.0)


def some_tokens(
    step: Step, sizes: Sizes, place_S: torch.Tensor, peak: int | None, seed: int, index: int
) -> torch.Tensor:
    """Latents and rotated elements of tokens at these places, [S, X].

    Uneven tokens of every second sequence have the same large group: no other token bounds what its scale multiplies.
    """
    width = sizes.width
    rows_SX = 0.7 * random(len(place_S), width, seed=seed)
    if step.uneven:
        group_X = torch.arange(width) // sizes.group
        group_X[sizes.latent_dim :] = 1 + group_X[sizes.latent_dim - 1]
        turn_S = place_S if index % 2 == 0 else torch.zeros_like(place_S)
        rows_SX *= torch.where((turn_S.unsqueeze(1) + group_X) % 2 == 0, 1e2, 1e-2)
    if peak is not None:
        direction_X = torch.full((width,), 2 * PEAK_NATS * width**-0.5)
        if sizes.rotates:
            direction_X[: sizes.latent_dim] = rotate_heads(direction_X[: sizes.latent_dim])
        rows_SX[place_S == peak] = direction_X
    return rows_SX


def tokens(step: Step, sizes: Sizes) -> list[torch.Tensor]:
    """One per sequence."""
    made = []
    for index, (start, count) in enumerate(step.rows):
        peak = None if step.peak is None else min(step.peak, start + count - 1)
        seed = 100 * step.seed + 10 * index + 3
        made.append(some_tokens(step, sizes, torch.arange(start + count), peak, seed, index))
    return made


def planes_of(sizes: Sizes, num_pages: int, free: Poison) -> LatentPlanes:
    """Pages whose slots are all free."""
    if sizes.name != "plain":
        zones = RedZones(CPU)
        planes = make_latent_planes(sizes.name, sizes.latent_dim, sizes.rope_dim, sizes.page, num_pages, zones)
    else:
        rows_SX = torch.empty(num_pages * sizes.page, sizes.width, dtype=sizes.dtype)
        planes = LatentPlanes("plain", sizes.latent_dim, sizes.rope_dim, sizes.page, rows_SX)
    for plane in (planes.rows_SX, planes.scales_SC, planes.rope_SR):
        if plane is not None:
            plane.view(torch.uint8).fill_(BYTES[free])
    return planes


def held(sizes: Sizes, rows_SX: torch.Tensor) -> torch.Tensor:
    """The tokens as pages of the format hold them, [S, X]; these pages lie in no world."""
    planes, slot_S = planes_of(sizes, -(-len(rows_SX) // sizes.page), Poison.ZEROS), torch.arange(len(rows_SX))
    store_latents(planes, slot_S, rows_SX[:, : sizes.latent_dim], rows_SX[:, sizes.latent_dim :])
    return read_latents(planes, slot_S, torch.float32)


def paged(step: Step, sizes: Sizes) -> tuple[LatentCase, LatentPlanes]:
    """Pages in random order among free ones, and the case whose tokens are what they hold."""
    made = tokens(step, sizes)
    counts = [-(-len(rows_SX) // sizes.page) for rows_SX in made]
    # Page 0 is free: kernels read it for tokens that they do not have.
    order = (1 + torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(step.seed))).tolist()
    planes, pages = planes_of(sizes, 1 + len(order), step.poison), []
    for rows_SX, num_pages in zip(made, counts, strict=True):
        pages.append([order.pop() for _ in range(num_pages)])
        token_S = torch.arange(len(rows_SX))
        slot_S = torch.tensor(pages[-1])[token_S // sizes.page] * sizes.page + token_S % sizes.page
        store_latents(planes, slot_S, rows_SX[:, : sizes.latent_dim], rows_SX[:, sizes.latent_dim :])
    q_TNX = queries(step, sizes.num_heads, sizes.width).to(sizes.dtype)
    kept, scale = [held(sizes, rows_SX) for rows_SX in made], sizes.width**-0.5
    case = LatentCase(list(step.rows), q_TNX, planes.rows_SX, pages, kept, sizes.latent_dim, sizes.page, scale)
    return case, planes


def held_on(planes: LatentPlanes, device: torch.device) -> LatentPlanes:
    """A copy; plain rows lie amid NaN."""
    if planes.kind == "plain":
        return planes._replace(rows_SX=amid(planes.rows_SX, device))
    return on_device(planes, device)


@dataclass
class LatentWorld:
    """Absorbed attention to all tokens, cut into tiles by hand."""

    step: Step
    sizes: Sizes
    large: bool
    device: torch.device
    function: Callable[..., torch.Tensor]

    def __post_init__(self) -> None:
        self.case, self.planes = paged(self.step, self.sizes)

    def run(self, memory: Memory) -> torch.Tensor:
        case, step, (_, num_heads, latent_dim, *_) = self.case, self.step, self.sizes
        num_rows, dtype = step.num_rows + step.num_padding, self.sizes.dtype
        work, num_partials = cut_work(case, step.splits, self.large, num_rows, self.device)
        padding_TNX = torch.full((step.num_padding, *case.q_TNX.shape[1:]), NAN, dtype=dtype)
        out_TNL = memory.take("out", num_rows, num_heads, latent_dim, dtype=dtype)
        call = LatentCall(
            amid(torch.cat((case.q_TNX, padding_TNX)), self.device),
            held_on(self.planes, self.device),
            case.page_table().to(self.device),
            case.scale,
            memory.take("partial_out", max(1, num_partials), num_heads * latent_dim),
            memory.take("partial_lse", max(1, num_partials), num_heads),
            out_TNL,
            2,
        )
        self.function(call, work)
        return out_TNL.flatten(1).cpu()

    def expected(self) -> torch.Tensor:
        return self.case.exact().flatten(1)


@dataclass
class SparseWorld:
    """A list of tokens for each row, in any order; every second row has places that name no token of it."""

    step: Step
    sizes: Sizes
    device: torch.device
    function: Callable[..., torch.Tensor]

    def __post_init__(self) -> None:
        self.case, self.planes = paged(self.step, self.sizes)
        rows = [(index, start + i) for index, (start, count) in enumerate(self.step.rows) for i in range(count)]
        self.sequences = [index for index, _ in rows]
        self.num_tokens = [position + 1 for _, position in rows]
        # Lists are shorter than the longest context, and have as many blocks as there are splits.
        num_places = max(max(self.num_tokens) - 3, 64 * self.step.splits if self.step.splits > 1 else 1)
        # After its tokens a list holds what an earlier row left: tokens that the row has taken already.
        self.chosen_TK = torch.zeros(len(rows), num_places, dtype=torch.int32)
        generator = torch.Generator().manual_seed(self.step.seed + 5)
        for row, num_tokens in enumerate(self.num_tokens):
            drawn_S = torch.randperm(num_tokens, generator=generator)[: self.chosen_TK.shape[1]].int()
            if row % 2 == 1:
                drawn_S[drawn_S % 4 == 1] = (-1, num_tokens, BEYOND, -(2**31))[row // 2 % 4]
            if self.step.peak is not None and self.step.peak < num_tokens:
                is_last = self.step.peak == num_tokens - 1
                place = -1 if is_last else min(self.step.peak, len(drawn_S) // 2)
                drawn_S[drawn_S == self.step.peak] = drawn_S[place].clone()
                drawn_S[place] = self.step.peak
            self.chosen_TK[row, : len(drawn_S)] = drawn_S

    def run(self, memory: Memory) -> torch.Tensor:
        case, (_, num_heads, latent_dim, *_) = self.case, self.sizes
        num_rows, dtype = self.step.num_rows + 1, self.sizes.dtype
        num_sms = 1 if self.step.splits == 1 else MANY_SMS
        num_partials = num_rows * sparse_splits(num_rows, num_heads, num_sms)
        out_TNL = memory.take("out", num_rows, num_heads, latent_dim, dtype=dtype)
        out_TNL[-1] = BEFORE
        beyond = torch.full((3,), BEYOND)
        # The last row does not choose: nothing of it is followed, and its output stays.
        table_rows_T = torch.tensor([len(case.rows) - 1 - index for index in self.sequences] + [BEYOND])
        num_tokens_T = torch.tensor([*self.num_tokens, 0])
        listed = (torch.cat((one_T, beyond)).int().to(self.device) for one_T in (table_rows_T, num_tokens_T))
        call = LatentCall(
            amid(torch.cat((case.q_TNX, torch.full_like(case.q_TNX[:1], NAN))), self.device),
            held_on(self.planes, self.device),
            case.page_table().to(self.device),
            case.scale,
            memory.take("partial_out", num_partials, num_heads * latent_dim),
            memory.take("partial_lse", num_partials, num_heads),
            out_TNL,
            num_sms,
        )
        tokens_TK = torch.cat((self.chosen_TK, torch.full_like(self.chosen_TK[:1], BEYOND)))
        self.function(call, SparseRows(*listed), tokens_TK.to(self.device))
        assert bool((out_TNL[-1] == BEFORE).all()), "a row that does not choose was written"
        return out_TNL[:-1].flatten(1).cpu()

    def expected(self) -> torch.Tensor:
        out_TNL = torch.empty(*self.case.q_TNX.shape[:2], self.sizes.latent_dim, dtype=torch.float64)
        for row, (index, num_tokens) in enumerate(zip(self.sequences, self.num_tokens, strict=True)):
            chosen_K = self.chosen_TK[row, :num_tokens]
            chosen_S = chosen_K[(chosen_K >= 0) & (chosen_K < num_tokens)].long().unique()
            seen_SX = self.case.tokens[index][chosen_S].double()
            weights_NS = (self.case.q_TNX[row].double() @ seen_SX.T * self.case.scale).softmax(-1)
            out_TNL[row] = weights_NS @ seen_SX[:, : self.sizes.latent_dim]
        return out_TNL.flatten(1)


@dataclass
class UpProjectedWorld:
    """Prompts one after the other on the same scratch, in chunks of 128 tokens."""

    step: Step
    sizes: Sizes
    device: torch.device
    function: Callable[..., torch.Tensor]

    def __post_init__(self) -> None:
        _, num_heads, latent_dim, rope_dim, _, dtype = self.sizes
        self.shape = UpProjection(num_heads, latent_dim, rope_dim, nope_dim=16, value_dim=16)
        self.case, self.planes = paged(self.step, self.sizes)
        shape_NXL = (num_heads, self.shape.expanded_dim, latent_dim)
        self.kv_b_NXL = (0.5 + random(*shape_NXL, seed=77)).mul_(latent_dim**-0.5).to(dtype)
        self.scale = (16 + rope_dim) ** -0.5
        self.q_TND = queries(self.step, num_heads, 16 + rope_dim).to(dtype)
        if self.step.peak is not None:
            # Keys of a peak are kv_b of a constant latent, and the same constant in the rotated elements.
            self.q_TND = self.q_TND * 0.7

    def run(self, memory: Memory) -> torch.Tensor:
        shape, dtype = self.shape, self.sizes.dtype
        name = str(dtype).removeprefix("torch.")
        most = max(count for _, count in self.step.rows)
        sizes = [CHUNK_STEP * shape.token_elements(shape.num_heads), 8 * most * shape.num_heads * (shape.value_dim + 1)]
        scratch = {
            spec.name: memory.take(spec.name, size, dtype=getattr(torch, spec.dtype))
            for spec, size in zip(expanded_specs(shape, name, 256, 512), sizes, strict=True)
        }
        out_TNV = memory.take("out", self.step.num_rows, shape.num_heads, shape.value_dim, dtype=dtype)
        planes, kv_b_NXL = held_on(self.planes, self.device), amid(self.kv_b_NXL, self.device)
        table_NP = self.case.page_table().to(self.device)
        for index, ((start, count), row) in enumerate(zip(self.step.rows, self.case.row_starts, strict=True)):
            rows, page_row_P = slice(row, row + count), table_NP[len(self.step.rows) - 1 - index]
            q_TND = amid(self.q_TND[rows], self.device)
            with patch.object(latent_prefill, "num_splits", lambda *_: self.step.splits):
                self.function(q_TND, kv_b_NXL, planes, page_row_P, start, self.scale, scratch, out_TNV[rows])
        return out_TNV.flatten(1).cpu()

    def expected(self) -> torch.Tensor:
        shape = self.shape
        out_TNV = torch.empty(self.step.num_rows, shape.num_heads, shape.value_dim, dtype=torch.float64)
        for (start, count), row, rows_SX in zip(self.step.rows, self.case.row_starts, self.case.tokens, strict=True):
            latent_SL, rope_SR = rows_SX.double().split((shape.latent_dim, shape.rope_dim), dim=1)
            expanded_NSX = torch.einsum("sl,nxl->nsx", latent_SL, self.kv_b_NXL.double())
            keys_NSD = torch.cat((expanded_NSX[..., :16], rope_SR.expand(shape.num_heads, -1, -1)), dim=2)
            for i in range(count):
                end = start + i + 1
                scores_NS = torch.einsum("nd,nsd->ns", self.q_TND[row + i].double(), keys_NSD[:, :end]) * self.scale
                out_TNV[row + i] = torch.einsum("ns,nsv->nv", scores_NS.softmax(-1), expanded_NSX[:, :end, 16:])
        return out_TNV.flatten(1)


@dataclass
class CompressedWorld:
    """A window of tokens and entries; each row is a sequence of its own."""

    step: Step
    sizes: CompressedSizes
    device: torch.device
    function: Callable[..., torch.Tensor]

    def __post_init__(self) -> None:
        step, sizes = self.step, self.sizes
        positions = [start + i for start, count in step.rows for i in range(count)] + step.num_padding * [PADDING]
        if step.window is not None:
            sizes = replace(sizes, window=step.window)
        dtype = torch.float32 if self.device.type == "cpu" else torch.float16
        latents = Sizes(sizes.name, sizes.num_heads, sizes.head_dim - sizes.rope_dim, sizes.rope_dim)

        def make(is_entry: bool, row: int, place_S: torch.Tensor) -> torch.Tensor:
            peak = None if step.peak is None else min(step.peak, positions[row])
            if is_entry and peak is not None:
                peak //= sizes.ratio
            return some_tokens(step, latents, place_S, peak, 1000 * step.seed + 20 * row + is_entry, row)

        case = compressed_case(positions, sizes, dtype, step.seed, make=make, free=BYTES[step.poison])
        q_TND = case.q_TND.clone()
        q_TND[: step.num_rows] = queries(step, sizes.num_heads, sizes.head_dim).to(dtype)
        sinks_N = torch.full((sizes.num_heads,), -60.0)
        if step.sinks:
            sinks_N = torch.tensor([-4.0, 1.5, 3.0]).repeat(sizes.num_heads)[: sizes.num_heads]
        self.case: CompressedCase = replace(case, q_TND=q_TND, sinks_N=sinks_N)

    def run(self, memory: Memory) -> torch.Tensor:
        case, device = self.case, self.device
        num_rows, num_heads, head_dim = case.q_TND.shape
        num_sms = 1 if self.step.splits == 1 else MANY_SMS
        num_partials, dtype = num_rows * compressed_splits(num_rows, num_heads, num_sms), case.q_TND.dtype
        out_TND = memory.take("out", num_rows, num_heads, head_dim, dtype=dtype)
        call = CompressedCall(
            amid(case.q_TND, device),
            scopes_on(case.scopes, device),
            case.rows_on(device),
            case.sinks_N.to(device),
            Rotary(case.rotary.cos_TP.to(device), case.rotary.sin_TP.to(device)),
            case.scale,
            memory.take("partial_out", num_partials, num_heads * head_dim, dtype=partial_dtype(dtype)),
            memory.take("partial_lse", num_partials, num_heads),
            out_TND,
            num_sms,
        )
        self.function(call)
        return out_TND.flatten(1).cpu()

    def expected(self) -> torch.Tensor:
        return self.case.exact()[: self.step.num_rows].flatten(1)


@dataclass
class TorchWorld:
    """The softmax of the torch backend over blocks of tokens, a sequence at a time."""

    step: Step
    sizes: Sizes

    def __post_init__(self) -> None:
        self.case, self.planes = paged(self.step, self.sizes)

    def run(self, memory: Memory) -> torch.Tensor:
        case, page = self.case, self.sizes.page
        out_TNL = memory.take("out", self.step.num_rows, case.num_heads, case.latent_dim)
        for (start, count), row, pages in zip(case.rows, case.row_starts, case.pages, strict=True):
            token_S = torch.arange(start + count)
            slots_S = torch.tensor(pages)[token_S // page] * page + token_S % page
            q_nNX, rows = case.q_TNX[row : row + count], slice(row, row + count)
            with patch.object(torch_latent, "BLOCK_TOKENS", 64):
                out_TNL[rows] = attend_latents(q_nNX, self.planes, slots_S, start, case.scale)
        return out_TNL.flatten(1)

    def expected(self) -> torch.Tensor:
        return self.case.exact().flatten(1)


@dataclass
class TorchCompressedWorld:
    """The softmax of the torch backend over a window and all entries, rows of one sequence at a time."""

    step: Step
    sizes: Sizes
    ratio: int = 4

    def __post_init__(self) -> None:
        self.case, self.planes = paged(self.step, self.sizes)
        ends = tuple(((start + count) // self.ratio, 1) for start, count in self.step.rows)
        self.entries, self.entry_planes = paged(replace(self.step, rows=ends, seed=self.step.seed + 50), self.sizes)
        self.sinks_N = torch.tensor([-4.0, 1.5, 3.0]) if self.step.sinks else torch.full((3,), -60.0)
        self.window = self.step.window or 10**6

    def run(self, memory: Memory) -> torch.Tensor:
        case, out_TND = self.case, memory.take("out", self.step.num_rows, self.case.num_heads, self.sizes.width)
        for index, ((start, count), row) in enumerate(zip(case.rows, case.row_starts, strict=True)):
            own_n = start + torch.arange(count)
            with patch.object(torch_compressed, "BLOCK_TOKENS", 64):
                softmax = OnlineSoftmax(case.q_TNX[row : row + count], self.sinks_N, case.scale)
                first = max(0, start - self.window + 1)
                slots_S = self._slots(case, index)[first:]
                softmax.add(self.planes, slots_S, own_n + 1 - self.window - first, own_n + 1 - first)
                num_seen_n = (own_n + 1) // self.ratio
                slots_C = self._slots(self.entries, index)[: int(num_seen_n[-1])]
                softmax.add(self.entry_planes, slots_C, torch.zeros_like(num_seen_n), num_seen_n)
            out_TND[row : row + count] = softmax.result()
        return out_TND.flatten(1)

    def _slots(self, case: LatentCase, index: int) -> torch.Tensor:
        page, token_S = self.sizes.page, torch.arange(len(case.tokens[index]))
        return torch.tensor(case.pages[index])[token_S // page] * page + token_S % page

    def expected(self) -> torch.Tensor:
        case, out_TND = self.case, torch.empty(self.step.num_rows, 3, self.sizes.width, dtype=torch.float64)
        for index, ((start, count), row) in enumerate(zip(case.rows, case.row_starts, strict=True)):
            for i in range(count):
                end = start + i + 1
                window_SX = case.tokens[index][max(0, end - self.window) : end]
                seen_SX = torch.cat((window_SX, self.entries.tokens[index][: end // self.ratio])).double()
                scores_NS = case.q_TNX[row + i].double() @ seen_SX.T * case.scale
                weights_NS = torch.cat((scores_NS, self.sinks_N.double().unsqueeze(1)), dim=1).softmax(-1)[:, :-1]
                out_TND[row + i] = weights_NS @ seen_SX
        return out_TND.flatten(1)


def make_torch(step: Step, device: torch.device, kind: Callable[..., World], sizes: Sizes) -> World:
    return kind(step, sizes)


def make_latent(
    step: Step,
    device: torch.device,
    sizes: Sizes,
    large: bool,
    function: Callable[..., torch.Tensor] = latent_attention,
) -> World:
    device = CPU if function is not latent_attention else device
    return LatentWorld(step, sizes.on(device), large, device, function)


def make_sparse(
    step: Step, device: torch.device, sizes: Sizes, function: Callable[..., torch.Tensor] = sparse_attention
) -> World:
    device = CPU if function is sparse_attention_reference else device
    return SparseWorld(step, sizes.on(device), device, function)


def make_up_projected(
    step: Step, device: torch.device, sizes: Sizes, function: Callable[..., torch.Tensor] = attend_up_projected_triton
) -> World:
    device = CPU if function is attend_up_projected_reference else device
    return UpProjectedWorld(step, sizes.on(device), device, function)


def make_compressed(
    step: Step,
    device: torch.device,
    sizes: CompressedSizes,
    function: Callable[..., torch.Tensor] = compressed_attention,
) -> World:
    device = CPU if function is compressed_attention_reference else device
    return CompressedWorld(step, sizes, device, function)


def sizes_of(name: str, page: int = 16) -> Sizes:
    """Two groups of a latent have scales of their own in fp8."""
    return Sizes(name, latent_dim=192 if name == "fp8_ds_mla" else 32, page=page)


FORMATS = ("plain", *QUANTIZED_LATENTS)
TOLERANCE = {"plain": 2e-5} | dict.fromkeys(QUANTIZED_LATENTS, 3e-3)


def _uneven(name: str) -> frozenset[str]:
    return frozenset() if name == "plain" else frozenset({"uneven"})


TILES = [
    Attention(
        f"latents {name} {tile}",
        partial(make_latent, sizes=sizes_of(name, page=page), large=large),
        sizes_of(name).latent_dim,
        TOLERANCE[name],
        family=f"latents {'plain' if name == 'plain' else 'quantized'} {tile}",
        page=page,
        takes=TAKES | {"padding"} | _uneven(name),
    )
    for name in FORMATS
    for tile, large, page in (("decode", False, 16), ("prefill", True, 64))
]
"""A block of tokens lies in several pages, or in one."""
SPARSE = [
    Attention(
        f"selected {name}",
        partial(make_sparse, sizes=sizes_of(name)),
        sizes_of(name).latent_dim,
        TOLERANCE[name],
        family=f"selected {'plain' if name == 'plain' else 'quantized'}",
        block=32 if name == "plain" else 64,
        takes=TAKES | _uneven(name),
    )
    for name in FORMATS
]
UP_PROJECTED = [
    Attention(
        f"up-projected {name}",
        partial(make_up_projected, sizes=sizes_of(name)),
        16,
        TOLERANCE[name],
        family="up-projected",
        takes=TAKES | _uneven(name),
    )
    for name in FORMATS
]
SCOPES = {
    "window": CompressedSizes(ratio=0, window=2**14),
    "entries": CompressedSizes(window=24),
    "selected": CompressedSizes(window=24, top_k=10),
}
COMPRESSED = [
    Attention(
        f"compressed {scope} {name} of {head_dim}",
        partial(make_compressed, sizes=replace(SCOPES[scope], name=name, head_dim=head_dim)),
        head_dim,
        2e-5,
        family="compressed window" if scope == "window" else "compressed entries",
        takes=TAKES | {"padding", "sinks", "window"} | _uneven(name),
    )
    for scope, name, head_dim in (
        *(("window", name, dim) for name, dim in (("plain", 40), ("turboquant_mla_4bit", 40), ("fp8_ds_v4", 72))),
        *(("entries", name, dim) for name, dim in (("plain", 40), ("fp8_ds_v4", 72), ("turboquant_mla_4bit", 40))),
        *(("selected", name, dim) for name, dim in (("plain", 40), ("turboquant_mla_4bit", 40), ("fp8_ds_v4", 136))),
    )
]
REFERENCES = [
    Attention("latents torch", partial(make_torch, kind=TorchWorld, sizes=Sizes()), 32, 2e-5, takes=TAKES - {"splits"}),
    Attention(
        "compressed torch",
        partial(make_torch, kind=TorchCompressedWorld, sizes=Sizes()),
        48,
        2e-5,
        takes=TAKES - {"splits"} | {"sinks", "window"},
    ),
    Attention(
        "latents reference",
        partial(make_latent, sizes=sizes_of("plain"), large=False, function=latent_attention_reference),
        32,
        2e-5,
        takes=TAKES | {"padding"},
    ),
    Attention(
        "latents quantized reference",
        partial(
            make_latent,
            sizes=Sizes("turboquant_mla_4bit_r8"),
            large=True,
            function=unsplit_attention,
        ),
        32,
        3e-3,
        takes=TAKES | {"padding", "uneven"},
    ),
    Attention(
        "selected reference",
        partial(make_sparse, sizes=sizes_of("fp8_ds_mla"), function=sparse_attention_reference),
        192,
        2e-5,
        takes=TAKES | {"uneven"},
    ),
    Attention(
        "up-projected reference",
        partial(make_up_projected, sizes=Sizes(), function=attend_up_projected_reference),
        16,
        2e-5,
        takes=TAKES,
    ),
    Attention(
        "compressed reference",
        partial(make_compressed, sizes=SCOPES["selected"], function=compressed_attention_reference),
        32,
        2e-5,
        takes=TAKES | {"padding", "sinks", "window"},
    ),
]
LATENT: tuple[Attention, ...] = (*TILES, *SPARSE, *UP_PROJECTED, *COMPRESSED, *REFERENCES)
REAL = Sizes(latent_dim=512, rope_dim=64, page=64)
HOPPER: tuple[Attention, ...] = (
    *(
        Attention(
            f"warpgroups {name}, {num_heads} heads, {tile}",
            partial(make_latent, sizes=REAL._replace(name=name, num_heads=num_heads), large=tile == "prefill"),
            512,
            6e-3,
            page=64,
            takes=TAKES | {"padding"} | _uneven(name),
            family="warpgroups",
        )
        for num_heads, tile, names in (
            (20, "decode", FORMATS),
            (128, "prefill", FORMATS),
            (100, "decode", FORMATS[:1]),
            (20, "prefill", FORMATS[1:2]),
        )
        for name in names
    ),
    *(
        Attention(
            f"warpgroups selected {name}, {num_heads} heads",
            partial(make_sparse, sizes=REAL._replace(name=name, num_heads=num_heads)),
            512,
            6e-3,
            page=64,
            takes=TAKES | _uneven(name),
            family="warpgroups selected",
        )
        for num_heads, names in ((16, FORMATS[:1]), (20, FORMATS[1:]), (100, FORMATS[:2]))
        for name in names
    ),
    *(
        Attention(
            f"warpgroups compressed {scope} {name}",
            partial(make_compressed, sizes=replace(SCOPES[scope], name=name, num_heads=100, head_dim=512, rope_dim=64)),
            512,
            6e-3,
            takes=TAKES | {"padding", "sinks", "window"} | _uneven(name),
            family="warpgroups compressed",
        )
        for scope, name in zip(SCOPES, ("plain", "fp8_ds_v4", "plain"), strict=True)
    ),
)
"""Adapters in the sizes of Hopper kernels: without such a GPU they run nothing new."""
