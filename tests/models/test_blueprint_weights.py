"""Bytes of weights under every quantization, counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.memory.tensor_spec import aligned
from holdfast.models.blueprint_weights import (
    FP8_BLOCK_E8M0,
    QUANTIZATIONS,
    QUANTIZED_KINDS,
    Weight,
    find_quantization,
    weight_bytes,
)

LINEAR = Weight("layers.0.qkv.weight", (300, 96), "linear")
SIZES = {
    "fp8": (300 * 96, 4 * 300),
    "fp8_tensor": (300 * 96, 4),
    "fp8_block": (300 * 96, 4 * 3 * 1),
    "int8": (300 * 96, 4 * 300),
    "mxfp4": (300 * 48, 300 * 3),
}


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_codes_and_scales(name: str) -> None:
    codes, scales = SIZES[name]
    assert weight_bytes(LINEAR, "bfloat16", name) == aligned(codes) + aligned(scales)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_every_expert_has_scales_of_its_own(name: str) -> None:
    codes, scales = SIZES[name]
    experts = Weight("layers.0.experts.down.weight", (7, 300, 96), "expert")
    assert weight_bytes(experts, "bfloat16", name) == aligned(7 * codes) + aligned(7 * scales)


@pytest.mark.parametrize("kind", ["embedding", "norm", "bias", "router"])
def test_the_rest_stays_as_it_is(kind) -> None:
    assert kind not in QUANTIZED_KINDS
    for name in QUANTIZATIONS:
        assert weight_bytes(Weight("x", (300, 96), kind), "bfloat16", name) == aligned(2 * 300 * 96)


def test_a_type_of_its_own_outlives_the_dtype() -> None:
    assert weight_bytes(Weight("x", (10, 6), "router", dtype="int64"), "bfloat16", None) == aligned(8 * 60)


def test_a_checkpoint_s_own_scheme_gives_way_to_what_is_asked() -> None:
    stored = LINEAR._replace(native=FP8_BLOCK_E8M0.name)
    assert weight_bytes(stored, "bfloat16", None) == aligned(300 * 96) + aligned(3)
    assert weight_bytes(stored, "bfloat16", "mxfp4") == aligned(300 * 48) + aligned(900)


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from(sorted(QUANTIZATIONS)))
def test_never_more_than_plain_fp32_and_never_less_than_the_bits(rows: int, columns: int, name: str) -> None:
    num_bytes = weight_bytes(Weight("x", (rows, columns), "linear"), "float32", name)
    assert num_bytes % 256 == 0
    assert rows * columns * QUANTIZATIONS[name].bits / 8 < num_bytes
    assert num_bytes <= rows * columns + 4 * rows * -(-columns // 32) + 512


def test_names() -> None:
    assert find_quantization(None) is None
    assert find_quantization("none") is None
    assert [find_quantization(name) for name in QUANTIZATIONS] == list(QUANTIZATIONS)
    with pytest.raises(
        ConfigError, match=r"quantization='fp8_blok' was asked; the choices are none, .*; try fp8_block"
    ):
        find_quantization("fp8_blok")
    with pytest.raises(ConfigError, match="try fp8"):
        find_quantization("awq")
    assert FP8_BLOCK_E8M0.name not in QUANTIZATIONS, "nobody asks for it: checkpoints have it"


@pytest.mark.parametrize(
    ("name", "kind", "group"),
    [
        ("embed.weight", "embedding", "embed"),
        ("layers.3.qkv.weight", "linear", "layers"),
        ("layers.3.experts.down.weight", "expert", "experts"),
        ("mtp.0.experts.down.weight", "expert", "mtp"),
        ("lm_head.weight", "head", "lm_head"),
    ],
)
def test_groups_of_a_table(name, kind, group) -> None:
    assert Weight(name, (1, 1), kind).group == group
