"""GroupedBackend: the KV pages of every layer, plain or quantized: writing, attention in tiles, and reading in torch.

X any leading dimensions, D head dim, B bytes of a head's codes, C columns (quant/kv_quantize.py has the order of bits)

The numbers are those of quant/kv_quantize.py to the bit. A table's entry holds 2 or 4 coordinates as one element, since
torch copies single elements much faster than short rows. Coordinates stay in storage order: attention works as long as
queries follow the keys. Only the outputs, which are small, are reordered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from holdfast.attention.backend import AttentionBackend, Batch, LayerStep
from holdfast.cache.storage import PageStorage
from holdfast.families.grouped.declarations import rotated_head_dims
from holdfast.families.grouped.spec import GroupedAttentionSpec, NearSpec
from holdfast.kernels.attention.key_bias import KeyBias, key_bias_rows
from holdfast.kernels.attention.lane_rows import Lane
from holdfast.kernels.attention.near_tokens import NearPages
from holdfast.kernels.attention.quantized_attention import quantized_attention, quantized_geometry
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.tile_work import TileCall
from holdfast.kernels.attention.tiled_attention import (
    SMALL_BATCH_ROWS,
    TRITON_TILES,
    LargeKernel,
    choose_large_kernel,
    small_programs,
    tile_rows,
    tiled_attention,
)
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary, write_kv
from holdfast.kernels.attention.write_quantized_kv import NearWrite, write_quantized_kv
from holdfast.kernels.geometry import BLOCK_TOKENS, TileGeometry
from holdfast.quant.kv_quantize import (
    KEY_CODEBOOKS,
    KEY_PARTS,
    VALUE_CODEBOOKS,
    VALUE_PARTS,
    QuantizedHeads,
    hadamard_block,
    part_dims,
    rotation_table,
)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The slots of positions [first, end) of one sequence: one contiguous run, or a list of pages to gather."""

    first: int
    num_tokens: int
    first_slot: int
    pages_P: torch.Tensor | None
    """None if the slots are contiguous."""

    @classmethod
    def locate(cls, pages: Sequence[int], first: int, end: int, page_tokens: int, device: torch.device) -> "PagedRows":
        """Locate tokens [first, end) of a sequence on these pages; skip other pages."""
        page_start, page_end = first // page_tokens, -(-end // page_tokens)
        held = list(pages[page_start:page_end])
        offset = first - page_start * page_tokens
        if held == list(range(held[0], held[0] + len(held))):
            return cls(first, end - first, held[0] * page_tokens + offset, None)
        return cls(first, end - first, offset, torch.tensor(held, device=device))

    def read(self, plane_SKD: torch.Tensor, page_tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the tokens as [K, L, D] in the given dtype: a view of the plane if possible."""
        if self.pages_P is None:
            rows_LKD = plane_SKD.narrow(0, self.first_slot, self.num_tokens)
        else:
            pages_PBKD = plane_SKD.unflatten(0, (-1, page_tokens)).index_select(0, self.pages_P)
            rows_LKD = pages_PBKD.flatten(0, 1).narrow(0, self.first_slot, self.num_tokens)
        rows_KLD = rows_LKD.permute(1, 0, 2)
        return rows_KLD if rows_KLD.dtype == dtype else rows_KLD.to(dtype)

    def read_by_head(self, plane_PKtX: torch.Tensor) -> torch.Tensor:
        """Return the tokens as [K, L, ...] of a plane whose pages lie by head."""
        page_tokens = plane_PKtX.shape[2]
        if self.pages_P is None:
            first_page, offset = divmod(self.first_slot, page_tokens)
            pages_PKtX = plane_PKtX.narrow(0, first_page, -(-(offset + self.num_tokens) // page_tokens))
        else:
            offset = self.first_slot
            pages_PKtX = plane_PKtX.index_select(0, self.pages_P)
        return pages_PKtX.transpose(0, 1).flatten(1, 2).narrow(1, offset, self.num_tokens)


class Dequantizer:
    """Reads the keys and values of one format and head dim."""

    def __init__(self, key_bits: int, value_bits: int, head_dim: int, device: torch.device) -> None:
        self._key_bits = key_bits
        self._value_bits = value_bits
        key_tables = {5: _key_pairs_of_5_bits, 4: _key_pairs_of_4_bits, 3: _key_quads_of_3_bits}
        value_tables = {4: _value_pairs_of_4_bits, 3: _value_quads_of_3_bits}
        self._key_table = key_tables[key_bits]().to(device) if key_bits < 8 else None
        self._value_table = value_tables[value_bits]().to(device) if value_bits < 8 else None
        self.key_order_D = _key_order(key_bits, head_dim).to(device)
        """Coordinate at each place of a key."""
        order_D = part_dims(VALUE_PARTS[value_bits], head_dim).T.reshape(-1)
        self.value_places_D = order_D.argsort().to(device)
        """Place of each coordinate of a value."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its tables and orders."""
        held = (self._key_table, self._value_table, self.key_order_D, self.value_places_D)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def keys(self, heads: QuantizedHeads) -> torch.Tensor:
        """Return float32 [X, D], in the rotation of the stored keys and in the order of `key_order_D`."""
        if self._key_table is None:
            numbers_XD = heads.codes_XB.view(torch.float8_e4m3fn).float()
        elif self._key_bits == 4:
            numbers_XD = _looked_up(_key_index_of_4_bits(heads.codes_XB), self._key_table)
        else:
            assert heads.signs_XS is not None, f"keys of {self._key_bits} bits have sign bits"
            index = _key_index_of_5_bits if self._key_bits == 5 else _key_index_of_3_bits
            numbers_XD = _looked_up(index(heads.codes_XB, heads.signs_XS), self._key_table)
        return numbers_XD.mul_(heads.scale_X.float().unsqueeze(-1))

    def values(self, heads: QuantizedHeads) -> torch.Tensor:
        """Return float32 [X, D], in the rotation of the stored values; `value_places_D` has each coordinate's place."""
        if self._value_table is None:
            numbers_XD = heads.codes_XB.view(torch.float8_e4m3fn).float()
        elif self._value_bits == 4:
            numbers_XD = _looked_up(heads.codes_XB.int(), self._value_table)
        else:
            assert heads.signs_XS is not None, "values of 3 bits have sign bits"
            numbers_XD = _looked_up(_value_index_of_3_bits(heads.codes_XB, heads.signs_XS), self._value_table)
        return numbers_XD.mul_(heads.scale_X.float().unsqueeze(-1))


def _key_order(bits: int, head_dim: int) -> torch.Tensor:
    dims_PC = part_dims(KEY_PARTS[bits], head_dim)
    if bits == 4:  # a word has 4 columns of one part, then 4 of the other
        return dims_PC.unflatten(-1, (-1, 4)).transpose(0, 1).reshape(-1)
    if bits == 5:  # two parts of every column, then the other two
        return dims_PC.unflatten(0, (2, 2)).transpose(1, 2).reshape(-1)
    return dims_PC.T.reshape(-1)


def _looked_up(index_XC: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    numbers = table.index_select(0, index_XC.reshape(-1)).view(torch.float32)
    return numbers.view(*index_XC.shape[:-1], index_XC.shape[-1] * table.element_size() // numbers.element_size())


def _key_index_of_4_bits(codes_XB: torch.Tensor) -> torch.Tensor:
    """Index two coordinates per byte, a magnitude below its sign. Signs, 8 bits apart, move to the magnitudes' 4."""
    words_XW = codes_XB.contiguous().view(torch.int32)
    first_XW = _closer_signs(words_XW >> 4)
    second_XW = _closer_signs(words_XW) << 16
    return (words_XW & 0x77777777 | first_XW | second_XW).view(torch.uint8).int()


def _closer_signs(words_XW: torch.Tensor) -> torch.Tensor:
    """Move bits 3, 11, 19 and 27 to bits 3, 7, 11 and 15; drop the others."""
    signs_XW = words_XW & 0x08080808
    signs_XW = (signs_XW | signs_XW >> 4) & 0x00880088
    return (signs_XW | signs_XW >> 8) & 0x8888


def _key_index_of_5_bits(codes_XB: torch.Tensor, signs_XS: torch.Tensor) -> torch.Tensor:
    """Return [X, 2 C]: magnitudes of parts 0 and 1 of a column, four bits each, then their signs; then of parts 2 and 3."""
    signs_XC = torch.cat((signs_XS & 15, signs_XS >> 4), dim=-1)
    return _column_nibbles(codes_XB) | torch.cat((signs_XC & 3, signs_XC >> 2), dim=-1).int() << 8


def _key_index_of_3_bits(codes_XB: torch.Tensor, signs_XS: torch.Tensor) -> torch.Tensor:
    """Return [X, C]: magnitudes of parts 0, 2, 1 and 3 of a column, two bits each, then all their signs."""
    signs_XC = torch.cat((signs_XS & 15, signs_XS >> 4), dim=-1)
    return _column_nibbles(codes_XB) | signs_XC.int() << 8


def _column_nibbles(codes_XB: torch.Tensor) -> torch.Tensor:
    """Return the four bits of each column in the lower half of a word, below those in the upper half."""
    shifts_4 = 4 * torch.arange(4, dtype=torch.int32, device=codes_XB.device)
    words_XW4 = codes_XB.contiguous().view(torch.int32).unsqueeze(-1) >> shifts_4
    return (words_XW4 & 15 | words_XW4 >> 12 & 240).flatten(-2)


def _value_index_of_3_bits(codes_XB: torch.Tensor, signs_XS: torch.Tensor) -> torch.Tensor:
    """Return [X, B]: the lower bits of 4 codes, then their highest bits, which are 2 bits apart and move together."""
    highest_XB = torch.cat((signs_XS, signs_XS >> 1), dim=-1) & 0x55
    highest_XB = (highest_XB | highest_XB >> 1) & 0x33
    highest_XB = (highest_XB | highest_XB >> 2) & 0x0F
    return codes_XB.int() | highest_XB.int() << 8


def _elements(rows: list[tuple[float, ...]]) -> torch.Tensor:
    """View each row as one element of 8 or 16 bytes."""
    return torch.tensor(rows, dtype=torch.float32).view(torch.int64 if len(rows[0]) == 2 else torch.complex128).view(-1)


def _signed_magnitudes(bits: int) -> list[float]:
    """List values by sign and magnitude; the sign is the higher bit."""
    magnitudes = KEY_CODEBOOKS[bits].magnitudes
    return [*magnitudes, *(-magnitude for magnitude in magnitudes)]


def _key_pairs_of_5_bits() -> torch.Tensor:
    numbers = _signed_magnitudes(5)
    rows = [
        (numbers[first | (signs & 1) << 4], numbers[second | signs >> 1 << 4])
        for signs, second, first in product(range(4), range(16), range(16))
    ]
    return _elements(rows)


def _key_pairs_of_4_bits() -> torch.Tensor:
    return _elements([(first, second) for second, first in product(_signed_magnitudes(4), repeat=2)])


def _key_quads_of_3_bits() -> torch.Tensor:
    numbers = _signed_magnitudes(3)
    rows = []
    for signs, odd, even in product(range(16), repeat=3):
        magnitudes = (even & 3, odd & 3, even >> 2, odd >> 2)
        rows.append(tuple(numbers[magnitude | (signs >> j & 1) << 2] for j, magnitude in enumerate(magnitudes)))
    return _elements(rows)


def _value_pairs_of_4_bits() -> torch.Tensor:
    return _elements([(first, second) for second, first in product(VALUE_CODEBOOKS[4].values, repeat=2)])


def _value_quads_of_3_bits() -> torch.Tensor:
    values = VALUE_CODEBOOKS[3].values
    return _elements(
        [
            tuple(values[lower >> 2 * j & 3 | (highest >> j & 1) << 2] for j in range(4))
            for highest, lower in product(range(16), range(256))
        ]
    )


class PlainPages:
    """A plane of keys and one of values, [slots, K, D]."""

    def __init__(
        self,
        k_plane_SKD: torch.Tensor,
        v_plane_SKD: torch.Tensor,
        page_tokens: int,
        group: int = 0,
        large: LargeKernel = TRITON_TILES,
        query_step: int = 1,
    ) -> None:
        """`query_step`: heads from one query of the fused projection to the next."""
        self.planes = (k_plane_SKD, v_plane_SKD)
        self._query_step = query_step
        self._page_tokens = page_tokens
        self._group = group
        self.large = large

    def write(
        self,
        qkv_TX: torch.Tensor,
        batch: Batch,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        out_THD: torch.Tensor,
    ) -> None:
        """Write keys and values to their slots and queries to `out_THD` in one pass."""
        slots_T = batch.slots_GT[self._group]
        write_kv(qkv_TX, slots_T, *self.planes, head_norm, rotary, out_THD, self._query_step)

    def tile_geometry(self, num_heads: int) -> TileGeometry:
        """Return the tile geometry of the kernel of `attend_tiles`."""
        num_kv_heads = self.planes[0].shape[1]
        return TileGeometry(
            small_rows=tile_rows(num_heads, num_kv_heads, large=False),
            large_rows=tile_rows(num_heads, num_kv_heads, large=True),
            small_programs_per_sm=small_programs(SMALL_BATCH_ROWS + 1)[0],
            large_programs_per_sm=self.large.programs_per_sm,
            large_block_tokens=self.large.block_tokens,
            block_tokens=BLOCK_TOKENS,
            small_batch_rows=SMALL_BATCH_ROWS,
            small_batch_programs_per_sm=small_programs(SMALL_BATCH_ROWS)[0],
        )

    def attend_tiles(self, call: TileCall, near_table_NP: torch.Tensor | None = None) -> None:
        """Attend with all rows of a step, on a GPU."""
        assert near_table_NP is None, "plain pages are exact already"
        tiled_attention(call, *self.planes, self._page_tokens, self.large)

    def queries(self, q_THD: torch.Tensor) -> torch.Tensor:
        """Return queries in the layout of the keys that `read` returns."""
        return q_THD

    def read(self, rows: PagedRows, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of these rows, each [K, L, D]: views of the planes if possible."""
        k_plane_SKD, v_plane_SKD = self.planes
        return rows.read(k_plane_SKD, self._page_tokens, dtype), rows.read(v_plane_SKD, self._page_tokens, dtype)

    def finish(self, out_TX: torch.Tensor) -> None:
        """Convert outputs from the layout of the values that `read` returns: nothing to do."""


class NearPlanes(NamedTuple):
    """Keys and values of one layer as they were before quantization, on pages of their own: each [slots, K, D]."""

    k_plane_SKD: torch.Tensor
    v_plane_SKD: torch.Tensor
    spec: NearSpec


class QuantizedPages:
    """The planes of one layer. Attention reads all tokens as stored, those of the current step too.

    With near planes it reads some tokens there instead: a row's own block, and perhaps the first tokens.
    """

    def __init__(
        self,
        planes: QuantizedPlanes,
        reader: Dequantizer | None = None,
        group: int = 0,
        near: NearPlanes | None = None,
        query_step: int = 1,
    ) -> None:
        """`query_step`: heads from one query of the fused projection to the next."""
        self.planes = planes
        self._query_step = query_step
        self._reader = reader
        self._group = group
        self._near = near
        self.lane: Lane | None = None
        """What prompts read instead of the pages, if the step lists them."""

    def write(
        self,
        qkv_TX: torch.Tensor,
        batch: Batch,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        out_THD: torch.Tensor,
    ) -> None:
        """Write quantized keys and values to their slots, and queries in the keys' rotation to `out_THD`."""
        slots_T, near = batch.slots_GT[self._group], None
        if self._near is not None:
            k_plane_SKD, v_plane_SKD, spec = self._near
            near = NearWrite(batch.slots_GT[spec.group], batch.positions_T, k_plane_SKD, v_plane_SKD)
        write_quantized_kv(qkv_TX, slots_T, self.planes, head_norm, rotary, out_THD, near, self._query_step)

    def tile_geometry(self, num_heads: int) -> TileGeometry:
        """Return the tile geometry of the kernel of `attend_tiles`."""
        planes = self.planes
        return quantized_geometry(num_heads, planes.num_kv_heads, planes.key_bits, planes.value_bits)

    def attend_tiles(self, call: TileCall, near_table_NP: torch.Tensor | None = None) -> None:
        """Attend with all rows of a step, on a GPU."""
        near = None
        if self._near is not None:
            assert near_table_NP is not None, "near pages have a page table of their own"
            k_plane_SKD, v_plane_SKD, spec = self._near
            near = NearPages(
                k_plane_SKD, v_plane_SKD, near_table_NP, spec.page_tokens, spec.block_tokens, spec.first_tokens
            )
        quantized_attention(call, self.planes, near, self.lane)

    def queries(self, q_THD: torch.Tensor) -> torch.Tensor:
        """Return queries in the layout of the keys that `read` returns: coordinates in the keys' order."""
        return q_THD if self.planes.key_bits == 8 else q_THD.index_select(-1, self.reader.key_order_D)

    def read(self, rows: PagedRows, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of these rows, each [K, L, D], with coordinates in storage order."""
        planes, reader = self.planes, self.reader
        k_KLD = reader.keys(_heads(rows, planes.k_codes_PKtB, planes.k_signs_PKtS, planes.k_scale_PKt))
        v_KLD = reader.values(_heads(rows, planes.v_codes_PKtB, planes.v_signs_PKtS, planes.v_scale_PKt))
        if planes.key_bias is not None:
            k_KLD += self._key_bias_rows(planes.key_bias, rows)
        return k_KLD.to(dtype), v_KLD.to(dtype)

    def read_near(self, rows: PagedRows, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of these rows of near pages, each [K, L, D], as `read` returns those of codes."""
        assert self._near is not None, "this layer has no near pages"
        k_plane_SKD, v_plane_SKD, spec = self._near
        k_KLD, v_KLD = (rows.read(plane, spec.page_tokens, dtype) for plane in (k_plane_SKD, v_plane_SKD))
        k_KLD = k_KLD if self.planes.key_bits == 8 else k_KLD.index_select(-1, self.reader.key_order_D)
        return k_KLD, torch.empty_like(v_KLD).index_copy_(-1, self.reader.value_places_D, v_KLD)

    def _key_bias_rows(self, key_bias: KeyBias, rows: PagedRows) -> torch.Tensor:
        """Return the bias that these keys are stored without, in float32, in their order and rotation."""
        position_L = torch.arange(rows.first, rows.first + rows.num_tokens, device=key_bias.bias_KD.device)
        bias_KLD = key_bias_rows(key_bias, position_L)
        if not self.planes.rotates_keys:
            return bias_KLD
        head_dim = self.planes.head_dim
        signs_DD = self.planes.rotation_DD[:head_dim].index_select(1, self.reader.key_order_D)
        return bias_KLD @ (signs_DD.float() * hadamard_block(head_dim) ** -0.5)

    def finish(self, out_TX: torch.Tensor) -> None:
        """Convert outputs from the values' layout: reorder, and rotate back."""
        out_XD = out_TX.view(-1, self.planes.head_dim)
        ordered_XD = out_XD.index_select(-1, self.reader.value_places_D)
        if self.planes.rotates_values:
            ordered_XD = ordered_XD.float() @ self.planes.rotation_DD[: self.planes.head_dim].float()
            ordered_XD *= hadamard_block(self.planes.head_dim) ** -0.5
        out_XD.copy_(ordered_XD)

    @property
    def reader(self) -> Dequantizer:
        """The dequantizer that `read` uses."""
        assert self._reader is not None, "these pages were made for kernels, not for reading"
        return self._reader


def _heads(
    rows: PagedRows, codes_PKtB: torch.Tensor, signs_PKtS: torch.Tensor | None, scale_PKt: torch.Tensor
) -> QuantizedHeads:
    signs_KLS = None if signs_PKtS is None else rows.read_by_head(signs_PKtS)
    return QuantizedHeads(rows.read_by_head(codes_PKtB), signs_KLS, rows.read_by_head(scale_PKt))


KeyMeans = Sequence[torch.Tensor | None]
"""By quantized layer [K, D] in float32, in pair order and rotated like its keys; None: no mean is subtracted from them."""
PairScales = Sequence[torch.Tensor | None]
"""By quantized layer [2, K, D] in float32, in pair order: factors of keys, and of queries; None: they stay as they are."""
KeyBiases = Sequence[KeyBias | None]
"""By layer whose pages hold keys without their bias; None: no bias, or the keys include it."""
Sinks = Sequence[torch.Tensor | None]
"""By layer [H] in float32; None: a plain softmax."""
OnWrite = Callable[[int, torch.Tensor, HeadNorm | None, Rotary | None], None]
"""Takes a layer, the projection of a step, its head norm and its RoPE."""


class GroupedBackend(AttentionBackend):
    """Keys and values by head. `specs[i]` and the storage's i-th planes belong to layer i."""

    def __init__(
        self,
        specs: Sequence[GroupedAttentionSpec],
        storage: PageStorage,
        k_means: KeyMeans | None = None,
        is_read: bool = False,
        key_biases: KeyBiases | None = None,
        sinks: Sinks | None = None,
        pair_scales: PairScales | None = None,
    ) -> None:
        """`is_read`: plain torch reads quantized pages, which takes tables."""
        self._specs = specs
        self._sinks = sinks or (None,) * len(specs)
        for spec, sinks_H in zip(specs, self._sinks, strict=True):
            shape = None if sinks_H is None else tuple(sinks_H.shape)
            assert shape == ((spec.num_heads,) if spec.has_sinks else None), f"sinks of {shape} for {spec}"
        self.on_write: OnWrite | None = None
        """Called before anything is written."""
        self._device = storage.plane(0, specs[0].cache.planes[0].name).device
        dtype: torch.dtype = getattr(torch, specs[0].dtype)
        self._rotations = {dim: rotation_table(dim, dtype, self._device) for dim in rotated_head_dims(specs)}
        self._no_rotation = torch.empty(0, 0, dtype=dtype, device=self._device)
        self._readers: dict[tuple[int, int, int], Dequantizer] = {}
        means, self._key_biases = k_means or (None,) * len(specs), key_biases or (None,) * len(specs)
        self._pair_scales = pair_scales or (None,) * len(specs)
        self.pages: tuple[PlainPages | QuantizedPages, ...] = tuple(
            self._quantized(layer, storage, k_mean_KD, is_read)
            if spec.cache.format.is_quantized
            else self._plain(layer, storage)
            for layer, (spec, k_mean_KD) in enumerate(zip(specs, means, strict=True))
        )
        """By layer."""

    def write(
        self,
        qkv_TX: torch.Tensor,
        batch: Batch,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        layer: int,
        out_THD: torch.Tensor,
    ) -> None:
        """Write keys and values to their slots and queries to `out_THD` in one pass."""
        if self.on_write is not None:
            self.on_write(layer, qkv_TX, head_norm, rotary)
        self.pages[layer].write(qkv_TX, batch, head_norm, rotary, out_THD)

    def attend(self, q_THD: torch.Tensor, step: LayerStep, out_TX: torch.Tensor, wanted_only: bool) -> torch.Tensor:
        """Attend to all stored tokens: [T, H * D]; or only with the rows whose logits are wanted: [R, H * D]."""
        raise NotImplementedError

    def held_bytes(self) -> dict[str, int]:
        """Bytes of quantized pages beside the storage, and of sinks."""
        held: dict[str, int] = {}
        if self._readers:
            held["attention/dequantize"] = sum(reader.num_bytes for reader in self._readers.values())
        if self._rotations:
            held["attention/rotation"] = sum(rotation_DD.nbytes for rotation_DD in self._rotations.values())
        if biases := [bias for bias in self._key_biases if bias is not None]:
            turns = {bias.turns.cos_BC.data_ptr(): bias.turns for bias in biases}.values()
            held["attention/key_bias"] = sum(one.num_bytes for one in (*biases, *turns))
        if sinks := [sinks_H for sinks_H in self._sinks if sinks_H is not None]:
            held["attention/sinks"] = sum(sinks_H.nbytes for sinks_H in sinks)
        return held

    def _plain(self, layer: int, storage: PageStorage) -> PlainPages:
        spec, page_tokens = self._specs[layer], storage.spec.page_tokens
        k_plane_SKD = storage.plane(layer, "k")
        large = choose_large_kernel(k_plane_SKD, page_tokens, spec.num_heads, spec.scale)
        return PlainPages(k_plane_SKD, storage.plane(layer, "v"), page_tokens, spec.group, large, spec.query_step)

    def _quantized(
        self, layer: int, storage: PageStorage, k_mean_KD: torch.Tensor | None, is_read: bool
    ) -> QuantizedPages:
        cache, group = self._specs[layer].cache, self._specs[layer].group
        key_bits, value_bits, head_dim = cache.format.key_bits, cache.format.value_bits, cache.head_dim
        assert key_bits is not None and value_bits is not None, f"{cache.format.name} codes only one of both"  # noqa: PT018
        planes = QuantizedPlanes.of(
            lambda name: storage.plane(layer, name),
            key_bits,
            value_bits,
            head_dim,
            storage.spec.page_tokens,
            self._rotations[head_dim] if min(key_bits, value_bits) < 8 else self._no_rotation,
            k_mean_KD,
            self._key_biases[layer],
            self._pair_scales[layer],
        )
        near, query_step, reader = self._near_planes(layer, storage), self._specs[layer].query_step, None
        if is_read:
            kind = (key_bits, value_bits, head_dim)
            reader = self._readers.get(kind) or Dequantizer(*kind, self._device)
            self._readers[kind] = reader
        return QuantizedPages(planes, reader, group, near, query_step)

    def _near_planes(self, layer: int, storage: PageStorage) -> NearPlanes | None:
        near = self._specs[layer].near
        return near and NearPlanes(storage.plane(layer, "near_k"), storage.plane(layer, "near_v"), near)
