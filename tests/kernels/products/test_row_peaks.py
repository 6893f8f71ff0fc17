import pytest
import torch

from holdfast.kernels.gemm.deferred_rms_norm import RowPeaks, row_peaks, row_peaks_reference
from kernels.exactness import companies, random, same_bits
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import DTYPES, QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

BOTH = pytest.mark.parametrize("function", [row_peaks, row_peaks_reference], ids=["kernel", "reference"])
SIZES = (1, 63, 64, 577, 5120)


def run(function, x_MK, device, num_cleared: int = 0) -> torch.Tensor:
    """The peaks, NaN before; what is cleared holds the bits of large numbers before and zeros behind."""
    zones = RedZones(device)
    values = zones.allocate(len(x_MK)).fill_(NAN)
    cleared = zones.allocate(num_cleared, dtype=torch.int32).fill_(0x7E000000)
    x = amid(x_MK, device)
    assert function(x, values, cleared) == RowPeaks(values, 1)
    zones.check()
    assert same_bits(x.cpu(), x_MK), "the rows stay as they were"
    assert not cleared.any(), f"{int(cleared.count_nonzero())} of {num_cleared} were left"
    return values.cpu()


@BOTH
@DTYPES
def test_every_size(device, function, dtype):
    for size in SIZES:
        for num_rows in (1, 3):
            x = random(num_rows, size, seed=size).to(dtype)
            assert same_bits(run(function, x, device, 64 * num_rows), x.float().abs().amax(-1)), f"{size=} {num_rows=}"


@BOTH
@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("size", [1, 100, 700])
def test_all_that_is_given_is_cleared(device, function, num_rows, size):
    """Whether rows are wider than their share of it or not, and whether shares are equal or not."""
    for num_cleared in (0, 64 * num_rows, 1025):
        run(function, random(num_rows, size), device, num_cleared)


@BOTH
def test_the_peak_may_be_anywhere_and_of_either_sign(device, function):
    for place in (0, 1, 64, 99):
        for sign in (1, -1):
            x = random(2, 100).clamp(-3, 3)
            x[1, place] = 4.0 * sign
            assert run(function, x, device)[1] == 4.0


@BOTH
def test_zeros_have_none(device, function):
    assert same_bits(run(function, torch.full((2, 70), -0.0), device, 128), torch.zeros(2))


@BOTH
def test_a_row_is_the_same_in_any_company(device, function):
    x = random(9, 200)
    whole = run(function, x, device, 576)
    for rows in companies(9):
        assert same_bits(run(function, x[rows], device, 576), whole[rows]), f"{rows=}"


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(device, function, bad):
    """Whatever the peak of a row with a NaN is: the NaN itself is coded as NaN."""
    x = random(4, 100)
    clean = run(function, x, device)
    x[2, 50] = bad
    peaks = run(function, x, device)
    assert same_bits(peaks[[0, 1, 3]], clean[[0, 1, 3]])
    if bad == bad:
        assert peaks[2] == bad


@pytest.mark.gpu
def test_nothing_is_allocated(device):
    x = random(16, 8192).to(device, torch.bfloat16)
    values = torch.empty(16, device=device)
    cleared = torch.empty(1024, dtype=torch.int32, device=device)
    assert_allocates_nothing(lambda: row_peaks(x, values, cleared))
