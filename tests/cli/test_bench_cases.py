"""What is measured: cases, rates, turns, and the comparison of tokens."""

import random

import pytest

from holdfast.cli.bench_cases import (
    Case,
    Result,
    Timing,
    check_agreement,
    latency_cases,
    race,
    rate,
    throughput_case,
)
from holdfast.errors import HoldfastError

IDS = range(100)


class Fake:
    """An engine that says its name's length, again and again, and notes when it ran."""

    def __init__(self, name: str, log: list[str], wrong_at: int | None = None) -> None:
        self.name, self.log, self.wrong_at = name, log, wrong_at

    def run(self, case: Case) -> Timing:
        self.log.append(f"{self.name} {case.measure}")
        tokens = [[7] * num_new for num_new in case.num_new]
        if self.wrong_at is not None:
            tokens[-1][self.wrong_at] = 8
        return Timing(tuple(map(tuple, tokens)), 0.5, 2.5)


def test_cases_of_latency() -> None:
    cases = latency_cases([16, 32], [1, 4], 8, 5, random.Random(0), IDS)
    assert [case.measure for case in cases] == [
        "prefill, 16 tokens",
        "prefill, 32 tokens",
        "decode, batch 1",
        "decode, batch 4",
    ]
    assert [[len(prompt) for prompt in case.prompts] for case in cases] == [[16], [32], [8], [8] * 4]
    assert [case.longest for case in cases] == [17, 33, 13, 13]
    assert len({prompt for case in cases for prompt in case.prompts}) == 7, "no prompt is another's prefix"


def test_cases_follow_from_the_seed() -> None:
    assert latency_cases([16], [2], 8, 5, random.Random(1), IDS) == latency_cases(
        [16], [2], 8, 5, random.Random(1), IDS
    )
    assert latency_cases([16], [2], 8, 5, random.Random(1), IDS) != latency_cases(
        [16], [2], 8, 5, random.Random(2), IDS
    )


def test_a_case_of_throughput_has_lengths_in_their_ranges() -> None:
    case = throughput_case(200, (3, 9), (1, 4), random.Random(0), IDS)
    assert {len(prompt) for prompt in case.prompts} == set(range(3, 10))
    assert set(case.num_new) == {1, 2, 3, 4}


@pytest.mark.parametrize(("kind", "expected"), [("prefill", 60.0), ("decode", 9.0), ("throughput", 8.0)])
def test_rates(kind, expected: float) -> None:
    case = Case("", kind, ((1,) * 10, (1,) * 20), (10, 10))
    assert rate(case, Timing(((), ()), 0.5, 2.5)) == expected


def test_engines_take_turns() -> None:
    log: list[str] = []
    cases = latency_cases([4], [1], 4, 3, random.Random(0), IDS)
    results = race(cases, [Fake("ours", log), Fake("theirs", log)], 2, lambda words: None)
    assert log == [f"{name} {case.measure}" for case in cases for _ in range(2) for name in ("ours", "theirs")]
    assert [len(result.rates["theirs"]) for result in results] == [2, 2]


def test_every_engine_warms_up_on_every_case_before_any_is_timed() -> None:
    log: list[str] = []
    told: list[str] = []
    cases = latency_cases([4], [1], 4, 3, random.Random(0), IDS)
    check_agreement(cases, [Fake("ours", log), Fake("theirs", log)], told.append)
    assert log == [f"{name} {case.measure}" for case in cases for name in ("ours", "theirs")]
    assert len(told) == 4


@pytest.mark.parametrize("wrong_at", [0, 4])
def test_other_tokens_are_no_comparison(wrong_at: int) -> None:
    cases = latency_cases([], [3], 4, 5, random.Random(0), IDS)
    with pytest.raises(HoldfastError, match=rf"prompt 2, from token {wrong_at} on \(ours \[7.*theirs \[8"):
        check_agreement(cases, [Fake("ours", []), Fake("theirs", [], wrong_at)], lambda words: None)


def test_one_engine_alone_has_nothing_to_agree_with() -> None:
    check_agreement(latency_cases([4], [], 4, 5, random.Random(0), IDS), [Fake("ours", [])], lambda words: None)


def test_medians_and_bests() -> None:
    result = Result(throughput_case(1, (1, 1), (1, 1), random.Random(0), IDS), {"ours": [1.0, 9.0, 3.0]})
    assert (result.median("ours"), result.best("ours")) == (3.0, 9.0)
