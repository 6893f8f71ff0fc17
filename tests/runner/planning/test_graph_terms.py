"""The ladder of graphs, and what it costs."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.memory.planner import PAGE_PHASES
from holdfast.planning.terms import MAX_GRAPH_ROWS, graph_bytes, graph_sizes, graph_term, mixed_sizes


def test_the_ladder() -> None:
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert graph_sizes(256)[-13:] == (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    assert graph_sizes(512)[-3:] == (448, 480, 512)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (3, (1, 2, 3)), (5, (1, 2, 4, 5)), (33, (1, 2, 4, 8, 16, 24, 32, 33))]
)
def test_the_last_is_the_largest_step(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes


@given(st.integers(1, 2**31 - 1))
def test_every_ladder(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == min(most, MAX_GRAPH_ROWS)
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) < 60, "absurd limits do not make absurd ladders"
    assert all(upper <= 2 * lower for lower, upper in pairwise(sizes)), "no step is mostly padding"


@pytest.mark.parametrize(("most", "sizes"), [(63, ()), (64, (64,)), (300, (64, 128, 256)), (8192, (64, 128, 256, 512))])
def test_buckets_of_mixed_steps(most: int, sizes: tuple[int, ...]) -> None:
    assert mixed_sizes(most) == sizes


def test_bytes_grow_with_layers_and_graphs() -> None:
    assert graph_bytes(64, 20) > graph_bytes(32, 20) > graph_bytes(32, 10) > 0
    term = graph_term(64, 256, 8192)
    num_graphs = len(graph_sizes(256)) + 4
    assert (term.owner, term.num_bytes, term.phases) == ("cuda graphs", graph_bytes(64, num_graphs), PAGE_PHASES)
    assert graph_term(64, 256, 16).num_bytes == graph_bytes(64, len(graph_sizes(16))), (
        "no step has more rows than tokens"
    )
