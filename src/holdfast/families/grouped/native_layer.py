"""A decoder layer as one call of C: its weights and a step's buffers as structs, which native/layer.c reads.

The call runs the kernels that the layer's parts run one by one, so its bits are theirs. It saves the time between them.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.paged_attention import Scoring
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary, num_turned_pairs
from holdfast.kernels.native_library import NATIVE_CODES, native_for, native_library
from holdfast.layers.mlp import RMSNorm
from holdfast.quant.packed_tiles import TILE_SCHEMES, TILE_TYPES, input_bytes
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
MOST_PARTS = 4
PLAIN, QUANTIZED, TILES, TILES_FULL = range(4)
"""Kinds of parts, as native/layer.c numbers them."""


class PartStruct(ctypes.Structure):
    """Rows of a weight that are stored in one way."""

    _fields_: ClassVar = [
        *((name, _INT) for name in ("kind", "type", "first", "num_rows")),
        *((name, _POINTER) for name in ("codes", "scales")),
        *((name, _INT) for name in ("block_rows", "block_columns")),
    ]


class ProductStruct(ctypes.Structure):
    """A linear layer."""

    _fields_: ClassVar = [
        *((name, _INT) for name in ("num_parts", "num_rows", "num_columns")),
        ("bias", _POINTER),
        ("parts", PartStruct * MOST_PARTS),
    ]


class NormStruct(ctypes.Structure):
    """An RMSNorm."""

    _fields_: ClassVar = [("weight", _POINTER), ("eps", _DOUBLE), ("offset", _DOUBLE)]


class LayerStruct(ctypes.Structure):
    """A layer: what no step changes."""

    _fields_: ClassVar = [
        ("attn_norm", NormStruct),
        ("mlp_norm", NormStruct),
        *((name, ProductStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _POINTER) for name in ("q_norm", "k_norm")),
        *((name, _DOUBLE) for name in ("head_eps", "head_offset")),
        *((name, _POINTER) for name in ("cosine", "sine", "sinks", "k_plane", "v_plane")),
        *(
            (name, _INT)
            for name in ("group", "num_heads", "num_kv_heads", "head_dim", "num_pairs", "page_tokens", "window")
        ),
        *((name, _DOUBLE) for name in ("scale", "softcap")),
    ]


class PlacesStruct(ctypes.Structure):
    """Slots and pages of a cache group in a step."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("slots", "pages", "sequences")),
        ("num_sequences", _INT),
    ]


BUFFERS = ("x", "normed", "delta", "qkv", "q", "attended", "wide", "active")
"""Float32 buffers of a step, by name."""


class StepStruct(ctypes.Structure):
    """The buffers of a step."""

    _fields_: ClassVar = [
        ("num_rows", _INT),
        *((name, _POINTER) for name in BUFFERS),
        ("room", _POINTER),
        ("room_bytes", _INT),
        ("groups", ctypes.POINTER(PlacesStruct)),
    ]


class NormWeights(NamedTuple):
    """Weight, epsilon and offset of an RMSNorm."""

    weight_H: Tensor
    eps: float
    offset: float

    @classmethod
    def of(cls, norm: RMSNorm) -> "NormWeights":
        return cls(norm.weight_H, norm.eps, norm.offset)


class HeadPlaces(NamedTuple):
    """How a layer's heads are normed, rotated, stored and scored."""

    norm: HeadNorm | None
    rotary: Rotary | None
    planes: tuple[Tensor, Tensor]
    """Pages of keys and values, each [S, K, D]."""
    group: int
    num_heads: int
    page_tokens: int
    scoring: Scoring


class Products(NamedTuple):
    """Weights and biases of the four products."""

    qkv: tuple[AnyWeight, Tensor | None]
    o: tuple[AnyWeight, Tensor | None]
    gate_up: tuple[AnyWeight, Tensor | None]
    down: tuple[AnyWeight, Tensor | None]


class GroupPlaces(NamedTuple):
    """A step's slots and pages in a cache group: int64 [T], int32 [P] and int64 [N, 4]."""

    slots_T: Tensor
    pages_P: Tensor
    sequences_N4: Tensor


class NativeLayer:
    """One layer; it holds the tensors whose addresses the struct has."""

    def __init__(self, norms: tuple[NormWeights, NormWeights], products: Products, heads: HeadPlaces) -> None:
        """Call it only if `unsupported` returns None."""
        library = native_library()
        assert library is not None, "there is no C library"
        self._call = library.holdfast_layer
        self._held = norms, products, heads
        self._struct = _layer_struct(norms, products, heads)
        self._pointer = ctypes.addressof(self._struct)

    def __call__(self, step: "NativeStep", has_delta: bool) -> None:
        """Run the layer: the residual stream stays in x, and what the next norm adds to it in delta."""
        self._call(self._pointer, step.pointer, has_delta)


class NativeStep:
    """A step's buffers; it holds their tensors."""

    def __init__(
        self, num_rows: int, buffers: Sequence[Tensor], groups: Sequence[GroupPlaces], room_X: Tensor | None
    ) -> None:
        """`buffers` are in the order of BUFFERS; `room_X` are bytes for quantized activations."""
        for name, tensor in zip(BUFFERS, buffers, strict=True):
            assert tensor.dtype is torch.float32, f"{name}: {tensor.dtype}"
            assert tensor.is_contiguous(), f"{name}: {tensor.stride()=}"
            assert len(tensor) == num_rows, f"{name}: {tensor.shape=} for {num_rows} rows"
        places = [
            PlacesStruct(slots_T.data_ptr(), pages_P.data_ptr(), sequences_N4.data_ptr(), len(sequences_N4))
            for slots_T, pages_P, sequences_N4 in groups
        ]
        self._groups = (PlacesStruct * len(places))(*places)
        self._held = buffers, groups, room_X
        room = (None, 0) if room_X is None else (room_X.data_ptr(), room_X.numel())
        self._struct = StepStruct(num_rows, *(tensor.data_ptr() for tensor in buffers), *room, self._groups)
        self.pointer = ctypes.addressof(self._struct)


def unsupported(norms: tuple[NormWeights, NormWeights], products: Products, heads: HeadPlaces) -> str | None:
    """Return None, or why C cannot run the layer as one call."""
    if native_library() is None:
        return "there is no C library"
    rotary, norm = heads.rotary, heads.norm
    tables = (None, None) if rotary is None else (rotary.cos_TP, rotary.sin_TP)
    weights = (None, None) if norm is None else (norm.q_weight_D, norm.k_weight_D)
    vectors = (*(one.weight_H for one in norms), *(bias for _, bias in products), *weights, heads.scoring.sinks_H)
    if native_for(*heads.planes, *tables, *vectors) is None:
        return "norms, biases or pages are not in float32"
    if rotary is not None and rotary.dim != heads.planes[0].shape[2]:
        return "RoPE rotates a part of a head"
    return next((why for weight, _ in products if (why := _unsupported_weight(weight)) is not None), None)


def _unsupported_weight(weight: AnyWeight) -> str | None:
    if len(weight.shape) != 2:
        return "a weight is stacked"
    if isinstance(weight, Tensor):
        return None if native_for(weight) is not None else f"a weight is in {weight.dtype}"
    if isinstance(weight, QuantizedWeight):
        return f"{weight.scheme.name} quantizes activations" if weight.scheme.quantizes_activations else None
    if len(weight.parts) > MOST_PARTS:
        return f"a weight has {len(weight.parts)} parts"
    others = (part.scheme for part in weight.parts if part.scheme != TILE_SCHEMES.get(part.scheme.title))
    if (scheme := next(others, None)) is not None:
        return f"{scheme.title} is not in tiles"
    if weight.activations == "int8" and (weight.room is None or weight.room.numel() < input_bytes(1, weight.shape[1])):
        return "the workspace has no room for quantized activations"
    return None


def _layer_struct(norms: tuple[NormWeights, NormWeights], products: Products, heads: HeadPlaces) -> LayerStruct:
    struct, (scale, window, sinks_H, softcap) = LayerStruct(), heads.scoring
    for name, norm in zip(("attn_norm", "mlp_norm"), norms, strict=True):
        setattr(struct, name, NormStruct(norm.weight_H.data_ptr(), norm.eps, norm.offset))
    for name, (weight, bias_N) in zip(Products._fields, products, strict=True):
        setattr(struct, name, _product_struct(weight, bias_N))
    if heads.norm is not None:
        struct.q_norm, struct.k_norm = heads.norm.q_weight_D.data_ptr(), heads.norm.k_weight_D.data_ptr()
        struct.head_eps, struct.head_offset = heads.norm.eps, heads.norm.offset
    if heads.rotary is not None:
        struct.cosine, struct.sine = heads.rotary.cos_TP.data_ptr(), heads.rotary.sin_TP.data_ptr()
    k_plane_SKD, v_plane_SKD = heads.planes
    struct.k_plane, struct.v_plane = k_plane_SKD.data_ptr(), v_plane_SKD.data_ptr()
    struct.sinks = None if sinks_H is None else sinks_H.data_ptr()
    struct.group, struct.page_tokens, struct.num_heads = heads.group, heads.page_tokens, heads.num_heads
    _, struct.num_kv_heads, struct.head_dim = k_plane_SKD.shape
    struct.num_pairs = 0 if heads.rotary is None else num_turned_pairs(heads.rotary, struct.head_dim)
    struct.window, struct.scale, struct.softcap = window or 0, scale, softcap or 0.0
    return struct


def _product_struct(weight: AnyWeight, bias_N: Tensor | None) -> ProductStruct:
    parts: list[dict[str, Any]] = []
    size_n, size_k = weight.shape
    if isinstance(weight, Tensor):
        parts.append({"kind": PLAIN, "num_rows": size_n, "codes": weight.data_ptr()})
    elif isinstance(weight, QuantizedWeight):
        scheme, pointers = weight.scheme, {"codes": weight.codes.data_ptr(), "scales": weight.scales.data_ptr()}
        cut = {"block_rows": scheme.block_rows, "block_columns": scheme.block_columns or max(1, size_k)}
        parts.append(
            {"kind": QUANTIZED, "type": NATIVE_CODES[scheme.code_dtype], "num_rows": size_n, **pointers, **cut}
        )
    else:
        parts += _tile_parts(weight)
    structs = (PartStruct * MOST_PARTS)(*(PartStruct(**fields) for fields in parts))
    return ProductStruct(len(parts), size_n, size_k, None if bias_N is None else bias_N.data_ptr(), structs)


def _tile_parts(weight: PackedWeight) -> list[dict[str, Any]]:
    kind = TILES if weight.activations == "int8" else TILES_FULL
    return [
        {
            "kind": kind,
            "type": TILE_TYPES[part.scheme.title],
            "first": part.row_start,
            "num_rows": part.num_rows,
            "codes": part.planes[0].data_ptr(),
        }
        for part in weight.parts
    ]
