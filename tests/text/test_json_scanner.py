"""JsonScanner: what json takes it takes, what json refuses it refuses, and cuts change nothing."""

import json

from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from holdfast.text.json_scanner import MAX_DEPTH, Found, JsonScanner, is_object
from text.answer_cases import CUTS, cut

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
SIGNS = st.lists(
    st.sampled_from([*'{}[]:,"\\ \n\t-+.eE019u', "true", "null", "false", '"a"', "\\u00e9", "é", "\x01", '{"a":']),
    max_size=14,
).map("".join)


def events(pieces: list[str]) -> list[tuple[int, Found]]:
    """Everything but MORE, with its place in the whole text."""
    scanner, reported, before = JsonScanner(), [], 0
    for piece in pieces:
        place = 0
        while True:
            place, found = scanner.scan(piece, place, len(piece))
            if found is Found.MORE:
                break
            reported.append((before + place, found))
            if found in (Found.END, Found.BROKEN):
                return reported
        before += len(piece)
    return reported


def json_takes(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except (ValueError, RecursionError):
        return False


@given(value=st.dictionaries(st.text(max_size=5), JSON, max_size=4), indent=st.sampled_from([None, 2]), cuts=CUTS)
def test_scan_reports_members_and_object_ends(value, indent, cuts):
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert is_object(text)
    reported = events(cut(text, cuts))
    assert reported == events([text])
    assert reported[-1] == (len(text), Found.END)
    assert [found for _, found in reported[:-1]] == [Found.KEY, Found.VALUE, Found.VALUE_END] * len(value)
    values = [json.loads(text[start[0] : end[0]]) for start, end in zip(reported[1::3], reported[2::3], strict=False)]
    assert values == list(value.values())


@given(text=SIGNS, cuts=CUTS)
def test_scan_accepts_exactly_what_json_does_however_cut(text, cuts):
    assert is_object(text) == json_takes(text)
    assert events(cut(text, cuts)) == events([text])


@for_each("number", ["0", "-0", "10", "1.5", "-1e5", "1E+05", "0.0e-0"])
def test_scan_accepts_valid_numbers(number):
    assert is_object(f'{{"a":{number}}}')


@for_each("number", ["01", "+1", "1.", ".5", "1e", "-", "1e+", "0x1", "٣", "1_0", "NaN", "Infinity"])
def test_scan_rejects_invalid_numbers(number):
    assert not is_object(f'{{"a":{number}}}')


def test_scan_bounds_the_depth():
    deep = '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH
    assert is_object(deep)
    assert not is_object('{"a":' + deep + "}")
    assert not is_object('{"a":' + "[" * 100_000)


def test_scan_reports_bare_control_characters():
    assert (7, Found.CONTROL) in events(['{"a":"\n"}'])
    assert events(['{"a":"\n"}'])[-1] == (9, Found.END)
