"""Formats as values: their bytes are torch's bytes."""

from dataclasses import replace

import pytest

from error_codes import raises_code
from holdfast.errors import ConfigError
from holdfast.quant.entry_state import pooled_width, state_bytes, state_shape
from holdfast.quant.formats import (
    ALL_KV_FORMATS,
    COMPRESSED_FORMATS,
    COMPRESSED_NAMES,
    DEFAULT_PROTECTED_LAYERS,
    DTYPE_BYTES,
    INDEX_FORMATS,
    KV_FORMATS,
    MLA_FORMATS,
    MLA_NAMES,
    KVFormat,
    Plane,
    bytes_for,
    formats_of,
    index_dtype_beside,
    index_planes,
    kv_format,
)

PLAIN = [name for name, value in KV_FORMATS.items() if not value.is_quantized]
QUANTIZED = [name for name, value in KV_FORMATS.items() if value.is_quantized]


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_dtype_bytes_match_torch(name: str) -> None:
    import torch

    assert torch.empty((), dtype=getattr(torch, name)).element_size() == DTYPE_BYTES[name]


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5, 2)], ids=str)
def test_bytes_for_matches_torch(shape: tuple[int, ...]) -> None:
    import torch

    assert bytes_for("bfloat16", shape) == torch.empty(shape, dtype=torch.bfloat16).nbytes


@pytest.mark.parametrize("name", PLAIN)
def test_plain_kv_format_keeps_a_key_and_a_value_per_head(name: str) -> None:
    planes = KV_FORMATS[name].planes(num_kv_heads=3, head_dim=64)
    assert KV_FORMATS[name].name == name
    assert [plane.name for plane in planes] == ["k", "v"]
    assert all(plane.token_shape == (3, 64) for plane in planes)
    assert KV_FORMATS[name].bytes_per_token(3, 64) == 2 * 3 * 64 * DTYPE_BYTES[name]


def test_kv_format_accepts_different_key_and_value_dtypes() -> None:
    planes = KVFormat("mixed", "float32", "float16").planes(2, 8)
    assert planes == (Plane("k", "float32", (2, 8)), Plane("v", "float16", (2, 8)))
    assert [plane.bytes_per_token for plane in planes] == [64, 32]


def test_bytes_for_unknown_dtype_raises_key_error() -> None:
    with pytest.raises(KeyError):
        bytes_for("float3", (1,))


SLOTS = {
    "fp8": {64: 132, 128: 260, 256: 516},
    "turboquant_k8v4": {64: 100, 80: 124, 128: 196, 256: 388},
    "turboquant_k5v4": {64: 76, 80: 94, 128: 148, 256: 292},
    "turboquant_4bit_nc": {64: 68, 80: 84, 128: 132, 256: 260},
    "turboquant_k3v4_nc": {64: 60, 80: 74, 128: 116, 256: 228},
    "turboquant_3bit_nc": {64: 52, 80: 64, 128: 100, 256: 196},
}
"""Bytes of one head of one token, by head dim: codes, and two scales of two bytes."""
MOST = {
    "turboquant_k8v4": {64: 100, 128: 196, 256: 388},
    "turboquant_4bit_nc": {64: 70, 128: 134, 256: 262},
    "turboquant_k3v4_nc": {64: 62, 128: 118, 256: 230},
    "turboquant_3bit_nc": {64: 54, 128: 102, 256: 198},
}
"""What the formats of these names take in vLLM."""


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_kv_format_bytes_match_slots(name: str) -> None:
    for head_dim, slot_bytes in SLOTS[name].items():
        assert slot_bytes <= MOST.get(name, {}).get(head_dim, slot_bytes)
        for num_kv_heads in (1, 3, 8):
            assert KV_FORMATS[name].bytes_per_token(num_kv_heads, head_dim) == num_kv_heads * slot_bytes


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_kv_format_names_no_plane_k_or_v(name: str) -> None:
    planes = KV_FORMATS[name].planes(2, 64)
    assert not {"k", "v"} & {plane.name for plane in planes}, "plain torch would attend to codes as if they were values"
    assert {plane.dtype for plane in planes} == {"uint8", "float16"}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 112, 128, 192, 256])
def test_quantized_kv_format_codes_have_every_bit(name: str, head_dim: int) -> None:
    kv_format = KV_FORMATS[name]
    for letter, bits in (("k", kv_format.key_bits), ("v", kv_format.value_bits)):
        assert bits is not None
        parts = {plane.name: plane for plane in kv_format.planes(3, head_dim) if plane.name.startswith(letter)}
        assert parts.pop(f"{letter}_scale").bytes_per_token == 3 * 2
        assert 8 * sum(plane.bytes_per_token for plane in parts.values()) == 3 * head_dim * bits


def test_kv_format_finds_each_format_by_name() -> None:
    for name, value in KV_FORMATS.items():
        assert kv_format(name) is value
        assert value.name == name


def test_default_protected_layers_cover_quantized_formats() -> None:
    """Formats with keys of few bits protect four layers; keys of 8 and 5 bits need none."""
    assert {name: 4 * (KV_FORMATS[name].key_bits in (3, 4)) for name in QUANTIZED} == DEFAULT_PROTECTED_LAYERS


@pytest.mark.parametrize(
    ("name", "near"),
    [("turboquant_k8v5", "turboquant_k8v4"), ("bf16", "bfloat16"), ("", ""), (7, ""), ([], "")],
)
def test_kv_format_unknown_name_suggests_the_nearest(name: str, near: str) -> None:
    with raises_code("value.not_one_of", ConfigError, name="kv_cache_dtype") as caught:
        kv_format(name)
    assert caught.value.hints == ((f"Did you mean {near}?",) if near else ())


@pytest.mark.parametrize(
    ("is_latent", "is_compressed", "quantized"),
    [
        (False, False, set(QUANTIZED)),
        (True, False, set(MLA_FORMATS)),
        (True, True, set(COMPRESSED_FORMATS)),
        (False, True, set(COMPRESSED_FORMATS)),
    ],
    ids=["heads", "latents", "compressed latents", "compressed"],
)
def test_formats_of_model_are_plain_and_its_own(is_latent: bool, is_compressed: bool, quantized: set[str]) -> None:
    found = formats_of(is_latent, is_compressed)
    assert set(found) == {*PLAIN, *quantized}
    for value in found.values():
        assert value.is_quantized == (value.name in quantized)
        assert value.is_latent == (value.is_quantized and quantized != set(QUANTIZED))


@pytest.mark.parametrize("name", ALL_KV_FORMATS)
def test_index_dtype_beside_is_fp8_if_format_is_quantized(name: str) -> None:
    """Otherwise it has the type of the latents; a format may name another."""
    value = ALL_KV_FORMATS[name]
    assert index_dtype_beside(value) == ("fp8" if value.is_quantized else name)
    assert index_dtype_beside(replace(value, index_dtype="float16")) == "float16"


@pytest.mark.parametrize("dtype", INDEX_FORMATS)
def test_index_planes_have_a_scale_if_fp8(dtype: str) -> None:
    num_bytes = sum(plane.bytes_per_token for plane in index_planes(dtype, 48))
    assert num_bytes == (48 + 4 if dtype == "fp8" else 48 * DTYPE_BYTES[dtype])


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("fp8_ds_mla", 512 + 4 * 4 + 2 * 64),
        ("turboquant_mla_4bit", 256 + 2 + 2 * 64),
        ("turboquant_mla_4bit_r8", 256 + 4 + 64),
        ("fp8_ds_v4", 512 + 2 * 64 + 8),
        ("bfloat16", 2 * 576),
    ],
)
def test_latent_format_bytes_add_up(name: str, num_bytes: int) -> None:
    assert ALL_KV_FORMATS[name].bytes_per_token(1, 576, rope_dim=64) == num_bytes


def test_format_aliases_of_latent_models_keep_their_bits() -> None:
    for names, found in ((MLA_NAMES, MLA_FORMATS), (COMPRESSED_NAMES, COMPRESSED_FORMATS)):
        for name, own in names.items():
            assert found[own].key_bits == ALL_KV_FORMATS[name].key_bits
            assert name not in found


@pytest.mark.parametrize(("is_overlapped", "sums"), [(False, 1), (True, 2)], ids=["apart", "overlapped"])
def test_compress_state_of_overlapped_entries_has_two_sums(is_overlapped: bool, sums: int) -> None:
    """Each sum holds m, l and acc in float32."""
    assert pooled_width(40, is_overlapped) == 40 * sums
    assert state_shape(40, is_overlapped) == (sums, 3, 40)
    assert state_bytes(40, is_overlapped) == sums * 3 * 40 * 4
