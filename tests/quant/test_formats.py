"""Formats as values: their bytes are torch's bytes."""

import pytest

from holdfast.errors import ConfigError
from holdfast.quant.formats import DTYPE_BYTES, KV_FORMATS, PLANNED_KV_FORMATS, KVFormat, Plane, bytes_for, kv_format


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_bytes_of_an_element_are_those_of_torch(name: str) -> None:
    import torch

    assert torch.empty((), dtype=getattr(torch, name)).element_size() == DTYPE_BYTES[name]


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5, 2)], ids=str)
def test_bytes_of_a_tensor(shape: tuple[int, ...]) -> None:
    import torch

    assert bytes_for("bfloat16", shape) == torch.empty(shape, dtype=torch.bfloat16).nbytes


@pytest.mark.parametrize("name", KV_FORMATS)
def test_every_format_keeps_a_key_and_a_value_per_head(name: str) -> None:
    planes = KV_FORMATS[name].planes(num_kv_heads=3, head_dim=64)
    assert KV_FORMATS[name].name == name
    assert [plane.name for plane in planes] == ["k", "v"]
    assert all(plane.token_shape == (3, 64) for plane in planes)
    assert sum(plane.bytes_per_token for plane in planes) == 2 * 3 * 64 * DTYPE_BYTES[name]


def test_keys_and_values_may_differ() -> None:
    planes = KVFormat("mixed", "float32", "float16").planes(2, 8)
    assert planes == (Plane("k", "float32", (2, 8)), Plane("v", "float16", (2, 8)))
    assert [plane.bytes_per_token for plane in planes] == [64, 32]


def test_an_unknown_type_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError):
        bytes_for("float3", (1,))


SLOTS = {
    "turboquant_k8v4": {64: 100, 128: 196, 256: 388},
    "turboquant_4bit_nc": {64: 70, 128: 134, 256: 262},
    "turboquant_k3v4_nc": {64: 62, 128: 118, 256: 230},
    "turboquant_3bit_nc": {64: 54, 128: 102, 256: 198},
    "fp8": {64: 128, 128: 256, 256: 512},
}


@pytest.mark.parametrize("name", PLANNED_KV_FORMATS)
def test_bytes_of_planned_formats(name: str) -> None:
    for head_dim, slot_bytes in SLOTS[name].items():
        for num_kv_heads in (1, 3, 8):
            planes = PLANNED_KV_FORMATS[name].planes(num_kv_heads, head_dim)
            assert sum(plane.bytes_per_token for plane in planes) == num_kv_heads * slot_bytes


@pytest.mark.parametrize("name", SLOTS)
def test_no_backend_mistakes_packed_codes_for_keys(name: str) -> None:
    names = {plane.name for plane in PLANNED_KV_FORMATS[name].planes(2, 64)}
    assert ("v" in names) == (name == "fp8"), "plain torch would attend to codes as if they were values"


@pytest.mark.parametrize("head_dim", [1, 7, 80, 96])
def test_codes_of_odd_heads_are_rounded_up(head_dim: int) -> None:
    codes = kv_format("turboquant_3bit_nc").planes(1, head_dim)[0]
    assert codes.bytes_per_token * 8 >= 3 * head_dim > (codes.bytes_per_token - 1) * 8


def test_a_format_is_found_by_its_name() -> None:
    assert kv_format("bfloat16") is KV_FORMATS["bfloat16"]
    assert kv_format("fp8") is PLANNED_KV_FORMATS["fp8"]
    assert not set(KV_FORMATS) & set(PLANNED_KV_FORMATS)


@pytest.mark.parametrize(
    ("name", "near"), [("turboquant_k8v5", "turboquant_k8v4"), ("bf16", "bfloat16"), ("", "bfloat16"), (7, "bfloat16")]
)
def test_an_unknown_format_and_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_dtype=.* was asked; the formats are .*; try {near}"):
        kv_format(name)
