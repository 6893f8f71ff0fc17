"""Rows placed in plain torch: converted, quantized, verified, and looked over for what is not finite."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.kernels.load import place_rows
from holdfast.kernels.load.place_kernels import UNSEEN, find_amax_triton, place_plain_triton
from holdfast.kernels.load.place_rows import (
    PIECE_ELEMENTS,
    find_amax,
    find_amax_reference,
    place_plain,
    place_quantized,
)
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4, WEIGHT_SCHEMES
from kernels.exactness import random, same_bits
from kernels.place_cases import FLOAT_TYPES, LAYOUTS, SCHEMES, hostile_rows, laid_out, new_findings, place
from kernels.triton_cases import QUIET, assert_allocates_nothing
from quant.whole_weights import quantize

CPU = torch.device("cpu")


class LargestResult(TorchDispatchMode):
    """Bytes of the largest storage that an operation made, those of known tensors aside."""

    def __init__(self, *known):
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self._known:
                self.num_bytes = max(self.num_bytes, result.untyped_storage().nbytes())
        return results


def planes_for(scheme, shape):
    return [torch.empty(plane.shape, dtype=getattr(torch, plane.dtype)) for plane in scheme.planes(shape)]


def amax_for(rows, scheme):
    if not scheme.is_whole_tensor:
        return None
    amax = torch.zeros(1)
    find_amax(rows, amax)
    return amax


def placed(rows, scheme, columns=None, chunks=None, verify=None):
    """Codes and scales as bytes and the findings, from rows that arrive in chunks which end at these rows."""
    columns = columns or (0, rows.shape[1])
    findings = new_findings(CPU)
    codes, scales = verify or planes_for(scheme, (rows.shape[0], columns[1] - columns[0]))
    start, amax = 0, amax_for(rows, scheme)
    for end in (*(chunks or ()), rows.shape[0]):
        blocks = slice(start // scheme.block_rows, -(-end // scheme.block_rows))
        chunk = rows[start:end], columns, scheme, codes[start:end], scales[blocks], amax, start, findings
        place_quantized(*chunk, verify is not None)
        start = end
    return codes.view(torch.uint8), scales.view(torch.uint8), int(findings.nonfinite), int(findings.differing)


def same(left, right):
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(left, right, strict=True))


@SCHEMES
def test_place_quantized_codes_and_scales_follow_the_scheme(scheme):
    rows = random(150, 320)
    codes, scales, nonfinite, differing = placed(rows, scheme)
    expected = quantize(rows, scheme, amax_for(rows, scheme))
    assert same((codes, scales), [plane.view(torch.uint8) for plane in expected])
    assert (nonfinite, differing) == (UNSEEN, UNSEEN)


@SCHEMES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_place_quantized_converts_any_dtype_to_float32_first(scheme, dtype):
    rows = random(5, 64).to(dtype)
    assert same(placed(rows, scheme), placed(rows.float(), scheme))


@SCHEMES
def test_place_quantized_does_not_depend_on_chunks_and_strides(scheme, monkeypatch):
    rows = random(300, 448) * torch.linspace(0.01, 4, 300)[:, None]
    whole = placed(rows, scheme)
    for chunks in ((128,), (128, 256), tuple(range(128, 300, 128))):
        assert same(placed(rows, scheme, chunks=chunks), whole)
    if scheme.block_rows == 1:
        assert same(placed(rows, scheme, chunks=(1, 2, 17, 299)), whole)
    for elements in (400, 5000, 60_000):
        monkeypatch.setattr(place_rows, "PIECE_ELEMENTS", elements)
        assert same(placed(rows[:140], scheme), placed(rows[:140], scheme, chunks=(128,)))
        assert same(placed(rows, scheme), whole)
    assert same(placed(rows.t().contiguous().t(), scheme), whole)


@SCHEMES
def test_place_quantized_shards_are_slices_of_the_whole(scheme, monkeypatch):
    rows = random(130, 512)
    codes, scales, *_ = placed(rows, scheme)
    per_byte, width = scheme.codes_per_byte, scheme.block_columns
    for elements in (PIECE_ELEMENTS, 2048):
        monkeypatch.setattr(place_rows, "PIECE_ELEMENTS", elements)
        for start, end in ((0, 256), (256, 512), (128, 256), (384, 512)):
            some_codes, some_scales, *_ = placed(rows, scheme, (start, end))
            assert torch.equal(some_codes, codes[:, start // per_byte : end // per_byte])
            if width:
                size = scales.shape[1] // (512 // width)
                assert torch.equal(some_scales, scales[:, start // width * size : end // width * size])
            else:
                assert torch.equal(some_scales, scales)


def test_place_quantized_refuses_columns_that_cut_two_blocks():
    rows = random(4, 256)
    inside = placed(rows, FP8_BLOCK, (16, 48))
    assert torch.equal(inside[0], placed(rows, FP8_BLOCK)[0][:, 16:48])
    with pytest.raises(AssertionError, match="cut two blocks"):
        placed(rows, FP8_BLOCK, (64, 192))
    with pytest.raises(AssertionError, match="cut two blocks"):
        placed(rows, MXFP4, (16, 48))


def test_place_quantized_chunks_share_the_given_amax():
    rows = random(64, 96)
    rows[50, 3] = 90.0
    codes, scales, *_ = placed(rows, FP8_TENSOR, chunks=(1, 40))
    assert scales.view(torch.float32).tolist() == [pytest.approx(90 / 448)] * 64
    decoded = dequantize(
        QuantizedWeight(FP8_TENSOR, (64, 96), codes.view(torch.float8_e4m3fn), scales.view(torch.float32))
    )
    torch.testing.assert_close(decoded, rows, rtol=1 / 15, atol=90 / 448 * 2**-9)
    with pytest.raises(AssertionError, match="fp8_tensor: amax=None"):
        place_quantized(rows, (0, 96), FP8_TENSOR, *planes_for(FP8_TENSOR, (64, 96)), None, 0, new_findings(CPU), False)


@pytest.mark.parametrize("elements", [1, 100, PIECE_ELEMENTS])
def test_find_amax_does_not_depend_on_order_and_pieces(elements, monkeypatch):
    monkeypatch.setattr(place_rows, "PIECE_ELEMENTS", elements)
    rows = random(20, 33).bfloat16()
    rows[7, 5], rows[8, 0] = -torch.inf, torch.nan
    expected = rows.float().nan_to_num(0, 0, 0).abs().max().item()
    for order in ((0, 1), (1, 0)):
        amax = torch.zeros(1)
        for half in order:
            find_amax(rows[10 * half : 10 * half + 10], amax)
        assert amax.item() == expected
    transposed = torch.zeros(1)
    find_amax_reference(rows.t(), transposed)
    assert transposed.item() == expected


@pytest.mark.each_value
@SCHEMES
@pytest.mark.parametrize("elements", [64, PIECE_ELEMENTS])
def test_place_rows_reports_the_lowest_nonfinite_row(scheme, elements, monkeypatch):
    monkeypatch.setattr(place_rows, "PIECE_ELEMENTS", elements)
    rows = random(300, 64)
    rows[299, 0], rows[131, 63] = torch.inf, torch.nan
    assert placed(rows, scheme, chunks=(128, 256))[2] == 131
    out, findings = torch.empty(300, 64).half(), new_findings(CPU)
    place_plain(rows, (0, 64), out, 1000, findings, False)
    assert findings.nonfinite.item() == 1131


@SCHEMES
def test_place_quantized_verify_finds_the_differing_row(scheme):
    rows = random(300, 64)
    there = planes_for(scheme, (300, 64))
    place_quantized(rows, (0, 64), scheme, *there, amax_for(rows, scheme), 0, new_findings(CPU), False)
    assert placed(rows, scheme, chunks=(128, 256), verify=there)[2:] == (UNSEEN, UNSEEN)
    other = rows.clone()
    other[270, 5] += 1.0
    scheme_rows = {"fp8_block": range(256, 271)}.get(scheme.name, range(270, 271))
    assert placed(other, scheme, chunks=(128, 256), verify=there)[3] in scheme_rows
    if amax_for(rows, scheme) is None:
        codes, scales = there
        scales.view(torch.uint8).view(len(scales), -1)[131 // scheme.block_rows] ^= (
            1  # its own first row stands for a block
        )
        row = 131 - 131 % scheme.block_rows
        assert placed(rows, scheme, verify=(codes, scales))[3] == row


def test_place_plain_converts_rows_into_their_columns():
    rows, findings = random(6, 10), new_findings(CPU)
    out = torch.full((6, 8), 9.0).bfloat16()
    place_plain(rows, (2, 6), out[:, 1:5], 0, findings, False)
    assert torch.equal(out[:, 1:5], rows[:, 2:6].bfloat16())
    assert (out[:, 5:] == 9).all()
    assert (out[:, 0] == 9).all()
    place_plain(rows, (2, 6), out[:, 1:5], 0, findings, True)
    assert findings.differing.item() == UNSEEN
    place_plain(rows, (3, 7), out[:, 1:5], 5, findings, True)
    assert findings.differing.item() == 5


def test_place_rows_refuses_unsupported_dtypes_and_shapes():
    findings = new_findings(CPU)
    for source, target in (
        (torch.int8, torch.float32),
        (torch.float32, torch.int8),
        (torch.float8_e4m3fn, torch.float32),
    ):
        with pytest.raises(AssertionError, match="into"):
            place_plain(torch.empty(2, 2, dtype=source), (0, 2), torch.empty(2, 2, dtype=target), 0, findings, False)
    with pytest.raises(AssertionError, match="into"):
        place_plain(torch.empty(2, 3), (0, 3), torch.empty(2, 2), 0, findings, False)
    with pytest.raises(AssertionError, match="is not quantized"):
        place_quantized(
            torch.empty(2, 2, dtype=torch.int8), (0, 2), INT8, *planes_for(INT8, (2, 2)), None, 0, findings, False
        )
    with pytest.raises(AssertionError, match="shape"):
        place_quantized(torch.empty(2, 2), (0, 2), INT8, *planes_for(INT8, (3, 2)), None, 0, findings, False)


@pytest.mark.each_pair
@pytest.mark.parametrize("scheme", [None, *WEIGHT_SCHEMES.values()], ids=["plain", *WEIGHT_SCHEMES])
@pytest.mark.parametrize("shape", [(3000, 1024), (128, 24_576)], ids=str)
@pytest.mark.parametrize("verify", [False, True])
def test_place_rows_intermediates_do_not_grow_with_rows(scheme, shape, verify):
    rows, findings = torch.full(shape, 0.5, dtype=torch.bfloat16), new_findings(CPU)
    out = planes_for(scheme, shape) if scheme else [torch.empty(shape, dtype=torch.float16)]
    amax = torch.ones(1) if scheme is FP8_TENSOR else None
    with LargestResult(rows, *out) as largest:
        if scheme is None:
            place_plain(rows, (0, shape[1]), *out, 0, findings, verify)
        else:
            place_quantized(rows, (0, shape[1]), scheme, *out, amax, 0, findings, verify)
    assert 0 < largest.num_bytes <= 4 * PIECE_ELEMENTS or (scheme is None and not verify)
    assert largest.num_bytes <= 4 * PIECE_ELEMENTS


@SCHEMES
def test_place_rows_accepts_no_rows(scheme):
    assert placed(torch.empty(0, 64), scheme)[2:] == (UNSEEN, UNSEEN)
    place_plain(torch.empty(0, 3), (0, 3), torch.empty(0, 3), 0, new_findings(CPU), False)


def test_place_quantized_accepts_single_rows():
    rows = random(9, 64)
    whole = placed(rows, FP8)
    assert same(
        [plane[4:5] for plane in (whole[0], whole[1].view(9, 4))],
        [placed(rows[4:5], FP8)[0], placed(rows[4:5], FP8)[1][None]],
    )


pytestmark = QUIET

TARGETS = pytest.mark.parametrize(
    "target", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: f"to_{str(dtype)[6:]}"
)
OTHER_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn)


def rounded_by_hand(values, target):
    """The nearest number of the target type in exact arithmetic, ties to even: from both neighbours of torch's own answer."""
    near = values.to(target)
    bits = near.view(torch.int16).to(torch.int32)
    choices = torch.stack([(bits + step).to(torch.int16).view(target) for step in (-1, 0, 1)])
    distance = (choices.double() - values).abs().nan_to_num(torch.inf)
    best = distance == distance.amin(0)
    is_even = choices.view(torch.int16) & 1 == 0
    return torch.gather(choices, 0, (best * 2 + (best & is_even)).to(torch.int32).argmax(0, keepdim=True))[0]


@TARGETS
@FLOAT_TYPES
def test_place_plain_conversions_match_reference(device, dtype, target):
    for rows in (hostile_rows(33, dtype), random(3, 1100).to(dtype)):
        if dtype == torch.float64:
            rows = rows.clamp(-1e30, 1e30)
        assert place(laid_out(rows, "dense", device), target, device) == place(rows, target)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_place_plain_rounds_float64_once(device, target):
    base = random(4, 64).to(target).double()
    above = (base.float().to(target).view(torch.int16) + 1).view(target).double()
    half = (base + above) / 2
    for rows in (half, half * (1 + 2.0**-40), half * (1 - 2.0**-40), base):
        placed = place(laid_out(rows, "dense", device), target, device)
        assert placed == place(rows, target)
        assert same_bits(placed.planes[0].view(target), rounded_by_hand(rows, target))


@pytest.mark.each_value
@LAYOUTS
@pytest.mark.parametrize("shape", [(5, 1), (3, 7), (70, 3), (3, 200), (2, 4100), (130, 70)], ids=str)
def test_place_plain_matches_reference_in_any_layout(device, layout, shape):
    rows = random(*shape).half()
    source = laid_out(rows, layout, device)
    for target in (torch.float16, torch.float32):
        assert place(source, target, device) == place(rows, target)


@pytest.mark.parametrize("dtype", [*OTHER_TYPES, torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_place_plain_same_dtype_copies_every_bit(device, dtype):
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (40, 65 * size), dtype=torch.uint8, generator=generator)
    rows = noise.view(dtype)
    for source in (rows.to(device), rows.t().contiguous().to(device).t()):
        placed = place(source, dtype, device, first_row=3)
        assert torch.equal(placed.planes[0], noise)
        assert placed == place(rows, dtype, first_row=3)
    is_number = dtype.is_floating_point
    expected = (~rows.double().isfinite()).any(1).to(torch.uint8) if is_number else torch.zeros(1)
    assert placed.nonfinite == (3 + int(expected.argmax()) if expected.any() else UNSEEN)
    assert not is_number or dtype in (torch.float32, torch.float64) or expected.any()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_place_plain_turns_exponents_into_powers_of_two(device, is_transposed):
    amid_nan = torch.full((100, 100), 255, dtype=torch.uint8, device=device)
    there_RC = amid_nan[9:94, 40:52].t() if is_transposed else amid_nan[40:52, 9:94]
    rows = torch.arange(255, dtype=torch.uint8).repeat(4).view(12, 85)
    there_RC.copy_(rows)
    expected = rows.view(torch.float8_e8m0fnu).float()
    placed = place(there_RC, torch.float32, device)
    assert same_bits(placed.planes[0].view(torch.float32), expected)
    assert (placed.nonfinite, placed.differing) == (UNSEEN, UNSEEN)
    assert placed == place(rows, torch.float32)
    rows[7, 84] = there_RC[7, 84] = 255
    for there, differing in ((None, UNSEEN), (placed.planes[0], 107)):
        found = place(there_RC, torch.float32, device, first_row=100, verify=there)
        assert found == place(rows, torch.float32, first_row=100, verify=there)
        assert (found.nonfinite, found.differing) == (107, differing)


def test_place_plain_reports_nan_exponents(device):
    noise = torch.arange(255, dtype=torch.uint8).repeat(4).view(12, 85)
    for bad_row in (None, 7):
        if bad_row is not None:
            noise[bad_row, 84] = 255
        rows = noise.view(torch.float8_e8m0fnu)
        placed = place(rows.to(device), torch.float8_e8m0fnu, device, first_row=3)
        assert torch.equal(placed.planes[0], noise)
        assert placed.nonfinite == (UNSEEN if bad_row is None else 3 + bad_row)
        assert placed == place(rows, torch.float8_e8m0fnu, first_row=3)


@FLOAT_TYPES
def test_place_plain_reports_nonfinite_rows(device, dtype):
    for bad in (torch.nan, torch.inf, -torch.inf):
        rows = random(6, 40).to(dtype)
        rows[5, 39] = rows[2, 1] = bad
        for target in (dtype, torch.float16):
            placed = place(laid_out(rows, "dense", device), target, device, first_row=1000)
            assert placed.nonfinite == 1002 == place(rows, target, first_row=1000).nonfinite
            wrong = ~placed.planes[0].view(target).isfinite()
            assert wrong.nonzero().tolist() == [[2, 1], [5, 39]]


def test_place_plain_reports_rows_that_overflow(device):
    rows = random(4, 8)
    rows[3, 2] = 7e4
    assert place(rows.to(device), torch.float16, device).nonfinite == 3 == place(rows, torch.float16).nonfinite
    assert place(rows.to(device), torch.bfloat16, device).nonfinite == UNSEEN == place(rows, torch.bfloat16).nonfinite
    rows = torch.full((2, 2), 1e300, dtype=torch.float64)
    assert place(rows.to(device), torch.float32, device).nonfinite == 0


def test_place_plain_verify_compares_and_writes_nothing(device):
    rows = random(9, 40)
    rows[0, 0] = 0.0
    for target in (torch.float32, torch.float16):
        there = place(rows, target).planes[0]
        assert place(rows.to(device), target, device, verify=there).differing == UNSEEN
        for row, column in ((8, -1), (0, 1)):
            there = there.clone()
            there[row, column] ^= 0x80
            placed = place(rows.to(device), target, device, first_row=7, verify=there)
            assert placed.differing == 7 + row
            assert placed == place(rows, target, first_row=7, verify=there)
            assert torch.equal(placed.planes[0], there)


def test_place_plain_verify_compares_zero_signs_and_nan_bits(device):
    rows = torch.tensor([[0.0], [torch.nan]])
    there = rows.clone()
    there[0] = -0.0
    assert place(rows.to(device), torch.float32, device, verify=there.view(torch.uint8)).differing == 0
    assert place(rows.to(device), torch.float32, device, verify=rows.view(torch.uint8)).differing == UNSEEN
    there = (rows.view(torch.int32) + torch.tensor([[0], [1]], dtype=torch.int32)).view(torch.uint8)
    assert place(rows.to(device), torch.float32, device, verify=there).differing == 1


def test_place_plain_broadcasts_a_row_into_strided_columns(device):
    out, found = torch.full((6, 4), 9.0, device=device), new_findings(device)
    row = torch.tensor([[2.5]], device=device).expand(6, 1)
    place_plain_triton(row, out[:, 1:2], 0, found, False)
    assert out.tolist() == [[9.0, 2.5, 9.0, 9.0]] * 6


@FLOAT_TYPES
@LAYOUTS
def test_find_amax_matches_reference_in_any_layout(device, dtype, layout):
    rows = random(5, 70).to(dtype)
    rows[3, 11] = -40.5
    rows[1, 2], rows[2, 3] = torch.nan, -torch.inf
    amax, expected = torch.tensor([0.5], device=device), torch.tensor([0.5])
    find_amax_triton(laid_out(rows, layout, device), amax)
    find_amax_reference(rows, expected)
    assert amax.item() == expected.item() == 40.5
    find_amax_triton(laid_out(rows[:3], layout, device), amax)
    assert amax.item() == 40.5
    find_amax_triton(rows[:0].to(device), amax)
    assert amax.item() == 40.5


def test_place_plain_without_rows_reports_nothing(device):
    for shape in ((0, 5), (5, 0)):
        placed = place(torch.empty(shape, device=device), torch.float16, device)
        assert (placed.nonfinite, placed.differing) == (UNSEEN, UNSEEN)


@pytest.mark.gpu
@LAYOUTS
@TARGETS
@pytest.mark.parametrize("shape", [(1408, 2048), (2048, 768), (5120, 1), (300, 25600)], ids=str)
def test_place_plain_matches_reference_at_model_shapes(device, layout, target, shape):
    rows = random(*shape).bfloat16()
    assert place(laid_out(rows, layout, device), target, device) == place(rows, target)


@pytest.mark.gpu
def test_place_plain_and_find_amax_allocate_nothing(device):
    rows, out, found = random(64, 512).to(device), torch.empty(64, 512, device=device).bfloat16(), new_findings(device)
    amax = torch.zeros(1, device=device)
    for verify in (False, True):
        assert_allocates_nothing(lambda verify=verify: place_plain_triton(rows, out, 0, found, verify))
    assert_allocates_nothing(lambda: find_amax_triton(rows, amax))
