"""Compressed planes over poisoned storage between red zones, and ways to fill and read them in plain torch."""

from collections.abc import Sequence

import pytest
import torch

from holdfast.kernels.attention.quantized_planes import CodedPlanes
from holdfast.quant.formats import KVFormat
from holdfast.quant.kv_quantize import (
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
    hadamard_signs,
    rotate_heads,
)
from red_zones import RedZones

POISON_BYTE = 0xFF
"""As a scale, and as an e4m3 code, this is NaN."""
BITS = ((8, 8), (8, 4), (4, 4), (3, 4), (3, 3))
"""Of keys and values, format by format."""
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
) -> CodedPlanes:
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
    return CodedPlanes.of(storage.__getitem__, key_bits, value_bits, head_dim, page_tokens, rotation_DD, k_mean_KD)


def tensors_of(planes: CodedPlanes) -> dict[str, torch.Tensor]:
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


def fill_slots(planes: CodedPlanes, slots_X: Sequence[int] | torch.Tensor, k_XKD: torch.Tensor, v_XKD: torch.Tensor):
    """Code keys and values, which are given as a layer has them, into slots: rotated and centered as the planes want it."""
    pages_X, tokens_X = _places(planes, slots_X)
    k_XKD, v_XKD = (
        rotate_heads(x) if rotates else x.float()
        for x, rotates in ((k_XKD, planes.rotates_keys), (v_XKD, planes.rotates_values))
    )
    if planes.k_mean_KD is not None:
        k_XKD = k_XKD - planes.k_mean_KD
    planes.store(pages_X, tokens_X, encode_keys(k_XKD, planes.key_bits), encode_values(v_XKD, planes.value_bits))


def heads_at(planes: CodedPlanes, slots_X: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of slots, [X, K, D] in float32, as a layer had them: rotated back, and the mean added."""
    pages_X, tokens_X = _places(planes, slots_X)
    k_XKD = decode_keys(planes.keys_at(pages_X, tokens_X), planes.key_bits, planes.head_dim)
    v_XKD = decode_values(planes.values_at(pages_X, tokens_X), planes.value_bits, planes.head_dim)
    if planes.k_mean_KD is not None:
        k_XKD = k_XKD + planes.k_mean_KD
    return (
        rotate_heads(k_XKD) if planes.rotates_keys else k_XKD,
        rotate_heads(v_XKD) if planes.rotates_values else v_XKD,
    )


def assert_untouched(planes: CodedPlanes, slots_X: Sequence[int] | torch.Tensor) -> None:
    """Every byte that belongs to none of the slots is still poison."""
    pages_X, tokens_X = _places(planes, slots_X)
    for name, plane in tensors_of(planes).items():
        by_token = plane.view(torch.uint8).clone()
        by_token = by_token.view(*plane.shape[:3], -1)
        by_token[pages_X, :, tokens_X] = POISON_BYTE
        assert bool((by_token == POISON_BYTE).all()), f"{name} was written in a slot that belongs to no row"


def _places(planes: CodedPlanes, slots_X: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.as_tensor(slots_X, device=planes.k_scale_PKt.device, dtype=torch.int64)
    return slots // planes.page_tokens, slots % planes.page_tokens
