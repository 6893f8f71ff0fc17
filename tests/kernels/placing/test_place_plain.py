import pytest
import torch

from holdfast.kernels.load.place_kernels import find_peak_triton, place_plain_triton
from holdfast.kernels.load.place_rows import UNSEEN, find_peak_reference
from kernels.exactness import random, same_bits
from kernels.place_cases import FLOAT_TYPES, LAYOUTS, hostile_rows, laid_out, new_findings, place
from kernels.triton_cases import QUIET, assert_allocates_nothing

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
def test_conversions_are_those_of_the_reference(device, dtype, target):
    for rows in (hostile_rows(33, dtype), random(3, 1100).to(dtype)):
        if dtype == torch.float64:
            rows = rows.clamp(-1e30, 1e30)
        assert place(laid_out(rows, "dense", device), target, device) == place(rows, target)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_float64_is_rounded_once(device, target):
    base = random(4, 64).to(target).double()
    above = (base.float().to(target).view(torch.int16) + 1).view(target).double()
    half = (base + above) / 2
    for rows in (half, half * (1 + 2.0**-40), half * (1 - 2.0**-40), base):
        placed = place(laid_out(rows, "dense", device), target, device)
        assert placed == place(rows, target)
        assert same_bits(placed.planes[0].view(target), rounded_by_hand(rows, target))


@LAYOUTS
@pytest.mark.parametrize("shape", [(5, 1), (3, 7), (70, 3), (3, 200), (2, 4100), (130, 70)], ids=str)
def test_rows_that_lie_anyhow(device, layout, shape):
    rows = random(*shape).half()
    source = laid_out(rows, layout, device)
    for target in (torch.float16, torch.float32):
        assert place(source, target, device) == place(rows, target)


@pytest.mark.parametrize("dtype", [*OTHER_TYPES, torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_same_type_is_copied_bit_by_bit(device, dtype):
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
def test_exponents_become_powers_of_two(device, is_transposed):
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


def test_exponents_that_stay_what_they_are_have_a_number_that_is_not_finite(device):
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
def test_what_is_not_finite_is_reported(device, dtype):
    for bad in (torch.nan, torch.inf, -torch.inf):
        rows = random(6, 40).to(dtype)
        rows[5, 39] = rows[2, 1] = bad
        for target in (dtype, torch.float16):
            placed = place(laid_out(rows, "dense", device), target, device, first_row=1000)
            assert placed.nonfinite == 1002 == place(rows, target, first_row=1000).nonfinite
            wrong = ~placed.planes[0].view(target).isfinite()
            assert wrong.nonzero().tolist() == [[2, 1], [5, 39]]


def test_what_becomes_infinite_is_reported_too(device):
    rows = random(4, 8)
    rows[3, 2] = 7e4
    assert place(rows.to(device), torch.float16, device).nonfinite == 3 == place(rows, torch.float16).nonfinite
    assert place(rows.to(device), torch.bfloat16, device).nonfinite == UNSEEN == place(rows, torch.bfloat16).nonfinite
    rows = torch.full((2, 2), 1e300, dtype=torch.float64)
    assert place(rows.to(device), torch.float32, device).nonfinite == 0


def test_verifying_compares_and_writes_nothing(device):
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


def test_a_sign_of_zero_and_the_bits_of_a_nan_differ(device):
    rows = torch.tensor([[0.0], [torch.nan]])
    there = rows.clone()
    there[0] = -0.0
    assert place(rows.to(device), torch.float32, device, verify=there.view(torch.uint8)).differing == 0
    assert place(rows.to(device), torch.float32, device, verify=rows.view(torch.uint8)).differing == UNSEEN
    there = (rows.view(torch.int32) + torch.tensor([[0], [1]], dtype=torch.int32)).view(torch.uint8)
    assert place(rows.to(device), torch.float32, device, verify=there).differing == 1


def test_a_row_that_stands_for_several_into_columns_that_lie_apart(device):
    out, found = torch.full((6, 4), 9.0, device=device), new_findings(device)
    row = torch.tensor([[2.5]], device=device).expand(6, 1)
    place_plain_triton(row, out[:, 1:2], 0, found.nonfinite, found.differing, False)
    assert out.tolist() == [[9.0, 2.5, 9.0, 9.0]] * 6


@FLOAT_TYPES
@LAYOUTS
def test_the_peak_of_rows(device, dtype, layout):
    rows = random(5, 70).to(dtype)
    rows[3, 11] = -40.5
    rows[1, 2], rows[2, 3] = torch.nan, -torch.inf
    peak, expected = torch.tensor([0.5], device=device), torch.tensor([0.5])
    find_peak_triton(laid_out(rows, layout, device), peak)
    find_peak_reference(rows, expected)
    assert peak.item() == expected.item() == 40.5
    find_peak_triton(laid_out(rows[:3], layout, device), peak)
    assert peak.item() == 40.5
    find_peak_triton(rows[:0].to(device), peak)
    assert peak.item() == 40.5


def test_no_rows_change_nothing(device):
    for shape in ((0, 5), (5, 0)):
        placed = place(torch.empty(shape, device=device), torch.float16, device)
        assert (placed.nonfinite, placed.differing) == (UNSEEN, UNSEEN)


@pytest.mark.gpu
@LAYOUTS
@TARGETS
@pytest.mark.parametrize("shape", [(1408, 2048), (2048, 768), (5120, 1), (300, 25600)], ids=str)
def test_shapes_of_models(device, layout, target, shape):
    rows = random(*shape).bfloat16()
    assert place(laid_out(rows, layout, device), target, device) == place(rows, target)


@pytest.mark.gpu
def test_nothing_is_allocated(device):
    rows, out, found = random(64, 512).to(device), torch.empty(64, 512, device=device).bfloat16(), new_findings(device)
    peak = torch.zeros(1, device=device)
    for verify in (False, True):
        assert_allocates_nothing(
            lambda verify=verify: place_plain_triton(rows, out, 0, found.nonfinite, found.differing, verify)
        )
    assert_allocates_nothing(lambda: find_peak_triton(rows, peak))
