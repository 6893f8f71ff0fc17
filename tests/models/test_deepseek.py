"""DeepSeek V2 and V3 against transformers: whole, in chunks, in company, prefixes, preemption; and what a wrong reading would change."""

from itertools import count
from typing import Any

import pytest

from models.tiny_latents import LATENT_MODELS, alone, judge, make_drive, make_request, tiny
from runner.drive import Drive, Request

CASES = [case for case in LATENT_MODELS if case.startswith("v")]
V3 = "v3 like R1"


@pytest.mark.parametrize("case", CASES)
def test_alone_and_whole(case):
    for length in (1, 33):
        alone(case, length, 8)


@pytest.mark.parametrize("case", CASES)
def test_in_company_of_other_lengths_and_in_chunks(case):
    theirs, ours = tiny(case)
    requests = [make_request(length, 12, 3 * index) for index, length in enumerate((1, 2, 17, 33, 61))]
    drive = make_drive(ours, max_rows=11, page_tokens=8)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


def test_every_chunk_size():
    answer = alone(V3, 22, 4)
    for max_rows in range(1, 23):
        drive = make_drive(tiny(V3)[1], max_rows)
        request = make_request(22, 4)
        drive.run([request])
        answer.check(drive, request)
        assert len(drive.logits(request)) == 25, f"{max_rows=}"


def test_only_the_rows_that_are_read_are_finished():
    answer = alone(V3, 22, 4)
    drive = make_drive(tiny(V3)[1], 9)
    request = Request(list(answer.prompt), 4)
    drive.run([request])
    answer.check(drive, request)
    assert len(drive.logits(request)) == 4


def test_preempted_at_every_position():
    answer = alone(V3, 9, 12)
    for place in range(1, 14):
        drive = make_drive(tiny(V3)[1], 4)
        request = Request(list(answer.prompt), 12)
        preempt_after(drive, place)
        drive.run([request])
        drive.scheduler.check()
        assert request.sequence is not None
        assert request.sequence.num_preemptions == 1
        answer.check(drive, request)


def preempt_after(drive: Drive, num_steps: int) -> None:
    """Take a sequence's pages after so many steps, as a neighbour would."""
    complete, steps = drive.scheduler.complete, count(1)

    def then_preempt(step: Any, token_ids: Any) -> None:
        complete(step, token_ids)
        if next(steps) == num_steps:
            drive.scheduler._preempt_youngest()

    drive.scheduler.complete = then_preempt


def test_preempted_by_neighbours_where_pages_are_few():
    answers = [alone(V3, length, 20) for length in (30, 31, 29)]
    drive = make_drive(tiny(V3)[1], 16, num_pages=28)
    requests = [Request(list(answer.prompt), 20) for answer in answers]
    drive.run(requests)
    assert drive.scheduler.num_preemptions > 0
    for answer, request in zip(answers, requests, strict=True):
        answer.check(drive, request)


def test_a_prefix_that_is_hit_and_one_that_is_missed():
    first, other = alone(V3, 40, 6), alone(V3, 37, 6)
    drive = make_drive(tiny(V3)[1], 16)
    num_cached = []
    for answer in (first, first, other, first):
        request = Request(list(answer.prompt), 6)
        drive.run([request])
        drive.scheduler.check()
        answer.check(drive, request)
        assert request.sequence is not None
        num_cached.append(request.sequence.num_cached_tokens)
    assert num_cached == [0, 36, 0, 36]
