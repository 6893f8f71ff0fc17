"""Scheduler: who runs next, how many of their tokens, on which pages; first come, first served; no torch.

Laid end to end, running before waiting, the sequences are always sorted by arrival. Admission moves the border one to
the right, preemption one to the left; besides that, sequences only join at the right end and leave from anywhere.

    add() -> [ waiting ... ] --admit--> [ running ... ] --finish()--> gone
                    ^                          |
                    '------- preempt ----------'   the youngest, when an older one needs its pages

**Pages.** A sequence has a page table for each cache group, and all groups take from one pool. A step from position
`start` on needs, in a group with a window, only the pages from `first_page(start)` on: once a step is booked, those
before that are given back and their places become holes. So between steps such a group holds at most W - 1 tokens and
one page, and in a step of n tokens at most W - 1 + n and one page. Whole contexts only grow; a state is held whole from
the first token on.

**Order.** Every running sequence arrived before every waiting one, and both queues are in order of arrival. Admission
takes the oldest that waits and makes it the youngest that runs; preemption does the reverse. Nothing else moves. So
among those that run, admissions happened in order of arrival too.

**Admission.** A waiting sequence starts only when its *claim* fits beside the claims of all that run. A claim is what a
sequence may still take out of the pool, at the most, until every token known so far is computed and, in each group, one
page of tokens more (where it may ever need that). In a group with a window this is no more than its bound less what
it holds, because each page behind the window comes back; except one that somebody else holds too, which comes back to
nobody, and therefore is claimed again. So between an admission and the moment a sequence has filled its extra page
nobody is preempted: at least a page of tokens each, of the group with the smallest pages. In a step that preempted
someone nobody is admitted.

**Preemption frees memory at once.** A sequence that is admitted on a hit of h tokens takes a new page in every group
that keeps rows, because h ends a page in all of them and the token at h is never part of a hit, and its states are its
own. What it computed can be shared only with sequences admitted later, which are preempted first. So each preemption
makes pages available, as long as some group still holds the newest token, or a state, between steps: every one but a
window of 1, which at the end of a page holds nothing. Where all groups are such, a preemption may free nothing, and the
next one follows; nothing below needs more.

**Liveness.** The oldest sequence advances by at least one token in every step, so N sequences finish within
N * max_model_len steps once they stop arriving:
1. If it waits, nothing runs (order), so every page is available. What it starts on and what it claims then are
   together no more than the sum of its groups' bounds, with or without a hit, and add() has checked that this fits: admitted.
2. If it runs, it is served first, with the whole token budget. If a page is missing, those behind it are preempted; at
   the latest when it is alone every page that it does not hold is available. What it holds once it has grown is in
   each group within the bound that add() has summed up, so these suffice.
3. It is never preempted, because only the youngest is, and only for one that is at least as old.
This needs a caller that finishes a sequence once it has max_tokens of output, or got no token where it should have.
"""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from holdfast.cache.groups import HOLE, CacheGroup, by_position
from holdfast.cache.pages import PagePool
from holdfast.cache.prefix import PrefixCache, PrefixChain, PrefixHit, can_hit, strong_hash
from holdfast.config import Limits
from holdfast.errors import QueueFullError, RequestError
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """The arithmetic of one engine: its limits, its number of pages and its cache groups."""

    limits: Limits
    num_pages: int
    groups: tuple[CacheGroup, ...]

    def missing(self, tables: SequenceABC[SequenceABC[int]], num_tokens: int) -> list[int]:
        """Pages that each group lacks for the first `num_tokens` of a sequence."""
        return [group.pages_for(num_tokens) - len(table) for group, table in zip(self.groups, tables, strict=True)]

    def capacity(self, tables: SequenceABC[SequenceABC[int]]) -> int:
        """Tokens that there are places for in every group."""
        most = self.limits.max_model_len
        pairs = zip(self.groups, tables, strict=True)
        return min(
            (most if table else 0) if group.is_state else len(table) * group.page_tokens for group, table in pairs
        )

    def claim(
        self,
        sequence: Sequence,
        tables: SequenceABC[SequenceABC[int]],
        num_computed: int,
        longest: int,
        is_shared: Callable[[int], bool],
    ) -> int:
        """Pages that it may still take, in all groups, until its known tokens and a page more of each are computed.

        `is_shared` says of a page whether it has other owners, so that giving it back makes nothing available.
        """
        num_tokens, budget = len(sequence.token_ids), self.limits.max_num_batched_tokens
        total = 0
        for group, table in zip(self.groups, tables, strict=True):
            end = min(num_tokens + group.page_tokens, longest)
            claim = group.pages_for(end) - len(table)
            if group.window is not None and claim > 0:
                first, last = group.first_page(num_computed), group.first_page(end - 1)
                num_stuck = sum(map(is_shared, table[first:last]))
                most = group.most_pages(end, min(budget, max(num_tokens - num_computed, 1)))
                claim = min(claim, most - (len(table) - first) + num_stuck)
            total += max(claim, 0)
        return total

    def longest(self, sequence: Sequence) -> int:
        """Tokens that are computed of it at the most: its last one never is."""
        longest = max(sequence.num_prompt_tokens + sequence.max_tokens - 1, len(sequence.token_ids))
        return min(longest, self.limits.max_model_len)

    def max_pages(self, sequence: Sequence) -> int:
        """Pages that it holds at the most, in all groups; refuses one that can never run."""
        num_tokens, max_model_len = len(sequence.token_ids), self.limits.max_model_len
        if not 1 <= num_tokens <= max_model_len:
            raise RequestError(
                f"a sequence of {num_tokens} tokens was asked",
                f"1 to max_model_len={max_model_len} work",
                "change the prompt or max_model_len",
            )
        longest, budget = self.longest(sequence), self.limits.max_num_batched_tokens
        max_pages = sum(group.most_pages(longest, budget) for group in self.groups)
        if max_pages > self.num_pages:
            raise RequestError(
                f"{sequence.num_prompt_tokens} prompt and {sequence.max_tokens} output tokens were asked",
                self._capacity_in_words(max_pages),
                "shorten the prompt, lower max_tokens or give the KV cache more memory",
            )
        return max_pages

    def _capacity_in_words(self, max_pages: int) -> str:
        first = self.groups[0]
        if len(self.groups) == 1 and first.window is None and not first.is_state:
            return f"the KV cache holds {self.num_pages * first.page_tokens} tokens"
        return f"the KV cache holds {self.num_pages} pages, and one such sequence takes {max_pages}"


def named(sequence: Sequence) -> str:
    """How messages call a sequence: never by its tokens, which are many and private."""
    return f"sequence {sequence.sequence_id}"


class Queues:
    """Holds each sequence in exactly one place and keeps its state in step. Every move is O(1)."""

    def __init__(self) -> None:
        self._running: dict[int, Sequence] = {}
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._arrivals: dict[int, int] = {}
        self._num_arrived = 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._arrivals

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """A copy, oldest first."""
        return list(self._running.values())

    @property
    def waiting(self) -> list[Sequence]:
        """A copy, oldest first."""
        return list(self._waiting.values())

    @property
    def oldest_waiting(self) -> Sequence:
        return next(iter(self._waiting.values()))

    def append(self, sequence: Sequence) -> None:
        """A new sequence waits, behind all others."""
        is_new = sequence not in self and sequence.state is SequenceState.WAITING and not any(sequence.tables)
        assert is_new, f"{named(sequence)} is not new: {sequence.state} {sequence.tables=}"
        self._arrivals[sequence.sequence_id] = self._num_arrived
        self._num_arrived += 1
        self._waiting[sequence.sequence_id] = sequence

    def admit(self) -> Sequence:
        """The oldest that waits becomes the youngest that runs."""
        sequence_id, sequence = self._waiting.popitem(last=False)
        self._running[sequence_id] = sequence
        sequence.state = SequenceState.RUNNING
        return sequence

    def preempt(self) -> Sequence:
        """The youngest that runs becomes the oldest that waits."""
        sequence_id, sequence = self._running.popitem()
        self._waiting[sequence_id] = sequence
        self._waiting.move_to_end(sequence_id, last=False)
        sequence.state = SequenceState.WAITING
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out for good, wherever it is; nothing happens when it is not here."""
        sequence.state = SequenceState.FINISHED
        self._arrivals.pop(sequence.sequence_id, None)
        self._waiting.pop(sequence.sequence_id, None)
        self._running.pop(sequence.sequence_id, None)

    def check(self) -> None:
        """Every sequence once, in its state, in order of arrival."""
        ids = [*self._running, *self._waiting]
        assert sorted(ids) == sorted(self._arrivals), f"queues hold {ids}, known are {sorted(self._arrivals)}"
        arrivals = [self._arrivals[sequence_id] for sequence_id in ids]
        assert arrivals == sorted(arrivals), f"running and waiting are out of order of arrival: {arrivals}"
        for queue, state in ((self._running, SequenceState.RUNNING), (self._waiting, SequenceState.WAITING)):
            for sequence_id, sequence in queue.items():
                assert sequence.sequence_id == sequence_id, f"{named(sequence)} is listed as {sequence_id}"
                assert sequence.state is state, f"{named(sequence)} is listed as {state.value}"


@dataclass(eq=False, slots=True)
class Track:
    """What the scheduler knows of a sequence beyond the sequence itself."""

    longest: int
    """Tokens that are computed of it at the most."""
    max_pages: int
    """Pages that it holds at the most."""
    chain: PrefixChain
    capacity: int = 0
    """Tokens that its tables have places for."""
    end: int = 0
    """Where the farthest step ended that it was given pages for."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The front of the queue did not fit; while none of this changes it need not be tried again."""

    sequence_id: int
    num_available: int
    num_running: int
    num_claimed: int
    """By those that ran."""
    num_known: int
    """Blocks of its prefix that were entries."""
    num_filled: int
    """Holes of the prefix cache that had been filled."""


class Scheduler:
    """Decides each step. One thread: schedule(), run the model, complete(); add() and finish() at any moment between.

    `groups` are the cache groups of the model; left out, one that keeps the whole context of pages of limits.page_tokens.
    `prefix_root` should be random bytes, so that nobody outside can predict the names of cached pages.
    """

    def __init__(
        self,
        limits: Limits,
        num_pages: int,
        enable_prefix_caching: bool,
        max_queue: int,
        *,
        groups: SequenceABC[CacheGroup] = (),
        prefix_root: bytes = b"",
        prefix_hash: Callable[[bytes], bytes] = strong_hash,
    ) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "page_tokens"):
            assert getattr(limits, name) >= 1, f"{name}={getattr(limits, name)}"
        self.limits = limits
        self.max_queue = max_queue
        self.pool = PagePool(num_pages)
        self.groups = tuple(groups) or (CacheGroup("whole context", limits.page_tokens),)
        self.prefix = PrefixCache(self.pool, self.groups, prefix_root, prefix_hash)
        self._caches_prefixes = enable_prefix_caching and can_hit(self.groups)
        self._needs = PageNeeds(limits, num_pages, self.groups)
        self._windows = tuple(index for index, group in enumerate(self.groups) if group.window is not None)
        self._has_states = any(group.is_state for group in self.groups)
        self._queues = Queues()
        self._tracks: dict[int, Track] = {}
        self._blocked: Blocked | None = None
        self._step: LiveStep | None = None
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        """Tokens of sequences that asked the prefix cache at their first admission."""
        self.num_prefix_hit_tokens = 0
        """How many of those it held."""

    @property
    def num_waiting(self) -> int:
        return self._queues.num_waiting

    @property
    def num_running(self) -> int:
        return self._queues.num_running

    @property
    def running(self) -> list[Sequence]:
        """A copy, oldest first."""
        return self._queues.running

    @property
    def waiting(self) -> list[Sequence]:
        """A copy, oldest first."""
        return self._queues.waiting

    @property
    def kv_usage(self) -> float:
        """Share of the pages that sequences hold."""
        return 1.0 - self.pool.num_available / self.pool.num_pages

    def pages_by_group(self) -> dict[str, int]:
        """Pages that sequences hold now, by the name of the group; one that several hold counts once."""
        held: dict[str, int] = {}
        for index, group in enumerate(self.groups):
            pages = dict.fromkeys(page for sequence in self.running for page in sequence.tables[index] if page != HOLE)
            held[group.name] = held.get(group.name, 0) + len(pages)
        return held

    def add(self, sequence: Sequence) -> None:
        """Appends a new sequence to the queue, or refuses one that can never run or that finds the queue full."""
        max_pages = self._needs.max_pages(sequence)
        if self.num_waiting >= self.max_queue:
            raise QueueFullError(
                "one more request was asked", f"{self.num_waiting} wait already", "try again later or raise max_queue"
            )
        self._queues.append(sequence)
        sequence.tables = [[] for _ in self.groups]
        chain = self.prefix.chain(sequence.cache_salt)
        self._tracks[sequence.sequence_id] = Track(self._needs.longest(sequence), max_pages, chain)

    def schedule(self) -> LiveStep:
        """The next step: running sequences in order of arrival, then waiting ones as far as limits and pages allow."""
        if self._step is not None and self._has_states:
            self._start_anew(self._step)
        scheduled: list[ScheduledSequence] = []
        budget = self.limits.max_num_batched_tokens
        max_model_len = self.limits.max_model_len
        num_preemptions = self.num_preemptions
        for sequence in self._queues.running:
            # Victims are the youngest, so everybody after the first victim is one too, and nobody before it.
            if budget == 0 or sequence.state is not SequenceState.RUNNING:
                break
            start = sequence.num_computed
            num_new_tokens = min(min(len(sequence.token_ids), max_model_len) - start, budget)
            if num_new_tokens <= 0:
                continue
            end = start + num_new_tokens
            if end > self._tracks[sequence.sequence_id].capacity and not self._grow(sequence, end):
                break
            scheduled.append(ScheduledSequence.of(sequence, start, num_new_tokens))
            budget -= num_new_tokens
        if self.num_waiting and self.num_preemptions == num_preemptions:
            self._admit_waiting(scheduled, budget)
        self._step = LiveStep(tuple(scheduled))
        return self._step

    def complete(self, step: LiveStep, token_ids: SequenceABC[int | None]) -> None:
        """Books a step that has run: its tokens are computed, and each sampled one is appended.

        `token_ids` has one entry for each scheduled sequence; None where none was sampled. Sequences that were finished
        since schedule() are passed over.
        """
        assert step is self._step, "only the latest step can be completed, and only once"
        assert len(token_ids) == len(step.scheduled), f"{len(token_ids)} tokens for {len(step.scheduled)} sequences"
        self._step = None
        block_tokens = self.prefix.block_tokens
        for item, token_id in zip(step.scheduled, token_ids, strict=True):
            sequence = item.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue
            num_computed = item.start + item.num_new_tokens
            if self._caches_prefixes and num_computed // block_tokens > item.start // block_tokens:
                chain = self._tracks[sequence.sequence_id].chain
                self.prefix.register(chain, sequence.token_ids, sequence.tables, num_computed)
            sequence.num_computed = num_computed
            if self._windows:
                self._give_back(sequence)
            if token_id is not None:
                assert num_computed == len(sequence.token_ids), f"{named(sequence)} sampled before its last token"
                sequence.token_ids.append(token_id)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out and releases its pages; legal in any state, at any moment, and any number of times.

        Between schedule() and complete() too: nobody is given its pages before the next schedule().
        """
        self._queues.remove(sequence)
        if self._tracks.pop(sequence.sequence_id, None) is not None:
            self._release_pages(sequence)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, for instance because the weights have changed."""
        self.prefix.reset()

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gives a running sequence pages for its first `num_tokens`; False when it had to be preempted itself."""
        track = self._tracks[sequence.sequence_id]
        assert num_tokens <= track.longest, (
            f"{named(sequence)} goes on after max_tokens: {num_tokens=} {track.longest=}"
        )
        missing = self._needs.missing(sequence.tables, num_tokens)
        while sum(missing) > self.pool.num_available:
            if self._preempt_youngest() is sequence:
                return False
        num_known, budget = len(sequence.token_ids), self.limits.max_num_batched_tokens
        for group, table, num_missing in zip(self.groups, sequence.tables, missing, strict=True):
            after = table[-1] if table and table[-1] != HOLE else None
            num_expected = min(group.pages_for(num_known) - len(table), group.most_pages(num_known, budget))
            table += self.pool.allocate_many(num_missing, after, num_expected)
        track.capacity = self._needs.capacity(sequence.tables)
        track.end = max(track.end, num_tokens)
        return True

    def _give_back(self, sequence: Sequence) -> None:
        """Releases what no later token sees: in each group with a window the pages behind it, the last of them first."""
        for index in self._windows:
            table = sequence.tables[index]
            place = self.groups[index].first_page(sequence.num_computed) - 1
            while place >= 0 and table[place] != HOLE:
                self.pool.release(table[place])
                table[place] = HOLE
                place -= 1

    def _start_anew(self, step: LiveStep) -> None:
        """A step that was never completed may have moved states on, and no state can be computed from its middle."""
        for item in step.scheduled:
            if item.sequence.state is SequenceState.RUNNING:
                self._release_pages(item.sequence)
                self._start(item.sequence, self.prefix.miss())

    def _preempt_youngest(self) -> Sequence:
        sequence = self._queues.preempt()
        self._release_pages(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        return sequence

    def _admit_waiting(self, scheduled: list[ScheduledSequence], budget: int) -> None:
        claims: int | None = None  # of all that run, summed up once somebody is worth a try
        while self.num_waiting and budget > 0 and self.num_running < self.limits.max_num_seqs:
            sequence = self._queues.oldest_waiting
            if self._is_still_blocked(sequence):
                return
            if claims is None:
                claims = sum(map(self._claim, self._queues.running))
            hit = self._hit(sequence)
            num_taken = claims + self._num_taken(sequence, hit)
            if num_taken > self.pool.num_available:
                self._blocked = Blocked(
                    sequence.sequence_id,
                    self.pool.num_available,
                    self.num_running,
                    claims,
                    hit.num_known,
                    self.prefix.num_filled,
                )
                return
            item = self._admit(sequence, hit, budget)
            scheduled.append(item)
            budget -= item.num_new_tokens
            claims = sum(map(self._claim, self._queues.running)) if self._windows else claims + self._claim(sequence)

    def _num_taken(self, sequence: Sequence, hit: PrefixHit) -> int:
        """Pages that are no more available to others once it starts on a hit: its claim, and what it takes at once."""
        num_owners = self.pool.num_owners
        longest = self._tracks[sequence.sequence_id].longest
        claim = self._needs.claim(sequence, hit.tables, hit.num_tokens, longest, lambda page: num_owners(page) > 0)
        # Hits save pages, but those that nobody owns were counted as available.
        num_revived = sum(num_owners(page) == 0 for table in hit.tables for page in table if page != HOLE)
        # A page that had one owner will have two: behind that one's window it would no longer come back.
        num_joined = sum(num_owners(page) == 1 for index in self._windows for page in hit.tables[index] if page != HOLE)
        return claim + num_revived + num_joined

    def _admit(self, sequence: Sequence, hit: PrefixHit, max_new_tokens: int) -> ScheduledSequence:
        self._queues.admit()
        self._blocked = None
        self._start(sequence, hit)
        start = hit.num_tokens
        if self._asks_cache(sequence) and sequence.num_preemptions == 0:
            sequence.num_cached_tokens = start
            self.num_prefix_query_tokens += len(sequence.token_ids)
            self.num_prefix_hit_tokens += start
        num_new_tokens = min(len(sequence.token_ids) - start, max_new_tokens)
        has_grown = self._grow(sequence, start + num_new_tokens)
        assert has_grown, f"{named(sequence)} was admitted without room"
        return ScheduledSequence.of(sequence, start, num_new_tokens)

    def _start(self, sequence: Sequence, hit: PrefixHit) -> None:
        track = self._tracks[sequence.sequence_id]
        sequence.tables = self.prefix.share(track.chain, hit)
        sequence.num_computed = hit.num_tokens
        track.capacity = self._needs.capacity(sequence.tables)
        track.end = hit.num_tokens

    def _hit(self, sequence: Sequence) -> PrefixHit:
        """Cached pages that it can start on; its last token is always computed, since that is where logits come from."""
        if not self._asks_cache(sequence):
            return self.prefix.miss()
        chain = self._tracks[sequence.sequence_id].chain
        return self.prefix.match(chain, sequence.token_ids, len(sequence.token_ids) - 1)

    def _is_still_blocked(self, sequence: Sequence) -> bool:
        """Without somebody leaving, claiming less, or more of its prefix, it fits no better than last time."""
        blocked = self._blocked
        if blocked is None or blocked.sequence_id != sequence.sequence_id:
            return False
        if self.pool.num_available > blocked.num_available or self.num_running < blocked.num_running:
            return False
        # Of whole contexts alone, a claim only falls by what was taken; a window's falls as its prompt is computed.
        if self._windows:
            num_claimed = sum(map(self._claim, self._queues.running))
            if self.pool.num_available - num_claimed > blocked.num_available - blocked.num_claimed:
                return False
        if not self._asks_cache(sequence):
            return True
        chain = self._tracks[sequence.sequence_id].chain
        return not self.prefix.holds(chain, blocked.num_known) and self.prefix.num_filled == blocked.num_filled

    def _asks_cache(self, sequence: Sequence) -> bool:
        return self._caches_prefixes and sequence.use_prefix_cache

    def _claim(self, sequence: Sequence) -> int:
        num_owners, longest = self.pool.num_owners, self._tracks[sequence.sequence_id].longest
        return self._needs.claim(
            sequence, sequence.tables, sequence.num_computed, longest, lambda page: num_owners(page) > 1
        )

    def _release_pages(self, sequence: Sequence) -> None:
        self.pool.release_many(by_position(self.groups, sequence.tables))
        # Not cleared in place: a step in flight may still be looking at the old lists.
        sequence.tables = [[] for _ in self.groups]

    def check(self) -> None:
        """All pages accounted for from their owners, every sequence in one place, in order, and within the limits."""
        self.pool.check()
        self.prefix.check()
        self._queues.check()
        running, waiting = self._queues.running, self._queues.waiting
        ids = sorted(sequence.sequence_id for sequence in (*running, *waiting))
        assert ids == sorted(self._tracks), f"queues hold {ids}, tracked are {sorted(self._tracks)}"
        max_num_seqs = self.limits.max_num_seqs
        assert len(running) <= max_num_seqs, f"{len(running)} sequences run, {max_num_seqs=}"
        for sequence in waiting:
            is_idle = not any(sequence.tables) and sequence.num_computed == 0
            assert is_idle, f"{named(sequence)} waits: {sequence.tables=} {sequence.num_computed=}"
        num_owners = [0] * self.pool.num_pages
        for sequence in running:
            self._check_running(sequence)
            for table in sequence.tables:
                for page in table:
                    if page != HOLE:
                        num_owners[page] += 1
        counted = self.pool.owner_counts()
        assert num_owners == counted, f"sequences hold pages {num_owners} times, the pool counts {counted}"

    def _check_running(self, sequence: Sequence) -> None:
        track, tables = self._tracks[sequence.sequence_id], sequence.tables
        most = min(self._needs.capacity(tables), self.limits.max_model_len, len(sequence.token_ids))
        assert sequence.num_computed <= most, f"{named(sequence)} has more computed tokens than {most}"
        pages = [page for table in tables for page in table if page != HOLE]
        assert len(pages) <= track.max_pages, f"{named(sequence)} holds more than {track.max_pages} pages"
        assert len(set(pages)) == len(pages), f"{named(sequence)} holds a page twice"
        for group, table in zip(self.groups, tables, strict=True):
            self._check_table(sequence, group, table)
        num_full, num_registered = sequence.num_computed // self.prefix.block_tokens, track.chain.num_blocks
        assert num_registered <= num_full, f"{named(sequence)}: {num_registered=} blocks, {num_full=}"

    def _check_table(self, sequence: Sequence, group: CacheGroup, table: list[int]) -> None:
        """A state whole, a row in each place, holes behind the window and nowhere else, and no more than the bound."""
        track, num_computed = self._tracks[sequence.sequence_id], sequence.num_computed
        num_places = group.pages_for(track.end)
        assert len(table) == num_places, f"{named(sequence)} has not {num_places} places in {group.name}: {table}"
        first = group.first_page(num_computed)
        is_held = [page != HOLE for page in table]
        assert not any(is_held[:first]), f"{named(sequence)} holds what is behind its {group.name}: {table}"
        assert all(is_held[first:]), f"{named(sequence)} has not what its {group.name} sees from {first=} on: {table}"
        if group.window is not None:
            # Afterwards, when its steps have one token each, this is the window and one page.
            num_step_tokens = max(track.end - num_computed, 1)
            most, num_held = group.most_held(num_step_tokens), sum(is_held)
            assert num_step_tokens <= self.limits.max_num_batched_tokens, f"{named(sequence)}: {num_step_tokens=}"
            assert num_held <= most, f"{named(sequence)} holds {num_held} pages of its {group.name}, at most {most}"
