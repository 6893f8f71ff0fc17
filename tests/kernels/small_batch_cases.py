"""Products of small batches, tried amid poison: operands between NaN, results and scratch NaN before and between red zones.

Weights are numbers, or codes with a scale a row: then amax come with the rows, and are left behind with the results.
"""

from dataclasses import dataclass, replace

import torch

from holdfast.kernels.gemm import small_batch
from holdfast.kernels.gemm.deferred_rms_norm import AmaxScratch, NormedRows, ResidualStream, RowAmax, SmallBatchScratch
from holdfast.kernels.gemm.gemv import num_k_splits
from holdfast.kernels.gemm.small_batch import SideProduct, linear_add, normed_linear, small_batch_linear
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, GEMV_MIN_BLOCK_N, NUM_GATE_AMAX, SMALL_BATCH_BLOCK_N
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import WeightScheme
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.gemm_references import linear_add_reference, normed_linear_reference, small_batch_linear_reference
from kernels.quantized_cases import (
    HALF_SLACK,
    codable_rows,
    exact_rows,
    exact_weight,
    random_weight,
    slack,
    weight_amid,
    weight_on,
)
from kernels.tiled_cases import NAN, amid
from red_zones import RedZones

CPU = torch.device("cpu")
EPS = 1e-5
ROWS = (1, 2, 3, 8, FUSED_DECODE_ROWS - 1, FUSED_DECODE_ROWS)
MANY = FUSED_DECODE_ROWS - 1
"""More than half of the rows that a product takes, and not all."""


@dataclass
class SmallBatchCase:
    """One product, and everything that goes into it, in host memory."""

    x_MK: torch.Tensor
    weight_NK: torch.Tensor | QuantizedWeight
    bias_N: torch.Tensor | None
    residual_MN: torch.Tensor
    """What a residual product adds to."""
    norm_N: torch.Tensor
    """The weight of the norm that follows."""
    gated: bool = False

    @property
    def num_outputs(self) -> int:
        return self.weight_NK.shape[0] // (2 if self.gated else 1)

    def to(self, device: torch.device) -> "SmallBatchCase":
        """Put the product on a device, where large ones are copied sooner."""
        bias = None if self.bias_N is None else self.bias_N.to(device)
        weight = self.weight_NK
        weight = weight_on(weight, device) if isinstance(weight, QuantizedWeight) else weight.to(device)
        x, residual, norm = (tensor.to(device) for tensor in (self.x_MK, self.residual_MN, self.norm_N))
        return SmallBatchCase(x, weight, bias, residual, norm, self.gated)

    def rows(self, which: list[int]) -> "SmallBatchCase":
        """Keep some of the rows."""
        return SmallBatchCase(
            self.x_MK[which], self.weight_NK, self.bias_N, self.residual_MN[which], self.norm_N, self.gated
        )


def small_batch_case(
    num_rows: int,
    size_n: int,
    size_k: int,
    dtype: torch.dtype,
    gated: bool = False,
    with_bias: bool = False,
    seed: int = 0,
) -> SmallBatchCase:
    """Sums around one, whatever the sizes."""
    num_weight_rows = size_n * (2 if gated else 1)
    return SmallBatchCase(
        random(num_rows, size_k, seed=seed).to(dtype),
        random(num_weight_rows, size_k, seed=seed + 1, scale=size_k**-0.5).to(dtype),
        random(num_weight_rows, seed=seed + 2).to(dtype) if with_bias else None,
        random(num_rows, size_n, seed=seed + 3).to(dtype),
        (1 + 0.3 * random(size_n, seed=seed + 4)).to(dtype),
        gated,
    )


def quantized_case(
    num_rows: int,
    size_n: int,
    size_k: int,
    dtype: torch.dtype,
    scheme: WeightScheme,
    gated: bool = False,
    with_bias: bool = False,
    seed: int = 0,
) -> SmallBatchCase:
    """Like the one above, with a weight as codes, and rows whose codes are beyond doubt."""
    case = small_batch_case(num_rows, size_n, 1, dtype, gated, with_bias, seed)
    weight = random_weight(case.weight_NK.shape[0], size_k, scheme, seed + 1)
    return replace(case, x_MK=codable_rows(num_rows, size_k, seed).to(dtype), weight_NK=weight)


class Guarded:
    """Scratch that is exactly as large as it has to be, and results, all between red zones on one device."""

    def __init__(self, case: SmallBatchCase, device: torch.device, num_squares: int = 0) -> None:
        self._zones = RedZones(device)
        self._device = device
        num_rows, size_n, size_k = len(case.x_MK), case.num_outputs, case.x_MK.shape[1]
        num_blocks = -(-size_n // (GEMV_MIN_BLOCK_N if num_rows == 1 else SMALL_BATCH_BLOCK_N))
        is_quantized = isinstance(case.weight_NK, QuantizedWeight)
        block_k = small_batch.QUANTIZED_BLOCK_K if is_quantized else small_batch.BLOCK_K
        splits = 1 if case.gated or num_rows == 1 else num_k_splits(size_n, size_k, block_k)
        size_j = max(num_rows * num_squares, num_rows * num_blocks)
        self.scratch = SmallBatchScratch(
            self.filled((size_j,), torch.float32),
            self.filled((splits * num_rows * size_n if splits > 1 else 0,), torch.float32),
            self._zones.allocate(-(-size_n // SMALL_BATCH_BLOCK_N) if splits > 1 else 0, dtype=torch.int32),
            self._amax_scratch(num_rows, size_j) if is_quantized else None,
        )

    def _amax_scratch(self, num_rows: int, size_j: int) -> AmaxScratch:
        gated = self._zones.allocate(num_rows * NUM_GATE_AMAX, dtype=torch.int32)
        return AmaxScratch(self.filled((size_j,), torch.float32), self.filled((num_rows,), torch.float32), gated)

    def filled(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """NaN between red zones."""
        return self._zones.allocate(*shape, dtype=dtype).fill_(NAN)

    def copied(self, values: torch.Tensor) -> torch.Tensor:
        """Values between red zones."""
        return self._zones.allocate(*values.shape, dtype=values.dtype).copy_(values)

    def check(self) -> None:
        """Nothing was written outside, and the counters are as they were."""
        self._zones.check()
        assert not self.scratch.arrived.any(), f"{self.scratch.arrived.tolist()} have arrived and were not counted back"


def run_normed(
    function,
    case: SmallBatchCase,
    device: torch.device,
    num_squares: int = 1,
    out_dtype: torch.dtype | None = None,
    side_PK: torch.Tensor | None = None,
) -> torch.Tensor:
    """`normed_linear` or its reference: x is what was scaled, its squares lie in so many blocks.

    With `side_PK`, the columns of the side product follow, in float32.
    """
    guarded = Guarded(case, device, num_squares)
    num_rows = len(case.x_MK)
    guarded.scratch.squares[: num_rows * num_squares] = squares_of(case.x_MK, num_squares).flatten()
    if guarded.scratch.amax is not None:
        guarded.scratch.amax.normed[: num_rows * num_squares] = amax_of(case.x_MK, num_squares).flatten()
    rows = NormedRows(amid(case.x_MK, device), num_squares, EPS)
    y = guarded.filled((num_rows, case.num_outputs), out_dtype or case.x_MK.dtype)
    bias = None if case.bias_N is None else amid(case.bias_N, device)
    operands, side = (rows, case_weight_amid(case, device), bias, case.gated, y, guarded.scratch), None
    if side_PK is not None:
        side = SideProduct(amid(side_PK, device), guarded.filled((num_rows, len(side_PK)), torch.float32))
    assert (function(*operands) if side is None else function(*operands, side)) is y
    guarded.check()
    if guarded.scratch.amax is not None:
        _check_gate_amax(case, y, guarded.scratch.amax)
    return y.cpu() if side is None else torch.cat((y.cpu().float(), side.out_MP.cpu()), dim=1)


def case_weight_amid(case: SmallBatchCase, device: torch.device) -> torch.Tensor | QuantizedWeight:
    weight = case.weight_NK
    return weight_amid(weight, device) if isinstance(weight, QuantizedWeight) else amid(weight, device)


def _check_gate_amax(case: SmallBatchCase, y_MN: torch.Tensor, amax: AmaxScratch) -> None:
    """What a gated product leaves for the next one to quantize it by; nothing where that takes rows as they are."""
    assert isinstance(case.weight_NK, QuantizedWeight), "only quantized products leave amax"
    assert amax.inputs.isnan().all(), "the amax of others were written"
    if not case.gated or not case.weight_NK.scheme.quantizes_activations:
        assert not amax.gated.any(), "unrequested amax were raised"
        return
    left = amax.gated.view(torch.float32).view(len(y_MN), NUM_GATE_AMAX).amax(-1)
    expected = y_MN.float().abs().amax(-1)
    finite = expected.isfinite()
    assert same_bits(left[finite], expected[finite]), f"{left=} {expected=}"


def run_add(
    function, case: SmallBatchCase, device: torch.device, num_amax: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, NormedRows]:
    """`linear_add` or its reference: x, x scaled for the next norm, the squares of each row, and what it returned.

    So many amax come with a row that is to be quantized: those of a gated product as bits, as it leaves them.
    """
    guarded = Guarded(case, device)
    x = guarded.copied(case.residual_MN)
    scaled = guarded.filled(tuple(x.shape), x.dtype)
    bias = None if case.bias_N is None else amid(case.bias_N, device)
    more = {"amax": _given_amax(case, device, num_amax)}
    operands = amid(case.x_MK, device), case_weight_amid(case, device), bias
    rows = function(*operands, ResidualStream(x, amid(case.norm_N, device), EPS, scaled, guarded.scratch), **more)
    guarded.check()
    assert rows.scaled_MK is scaled
    assert rows.eps == EPS
    used = guarded.scratch.squares[: len(x) * rows.num_squares].cpu()
    assert guarded.scratch.squares[len(x) * rows.num_squares :].isnan().all(), "more squares were written than reported"
    if guarded.scratch.amax is not None:
        amax = guarded.scratch.amax.normed.cpu()
        assert amax[len(x) * rows.num_squares :].isnan().all(), "more amax were written than reported"
        amax_M = amax[: len(x) * rows.num_squares].view(len(x), rows.num_squares).amax(-1)
        expected_M = scaled.cpu().float().abs().amax(-1)
        finite = expected_M.isfinite()
        assert same_bits(amax_M[finite], expected_M[finite]), f"{amax_M=} {expected_M=}"
        assert not guarded.scratch.amax.gated.any(), "amax of a gated product were raised by another"
    return x.cpu(), scaled.cpu(), used.view(len(x), rows.num_squares), rows


def _given_amax(case: SmallBatchCase, device: torch.device, num_amax: int) -> RowAmax | None:
    """So many a row, where it is to be quantized."""
    if not isinstance(case.weight_NK, QuantizedWeight) or not case.weight_NK.scheme.quantizes_activations:
        return None
    values = amid(amax_of(case.x_MK, num_amax).flatten(), device)
    return RowAmax(values.view(torch.int32) if num_amax == NUM_GATE_AMAX else values, num_amax)


def run_part(function, case: SmallBatchCase, device: torch.device, num_amax: int = 1) -> torch.Tensor:
    """`small_batch_linear` or its reference; nothing is left for a next norm."""
    guarded = Guarded(case, device)
    y = guarded.filled(tuple(case.residual_MN.shape), case.residual_MN.dtype)
    bias = None if case.bias_N is None else amid(case.bias_N, device)
    operands = amid(case.x_MK, device), case_weight_amid(case, device), bias
    assert function(*operands, y, guarded.scratch, _given_amax(case, device, num_amax)) is y
    guarded.check()
    assert guarded.scratch.squares.isnan().all(), "squares of a product that defers no norm"
    return y.cpu()


def judge_part(case: SmallBatchCase, device: torch.device) -> None:
    """As exact as torch's, and the same to the bit whatever other rows there are, of two and more."""
    y = run_part(small_batch_linear, case, device)
    in_torch = run_part(small_batch_linear_reference, case, CPU)
    exact = exact_add(replace(case, residual_MN=torch.zeros_like(case.residual_MN)))
    assert_as_exact_as_torch(y, in_torch, exact, magnitude=10.0 * _slack(case, device))
    if len(y) > 2:
        assert same_bits(run_part(small_batch_linear, case.rows([2, 0]), device), y[[2, 0]])


def squares_of(x_MK: torch.Tensor, num_squares: int) -> torch.Tensor:
    """Squares of each row in so many blocks, the last of them perhaps of nothing: [M, J]."""
    size = -(-x_MK.shape[1] // num_squares)
    padded = torch.nn.functional.pad(x_MK.double().square(), (0, size * num_squares - x_MK.shape[1]))
    return padded.view(len(x_MK), num_squares, size).sum(-1)


def amax_of(x_MK: torch.Tensor, num_amax: int) -> torch.Tensor:
    """The largest magnitudes of each row in so many blocks, the last of them perhaps of nothing: [M, J]."""
    size = -(-x_MK.shape[1] // num_amax)
    padded = torch.nn.functional.pad(x_MK.float().abs(), (0, size * num_amax - x_MK.shape[1]))
    return padded.view(len(x_MK), num_amax, size).amax(-1)


def exact_sums(case: SmallBatchCase) -> torch.Tensor:
    """x @ weight.T in float64, of codes where there are any."""
    weight = case.weight_NK
    if isinstance(weight, QuantizedWeight):
        return exact_rows(case.x_MK, weight.scheme) @ exact_weight(weight).T
    return case.x_MK.double() @ weight.double().T


def exact_normed(case: SmallBatchCase) -> torch.Tensor:
    """In float64, from the scaled rows."""
    x = case.x_MK.double()
    y = exact_sums(case) * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = y if case.bias_N is None else y + case.bias_N.double()
    if case.gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y


def exact_add(case: SmallBatchCase) -> torch.Tensor:
    """x + a @ weight.T + bias in float64."""
    y = exact_sums(case)
    return case.residual_MN.double() + (y if case.bias_N is None else y + case.bias_N.double())


def judge_normed(case: SmallBatchCase, device: torch.device, num_squares: int = 1, out_dtype=None) -> None:
    """As exact as torch."""
    y = run_normed(normed_linear, case, device, num_squares, out_dtype)
    in_torch = run_normed(normed_linear_reference, case, CPU, num_squares, out_dtype)
    assert_as_exact_as_torch(y, in_torch, exact_normed(case), magnitude=10.0 * _slack(case, device))


def judge_add(case: SmallBatchCase, device: torch.device, num_amax: int = 1) -> None:
    """The sum is as exact as torch's; and what the next norm gets follows from what was stored, to the bit."""
    x, scaled, squares, _ = run_add(linear_add, case, device, num_amax)
    in_torch, *_ = run_add(linear_add_reference, case, CPU, num_amax)
    assert_as_exact_as_torch(x, in_torch, exact_add(case), magnitude=10.0 * _slack(case, device))
    assert same_bits(scaled, (x.float() * case.norm_N.float()).to(x.dtype))
    exact_squares = x.double().square().sum(-1)
    magnitude = 8 * float(exact_squares.max())
    assert_as_exact_as_torch(squares.sum(-1), x.float().square().sum(-1), exact_squares, magnitude)


def _slack(case: SmallBatchCase, device: torch.device) -> float:
    if not isinstance(case.weight_NK, QuantizedWeight):
        return 1.0
    num_rows, size_k = case.x_MK.shape
    begins_in_half = num_rows == 1 and case.weight_NK.scheme.quantizes_activations and size_k % 128 == 0
    return max(slack(device, case.weight_NK.scheme), HALF_SLACK if begins_in_half else 1.0)
