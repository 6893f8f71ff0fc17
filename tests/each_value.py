"""Which cases of a matrix a quick run takes: so few that each value of each parameter comes, or each pair of values.

A test marked each_value or each_pair has all of its cases in `make test-slow` and where there is CUDA. Which of them
`make test` takes follows from the values alone, so every run takes the same.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import combinations
from typing import Any

import pytest

STRENGTHS = {"each_value": 1, "each_pair": 2}
Case = Mapping[Any, Hashable]
"""A value for each parameter."""


def choose(cases: Sequence[Case], strength: int = 1) -> list[int]:
    """Places of those that have every value, or every pair of values for a strength of 2, of all cases.

    Always the one with most of what is missing yet; of several such, that with most new pairs, then with rarer values.
    """
    kinds = [frozenset(combinations(case.items(), min(strength, len(case)))) for case in cases]
    pairs = [frozenset(combinations(case.items(), 2)) for case in cases]
    missing, paired, chosen = frozenset[object]().union(*kinds), set[object](), list[int]()
    taken: Counter[object] = Counter()

    def cost(place: int) -> tuple[int, ...]:
        num_before = sum(taken[value] for value in cases[place].items())
        return -len(kinds[place] & missing), -len(pairs[place] - paired), num_before, place

    # A cost only grows, so the least one that is still true is the least of all.
    costs = [cost(place) for place in range(len(cases))]
    heapify(costs)
    while missing:
        place = costs[0][-1]
        if (now := cost(place)) != costs[0]:
            heapreplace(costs, now)
            continue
        chosen.append(place)
        taken.update(cases[place].items())
        missing -= kinds[place]
        paired |= pairs[place]
    return sorted(chosen)


def case_of(item: pytest.Function) -> Case:
    """What a test was given. Names that are given together are one parameter; cases share the objects, so ids tell them."""
    given = {name: id(value) for name, value in item.callspec.params.items()}
    found: dict[Any, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        together = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
        found[together] = tuple(given.pop(name) for name in together)
    return found | given


def mark_others_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of each_value and each_pair tests slow, except a sample that covers every value or pair."""
    tests: dict[tuple[object, str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and marks & STRENGTHS.keys() and not marks & {"slow", "gpu"}:
            strength = max(STRENGTHS[name] for name in marks & STRENGTHS.keys())
            tests[item.parent, item.originalname, strength].append(item)
    for (_, _, strength), cases in tests.items():
        chosen = choose([case_of(item) for item in cases], strength)
        for place, item in enumerate(cases):
            if place not in chosen:
                item.add_marker("slow")
