"""Products and lookups of packed weights by the reference: equal to those of the dequantized weight, for odd shapes."""

from collections.abc import Sequence

import pytest
import torch

from for_each import for_each
from holdfast.kernels.gemm.embedding import lookup_rows, lookup_share
from holdfast.kernels.gemm.linear import linear, linear_float32, plain_linear
from holdfast.kernels.gemm.packed_linear import packed_linear
from holdfast.quant.packed_schemes import (
    BLOCK_SCHEMES,
    PackedScheme,
    fp8_scheme,
    integer_scheme,
    mxfp4_scheme,
    nvfp4_scheme,
    plain_scheme,
    with_second,
)
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import PackedPart, PackedWeight

SCHEMES: dict[str, PackedScheme] = {
    **BLOCK_SCHEMES,
    "NVFP4 with factors": with_second(BLOCK_SCHEMES["NVFP4"], "values_times"),
    "int4": integer_scheme("int4", 4, 32, "float16"),
    "int4 with zero points": integer_scheme("int4", 4, 64, "bfloat16", "uint8"),
    "int4 by row": integer_scheme("int4", 4, 0, "float32"),
    "int4 in order": integer_scheme("int4", 4, 64, "float16", "uint8").ordered(4, "int64"),
    "int8": integer_scheme("int8", 8, 128, "float16", "uint8"),
    "int8 signed": integer_scheme("int8", 8, 0, "bfloat16", "int8", is_signed=True),
    "int8 symmetric": integer_scheme("int8", 8, 0, "bfloat16", is_signed=True),
    "nvfp4": nvfp4_scheme("nvfp4", divides=False),
    "nvfp4 divided": nvfp4_scheme("nvfp4", divides=True),
    "mxfp4": mxfp4_scheme("mxfp4"),
    "fp8": fp8_scheme("fp8", 128, "float32"),
    "plain": plain_scheme("bfloat16"),
}
COLUMNS = 256


def random_part(scheme: PackedScheme, shape: tuple[int, ...], row_start: int = 0, seed: int = 0) -> PackedPart:
    """Random planes whose values are finite and around 1."""
    generator = torch.Generator().manual_seed(seed)
    planes = []
    for plane, spec in zip(scheme.planes, scheme.shaped(shape), strict=True):
        dtype = getattr(torch, spec.dtype)
        if plane.name == "groups":
            tensor = torch.randint(0, scheme.order_groups, spec.shape, generator=generator, dtype=dtype)
        elif dtype.is_floating_point and plane.name != "codes":
            tensor = (0.01 + 0.01 * torch.rand(spec.shape, generator=generator)).to(dtype)
        elif dtype == torch.float8_e4m3fn:
            tensor = torch.randn(spec.shape, generator=generator).to(dtype)
        elif plane.name == "scales" and scheme.family in ("mxfp4", "block_mxfp4"):
            tensor = torch.randint(115, 125, spec.shape, generator=generator, dtype=dtype)
        elif plane.name == "scales" and scheme.family == "block_nvfp4":
            tensor = torch.randint(20, 60, spec.shape, generator=generator, dtype=dtype)
        else:
            low, high = (-128, 128) if dtype == torch.int8 else (0, 256)
            tensor = torch.randint(low, high, spec.shape, generator=generator, dtype=dtype)
        if plane.name == "blocks":  # grids: a float16 scale comes first in each block
            blocks = tensor.view(-1, plane.elements)
            blocks[:, :2] = torch.tensor([0.001], dtype=torch.float16).view(torch.uint8)
        planes.append(tensor)
    part = PackedPart(scheme, row_start, shape, tuple(planes))
    part.check()
    return part


def weight_of(schemes: Sequence[tuple[PackedScheme, int]], *leading: int) -> PackedWeight:
    """A weight of parts with so many rows, and with poison where pieces are dequantized."""
    parts, row = [], 0
    for scheme, num_rows in schemes:
        parts.append(random_part(scheme, (*leading, num_rows, COLUMNS), row, seed=row))
        row += num_rows
    room = torch.full((4 * 2 * row * COLUMNS,), 0xFF, dtype=torch.uint8)
    weight = PackedWeight((*leading, row, COLUMNS), tuple(parts), room)
    weight.check()
    return weight


def values_of(weight: PackedWeight, matrix: int = 0) -> torch.Tensor:
    parts = [dequantize_rows(part, matrix, (0, part.num_rows), torch.empty(part.shape[-2:])) for part in weight.parts]
    return torch.cat(parts)


@for_each("name", SCHEMES)
def test_linear_packed_equals_the_product_of_its_values(name: str) -> None:
    weight = weight_of([(SCHEMES[name], 37)])
    bias_N = torch.randn(37)
    for num_rows in (1, 5, 33):
        x_TK = torch.randn(num_rows, COLUMNS)
        out_TN = torch.full((num_rows, 37), float("nan"))
        assert linear(x_TK, weight, bias_N, out_TN) is out_TN
        assert torch.equal(out_TN, plain_linear(x_TK, values_of(weight), bias_N)), name


def test_linear_packed_parts_write_their_own_columns_and_biases() -> None:
    schemes = [SCHEMES["Q4_K"], SCHEMES["plain"], SCHEMES["Q6_K"], SCHEMES["int4 in order"]]
    weight = weight_of([(scheme, rows) for scheme, rows in zip(schemes, (24, 7, 19, 8), strict=True)])
    x_TK, bias_N = torch.randn(6, COLUMNS), torch.randn(58)
    assert torch.equal(linear(x_TK, weight, bias_N), plain_linear(x_TK, values_of(weight), bias_N))
    wide_TX = torch.full((6, 100), 9.0)
    packed_linear(x_TK, weight, None, wide_TX[:, 21:79])
    assert torch.equal(wide_TX[:, 21:79], plain_linear(x_TK, values_of(weight), None))
    assert bool((wide_TX[:, :21] == 9).all())
    assert bool((wide_TX[:, 79:] == 9).all())


@for_each("dtype", [torch.float16, torch.bfloat16])
def test_linear_packed_in_half_precision_equals_the_expanded_weight(dtype: torch.dtype) -> None:
    weight = weight_of([(SCHEMES["int4"], 30), (SCHEMES["Q5_0"], 9)])
    x_TK, bias_N = torch.randn(5, COLUMNS).to(dtype), torch.randn(39).to(dtype)
    expanded = values_of(weight).to(dtype)
    assert torch.equal(linear(x_TK, weight, bias_N), plain_linear(x_TK, expanded, bias_N))
    assert bool((values_of(weight) != expanded.float()).any()), "values need rounding"


def test_linear_packed_small_pieces_give_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of([(SCHEMES["Q4_0"], 21), (SCHEMES["nvfp4"], 14)])
    x_TK = torch.randn(4, COLUMNS)
    expected = linear(x_TK, weight, None)
    for elements in (1, 3 * COLUMNS, 8 * COLUMNS + 1):
        monkeypatch.setattr("holdfast.kernels.packed_kernels.PIECE_ELEMENTS", {"cpu": elements})
        assert torch.equal(linear(x_TK, weight, None), expected)


def test_linear_packed_experts_multiply_their_own_matrix() -> None:
    weight = weight_of([(SCHEMES["Q4_1"], 8), (SCHEMES["int8"], 8)], 3)
    x_TK = torch.randn(5, COLUMNS)
    for expert in range(3):
        found = packed_linear(x_TK, weight, None, torch.full((5, 16), float("nan")), expert)
        assert torch.equal(found, plain_linear(x_TK, values_of(weight, expert), None))


def test_linear_packed_without_rows_writes_nothing() -> None:
    weight = weight_of([(SCHEMES["Q4_0"], 4)])
    assert linear(torch.empty(0, COLUMNS), weight, None).shape == (0, 4)
    assert linear_float32(torch.empty(0, COLUMNS), weight, torch.empty(0, 4)).shape == (0, 4)


@for_each("name", SCHEMES)
def test_lookup_packed_rows_equal_the_values(name: str) -> None:
    table = weight_of([(SCHEMES[name], 50)])
    ids_T = torch.tensor([49, 0, 7, 7, 21])
    values = values_of(table)
    for dtype in (torch.float32, torch.bfloat16):
        out_TK = torch.full((5, COLUMNS), float("nan"), dtype=dtype)
        assert torch.equal(lookup_rows(ids_T, table, out_TK), values[ids_T].to(dtype)), name
    share = lookup_share(ids_T, table, 5, torch.empty(5, COLUMNS))
    assert torch.equal(share[2], values[2])
    assert bool((share[1] == 0).all())
