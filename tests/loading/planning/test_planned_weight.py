"""Planned weights: the tensors that a weight is made of, and their bytes."""

import pytest

from holdfast.loading.planning.moves import PlannedWeight
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8, MXFP4


def test_a_plain_weight_is_one_tensor():
    weight = PlannedWeight("a.weight", (3, 4), "bfloat16")
    assert weight.specs == (TensorSpec("a.weight", (3, 4), "bfloat16"),)
    assert (weight.num_bytes, weight.stored_as) == (24, "bfloat16")


@pytest.mark.parametrize(
    ("scheme", "codes", "scales", "num_bytes"),
    [
        (FP8, ((2, 128, 64), "float8_e4m3fn"), ((2, 128), "float32"), 16384 + 1024),
        (INT8, ((2, 128, 64), "int8"), ((2, 128), "float32"), 16384 + 1024),
        (FP8_BLOCK, ((2, 128, 64), "float8_e4m3fn"), ((2, 1, 1), "float32"), 16384 + 8),
        (MXFP4, ((2, 128, 32), "uint8"), ((2, 128, 2), "uint8"), 8192 + 512),
    ],
    ids=["fp8", "int8", "fp8_block", "mxfp4"],
)
def test_a_quantized_weight_is_codes_and_scales(scheme, codes, scales, num_bytes):
    weight = PlannedWeight("a.weight", (2, 128, 64), "bfloat16", scheme)
    assert weight.specs == (TensorSpec("a.weight", *codes), TensorSpec("a.weight.scale", *scales))
    assert (weight.num_bytes, weight.stored_as) == (num_bytes, scheme.name)
