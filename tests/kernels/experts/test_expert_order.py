from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.geometry import CUT_PAIRS, order_specs
from holdfast.kernels.moe.routing import (
    PADDING,
    ExpertOrder,
    order_experts,
    order_experts_reference,
    order_experts_triton,
)
from kernels.expert_cases import among
from kernels.triton_cases import assert_allocates_nothing
from red_zones import RedZones

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


def by_hand(ids: torch.Tensor, num_experts: int, block_rows: int, num_blocks: int) -> tuple[list[int], list[list[int]]]:
    """The order in plain Python."""
    experts, blocks = [], []
    for expert in range(num_experts):
        pairs = [pair for pair, chosen in enumerate(ids.flatten().tolist()) if chosen == expert]
        for start in range(0, len(pairs), block_rows):
            block = pairs[start : start + block_rows]
            experts.append(expert)
            blocks.append(block + [PADDING] * (block_rows - len(block)))
    return experts + [PADDING] * (num_blocks - len(experts)), blocks


def check(ids: torch.Tensor, num_experts: int, device: torch.device, cut_pairs: int = CUT_PAIRS) -> None:
    """The reference is as by hand, and the kernel is as the reference."""
    host, zones = RedZones(torch.device("cpu")), RedZones(device)
    expected = order_experts_reference(ids, num_experts, empty_tensors(ids, num_experts, host))
    assert used(expected) == by_hand(ids, num_experts, expected.block_rows, len(expected.block_experts_B))
    tensors = empty_tensors(ids, num_experts, zones)
    order = replace(expected, expert_ids_TS=among(ids, device), pairs_BR=tensors[0], block_experts_B=tensors[1])
    num_cuts = -(-ids.numel() // cut_pairs)
    counts = zones.allocate(num_cuts if num_cuts > 1 else 0, num_experts, dtype=torch.int32).fill_(BEYOND)
    order_experts_triton(order, counts, cut_pairs)
    host.check()
    zones.check()
    assert used(order) == used(expected)


@pytest.mark.parametrize("num_rows", [5, 17, 100])
@pytest.mark.parametrize(("top_k", "num_experts"), [(1, 1), (2, 3), (8, 12)])
def test_every_choice_of_sizes(device, num_rows, top_k, num_experts):
    check(choose(num_rows, top_k, num_experts), num_experts, device)


def test_one_expert_gets_everything_and_others_nothing(device):
    check(choose(100, 1, 12, reach=1), 12, device)
    check(choose(50, 2, 12, reach=3), 12, device)
    check(11 - choose(40, 2, 12, reach=2), 12, device)


def test_sixty_experts(device):
    check(choose(6, 4, 60), 60, device)


@pytest.mark.parametrize("cut_pairs", [64, 128])
def test_pairs_in_cuts(device, cut_pairs):
    """The last one with few pairs, or with as many as the others."""
    check(choose(100, 2, 5), 5, device, cut_pairs)
    check(choose(64, 4, 5), 5, device, cut_pairs)


@hypothesis_settings(max_examples=8)
@given(st.integers(5, 60), st.integers(1, 4), st.integers(4, 9), st.integers(0, 99))
def test_any_choice(device, num_rows, top_k, num_experts, seed):
    check(choose(num_rows, top_k, num_experts, seed=seed), num_experts, device)


def test_few_tokens_need_no_order():
    ids = choose(4, 2, 3)
    tensors = [torch.empty(spec.shape, dtype=torch.int32) for spec in order_specs(4, 2, 3)]
    order = order_experts(ids, 3, tensors)
    assert order.block_rows == 1
    assert (order.num_pairs, order.top_k) == (8, 2)
    assert not any(tensor.numel() for tensor in tensors)


def test_the_function_fills_what_it_is_given():
    ids = choose(9, 2, 3)
    tensors = empty_tensors(ids, 3, RedZones(torch.device("cpu")))
    order = order_experts(ids, 3, tensors)
    assert order.pairs_BR is tensors[0]
    assert used(order) == by_hand(ids, 3, 16, len(tensors[1]))


def test_wrong_room_is_refused():
    ids = choose(9, 2, 3)
    tensors = empty_tensors(ids, 3, RedZones(torch.device("cpu")))
    with pytest.raises(AssertionError, match="expert pairs"):
        order_experts(ids, 3, [tensors[0][:-1], *tensors[1:]])
    with pytest.raises(AssertionError, match="int32"):
        order_experts(ids.long(), 3, tensors)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts"), [(64, 8, 128), (8192, 8, 128), (3000, 4, 60), (300, 8, 1024)]
)
def test_the_sizes_of_models(device, num_rows, top_k, num_experts):
    check(choose(num_rows, top_k, num_experts), num_experts, device)


@pytest.mark.gpu
def test_nothing_is_allocated(device):
    ids = choose(600, 8, 128).to(device)
    tensors = empty_tensors(ids, 128, RedZones(device))
    assert_allocates_nothing(lambda: order_experts(ids, 128, tensors))
