"""Small batches by packed weights with a deferred RMSNorm, a gate or a residual: exact sums, amid poison, any rows alike."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from for_each import for_each
from holdfast.kernels.gemm import packed_mma, packed_tiles
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, ResidualStream, SmallBatchScratch
from holdfast.kernels.gemm.packed_codes import EVEN_ODD_ASM
from holdfast.kernels.gemm.packed_small_batch import unsupported
from holdfast.kernels.gemm.small_batch import linear_add, normed_linear, small_batch_linear
from holdfast.kernels.packed_kernels import ARRIVED_BYTES, PARTIAL_BYTES, packed_splits
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import PackedPart, PackedWeight
from kernels.exactness import same_bits
from kernels.gemm.test_packed_linear import SCHEMES, random_part
from kernels.gemm.test_packed_mma import TILED, e4m3, gated
from kernels.gluon_tiles import modelled_tiles
from kernels.small_batch_cases import EPS, squares_of
from red_zones import RedZones

pytestmark = pytest.mark.any_device

NAN = float("nan")
BF16 = torch.bfloat16
NAMES = ("Q4_K", "Q8_0")
SHAPES = ((131, 512), (40, 2304))
"""(N, K): one part along K, and two that programs share."""


@pytest.fixture(autouse=True)
def _model(device: torch.device) -> Iterator[None]:
    """Without a GPU the source runs in torch."""
    if device.type == "cuda":
        yield
        return
    names = {"column_texts": (EVEN_ODD_ASM,), "e4m3_value": e4m3, "gated_numbers": gated}
    with modelled_tiles(packed_mma, "packed_mma_kernel", packed_tiles, **names):
        yield


def weight_of(parts: Sequence[tuple[str, int]], size_k: int) -> PackedWeight:
    """A weight of parts with so many rows each."""
    made, row = [], 0
    for name, num_rows in parts:
        made.append(random_part(TILED[name], (num_rows, size_k), row, seed=row))
        row += num_rows
    return PackedWeight((row, size_k), tuple(made))


def values_of(weight: PackedWeight) -> torch.Tensor:
    parts = [dequantize_rows(part, 0, (0, part.num_rows), torch.empty(part.shape)) for part in weight.parts]
    return torch.cat(parts).double()


class Guarded:
    """A weight with room whose counters are zero, and scratch between red zones, all of it poison."""

    def __init__(self, weight: PackedWeight, device: torch.device) -> None:
        self._zones, self.device = RedZones(device), device
        self._room = torch.full((ARRIVED_BYTES + PARTIAL_BYTES,), 0xFF, dtype=torch.uint8, device=device)
        self._room[:ARRIVED_BYTES] = 0
        parts = tuple(replace(part, planes=tuple(plane.to(device) for plane in part.planes)) for part in weight.parts)
        self.weight = replace(weight, parts=parts, room=self._room)

    def filled(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._zones.allocate(*shape, dtype=dtype).fill_(NAN)

    def copied(self, values: torch.Tensor) -> torch.Tensor:
        return self._zones.allocate(*values.shape, dtype=values.dtype).copy_(values)

    def scratch(self, num_squares: int) -> SmallBatchScratch:
        empty = self.filled(0)
        return SmallBatchScratch(self.filled(num_squares), empty, empty)

    def check(self) -> None:
        self._zones.check()
        assert bool((self._room[:ARRIVED_BYTES] == 0).all()), "a counter is not zero again"


def run_normed(
    x_MK: torch.Tensor,
    weight: PackedWeight,
    bias_N: torch.Tensor | None,
    device: torch.device,
    is_gated: bool = False,
    num_squares: int = 1,
) -> torch.Tensor:
    """In float32: the logits of a head are."""
    own, num_rows = Guarded(weight, device), len(x_MK)
    scratch = own.scratch(num_rows * num_squares)
    scratch.squares.copy_(squares_of(x_MK, num_squares).flatten())
    y = own.filled(num_rows, weight.shape[0] // (2 if is_gated else 1))
    bias = None if bias_N is None else bias_N.to(device)
    rows = NormedRows(own.copied(x_MK), num_squares, EPS)
    assert normed_linear(rows, own.weight, bias, is_gated, y, scratch) is y
    own.check()
    return y.cpu()


def exact_normed(
    x_MK: torch.Tensor, weight: PackedWeight, bias_N: torch.Tensor | None, is_gated: bool = False
) -> torch.Tensor:
    x = x_MK.double()
    y = x @ values_of(weight).T * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = y if bias_N is None else y + bias_N.double()
    if is_gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y


def assert_near(found: torch.Tensor, exact: torch.Tensor, bound: float = 3e-5) -> None:
    assert bool(found.isfinite().all())
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    assert error < bound, f"{error:.1e} of the largest"


@for_each("name", NAMES)
def test_normed_linear_packed_divides_by_rms(name: str, device: torch.device) -> None:
    """With a bias, which rms does not divide; squares in one block or many."""
    for size_n, size_k in SHAPES:
        weight, bias = weight_of([(name, size_n)], size_k), torch.randn(size_n).to(BF16)
        for num_rows, num_squares in ((1, 40), (9, 1)):
            x = (3 * torch.randn(num_rows, size_k) * torch.linspace(0.2, 4, num_rows)[:, None]).to(BF16)
            y = run_normed(x, weight, bias, device, num_squares=num_squares)
            assert_near(y, exact_normed(x, weight, bias))
    assert packed_splits(40, 2304) == 2


def test_normed_linear_packed_gates_after_the_norm(device: torch.device) -> None:
    for size_n, size_k in ((150, 512), (150, 2304)):
        weight, bias = weight_of([("Q4_K", size_n)], size_k), torch.randn(size_n).to(BF16)
        x = torch.randn(5, size_k).to(BF16)
        y = run_normed(x, weight, bias, device, is_gated=True, num_squares=3)
        assert_near(y, exact_normed(x, weight, bias, is_gated=True), 1e-4)


def test_normed_linear_packed_parts_take_their_own_columns(device: torch.device) -> None:
    """Query and key in one scheme, value in another, as Q4_K_M has them."""
    weight, bias = weight_of([("Q4_K", 72), ("Q6_K", 24)], 512), torch.randn(96).to(BF16)
    x = torch.randn(2, 512).to(BF16)
    assert_near(run_normed(x, weight, bias, device), exact_normed(x, weight, bias))


def run_add(
    a_MK: torch.Tensor, weight: PackedWeight, bias_N: torch.Tensor | None, x_MN: torch.Tensor, norm_N: torch.Tensor,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x, x scaled for the next norm, and the squares of each row by block."""
    own, (num_rows, size_n) = Guarded(weight, device), x_MN.shape
    num_blocks = -(-size_n // 128)
    x, scaled, scratch = own.copied(x_MN), own.filled(*x_MN.shape, dtype=BF16), own.scratch(num_rows * num_blocks)
    bias = None if bias_N is None else bias_N.to(device)
    stream = ResidualStream(x, own.copied(norm_N), EPS, scaled, scratch)
    rows = linear_add(own.copied(a_MK), own.weight, bias, stream)
    own.check()
    assert rows.scaled_MK is scaled
    assert (rows.num_squares, rows.eps) == (num_blocks, EPS)
    return x.cpu(), scaled.cpu(), scratch.squares.cpu().view(num_rows, num_blocks)


@for_each("name", NAMES)
def test_linear_add_packed_leaves_the_next_norm(name: str, device: torch.device) -> None:
    """x rounds twice, to its own type; what the next norm takes follows from it to the bit."""
    for size_n, size_k in ((131, 512), (40, 2304), (260, 256)):
        weight, bias = weight_of([(name, size_n)], size_k), torch.randn(size_n).to(BF16)
        norm = (1 + 0.3 * torch.randn(size_n)).to(BF16)
        for num_rows in (1, 9):
            a, x_before = torch.randn(num_rows, size_k).to(BF16), torch.randn(num_rows, size_n).to(BF16)
            x, scaled, squares = run_add(a, weight, bias, x_before, norm, device)
            product = a.double() @ values_of(weight).T + bias.double()
            exact = x_before.double() + product
            assert float((x.double() - exact).norm() / exact.norm()) < 4e-3
            assert same_bits(scaled, (x.float() * norm.float()).to(BF16))
            size = -(-size_n // 128) * 128
            padded = torch.nn.functional.pad(x.double(), (0, size - size_n)).view(num_rows, -1, 128)
            assert_near(squares, padded.square().sum(-1), 1e-6)


def test_linear_add_packed_rows_are_alike_in_any_batch(device: torch.device) -> None:
    """Rows of an x whose norm is deferred do not depend on others: of one block and of two."""
    weight, norm = weight_of([("Q4_K", 140)], 2304), torch.rand(140).to(BF16)
    a, x_before = torch.randn(16, 2304).to(BF16), torch.randn(16, 140).to(BF16)
    whole = run_add(a, weight, None, x_before, norm, device)
    for rows in ([5], [3, 0, 9], list(range(12))):
        found = run_add(a[rows], weight, None, x_before[rows], norm, device)
        for one, other in zip(found, whole, strict=True):
            if device.type == "cuda":
                assert same_bits(one, other[rows])
            else:  # torch's product rounds by the number of rows
                assert torch.allclose(one.float(), other[rows].float(), rtol=2e-2, atol=2e-2)


def test_normed_linear_packed_takes_what_linear_add_left(device: torch.device) -> None:
    """Through both: the norm of the sum, as the ordinary way has it."""
    down, up = weight_of([("Q4_0", 256)], 512), weight_of([("Q4_1", 48)], 256)
    a, x_before = torch.randn(3, 512).to(BF16), torch.randn(3, 256).to(BF16)
    norm = (1 + 0.3 * torch.randn(256)).to(BF16)
    own, second = Guarded(down, device), Guarded(up, device)
    x, scaled, scratch = own.copied(x_before), own.filled(3, 256, dtype=BF16), own.scratch(6)
    stream = ResidualStream(x, own.copied(norm), EPS, scaled, scratch)
    rows, y = linear_add(own.copied(a), own.weight, None, stream), second.filled(3, 48)
    normed_linear(rows, second.weight, None, False, y, scratch)
    wide = x.cpu().double()
    exact = wide * norm.double() * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() @ values_of(up).T
    assert float((y.cpu().double() - exact).norm() / exact.norm()) < 4e-3


def test_small_batch_linear_packed_leaves_nothing_for_a_norm(device: torch.device) -> None:
    weight, a = weight_of([("int4", 130)], 288), torch.randn(4, 288).to(BF16)
    own = Guarded(weight, device)
    scratch, y = own.scratch(64), own.filled(4, 130, dtype=BF16)
    assert small_batch_linear(own.copied(a), own.weight, None, y, scratch) is y
    own.check()
    exact = a.double() @ values_of(weight).T
    assert float((y.cpu().double() - exact).norm() / exact.norm()) < 4e-3
    assert bool(scratch.squares.isnan().all())


def test_unsupported_names_parts_and_schemes_without_tiles() -> None:
    one, two = weight_of([("Q4_K", 8)], 256), weight_of([("Q4_K", 8), ("Q6_K", 8)], 256)
    assert unsupported(one, takes_parts=False) is None
    assert unsupported(two, takes_parts=True) is None
    assert unsupported(two, takes_parts=False) == "parts of a weight are stored in Q4_K and Q6_K"
    plain = PackedPart(SCHEMES["Q2_K"], 0, (8, 256), random_part(SCHEMES["Q2_K"], (8, 256)).planes)
    assert (
        unsupported(PackedWeight((8, 256), (plain,)), takes_parts=True) == "no tiles take rows in Q2_K of 256 columns"
    )
