import pytest
import torch

from holdfast.kernels.moe.expert_linear import (
    FEW_COLUMNS,
    FEW_TOKENS,
    MANY_COLUMNS,
    sum_experts,
    sum_experts_reference,
    sum_experts_triton,
)
from kernels.exactness import assert_as_exact_as_torch, companies, random, same_bits
from kernels.expert_cases import among
from kernels.triton_cases import DTYPES, QUIET, assert_allocates_nothing

pytestmark = QUIET

SHARED = pytest.mark.parametrize("shared", ["none", "plain", "gated"])
CPU = torch.device("cpu")


def operands(num_rows: int, top_k: int, size: int, shared: str, dtype: torch.dtype, device: torch.device):
    """Routed rows, shares, and what the shared expert gave, amid poison."""
    parts = [random(num_rows * top_k, size).to(dtype), random(num_rows, top_k, seed=1).softmax(-1)]
    parts.append(random(num_rows, size, seed=2).to(dtype) if shared != "none" else None)
    parts.append(random(num_rows, 1, seed=3) if shared == "gated" else None)
    return [None if part is None else among(part, device) for part in parts]


def exact(routed, shares, shared, logit) -> torch.Tensor:
    total = (routed.double().view(*shares.shape, -1) * shares.double()[..., None]).sum(1)
    if shared is not None:
        total = total + shared.double() * (1.0 if logit is None else logit.double().sigmoid())
    return total


@DTYPES
@SHARED
@pytest.mark.parametrize("sizes", [(1, 1, 7), (2, 8, 300), (FEW_TOKENS + 1, 3, 65)], ids=str)
def test_as_exact_as_torch(device, guarded, dtype, shared, sizes):
    out = guarded(sizes[0], sizes[2], dtype=dtype).fill_(float("nan"))
    assert sum_experts_triton(*operands(*sizes, shared, dtype, device), out) is out
    host = operands(*sizes, shared, dtype, CPU)
    in_torch = sum_experts_reference(*host, torch.empty(sizes[0], sizes[2], dtype=dtype))
    assert_as_exact_as_torch(out.cpu(), in_torch, exact(*host))


@pytest.mark.parametrize("num_rows", [1, FEW_TOKENS + 1])
@pytest.mark.parametrize("size", [FEW_COLUMNS, FEW_COLUMNS + 1, MANY_COLUMNS + 1])
def test_widths_of_programs(device, guarded, num_rows, size):
    out = guarded(num_rows, size).fill_(float("nan"))
    sum_experts_triton(*operands(num_rows, 1, size, "gated", torch.float32, device), out)
    host = operands(num_rows, 1, size, "gated", torch.float32, CPU)
    assert_as_exact_as_torch(out.cpu(), sum_experts_reference(*host, torch.empty(num_rows, size)), exact(*host))


def test_the_sum_may_lie_where_the_shared_expert_did(device):
    parts = operands(3, 2, 40, "plain", torch.float32, device)
    expected = sum_experts_triton(*parts, torch.empty(3, 40, device=device))
    assert same_bits(sum_experts_triton(*parts, parts[2]), expected)


def test_a_row_is_the_same_to_the_bit_in_any_company(device):
    routed, shares, shared, logit = operands(FEW_TOKENS + 4, 2, 20, "gated", torch.float32, device)
    whole = sum_experts_triton(routed, shares, shared, logit, torch.empty_like(shared))
    for count in (1, 5):
        rows = routed[: 2 * count], shares[:count], shared[:count], logit[:count]
        assert same_bits(sum_experts_triton(*rows, torch.empty(count, 20, device=device)), whole[:count])


def test_a_row_is_the_same_to_the_bit_in_any_company_on_a_cpu():
    routed, shares, shared, logit = operands(29, 3, 7, "gated", torch.float32, CPU)
    whole = sum_experts(routed, shares, shared, logit, torch.empty(29, 7))
    for rows in companies(29):
        some = routed.view(29, 3, 7)[rows].view(-1, 7), shares[rows], shared[rows], logit[rows]
        assert same_bits(sum_experts(*some, torch.empty(len(rows), 7)), whole[rows]), f"{rows=}"


def test_experts_are_added_in_their_order():
    """Large numbers that cancel, and a small one that is lost in one order only."""
    routed = torch.tensor([[1e8], [-1e8], [1.0], [1.0], [1e8], [-1e8]])
    out = sum_experts_reference(routed, torch.ones(2, 3), None, None, torch.empty(2, 1))
    assert out.tolist() == [[1.0], [0.0]]


def test_experts_are_added_in_their_order_by_the_kernel(device):
    routed = torch.tensor([[1e8], [-1e8], [1.0], [1.0], [1e8], [-1e8]], device=device).repeat(1, 2)
    out = sum_experts_triton(routed, torch.ones(2, 3, device=device), None, None, torch.empty(2, 2, device=device))
    assert out.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_the_function_takes_the_reference_on_a_cpu():
    host = operands(3, 2, 9, "gated", torch.float32, CPU)
    assert same_bits(sum_experts(*host, torch.empty(3, 9)), sum_experts_reference(*host, torch.empty(3, 9)))


def test_wrong_sizes_are_refused():
    routed, shares, shared, logit = operands(3, 2, 9, "gated", torch.float32, CPU)
    with pytest.raises(AssertionError, match="routed_PH"):
        sum_experts(routed[:5], shares, shared, logit, torch.empty(3, 9))
    with pytest.raises(AssertionError, match="no shared expert"):
        sum_experts(routed, shares, None, logit, torch.empty(3, 9))


@pytest.mark.parametrize("function", [sum_experts_triton, sum_experts_reference])
def test_no_tokens(device, function):
    empty = torch.empty(0, 6, device=device)
    assert function(empty, torch.empty(0, 2, device=device), None, None, empty.clone()).shape == (0, 6)


@pytest.mark.gpu
def test_nothing_is_allocated(device):
    parts = operands(3, 8, 2048, "gated", torch.bfloat16, device)
    out = torch.empty(3, 2048, dtype=torch.bfloat16, device=device)
    assert_allocates_nothing(lambda: sum_experts(*parts, out))
