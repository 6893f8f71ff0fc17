"""Step: what the scheduler tells the runner, as a value that can travel; no torch.

    Step    released   slots whose sequence has ended or was preempted; they are free before anything below
            admitted   sequences that take a slot, once, with all that will ever be told of them but their pages
            items      who runs: slot, positions, pages that are new since its last step

The runner keeps the rest: tokens (it chooses them), page tables, sampling. So a step of 256 decoding sequences is a few
KiB. A preempted sequence is released, and admitted again with the tokens it has by then.

Steps are numbered from 1 without a gap. One that is repeated, late, or names what the receiver does not know is refused
there (runner/slots.py) before anything has changed.
"""

import json
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import partial
from itertools import compress, repeat
from operator import ge
from typing import NamedTuple

from holdfast.errors import MessageError, RequestError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.wire import Reader, Writer, open_frame, refuse

STEP_KIND = 1
MAX_TOKEN_ID = 2**31 - 1
MAX_GROUPS = 64
_HOLE = -1
"""In place of a page (HOLE of cache/groups.py): counted from there no page is below 0."""
_WORD = 2**63


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that takes a slot."""

    slot: int
    sequence_id: int
    token_ids: tuple[int, ...]
    """The prompt, and what came out before a preemption."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    num_stored: int = 0
    """Its first tokens that are on pages already although steps run the last of them: nothing is written for these. 0 where its
    first step begins behind all that is stored. Of a fork, the tokens that it shares."""
    fork_of: int = -1
    """The slot of the sequence that it forks from, or -1. That sequence ends the same prompt in this step. The fork has no row:
    it samples from the other's last row, and gets copies of its pages after `num_stored`, and of its states."""
    is_pooled: bool = False
    """The final hidden state of its prompt's last row comes back with its first token."""


class StepItem(NamedTuple):
    """Positions [start, start + num_new_tokens) of the sequence in a slot. One for every token of a step: therefore a tuple."""

    slot: int
    start: int
    num_new_tokens: int
    samples: bool
    """The step reaches its last token, known or coming, so that the next one is chosen."""
    pages: tuple[tuple[int, ...], ...] = ()
    """By cache group, what is new at the end of each page table; () where no group has anything new. HOLE stands for a place
    behind a window."""
    proposals: tuple[int, ...] = ()
    """What is guessed to follow the last token: the last of the new tokens."""


@dataclass(frozen=True, slots=True)
class Step:
    """One run of the model."""

    number: int
    released: tuple[int, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    items: tuple[StepItem, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the step; forks have none."""
        return sum(item.num_new_tokens for item in self.items) - self.num_forks

    @property
    def num_forks(self) -> int:
        return sum(one.fork_of >= 0 for one in self.admitted) if self.admitted else 0


NO_STEP = Step(0)
"""In place of the value where a live step is made by hand."""


def encode_step(step: Step) -> bytes:
    """A step as one message."""
    writer = Writer()
    write_step(writer, step)
    return writer.frame(STEP_KIND)


def write_step(writer: Writer, step: Step) -> None:
    """The same as part of another message."""
    writer.int(step.number)
    writer.ints(step_numbers(step))
    write_admitted(writer, step)


def step_numbers(step: Step) -> list[int]:
    """All of a step but its number and what is admitted."""
    items = step.items
    num_items = len(items)
    # Column by column, which takes a third of the time: a step goes to other ranks while they wait for it.
    slots, starts, counts, samples, all_pages, all_proposals = zip(*items, strict=True) if items else ((),) * 6
    # One token each, and the next one chosen, as in nearly every step: then counts and samples are not told.
    is_decode = counts.count(1) == num_items and samples.count(True) == num_items
    # Few sequences bring pages or proposals in a step, so these are listed by the place of their item.
    grown = list(compress(items, all_pages)) if all_pages.count(()) < num_items else []
    guessed = list(compress(items, all_proposals)) if all_proposals.count(()) < num_items else []
    head = len(step.admitted), 2 * num_items + is_decode, len(grown), len(guessed), len(step.released)
    numbers = [*head, *step.released, *slots, *starts]
    if not is_decode:
        numbers += (*counts, *samples)
    if guessed:
        numbers += compress(range(num_items), all_proposals)
        numbers += [len(item.proposals) for item in guessed]
        numbers += [token_id for item in guessed for token_id in item.proposals]
    if grown:
        numbers += compress(range(num_items), all_pages)
        numbers += [len(item.pages) for item in grown]
        numbers += [len(pages) for item in grown for pages in item.pages]
        numbers += [page - _HOLE for item in grown for pages in item.pages for page in pages]
    return numbers


def decode_step(frame: bytes) -> Step:
    """The same step, or MessageError."""
    kind, reader = open_frame(frame)
    if kind != STEP_KIND:
        refuse(f"it is of kind {kind}, and a step is of kind {STEP_KIND}")
    step = read_step(reader)
    reader.end()
    return step


def read_step(reader: Reader) -> Step:
    """What `write_step` wrote."""
    number = reader.int(1)
    numbers = _Numbers(reader.ints(0, MAX_TOKEN_ID))
    num_admitted, num_items, num_grown, num_guessed, num_released = numbers.take(5)
    num_items, is_decode = divmod(num_items, 2)
    released = numbers.take(num_released)
    slots, starts = numbers.take(num_items), numbers.take(num_items)
    counts = repeat(1, num_items) if is_decode else numbers.take(num_items)
    samples = repeat(True, num_items) if is_decode else _as_bools(slots, numbers.take(num_items))
    proposals = _read_proposals(numbers, num_guessed, num_items) if num_guessed else repeat((), num_items)
    pages = _read_pages(numbers, num_grown, num_items) if num_grown else repeat((), num_items)
    items = tuple(map(_new_item, zip(slots, starts, counts, samples, pages, proposals, strict=True)))
    numbers.end()
    admitted = tuple(_read_admitted(reader) for _ in range(num_admitted))
    return Step(number, released, admitted, items)


def _read_proposals(numbers: "_Numbers", num_guessed: int, num_items: int) -> list[tuple[int, ...]]:
    """Of each item."""
    proposals: list[tuple[int, ...]] = [()] * num_items
    for place, count in zip(numbers.places(num_guessed, num_items), numbers.take(num_guessed), strict=True):
        proposals[place] = numbers.take(count)
    return proposals


def _read_pages(numbers: "_Numbers", num_grown: int, num_items: int) -> list[tuple[tuple[int, ...], ...]]:
    """Of each item, by cache group."""
    pages: list[tuple[tuple[int, ...], ...]] = [()] * num_items
    places, counts = numbers.places(num_grown, num_items), numbers.take(num_grown)
    if not 1 <= min(counts) <= max(counts) <= MAX_GROUPS:
        refuse(f"its pages are of {min(counts)} to {max(counts)} cache groups where 1 to {MAX_GROUPS} are possible")
    lengths = _Numbers(numbers.take(sum(counts)))
    for place, count in zip(places, counts, strict=True):
        pages[place] = tuple(tuple([page + _HOLE for page in numbers.take(length)]) for length in lengths.take(count))
    return pages


_new_item = partial(tuple.__new__, StepItem)
"""An item of a tuple of its six values: its constructor takes longer, and there is one for every token of a step."""


class _Numbers:
    """A list of numbers, taken apart from the left; never past its end."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._numbers = numbers
        self._place = 0

    def take(self, count: int) -> tuple[int, ...]:
        end = self._place + count
        if end > len(self._numbers):
            refuse("it ends before what it announces")
        taken = self._numbers[self._place : end]
        self._place = end
        return taken

    def places(self, count: int, num_items: int) -> tuple[int, ...]:
        """Of items about which something follows, in order."""
        places = self.take(count)
        if max(places) >= num_items or any(map(ge, places, places[1:])):
            refuse(f"it lists places {list(places)[:8]} of {num_items} sequences out of order")
        return places

    def end(self) -> None:
        """Everything was taken."""
        if self._place != len(self._numbers):
            refuse(f"{len(self._numbers) - self._place} numbers follow its end")


def _as_bools(slots: tuple[int, ...], samples: tuple[int, ...]) -> Iterator[bool]:
    if max(samples, default=0) > 1:
        slot = slots[next(place for place, times in enumerate(samples) if times > 1)]
        refuse(f"its sequence in slot {slot} samples {max(samples)} times")
    return map(bool, samples)


def write_admitted(writer: Writer, step: Step) -> None:
    """What a step admits, behind its numbers."""
    for admitted in step.admitted:
        writer.int(admitted.slot)
        writer.int(admitted.sequence_id)
        writer.ints(admitted.token_ids)
        writer.int(admitted.num_prompt_tokens)
        write_params(writer, admitted.params)
        writer.int(admitted.seed - _WORD)
        write_words(writer, admitted.bad_word_ids)
        writer.int(admitted.num_stored)
        writer.int(admitted.fork_of)
        writer.int(admitted.is_pooled)


def _read_admitted(reader: Reader) -> Admitted:
    slot, sequence_id = reader.int(0, MAX_TOKEN_ID), reader.int()
    token_ids = reader.ints(0, MAX_TOKEN_ID)
    num_prompt_tokens = reader.int(1, max(len(token_ids), 1))
    if not token_ids:
        refuse(f"the sequence of slot {slot} has no tokens")
    params, seed, words = read_params(reader), reader.int() + _WORD, read_words(reader)
    num_stored, fork_of = reader.int(0, len(token_ids) - 1), reader.int(-1, MAX_TOKEN_ID)
    others = num_stored, fork_of, bool(reader.int(0, 1))
    return Admitted(slot, sequence_id, token_ids, num_prompt_tokens, params, seed, words, *others)


def write_words(writer: Writer, words: tuple[tuple[int, ...], ...]) -> None:
    """Token sequences one behind the other, and how long each is."""
    writer.ints([len(word) for word in words])
    writer.ints([token_id for word in words for token_id in word])


def read_words(reader: Reader) -> tuple[tuple[int, ...], ...]:
    """The same back."""
    lengths, token_ids = reader.ints(1, MAX_TOKEN_ID), reader.ints(0, MAX_TOKEN_ID)
    if sum(lengths) != len(token_ids):
        refuse(f"its words have {sum(lengths)} tokens, and {len(token_ids)} follow")
    words, place = [], 0
    for length in lengths:
        words.append(token_ids[place : place + length])
        place += length
    return tuple(words)


def write_params(writer: Writer, params: SamplingParams) -> None:
    """The fields that differ from their defaults, as JSON."""
    own = {field.name: getattr(params, field.name) for field in fields(params)}
    defaults = {field.name: field.default for field in fields(params) if field.default is not MISSING}
    told = {name: value for name, value in own.items() if value != defaults.get(name)}
    if params.logit_bias is not None:
        told["logit_bias"] = list(params.logit_bias.items())
    if params.structured_outputs is not None:
        told["structured_outputs"] = params.structured_outputs.as_dict()
    writer.text(json.dumps(told, separators=(",", ":")))


def read_params(reader: Reader) -> SamplingParams:
    """Checked by their own constructor."""
    text = reader.text()
    try:
        told = json.loads(text)
        if "logit_bias" in told:
            told["logit_bias"] = dict(told["logit_bias"])
        return SamplingParams(**told)
    except (RequestError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise MessageError(
            "a message came", f"its sampling parameters are not sound ({error})", "send it again"
        ) from error
