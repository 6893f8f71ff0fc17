"""Scheduler: who runs next, how many of their tokens, on which pages; first come, first served; no torch.

Laid end to end, running before waiting, the sequences are always sorted by arrival. Admission moves the border one to
the right, preemption one to the left; besides that, sequences only join at the right end and leave from anywhere.

    add() -> [ waiting ... ] --admit--> [ running ... ] --finish()--> gone
                    ^                          |
                    '------- preempt ----------'   the youngest, when an older one needs its pages

**Order.** Every running sequence arrived before every waiting one, and both queues are in order of arrival. Admission
takes the oldest that waits and makes it the youngest that runs; preemption does the reverse. Nothing else moves.

**Admission.** A waiting sequence starts only when its *claim* fits beside the claims of all that run. A claim is the
pages for every token known so far, and one page more where the sequence may ever need it, less what it holds. So
between an admission and the moment a sequence has filled its extra page nobody is preempted: at least a page of tokens
each. In a step that preempted someone nobody is admitted.

**Preemption frees memory at once.** A sequence computes at least one page itself when it is admitted, and such a page
can be shared only with sequences admitted later, which are preempted first. So each preemption makes pages available.

**Liveness.** The oldest sequence advances by at least one token in every step, so N sequences finish within
N * max_model_len steps once they stop arriving:
1. If it waits, nothing runs (order), so every page is available, and add() has checked that its claim fits: admitted.
2. If it runs, it is served first, with the whole token budget. If a page is missing, those behind it are preempted; at
   the latest when it is alone every page that it does not hold is available, and add() has checked that these suffice.
3. It is never preempted, because only the youngest is, and only for one that is at least as old.
This needs a caller that finishes a sequence once it has max_tokens of output, or got no token where it should have.
"""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from holdfast.cache.pages import PagePool
from holdfast.cache.prefix import PrefixCache, PrefixChain, PrefixEntry, strong_hash
from holdfast.config import Limits
from holdfast.errors import QueueFullError, RequestError
from holdfast.request.sequence import ScheduledSequence, Sequence, SequenceState, Step


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """The arithmetic of one engine: its limits and its number of pages."""

    limits: Limits
    num_pages: int

    def pages_for(self, num_tokens: int) -> int:
        """Pages that the first `num_tokens` of a sequence occupy."""
        return -(-num_tokens // self.limits.page_tokens)

    def claim(self, sequence: Sequence, max_pages: int) -> int:
        """Pages that it should still find: for every token known so far, and one more where it may ever need that."""
        wanted = min(self.pages_for(len(sequence.token_ids)) + 1, max_pages)
        return max(wanted - len(sequence.pages), 0)

    def max_pages(self, sequence: Sequence) -> int:
        """Pages that it holds at its longest (its last token is never computed); refuses one that can never run."""
        num_tokens, max_model_len = len(sequence.token_ids), self.limits.max_model_len
        if not 1 <= num_tokens <= max_model_len:
            raise RequestError(
                f"a sequence of {num_tokens} tokens was asked",
                f"1 to max_model_len={max_model_len} work",
                "change the prompt or max_model_len",
            )
        longest = max(sequence.num_prompt_tokens + sequence.max_tokens - 1, num_tokens)
        max_pages = self.pages_for(min(longest, max_model_len))
        if max_pages > self.num_pages:
            raise RequestError(
                f"{sequence.num_prompt_tokens} prompt and {sequence.max_tokens} output tokens were asked",
                f"the KV cache holds {self.num_pages * self.limits.page_tokens} tokens",
                "shorten the prompt, lower max_tokens or give the KV cache more memory",
            )
        return max_pages


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
        is_new = sequence not in self and sequence.state is SequenceState.WAITING and not sequence.pages
        assert is_new, f"{named(sequence)} is not new: {sequence.state} {sequence.pages=}"
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

    max_pages: int
    """Pages that it holds at its longest."""
    chain: PrefixChain


@dataclass(frozen=True, slots=True)
class Blocked:
    """The front of the queue did not fit; while none of this changes it need not be tried again."""

    sequence_id: int
    num_available: int
    num_running: int
    num_hit_pages: int


class Scheduler:
    """Decides each step. One thread: schedule(), run the model, complete(); add() and finish() at any moment between.

    `prefix_root` should be random bytes, so that nobody outside can predict the names of cached pages.
    """

    def __init__(
        self,
        limits: Limits,
        num_pages: int,
        enable_prefix_caching: bool,
        max_queue: int,
        *,
        prefix_root: bytes = b"",
        prefix_hash: Callable[[bytes], bytes] = strong_hash,
    ) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "page_tokens"):
            assert getattr(limits, name) >= 1, f"{name}={getattr(limits, name)}"
        self.limits = limits
        self.max_queue = max_queue
        self.pool = PagePool(num_pages)
        self.prefix = PrefixCache(self.pool, limits.page_tokens, prefix_root, prefix_hash)
        self._caches_prefixes = enable_prefix_caching
        self._needs = PageNeeds(limits, num_pages)
        self._queues = Queues()
        self._tracks: dict[int, Track] = {}
        self._blocked: Blocked | None = None
        self._step: Step | None = None
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

    def add(self, sequence: Sequence) -> None:
        """Appends a new sequence to the queue, or refuses one that can never run or that finds the queue full."""
        max_pages = self._needs.max_pages(sequence)
        if self.num_waiting >= self.max_queue:
            raise QueueFullError(
                "one more request was asked", f"{self.num_waiting} wait already", "try again later or raise max_queue"
            )
        self._queues.append(sequence)
        self._tracks[sequence.sequence_id] = Track(max_pages, self.prefix.chain(sequence.cache_salt))

    def schedule(self) -> Step:
        """The next step: running sequences in order of arrival, then waiting ones as far as limits and pages allow."""
        scheduled: list[ScheduledSequence] = []
        budget = self.limits.max_num_batched_tokens
        max_model_len, page_tokens = self.limits.max_model_len, self.limits.page_tokens
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
            if end > len(sequence.pages) * page_tokens and not self._grow(sequence, end):
                break
            scheduled.append(ScheduledSequence(sequence, start, num_new_tokens))
            budget -= num_new_tokens
        if self.num_waiting and self.num_preemptions == num_preemptions:
            self._admit_waiting(scheduled, budget)
        self._step = Step(tuple(scheduled))
        return self._step

    def complete(self, step: Step, token_ids: SequenceABC[int | None]) -> None:
        """Books a step that has run: its tokens are computed, and each sampled one is appended.

        `token_ids` has one entry for each scheduled sequence; None where none was sampled. Sequences that were finished
        since schedule() are passed over.
        """
        assert step is self._step, "only the latest step can be completed, and only once"
        assert len(token_ids) == len(step.scheduled), f"{len(token_ids)} tokens for {len(step.scheduled)} sequences"
        self._step = None
        page_tokens = self.limits.page_tokens
        for item, token_id in zip(step.scheduled, token_ids, strict=True):
            sequence = item.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue
            num_computed = item.start + item.num_new_tokens
            if self._caches_prefixes and num_computed // page_tokens > item.start // page_tokens:
                chain = self._tracks[sequence.sequence_id].chain
                self.prefix.register(chain, sequence.token_ids, sequence.pages, num_computed)
            sequence.num_computed = num_computed
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
        num_pages = self._needs.pages_for(num_tokens)
        max_pages = self._tracks[sequence.sequence_id].max_pages
        assert num_pages <= max_pages, f"{named(sequence)} goes on after max_tokens: {num_pages=} {max_pages=}"
        num_missing = num_pages - len(sequence.pages)
        while num_missing > self.pool.num_available:
            if self._preempt_youngest() is sequence:
                return False
        after = sequence.pages[-1] if sequence.pages else None
        num_expected = self._needs.pages_for(len(sequence.token_ids)) - len(sequence.pages)
        sequence.pages += self.pool.allocate_many(num_missing, after, num_expected)
        return True

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
            hits = self._hits(sequence)
            # Hits save pages, but those that nobody owns were counted as available.
            num_revived = sum(self.pool.num_owners(entry.page) == 0 for entry in hits)
            if claims + self._claim(sequence) - len(hits) + num_revived > self.pool.num_available:
                self._blocked = Blocked(
                    sequence.sequence_id, self.pool.num_available, self.num_running, num_hit_pages=len(hits)
                )
                return
            item = self._admit(sequence, hits, budget)
            scheduled.append(item)
            budget -= item.num_new_tokens
            claims += self._claim(sequence)

    def _admit(self, sequence: Sequence, hits: list[PrefixEntry], max_new_tokens: int) -> ScheduledSequence:
        self._queues.admit()
        self._blocked = None
        sequence.pages = self.prefix.share(self._tracks[sequence.sequence_id].chain, hits)
        start = sequence.num_computed = len(hits) * self.limits.page_tokens
        if self._asks_cache(sequence) and sequence.num_preemptions == 0:
            sequence.num_cached_tokens = start
            self.num_prefix_query_tokens += len(sequence.token_ids)
            self.num_prefix_hit_tokens += start
        num_new_tokens = min(len(sequence.token_ids) - start, max_new_tokens)
        has_grown = self._grow(sequence, start + num_new_tokens)
        assert has_grown, f"{named(sequence)} was admitted without room"
        return ScheduledSequence(sequence, start, num_new_tokens)

    def _hits(self, sequence: Sequence) -> list[PrefixEntry]:
        """Cached pages that it can start on; its last token is always computed, since that is where logits come from."""
        if not self._asks_cache(sequence):
            return []
        chain = self._tracks[sequence.sequence_id].chain
        return self.prefix.match(chain, sequence.token_ids, len(sequence.token_ids) - 1)

    def _is_still_blocked(self, sequence: Sequence) -> bool:
        """Without somebody leaving, and without another page of its prefix, it fits no better than last time."""
        blocked = self._blocked
        if blocked is None or blocked.sequence_id != sequence.sequence_id:
            return False
        if self.pool.num_available > blocked.num_available or self.num_running < blocked.num_running:
            return False
        chain = self._tracks[sequence.sequence_id].chain
        return not (self._asks_cache(sequence) and self.prefix.holds(chain, blocked.num_hit_pages))

    def _asks_cache(self, sequence: Sequence) -> bool:
        return self._caches_prefixes and sequence.use_prefix_cache

    def _claim(self, sequence: Sequence) -> int:
        return self._needs.claim(sequence, self._tracks[sequence.sequence_id].max_pages)

    def _release_pages(self, sequence: Sequence) -> None:
        self.pool.release_many(sequence.pages)
        # Not cleared in place: a step in flight may still be looking at the old list.
        sequence.pages = []

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
            is_idle = not sequence.pages and sequence.num_computed == 0
            assert is_idle, f"{named(sequence)} waits: {sequence.pages=} {sequence.num_computed=}"
        num_owners = [0] * self.pool.num_pages
        for sequence in running:
            self._check_running(sequence)
            for page in sequence.pages:
                num_owners[page] += 1
        counted = self.pool.owner_counts()
        assert num_owners == counted, f"sequences hold pages {num_owners} times, the pool counts {counted}"

    def _check_running(self, sequence: Sequence) -> None:
        track, num_pages = self._tracks[sequence.sequence_id], len(sequence.pages)
        most = min(num_pages * self.limits.page_tokens, self.limits.max_model_len, len(sequence.token_ids))
        assert sequence.num_computed <= most, f"{named(sequence)} has more computed tokens than {most}"
        assert num_pages <= track.max_pages, f"{named(sequence)} holds more than {track.max_pages} pages"
        assert len(set(sequence.pages)) == num_pages, f"{named(sequence)} holds a page twice"
        num_full, num_registered = sequence.num_computed // self.limits.page_tokens, track.chain.num_pages
        assert num_registered <= num_full, f"{named(sequence)}: {num_registered=} pages, {num_full=}"
