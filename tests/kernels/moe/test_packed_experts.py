"""Experts of packed weights in tiles: as the dequantized weights give, for every order of pairs and form of gate."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from holdfast.kernels.activation import SILU_HALVES, GateForm
from holdfast.kernels.gemm import packed_mma, packed_tiles
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, ResidualStream, SmallBatchScratch
from holdfast.kernels.gemm.packed_codes import EVEN_ODD_ASM
from holdfast.kernels.moe.expert_linear import expert_linear_reference, packed_expert_linear, takes_packed
from holdfast.kernels.moe.expert_row import down_row_add, takes_down_row
from holdfast.kernels.moe.routing import ExpertProduct
from holdfast.kernels.packed_kernels import ARRIVED_BYTES
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import PackedPart, PackedWeight
from kernels.exactness import same_bits
from kernels.expert_cases import FORMS, ExpertCase, expert_case, order_of
from kernels.gemm.test_packed_linear import SCHEMES, random_part
from kernels.gemm.test_packed_mma import e4m3, gated
from kernels.gluon_tiles import modelled_tiles
from red_zones import RedZones

pytestmark = pytest.mark.any_device

NAN = float("nan")


@pytest.fixture(autouse=True)
def _model(device: torch.device) -> Iterator[None]:
    """Without a GPU the source runs in torch."""
    if device.type == "cuda":
        yield
        return
    names = {"column_texts": (EVEN_ODD_ASM,), "e4m3_value": e4m3, "gated_numbers": gated}
    with modelled_tiles(packed_mma, "packed_mma_kernel", packed_tiles, **names):
        yield


def on(part: PackedPart, device: torch.device) -> PackedPart:
    return PackedPart(part.scheme, part.row_start, part.shape, tuple(plane.to(device) for plane in part.planes))


def run(case: ExpertCase, part: PackedPart, device: torch.device) -> torch.Tensor:
    zones = RedZones(device)
    out = zones.allocate(case.expert_ids_TS.numel(), case.num_outputs, dtype=torch.float32).fill_(NAN)
    moved = replace(case, expert_ids_TS=case.expert_ids_TS.to(device))
    bias = None if case.bias_EN is None else case.bias_EN.to(device)
    weight = PackedWeight(part.shape, (on(part, device),))
    product = ExpertProduct(case.x_XK.to(device), weight, order_of(moved), out, case.gated, None, bias, case.form)
    assert packed_expert_linear(product) is out
    zones.check()
    return out.cpu()


def packed_case(
    name: str, sizes: tuple[int, int, int, int, int], is_gated: bool, form: GateForm = SILU_HALVES, **more: object
) -> tuple[ExpertCase, PackedPart]:
    """A case whose plain weight has the values of a packed part."""
    case = expert_case(sizes, is_gated, None, torch.bfloat16, form=form, **more)  # type: ignore[arg-type]
    part = random_part(SCHEMES[name], tuple(case.weight.shape))
    values = [dequantize_rows(part, i, (0, part.num_rows), torch.empty(part.shape[1:])) for i in range(sizes[2])]
    return replace(case, weight=torch.stack(values)), part


def judge(case: ExpertCase, part: PackedPart, device: torch.device) -> None:
    y = run(case, part, device)
    expected = torch.full(y.shape, NAN)
    whole = replace(case, x_XK=case.x_XK.float())
    operands = whole.x_XK, whole.weight, order_of(whole), expected, whole.gated, None, case.bias_EN, whole.form
    expert_linear_reference(ExpertProduct(*operands))
    scale = expected.abs().max()
    assert bool(((y - expected).abs() <= 2e-4 * scale).all()), float((y - expected).abs().max() / scale)


@pytest.mark.parametrize("num_rows", [1, 2, 9, 17, 40, 200])
def test_packed_experts_are_right_in_every_order(num_rows: int, device: torch.device) -> None:
    """Single pairs, pairs searched by the first of an expert, and sorted blocks of 16 to 128."""
    judge(*packed_case("Q4_0", (num_rows, 2, 3, 21, 288), False, by_pair=True), device)
    judge(*packed_case("Q4_K", (num_rows, 2, 3, 70, 256), True, has_bias=True), device)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_packed_experts_are_right_in_every_gate_form(form: GateForm, device: torch.device) -> None:
    for num_rows in (2, 20):
        judge(*packed_case("int4", (num_rows, 2, 3, 9, 160), True, form, has_bias=True), device)


@pytest.mark.parametrize("choice", ["same", "some", "twice"])
def test_packed_experts_are_right_for_uneven_experts(choice: str, device: torch.device) -> None:
    for num_rows in (2, 12, 24):
        judge(*packed_case("Q6_K", (num_rows, 4, 12, 12, 256), False, choice=choice), device)


def test_packed_experts_leave_pairs_of_other_ranks(device: torch.device) -> None:
    for num_rows in (2, 9):
        case, part = packed_case("Q8_0", (num_rows, 3, 4, 6, 64), True)
        whole = run(case, part, device)
        case.expert_ids_TS[0, 1] = case.expert_ids_TS[1, 2] = -1
        y = run(case, part, device)
        own = (case.expert_ids_TS.flatten() >= 0).nonzero().flatten()
        assert torch.allclose(y[own], whole[own], rtol=1e-5, atol=1e-5)
        assert bool(y[[1, 5]].isnan().all())


@pytest.mark.parametrize(
    ("name", "sizes", "has_bias"),
    [("Q4_K", (8, 9, 140, 256), False), ("int4", (3, 5, 21, 160), True), ("Q6_K", (1, 2, 128, 512), True)],
    ids=str,
)
def test_packed_down_of_one_token_is_added_to_the_stream(
    name: str, sizes: tuple[int, int, int, int], has_bias: bool, device: torch.device
) -> None:
    """Experts share their sum; the next norm gets what follows from it, and counters are zero again."""
    top_k, size_n = sizes[0], sizes[2]
    case, part = packed_case(name, (1, *sizes), False, by_pair=True, has_bias=has_bias)
    shares, x_before = torch.rand(1, top_k).softmax(-1), torch.randn(1, size_n).to(torch.bfloat16)
    norm = (1 + 0.3 * torch.randn(size_n)).to(torch.bfloat16)

    def add(function: Callable[..., NormedRows], device: torch.device) -> tuple[torch.Tensor, ...]:
        zones = RedZones(device)
        room = torch.full((ARRIVED_BYTES + 4 * top_k * 256,), 0xFF, dtype=torch.uint8, device=device)
        room[:ARRIVED_BYTES] = 0
        weight = PackedWeight(part.shape, (on(part, device),), room)
        x = zones.allocate(1, size_n, dtype=torch.bfloat16).copy_(x_before)
        scaled = zones.allocate(1, size_n, dtype=torch.bfloat16).fill_(NAN)
        squares, empty = zones.allocate(-(-size_n // 128)).fill_(NAN), zones.allocate(0)
        stream = ResidualStream(x, norm.to(device), 1e-5, scaled, SmallBatchScratch(squares, empty, empty))
        bias = None if case.bias_EN is None else case.bias_EN.to(device)
        ids, active = case.expert_ids_TS.to(device), case.x_XK.to(device)
        rows = function(active, weight, ids, shares.to(device), bias, stream)
        zones.check()
        assert bool((room[:ARRIVED_BYTES] == 0).all())
        used = squares.cpu()[: rows.num_squares]
        return x.cpu(), scaled.cpu(), used.sum()

    x, scaled, squares = add(down_row_add.triton, device)
    expected, *_ = add(down_row_add.reference, torch.device("cpu"))
    assert float((x.float() - expected.float()).abs().max() / expected.float().abs().max()) < 8e-3
    assert same_bits(scaled, (x.float() * norm.float()).to(torch.bfloat16))
    torch.testing.assert_close(squares, x.float().square().sum(), rtol=1e-5, atol=1e-6)


def test_takes_down_row_needs_both_products_alike() -> None:
    """On a GPU: tiles take both, or neither is packed."""
    packed = [PackedWeight(part.shape, (part,)) for part in (random_part(SCHEMES["Q4_K"], (2, 8, 256)),)]
    reference = [PackedWeight(part.shape, (part,)) for part in (random_part(SCHEMES["Q2_K"], (2, 8, 256)),)]
    plain, x = torch.empty(2, 8, 256), torch.empty(1, 256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_mma, "takes_rows", lambda tensor: True)
        assert takes_down_row(x, packed[0], packed[0])
        assert takes_down_row(x, plain, plain)
        for one, other in ((packed[0], plain), (plain, packed[0]), (packed[0], reference[0])):
            assert not takes_down_row(x, one, other)
    assert not takes_down_row(x, packed[0], packed[0])


@pytest.mark.gpu
def test_packed_experts_rows_are_alike_in_any_batch(device: torch.device) -> None:
    case, part = packed_case("Q4_K", (40, 2, 8, 80, 512), True)
    whole = run(case, part, device).view(40, 2, -1)
    for rows in (list(range(16)), [7, 3, 20], [5]):
        assert same_bits(run(case.rows(rows), part, device).view(len(rows), 2, -1), whole[rows])


def test_takes_packed_declines_a_host() -> None:
    case, part = packed_case("Q4_K", (2, 2, 3, 8, 256), False)
    product = ExpertProduct(case.x_XK, PackedWeight(part.shape, (part,)), order_of(case), case.x_XK, False)
    assert not takes_packed(product)
