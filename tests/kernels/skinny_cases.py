"""Products of few rows, tried amid poison: operands between NaN, results and scratch NaN before and between red zones."""

from dataclasses import dataclass

import torch

from holdfast.kernels.begin_rows import NormedRows, SkinnyScratch
from holdfast.kernels.skinny_linear import BLOCK_N, MAX_ROWS, MIN_SQUARE_COLUMNS, num_parts
from kernels.exactness import random
from kernels.tiled_cases import NAN, amid
from red_zones import RedZones

EPS = 1e-5
ROWS = tuple(sorted({count for count in (1, 2, 3, 8, 16, 17, 31, 32, MAX_ROWS - 1, MAX_ROWS) if count <= MAX_ROWS}))
MANY = MAX_ROWS - 1
"""More than half of the rows that a product takes, and not all."""


@dataclass
class SkinnyCase:
    """One product, and everything that goes into it, in host memory."""

    x_MK: torch.Tensor
    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None
    residual_MN: torch.Tensor
    """What a residual product adds to."""
    norm_N: torch.Tensor
    """The weight of the norm that follows."""
    gated: bool = False

    @property
    def num_outputs(self) -> int:
        return self.weight_NK.shape[0] // (2 if self.gated else 1)

    def to(self, device: torch.device) -> "SkinnyCase":
        """The same product on a device, where large ones are copied sooner."""
        bias = None if self.bias_N is None else self.bias_N.to(device)
        tensors = (self.x_MK, self.weight_NK, self.residual_MN, self.norm_N)
        x, weight, residual, norm = (tensor.to(device) for tensor in tensors)
        return SkinnyCase(x, weight, bias, residual, norm, self.gated)

    def rows(self, which: list[int]) -> "SkinnyCase":
        """The same product of some of the rows."""
        return SkinnyCase(
            self.x_MK[which], self.weight_NK, self.bias_N, self.residual_MN[which], self.norm_N, self.gated
        )


def skinny_case(
    num_rows: int,
    size_n: int,
    size_k: int,
    dtype: torch.dtype,
    gated: bool = False,
    with_bias: bool = False,
    seed: int = 0,
) -> SkinnyCase:
    """Sums around one, whatever the sizes."""
    num_weight_rows = size_n * (2 if gated else 1)
    return SkinnyCase(
        random(num_rows, size_k, seed=seed).to(dtype),
        random(num_weight_rows, size_k, seed=seed + 1, scale=size_k**-0.5).to(dtype),
        random(num_weight_rows, seed=seed + 2).to(dtype) if with_bias else None,
        random(num_rows, size_n, seed=seed + 3).to(dtype),
        (1 + 0.3 * random(size_n, seed=seed + 4)).to(dtype),
        gated,
    )


class Guarded:
    """Scratch that is exactly as large as it has to be, and results, all between red zones on one device."""

    def __init__(self, case: SkinnyCase, device: torch.device, num_squares: int = 0) -> None:
        self._zones = RedZones(device)
        self._device = device
        num_rows, size_n, size_k = len(case.x_MK), case.num_outputs, case.x_MK.shape[1]
        num_blocks = -(-size_n // (MIN_SQUARE_COLUMNS if num_rows == 1 else BLOCK_N))
        parts = 1 if case.gated or num_rows == 1 else num_parts(size_n, size_k)
        self.scratch = SkinnyScratch(
            self.filled((max(num_rows * num_squares, num_rows * num_blocks),), torch.float32),
            self.filled((parts * num_rows * size_n if parts > 1 else 0,), torch.float32),
            self._zones.allocate(-(-size_n // BLOCK_N) if parts > 1 else 0, dtype=torch.int32),
        )

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
    function, case: SkinnyCase, device: torch.device, num_squares: int = 1, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`normed_linear` or its reference: x is what was scaled, its squares lie in so many blocks."""
    guarded = Guarded(case, device, num_squares)
    num_rows = len(case.x_MK)
    guarded.scratch.squares[: num_rows * num_squares] = squares_of(case.x_MK, num_squares).flatten()
    rows = NormedRows(amid(case.x_MK, device), num_squares, EPS)
    y = guarded.filled((num_rows, case.num_outputs), out_dtype or case.x_MK.dtype)
    bias = None if case.bias_N is None else amid(case.bias_N, device)
    assert function(rows, amid(case.weight_NK, device), bias, case.gated, y, guarded.scratch) is y
    guarded.check()
    return y.cpu()


def run_add(
    function, case: SkinnyCase, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, NormedRows]:
    """`linear_add` or its reference: x, x scaled for the next norm, the squares of each row, and what it returned."""
    guarded = Guarded(case, device)
    x = guarded.copied(case.residual_MN)
    scaled = guarded.filled(tuple(x.shape), x.dtype)
    bias = None if case.bias_N is None else amid(case.bias_N, device)
    operands = amid(case.x_MK, device), amid(case.weight_NK, device), bias
    rows = function(*operands, x, amid(case.norm_N, device), EPS, scaled, guarded.scratch)
    guarded.check()
    assert rows.scaled_MK is scaled
    assert rows.eps == EPS
    used = guarded.scratch.squares[: len(x) * rows.num_squares].cpu()
    assert guarded.scratch.squares[len(x) * rows.num_squares :].isnan().all(), "more squares were written than told"
    return x.cpu(), scaled.cpu(), used.view(len(x), rows.num_squares), rows


def squares_of(x_MK: torch.Tensor, num_squares: int) -> torch.Tensor:
    """Squares of each row in so many blocks, the last of them perhaps of nothing: [M, J]."""
    size = -(-x_MK.shape[1] // num_squares)
    padded = torch.nn.functional.pad(x_MK.float().square(), (0, size * num_squares - x_MK.shape[1]))
    return padded.view(len(x_MK), num_squares, size).sum(-1)


def exact_normed(case: SkinnyCase) -> torch.Tensor:
    """In float64, from the scaled rows."""
    x = case.x_MK.double()
    y = x @ case.weight_NK.double().T * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = y if case.bias_N is None else y + case.bias_N.double()
    if case.gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y


def exact_add(case: SkinnyCase) -> torch.Tensor:
    """x + a @ weight.T + bias in float64."""
    y = case.x_MK.double() @ case.weight_NK.double().T
    return case.residual_MN.double() + (y if case.bias_N is None else y + case.bias_N.double())
