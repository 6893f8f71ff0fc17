"""Experts of packed weights in tiles: as the dequantized weights give, for every order of pairs and form of gate."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from holdfast.kernels.activation import SILU_HALVES, GateForm
from holdfast.kernels.gemm import packed_mma, packed_tiles
from holdfast.kernels.gemm.packed_codes import EVEN_ODD_ASM
from holdfast.kernels.moe.expert_linear import expert_linear_reference, packed_expert_linear, takes_packed
from holdfast.kernels.moe.routing import ExpertProduct
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import PackedPart, PackedWeight
from kernels.exactness import same_bits
from kernels.expert_cases import FORMS, ExpertCase, expert_case, order_of
from kernels.gemm.test_packed_linear import SCHEMES, random_part
from kernels.gemm.test_packed_mma import e4m3, gated
from kernels.gluon_tiles import modelled_tiles
from red_zones import RedZones

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
