"""Single entries of the block table, written from a list."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from holdfast.kernels import triton_compat
from holdfast.kernels.attention.write_kv import (
    BLOCK,
    PADDING,
    scatter_pages,
    scatter_pages_reference,
    scatter_pages_triton,
)

ALL = pytest.mark.parametrize("scatter", [scatter_pages, scatter_pages_reference, scatter_pages_triton])


@pytest.fixture(autouse=True)
def _kernels_run():
    assert triton_compat.triton is not None, "the dev extra brings Triton, and conftest.py asks for its interpreter"


def as_list(updates, device):
    """Entries in whole blocks; what fills the last one up has a page that must go nowhere."""
    padding = [(PADDING, 12345)] * (-len(updates) % BLOCK)
    return torch.tensor([*updates, *padding], dtype=torch.int64, device=device).view(-1, 2)


@ALL
@given(data=st.data())
def test_scatter_pages_changes_only_listed_places(scatter, device, data):
    num_rows, num_pages = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 70))
    places = data.draw(st.lists(st.integers(0, num_rows * num_pages - 1), unique=True, max_size=3 * BLOCK))
    updates = [(place, data.draw(st.sampled_from([0, 1, 77, 2**31 - 1]))) for place in places]
    table = torch.full((num_rows, num_pages), -7, dtype=torch.int32, device=device)
    expected = [-7] * (num_rows * num_pages)
    for place, page in updates:
        expected[place] = page
    scatter(as_list(updates, device), table)
    assert table.view(-1).tolist() == expected


@pytest.mark.each_value
@ALL
@pytest.mark.parametrize("num_updates", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_scatter_pages_stays_within_the_table(scatter, guarded, device, num_updates):
    table = guarded(5, 16, dtype=torch.int32)
    places = [79, 0, *range(1, 79)][:num_updates]
    scatter(as_list([(place, place + 1) for place in places], device), table)
    assert table.view(-1).tolist() == [place + 1 if place in places else 0 for place in range(80)]


@ALL
def test_scatter_pages_skips_padding_anywhere(scatter, guarded, device):
    table = guarded(1, 4, dtype=torch.int32)
    updates = [(PADDING, 9), (2, 5), (PADDING, 9), (0, 6)]
    scatter(as_list(updates, device), table)
    assert table.tolist() == [[6, 0, 5, 0]]


@for_each("num_updates", [1, BLOCK - 1, BLOCK + 1])
def test_scatter_pages_refuses_partial_blocks(device, num_updates):
    updates = torch.zeros(num_updates, 2, dtype=torch.int64, device=device)
    with pytest.raises(AssertionError, match="not a multiple"):
        scatter_pages_triton(updates, torch.zeros(1, 1, dtype=torch.int32, device=device))


def test_scatter_pages_refuses_strided_views(device):
    table = torch.zeros(4, 8, dtype=torch.int32, device=device)
    updates = torch.full((BLOCK, 4), PADDING, dtype=torch.int64, device=device)
    with pytest.raises(AssertionError, match="not dense"):
        scatter_pages_triton(updates[:, :2], table)
    with pytest.raises(AssertionError, match="not dense"):
        scatter_pages_triton(updates.view(-1, 2)[:BLOCK], table[:, :4])


@pytest.mark.gpu
def test_scatter_pages_writes_beyond_two_gib(device):
    table = torch.zeros(2, 2**30 + 8, dtype=torch.int32, device=device)
    last = table.numel() - 1
    scatter_pages(as_list([(last, 3), (2**29, 4)], device), table)
    assert [int(table.view(-1)[place]) for place in (last, 2**29, 0)] == [3, 4, 0]
