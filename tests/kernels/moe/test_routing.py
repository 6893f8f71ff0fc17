"""Routing against float64, and pairs sorted into blocks: every pair once, in room that is enough for any choice of experts."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.geometry import CUT_PAIRS, expert_block_rows, num_expert_blocks, order_specs
from holdfast.kernels.moe.routing import (
    PADDING,
    ExpertOrder,
    Routing,
    fill_order_triton,
    local_ids,
    local_ids_triton,
    order_experts,
    route_tokens,
    route_tokens_reference,
    route_tokens_triton,
)
from holdfast.memory.workspace_plan import arena_bytes
from kernels.exactness import companies, random, same_bits
from kernels.expert_cases import among
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

NORMALIZE = pytest.mark.parametrize("normalize", [False, True], ids=["as they are", "normalized"])
SIZES = [(1, 1, 1), (2, 1, 3), (17, 3, 3), (5, 4, 60), (2, 8, 128), (1, 7, 1000)]


def run(route, logits: torch.Tensor, top_k: int, normalize: bool, device: torch.device, bias=None):
    zones = RedZones(device)
    ids = zones.allocate(len(logits), top_k, dtype=torch.int32).fill_(2**30)
    shares = zones.allocate(len(logits), top_k, dtype=torch.float32).fill_(float("nan"))
    route(among(logits, device), Routing(normalize), ids, shares, None if bias is None else among(bias, device))
    zones.check()
    return ids.cpu(), shares.cpu()


def route_by_hand(logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, one token at a time."""
    ids, shares = [], []
    for row in logits.double():
        chosen = sorted(range(len(row)), key=lambda expert: (-float(row[expert]), expert))[:top_k]
        weights = row.softmax(0)[chosen]
        ids.append(chosen)
        shares.append(weights / weights.sum() if normalize else weights)
    return torch.tensor(ids, dtype=torch.int32), torch.stack(shares)


@NORMALIZE
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_route_tokens_matches_float64(device, sizes, normalize, scale):
    num_rows, top_k, num_experts = sizes
    logits = random(num_rows, num_experts, scale=scale)
    expected_ids, expected = route_by_hand(logits, top_k, normalize)
    for route, where in ((route_tokens_reference, torch.device("cpu")), (route_tokens_triton, device)):
        ids, shares = run(route, logits, top_k, normalize, where)
        assert torch.equal(ids, expected_ids)
        # A GPU's exponential is as exact as its argument, which may be in the hundreds.
        tolerance = 2e-6 if where.type == "cpu" else 2e-6 * scale
        torch.testing.assert_close(shares.double(), expected, rtol=tolerance, atol=1e-30)


@NORMALIZE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_route_tokens_adds_bias_before_the_choice(device, normalize, dtype):
    logits, bias = random(9, 12), random(12, seed=5, scale=3.0).to(dtype)
    expected_ids, expected = route_by_hand(logits + bias.float(), 4, normalize)
    assert not torch.equal(expected_ids, route_by_hand(logits, 4, normalize)[0]), "a bias that matters"
    for route, where in ((route_tokens_reference, torch.device("cpu")), (route_tokens_triton, device)):
        ids, shares = run(route, logits, 4, normalize, where, bias)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(shares.double(), expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 3e37, -3e37])
def test_route_tokens_normalized_shares_are_a_softmax(device, offset):
    logits = torch.tensor([[0.0, 3, 1, -2, 2.5, -88], [-200, -1e4, 90, 88.5, 0, 87]]) + offset
    logits[1, 3] = -1e38
    chosen_ids, _ = route_by_hand(logits, 4, True)
    expected = logits.double().gather(1, chosen_ids.long()).softmax(-1)
    for route, where in ((route_tokens_reference, torch.device("cpu")), (route_tokens_triton, device)):
        ids, shares = run(route, logits, 4, True, where)
        assert torch.equal(ids, chosen_ids)
        torch.testing.assert_close(shares.double(), expected, rtol=1e-5, atol=1e-37)


def test_route_tokens_tie_takes_the_lower_expert(device):
    logits = torch.tensor([[0.0, 1, 1, 0, 1], [2, 2, 2, 2, 2], [-0.0, 0.0, -1, 0, -0.0]])
    logits = torch.cat([logits, torch.full((1, 5), -torch.inf)])
    expected = [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 3, 4], [0, 1, 2, 3]]
    for route, where in ((route_tokens_reference, torch.device("cpu")), (route_tokens_triton, device)):
        ids, shares = run(route, logits, 4, False, where)
        assert ids.tolist() == expected
        torch.testing.assert_close(shares[:3], logits[:3].softmax(-1).gather(1, ids[:3].long()))


@NORMALIZE
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_route_tokens_nan_stays_in_its_token_with_valid_ids(device, bad, normalize):
    logits = random(4, 6)
    clean = run(route_tokens_triton, logits, 3, normalize, device)
    logits[1, 4] = bad
    logits[2] = bad
    for route, where in ((route_tokens_reference, torch.device("cpu")), (route_tokens_triton, device)):
        ids, shares = run(route, logits, 3, normalize, where)
        assert ((ids >= 0) & (ids < 6)).all()
        assert all(len(set(row)) == 3 for row in ids.tolist())
        assert shares[2].isnan().all()
        assert shares[1].isfinite().all() == (bad == -float("inf"))
        assert torch.equal(ids[[0, 3]], clean[0][[0, 3]])
        torch.testing.assert_close(shares[[0, 3]], clean[1][[0, 3]])


def test_route_tokens_chooses_nan_last(device):
    logits = torch.tensor([[1.0, float("nan"), -torch.inf, 3.0]])
    for route, where in ((route_tokens_reference, torch.device("cpu")), (route_tokens_triton, device)):
        assert run(route, logits, 4, False, where)[0].tolist() == [[3, 0, 1, 2]]


def test_route_tokens_is_batch_invariant(device):
    logits = random(9, 12)
    ids, shares = run(route_tokens_triton, logits, 4, True, device)
    for rows in companies(9):
        some_ids, some = run(route_tokens_triton, logits[rows], 4, True, device)
        assert torch.equal(some_ids, ids[rows])
        assert same_bits(some, shares[rows])


def test_route_tokens_on_cpu_uses_reference():
    logits = random(5, 7)
    found, expected = (
        run(route, logits, 2, True, torch.device("cpu")) for route in (route_tokens, route_tokens_reference)
    )
    assert same_bits(found[1], expected[1])


def test_route_tokens_without_tokens_is_empty(device):
    ids, shares = run(route_tokens_triton, torch.empty(0, 5), 2, True, device)
    assert ids.shape == shares.shape == (0, 2)


def test_route_tokens_refuses_top_k_above_expert_count():
    with pytest.raises(AssertionError, match="3 experts of a token, and there are 2"):
        run(route_tokens_reference, torch.ones(1, 2), 3, True, torch.device("cpu"))
    with pytest.raises(AssertionError, match="for 2 experts"):
        run(route_tokens_reference, torch.ones(1, 2), 1, True, torch.device("cpu"), torch.ones(3))


@pytest.mark.gpu
def test_route_tokens_allocates_nothing(device):
    logits = random(9, 128).to(device)
    ids, shares = torch.empty(9, 8, dtype=torch.int32, device=device), torch.empty(9, 8, device=device)
    assert_allocates_nothing(lambda: route_tokens(logits, Routing(True), ids, shares))


BEYOND = 2**30


def choose(num_rows: int, top_k: int, num_experts: int, reach: int | None = None, seed: int = 0) -> torch.Tensor:
    """Experts, of which only the last `reach` are chosen."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [torch.randperm(reach or num_experts, generator=generator)[:top_k] for _ in range(num_rows)]
    return (num_experts - 1 - torch.stack(chosen)).to(torch.int32)


def empty_tensors(ids: torch.Tensor, num_experts: int, zones: RedZones) -> list[torch.Tensor]:
    specs = order_specs(*ids.shape, num_experts)
    return [zones.allocate(*spec.shape, dtype=torch.int32).fill_(BEYOND) for spec in specs]


def used(order: ExpertOrder) -> tuple[list[int], list[list[int]]]:
    """Experts of blocks, and the pairs of those that have one."""
    experts = order.block_experts_B.tolist()
    return experts, order.pairs_BR[: sum(expert >= 0 for expert in experts)].tolist()


def order_by_hand(
    ids: torch.Tensor, num_experts: int, block_rows: int, num_blocks: int
) -> tuple[list[int], list[list[int]]]:
    """The order in plain Python."""
    experts, blocks = [], []
    for expert in range(num_experts):
        pairs = [pair for pair, chosen in enumerate(ids.flatten().tolist()) if chosen == expert]
        for start in range(0, len(pairs), block_rows):
            block = pairs[start : start + block_rows]
            experts.append(expert)
            blocks.append(block + [PADDING] * (block_rows - len(block)))
    return experts + [PADDING] * (num_blocks - len(experts)), blocks


def check(ids: torch.Tensor, num_experts: int, device: torch.device, cut_pairs: int | None = None) -> None:
    """The reference is as by hand, and the kernel is as the reference; with `cut_pairs`, in such cuts."""
    host, zones = RedZones(torch.device("cpu")), RedZones(device)
    expected = order_experts(ids, num_experts, empty_tensors(ids, num_experts, host))
    assert used(expected) == order_by_hand(ids, num_experts, expected.block_rows, len(expected.block_experts_B))
    tensors = empty_tensors(ids, num_experts, zones)
    order = replace(expected, expert_ids_TS=among(ids, device), pairs_BR=tensors[0], block_experts_B=tensors[1])
    num_cuts = len(tensors[2]) if cut_pairs is None else -(-ids.numel() // cut_pairs)
    counts = zones.allocate(num_cuts, num_experts, dtype=torch.int32).fill_(BEYOND)
    fill_order_triton(order, counts, cut_pairs or CUT_PAIRS)
    host.check()
    zones.check()
    assert used(order) == used(expected)


@pytest.mark.parametrize("num_rows", [17, 33, 100])
@pytest.mark.parametrize(("top_k", "num_experts"), [(1, 1), (2, 3), (8, 12)])
def test_order_experts_covers_every_pair_at_every_size(device, num_rows, top_k, num_experts):
    check(choose(num_rows, top_k, num_experts), num_experts, device)


def test_order_experts_handles_experts_without_tokens(device):
    check(choose(100, 1, 12, reach=1), 12, device)
    check(choose(50, 2, 12, reach=3), 12, device)
    check(11 - choose(40, 2, 12, reach=2), 12, device)


def test_order_experts_covers_every_pair_of_sixty_experts(device):
    check(choose(18, 4, 60), 60, device)


@pytest.mark.parametrize("expert", [0, 30, 59])
def test_order_experts_expert_with_more_blocks_than_block_rows(device, expert):
    """Its blocks, and those without an expert after them, are written by several stores each."""
    ids = torch.full((300, 1), expert, dtype=torch.int32)
    assert expert_block_rows(300, 1, 60) ** 2 < 300
    check(ids, 60, device)


@pytest.mark.parametrize("cut_pairs", [64, 128])
def test_order_experts_in_cuts_covers_every_pair(device, cut_pairs):
    """The last one with few pairs, or with as many as the others."""
    check(choose(100, 2, 5), 5, device, cut_pairs)
    check(choose(64, 4, 5), 5, device, cut_pairs)
    check(choose(150, 8, 16, reach=9), 16, device, cut_pairs)
    check(torch.full((300, 1), 3, dtype=torch.int32), 70, device, cut_pairs)


def test_order_experts_in_cuts_of_many_pairs_covers_every_pair(device):
    """Cuts and experts of a prompt: more counts than a program adds up at once."""
    check(choose(700, 4, 300), 300, device)
    check(choose(300, 4, 300), 300, device, 64)


@hypothesis_settings(max_examples=8)
@given(st.integers(17, 60), st.integers(1, 4), st.integers(4, 9), st.integers(0, 99))
def test_order_experts_covers_every_pair_for_any_choice(device, num_rows, top_k, num_experts, seed):
    check(choose(num_rows, top_k, num_experts, seed=seed), num_experts, device)


@pytest.mark.parametrize(("num_rows", "block_rows"), [(1, 1), (4, 1), (5, 16), (16, 16)])
def test_order_experts_leaves_small_batches_unsorted(num_rows, block_rows):
    ids = choose(num_rows, 2, 3)
    tensors = [torch.empty(spec.shape, dtype=torch.int32) for spec in order_specs(num_rows, 2, 3)]
    order = order_experts(ids, 3, tensors)
    assert (order.block_rows, order.is_sorted) == (block_rows, False)
    assert (order.num_pairs, order.top_k, order.num_blocks) == (2 * num_rows, 2, 2 * num_rows)
    assert not any(tensor.numel() for tensor in tensors)


def test_order_experts_fills_given_tensors():
    ids = choose(19, 2, 3)
    tensors = empty_tensors(ids, 3, RedZones(torch.device("cpu")))
    order = order_experts(ids, 3, tensors)
    assert order.pairs_BR is tensors[0]
    assert order.is_sorted
    assert order.num_blocks == len(tensors[1])
    assert used(order) == order_by_hand(ids, 3, order.block_rows, len(tensors[1]))


def test_order_experts_refuses_wrong_buffers():
    ids = choose(19, 2, 3)
    tensors = empty_tensors(ids, 3, RedZones(torch.device("cpu")))
    with pytest.raises(AssertionError, match="expert pairs"):
        order_experts(ids, 3, [tensors[0][:-1], *tensors[1:]])
    with pytest.raises(AssertionError, match="int32"):
        order_experts(ids.long(), 3, tensors)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts"),
    [(64, 8, 128), (8192, 8, 128), (16384, 10, 512), (3000, 4, 60), (300, 8, 1024)],
)
def test_order_experts_covers_every_pair_at_model_sizes(device, num_rows, top_k, num_experts):
    check(choose(num_rows, top_k, num_experts), num_experts, device)


@pytest.mark.gpu
def test_order_experts_allocates_nothing(device):
    ids = choose(600, 8, 128).to(device)
    tensors = empty_tensors(ids, 128, RedZones(device))
    assert_allocates_nothing(lambda: order_experts(ids, 128, tensors))


sizes = st.tuples(st.integers(1, 3000), st.integers(1, 8), st.integers(8, 256))


@given(st.lists(st.integers(0, 9), min_size=5, max_size=400), st.integers(1, 2))
def test_num_expert_blocks_suffices_for_any_choice(experts: list[int], top_k: int) -> None:
    num_rows = max(5, len(experts) // top_k)
    block_rows = expert_block_rows(num_rows, top_k, 10)
    taken = sum(-(-count // block_rows) for count in Counter(experts).values())
    assert taken <= num_expert_blocks(len(experts), 10, block_rows)


@given(sizes, st.integers(1, 50))
def test_order_specs_of_a_smaller_step_need_no_more_memory(size: tuple[int, int, int], fewer: int) -> None:
    num_rows, top_k, num_experts = size
    smaller = order_specs(max(1, num_rows - fewer), top_k, num_experts)
    assert arena_bytes(smaller) <= arena_bytes(order_specs(*size))


def test_order_specs_of_small_batches_are_empty() -> None:
    assert expert_block_rows(4, 8, 128) == 1
    assert arena_bytes(order_specs(16, 8, 128)) == 0
    assert arena_bytes(order_specs(17, 8, 128)) > 0


@pytest.mark.parametrize("num_rows", [1, 17, 700])
def test_local_ids_keep_experts_of_the_rank(device, num_rows):
    ids = choose(num_rows, 4, 12)
    expected = [[expert - 3 if 3 <= expert < 8 else PADDING for expert in row] for row in ids.tolist()]
    assert local_ids(ids, 3, 5, torch.full_like(ids, BEYOND)).tolist() == expected
    room = RedZones(device)
    out = room.allocate(*ids.shape, dtype=torch.int32).fill_(BEYOND)
    assert local_ids_triton(among(ids, device), 3, 5, out).tolist() == expected
    room.check()


@pytest.mark.parametrize("cut_pairs", [None, 64])
def test_order_experts_skips_pairs_of_other_ranks(device, cut_pairs):
    for first in (0, 4, 8):
        ids = choose(50, 4, 12, seed=first)
        check(local_ids(ids, first, 4, torch.empty_like(ids)), 4, device, cut_pairs)
    check(torch.full((40, 2), PADDING, dtype=torch.int32), 4, device, cut_pairs)


def test_order_specs_keep_block_height_across_ranks():
    ids = choose(200, 4, 64)
    alone, share = (order_specs(200, 4, 64, num_local) for num_local in (None, 16))
    assert alone[0].shape[1] == share[0].shape[1] == expert_block_rows(200, 4, 64)
    tensors = [torch.empty(spec.shape, dtype=torch.int32) for spec in share]
    order = order_experts(local_ids(ids, 48, 16, torch.empty_like(ids)), 64, tensors, 16)
    assert (order.num_experts, order.block_rows) == (16, alone[0].shape[1])
    assert sum(pair >= 0 for block in used(order)[1] for pair in block) == int((ids >= 48).sum())
