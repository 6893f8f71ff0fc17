import random as chance

import pytest
import torch

from holdfast.attention.layer_pages import PagedRows

CPU = torch.device("cpu")


def plane_of(num_pages, page_tokens, dtype=torch.float32):
    """Slot s holds s, so that what was read says where it lay."""
    slots = torch.arange(num_pages * page_tokens, dtype=torch.float32)
    return slots.view(-1, 1, 1).expand(-1, 2, 3).contiguous().to(dtype)


def expected_slots(pages, first, end, page_tokens):
    return [float(pages[i // page_tokens] * page_tokens + i % page_tokens) for i in range(first, end)]


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("seed", range(20))
def test_every_range_of_every_page_list(page_tokens, seed):
    dice = chance.Random(seed)
    pages = dice.sample(range(12), dice.randint(1, 12))
    end = dice.randint(1, len(pages) * page_tokens)
    first = dice.randrange(end)
    rows = PagedRows.locate(pages, first, end, page_tokens, CPU)
    read = rows.read(plane_of(12, page_tokens), page_tokens, torch.float32)
    assert read.shape == (2, end - first, 3)
    assert read[0, :, 0].tolist() == expected_slots(pages, first, end, page_tokens)
    assert (read == read[:1, :, :1]).all()


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("with_bytes", [True, False], ids=["codes", "scales"])
def test_every_range_of_pages_that_lie_head_by_head(page_tokens, seed, with_bytes):
    """Slot s of head h holds 1000 h + s."""
    dice = chance.Random(seed)
    pages = dice.sample(range(12), dice.randint(1, 12))
    pages = sorted(pages) if seed % 2 else pages
    end = dice.randint(1, len(pages) * page_tokens)
    first = dice.randrange(end)
    plane = torch.arange(12 * page_tokens).view(12, 1, page_tokens) + 1000 * torch.arange(2).view(1, 2, 1)
    plane = plane.unsqueeze(-1).expand(-1, -1, -1, 3) if with_bytes else plane
    read = PagedRows.locate(pages, first, end, page_tokens, CPU).read_by_head(plane.contiguous())
    assert read.shape == ((2, end - first, 3) if with_bytes else (2, end - first))
    read = read[..., 0] if with_bytes else read
    expected = torch.tensor(expected_slots(pages, first, end, page_tokens))
    assert torch.equal(read[0].float(), expected)
    assert torch.equal(read[1].float(), 1000 + expected)


@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 16), (3, 5), (5, 13), (15, 16)])
def test_neighbours_are_read_in_place(first, end):
    plane = plane_of(9, 4)
    rows = PagedRows.locate([3, 4, 5, 6], first, end, 4, CPU)
    read = rows.read(plane, 4, torch.float32)
    assert rows.pages_P is None
    assert read.data_ptr() == plane[12 + first].data_ptr()
    assert read[0, :, 0].tolist() == expected_slots([3, 4, 5, 6], first, end, 4)


def test_pages_outside_the_range_do_not_matter():
    """A window that has left the scattered pages behind reads its own in place."""
    rows = PagedRows.locate([8, 1, 2, 0], first=5, end=12, page_tokens=4, device=CPU)
    assert rows.pages_P is None
    assert rows.first_slot == 5


@pytest.mark.parametrize("pages", [[3, 4], [4, 3]], ids=["in place", "gathered"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_pages_are_widened(pages, dtype):
    plane = plane_of(9, 4, dtype)
    read = PagedRows.locate(pages, 0, 7, 4, CPU).read(plane, 4, torch.float32)
    assert read.dtype == torch.float32
    assert read[0, :, 0].tolist() == expected_slots(pages, 0, 7, 4)
