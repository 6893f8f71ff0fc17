"""Blocks of pairs by their numbers: room enough for any choice of experts, and as the kernels have it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.geometry import block_rows_for, num_blocks_for, order_specs
from holdfast.kernels.moe import routing as expert_order
from holdfast.memory.workspace_plan import arena_bytes

sizes = st.tuples(st.integers(1, 3000), st.integers(1, 8), st.integers(8, 256))


@given(sizes)
def test_room_is_what_the_kernels_ask_for(size: tuple[int, int, int]) -> None:
    assert order_specs(*size) == expert_order.order_specs(*size)


@given(st.lists(st.integers(0, 9), min_size=5, max_size=400), st.integers(1, 2))
def test_any_choice_of_experts_fits(experts: list[int], top_k: int) -> None:
    num_rows = max(5, len(experts) // top_k)
    block_rows = block_rows_for(num_rows, top_k, 10)
    taken = sum(-(-count // block_rows) for count in Counter(experts).values())
    assert taken <= num_blocks_for(len(experts), 10, block_rows)


@given(sizes, st.integers(1, 50))
def test_a_smaller_step_takes_no_more_room(size: tuple[int, int, int], fewer: int) -> None:
    num_rows, top_k, num_experts = size
    smaller = order_specs(max(1, num_rows - fewer), top_k, num_experts)
    assert arena_bytes(smaller) <= arena_bytes(order_specs(*size))


def test_few_rows_have_no_order() -> None:
    assert block_rows_for(4, 8, 128) == 1
    assert arena_bytes(order_specs(4, 8, 128)) == 0
