"""Scheduler: which sequences run next, how many of their tokens, on which pages; by priority, then arrival; no torch.

Among equal priorities, running before waiting, sequences are always sorted by arrival. Admission moves the border one
to the right, preemption one to the left; otherwise sequences only join at the right end and leave from anywhere.

    add() -> [ waiting ... ] --admit--> [ running ... ] --finish()--> [ quarantine ] --> gone
                    ^                          |
                    '------- preempt ----------'   the last, when one before it needs its pages

**Steps in flight.** schedule() may be called before the last step has ended. Positions of a step in flight count as
done: `num_scheduled` is after its last one, and a token that it samples is *coming*, so a sequence goes on before its
token is known. complete() books steps in order. Nothing depends on unknown tokens: window pages are released and tokens
appended when a step is booked, and a preempted sequence has nothing in flight.

    position    0 ......... num_computed ......... num_scheduled ......... tokens, known and coming
                [ booked   )[ steps in flight     )[ the next steps       )

A sequence that ends with steps in flight leaves surplus: those steps still write its pages and its slot. Both stay in
*quarantine*, owned by no running sequence and not reused, until the last of these steps is booked, which drops its
surplus tokens. An end by max_tokens leaves none: no position past it is scheduled. A page that a step copies rows from
(cache/prefix.py) is there too, until that step is booked.

**Sharing** (engine/sharing.py). Full blocks of known tokens are registered once their step is certain, so sequences
admitted in that step, or while it is in flight, start on them. If their prefix has open rows, they wait for the next
step: it begins with copies, so what it copies is computed before. Equal prompts fork without a row. An aborted leader
leaves its pages to those that share them, because its steps still run. If steps in flight are dropped, their blocks are
forgotten, and sequences that started on them restart. A waiting sequence never computes what a running one of the same
or a higher priority is about to compute; that one computes in the next steps or leaves.

**Pipelines.** With `num_stages` stages as many steps are in flight, one in each, and a sequence is in one of them at a
time: its next token passes all stages before the first can continue. So that no stage waits for another, a step takes a
stage's share of the running sequences, at most ceil(running / num_stages), and of those with nothing in flight an even
part for each free stage, the first in order; and it admits up to a share of all that run or wait. The shares hold every
sequence: in a full pipe from which none leaves, none is skipped num_stages times in a row. If one lacks pages, no other
step is given until it is served or the pipe is empty; then it is served first.

**Invariance.** GPU attention computes prompt rows in large tiles and later rows in small ones, which round differently.
So that the batch does not decide (`is_invariant`), a step holds for a sequence rows of its prompt, or one row after it:
a preempted sequence recomputes its output row by row. And only pages of prompts are cached and found.

**Pages.** A sequence has a page table for each cache group, and all groups share one pool. A step from position `start`
on needs, in a group with a window, only pages from `first_page(start)` on: when a step is booked, pages before the
first unbooked position are released and become holes; steps in flight start there or later. So such a group holds at
most W - 1 tokens and one page, and with n tokens in flight W - 1 + n and one page, where n <= max_num_batched_tokens: a
sequence with windows is not scheduled further ahead. Near pages (cache/groups.py) are windows that begin with a block,
and their first pages stay too. Whole contexts only grow; a state is held from the first token on.

**States beside pages.** A row that stands for several tokens accumulates in a state at the sequence's slot. It restarts
with every row, and blocks of the prefix cache end with a row in every group, so a hit needs none. Rows that overlap are
the exception: a sequence that starts on a hit of h tokens recomputes the last `tokens_again` of them. Nothing is
written for those (`num_stored` is h until they are computed), so they may lie on shared pages, and windows are wide
enough for what they saw the first time. For the page rules below the sequence is at h.

**States outside pages** (cache/states.py). A state of all tokens restarts only at the first one. Its slot has it, or a
snapshot at the end of a block. Kernels give the same bits for every cut at a multiple of the grid. So a step holds for
a sequence a piece of its prompt between two such places, a last row alone on its chunk, or one row after the prompt. Draft
tokens may follow a single row: states keep what precedes them, and the next step applies those that were accepted.
Only pages of prompts are cached and found, and a hit ends with a snapshot. A piece is cut where one is taken: at the
prompt's last whole block, where the cached pages ended on which the sequence could not start, where the next one in the
queue differs, and every `snapshot_tokens`. A step that is certain gives the snapshot a place. A later step may start on
it, also while this one is in flight; a sequence of the same step waits for the next. No step writes a place that a step
in flight uses, except for the sequence that wrote it there: if no other place may go, there is no snapshot, and nothing
waits for one.

**Order.** A sequence precedes another if its priority is a lower number or, among equals, if it arrived before. Both
queues have this order. Admission takes the first that waits, preemption the last that runs. So a waiting sequence never
displaces a running one, and among equals every running one arrived before every waiting one, and was admitted in order
of arrival. While lower numbers keep arriving, higher ones wait: callers that set priorities accept that.

**Admission.** A waiting sequence starts only if its *claim* fits beside the claims of all that run. A claim is the most
that a sequence may still take from the pool until every token known or coming is computed and, in each group, one more
page of tokens. In a group with a window this is at most its bound less what it holds, because pages before the window
are released; a page with other owners is not, so it is claimed again. Draft tokens take pages only beside all claims.
So between an admission and the moment a sequence has filled its extra page, none is preempted: at least a page of
tokens each, of the group with the smallest pages. A step that preempted one admits none.

**Preemption frees memory at once**, because it happens only with nothing in flight. A sequence admitted on a hit of h
tokens takes a new page in every group that keeps rows, because h ends a page, or it gets a copy of that page, and the token at
h is never part of a hit, and its states are its own. What it computed is shared only with sequences admitted later; among equals
these are preempted first. So each preemption makes pages available, as long as some group holds the newest token, or a
state, between steps: every group but a window of 1, which at the end of a page holds nothing. If all groups are such,
or a more important sequence shares the pages, a preemption may free nothing, and the next one follows; the argument
below does not need more.

**Liveness.** The caller books the oldest step in flight whenever schedule() returns None or an empty step. Then the
first that runs advances by at least one token in every step given with nothing in flight, and otherwise goes on or
waits for what is in flight: N equal sequences finish within N * max_model_len such steps after the last arrival: 1. If
nothing runs, then once the steps in flight are booked the quarantine is empty and every page and slot is available. The
hit
   and the claim of the first that waits are together at most the sum of its groups' bounds, and add() has checked that
   this fits: it is admitted.
2. If it runs and has positions that are not in flight, it is served first, with one row or more: with states a piece,
   because the budget is at least the grid, and so is the limit of prompt rows for the first. Others of a prompt may wait
   until a piece is left, which is when enough before them have ended. If a page is missing, schedule()
   returns None until nothing is in flight; then later ones are preempted. Once it is alone, every page that it does not
   hold is available. What it holds after growing is within the bound that add() summed up, so these suffice.
3. If it runs and has none left, what it needs is in flight, and booking brings its token.
4. It is never preempted: only the last is, and only for one before it.
5. A pipeline is alike: a share is at least one, so the first that runs is in the next step whenever it has nothing in flight, and
   one that lacks pages delays the others until at most num_stages - 1 steps are booked.
6. Unequal priorities: while the first of all waits, no other is admitted, so the first that runs ends, and the next, each within
   max_model_len, until it is admitted; then it is the first that runs, and ends within as much. What the first that
   runs had computed may be lost, once for each such admission: 2 * N * max_model_len in all.
7. A sequence that could start waits for a snapshot only while a step that is being made takes it, or while one that comes
   first computes their common blocks. The former ends with the step. Each running sequence takes a snapshot at a
   position at most once between two preemptions, so no sequence waits for ever.
The caller must finish a sequence that has max_tokens of output, or got no token where it should have.
"""

from collections import deque
from collections.abc import Sequence as SequenceABC

from holdfast.cache.groups import HOLE, by_position
from holdfast.cache.prefix import OpenRows, PrefixHit
from holdfast.cache.states import NO_PLACE, NOT_WRITTEN, Written
from holdfast.engine.holdings import Holdings
from holdfast.engine.page_needs import skipped
from holdfast.engine.queues import PromptRows, named
from holdfast.engine.sharing import NO_START, Leaders, Start, fork_start, hit_start, row_copies
from holdfast.engine.tracks import Blocked, Guesses, Propose, Quarantined, Track, admitted, new_pages
from holdfast.errors import QueueFullError
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence, SequenceState
from holdfast.request.step import Admitted, Step, StepItem


def _rows_alike(sequence: Sequence, start: int) -> int:
    """Return the rows from `start` on that are computed alike: the rest of the prompt, or one."""
    return max(sequence.num_prompt_tokens - start, 1)


class Scheduler(Holdings):
    """Decides each step. One thread: schedule(), run the model, complete(); add() and finish() at any time between."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; raise for one that can never run or a full queue."""
        max_pages = self._needs.max_pages(sequence)
        if self.num_waiting >= self.max_queue:
            raise QueueFullError("request.queue_full", count=1, waiting=self.num_waiting, maximum=self.max_queue)
        self._queues.append(sequence)
        sequence.tables = [[] for _ in self.groups]
        chain = self.prefix.chain(sequence.cache_salt)
        chain.num_prompt_tokens = sequence.num_prompt_tokens
        self._tracks[sequence.sequence_id] = Track(self._needs.longest(sequence), max_pages, chain)

    def schedule(self, propose: Propose | None = None, max_prompt_rows: int | None = None) -> LiveStep | None:
        """Return the next step: running sequences in order, then waiting ones as far as limits and pages allow.

        Steps may be in flight. None: one of them must be booked first, because pages are missing or in quarantine. A
        step without items has no number and is not in flight: there is nothing to run. With `propose`, sequences that
        may speculate get draft tokens, and wait for their tokens to be booked. `max_prompt_rows` limits the rows of
        sequences with several left; the first in the step gets one in any case.
        """
        items: list[ScheduledSequence] = []
        full: list[tuple[Sequence, int]] = []
        block_tokens, ends_prompt = self.prefix.block_tokens, False
        budget, least = self.limits.max_num_batched_tokens, self.least_rows
        rows, num_preemptions = self._prompt_rows(max_prompt_rows), self.num_preemptions
        if self._short is not None and not self.serve_short(self._short):
            return None
        running = self._queues.running if self.num_stages == 1 else self.stage_share()
        assert propose is None or not self.is_invariant, "rows of draft tokens would be computed together"
        guesses = Guesses(propose, self.spare_rows()) if propose is not None and self._can_guess else None
        for num_before, sequence in enumerate(running):
            # Victims are the last: every sequence after the first victim is one too, and none before it.
            if budget == 0 or sequence.state is not SequenceState.RUNNING:
                break
            track = self._tracks[sequence.sequence_id]
            start, num_tokens = sequence.num_scheduled, len(sequence.token_ids) + sequence.num_coming
            most = min(num_tokens - start, track.longest - start, budget)
            num_new_tokens = self._take_rows(sequence, most, rows, is_first=not items)
            if num_new_tokens <= 0 or (guesses is not None and sequence.may_speculate and sequence.num_coming):
                continue
            end = start + num_new_tokens
            if end > track.capacity and not self.grow(sequence, end):
                if self.in_flight:
                    self._short = sequence if self.num_stages > 1 else None
                    return None
                break
            proposals = ()
            if guesses is not None and sequence.may_speculate and num_new_tokens == 1 and end == num_tokens:
                # One token is left for each later sequence, so that drafts delay none.
                proposals = self.proposals(sequence, guesses, budget - (len(running) - num_before))
            items.append(
                ScheduledSequence(sequence, start, num_new_tokens + len(proposals), end == num_tokens, proposals)
            )
            budget -= num_new_tokens + len(proposals)
            if end // block_tokens > start // block_tokens:
                full.append((sequence, end))
            ends_prompt |= end == sequence.num_prompt_tokens
        # From here on the step is certain, so admitted sequences may start on what it computes.
        for sequence, end in full:
            self.register(sequence, end, self.num_steps + 1)
            self.take_snapshot(sequence, end)
        if self.num_waiting and self.num_preemptions == num_preemptions:
            self.admit_waiting(items, min(budget, max(rows.left, 0 if items else least)), ends_prompt)
        if items:
            return self.launched(items)
        is_stuck = self.in_flight and self._quarantine and self.num_waiting
        return None if is_stuck else LiveStep(())

    def _take_rows(self, sequence: Sequence, most: int, rows: PromptRows, *, is_first: bool) -> int:
        """Return how many rows of a running sequence are computed next, at most `most`."""
        start = sequence.num_scheduled
        if self._windows:
            most = min(most, self.most_ahead(sequence))
        if self.has_unlike_rows:
            most = min(most, _rows_alike(sequence, start))
        num_rows = rows.share(most, is_first=is_first)
        if self.state_rule is not None and start < sequence.num_prompt_tokens:
            num_rows = self.cut(sequence, start, num_rows)
        rows.use(most, num_rows)
        return num_rows

    def _prompt_rows(self, most: int | None) -> PromptRows:
        """Prompt rows of the next step. A waiting prompt has a share, once until a sequence arrives or leaves."""
        least = self.least_rows
        if most is None:
            return PromptRows(self.limits.max_num_batched_tokens, least=least)
        most = max(most, least) if most else 0
        has_place = self.num_waiting > 0 and self._slots.num_free > 0
        waiting = (self._queues.first_waiting.sequence_id, self.num_running) if has_place else None
        may_admit, self._offered = waiting not in (None, self._offered), waiting
        return PromptRows(most, self.num_running - self.num_decoding + may_admit, least)

    def complete(self, step: LiveStep, token_ids: SequenceABC[SequenceABC[int]]) -> None:
        """Book the oldest step in flight: its positions are computed, and its sampled tokens appended.

        `token_ids` has an entry for each scheduled sequence: empty, one token, or the accepted draft tokens and one.
        Sequences that finished since schedule() are skipped.
        """
        is_oldest = bool(self.in_flight) and step is self.in_flight[0]
        assert is_oldest, "only the oldest step in flight can be completed, and only once"
        assert len(token_ids) == len(step.scheduled), f"{len(token_ids)} results for {len(step.scheduled)} sequences"
        self.in_flight.popleft()
        if self.prefix.pending or self.snapshots is not None:
            self.prefix.settle(step.step.number)
        for item, chosen in zip(step.scheduled, token_ids, strict=True):
            if item.sequence.state is SequenceState.RUNNING:
                self.book(item, chosen)
        if self._quarantine:
            self.leave_quarantine(step.step.number)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence and release its pages. Idempotent, in any state.

        If steps in flight may still write them, pages and slot are released when the last of those is booked.
        """
        self._queues.remove(sequence)
        track = self._tracks.pop(sequence.sequence_id, None)
        if track is None:
            return
        if sequence.num_scheduled > sequence.num_computed:
            self._quarantine.append(Quarantined(track.last_step, sequence.slot, sequence.tables))
            sequence.tables, sequence.slot = [[] for _ in self.groups], -1
            sequence.num_scheduled, sequence.num_coming = sequence.num_computed, 0
            return
        self._release_pages(sequence)
        self.release_slot(sequence, track)

    def forget_steps(self) -> None:
        """Forget steps that the runner dropped: schedule again from the last booked position on.

        What those steps sent stays valid: admissions, pages and releases; numbers go on. A state may have advanced and
        cannot be recomputed from its middle, so its sequence restarts: released and admitted again. So does one that
        started on what a dropped step would have computed.
        """
        steps, self.in_flight = self.in_flight, deque()
        num_booked = self.num_steps - len(steps)
        self.leave_quarantine(self.num_steps)
        for sequence in self._queues.running:
            self.prefix.rewind(self._tracks[sequence.sequence_id].chain, sequence.num_kept)
        self.prefix.forget_pending()
        if self.snapshots is not None:
            self.snapshots.settle(self.num_steps)
        self._blocked = None
        for item in (item for step in steps for item in step.scheduled):
            sequence = item.sequence
            if sequence.state is not SequenceState.RUNNING or sequence.num_scheduled == sequence.num_computed:
                continue
            sequence.num_scheduled, sequence.num_coming = sequence.num_computed, 0
            if self._has_states or self._tracks[sequence.sequence_id].ready_step > num_booked:
                self.start_anew(sequence)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.prefix.reset()

    def stage_share(self) -> list[Sequence]:
        """Return the sequences of a pipeline's next step: a stage's share of the idle ones, in order."""
        running = self._queues.running
        idle = [sequence for sequence in running if sequence.num_scheduled == sequence.num_computed]
        return idle[: self._part_of(len(idle), len(running))]

    def _part_of(self, num_idle: int, num_all: int) -> int:
        """Return the size of one step: an even part of the idle sequences, at most a stage's share of all."""
        num_free = max(self.num_stages - len(self.in_flight), 1)
        return min(-(-num_all // self.num_stages), -(-num_idle // num_free))

    def serve_short(self, sequence: Sequence) -> bool:
        """Allocate pages for the next step of a sequence that lacked them; False if steps in flight must end first."""
        if sequence.state is SequenceState.RUNNING:
            longest = self._tracks[sequence.sequence_id].longest
            most = sequence.num_scheduled + self.limits.max_num_batched_tokens
            end = min(len(sequence.token_ids), longest, most)
            if not self.grow(sequence, end) and self.in_flight:
                return False
        self._short = None
        return True

    def most_ahead(self, sequence: Sequence) -> int:
        """Return how many tokens may join those in flight: a window has pages for one step."""
        return self.limits.max_num_batched_tokens - (sequence.num_scheduled - sequence.num_computed)

    def launched(self, items: list[ScheduledSequence]) -> LiveStep:
        """Make a step of these items, with all that the runner lacks."""
        self.num_steps += 1
        new: list[Admitted] = []
        sent: list[StepItem] = []
        for item in items:
            sequence = item.sequence
            track = self._tracks[sequence.sequence_id]
            sequence.num_scheduled = item.start + item.num_new_tokens
            sequence.num_coming += item.samples
            track.last_step = self.num_steps
            if not track.is_sent:
                new.append(admitted(sequence, -1 if item.source is None else item.source.slot, track))
                track.is_sent = True
            pages = new_pages(sequence, track) if track.is_grown else ()
            positions = item.start, item.num_new_tokens, item.samples
            sent.append(StepItem(sequence.slot, *positions, pages, item.proposals, track.state_to))
            track.state_to = NO_PLACE
        step = Step(self.num_steps, tuple(self._released), tuple(new), tuple(sent))
        self._released.clear()
        live = LiveStep(tuple(items), step)
        self.in_flight.append(live)
        return live

    def book(self, item: ScheduledSequence, chosen: SequenceABC[int]) -> None:
        """Book a step for a running sequence."""
        sequence, proposals = item.sequence, item.proposals
        num_computed = item.start + item.num_new_tokens
        assert item.samples or not chosen, f"{named(sequence)} sampled before its last token"
        if proposals:
            num_accepted = max(len(chosen) - 1, 0)
            assert tuple(chosen[:num_accepted]) == proposals[:num_accepted], f"{named(sequence)} accepts other guesses"
            # No later position was scheduled.
            num_computed = sequence.num_scheduled = num_computed - len(proposals) + num_accepted
        else:
            assert len(chosen) <= 1, f"{named(sequence)} got {len(chosen)} tokens and had no guesses"
            is_known = num_computed <= len(sequence.token_ids)
            assert is_known, f"{named(sequence)} goes on at {item.start} without the token that it did not get"
        sequence.token_ids += chosen
        sequence.num_coming -= item.samples
        if num_computed // self.prefix.block_tokens > item.start // self.prefix.block_tokens:
            self.register(sequence, num_computed)
        sequence.num_computed = num_computed
        if self._windows:
            self.give_back(sequence)

    def register(self, sequence: Sequence, num_tokens: int, step: int = 0) -> None:
        """Register the full blocks of the first `num_tokens` known tokens; `step` computes them, 0 if they are computed."""
        if not self._caches_prefixes:
            return
        num_tokens = min(num_tokens, len(sequence.token_ids))
        if self.has_unlike_rows:
            num_tokens = min(num_tokens, sequence.num_prompt_tokens)
        chain = self._tracks[sequence.sequence_id].chain
        if num_tokens // self.prefix.block_tokens > chain.num_blocks:
            self.prefix.register(chain, sequence.token_ids, sequence.tables, num_tokens, step)

    def cut(self, sequence: Sequence, start: int, most: int) -> int:
        """Return the rows of the next piece of a prompt with states, at most `most`; 0 if these are too few for one.

        A piece ends where its state will be wanted: at the last whole block of the prompt, where cached pages ended,
        where the next sequence to start differs, and every `snapshot_tokens`.
        """
        assert self.state_rule is not None and self.snapshots is not None, f"{named(sequence)} has no state"  # noqa: PT018
        num_rows = self.state_rule.piece(start, sequence.num_prompt_tokens, most)
        track, end, block_tokens = self._tracks[sequence.sequence_id], start + num_rows, self.prefix.block_tokens
        track.snapshot_at = 0
        if not self._caches_prefixes or end // block_tokens == start // block_tokens:
            return num_rows
        last = (sequence.num_prompt_tokens - 1) // block_tokens * block_tokens
        wanted = last, track.branch_at, self._common_tokens(sequence, start)
        every = -(-self.state_rule.snapshot_tokens // block_tokens) * block_tokens
        between = range((start // every + 1) * every, end + 1, every)
        for position in sorted([place for place in (*wanted, *between) if start < place <= end]):
            track.is_between = position not in wanted
            place = self.snapshots.find(self.num_steps + 1, is_between=track.is_between, own=track.written)
            has_place = place != NO_PLACE
            if has_place and self.prefix.lacks_snapshot(track.chain, sequence.token_ids, position):
                track.snapshot_at = position
                return position - start
        return num_rows

    def _common_tokens(self, sequence: Sequence, start: int) -> int:
        """Return the tokens of whole blocks that a prompt, which goes on at `start`, shares with the next to start."""
        follower = self._queues.first_waiting if self.num_waiting else None
        if follower is None or not self.uses_cache(follower):
            return 0
        first, own = start // self.prefix.block_tokens, self._tracks[sequence.sequence_id].chain
        pair = (own, sequence.token_ids), (self._tracks[follower.sequence_id].chain, follower.token_ids)
        most = (min(sequence.num_prompt_tokens, len(follower.token_ids) - 1)) // self.prefix.block_tokens
        return min(self.prefix.num_common(*pair, first), most) * self.prefix.block_tokens

    def take_snapshot(self, sequence: Sequence, end: int) -> None:
        """Keep the state of a sequence that the next step computes up to `end`, if its piece was cut for that."""
        track = self._tracks[sequence.sequence_id]
        if self.snapshots is not None and track.snapshot_at == end:
            step, own = self.num_steps + 1, track.written
            track.state_to = self.prefix.take_snapshot(track.chain, end, step, is_between=track.is_between, own=own)
            track.written = Written(track.state_to, step)
            track.snapshot_at = 0

    def leave_quarantine(self, number: int) -> None:
        """Release pages and slots that step `number` was the last to write."""
        left = [held for held in self._quarantine if held.last_step <= number]
        if not left:
            return
        self._quarantine = [held for held in self._quarantine if held.last_step > number]
        for held in left:
            self.pool.release_many(by_position(self.groups, held.tables))
            if held.slot >= 0:
                self._slots.put(held.slot)
                self._released.append(held.slot)
        # No claim has counted on these pages.
        self._blocked = None

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate pages for the first `num_tokens` of a running sequence.

        False if it was preempted itself, or if a preemption must wait for steps in flight.
        """
        missing = self._needs.missing(sequence.tables, num_tokens, sequence.num_kept)
        while sum(missing) > self.pool.num_available:
            if self.in_flight or self.preempt_last() is sequence:
                return False
        self.extend(sequence, num_tokens, missing)
        return True

    def extend(self, sequence: Sequence, num_tokens: int, missing: SequenceABC[int]) -> None:
        """Allocate the missing pages of each group."""
        track = self._tracks[sequence.sequence_id]
        assert num_tokens <= track.longest, (
            f"{named(sequence)} goes on after max_tokens: {num_tokens=} {track.longest=}"
        )
        num_known, budget = len(sequence.token_ids), self.limits.max_num_batched_tokens
        for index, (group, table, num_missing) in enumerate(zip(self.groups, sequence.tables, missing, strict=True)):
            after = table[-1] if table and table[-1] != HOLE else None
            num_expected = min(group.pages_for(num_known) - len(table), group.most_pages(num_known, budget))
            pages = self.pool.allocate_many(num_missing, after, num_expected, index)
            places = skipped(group, len(table), sequence.num_kept)
            first = places.start - len(table)
            table += [*pages[:first], *[HOLE] * len(places), *pages[first:]] if places else pages
        track.capacity = self._needs.capacity(sequence.tables)
        track.end = max(track.end, num_tokens)
        track.is_grown = True

    def spare_rows(self) -> int:
        """Return the rows left for draft tokens after one sampled row for every possible sequence of the step."""
        num_sequences = min(self.num_running + self.num_waiting, self.limits.max_num_seqs)
        return self.limits.sampled_rows - num_sequences

    def proposals(self, sequence: Sequence, guesses: Guesses, most: int) -> tuple[int, ...]:
        """Return draft tokens after the last token: at most `most`, on unclaimed pages."""
        track, num_tokens = self._tracks[sequence.sequence_id], len(sequence.token_ids)
        most = min(most, guesses.num_rows, track.longest - num_tokens)
        if self.state_rule is not None:
            most = min(most, self.state_rule.num_drafts)
        if self._windows:
            most = min(most, self.most_ahead(sequence) - 1)
        if most <= 0:
            return ()
        proposals = tuple(guesses.propose(sequence)[:most])
        end = num_tokens + len(proposals)
        if end > track.capacity:
            if guesses.num_claimed is None:
                guesses.num_claimed = sum(map(self._claim, self._queues.running))
            missing = self._needs.missing(sequence.tables, end, sequence.num_kept)
            if sum(missing) + guesses.num_claimed <= self.pool.num_available:
                self.extend(sequence, end, missing)
            else:
                proposals = proposals[: track.capacity - num_tokens]
        guesses.num_rows -= len(proposals)
        return proposals

    def give_back(self, sequence: Sequence) -> None:
        """Release the pages before the window in each group that has one, the last first."""
        for index in self._windows:
            table = sequence.tables[index]
            passed = self.groups[index].passed(sequence.num_kept)
            place = passed.stop - 1
            while place >= passed.start and table[place] != HOLE:
                self.pool.release(table[place])
                table[place] = HOLE
                place -= 1

    def start_anew(self, sequence: Sequence) -> None:
        """Restart a sequence from its first token, in its slot."""
        track = self._tracks[sequence.sequence_id]
        self._release_pages(sequence)
        self._released.append(sequence.slot)
        track.is_sent = False
        self.start(sequence, NO_START)

    def preempt_last(self) -> Sequence:
        assert not self.in_flight, f"a sequence is preempted with {self.num_in_flight} steps in flight"
        sequence = self._queues.preempt()
        self._release_pages(sequence)
        self.release_slot(sequence, self._tracks[sequence.sequence_id])
        sequence.num_computed = sequence.num_scheduled = sequence.num_stored = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        return sequence

    def admit_waiting(self, scheduled: list[ScheduledSequence], budget: int, ends_prompt: bool) -> None:
        """Admit from the front of the queue; `ends_prompt`: a running sequence ends its prompt in this step."""
        if not ends_prompt and (budget == 0 or self.is_still_blocked(self._queues.first_waiting)):
            return
        claims: int | None = None  # of all running sequences, summed up on demand
        most = self.limits.max_num_seqs if self.num_stages == 1 else self._most_admitted()
        # Forks sample without a row, and the last layer has no more rows than a step may have.
        num_left = self.limits.max_num_batched_tokens - sum(item.num_logits for item in scheduled)
        leaders: Leaders | None = None
        while self.num_waiting and self._slots.num_free and len(scheduled) < most:
            sequence = self._queues.first_waiting
            if leaders is None:
                leaders = Leaders(self.prefix, scheduled, self._queues.running, lambda one: self._tracks[one].chain)
            chain = self._tracks[sequence.sequence_id].chain
            shares = self._shares and sequence.use_prefix_cache
            source = leaders.twin(sequence) if shares else None
            if source is None and (
                budget == 0 or self.is_still_blocked(sequence) or (shares and leaders.awaits(sequence, chain))
            ):
                return
            if claims is None:
                claims = sum(map(self._claim, self._queues.running))
            start = hit_start(self.hit(sequence), self.tokens_again)
            has_to_wait = not self._has_rows(sequence, start, budget)
            has_to_wait = has_to_wait or self.prefix.is_computed_by(start.hit, self.num_steps + 1)
            # With one row left there is nothing to copy, and a step of single rows stays one.
            if source is not None and (has_to_wait or start.num_computed < len(sequence.token_ids) - 1):
                fork = fork_start(self.hit(sequence, needs_state=False), source, self.groups)
                if claims + self._num_taken(sequence, fork) <= self.pool.num_available:
                    start = fork
            if has_to_wait and start.source is None:
                return
            hit = start.hit
            if start.source is None and claims + self._num_taken(sequence, start) > self.pool.num_available:
                # Shared pages of a window are released later, and a copied page takes another: it may fit without them.
                may_fit = self._windows or start.hit.open_rows
                start = hit_start(self.prefix.miss(), self.tokens_again) if may_fit else start
                if not self._has_rows(sequence, start, budget):
                    return
            if start.source is None and claims + self._num_taken(sequence, start) > self.pool.num_available:
                self._blocked = Blocked(
                    sequence.sequence_id,
                    self.pool.num_available,
                    self.num_running,
                    claims,
                    hit,
                    self.prefix.owners_seen(hit),
                    self.prefix.num_filled,
                )
                return
            most_wanted = 1 if sequence.params.prompt_logprobs is None else budget
            if num_left < most_wanted:
                return
            item = self.admit(sequence, start, budget)
            scheduled.append(item)
            leaders.add(item)
            budget -= item.num_rows
            num_left -= item.num_logits
            claims = sum(map(self._claim, self._queues.running)) if self._windows else claims + self._claim(sequence)

    def _has_rows(self, sequence: Sequence, start: Start, budget: int) -> bool:
        """True if a step with `budget` rows left can go on from a start."""
        if self.state_rule is None or start.num_computed >= sequence.num_prompt_tokens:
            return budget != 0
        return self.state_rule.piece(start.num_computed, sequence.num_prompt_tokens, budget) > 0

    def _most_admitted(self) -> int:
        """Return the most sequences of a pipeline step, admitted ones included."""
        num_idle = sum(one.num_scheduled == one.num_computed for one in self._queues.running)
        num_new = min(self.num_waiting, self._slots.num_free)
        return self._part_of(num_idle + num_new, self.num_running + num_new)

    def _num_taken(self, sequence: Sequence, start: Start) -> int:
        """Count the pages that its start makes unavailable: its claim, and what it takes at once."""
        num_owners = self.pool.num_owners
        longest = self._tracks[sequence.sequence_id].longest
        claim = self._needs.claim(sequence, start.tables, start.num_kept, longest, lambda page: num_owners(page) > 0)
        # Hits save pages, but pages without an owner counted as available.
        num_revived = sum(num_owners(page) == 0 for table in start.tables for page in table if page != HOLE)
        num_revived += sum(num_owners(rows.page) == 0 for rows in start.hit.open_rows)
        # A page of one owner will have two: it is no longer released after that one's window.
        windows = ((self.groups[index].kept_pages, start.tables[index]) for index in self._windows)
        joined = (page for num_kept, table in windows for page in table[num_kept:] if page != HOLE)
        return claim + num_revived + sum(num_owners(page) == 1 for page in joined)

    def admit(self, sequence: Sequence, start: Start, max_new_tokens: int) -> ScheduledSequence:
        self._queues.admit()
        sequence.slot = self._slots.take()
        self._blocked = None
        self.start(sequence, start)
        if self._shares and sequence.use_prefix_cache and sequence.num_preemptions == 0:
            sequence.num_cached_tokens = start.num_kept
            self.num_prefix_query_tokens += len(sequence.token_ids)
            self.num_prefix_hit_tokens += start.num_kept
        first = sequence.num_computed
        num_new_tokens = len(sequence.token_ids) - first
        if start.source is None:
            num_new_tokens = min(num_new_tokens, max_new_tokens)
            if self.has_unlike_rows:
                num_new_tokens = min(num_new_tokens, _rows_alike(sequence, first))
            if self.state_rule is not None and first < sequence.num_prompt_tokens:
                num_new_tokens = self.cut(sequence, first, num_new_tokens)
        # It gets a page of its own to release, even if its first step does not reach the end of the hit.
        has_grown = self.grow(sequence, max(first + num_new_tokens, start.hit.num_tokens + 1))
        assert has_grown, f"{named(sequence)} was admitted without pages"
        self._tracks[sequence.sequence_id].copies = row_copies(start, self.groups, sequence.tables)
        if start.source is None:
            # A fork's own pages are copied after the forward pass: nothing of this step may read them.
            self.register(sequence, first + num_new_tokens, self.num_steps + 1)
            self.take_snapshot(sequence, first + num_new_tokens)
        samples = first + num_new_tokens == len(sequence.token_ids)
        return ScheduledSequence(sequence, first, num_new_tokens, samples, (), start.source)

    def start(self, sequence: Sequence, start: Start) -> None:
        track = self._tracks[sequence.sequence_id]
        sequence.tables = self.prefix.share(track.chain, start.hit, start.tables or ((),) * len(self.groups))
        sequence.num_computed = sequence.num_scheduled = start.num_computed
        sequence.num_stored = start.num_stored
        is_copied = start.source is not None or bool(start.hit.open_rows)
        track.ready_step = self.num_steps + 1 if is_copied else self.prefix.pending_step(sequence.tables)
        track.copies = ()
        track.state_from, track.state_to, track.snapshot_at = NO_PLACE, NO_PLACE, 0
        track.written = NOT_WRITTEN
        track.branch_at = start.hit.num_known * self.prefix.block_tokens
        if self.snapshots is not None and start.source is None and start.hit.snapshot != NO_PLACE:
            track.state_from = start.hit.snapshot
            self.snapshots.read(track.state_from, self.num_steps + 1)
            self.num_snapshot_hits += 1
        self._hold(start.hit.open_rows)
        track.num_sent = [0] * len(self.groups)
        track.is_grown = True
        track.capacity = self._needs.capacity(sequence.tables)
        track.end = start.hit.num_tokens

    def _hold(self, open_rows: SequenceABC[OpenRows]) -> None:
        """Own the pages that a prefix ends inside until the next step, which copies from them, is booked."""
        for rows in open_rows:
            self.pool.share(rows.page)
            tables = [[rows.page] if index == rows.group else [] for index in range(len(self.groups))]
            self._quarantine.append(Quarantined(self.num_steps + 1, -1, tables))

    def hit(self, sequence: Sequence, *, needs_state: bool = True) -> PrefixHit:
        """Find cached pages to start on, and a snapshot after them; the last token is always computed, for its logits."""
        if not self.uses_cache(sequence):
            return self.prefix.miss()
        chain = self._tracks[sequence.sequence_id].chain
        most = len(sequence.token_ids) - 1
        if self.has_unlike_rows:
            # Its output may be in the prompt of another sequence.
            most = min(most, sequence.num_prompt_tokens)
        match = self.prefix.match if needs_state else self.prefix.match_pages
        return match(chain, sequence.token_ids, most)

    def is_still_blocked(self, sequence: Sequence) -> bool:
        """True if nothing has changed since this sequence did not fit: no sequence left or claims less, and its prefix hit is
        the same. Then another attempt would fail too."""
        blocked = self._blocked
        if blocked is None or blocked.sequence_id != sequence.sequence_id:
            return False
        if self.pool.num_available > blocked.num_available or self.num_running < blocked.num_running:
            return False
        # Claims of whole contexts only fall by what was taken; those of windows fall as prompts are computed.
        if self._windows:
            num_claimed = sum(map(self._claim, self._queues.running))
            if self.pool.num_available - num_claimed > blocked.num_available - blocked.num_claimed:
                return False
        if not self.uses_cache(sequence):
            return True
        chain = self._tracks[sequence.sequence_id].chain
        if self.prefix.may_hold_more(chain, blocked.hit) or self.prefix.num_filled != blocked.num_filled:
            return False
        return self.prefix.owners_seen(blocked.hit) == blocked.num_owners

    def uses_cache(self, sequence: Sequence) -> bool:
        return self._caches_prefixes and sequence.use_prefix_cache
