"""Steps over quantized pages: sequences scattered amid poison, tiles cut by hand, and the same in float64 without a page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from holdfast.kernels.attention.key_bias import KeyBias, KeyTurns, make_key_turns
from holdfast.kernels.attention.paged_attention import Scoring
from holdfast.kernels.attention.quantized_attention import (
    quantized_attention,
    quantized_attention_reference,
    quantized_geometry,
)
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.tile_work import TileCall, TileWork
from holdfast.kernels.attention.tiled_attention import LOG2_E
from holdfast.kernels.geometry import BLOCK_TOKENS
from holdfast.quant.formats import KVFormat
from holdfast.quant.kv_quantize import (
    dequantize_keys,
    dequantize_values,
    hadamard_block,
    hadamard_signs,
    quantize_keys,
    quantize_values,
    rotate_heads,
    rotation_table,
)
from kernels.exactness import random, same_bits
from kernels.paged_cases import exact_weights
from kernels.tiled_cases import BEYOND, NAN, Tiles, amid
from red_zones import RedZones
from scratch_memory import Memory, Poison

POISON_BYTE = 0xFF
"""As a scale, and as an e4m3 code, this is NaN."""
BITS = ((8, 8), (8, 4), (5, 4), (4, 4), (3, 4), (3, 3))
"""Bits of keys and values of every format."""
FORMATS = pytest.mark.parametrize(
    ("key_bits", "value_bits"), BITS, ids=[f"k{key_bits}v{value_bits}" for key_bits, value_bits in BITS]
)
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256)


def make_planes(
    key_bits: int,
    value_bits: int,
    num_kv_heads: int,
    head_dim: int,
    page_tokens: int,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    zones: RedZones | None = None,
    k_mean_KD: torch.Tensor | None = None,
) -> QuantizedPlanes:
    """Every byte is poison; `zones`, where given, know the red zones around each plane and can check them.

    `k_mean_KD` is the mean of keys as they come: it is rotated here.
    """
    zones = zones or RedZones(torch.device(device))
    storage = {}
    for plane in KVFormat("any", "uint8", "uint8", key_bits, value_bits).planes(num_kv_heads, head_dim):
        tensor = zones.allocate(num_pages * page_tokens, *plane.token_shape, dtype=getattr(torch, plane.dtype))
        tensor.view(torch.uint8).fill_(POISON_BYTE)
        storage[plane.name] = tensor
    rotation_DD = hadamard_signs(head_dim).to(device, dtype)
    if k_mean_KD is not None:
        k_mean_KD = (rotate_heads(k_mean_KD) if key_bits < 8 else k_mean_KD.float()).to(device)
    return QuantizedPlanes.of(storage.__getitem__, key_bits, value_bits, head_dim, page_tokens, rotation_DD, k_mean_KD)


def tensors_of(planes: QuantizedPlanes) -> dict[str, torch.Tensor]:
    """The planes that are there, by name, as the storage names them."""
    tensors = {
        "k_codes": planes.k_codes_PKtB,
        "k_signs": planes.k_signs_PKtS,
        "k_scale": planes.k_scale_PKt,
        "v_codes": planes.v_codes_PKtB,
        "v_signs": planes.v_signs_PKtS,
        "v_scale": planes.v_scale_PKt,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def fill_slots(
    planes: QuantizedPlanes, slots_X: Sequence[int] | torch.Tensor, k_XKD: torch.Tensor, v_XKD: torch.Tensor
):
    """Code keys and values, which are given as a layer has them, into slots: rotated and centered as the planes want it."""
    pages_X, tokens_X = _places(planes, slots_X)
    k_XKD, v_XKD = (
        rotate_heads(x) if rotates else x.float()
        for x, rotates in ((k_XKD, planes.rotates_keys), (v_XKD, planes.rotates_values))
    )
    if planes.k_mean_KD is not None:
        k_XKD = k_XKD - planes.k_mean_KD
    planes.store(pages_X, tokens_X, quantize_keys(k_XKD, planes.key_bits), quantize_values(v_XKD, planes.value_bits))


def heads_at(planes: QuantizedPlanes, slots_X: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of slots, [X, K, D] in float32, as a layer had them: rotated back, and the mean added."""
    pages_X, tokens_X = _places(planes, slots_X)
    k_XKD = dequantize_keys(planes.keys_at(pages_X, tokens_X), planes.key_bits, planes.head_dim)
    v_XKD = dequantize_values(planes.values_at(pages_X, tokens_X), planes.value_bits, planes.head_dim)
    if planes.k_mean_KD is not None:
        k_XKD = k_XKD + planes.k_mean_KD
    return (
        rotate_heads(k_XKD) if planes.rotates_keys else k_XKD,
        rotate_heads(v_XKD) if planes.rotates_values else v_XKD,
    )


def assert_untouched(planes: QuantizedPlanes, slots_X: Sequence[int] | torch.Tensor) -> None:
    """Every byte that belongs to none of the slots is still poison."""
    pages_X, tokens_X = _places(planes, slots_X)
    for name, plane in tensors_of(planes).items():
        by_token = plane.view(torch.uint8).clone()
        by_token = by_token.view(*plane.shape[:3], -1)
        by_token[pages_X, :, tokens_X] = POISON_BYTE
        assert bool((by_token == POISON_BYTE).all()), f"{name} was written in a slot that belongs to no row"


def _places(planes: QuantizedPlanes, slots_X: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.as_tensor(slots_X, device=planes.k_scale_PKt.device, dtype=torch.int64)
    return slots // planes.page_tokens, slots % planes.page_tokens


# T rows, H query heads, K key/value heads, D head dim, L stored tokens of a sequence

# Numpy, on which the interpreter runs, warns of logarithms of zero, and where NaN or an infinity is right.
QUIET = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning"
)
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 3e-3}
"""Error of an output relative to its norm: operands are half precision, and the result is rounded again."""


@dataclass
class QuantizedStep:
    """Sequences of a step, as the layer has them; nothing is quantized yet."""

    bits: tuple[int, int]
    """Bits of keys and values."""
    rows: list[tuple[int, int]]
    """(position of the first row, number of rows) of each sequence."""
    q: torch.Tensor
    """[T, H, D] in the space of the keys."""
    tokens: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each sequence, [L, K, D], not rotated; as many as its rows see, or more."""
    page_tokens: int
    window: int | None
    scale: float
    seed: int
    """Seed of the order of pages."""
    bias: torch.Tensor | None = None
    """[K, D]: what the keys have beside `tokens`, turned by their positions, and pages do not hold."""
    rope: tuple[torch.Tensor, float] = (torch.zeros(0), 1.0)
    """Inverse frequencies, and the factor on cos and sin: how the bias is turned."""
    sinks: torch.Tensor | None = None
    """[H] in float32."""
    softcap: float | None = None
    poison: float | None = None
    """What all scales behind the window of a sequence's first row are, with codes that are NaN where they are numbers."""
    hole: int | None = None
    """What page tables have in the place of pages that lie behind that window."""
    free: Poison = Poison.NAN
    """What slots hold that belong to no sequence."""

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.tokens[0][0].shape[1]

    @property
    def row_starts(self) -> list[int]:
        return [sum(count for _, count in self.rows[:index]) for index in range(len(self.rows))]

    def pages(self) -> list[list[int]]:
        """Pages of each sequence, in random order among free ones."""
        counts = [-(-len(k) // self.page_tokens) for k, _ in self.tokens]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(self.seed)).tolist()
        if self.seed % 2 == 0:  # that masked loads read page 0 shows only where it is poison
            order.remove(0)
        return [[order.pop() for _ in range(count)] for count in counts]

    def planes(self, device: torch.device, zones: RedZones) -> QuantizedPlanes:
        """Quantized in host memory, so that they are the same bytes everywhere; every other byte is poison."""
        num_kv_heads, head_dim = self.tokens[0][0].shape[1:]
        pages = self.pages()
        shape = (*self.bits, num_kv_heads, head_dim, self.page_tokens, sum(map(len, pages)) + 3, self.q.dtype)
        quantized = make_planes(*shape)
        self._free(quantized)
        for own, (k, v) in zip(pages, self.tokens, strict=True):
            position = torch.arange(len(k))
            slots = torch.tensor(own)[position // self.page_tokens] * self.page_tokens + position % self.page_tokens
            fill_slots(quantized, slots, k, v)
        for (start, _), own in zip(self.rows, pages, strict=True):
            if self.poison is not None:
                self._poison(quantized, own, self.first_seen(start))
        planes = make_planes(*shape, device, zones)
        for name, tensor in tensors_of(planes).items():
            tensor.view(torch.uint8).copy_(tensors_of(quantized)[name].view(torch.uint8))
        return replace(
            planes,
            rotation_DD=amid(rotation_table(head_dim, self.q.dtype, "cpu"), device),
            key_bias=self.key_bias(device),
        )

    def _free(self, planes: QuantizedPlanes) -> None:
        """Fill every slot as if it were free."""
        if self.free is Poison.LEFTOVERS:
            slots = torch.arange(planes.k_scale_PKt.shape[0] * self.page_tokens)
            old = random(len(slots), *self.tokens[0][0].shape[1:], seed=self.seed + 500, scale=3.0)
            fill_slots(planes, slots, old, old.flip(0))
        elif self.free is Poison.ZEROS:
            for plane in tensors_of(planes).values():
                plane.zero_()

    def first_seen(self, start: int) -> int:
        """By the row at this position: what lies before it belongs to others."""
        return 0 if self.window is None else max(0, start - self.window + 1)

    def _poison(self, planes: QuantizedPlanes, own: list[int], num_tokens: int) -> None:
        position = torch.arange(num_tokens)
        pages, tokens = torch.tensor(own)[position // self.page_tokens], position % self.page_tokens
        for name, plane in tensors_of(planes).items():
            plane[pages, :, tokens] = self.poison if name.endswith("scale") else POISON_BYTE

    def key_bias(self, device: torch.device) -> KeyBias | None:
        """Tables amid NaN, for just the positions that are looked at."""
        if self.bias is None:
            return None
        turns = make_key_turns(*self.rope, max(len(k) for k, _ in self.tokens), self.q.dtype, "cpu")
        return KeyBias(
            amid(self.bias, device), KeyTurns(*(amid(table, device) for table in turns if table is not None))
        )

    def turned_bias(self, num_tokens: int) -> torch.Tensor:
        """[L, K, D] in float64, in the space of the keys: a pair is a complex number that is turned."""
        assert self.bias is not None
        head_dim, (frequency_C, magnitude) = self.bias.shape[-1], self.rope
        first, second = self.bias.double().chunk(2, dim=-1)
        angle_L1C = torch.outer(torch.arange(num_tokens).double(), frequency_C.double()).unsqueeze(1)
        turned = torch.complex(first, second) * torch.polar(torch.full_like(angle_L1C, magnitude), angle_L1C)
        turned_LKD = torch.cat((turned.real, turned.imag), dim=-1)
        if self.bits[0] == 8:
            return turned_LKD
        return turned_LKD @ hadamard_signs(head_dim).double() * hadamard_block(head_dim) ** -0.5

    def exact(self) -> torch.Tensor:
        """In float64 from the quantized heads themselves: no page is looked at. Queries are as tensor cores take them."""
        num_rows, _, head_dim = self.q.shape
        q = (self.q.float() * (self.scale * LOG2_E)).clamp(-65504, 65504).half().double()
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for (start, count), row, (k, v) in zip(self.rows, self.row_starts, self.tokens, strict=True):
            k, v = (x if bits == 8 else rotate_heads(x) for x, bits in zip((k, v), self.bits, strict=True))
            k = dequantize_keys(quantize_keys(k, self.bits[0]), self.bits[0], head_dim).double()
            v = dequantize_values(quantize_values(v, self.bits[1]), self.bits[1], head_dim).double()
            if self.bits[1] < 8:
                v = v @ hadamard_signs(head_dim).double() * hadamard_block(head_dim) ** -0.5
            k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
            bias = (
                torch.zeros_like(k) if self.bias is None else self.turned_bias(len(k)).repeat_interleave(self.group, 1)
            )
            for i in range(count):
                end = start + i + 1
                low = 0 if self.window is None else max(0, end - self.window)
                scores = torch.einsum("hd,lhd->hl", q[row + i], k[low:end])
                whole = self.q[row + i].double() * (
                    self.scale * LOG2_E
                )  # the bias meets queries before they are rounded
                scores += torch.einsum("hd,lhd->hl", whole, bias[low:end])
                weights = exact_weights(scores / LOG2_E, self.sinks, self.softcap)
                out[row + i] = torch.einsum("hl,lhd->hd", weights, v[low:end])
        return out.view(num_rows, -1)

    def only(self, order: list[int]) -> "QuantizedStep":
        """Some of the sequences, in this order."""
        rows = [self.row_starts[i] + row for i in order for row in range(self.rows[i][1])]
        return replace(
            self, rows=[self.rows[i] for i in order], q=self.q[rows], tokens=[self.tokens[i] for i in order], seed=99
        )


def quantized_step(
    bits: tuple[int, int],
    rows: list[tuple[int, int]],
    head_dim: int = 64,
    group: int = 4,
    num_kv_heads: int = 1,
    page_tokens: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> QuantizedStep:
    """Normal heads, whose lengths differ from token to token."""
    tokens = []
    for index, (start, count) in enumerate(rows):
        shape, first = (start + count, num_kv_heads), 10 * (seed + index)
        k, v = (random(*shape, head_dim, seed=first + i) for i in range(2))
        k_length, v_length = (random(*shape, 1, seed=first + i).abs() for i in (2, 3))
        tokens.append((k * (0.2 + k_length), v * (0.1 + 2 * v_length)))
    q = random(sum(count for _, count in rows), group * num_kv_heads, head_dim, seed=seed + 7).to(dtype)
    return QuantizedStep(bits, rows, q, tokens, page_tokens, window, head_dim**-0.5, seed)


def peaked_step(bits: int, num_tokens: int, gap: float, peak: int, head_dim: int = 16) -> QuantizedStep:
    """All scores are zero but that of one token, which is `gap` above them, as a power of two."""
    step = quantized_step((bits, bits), [(num_tokens - 1, 1)], head_dim, group=2)
    k, _ = step.tokens[0]
    k.zero_()
    direction = torch.ones(head_dim)
    k[peak] = rotate_heads(direction) if bits < 8 else direction  # alike in all coordinates, where it is quantized
    step.q[:] = 1.0
    step.scale = gap / head_dim / LOG2_E
    return step


@dataclass(frozen=True)
class Cut:
    """How a sequence becomes tiles: in `splits` ranges of whole blocks, as even as can be, or at `bounds`."""

    large: bool = False
    splits: int = 1
    bounds: tuple[int, ...] | None = None
    """Multiples of a block, rising; those that lie before all tokens or behind them make empty ranges."""


def cut_tiles(step: QuantizedStep, cuts: list[Cut], num_padding: int = 0) -> Tiles:
    """Tiles of every sequence, each cut in its own way; table rows are in reverse."""
    num_heads, num_kv_heads = step.q.shape[1], step.tokens[0][0].shape[1]
    geometry = quantized_geometry(num_heads, num_kv_heads, *step.bits)
    made = Tiles()
    for index, ((start, count), row_start, cut) in enumerate(zip(step.rows, step.row_starts, cuts, strict=True)):
        most = geometry.large_rows if cut.large else geometry.small_rows
        for offset in range(0, count, most):
            rows, position = min(most, count - offset), start + offset
            low = 0 if step.window is None else max(0, position - step.window + 1) // BLOCK_TOKENS * BLOCK_TOKENS
            ranges = _ranges(cut, low, position + rows)
            for split, (first, end) in enumerate(ranges):
                partial = made.num_partials + split if len(ranges) > 1 else -1
                tile = (
                    len(step.rows) - 1 - index,
                    row_start + offset,
                    rows,
                    position,
                    first,
                    end,
                    partial,
                    len(ranges),
                )
                (made.large if cut.large else made.small).append(tile)
            made.rows += [(made.num_partials + i * len(ranges), len(ranges)) for i in range(rows)]
            made.num_partials += rows * len(ranges) if len(ranges) > 1 else 0
    made.rows += num_padding * [(0, 0)]
    return made


def _ranges(cut: Cut, low: int, high: int) -> list[tuple[int, int]]:
    if cut.bounds is None:
        num_blocks = -(-(high - low) // BLOCK_TOKENS)
        bounds = [low + num_blocks * split // cut.splits * BLOCK_TOKENS for split in range(1, cut.splits)]
    else:
        bounds = [max(low, bound) for bound in cut.bounds]
    assert all(bound % BLOCK_TOKENS == 0 for bound in bounds), f"{bounds=}: ranges begin with a block"
    return list(zip([low, *bounds], [*(min(high, bound) for bound in bounds), high], strict=True))


def run_tiles(
    step: QuantizedStep,
    tiles: Tiles,
    device: torch.device,
    function=quantized_attention,
    num_sms: int = 1,
    memory: Memory | None = None,
) -> torch.Tensor:
    """All that is read lies amid NaN and stays as it is; all that is written lies in `memory`, between red zones."""
    zones, memory = RedZones(device), memory or Memory(device)
    num_rows, num_heads, head_dim = len(tiles.rows), *step.q.shape[1:]
    planes = step.planes(device, zones)
    before = {name: tensor.clone() for name, tensor in tensors_of(planes).items()}
    out = memory.take("out", num_rows, num_heads * head_dim, dtype=step.q.dtype)
    partial_out = memory.take("partial_out", tiles.num_partials, num_heads * head_dim)
    partial_lse = memory.take("partial_lse", tiles.num_partials, num_heads)
    padding = torch.full((num_rows - len(step.q), num_heads, head_dim), NAN, dtype=step.q.dtype)
    pages = step.pages()
    page_table = torch.full((len(pages), max(map(len, pages)) + 3), BEYOND, dtype=torch.int32)
    for index, ((start, _), own) in enumerate(zip(step.rows, pages, strict=True)):
        page_table[len(pages) - 1 - index, : len(own)] = torch.tensor(own)
        if step.hole is not None:
            page_table[len(pages) - 1 - index, : step.first_seen(start) // step.page_tokens] = step.hole
    heads = (len(tiles.small), len(tiles.large), 0, 0, 0, 0, 0, 0)
    beyond = 4 * [(0, 0, 1, 0, 0, 1, BEYOND, 1)]  # tiles of a step before this one
    listed = torch.tensor([heads, *tiles.small, *tiles.large, *beyond], dtype=torch.int32, device=device)
    row_list = torch.tensor([*tiles.rows, *(4 * [(BEYOND, 3)])], dtype=torch.int32, device=device)
    has_merge = tiles.num_partials > 0 or any(splits == 0 for _, splits in tiles.rows)
    work = TileWork(listed, row_list, bool(tiles.small), bool(tiles.large), has_merge)
    q = amid(torch.cat((step.q, padding)), device)
    sinks = None if step.sinks is None else amid(step.sinks, device)
    scoring = Scoring(step.scale, step.window, sinks, step.softcap)
    call = TileCall(q, page_table.to(device), work, scoring, partial_out, partial_lse, out, num_sms)
    assert function(call, planes) is out
    zones.check()
    memory.check()
    for name, tensor in tensors_of(planes).items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), f"{name} was written"
    return out.cpu()


def assert_near(out: torch.Tensor, expected: torch.Tensor, step: QuantizedStep, at_least: float = 0.0) -> None:
    """Errors of heads are small against their lengths, or against `at_least`: all together, and of every head alone."""
    off, length = (x.double().view(-1, step.q.shape[2]).norm(dim=-1) for x in (out.double() - expected, expected))
    assert not off.isnan().any(), "NaN in a result, or in what it is judged by"
    error, tolerance = off / length.clamp(min=max(at_least, 1e-12)), TOLERANCE[step.q.dtype]
    # The mean of few heads is as far off as one of them may be.
    few = 1.0 + 2.0 / len(error) ** 0.5
    assert error.square().mean().sqrt() < few * tolerance, f"errors of heads {error}"
    assert error.max() < 3 * tolerance, f"errors of heads {error}"


def judge(
    step: QuantizedStep, cuts: list[Cut] | Cut, device: torch.device, num_padding: int = 0, num_sms: int = 1
) -> torch.Tensor:
    """Against the reference, and both against float64; padding is zeros."""
    cuts = cuts if isinstance(cuts, list) else [cuts] * len(step.rows)
    tiles, num_rows = cut_tiles(step, cuts, num_padding), len(step.q)
    out = run_tiles(step, tiles, device, num_sms=num_sms)
    reference = run_tiles(step, tiles, torch.device("cpu"), quantized_attention_reference)
    assert_near(out[:num_rows], reference[:num_rows].double(), step)
    for written in (out, reference):
        assert_near(written[:num_rows], step.exact(), step)
        assert same_bits(written[num_rows:], torch.zeros_like(written[num_rows:])), "padding is zeros"
    return out
