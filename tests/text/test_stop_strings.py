"""StopStrings: the result of a search in the whole text, however it is cut, and nothing shown that is taken back."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from counted_work import num_lines
from holdfast.text.stop_strings import StopStrings

STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4, unique=True)


def by_search(text: str, stops: list[str], first_end: int = 1) -> tuple[int, str] | None:
    """Where the first stop string ends, at `first_end` or later, and the longest that ends there."""
    for end in range(first_end, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=STOPS,
    cuts=st.lists(st.integers(0, 99), max_size=30),
    include=st.booleans(),
)
@example(text="abab", stops=["abc", "ba"], cuts=[1, 2, 3], include=False)
@example(text="xabcd", stops=["abcd", "bc"], cuts=[3], include=True)
def test_stop_strings_match_a_search_in_the_whole_text(text, stops, cuts, include):
    stop_strings = StopStrings(stops, include)
    shown, matched = "", None
    longest = max(map(len, stops), default=1)
    for piece in pieces_of(text, cuts):
        delta, matched = stop_strings.feed(piece)
        shown += delta
        assert stop_strings.num_held < longest
        if matched is not None:
            break
    else:
        shown += stop_strings.flush()
    expected = by_search(text, stops)
    if expected is None:
        assert (shown, matched) == (text, None)
    else:
        end, stop = expected
        assert matched == stop == stop_strings.matched
        assert shown == text[: end if include else end - len(stop)]


@given(text=st.text(alphabet="abc", max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 99), max_size=30))
def test_stop_strings_shown_text_is_final(text, stops, cuts):
    stop_strings = StopStrings(stops, include=False)
    end = by_search(text, stops)
    final = text if end is None else text[: end[0] - len(end[1])]
    shown = ""
    for piece in pieces_of(text, cuts):
        shown += stop_strings.feed(piece)[0]
        assert final.startswith(shown)
        assert not any(stop in shown for stop in stops)


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=STOPS,
    cuts=st.lists(st.integers(0, 99), max_size=12),
    number=st.integers(0, 12),
)
def test_stop_strings_ending_in_unstoppable_text_are_skipped(text, stops, cuts, number):
    """As while fewer than min_tokens are out: only the end of a stop string has to lie in text that counts."""
    pieces = pieces_of(text, cuts)
    early, late = pieces[:number], pieces[number:]
    stop_strings = StopStrings(stops, include=False)
    shown = "".join(stop_strings.feed_unstoppable(piece) for piece in early)
    assert "".join(early).startswith(shown)
    matched = None
    for piece in late:
        delta, matched = stop_strings.feed(piece)
        shown += delta
        if matched is not None:
            break
    else:
        shown += stop_strings.flush()
    expected = by_search(text, stops, len("".join(early)) + 1)
    if expected is None:
        assert (shown, matched) == (text, None)
    else:
        assert (shown, matched) == (text[: expected[0] - len(expected[1])], expected[1])


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_empty_pass_text_through(include):
    stop_strings = StopStrings((), include)
    assert stop_strings.feed("abc") == ("abc", None)
    assert stop_strings.feed_unstoppable("abc") == "abc"
    assert stop_strings.flush() == ""


def test_stop_strings_hold_only_a_possible_prefix():
    stop_strings = StopStrings(("</think>", "\n\nUser:"), include=False)
    assert stop_strings.feed("2 < 3 and 3 <") == ("2 < 3 and 3 ", None)
    assert stop_strings.num_held == 1
    assert stop_strings.feed(" 4\n") == ("< 4", None)
    assert stop_strings.feed("\nUse") == ("", None)
    assert stop_strings.feed("ful") == ("\n\nUseful", None)
    assert stop_strings.flush() == ""


def test_stop_strings_unstoppable_match_is_not_held():
    stop_strings = StopStrings(("END", "ENDING", "DO"), include=False)
    assert stop_strings.feed_unstoppable("a END") == "a "
    assert stop_strings.feed_unstoppable("ING") == "ENDING"
    assert stop_strings.feed_unstoppable(" D") == " "
    assert stop_strings.feed("O") == ("", "DO")


def test_stop_strings_emit_nothing_after_a_match():
    stop_strings = StopStrings(("END",), include=True)
    assert stop_strings.feed("a END b") == ("a END", "END")
    assert stop_strings.feed("more") == ("", "END")
    assert stop_strings.feed_unstoppable("more") == ""
    assert stop_strings.flush() == ""


def test_stop_strings_count_astral_characters_as_one():
    stop_strings = StopStrings(("😀😀",), include=False)
    assert stop_strings.feed("a😀") == ("a", None)
    assert stop_strings.feed("b😀") == ("😀b", None)
    assert stop_strings.feed("😀😀") == ("", "😀😀")


def test_stop_strings_work_is_linear_in_the_text():
    stop_strings = StopStrings(tuple("a" * length + "b" for length in range(1008, 1024)), include=False)

    def feed(text: str) -> None:
        for character in text:
            assert stop_strings.feed(character)[1] is None

    feed("a" * 2000)
    assert stop_strings.num_held == 1023
    assert num_lines(lambda: feed("a" * 1000)) < 100 * 1000
    assert stop_strings.feed("b")[1] == "a" * 1023 + "b"
