"""A scheduler for tests of launch and collect: random steps as values, made while others are in flight.

It knows tokens only when their step is booked, gives pages to one sequence at a time, and takes them back when the last step
that may write them has ended. Nothing in here depends on how a runner goes about a step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, StepResult, TokenLogprobs
from holdfast.request.step import Admitted, Step, StepItem
from holdfast.runner.runner import Runner

NUM_PROPOSALS = 3


@dataclass
class Wish:
    """One request."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    stops: frozenset[int] = frozenset()
    """Tokens that end it, which the host learns when it has read them."""
    guess: Callable[[list[int]], Sequence[int]] | None = None
    """Proposals for what follows these tokens."""
    is_pooled: bool = False
    """The hidden state of each row that it is chosen from goes to the host."""


@dataclass(eq=False)
class Person:
    """A request on its way."""

    number: int
    wish: Wish
    tokens: list[int]
    slot: int = -1
    num_computed: int = 0
    num_scheduled: int = 0
    num_coming: int = 0
    num_flights: int = 0
    is_over: bool = False
    tables: list[list[int]] = field(default_factory=list)
    num_reported: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: list[bytes] = field(default_factory=list)
    has_failed: bool = False
    num_accepted: int = 0
    num_surplus: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.wish.prompt) :]

    @property
    def left(self) -> int:
        """Tokens that may still be chosen, those that are coming taken off."""
        return len(self.wish.prompt) + self.wish.max_tokens - len(self.tokens) - self.num_coming


class Stepper:
    """Makes steps, and books their results in order."""

    def __init__(
        self, limits: Limits, groups: Sequence[CacheGroup], num_pages: int, wishes: Sequence[Wish], seed: int
    ) -> None:
        self.limits = limits
        self.people = [Person(number, wish, list(wish.prompt)) for number, wish in enumerate(wishes)]
        self._groups = tuple(groups)
        self._dice = Random(seed)
        self._waiting = deque(self.people)
        self._running: list[Person] = []
        self._free_slots = list(range(limits.max_num_seqs))
        self._released: list[int] = []
        self.free_pages = list(range(num_pages))
        self._number = 0
        self.flights: deque[tuple[Step, list[Person]]] = deque()

    @property
    def is_done(self) -> bool:
        return not (self._waiting or self._running or self.flights)

    def schedule(self) -> Step | None:
        """The next step, or None where no one can run now."""
        dice = self._dice
        if not self.flights and self._running and dice.random() < 0.05:
            self._preempt(dice.choice(self._running))
        admitted = []
        while self._waiting and self._free_slots and dice.random() < 0.6:
            person = self._admit(self._waiting.popleft())
            admitted.append(
                Admitted(
                    person.slot,
                    person.number,
                    tuple(person.tokens),
                    len(person.wish.prompt),
                    person.wish.params,
                    person.wish.seed,
                    person.wish.bad_words,
                    is_pooled=person.wish.is_pooled,
                )
            )
        items, people = [], []
        budget, rows = self.limits.max_num_batched_tokens, self.limits.sampled_rows
        for person in dice.sample(self._running, len(self._running)):
            item = self._item(person, budget, rows) if dice.random() < 0.9 else None
            if item is not None:
                items.append(item)
                people.append(person)
                budget -= item.num_new_tokens
                rows -= item.samples + len(item.proposals)
        if not (items or admitted or self._released):
            return None
        self._number += 1
        step = Step(self._number, tuple(self._released), tuple(admitted), tuple(items))
        self._released.clear()
        self.flights.append((step, people))
        return step

    def book(self, result: StepResult) -> None:
        """What the oldest step in flight gave."""
        step, people = self.flights.popleft()
        for item, person, own in zip(step.items, people, result.results, strict=True):
            person.num_flights -= 1
            assert bool(own.token_ids) == item.samples, f"{item} gave {own}"
            if person.is_over:
                person.num_surplus += len(own.token_ids)
                self._let_go(person)
                continue
            person.prompt_logprobs += own.prompt_logprobs
            num_accepted = max(len(own.token_ids) - 1, 0)
            person.num_accepted += num_accepted
            person.num_computed = item.start + item.num_new_tokens - len(item.proposals) + num_accepted
            if item.proposals:
                person.num_scheduled = person.num_computed
            person.num_coming -= item.samples
            for place, token_id in enumerate(own.token_ids):
                if person.is_over:
                    break
                person.has_failed = token_id == NO_TOKEN
                if not person.has_failed:
                    person.tokens.append(token_id)
                    person.logprobs += own.logprobs[place : place + 1]
                    person.pooled += [own.pooled] if own.pooled else []
                is_full = len(person.output) == person.wish.max_tokens
                person.is_over = person.has_failed or is_full or token_id in person.wish.stops
            if person.is_over:
                self._running.remove(person)
                self._let_go(person)

    def forget(self) -> None:
        """Everything in flight was cancelled."""
        for _, people in self.flights:
            for person in people:
                person.num_flights = person.num_coming = 0
                person.num_scheduled = person.num_computed
                if person.is_over:
                    self._let_go(person)
        self.flights.clear()

    def _item(self, person: Person, budget: int, rows: int) -> StepItem | None:
        start, end = person.num_scheduled, len(person.tokens) + person.num_coming
        guess = person.wish.guess
        if person.left <= 0 or budget < 1 or rows < 1 or (guess is not None and person.num_coming):
            return None
        count = end - start
        if count > 1:
            count = min(count, budget, self._dice.choice([1, 2, 5, 64, 200]))
        samples = start + count == end
        proposals: tuple[int, ...] = ()
        if guess is not None and samples and count == 1:
            most = min(person.left - 1, budget - 1, rows - 1, self.limits.max_model_len - end, NUM_PROPOSALS)
            proposals = tuple(guess(person.tokens))[: max(most, 0)]
        new_pages = self._grow(person, start + count + len(proposals))
        if new_pages is None:
            return None
        person.num_scheduled = start + count + len(proposals)
        person.num_coming += samples
        person.num_flights += 1
        return StepItem(person.slot, start, count + len(proposals), samples, new_pages, proposals)

    def _grow(self, person: Person, end: int) -> tuple[tuple[int, ...], ...] | None:
        """What a table has not reported yet; None where there are not enough pages."""
        missing = [group.pages_for(end) - len(table) for group, table in zip(self._groups, person.tables, strict=True)]
        if sum(max(0, own) for own in missing) > len(self.free_pages):
            return None
        for table, own in zip(person.tables, missing, strict=True):
            for _ in range(own):
                table.append(self.free_pages.pop(self._dice.randrange(len(self.free_pages))))
        new = tuple(tuple(table[reported:]) for table, reported in zip(person.tables, person.num_reported, strict=True))
        person.num_reported = list(map(len, person.tables))
        return new if any(new) else ()

    def _admit(self, person: Person) -> Person:
        person.slot = self._free_slots.pop(self._dice.randrange(len(self._free_slots)))
        person.tables = [[] for _ in self._groups]
        person.num_reported = [0] * len(self._groups)
        person.num_computed = person.num_scheduled = 0
        self._running.append(person)
        return person

    def _preempt(self, person: Person) -> None:
        self._running.remove(person)
        self._let_go(person)
        person.prompt_logprobs.clear()
        self._waiting.appendleft(person)

    def _let_go(self, person: Person) -> None:
        """Once no step in flight can write them, its pages and its slot are free."""
        if person.num_flights == 0:
            for table in person.tables:
                self.free_pages += table
            person.tables = []
            self._released.append(person.slot)
            self._free_slots.append(person.slot)


@dataclass
class Ran:
    """What came of it."""

    steps: list[Step]
    results: list[StepResult]
    people: list[Person]


def drive(
    runner: Runner,
    stepper: Stepper,
    run_ahead: int,
    before_launch: Callable[[], None] = lambda: None,
    cancels: Callable[[], bool] = lambda: False,
) -> Ran:
    """All requests to their ends, with up to `run_ahead` steps launched before the oldest is collected."""
    ran = Ran([], [], stepper.people)
    while not stepper.is_done:
        while len(stepper.flights) <= run_ahead:
            step = stepper.schedule()
            if step is None:
                break
            before_launch()
            runner.launch(step)
            ran.steps.append(step)
        if stepper.flights and cancels():
            assert runner.cancel(), "on a CPU every step can be dropped"
            stepper.forget()
        if stepper.flights:
            result = runner.collect()
            ran.results.append(result)
            stepper.book(result)
    return ran


def replay(runner: Runner, steps: Sequence[Step]) -> list[StepResult]:
    """Just the same steps, each waited for."""
    results = []
    for step in steps:
        runner.launch(step)
        results.append(runner.collect())
    return results


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 1},
    {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {9: 4.0, 11: -6.0}, "min_tokens": 4, "logprobs": 2},
    {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": (9, 10, 11, 12)},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(8, 30))},
    {"temperature": 0.7, "prompt_logprobs": 2, "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 0, "presence_penalty": 0.4},
    {"temperature": 0.0, "bad_words": True, "logprobs": 1},
    {"temperature": 1.0, "bad_words": True, "repetition_penalty": 1.2},
)
"""What is chosen at once, what waits for tokens, what is read back in blocks; `bad_words` stands for some."""


def make_wishes(seed: int, count: int, vocab_size: int, lengths: Sequence[int] = (1, 2, 5, 11, 23)) -> list[Wish]:
    """Requests of every kind; some end before their length is reached."""
    dice, wishes = Random(seed), []
    for number in range(count):
        params = dict(dice.choice(KINDS))
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.pop("bad_words", False):
            pairs = [(dice.randrange(8, vocab_size), dice.randrange(8, vocab_size)) for _ in range(200)]
            bad_words = ((8,), *pairs)
        wishes.append(
            Wish(
                [dice.randrange(8, vocab_size) for _ in range(dice.choice(lengths))],
                SamplingParams(**params),
                dice.choice([1, 2, 7, 15]),
                seed=dice.choice([0, number, 2**63 + number]),
                bad_words=bad_words,
                stops=dice.choice([frozenset(), frozenset(dice.sample(range(8, vocab_size), vocab_size // 5))]),
            )
        )
    return wishes


def with_guesses(wishes: Sequence[Wish], outputs: Sequence[list[int]], vocab_size: int, seed: int) -> list[Wish]:
    """Just the same requests, most of which propose what follows: rightly, wrongly, or rightly to begin with."""
    dice, guessing = Random(seed), []
    for wish, output in zip(wishes, outputs, strict=True):
        has_form = wish.params.structured_outputs is not None
        depends = wish.params.has_penalties or bool(wish.bad_words) or has_form or wish.is_pooled
        errs = dice.choice([0.0, 0.3, 1.0])
        may_guess = not depends and dice.random() < 0.7
        guess = _guess(wish.prompt + output, errs, vocab_size, dice.randrange(2**30)) if may_guess else None
        guessing.append(replace(wish, guess=guess))
    return guessing


def _guess(known: list[int], errs: float, vocab_size: int, seed: int) -> Callable[[list[int]], Sequence[int]]:
    def guess(tokens: list[int]) -> list[int]:
        dice = Random(seed + len(tokens))
        future = [*known[len(tokens) : len(tokens) + NUM_PROPOSALS], *(8,) * NUM_PROPOSALS]
        count = dice.randint(0, NUM_PROPOSALS)
        return [dice.randrange(8, vocab_size) if dice.random() < errs else token for token in future[:count]]

    return guess
