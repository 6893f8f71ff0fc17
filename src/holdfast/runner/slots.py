"""Slots: the sequences of a runner by slot; every step is checked before it changes anything; no torch.

A step names slots and brings only what is new: each sequence once, pages as they are allocated. The rest is kept
here: tokens (sampled here, and added when a step is booked), block tables, and how far each sequence is.

    token_ids   [ known ............................ ] coming ...
                [0, num_computed)   of steps that are booked
                [.., next_start)    of steps in flight: the next step begins where the last one ends

With draft tokens the end of a step is unknown until it is booked. Until then its sequence is *open*: no other step
takes it. A state outside the pages lacks the draft tokens that were accepted; the next step of the sequence applies them.
Pages that a window has freed stay in the tables and are never read. A sequence may begin some tokens before
the end of its stored tokens, if a state must be recomputed from them (engine/scheduler.py): see `num_stored`.

With states outside the pages (cache/states.py) a sequence begins at its first token, or after a prefix whose snapshot
its slot gets. Rows of its prompt come in pieces that the kernels compute like the whole, and later rows one by one.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import NoReturn

from holdfast.cache.groups import HOLE, CacheGroup, block_tokens, tokens_again
from holdfast.cache.states import NO_PLACE, StateRule
from holdfast.config import MAX_COUNT, Limits
from holdfast.errors import MessageError
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence, StepResult
from holdfast.request.step import Admitted, RowCopy, Step, StepItem


@dataclass(eq=False, slots=True)
class _Seat:
    """A sequence in its slot."""

    sequence: Sequence
    num_tokens: int
    """Tokens known or in flight."""
    next_start: int | None = None
    """Where the next step begins; None before the first, since the prefix cache decides."""
    num_computed: int | None = None
    """Tokens of booked steps; None before the first."""
    is_open: bool = False
    """A step with draft tokens is in flight."""
    num_accepted: int = 0
    """Accepted draft tokens that its state outside the pages lacks."""
    copies: tuple[RowCopy, ...] = ()
    """Rows that its first step copies."""
    state_from: int = NO_PLACE
    """The snapshot that its first step starts with."""
    room: int = 0
    """Positions that the tables of all groups cover."""


class Slots:
    """The sequences of a runner by slot."""

    def __init__(
        self,
        limits: Limits,
        groups: SequenceABC[CacheGroup],
        num_pages: int,
        vocab_size: int,
        state_rule: StateRule | None = None,
    ) -> None:
        self._limits = limits
        self._most_sampled = limits.sampled_rows
        self._groups = tuple(groups)
        self._num_pages = num_pages
        self._vocab_size = vocab_size
        self._tokens_again = tokens_again(groups)
        self._block_tokens = block_tokens(groups) if any(group.has_state for group in groups) else 1
        self._rule = state_rule
        if state_rule is not None:
            self._block_tokens = block_tokens(groups, state_rule.grid)
        self.number = 0
        self.seats: dict[int, _Seat] = {}

    def accept(self, step: Step) -> LiveStep:
        """Return the step with its sequences; raise, and change nothing, if it cannot run."""
        if step.number != self.number + 1:
            raise MessageError("runner.step_out_of_order", number=step.number, expected=self.number + 1)
        seats = self._seated(step)
        sources = self._sources(step, seats)
        self._check_items(step, seats, sources)
        self.seats = seats
        self.number = step.number
        return LiveStep(tuple(self._apply(item, sources) for item in step.items), step)

    def book(self, live: LiveStep, result: StepResult) -> None:
        """Record the tokens of a finished step. Idempotent."""
        for item, own in zip(live.scheduled, result.results, strict=True):
            sequence = item.sequence
            num_computed = item.start + item.num_new_tokens
            if item.samples:
                # If nothing could be chosen the sequence fails, but its steps in flight still need some token.
                sequence.token_ids[num_computed - len(item.proposals) :] = [max(token, 0) for token in own.token_ids]
                num_computed -= 1 + len(item.proposals) - len(own.token_ids)
            seat = self.seats.get(sequence.slot)
            if seat is None or seat.sequence is not sequence:
                continue
            seat.num_computed = num_computed
            if item.proposals:
                seat.next_start, seat.num_tokens, seat.is_open = num_computed, sequence.num_tokens, False
                seat.num_accepted = 0 if self._rule is None else len(own.token_ids) - 1

    def forget_flights(self) -> None:
        """Undo steps in flight, which were dropped; their admissions and pages stay."""
        for seat in self.seats.values():
            seat.next_start, seat.num_tokens, seat.is_open = seat.num_computed, seat.sequence.num_tokens, False

    def _seated(self, step: Step) -> dict[int, _Seat]:
        """Return the seats after the step's releases and admissions."""
        seats = dict(self.seats)
        for slot in step.released:
            if seats.pop(slot, None) is None:
                _refuse(step, f"releases slot {slot}, which is free")
        present = {seat.sequence.sequence_id for seat in seats.values()} if step.admitted else set()
        for admitted in step.admitted:
            slot, sequence_id = admitted.slot, admitted.sequence_id
            if not 0 <= slot < self._limits.max_num_seqs:
                _refuse(step, f"gives slot {slot}, and there are {self._limits.max_num_seqs}")
            if slot in seats:
                _refuse(step, f"gives slot {slot} to sequence {sequence_id}, and it is taken")
            if sequence_id in present:
                _refuse(step, f"gives slot {slot} to sequence {sequence_id}, which has one already")
            self._check_admitted(step, admitted)
            present.add(sequence_id)
            seats[slot] = self._seat(admitted)
        return seats

    def _check_admitted(self, step: Step, admitted: Admitted) -> None:
        num_tokens, most = len(admitted.token_ids), self._limits.max_model_len
        if not 1 <= num_tokens <= most:
            _refuse_item(step, admitted, f"has {num_tokens} tokens, and 1 to {most} are possible")
        if not 1 <= admitted.num_prompt_tokens <= num_tokens:
            _refuse_item(step, admitted, f"has a prompt of {admitted.num_prompt_tokens} among {num_tokens} tokens")
        may_store = self._tokens_again or admitted.fork_of >= 0
        if admitted.num_stored and (
            not may_store or admitted.num_stored % self._block_tokens or admitted.num_stored >= num_tokens
        ):
            _refuse_item(step, admitted, f"has {admitted.num_stored} of {num_tokens} tokens stored, which cannot be")
        self._check_tokens(step, admitted, admitted.token_ids)

    def _check_tokens(self, step: Step, whose: Admitted | StepItem, token_ids: SequenceABC[int]) -> None:
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            _refuse_item(step, whose, f"has token {low if low < 0 else high}, and there are {self._vocab_size}")

    def _seat(self, admitted: Admitted) -> _Seat:
        sequence = Sequence(
            admitted.sequence_id,
            list(admitted.token_ids),
            admitted.num_prompt_tokens,
            admitted.params,
            admitted.seed,
            max_tokens=self._limits.max_model_len,
            bad_word_ids=admitted.bad_word_ids,
            is_pooled=admitted.is_pooled,
            slot=admitted.slot,
            num_stored=admitted.num_stored,
            tables=[[] for _ in self._groups],
        )
        return _Seat(sequence, sequence.num_tokens, copies=admitted.copies, state_from=admitted.state_from)

    def _sources(self, step: Step, seats: dict[int, _Seat]) -> dict[int, Sequence]:
        """Map a fork's slot to its source: a sequence that ends the same prompt earlier in this step."""
        sources: dict[int, Sequence] = {}
        if not step.admitted:
            return sources
        items = {item.slot: (place, item) for place, item in enumerate(step.items)}
        for admitted in step.admitted:
            if admitted.fork_of < 0:
                continue
            source, (place, item) = seats.get(admitted.fork_of), items.get(admitted.fork_of, (0, None))
            own_place, own = items.get(admitted.slot, (0, None))
            num_tokens = admitted.num_prompt_tokens
            if source is None or item is None or own is None or admitted.fork_of in sources or place >= own_place:
                _refuse_item(step, admitted, f"forks from slot {admitted.fork_of}, which does not run before it")
            is_last = own.start == num_tokens - 1 and own.num_new_tokens == 1
            if item.start + item.num_new_tokens - len(item.proposals) != num_tokens or not is_last:
                _refuse_item(step, admitted, f"forks from slot {admitted.fork_of}, which does not end its prompt here")
            if source.sequence.token_ids[:num_tokens] != list(admitted.token_ids):
                _refuse_item(step, admitted, f"forks from slot {admitted.fork_of}, which has another prompt")
            sources[admitted.slot] = source.sequence
        return sources

    def _check_items(self, step: Step, seats: dict[int, _Seat], sources: dict[int, Sequence]) -> None:
        limits, seen, kept = self._limits, set[int](), set[int]()
        num_tokens = num_sampled = 0
        for item in step.items:
            seat = seats.get(item.slot)
            if seat is None:
                _refuse(step, f"runs slot {item.slot}, which is free")
            if item.slot in seen:
                _refuse(step, f"runs slot {item.slot} twice")
            seen.add(item.slot)
            self._check_positions(step, item, seat, item.slot in sources)
            self._check_state(step, item, seat, item.slot in sources)
            if item.state_to in kept:
                _refuse_item(step, item, f"writes snapshot {item.state_to}, which another sequence writes")
            if item.state_to != NO_PLACE:
                kept.add(item.state_to)
            # Pages already in the tables were checked when they came.
            if item.pages or item.start + item.num_new_tokens > seat.room or seat.next_start is None:
                self._check_pages(step, item, seat)
            if seat.next_start is None:
                self._check_copies(step, item, seat, item.slot in sources)
            num_tokens += 0 if item.slot in sources else item.num_new_tokens
            num_sampled += item.samples + len(item.proposals)
        if num_tokens > limits.max_num_batched_tokens:
            _refuse(step, f"runs {num_tokens} tokens, and at most {limits.max_num_batched_tokens} fit")
        if num_sampled > self._most_sampled:
            _refuse(step, f"chooses from {num_sampled} rows, and at most {self._most_sampled} fit")

    def _check_positions(self, step: Step, item: StepItem, seat: _Seat, is_fork: bool) -> None:
        start, end = item.start, item.start + item.num_new_tokens
        if item.num_new_tokens < 1 or start < 0:
            _refuse_item(step, item, f"runs {item.num_new_tokens} tokens from position {start}")
        if seat.is_open:
            _refuse_item(step, item, "has proposals in flight, and where it goes on is not known")
        if seat.next_start is not None and start != seat.next_start:
            _refuse_item(step, item, f"goes on at position {seat.next_start}, and not at {start}")
        if seat.next_start is None and not is_fork and not self._can_begin(start, seat.sequence.num_stored):
            stored = seat.sequence.num_stored
            _refuse_item(
                step, item, f"begins at position {start} with {stored} tokens stored, where its state is not known"
            )
        if end > self._limits.max_model_len:
            _refuse_item(step, item, f"runs to position {end}, and at most {self._limits.max_model_len} are possible")
        if item.proposals:
            self._check_proposals(step, item, seat)
        elif end > seat.num_tokens:
            _refuse_item(step, item, f"runs to position {end}, and has {seat.num_tokens} tokens")
        reaches_end = end - len(item.proposals) == seat.num_tokens
        if item.samples != reaches_end:
            reach = "reaches" if reaches_end else "does not reach"
            _refuse_item(step, item, f"{reach} its last token, and chooses {'one' if item.samples else 'none'}")

    def _check_state(self, step: Step, item: StepItem, seat: _Seat, is_fork: bool) -> None:
        """Refuse a step that starts, cuts or keeps a state where the kernels do not compute it like a whole prompt."""
        is_first, rule = seat.next_start is None, self._rule
        places = (seat.state_from if is_first else NO_PLACE, item.state_to)
        most = 0 if rule is None else rule.num_snapshots
        outside = next((place for place in places if place >= most), None)
        if outside is not None:
            _refuse_item(step, item, f"copies snapshot {outside}, and there are {most}")
        if rule is None or is_fork:
            if places != (NO_PLACE, NO_PLACE):
                _refuse_item(step, item, f"copies snapshots {places}, and has none")
            return
        start, num_prompt = item.start, seat.sequence.num_prompt_tokens
        num_new = item.num_new_tokens - len(item.proposals)
        if is_first and (seat.state_from == NO_PLACE) != (start == 0):
            _refuse_item(step, item, f"begins at position {start} with snapshot {seat.state_from}")
        is_grid = start >= num_prompt or start % rule.grid == 0
        if not is_grid or rule.piece(start, num_prompt, num_new) != num_new:
            _refuse_item(step, item, f"runs {num_new} rows from position {start}, which are no piece of its prompt")
        end = start + num_new
        if item.state_to != NO_PLACE and (end % self._block_tokens or end > num_prompt):
            _refuse_item(step, item, f"keeps its state at position {end}, where no block of its prompt ends")

    def _can_begin(self, start: int, num_stored: int) -> bool:
        """Return True if a sequence's states, which are not on pages, can be computed from `start` on."""
        if self._tokens_again:
            return start == max(num_stored - self._tokens_again, 0)
        return start % self._block_tokens == 0

    def _check_proposals(self, step: Step, item: StepItem, seat: _Seat) -> None:
        sequence = seat.sequence
        most = len(item.proposals) if self._rule is None else self._rule.num_drafts
        if len(item.proposals) > most:
            _refuse_item(step, item, f"has {len(item.proposals)} proposals, and its slot keeps {most}")
        if item.num_new_tokens != 1 + len(item.proposals):
            _refuse_item(step, item, f"has {len(item.proposals)} proposals among {item.num_new_tokens} tokens")
        if not item.samples:
            _refuse_item(step, item, "has proposals, and chooses none")
        if seat.num_tokens != sequence.num_tokens:
            _refuse_item(step, item, "has proposals for what follows a token that is not known yet")
        if sequence.params.has_penalties or sequence.params.structured_outputs is not None or sequence.bad_word_ids:
            _refuse_item(step, item, "has proposals, and its choices depend on one another")
        self._check_tokens(step, item, item.proposals)

    def _check_pages(self, step: Step, item: StepItem, seat: _Seat) -> None:
        end, num_groups = item.start + item.num_new_tokens, len(self._groups)
        if item.pages and len(item.pages) != num_groups:
            _refuse_item(step, item, f"has pages for {len(item.pages)} cache groups, and there are {num_groups}")
        for index, group in enumerate(self._groups):
            held, new = seat.sequence.tables[index], item.pages[index] if item.pages else ()
            outside = next((page for page in new if page != HOLE and not 0 <= page < self._num_pages), None)
            if outside is not None:
                _refuse_item(step, item, f"gets page {outside}, and there are {self._num_pages}")
            has = f"has {len(held) + len(new)} pages of cache group {index}"
            most, least = group.pages_for(self._limits.max_model_len), group.pages_for(end)
            if len(held) + len(new) > most:
                _refuse_item(step, item, f"{has}, and at most {most} are possible")
            if len(held) + len(new) < least:
                _refuse_item(step, item, f"{has}, and needs {least} to position {end}")
            start = max(item.start, seat.sequence.num_stored)
            lacks_kept, place = False, group.passed(start).stop
            if kept := group.kept_pages:
                num_new = max(kept - len(held), 0)
                lacks_kept, place = HOLE in held[:kept] or HOLE in new[:num_new], place - kept
                held, new = held[kept:], new[num_new:]
            if lacks_kept or _has_hole_behind(held, new) or _is_hole(held, new, place):
                _refuse_item(step, item, f"has no page where cache group {index} is read")

    def _check_copies(self, step: Step, item: StepItem, seat: _Seat, is_fork: bool) -> None:
        """Refuse a first step whose sequence does not get just the rows that its own open pages lack."""
        start, needed = max(item.start, seat.sequence.num_stored), list[tuple[int, int, int]]()
        for index, group in enumerate(() if is_fork else self._groups):
            if num_rows := group.open_rows(start):
                table = (*seat.sequence.tables[index], *(item.pages[index] if item.pages else ()))
                needed.append((index, table[start // group.page_tokens], num_rows))
        if needed != [(copy.group, copy.target, copy.num_rows) for copy in seat.copies]:
            _refuse_item(step, item, f"begins at position {start} with copies {list(seat.copies)}, and needs {needed}")
        outside = next((copy.source for copy in seat.copies if copy.source >= self._num_pages), None)
        if outside is not None:
            _refuse_item(step, item, f"copies page {outside}, and there are {self._num_pages}")

    def _apply(self, item: StepItem, sources: dict[int, Sequence]) -> ScheduledSequence:
        seat = self.seats[item.slot]
        sequence = seat.sequence
        if item.pages:
            for table, pages in zip(sequence.tables, item.pages, strict=True):
                table += pages
            seat.room = min(map(_room, self._groups, sequence.tables))
        seat.next_start = item.start + item.num_new_tokens
        seat.num_tokens += item.samples
        seat.is_open = bool(item.proposals)
        num_accepted, seat.num_accepted = seat.num_accepted, 0
        positions = item.start, item.num_new_tokens, item.samples
        return ScheduledSequence(sequence, *positions, item.proposals, sources.get(item.slot), num_accepted)


def _room(group: CacheGroup, table: list[int]) -> int:
    """Return the positions that a table covers; a state covers all or none."""
    return len(table) * (MAX_COUNT if group.is_state else group.page_tokens)


def _has_hole_behind(held: Iterable[int], new: SequenceABC[int]) -> bool:
    """Return True if a hole in `new` follows a page."""
    if HOLE not in new:
        return False
    last_hole = len(new) - 1 - new[::-1].index(HOLE)
    return any(page != HOLE for page in held) or any(page != HOLE for page in new[:last_hole])


def _is_hole(held: SequenceABC[int], new: SequenceABC[int], place: int) -> bool:
    if place < len(held):
        return held[place] == HOLE
    return place - len(held) < len(new) and new[place - len(held)] == HOLE


def _refuse(step: Step, fault: str) -> NoReturn:
    raise MessageError("runner.bad_step", number=step.number, fault=fault)


def _refuse_item(step: Step, owner: Admitted | StepItem, fault: str) -> NoReturn:
    _refuse(step, f"is wrong: the sequence of slot {owner.slot} {fault}")
