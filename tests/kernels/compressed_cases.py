"""Steps of compressed attention over paged tokens and entries in every format; whatever no row sees is poison, pages that none needs do not exist."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.compressed_attention import compressed_attention
from holdfast.kernels.latent.compressed_scopes import CompressedCall, CompressedRows, Scopes
from holdfast.kernels.latent.latent_geometry import compressed_splits
from holdfast.kernels.latent.latent_planes import LatentPlanes, read_latents, store_latents
from holdfast.kernels.latent.write_latent import rotate_neighbours
from kernels.exactness import random
from kernels.latent_page_cases import make_latent_planes, on_device
from kernels.tiled_cases import BEYOND, NAN, amid
from red_zones import RedZones

# T rows, N query heads, D head dim, S places, P pages, K places of a list

PADDING = -1
Make = Callable[[bool, int, torch.Tensor], torch.Tensor]
"""What a row sees at some places, [S, D]: (is it entries, row, places)."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer."""

    num_heads: int = 3
    head_dim: int = 32
    rope_dim: int = 8
    window: int = 20
    ratio: int = 4
    top_k: int = 0
    """0: all entries are attended to."""
    window_page: int = 16
    entries_page: int = 8
    name: str = "plain"


SIZES = Sizes()


@dataclass
class CompressedCase:
    """Rows of a step, each of a sequence of its own; `seen` are what each row attends to, tokens first."""

    sizes: Sizes
    q_TND: torch.Tensor
    scopes: Scopes
    table_rows_T: torch.Tensor
    positions_T: torch.Tensor
    sinks_N: torch.Tensor
    rotary: Rotary
    seen: list[torch.Tensor]
    scale: float
    form_heads: int = 0

    def exact(self) -> torch.Tensor:
        """[T, N, D] in float64 from the rows themselves; zeros in padded rows."""
        out_TND = torch.zeros(self.q_TND.shape, dtype=torch.float64)
        for row, (position, rows_SD) in enumerate(zip(self.positions_T.tolist(), self.seen, strict=True)):
            if position < 0:
                continue
            scores_NS = self.q_TND[row].double() @ rows_SD.double().T * self.scale
            weights_NS = torch.cat((scores_NS, self.sinks_N.double().unsqueeze(1)), 1).softmax(-1)[:, :-1]
            out_TND[row] = weights_NS @ rows_SD.double()
        rope_TNR = out_TND[..., self.sizes.head_dim - self.sizes.rope_dim :]
        turned_TNR = rotate_neighbours(rope_TNR, self.rotary.back())
        rope_TNR.copy_(torch.where((self.positions_T >= 0)[:, None, None], turned_TNR, 0.0))
        return out_TND

    def rows_on(self, device: torch.device) -> CompressedRows:
        """In buffers that are longer than the step."""
        beyond = torch.full((3,), BEYOND, dtype=torch.int32)
        return CompressedRows(
            torch.cat((self.table_rows_T, beyond)).to(device), torch.cat((self.positions_T, beyond)).to(device)
        )


def compressed_case(
    positions: list[int],
    sizes: Sizes = SIZES,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    q_scale: float = 3.0,
    make: Make | None = None,
    free: int = 0xFF,
) -> CompressedCase:
    """A row at each position, PADDING where there is none; every byte of free slots is `free`."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(positions)
    seen_tokens = [torch.arange(max(0, p + 1 - sizes.window), p + 1) for p in positions]
    window = _Scope(sizes, sizes.window_page, seen_tokens, dtype, seed + 10, make and partial(make, False), free)
    selected_TK, entries, ratio = None, None, sizes.ratio
    table_NP = None
    seen = window.seen
    if ratio:
        seen_entries = [torch.arange((p + 1) // ratio) for p in positions]
        if sizes.top_k:
            selected_TK = torch.full((num_rows, sizes.top_k), BEYOND, dtype=torch.int32)
            for row, entry_S in enumerate(seen_entries):
                if len(entry_S) > sizes.top_k:
                    drawn_K = torch.randperm(len(entry_S), generator=generator)[: sizes.top_k].sort().values
                    selected_TK[row], seen_entries[row] = drawn_K, drawn_K
        own = make and partial(make, True)
        scope = _Scope(sizes, sizes.entries_page, seen_entries, dtype, seed + 20, own, free)
        entries, table_NP = scope.planes, scope.table_NP
        seen = [torch.cat(pair) for pair in zip(seen, scope.seen, strict=True)]
    q_TND = random(num_rows, sizes.num_heads, sizes.head_dim, seed=seed + 1, scale=q_scale).to(dtype)
    table_rows_T = torch.arange(num_rows - 1, -1, -1, dtype=torch.int32)
    for row, position in enumerate(positions):
        if position < 0:  # nothing of such a row may be followed
            q_TND[row], table_rows_T[row] = NAN, BEYOND
    return CompressedCase(
        sizes,
        q_TND,
        Scopes(sizes.window, window.planes, window.table_NP, ratio, entries, table_NP, selected_TK),
        table_rows_T,
        torch.tensor(positions, dtype=torch.int32),
        random(sizes.num_heads, seed=seed + 2, scale=2.0),
        rotary_of(positions, sizes.rope_dim),
        seen,
        sizes.head_dim**-0.5,
    )


def rotary_of(positions: list[int], rope_dim: int) -> Rotary:
    """Rows at these positions, frequency i in column i; NaN in rows of padding."""
    frequency_P = 100.0 ** -(torch.arange(rope_dim // 2) / (rope_dim // 2))
    angle_TP = torch.tensor([NAN if position < 0 else position for position in positions]).unsqueeze(1) * frequency_P
    return Rotary(angle_TP.cos(), angle_TP.sin())


class _Scope:
    """Pages of one scope, with what its rows see and nothing else; table rows are in reverse."""

    def __init__(
        self,
        sizes: Sizes,
        page_tokens: int,
        places: list[torch.Tensor],
        dtype: torch.dtype,
        seed: int,
        make: Callable[[int, torch.Tensor], torch.Tensor] | None,
        free: int,
    ) -> None:
        head_dim, nope_dim = sizes.head_dim, sizes.head_dim - sizes.rope_dim
        needed = [(place_S // page_tokens).unique().tolist() for place_S in places]
        generator = torch.Generator().manual_seed(seed)
        # Page 0 belongs to no sequence and is all poison.
        order = (torch.randperm(sum(map(len, needed)) + 1, generator=generator) + 1).tolist()
        num_pages, width = len(order) + 1, 3 + max((page for pages in needed for page in pages), default=0)
        zones = RedZones(torch.device("cpu"))
        if sizes.name == "plain":
            rows_SX = torch.empty(num_pages * page_tokens, head_dim, dtype=dtype)
            self.planes = LatentPlanes("plain", nope_dim, sizes.rope_dim, page_tokens, rows_SX)
        else:
            self.planes = make_latent_planes(sizes.name, nope_dim, sizes.rope_dim, page_tokens, num_pages, zones)
        for plane in (self.planes.rows_SX, self.planes.scales_SC, self.planes.rope_SR):
            if plane is not None:
                plane.view(torch.uint8).fill_(free)
        self.table_NP = torch.full((len(places), width), BEYOND, dtype=torch.int32)
        self.seen = []
        for row, (place_S, pages) in enumerate(zip(places, needed, strict=True)):
            table_row = len(places) - 1 - row
            for page in pages:
                self.table_NP[table_row, page] = order.pop()
            slot_S = self.table_NP[table_row, place_S // page_tokens].long() * page_tokens + place_S % page_tokens
            wanted_SD = make(row, place_S) if make else random(len(place_S), head_dim, seed=seed + 100 + row)
            store_latents(self.planes, slot_S, wanted_SD[:, :nope_dim], wanted_SD[:, nope_dim:])
            self.seen.append(read_latents(self.planes, slot_S, torch.float32))


def run_compressed(
    case: CompressedCase, device: torch.device, num_sms: int = 1, function=compressed_attention
) -> torch.Tensor:
    """The kernel on the device; what it writes lies between red zones, and there is no partial more than it asks for."""
    zones = RedZones(device)
    num_rows, num_heads, head_dim = case.q_TND.shape
    splits = compressed_splits(num_rows, case.form_heads or num_heads, num_sms)
    num_partials = num_rows * splits if splits > 1 else 0
    out_TND = zones.allocate(num_rows, num_heads, head_dim, dtype=case.q_TND.dtype).fill_(NAN)
    dtype = partial_dtype(case.q_TND.dtype)
    partial_out_CX = zones.allocate(num_partials, num_heads * head_dim, dtype=dtype).fill_(NAN)
    partial_lse_CH = zones.allocate(num_partials, num_heads).fill_(NAN)
    call = CompressedCall(
        amid(case.q_TND, device),
        scopes_on(case.scopes, device),
        case.rows_on(device),
        case.sinks_N.to(device),
        Rotary(case.rotary.cos_TP.to(device), case.rotary.sin_TP.to(device)),
        case.scale,
        partial_out_CX,
        partial_lse_CH,
        out_TND,
        num_sms,
        case.form_heads,
    )
    result = function(call)
    assert result is out_TND, "the output is the one that was given"
    zones.check()
    return out_TND.cpu()


def partial_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of partial outputs for queries of this type."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def scopes_on(scopes: Scopes, device: torch.device) -> Scopes:
    """A copy, plain rows amid poison."""
    copied = {
        name: None if tensor is None else tensor.to(device)
        for name in ("window_table_NP", "entries_table_NP", "selected_TK")
        for tensor in (getattr(scopes, name),)
    }
    for name in ("window", "entries"):
        planes = getattr(scopes, name)
        if planes is not None and planes.kind == "plain":
            planes = planes._replace(rows_SX=amid(planes.rows_SX, device))
        copied[name] = None if planes is None else on_device(planes, device)
    return scopes._replace(**copied)
