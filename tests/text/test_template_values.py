import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.text.template_meter import MAX_INTEGER_BITS, BudgetError, Meter, TemplateLimits
from holdfast.text.template_values import (
    MeteredIterator,
    MeteredLoop,
    admit,
    check_integer,
    settled,
    survey,
    written_bytes,
)

DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@pytest.fixture
def meter() -> Meter:
    return Meter(TemplateLimits(max_steps=10_000, max_made_bytes=100_000))


@given(value=DATA)
def test_the_estimate_is_never_below_what_printing_takes(value):
    import json

    meter = Meter(TemplateLimits())
    most = written_bytes(meter, value)
    assert len(str(value)) <= most
    assert len(repr(value).encode(errors="replace")) <= most + 16 + 12 * len(value if isinstance(value, str) else "")
    if not isinstance(value, str):
        assert len(json.dumps(value)) <= most


def test_values_held_twice_count_twice(meter):
    value: list = []
    for _ in range(40):
        value = [value, value]
    with pytest.raises(BudgetError, match="steps"):
        survey(meter, value)


def test_nesting_has_an_end(meter):
    value: list = []
    for _ in range(500):
        value = [value]
    with pytest.raises(BudgetError, match="nests"):
        survey(meter, value)


def test_a_survey_of_a_long_list_takes_no_memory_of_its_own():
    import tracemalloc

    value = [[0] * 1000] * 1000
    tracemalloc.start()
    with pytest.raises(BudgetError):
        survey(Meter(TemplateLimits(max_steps=50_000)), value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_functions_have_no_text(meter):
    for value in (len, [len], {"a": (len,)}, object(), MeteredIterator(meter, iter([]))):
        with pytest.raises(TypeError, match="has no text"):
            written_bytes(meter, value)


def test_loops_charge_each_round(meter):
    loop = MeteredLoop(meter, range(100), 5)
    assert len(loop) == 100
    before = meter.steps_left
    assert list(loop) == list(range(100))
    assert before - meter.steps_left == 500
    with pytest.raises(TypeError):
        len(MeteredLoop(meter, iter([1]), 1))
    with pytest.raises(BudgetError):
        list(MeteredLoop(meter, range(10**9), 1))


def test_lazy_values_charge_as_they_are_consumed(meter):
    lazy = admit(meter, (str(number) for number in range(10**9)))
    assert next(lazy) == "0"
    assert admit(meter, lazy) is lazy
    with pytest.raises(BudgetError):
        settled(meter, lazy)
    assert settled(meter, [1, 2]) == [1, 2]


def test_what_is_made_is_charged(meter):
    for value in ("x" * 90_000, [0] * 12_000, tuple(range(12_000)), dict.fromkeys(range(1500))):
        fresh = Meter(TemplateLimits(max_steps=10_000, max_made_bytes=100_000))
        assert admit(fresh, value) is value
        with pytest.raises(BudgetError):
            admit(fresh, value)


def test_integers_are_bounded(meter):
    check_integer(MAX_INTEGER_BITS)
    with pytest.raises(BudgetError, match="bits"):
        admit(meter, 2**MAX_INTEGER_BITS)
