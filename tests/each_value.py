"""Which cases of a matrix a quick run takes: so few that each value of each parameter comes, in as many pairs as that gives.

A test marked each_value has all of its cases in `make test-slow` and where there is CUDA. Which of them `make test` takes
follows from the values alone, so every run takes the same.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations

import pytest

Case = Mapping[str, Hashable]
"""A value for each name."""


def choose(cases: Sequence[Case]) -> list[int]:
    """Places of those that have every value: always the one with most new values, of these that with most new pairs."""
    values = [frozenset(case.items()) for case in cases]
    pairs = [frozenset(combinations(sorted(case.items()), 2)) for case in cases]
    missing, paired, chosen = frozenset[tuple[str, Hashable]]().union(*values), set[object](), list[int]()
    while missing:
        place = max(range(len(cases)), key=lambda i: (len(values[i] & missing), len(pairs[i] - paired), -i))
        chosen.append(place)
        missing -= values[place]
        paired |= pairs[place]
    return sorted(chosen)


def mark_others_slow(items: Iterable[pytest.Item]) -> None:
    """Of every test that is marked each_value, those cases slow that are not chosen among its quick ones."""
    tests: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "each_value" in marks and not marks & {"slow", "gpu"}:
            tests[item.parent, item.originalname].append(item)
    for cases in tests.values():
        # Cases of one test share the objects that they were given.
        chosen = choose([{name: id(value) for name, value in item.callspec.params.items()} for item in cases])
        for place, item in enumerate(cases):
            if place not in chosen:
                item.add_marker("slow")
