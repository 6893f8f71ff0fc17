"""Adapters of the kernels over keys and values: tiled, quantized in every format, the C kernel, and the references in torch.

T rows, H query heads, K key/value heads, D head dim, L stored tokens
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from holdfast.kernels.attention.paged_attention import Scoring, paged_attention, paged_attention_reference
from holdfast.kernels.attention.quantized_attention import quantized_attention, quantized_attention_reference
from holdfast.kernels.attention.tiled_attention import tiled_attention, tiled_attention_reference
from holdfast.quant.kv_quantize import rotate_heads
from kernels import quantized_kv_cases as quantized
from kernels import tiled_cases as tiled
from kernels.every_attention import PEAK_NATS, Attention, Memory, Poison, Step, World
from kernels.exactness import island, random, require_native
from kernels.lane_cases import by_lane
from kernels.paged_cases import PagedCase, scattered_case
from kernels.prefill_cases import in_model
from kernels.quantized_kv_cases import BITS, QuantizedStep

HEAD_DIM, GROUP, NUM_KV_HEADS, PAGE = 16, 2, 2, 16
FREE = {Poison.NAN: float("nan"), Poison.ZEROS: 0.0, Poison.LEFTOVERS: 1.5}
ALL = frozenset({"window", "sinks", "softcap", "prefill", "peak"})


def queries(step: Step, head_dim: int = HEAD_DIM) -> torch.Tensor:
    """[T, H, D]: all have a common part, which a peak's key meets."""
    return 0.5 + 0.5 * random(step.num_rows, GROUP * NUM_KV_HEADS, head_dim, seed=step.seed + 1)


def tokens(
    step: Step, rotates: tuple[bool, bool] = (False, False), head_dim: int = HEAD_DIM
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each sequence, [L, K, D]. `rotates`: pages hold keys, and values, in rotated space."""
    made = []
    for index, (start, count) in enumerate(step.rows):
        shape = (start + count, NUM_KV_HEADS, head_dim)
        k, v = (random(*shape, seed=100 * step.seed + 10 * index + which) for which in (3, 4))
        k *= 0.7
        if step.uneven:
            is_odd = (torch.arange(shape[0]).unsqueeze(1) + torch.arange(NUM_KV_HEADS)) % 2 == 1
            k *= torch.where(is_odd, 1e-2, 1.0).unsqueeze(-1) * 2
            v *= torch.where(is_odd, 1e2, 1e-2).unsqueeze(-1)
        if step.peak is not None:
            direction = torch.full((head_dim,), PEAK_NATS / (0.5 * head_dim**0.5))
            k[min(step.peak, shape[0] - 1)] = rotate_heads(direction) if rotates[0] else direction
        made.append((k, v))
    return made


def sinks(step: Step) -> torch.Tensor | None:
    """[H], all different: one far below the scores, others about what a few tokens weigh."""
    return torch.tensor([-4.0, 1.0, 2.5, 4.0]) if step.sinks else None


def paged(step: Step, head_dim: int = HEAD_DIM) -> PagedCase:
    """Plain float32 pages; nothing is left of what lies before a window, neither tokens nor pages."""
    q, stored = queries(step, head_dim), tokens(step, head_dim=head_dim)
    case = scattered_case(list(step.rows), q, stored, PAGE, step.window, step.seed, FREE[step.poison])
    if step.window is not None:
        case.poison_behind_the_window(FREE[step.poison])
        case.forget_pages_behind_the_window(tiled.BEYOND)
    return replace(case, sinks=sinks(step), softcap=step.softcap)


@dataclass
class TiledWorld:
    """Plain pages, cut into tiles by hand."""

    case: PagedCase
    step: Step
    large: bool
    device: torch.device
    function: Callable[..., torch.Tensor]

    def run(self, memory: Memory) -> torch.Tensor:
        # The reference follows every entry of the block table that a tile names.
        is_aligned = self.step.seed % 2 == 0 and self.function is not tiled_attention_reference
        cuts = len(self.case.rows) * [tiled.Cut(self.large, self.step.splits, is_aligned=is_aligned)]
        tiles = tiled.cut_tiles(self.case, cuts, self.step.num_padding)
        return tiled.run_tiles(self.case, tiles, self.device, self.function, memory=memory)

    def expected(self) -> torch.Tensor:
        return self.case.exact()


@dataclass
class QuantizedWorld:
    """Quantized pages, cut into tiles by hand."""

    case: QuantizedStep
    step: Step
    large: bool
    device: torch.device
    function: Callable[..., torch.Tensor]

    def run(self, memory: Memory) -> torch.Tensor:
        cuts = len(self.case.rows) * [quantized.Cut(self.large, self.step.splits)]
        tiles = quantized.cut_tiles(self.case, cuts, self.step.num_padding)
        return quantized.run_tiles(self.case, tiles, self.device, self.function, memory=memory)

    def expected(self) -> torch.Tensor:
        return self.case.exact()


@dataclass
class PagedWorld:
    """Plain pages, a sequence at a time: the C kernel, and its reference."""

    case: PagedCase
    function: Callable[..., torch.Tensor]

    def run(self, memory: Memory) -> torch.Tensor:
        case, (pages_P, sequences_N4) = self.case, self.case.tables()
        out_TX = memory.take("out", len(case.q), case.q.shape[1] * HEAD_DIM)
        planes = island(case.q), island(case.k_plane), island(case.v_plane)
        scoring = Scoring(case.scale, case.window, case.sinks, case.softcap)
        return self.function(*planes, pages_P, sequences_N4, case.page_tokens, scoring, out_TX)

    def expected(self) -> torch.Tensor:
        return self.case.exact()


def require_host(device: torch.device) -> None:
    """Skip what runs in host memory if outputs and scratch lie on a GPU: the lane without one holds it."""
    if device.type != "cpu":
        pytest.skip("it runs in host memory")


def make_tiled(
    step: Step,
    device: torch.device,
    large: bool,
    function: Callable[..., torch.Tensor] = tiled_attention,
    head_dim: int = HEAD_DIM,
) -> World:
    if function in (tiled_attention_reference, in_model):
        require_host(device)
    # A GPU would multiply float32 as tf32.
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    return TiledWorld(tiled.rounded(paged(step, head_dim), dtype), step, large, device, function)


def make_quantized(
    step: Step,
    device: torch.device,
    bits: tuple[int, int],
    large: bool,
    function: Callable[..., torch.Tensor] = quantized_attention,
    head_dim: int = HEAD_DIM,
) -> World:
    rotates = bits[0] < 8, bits[1] < 8
    leaves = step.poison is not Poison.LEFTOVERS
    case = QuantizedStep(
        bits,
        list(step.rows),
        queries(step, head_dim).half(),
        tokens(step, rotates, head_dim),
        PAGE,
        step.window,
        head_dim**-0.5,
        step.seed,
        sinks=sinks(step),
        softcap=step.softcap,
        poison=FREE[step.poison] if step.window is not None and leaves else None,
        hole=tiled.BEYOND if step.window is not None else None,
        free=step.poison,
    )
    if function is quantized_attention_reference:
        require_host(device)
    return QuantizedWorld(case, step, large, device, function)


def make_paged(step: Step, device: torch.device, function: Callable[..., torch.Tensor]) -> World:
    require_host(device)
    if function is paged_attention:
        require_native()
    return PagedWorld(paged(step), function)


SIZES = (("decode", False), ("prefill", True))
TILED = [
    Attention(
        f"tiled {name}",
        partial(make_tiled, large=large),
        HEAD_DIM,
        tolerance=2e-5,
        family=f"tiled {name}",
        block=64 if not large else 32,
        page=PAGE,
        takes=ALL | {"splits", "padding"},
    )
    for name, large in SIZES
]
QUANTIZED = [
    Attention(
        f"k{bits[0]}v{bits[1]} {name}",
        partial(make_quantized, bits=bits, large=large),
        HEAD_DIM,
        tolerance=3e-3,
        family=f"quantized {name}",
        page=PAGE,
        takes=ALL | {"splits", "padding", "uneven"},
    )
    for bits in BITS
    for name, large in SIZES
]
LANE = [
    Attention(
        f"lane k{bits[0]}v{bits[1]}",
        partial(make_quantized, bits=bits, large=True, function=by_lane()),
        HEAD_DIM,
        tolerance=3e-3,
        family="lane",
        page=PAGE,
        takes=ALL | {"padding", "uneven"},
    )
    for bits in ((8, 4), (3, 3))
]
PLAIN = [
    Attention("native", partial(make_paged, function=paged_attention), HEAD_DIM, 2e-5, page=PAGE, takes=ALL),
    Attention(
        "paged reference", partial(make_paged, function=paged_attention_reference), HEAD_DIM, 2e-5, page=PAGE, takes=ALL
    ),
    Attention(
        "tiled reference",
        partial(make_tiled, large=False, function=tiled_attention_reference),
        HEAD_DIM,
        2e-5,
        page=PAGE,
        takes=ALL | {"splits", "padding"},
    ),
    *(
        Attention(
            f"k{bits[0]}v{bits[1]} reference",
            partial(make_quantized, bits=bits, large=False, function=quantized_attention_reference),
            HEAD_DIM,
            3e-3,
            family="quantized reference",
            page=PAGE,
            takes=ALL | {"splits", "padding", "uneven"},
        )
        for bits in BITS
    ),
]
MODELLED = [
    Attention(
        "prefill in warpgroups, modelled",
        partial(make_tiled, large=True, function=in_model, head_dim=64),
        64,
        tolerance=2e-5,
        block=128,
        page=PAGE,
        takes=ALL | {"splits", "padding"},
    )
]
GROUPED = (*TILED, *QUANTIZED, *LANE, *PLAIN, *MODELLED)
