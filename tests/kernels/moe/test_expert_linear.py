"""Products of experts against float64, and the sum of what they give, by their shares."""

from dataclasses import replace

import pytest
import torch

from holdfast.kernels.geometry import MAX_DIRECT_TOKENS
from holdfast.kernels.moe.expert_gemv import expert_gemv
from holdfast.kernels.moe.expert_linear import expert_linear, expert_linear_reference
from holdfast.kernels.moe.expert_sum import (
    LARGE_BATCH_COLUMNS,
    SMALL_BATCH_COLUMNS,
    SMALL_BATCH_TOKENS,
    ExpertOutputs,
    sum_experts,
    sum_experts_reference,
    sum_experts_triton,
)
from holdfast.kernels.moe.grouped_gemm import grouped_gemm
from holdfast.kernels.moe.routing import PADDING, ExpertProduct
from kernels.exactness import assert_as_exact_as_torch, companies, random, same_bits
from kernels.expert_cases import (
    CPU,
    FORMS,
    GPT_OSS,
    SCHEMES,
    among,
    exact,
    expert_case,
    in_torch,
    order_of,
    placed,
    room_for,
    run_kernel,
)
from kernels.triton_cases import DTYPES, QUIET, assert_allocates_nothing
from red_zones import RedZones

NAN = float("nan")
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


def run(case, device=CPU, function=expert_linear, out_dtype=None) -> torch.Tensor:
    case, zones = placed(case, device), RedZones(device)
    shape = case.expert_ids_TS.numel(), case.num_outputs
    out = zones.allocate(*shape, dtype=out_dtype or case.x_XK.dtype).fill_(NAN)
    operands = case.x_XK, case.weight, order_of(case), out, case.gated, room_for(case), case.bias_EN, case.form
    assert function(ExpertProduct(*operands)) is out
    zones.check()
    return out.cpu()


@pytest.mark.each_pair
@EVERY_SCHEME
@GATED
@pytest.mark.parametrize("num_rows", [1, 2, 17, 100])
def test_expert_linear_on_cpu_matches_float64(num_rows, scheme, gated):
    """On a CPU: direct pairs and blocks, rows of tokens and rows of pairs."""
    size_k = 160 if scheme == "mxfp4" else 200
    case = expert_case((num_rows, 3, 7, 24, size_k), gated, scheme, by_pair=num_rows == 17, choice="any")
    y = run(case)
    torch.testing.assert_close(y.double(), exact(case), rtol=1e-5, atol=2e-6)


@pytest.mark.each_pair
@EVERY_SCHEME
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 17])
def test_expert_linear_adds_bias_in_every_gate_form(num_rows, scheme, form):
    """On a CPU, gate and up side by side or one behind the other, in a width that no block divides."""
    case = expert_case((num_rows, 2, 5, 90, 96), True, scheme, has_bias=True, form=form)
    torch.testing.assert_close(run(case).double(), exact(case), rtol=1e-5, atol=2e-6)
    down = expert_case((num_rows, 2, 5, 90, 96), False, scheme, by_pair=True, has_bias=True)
    torch.testing.assert_close(run(down).double(), exact(down), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("scheme", [None, "mxfp4"], ids=str)
def test_expert_linear_with_clamp_is_batch_invariant(native, scheme):
    case = expert_case((20, 2, 5, 13, 96), True, scheme, has_bias=True, form=GPT_OSS)
    whole = run(case).view(20, 2, -1)
    for rows in companies(20):
        assert same_bits(run(case.rows(rows)).view(len(rows), 2, -1), whole[rows]), f"{rows=}"


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 3), (17, 8, 60, 5, 9), (30, 1, 3, 7, 33)], ids=str)
def test_expert_linear_is_exact_for_any_number_of_experts(sizes):
    for choice in ("any", "same", "some"):
        case = expert_case(sizes, choice=choice)
        assert_as_exact_as_torch(run(case), run(case, function=expert_linear_reference), exact(case), magnitude=10.0)


@pytest.mark.each_value
@EVERY_SCHEME
@GATED
def test_expert_linear_is_batch_invariant(native, scheme, gated):
    case = expert_case((20, 2, 5, 13, 96), gated, scheme)
    whole = run(case).view(20, 2, -1)
    for rows in companies(20):
        assert same_bits(run(case.rows(rows)).view(len(rows), 2, -1), whole[rows]), f"{rows=}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@EVERY_SCHEME
def test_expert_linear_half_precision_is_exact(dtype, scheme):
    case = expert_case((6, 2, 3, 8, 64), True, scheme, dtype)
    expected = exact(case)
    error = float((run(case).double() - expected).abs().max())
    assert error <= 0.51 * torch.finfo(dtype).eps * float(expected.abs().max()), "more than one rounding"
    torch.testing.assert_close(run(case, out_dtype=torch.float32).double(), expected, rtol=1e-5, atol=2e-6)


def test_expert_linear_widens_a_large_weight_in_pieces():
    """More than a CPU widens at a time, in whole blocks of rows."""
    for scheme in ("fp8_block", "int8", "mxfp4"):
        case = expert_case((1, 1, 1, 768, 1600), False, scheme)
        torch.testing.assert_close(run(case).double(), exact(case), rtol=1e-5, atol=1e-5)


def test_expert_linear_accepts_larger_code_buffers():
    case = expert_case((3, 2, 3, 8, 64), False, "fp8")
    exactly = room_for(case)
    assert exactly is not None
    codes, scales = torch.empty(9, 64, dtype=torch.float8_e4m3fn), torch.empty(9, 4)
    out = torch.empty(6, 8)
    room = exactly._replace(codes_TK=codes, scales_TB=scales)
    expert_linear(ExpertProduct(case.x_XK, case.weight, order_of(case), out, False, room))
    assert same_bits(out, run(case))


def test_expert_linear_refuses_mismatched_operands():
    case = expert_case((3, 2, 3, 8, 64))
    order, out = order_of(case), torch.empty(6, 8)
    with pytest.raises(AssertionError, match="x_XK"):
        expert_linear(ExpertProduct(case.x_XK[:2], case.weight, order, out, False, None))
    with pytest.raises(AssertionError, match="out_PN"):
        expert_linear(ExpertProduct(case.x_XK, case.weight, order, out, True, None))
    with pytest.raises(AssertionError, match="pairs of 3 experts"):
        expert_linear(ExpertProduct(case.x_XK, random(2, 8, 64), order, out, False, None))
    with pytest.raises(AssertionError, match="bias_EN"):
        expert_linear(ExpertProduct(case.x_XK, case.weight, order, out, False, None, random(3, 7)))
    with pytest.raises(AssertionError, match="strides"):
        expert_linear(ExpertProduct(case.x_XK, random(3, 64, 8).mT, order, out, False, None))
    quantized = expert_case((3, 2, 3, 8, 64), scheme="fp8")
    with pytest.raises(AssertionError, match="buffers"):
        expert_linear(ExpertProduct(quantized.x_XK, quantized.weight, order, out, False, None))


def test_expert_linear_without_tokens_is_empty():
    case = expert_case((3, 2, 3, 8, 64))
    none = replace(case, x_XK=case.x_XK[:0], expert_ids_TS=case.expert_ids_TS[:0])
    assert run(none).shape == (0, 8)


@pytest.mark.gpu
@EVERY_SCHEME
@GATED
@pytest.mark.parametrize("num_rows", [1, 4, 5, 60, 900])
def test_expert_linear_bfloat16_on_gpu_is_as_exact_as_torch(device, num_rows, scheme, gated):
    case = expert_case((num_rows, 4, 8, 256, 512), gated, scheme, torch.bfloat16)
    assert_as_exact_as_torch(run(case, device), run(case), exact(case), magnitude=10.0)


@pytest.mark.gpu
@EVERY_SCHEME
@GATED
@pytest.mark.parametrize("num_rows", [1, 4, 9, 60, 900])
def test_expert_linear_on_gpu_is_exact_at_gpt_oss_width(device, num_rows, scheme, gated):
    """2880 is no multiple of 128; gate and up alternate, with biases and the clamp."""
    sizes = (num_rows, 4, 8, 2880, 2880)
    case = expert_case(sizes, gated, scheme, torch.bfloat16, not gated, has_bias=True, form=GPT_OSS)
    assert_as_exact_as_torch(run(case, device), run(case), exact(case), magnitude=10.0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 60])
@EVERY_SCHEME
def test_expert_linear_allocates_nothing(device, num_rows, scheme):
    case = placed(expert_case((num_rows, 4, 8, 256, 512), True, scheme, torch.bfloat16), device)
    out, order, room = (
        torch.empty(num_rows * 4, 256, dtype=torch.bfloat16, device=device),
        order_of(case),
        room_for(case),
    )
    assert_allocates_nothing(lambda: expert_linear(ExpertProduct(case.x_XK, case.weight, order, out, True, room)))


pytestmark = QUIET

SHARED = pytest.mark.parametrize("shared", ["none", "plain", "gated"])


def operands(num_rows: int, top_k: int, size: int, shared: str, dtype: torch.dtype, device: torch.device):
    """Routed rows, shares, and what the shared expert gave, amid poison."""
    parts = [random(num_rows * top_k, size).to(dtype), random(num_rows, top_k, seed=1).softmax(-1)]
    parts.append(random(num_rows, size, seed=2).to(dtype) if shared != "none" else None)
    parts.append(random(num_rows, 1, seed=3) if shared == "gated" else None)
    return [None if part is None else among(part, device) for part in parts]


def exact_sum(routed, shares, shared, logit) -> torch.Tensor:
    total = (routed.double().view(*shares.shape, -1) * shares.double()[..., None]).sum(1)
    if shared is not None:
        total = total + shared.double() * (1.0 if logit is None else logit.double().sigmoid())
    return total


@DTYPES
@SHARED
@pytest.mark.parametrize("sizes", [(1, 1, 7), (2, 8, 300), (SMALL_BATCH_TOKENS + 1, 3, 65)], ids=str)
def test_sum_experts_is_as_exact_as_torch(device, guarded, dtype, shared, sizes):
    out = guarded(sizes[0], sizes[2], dtype=dtype).fill_(float("nan"))
    assert sum_experts_triton(ExpertOutputs(*operands(*sizes, shared, dtype, device)), out) is out
    host = operands(*sizes, shared, dtype, CPU)
    in_torch = sum_experts_reference(ExpertOutputs(*host), torch.empty(sizes[0], sizes[2], dtype=dtype))
    assert_as_exact_as_torch(out.cpu(), in_torch, exact_sum(*host))


@pytest.mark.parametrize("num_rows", [1, SMALL_BATCH_TOKENS + 1])
@pytest.mark.parametrize("size", [SMALL_BATCH_COLUMNS, SMALL_BATCH_COLUMNS + 1, LARGE_BATCH_COLUMNS + 1])
def test_sum_experts_is_exact_at_program_widths(device, guarded, num_rows, size):
    out = guarded(num_rows, size).fill_(float("nan"))
    sum_experts_triton(ExpertOutputs(*operands(num_rows, 1, size, "gated", torch.float32, device)), out)
    host = operands(num_rows, 1, size, "gated", torch.float32, CPU)
    assert_as_exact_as_torch(
        out.cpu(), sum_experts_reference(ExpertOutputs(*host), torch.empty(num_rows, size)), exact_sum(*host)
    )


def test_sum_experts_may_overwrite_the_shared_expert(device):
    parts = operands(3, 2, 40, "plain", torch.float32, device)
    expected = sum_experts_triton(ExpertOutputs(*parts), torch.empty(3, 40, device=device))
    assert same_bits(sum_experts_triton(ExpertOutputs(*parts), parts[2]), expected)


def test_sum_experts_triton_is_batch_invariant(device):
    routed, shares, shared, logit = operands(SMALL_BATCH_TOKENS + 4, 2, 20, "gated", torch.float32, device)
    whole = sum_experts_triton(ExpertOutputs(routed, shares, shared, logit), torch.empty_like(shared))
    for count in (1, 5):
        rows = routed[: 2 * count], shares[:count], shared[:count], logit[:count]
        assert same_bits(sum_experts_triton(ExpertOutputs(*rows), torch.empty(count, 20, device=device)), whole[:count])


def test_sum_experts_is_batch_invariant_on_cpu():
    routed, shares, shared, logit = operands(29, 3, 7, "gated", torch.float32, CPU)
    whole = sum_experts(ExpertOutputs(routed, shares, shared, logit), torch.empty(29, 7))
    for rows in companies(29):
        some = routed.view(29, 3, 7)[rows].view(-1, 7), shares[rows], shared[rows], logit[rows]
        assert same_bits(sum_experts(ExpertOutputs(*some), torch.empty(len(rows), 7)), whole[rows]), f"{rows=}"


def test_sum_experts_reference_adds_experts_in_order():
    """Large numbers that cancel, and a small one that is lost in one order only."""
    routed = torch.tensor([[1e8], [-1e8], [1.0], [1.0], [1e8], [-1e8]])
    out = sum_experts_reference(ExpertOutputs(routed, torch.ones(2, 3), None, None), torch.empty(2, 1))
    assert out.tolist() == [[1.0], [0.0]]


def test_sum_experts_triton_adds_experts_in_order(device):
    routed = torch.tensor([[1e8], [-1e8], [1.0], [1.0], [1e8], [-1e8]], device=device).repeat(1, 2)
    out = sum_experts_triton(
        ExpertOutputs(routed, torch.ones(2, 3, device=device), None, None), torch.empty(2, 2, device=device)
    )
    assert out.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_sum_experts_on_cpu_uses_reference():
    host = operands(3, 2, 9, "gated", torch.float32, CPU)
    assert same_bits(
        sum_experts(ExpertOutputs(*host), torch.empty(3, 9)),
        sum_experts_reference(ExpertOutputs(*host), torch.empty(3, 9)),
    )


def test_sum_experts_refuses_wrong_sizes():
    routed, shares, shared, logit = operands(3, 2, 9, "gated", torch.float32, CPU)
    with pytest.raises(AssertionError, match="routed_PH"):
        sum_experts(ExpertOutputs(routed[:5], shares, shared, logit), torch.empty(3, 9))
    with pytest.raises(AssertionError, match="without a shared expert"):
        sum_experts(ExpertOutputs(routed, shares, None, logit), torch.empty(3, 9))


@pytest.mark.parametrize("function", [sum_experts_triton, sum_experts_reference])
def test_sum_experts_without_tokens_is_empty(device, function):
    empty = torch.empty(0, 6, device=device)
    assert function(ExpertOutputs(empty, torch.empty(0, 2, device=device)), empty.clone()).shape == (0, 6)


@pytest.mark.gpu
def test_sum_experts_allocates_nothing(device):
    parts = operands(3, 8, 2048, "gated", torch.bfloat16, device)
    out = torch.empty(3, 2048, dtype=torch.bfloat16, device=device)
    assert_allocates_nothing(lambda: sum_experts(ExpertOutputs(*parts), out))


@pytest.mark.parametrize("num_rows", [2, 9, 21])
@pytest.mark.parametrize("scheme", [None, "fp8", "fp8_block", "mxfp4"], ids=str)
def test_expert_linear_writes_no_pairs_of_other_ranks(device, scheme, num_rows):
    """PADDING in the place of an expert, by every kernel; all other pairs are as they are without."""
    case = expert_case((num_rows, 3, 5, 6, 160), True, scheme, choice="any", has_bias=True)
    ids = case.expert_ids_TS
    some = replace(case, expert_ids_TS=torch.where(ids % 2 == 0, ids, PADDING))
    is_other = (ids % 2 == 1).flatten()
    launch = expert_gemv if num_rows <= MAX_DIRECT_TOKENS else grouped_gemm
    for all_pairs, own in (
        (run_kernel(launch, case, device), run_kernel(launch, some, device)),
        (in_torch(case), in_torch(some)),
    ):
        assert own[is_other].isnan().all()
        assert same_bits(own[~is_other], all_pairs[~is_other])
