"""A token does not depend on its neighbours: every request of a schedule gives the logits, to the bit, that it gives alone.

A schedule is a company of up to 33 requests, their arrivals, limits, pages and cache. There are 344 of them and 24 in torch,
all among the slow tests, and of every kind some at once.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from holdfast.config import Limits
from kernels.exactness import num_threads, require_native, same_bits
from loading.tiny_models import VOCAB, save_tiny
from runner.drive import Drive, LoadedModel, Request, Rig, load_model

MODELS = pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
MAX_MODEL_LEN = 96
POOL_SIZE = 48
LONGEST_PROMPT = 41
NEEDLE = 0
"""Number of the request that is in every schedule; it has the longest prompt."""
TALKERS = range(POOL_SIZE - 8, POOL_SIZE)
"""Requests with short prompts and long outputs, which take pages from those that came after them."""
LEAST_GAP = 1e-4
"""Between the two most likely tokens of every step, so that torch, which is near but not the same, chooses alike."""
NAN_TOKEN = VOCAB - 1


def seeds(number: int) -> pytest.MarkDecorator:
    """So many, of which the first is taken at once."""
    slow = (pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, number))
    return pytest.mark.parametrize("seed", [0, *slow])


@cache
def tiny(family: str) -> LoadedModel:
    with TemporaryDirectory() as folder:
        save_tiny(family, folder, num_hidden_layers=2)
        return load_model(Path(folder))


@dataclass(frozen=True)
class Alone:
    """A request as it is by itself: its tokens and the logits behind each."""

    prompt: tuple[int, ...]
    max_tokens: int
    output: tuple[int, ...]
    logits: dict[int, torch.Tensor]


@cache
def pool(family: str) -> tuple[Alone, ...]:
    """Requests whose prompts begin alike in groups of eight, each computed alone, in one chunk, on fresh pages."""
    require_native()
    dice = random.Random(1)
    stems = [[dice.randrange(3, NAN_TOKEN) for _ in range(30)] for _ in range(POOL_SIZE // 8)]
    found: list[Alone] = []
    while len(found) < POOL_SIZE:
        number = len(found)
        stem = stems[number // 8][
            : 30 if number == NEEDLE else 2 if number in TALKERS else dice.choice([5, 16, 24, 30])
        ]
        length = dice.randint(len(stem) + 1, 9 if number in TALKERS else LONGEST_PROMPT)
        prompt = stem + [dice.randrange(3, NAN_TOKEN) for _ in range(length - len(stem))]
        num_output = 30 if number in TALKERS else 12 if number == NEEDLE else dice.randint(1, 12)
        if number == NEEDLE:
            prompt += range(10, 10 + LONGEST_PROMPT - length)
        request = Request(prompt, num_output)
        drive = make_drive(tiny(family), Schedule(enable_prefix_caching=False))
        drive.run([request])
        logits = drive.logits(request)
        gaps = [float(row.topk(2).values.diff().abs()) for row in logits.values()]
        if min(gaps) > LEAST_GAP:
            found.append(Alone(tuple(prompt), request.max_tokens, tuple(request.output), logits))
    return tuple(found)


@dataclass(frozen=True)
class Schedule:
    """Who comes when, and under which limits. Rounds follow each other on one prefix cache."""

    rounds: tuple[tuple[tuple[int, int], ...], ...] = (((NEEDLE, 0),),)
    """(number of the request, steps before it comes) of everybody."""
    max_num_seqs: int = 33
    max_num_batched_tokens: int = MAX_MODEL_LEN
    page_tokens: int = 16
    num_pages: int = 33 * 6
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class Outcome:
    """What happened on the way."""

    num_needle_preemptions: int
    num_needle_cached_tokens: int
    num_requests: int


def make_drive(model: LoadedModel, schedule: Schedule, backend="native_paged") -> Drive:
    limits = Limits(schedule.max_num_seqs, schedule.max_num_batched_tokens, MAX_MODEL_LEN, schedule.page_tokens)
    rig = Rig(model, backend, limits, schedule.num_pages)
    return Drive(rig, schedule.num_pages, schedule.enable_prefix_caching)


def play(family: str, schedule: Schedule, backend="native_paged") -> Outcome:
    """Run a schedule and compare everybody in it with how they are alone."""
    drive = make_drive(tiny(family), schedule, backend)
    num_requests = 0
    for entries in schedule.rounds:
        pairs = [
            (pool(family)[number], Request(list(pool(family)[number].prompt), pool(family)[number].max_tokens, arrival))
            for number, arrival in entries
        ]
        drive.run([request for _, request in pairs])
        drive.scheduler.check()
        for alone, request in pairs:
            assert tuple(request.output) == alone.output, f"{schedule}"
            logits = drive.logits(request)
            assert logits.keys() == alone.logits.keys(), f"{schedule}"
            if backend == "native_paged":
                assert all(same_bits(logits[i], alone.logits[i]) for i in logits), f"{schedule}"
            num_requests += 1
    needles = [request for number, request in zip(entries, pairs, strict=True) if number[0] == NEEDLE]
    needle = needles[-1][1].sequence
    return Outcome(needle.num_preemptions, needle.num_cached_tokens, num_requests)


def company(dice: random.Random, num_others: int, latest: int) -> tuple[tuple[int, int], ...]:
    """The needle among others, all at some moment up to `latest`."""
    others = dice.sample(range(1, POOL_SIZE), num_others)
    entries = [(number, dice.randint(0, latest)) for number in (NEEDLE, *others)]
    dice.shuffle(entries)
    return tuple(entries)


EVERY_CHUNK = tuple(range(1, LONGEST_PROMPT + 1))
SOME_CHUNKS = (1, 7, 15, 16, 17, 41)
"""On both sides of a page and of the whole prompt, and such that divide neither."""


@MODELS
@pytest.mark.parametrize(
    "chunks", [SOME_CHUNKS, pytest.param(EVERY_CHUNK, marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_logits_do_not_depend_on_chunk_size(family, chunks):
    """Two schedules each: the needle's prompt in chunks of that size, alone first, then with others in the same steps."""
    for chunk in chunks:
        dice = random.Random(chunk)
        schedule = Schedule(max_num_batched_tokens=chunk, page_tokens=dice.choice([1, 4, 16]))
        play(family, schedule)
        play(family, replace(schedule, rounds=(company(dice, 3, latest=20),)))


@MODELS
@seeds(4)
def test_logits_do_not_depend_on_company(family, seed):
    """One schedule has 32 others at once."""
    dice = random.Random(1000 + seed)
    outcomes = []
    for num_others in (32, *(dice.randint(1, 31) for _ in range(4 if seed else 2))):
        schedule = Schedule(
            (company(dice, num_others, latest=dice.choice([0, 5, 40])),),
            max_num_seqs=dice.choice([2, 7, 33]),
            max_num_batched_tokens=dice.choice([33, 64, 300]),
            page_tokens=dice.choice([1, 4, 16]),
            num_pages=33 * MAX_MODEL_LEN,
        )
        with num_threads(dice.choice([1, 2])):
            outcomes.append(play(family, schedule))
    assert max(outcome.num_requests for outcome in outcomes) == 33


@MODELS
@seeds(2)
def test_logits_do_not_depend_on_prefix_hit(family, seed):
    """Ten schedules: the needle after itself, after others that begin alike, and beside them."""
    dice = random.Random(2000 + seed)
    hits = 0
    for index in range(10):
        relatives = tuple((number, 0) for number in dice.sample(range(1, 8), dice.randint(1, 4)))
        first = ((NEEDLE, 0),) if index % 2 else relatives
        schedule = Schedule(
            (first, company(dice, dice.randint(0, 8), latest=10)),
            max_num_batched_tokens=dice.choice([5, 16, 64]),
            page_tokens=dice.choice([1, 4, 16]),
            num_pages=20 * MAX_MODEL_LEN,
        )
        outcome = play(family, schedule)
        hits += outcome.num_needle_cached_tokens > 0
    assert hits >= 9, f"the prefix cache was used in {hits} schedules only"


@MODELS
@seeds(3)
def test_logits_do_not_depend_on_preemption(family, seed):
    """Ten schedules with so few pages that the needle, which comes last, is thrown out on the way."""
    dice = random.Random(3000 + seed)
    preempted = 0
    for _ in range(10):
        page_tokens = dice.choice([1, 2, 4])
        numbers = (*dice.sample(TALKERS, dice.randint(2, 5)), NEEDLE)
        schedule = Schedule(
            (tuple((number, 0) for number in numbers),),
            max_num_batched_tokens=dice.choice([16, 64, 300]),
            page_tokens=page_tokens,
            num_pages=scarce_pages(family, numbers, page_tokens),
            enable_prefix_caching=dice.random() < 0.5,
        )
        preempted += play(family, schedule).num_needle_preemptions > 0
    assert preempted >= 4, f"the needle was thrown out in {preempted} schedules only"


@MODELS
@seeds(2)
def test_logits_do_not_depend_on_everything_at_once(family, seed):
    """Ten schedules of several rounds in which chunks, company, hits and preemptions all happen."""
    dice = random.Random(4000 + seed)
    outcomes = [play(family, chaos(family, dice)) for _ in range(10)]
    assert any(outcome.num_needle_preemptions for outcome in outcomes)
    assert any(outcome.num_needle_cached_tokens for outcome in outcomes)


def scarce_pages(family: str, numbers: Iterable[int], page_tokens: int) -> int:
    """Just enough for all prompts and a page more for each, so that the outputs do not fit."""
    prompts = [len(pool(family)[number].prompt) for number in numbers]
    longest = -(-(LONGEST_PROMPT + 12) // page_tokens)
    return max(longest, sum(-(-prompt // page_tokens) + 1 for prompt in prompts))


def chaos(family: str, dice: random.Random) -> Schedule:
    rounds = [company(dice, dice.randint(2, 12), latest=dice.choice([0, 10])) for _ in range(dice.randint(0, 2))]
    others = dice.sample(range(1, TALKERS[0]), dice.randint(0, 8))
    last = [(number, 0) for number in dice.sample(TALKERS, 3)] + [(NEEDLE, 1)] + [(number, 2) for number in others]
    page_tokens = dice.choice([1, 2, 4, 8])
    return Schedule(
        (*rounds, tuple(last)),
        max_num_seqs=dice.choice([4, 8, 33]),
        max_num_batched_tokens=dice.choice([2, 7, 19, 64]),
        page_tokens=page_tokens,
        num_pages=scarce_pages(family, [number for number, _ in last[: dice.randint(3, 6)]], page_tokens),
    )


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
@MODELS
def test_tokens_in_torch_do_not_depend_on_company(family, is_whole, monkeypatch):
    """Twelve schedules, or six, in torch, whose sums depend on the company in their last bits, but not so far as to change a token."""
    pool(family)
    monkeypatch.setattr("holdfast.kernels.native_library.native_library", lambda: None)
    dice = random.Random(5000)
    for chunk in (1, 3, 16, 40) if is_whole else (3, 16):
        play(family, Schedule(max_num_batched_tokens=chunk), "torch_paged")
    for _ in range(8 if is_whole else 4):
        play(family, chaos(family, dice), "torch_paged")


@MODELS
@pytest.mark.parametrize("chunk", [24, 64])
def test_nonfinite_request_leaves_its_prefix_sharers_unchanged(family, chunk):
    """A token whose embedding is NaN, in the middle of a page and a chunk; others go on on the pages before it."""
    model = tiny(family)
    embedding = model.weights["embed.weight"].clone()
    embedding[NAN_TOKEN] = float("nan")
    hurt = LoadedModel(model.spec, {**model.weights, "embed.weight": embedding})
    alone = pool(family)[NEEDLE]
    drive = make_drive(hurt, Schedule(max_num_batched_tokens=chunk, page_tokens=4))
    prefix = list(alone.prompt[:21])
    failing = Request([*prefix, NAN_TOKEN, *range(10, 20)], 4)
    beside = Request(list(alone.prompt), alone.max_tokens)
    drive.run([failing, beside])
    after = Request(list(alone.prompt), alone.max_tokens)
    drive.run([after])
    assert failing.output == []
    assert after.sequence.num_cached_tokens >= 20
    for request in (beside, after):
        assert tuple(request.output) == alone.output
        assert all(same_bits(row, alone.logits[i]) for i, row in drive.logits(request).items())
