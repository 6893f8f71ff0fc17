"""Coverage: gaps, overlaps, wrong widths and doubly used rows are found, whatever the order."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.loading.planning.coverage import Filled, check_coverage, check_sources, uncovered
from holdfast.loading.planning.moves import Move, PlannedWeight
from holdfast.models.parameters import Part
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, MXFP4


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.randoms())
def test_pieces_that_tile_are_sound_in_any_order(heights, random):
    bounds = [sum(heights[:index]) for index in range(len(heights) + 1)]
    pieces = [Filled(start, end, f"t{start}") for start, end in pairwise(bounds)]
    random.shuffle(pieces)
    assert uncovered(pieces, bounds[-1]) is None
    assert uncovered(pieces, bounds[-1] + 1) is not None
    assert uncovered(pieces, bounds[-1] - 1) is not None
    assert uncovered(pieces[1:], bounds[-1]) is not None
    assert uncovered([*pieces[1:], pieces[-1]], bounds[-1]) is not None, (
        "counting rows could miss a hole beside a double"
    )
    assert uncovered([*pieces, pieces[0]], bounds[-1]) is not None


@pytest.mark.parametrize(
    ("filled", "words"),
    [
        ([], "rows 0 to 9 are filled by nothing"),
        ([Filled(0, 4, "a"), Filled(6, 10, "b")], "rows 4 to 5 are filled by nothing"),
        ([Filled(0, 6, "a"), Filled(4, 10, "b")], "rows 4 to 5 are filled by a and by b"),
        ([Filled(0, 10, "a"), Filled(2, 4, "b")], "rows 2 to 3 are filled by a and by b"),
        ([Filled(0, 8, "a")], "rows 8 to 9 are filled by nothing"),
        ([Filled(0, 12, "a")], "a fills rows up to 11 of 10"),
        ([Filled(0, 10, "a"), Filled(10, 10, "b")], "b fills rows 10 to 10, which are none"),
    ],
)
def test_what_is_wrong_is_said(filled, words):
    assert uncovered(filled, 10) == words


def move(part, target="w", scheme=None):
    return Move(part.tensor, "bfloat16", target, part, scheme, 0)


@pytest.mark.parametrize("scheme", [None, FP8, FP8_BLOCK, MXFP4], ids=lambda scheme: scheme and scheme.name)
def test_codes_and_scales_are_both_proved(scheme):
    weight = PlannedWeight("w", (384, 256), "bfloat16", scheme)
    first, second = Part("a", 0, (128, 256)), Part("b", 128, (256, 256))
    check_coverage([weight], [move(first, scheme=scheme), move(second, scheme=scheme)])
    with pytest.raises(AssertionError, match="are filled by nothing"):
        check_coverage([weight], [move(first, scheme=scheme)])
    with pytest.raises(AssertionError, match="are filled by a and by b"):
        check_coverage([weight], [move(Part("a", 0, (256, 256)), scheme=scheme), move(second, scheme=scheme)])
    with pytest.raises(AssertionError, match="rows of"):
        check_coverage([weight], [move(first, scheme=scheme), move(Part("b", 128, (256, 128)), scheme=scheme)])
    with pytest.raises(AssertionError, match="what is no weight: other"):
        check_coverage([weight], [move(first, scheme=scheme), move(second, scheme=scheme), move(first, "other")])


def test_parts_begin_with_a_block():
    weight = PlannedWeight("w", (256, 128), "bfloat16", FP8_BLOCK)
    with pytest.raises(AssertionError, match="begins at row 64, within 128 that share a scale"):
        check_coverage(
            [weight],
            [move(Part("a", 0, (64, 128)), scheme=FP8_BLOCK), move(Part("b", 64, (192, 128)), scheme=FP8_BLOCK)],
        )


def test_weights_of_the_right_size_and_the_wrong_width_are_found():
    with pytest.raises(AssertionError, match="filled by rows of 2 elements"):
        check_coverage([PlannedWeight("w", (4, 4), "float32")], [move(Part("a", 0, (8, 2)))])


def test_elements_are_taken_once():
    left, right = Part("t", 0, (8, 4), columns=(0, 2)), Part("t", 0, (8, 4), columns=(2, 4))
    check_sources([move(left, "a"), move(right, "b"), move(Part("u", 0, (8, 4)), "a")], frozenset())
    top, low = Part("t", 0, (8, 4), rows=(0, 4)), Part("t", 0, (8, 4), rows=(4, 8))
    check_sources([move(low, "a"), move(top, "b")], frozenset())
    for other in (left, top, Part("t", 0, (8, 4), rows=(7, 8), columns=(1, 2))):
        with pytest.raises(AssertionError, match=r"t is a part of . and of ."):
            check_sources([move(left, "a"), move(right, "b"), move(other, "c")], frozenset())
    check_sources([move(left, "a"), move(left, "b.scale")], frozenset({"b.scale"}))
