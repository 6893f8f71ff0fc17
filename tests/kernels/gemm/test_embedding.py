"""Rows of an embedding by id, plain and quantized: rounded once, and nothing else is touched."""

import pytest
import torch

from holdfast.kernels.gemm import embedding as module
from holdfast.kernels.gemm.embedding import (
    lookup_codes_reference,
    lookup_codes_triton,
    lookup_rows,
    lookup_share,
    lookup_share_triton,
)
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8, MXFP4
from kernels.exactness import random, same_bits
from kernels.triton_cases import QUIET, assert_allocates_nothing
from quant.whole_weights import quantize

pytestmark = QUIET

TYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:]
)
TABLES = pytest.mark.parametrize("scheme", [FP8, INT8], ids=lambda scheme: scheme.name)
IDS = torch.tensor([3, 0, 28, 3, 7, 11, 12, 23, 24])
"""Some twice, and those at both sides of every edge of SHARES."""


def table_of(scheme, num_columns, device="cpu", num_rows=29):
    values = random(num_rows, num_columns, seed=5) * torch.logspace(-3, 1, num_rows)[:, None]
    codes, scales = quantize(values, scheme)
    return QuantizedWeight(scheme, (num_rows, num_columns), codes.to(device), scales.to(device))


@pytest.mark.each_value
@TABLES
@TYPES
@pytest.mark.parametrize("num_columns", [1, 33, 576, 1024, 1408])
def test_lookup_rows_decodes_and_rounds_codes_once(device, guarded, scheme, dtype, num_columns):
    expected = dequantize(table_of(scheme, num_columns))[IDS].to(dtype)
    out = guarded(len(IDS), num_columns + 3, dtype=dtype).fill_(torch.nan)
    assert (
        lookup_codes_triton(IDS.to(device), table_of(scheme, num_columns, device), out[:, :num_columns]).shape
        == expected.shape
    )
    assert same_bits(out[:, :num_columns].cpu(), expected)
    assert out[:, num_columns:].isnan().all()
    y = torch.full_like(expected, torch.nan)
    assert lookup_rows(IDS, table_of(scheme, num_columns), y) is y
    assert same_bits(y, expected)


@TABLES
def test_lookup_rows_decodes_every_code(device, scheme):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    table = QuantizedWeight(scheme, (1, 256), codes.view(getattr(torch, scheme.code_dtype)), torch.tensor([0.37]))
    expected = dequantize(table)[0]
    table = QuantizedWeight(scheme, (1, 256), table.codes.to(device), table.scales.to(device))
    y = lookup_codes_triton(
        torch.zeros(1, dtype=torch.int32, device=device), table, torch.empty(1, 256, device=device)
    ).cpu()[0]
    assert torch.equal(y.isnan(), expected.isnan())
    assert same_bits(y.nan_to_num(0), expected.nan_to_num(0))


@TYPES
def test_lookup_rows_copies_plain_rows(dtype):
    table, out = random(9, 12).to(dtype), torch.full((3, 12), torch.nan, dtype=dtype)
    assert lookup_rows(torch.tensor([8, 0, 8]), table, out) is out
    assert same_bits(out, table[[8, 0, 8]])


@TABLES
def test_lookup_codes_reference_pieces_match_the_whole(scheme, monkeypatch):
    table, ids = table_of(scheme, 64), torch.arange(100) % 29
    whole = lookup_codes_reference(ids, table, torch.empty(100, 64))
    monkeypatch.setattr(module, "PIECE_ELEMENTS", 300)
    assert same_bits(lookup_codes_reference(ids, table, torch.empty(100, 64)), whole)
    assert same_bits(whole, dequantize(table)[ids])


def test_lookup_rows_id_beyond_table_fails_on_cpu():
    for table in (random(29, 8), table_of(FP8, 8)):
        with pytest.raises((IndexError, RuntimeError)):
            lookup_rows(torch.tensor([29]), table, torch.empty(1, 8))


@pytest.mark.parametrize("scheme", [FP8_BLOCK, MXFP4], ids=lambda scheme: scheme.name)
def test_lookup_rows_refuses_schemes_without_row_scales(scheme):
    with pytest.raises(AssertionError, match=f"{scheme.name}: a row cannot be looked up by itself"):
        lookup_rows(IDS, table_of(scheme, 64), torch.empty(len(IDS), 64))


def test_lookup_rows_refuses_buffers_of_another_shape(device):
    with pytest.raises(AssertionError, match=r"out_TK\.shape"):
        lookup_rows(IDS, table_of(FP8, 64), torch.empty(len(IDS), 65))
    with pytest.raises(AssertionError, match="columns lie apart"):
        lookup_codes_triton(IDS.to(device), table_of(FP8, 9, device), torch.empty(9, len(IDS), device=device).t())


@TABLES
def test_lookup_rows_without_tokens_is_empty(device, scheme):
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    assert lookup_codes_triton(nothing, table_of(scheme, 8, device), torch.empty(0, 8, device=device)).shape == (0, 8)
    assert lookup_rows(nothing.cpu(), table_of(scheme, 8), torch.empty(0, 8)).shape == (0, 8)


@pytest.mark.gpu
@TABLES
def test_lookup_rows_allocates_nothing(device, scheme):
    table, ids = table_of(scheme, 640, device), IDS.to(device)
    out = torch.empty(len(IDS), 640, dtype=torch.bfloat16, device=device)
    assert_allocates_nothing(lambda: lookup_rows(ids, table, out))


@pytest.mark.gpu
def test_lookup_rows_reads_beyond_two_gib(device):
    num_rows = 2**31 // 4096 + 3
    codes = torch.zeros(num_rows, 4096, dtype=torch.int8, device=device)
    codes[-1] = 5
    table = QuantizedWeight(INT8, (num_rows, 4096), codes, torch.ones(num_rows, device=device))
    out = lookup_rows(torch.tensor([num_rows - 1], device=device), table, torch.empty(1, 4096, device=device))
    assert (out == 5).all()


SHARES = ((0, 12), (12, 24), (24, 29))
"""Rows of each rank; the last has fewer."""


def share_of(table, start, end):
    if isinstance(table, torch.Tensor):
        return table[start:end].contiguous()
    planes = table.codes[start:end].contiguous(), table.scales[start:end].contiguous()
    return QuantizedWeight(table.scheme, (end - start, table.shape[1]), *planes)


@pytest.mark.each_value
@pytest.mark.parametrize("scheme", [None, FP8, INT8], ids=lambda scheme: scheme.name if scheme else "plain")
@TYPES
@pytest.mark.parametrize("num_columns", [1, 33, 1024, 1408])
def test_lookup_share_sums_to_the_row_over_ranks(device, guarded, scheme, dtype, num_columns):
    plain = random(29, num_columns, seed=4).to(dtype)
    table = plain.to(device) if scheme is None else table_of(scheme, num_columns, device)
    ids = IDS.to(device)
    whole = (
        lookup_codes_reference(IDS, table_of(scheme, num_columns), plain.new_empty(len(IDS), num_columns))
        if scheme
        else plain[IDS]
    )
    for start, end in SHARES:
        is_mine = (start <= IDS) & (end > IDS)
        expected = whole.masked_fill(~is_mine[:, None], 0.0)
        share = share_of(table, start, end)
        out = guarded(len(IDS), num_columns + 3, dtype=dtype).fill_(torch.nan)
        lookup_share_triton(ids, share, start, out[:, :num_columns])
        assert same_bits(out[:, :num_columns].cpu(), expected)
        assert out[:, num_columns:].isnan().all()
        y = torch.full_like(expected, torch.nan)
        cpu_share = share_of(plain if scheme is None else table_of(scheme, num_columns), start, end)
        assert lookup_share(IDS, cpu_share, start, y) is y
        assert same_bits(y, expected)
