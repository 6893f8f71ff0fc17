"""Strips of memory: to scale, complete, in order, and never too many boxes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.page_reader import Element, read_page
from holdfast.cli.strip_map import MAX_BOXES, WIDTH, Part, colours, says, strip_map, with_small_ones_gathered
from holdfast.cli.web_page import page

GIB = 2**30


def groups(parts: list[Part], num_rows: int) -> list[Element]:
    colour = colours([part.group for part in parts])
    return read_page(page("t", strip_map(parts, colour, num_rows, "memory"))).all("svg")[0].children


def drawn(parts: list[Part], num_rows: int) -> list[Element]:
    return [box for group in groups(parts, num_rows) for box in group.children]


sizes = st.lists(st.integers(1, 2**50), min_size=1, max_size=30)


@given(sizes, st.integers(1, 24))
def test_every_box_is_as_large_as_its_bytes_and_together_they_fill_the_strips(
    numbers: list[int], num_rows: int
) -> None:
    parts = [Part(f"g{place % 3}", f"n{place}", number, "") for place, number in enumerate(numbers)]
    boxes = drawn(parts, num_rows)
    total = sum(numbers)
    widths = [sum(float(rect.attributes["width"]) for rect in box.all("rect")) for box in boxes]
    assert [int(box.attributes["data-bytes"]) for box in boxes] == numbers
    for width, number in zip(widths, numbers, strict=True):
        assert width == pytest.approx(WIDTH * num_rows * number / total, abs=0.01 * (num_rows + 1))
    for rect in (rect for box in boxes for rect in box.all("rect")):
        x, width = float(rect.attributes["x"]), float(rect.attributes["width"])
        assert x >= 0
        assert x + width <= WIDTH + 0.02


@given(sizes, st.integers(1, 24))
def test_boxes_follow_one_another(numbers: list[int], num_rows: int) -> None:
    boxes = drawn([Part("g", str(place), number, "") for place, number in enumerate(numbers)], num_rows)
    rects = [
        (int(r.attributes["y"]), float(r.attributes["x"]), float(r.attributes["width"]))
        for b in boxes
        for r in b.all("rect")
    ]
    for (y, x, width), (next_y, next_x, _) in pairwise(rects):
        assert (next_y == y and next_x == pytest.approx(x + width, abs=0.03)) or (next_y > y and next_x == 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2**40)), max_size=60), st.integers(1, 20))
def test_gathering_loses_no_byte_and_keeps_groups(items: list[tuple[str, int]], max_boxes: int) -> None:
    parts = [Part(group, f"n{place}", number, "") for place, (group, number) in enumerate(items)]
    gathered = with_small_ones_gathered(parts, max_boxes)
    for group in "abc":
        assert sum(p.num_bytes for p in gathered if p.group == group) == sum(
            p.num_bytes for p in parts if p.group == group
        )
    assert len(gathered) <= max_boxes + 3


def test_what_is_shown_stays_in_order_and_the_small_ones_come_last_in_their_group() -> None:
    parts = [Part("a", "1", 50, ""), Part("a", "2", 1, ""), Part("b", "3", 60, ""), Part("a", "4", 90, "")]
    assert [part.name for part in with_small_ones_gathered(parts, 3)] == ["1", "4", "2", "3"]
    assert [part.name for part in with_small_ones_gathered(parts, 2)] == ["4", "2 small ones", "3"]
    assert with_small_ones_gathered(parts, 2)[1].reason == "the largest is 1"


def test_thousands_of_tensors_are_still_a_small_picture() -> None:
    parts = [Part("weights", f"layers.{place}.weight", GIB + place, "in bfloat16") for place in range(5000)]
    gathered = with_small_ones_gathered(parts)
    assert len(gathered) == MAX_BOXES + 1
    assert gathered[-1].name == f"{5000 - MAX_BOXES} small ones"
    picture = strip_map(gathered, colours(["weights"]), 24, "memory")
    assert len(picture) < 150_000


def test_a_pointer_reads_owner_bytes_share_and_reason() -> None:
    words = says(Part("weights", "layers.3.qkv.weight", GIB, "fused, in bfloat16"), 4 * GIB)
    assert words == "weights/layers.3.qkv.weight: 1.00 GiB (1,073,741,824 bytes), 25.00%; fused, in bfloat16"
    assert says(Part("free", "", 0, ""), 0) == "free: 0 B (0 bytes), 0.00%"


def test_looks_and_colours() -> None:
    parts = [Part("weights", "w", 10, ""), Part("steps", "s", 10, "", "planned"), Part("free", "", 10, "", "free")]
    assert [group.attributes["class"] for group in groups(parts, 1)] == ["c0", "c3 planned", "free"]
    assert colours(["x", "kv pages", "weights"]) == {"weights": "c0", "kv pages": "c1", "workspace": "c2", "x": "c3"}


def test_nothing_at_all_is_an_empty_picture() -> None:
    assert drawn([], 4) == []
