"""Formats as values: their bytes are torch's bytes."""

import pytest

from holdfast.quant.formats import DTYPE_BYTES, KV_FORMATS, KVFormat, Plane, bytes_for


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
