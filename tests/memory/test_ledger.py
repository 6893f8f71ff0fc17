"""The ledger: every byte under one owner, groups that add up, two ledgers that never meet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.memory.ledger import Ledger

paths = st.lists(st.sampled_from(["weights", "kv", "batch", "layers.0", "qkv"]), min_size=1, max_size=3).map("/".join)


@given(st.dictionaries(paths, st.integers(0, 2**40), max_size=12), st.data())
def test_groups_add_up_to_the_total_through_records_and_releases(entries: dict[str, int], data: st.DataObject) -> None:
    ledger = Ledger()
    for owner, num_bytes in entries.items():
        ledger.record(owner, num_bytes, f"for {owner}")
    for owner in data.draw(st.sets(st.sampled_from(sorted(entries)))) if entries else ():
        ledger.release(owner)
        del entries[owner]
    assert {entry.owner: entry.num_bytes for entry in ledger} == entries
    assert ledger.total_bytes == sum(entries.values())
    assert sum(ledger.group_bytes().values()) == ledger.total_bytes
    assert list(ledger.group_bytes()) == list(ledger.group_reasons())
    assert set(ledger.group_bytes()) == {owner.split("/")[0] for owner in entries}


def test_groups_keep_the_order_and_the_first_reason() -> None:
    ledger = Ledger()
    ledger.record("weights/embed", 10, "float32")
    ledger.record("kv/layers.0", 5, "pages")
    ledger.record("weights/layers.0", 20, "float32 too")
    assert list(ledger.group_bytes().items()) == [("weights", 30), ("kv", 5)]
    assert ledger.group_reasons() == {"weights": "float32", "kv": "pages"}


def test_ledger_refuses_owner_entered_twice() -> None:
    ledger = Ledger()
    ledger.record("weights/embed", 10, "x")
    with pytest.raises(AssertionError, match="weights/embed"):
        ledger.record("weights/embed", 10, "x")
    ledger.release("weights/embed")
    ledger.record("weights/embed", 12, "x")
    assert ledger.total_bytes == 12


few_paths = st.sampled_from(["weights/a", "weights/b", "kv", "kv/x"])
"""So few that owners come and go several times."""


@given(st.lists(st.tuples(few_paths, st.integers(0, 1000)), max_size=30))
def test_peaks_are_the_most_that_was_ever_held(steps: list[tuple[str, int]]) -> None:
    """An owner that is in goes out, one that is out comes in; a plain history says what the peaks are."""
    ledger, history = Ledger(), [dict[str, int]()]
    for owner, num_bytes in steps:
        now = dict(history[-1])
        if now.pop(owner, None) is None:
            now[owner] = num_bytes
            ledger.record(owner, num_bytes, "x")
        else:
            ledger.release(owner)
        history.append(now)
    owners = {owner for now in history for owner in now}
    assert ledger.peaks() == {owner: max(now.get(owner, 0) for now in history) for owner in owners}
    assert ledger.peak_bytes == max(sum(now.values()) for now in history)
    assert ledger.total_bytes == sum(history[-1].values())
    assert ledger.group_peaks() == {
        group: max(sum(size for owner, size in now.items() if owner.split("/")[0] == group) for now in history)
        for group in {owner.split("/")[0] for owner in owners}
    }
    assert {entry.owner: entry.peak_bytes for entry in ledger} == {
        owner: peak for owner, peak in ledger.peaks().items() if owner in history[-1]
    }


def test_ledger_keeps_peak_of_released_owner() -> None:
    ledger = Ledger()
    ledger.record("staging/rows", 64, "while loading")
    ledger.release("staging/rows")
    ledger.record("weights/embed", 10, "x")
    assert ledger.group_bytes() == {"weights": 10}
    assert ledger.group_peaks() == {"staging": 64, "weights": 10}
    assert (ledger.total_bytes, ledger.peak_bytes) == (10, 64)
    with pytest.raises(AssertionError, match="staging/rows"):
        ledger.release("staging/rows")


def test_owner_that_comes_again_with_less_keeps_its_peak() -> None:
    ledger = Ledger()
    for num_bytes in (64, 10, 20):
        ledger.record("staging/rows", num_bytes, "while loading")
        assert [entry.peak_bytes for entry in ledger] == [64]
        ledger.release("staging/rows")
    assert (ledger.peaks(), ledger.group_peaks(), ledger.peak_bytes) == ({"staging/rows": 64}, {"staging": 64}, 64)
    assert (ledger.total_bytes, ledger.group_bytes()) == (0, {})


def test_ledger_refuses_negative_bytes() -> None:
    with pytest.raises(AssertionError, match="-1"):
        Ledger().record("weights", -1, "x")


def test_ledger_instances_are_independent() -> None:
    first, second = Ledger(), Ledger()
    first.record("weights", 10, "x")
    assert second.total_bytes == 0
    assert list(second) == []
