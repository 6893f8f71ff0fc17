"""Holdings: queues, pages, slots, snapshots and steps in flight of a scheduler, counted and checked; no torch."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

from holdfast.cache.groups import HOLE, CacheGroup, by_position, tokens_again
from holdfast.cache.pages import PagePool
from holdfast.cache.prefix import PrefixCache, can_hit, strong_hash
from holdfast.cache.states import Snapshots, StateRule
from holdfast.config import Limits
from holdfast.engine.page_needs import PageNeeds
from holdfast.engine.queues import Queues, SlotPool, named
from holdfast.engine.tracks import Blocked, Quarantined, Track, check_table
from holdfast.request.sequence import LiveStep, Sequence, SequenceState


class Holdings:
    """What a scheduler holds, without the decisions.

    `groups`: the cache groups of the model; default: one that keeps the whole context.
    `prefix_root`: random bytes, so that clients cannot predict the names of cached pages.
    `num_stages`: stages of a pipeline, and steps in flight with different sequences.
    `is_invariant`: a row is computed alike in every batch; excludes draft tokens.
    `state_rule`: how prompts are cut if the model has states outside the pages.
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
        num_stages: int = 1,
        is_invariant: bool = False,
        state_rule: StateRule | None = None,
    ) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "page_tokens"):
            assert getattr(limits, name) >= 1, f"{name}={getattr(limits, name)}"
        assert limits.sampled_rows >= limits.max_num_seqs, f"{limits.max_sampled_rows=} {limits.max_num_seqs=}"
        assert num_stages >= 1, f"{num_stages=}"
        self.limits = limits
        self.max_queue = max_queue
        self.num_stages = num_stages
        self.is_invariant = is_invariant
        self.groups = tuple(groups) or (CacheGroup("whole context", limits.page_tokens),)
        self.pool = PagePool(num_pages, len(self.groups))
        self.state_rule = state_rule
        self.snapshots = None if state_rule is None else Snapshots(state_rule.num_snapshots)
        grid = 1 if state_rule is None else state_rule.grid
        assert limits.max_num_batched_tokens >= grid or grid == 1, f"{limits.max_num_batched_tokens=} {grid=}"
        self.prefix = PrefixCache(self.pool, self.groups, prefix_root, prefix_hash, snapshots=self.snapshots, grid=grid)
        self._shares = enable_prefix_caching
        self._caches_prefixes = enable_prefix_caching and can_hit(self.groups)
        if state_rule is not None and not state_rule.num_snapshots:
            self._caches_prefixes = False
        self._needs = PageNeeds(limits, num_pages, self.groups)
        self._windows = tuple(index for index, group in enumerate(self.groups) if group.window is not None)
        self._has_states = state_rule is not None or any(group.has_state for group in self.groups)
        self._can_guess = not any(group.has_state for group in self.groups)
        self.tokens_again = tokens_again(self.groups)
        self._queues = Queues()
        self._slots = SlotPool(limits.max_num_seqs)
        self._tracks: dict[int, Track] = {}
        self._blocked: Blocked | None = None
        self._offered: tuple[int, int] | None = None
        """The first waiting sequence and the number of running ones when rows were last reserved for it."""
        self.in_flight: deque[LiveStep] = deque()
        """Steps that are not booked, the oldest first."""
        self._short: Sequence | None = None
        """Sequence of a pipeline that lacks pages; until it is served, no other step is returned."""
        self._quarantine: list[Quarantined] = []
        self._released: list[int] = []
        """Slots that the next step releases."""
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        """Tokens of sequences that could share at their first admission."""
        self.num_prefix_hit_tokens = 0
        """Those of them found on pages, cached or of the same step; for a fork, all but the last token."""
        self.num_snapshot_hits = 0
        """Sequences that started with the state of a snapshot, again after a preemption too."""

    @property
    def has_unlike_rows(self) -> bool:
        """True if rows of a prompt are computed in another way than later rows: a step has one kind of a sequence."""
        return self.is_invariant or self.state_rule is not None

    @property
    def least_rows(self) -> int:
        """Rows that a step must have left for any piece of a prompt."""
        return 1 if self.state_rule is None else self.state_rule.grid

    @property
    def num_waiting(self) -> int:
        return self._queues.num_waiting

    @property
    def num_running(self) -> int:
        return self._queues.num_running

    @property
    def num_decoding(self) -> int:
        """Running sequences whose whole prompt is scheduled."""
        return sum(one.num_scheduled >= one.num_prompt_tokens for one in self._queues.running)

    @property
    def num_in_flight(self) -> int:
        """Steps that are not booked."""
        return len(self.in_flight)

    @property
    def running(self) -> list[Sequence]:
        """Return a copy, in order."""
        return self._queues.running

    @property
    def waiting(self) -> list[Sequence]:
        """Return a copy, in order."""
        return self._queues.waiting

    def first_waiting(self, most: int) -> list[Sequence]:
        """The next waiting sequences, at most `most`."""
        return self._queues.waiting_up_to(most)

    @property
    def kv_usage(self) -> float:
        """Share of the pages that sequences hold, those in quarantine included."""
        return 1.0 - self.pool.num_available / self.pool.num_pages

    def pages_by_group(self) -> dict[str, int]:
        """Pages that sequences hold, by name of the group; a shared page counts once."""
        held: dict[str, int] = {}
        for group, num_owned in zip(self.groups, self.pool.num_owned_by_group, strict=True):
            held[group.name] = held.get(group.name, 0) + num_owned
        return held

    def pages_held(self, sequence: Sequence) -> tuple[int, ...]:
        """Pages of a sequence in each group, shared ones included, without reading its tables."""
        num_kept = sequence.num_kept
        return tuple(
            group.num_held(len(table), num_kept) for group, table in zip(self.groups, sequence.tables, strict=True)
        )

    def check_fits(self, sequence: Sequence) -> None:
        """Raise RequestError for a sequence that can never run."""
        self._needs.max_pages(sequence)

    def _claim(self, sequence: Sequence) -> int:
        num_owners, longest = self.pool.num_owners, self._tracks[sequence.sequence_id].longest
        return self._needs.claim(
            sequence, sequence.tables, sequence.num_kept, longest, lambda page: num_owners(page) > 1
        )

    def _release_pages(self, sequence: Sequence) -> None:
        self.pool.release_many(by_position(self.groups, sequence.tables))
        # Not cleared in place: callers may hold the old lists.
        sequence.tables = [[] for _ in self.groups]

    def release_slot(self, sequence: Sequence, track: Track) -> None:
        """Release its slot, if it has one; the next step sends that if the runner knows it."""
        if sequence.slot >= 0:
            self._slots.put(sequence.slot)
            if track.is_sent:
                self._released.append(sequence.slot)
        track.is_sent = False
        sequence.slot = -1

    def check(self) -> None:
        """Assert that owners account for all pages, and every sequence is in one place, in order, within the limits."""
        self.pool.check()
        self.prefix.check()
        self._queues.check()
        running, waiting = self._queues.running, self._queues.waiting
        ids = sorted(sequence.sequence_id for sequence in (*running, *waiting))
        assert ids == sorted(self._tracks), f"queues hold {ids}, tracked are {sorted(self._tracks)}"
        max_num_seqs = self.limits.max_num_seqs
        assert len(running) <= max_num_seqs, f"{len(running)} sequences run, {max_num_seqs=}"
        for sequence in waiting:
            is_idle = not any(sequence.tables) and sequence.num_kept == sequence.num_scheduled == 0
            is_idle = is_idle and sequence.slot < 0 and sequence.num_coming == 0
            assert is_idle, f"{named(sequence)} waits: {sequence.tables=} {sequence.num_computed=} {sequence.slot=}"
        self._check_in_flight(running)
        for sequence in running:
            self._check_running(sequence)
        num_owners = [0] * self.pool.num_pages
        for tables in (*(sequence.tables for sequence in running), *(held.tables for held in self._quarantine)):
            for table in tables:
                for page in table:
                    if page != HOLE:
                        num_owners[page] += 1
        counted = self.pool.owner_counts()
        assert num_owners == counted, f"sequences hold pages {num_owners} times, the pool counts {counted}"

    def _check_in_flight(self, running: list[Sequence]) -> None:
        """Assert that steps in flight are the latest and add up to what is scheduled and coming."""
        numbers = [step.step.number for step in self.in_flight]
        latest = list(range(self.num_steps - len(numbers) + 1, self.num_steps + 1))
        assert numbers == latest, f"steps {numbers} are in flight, of {self.num_steps}"
        slots = [sequence.slot for sequence in running] + [held.slot for held in self._quarantine]
        self._slots.check([slot for slot in slots if slot >= 0])
        for held in self._quarantine:
            assert held.last_step in numbers, f"slot {held.slot} is kept for step {held.last_step}, of {numbers}"
        ends = {sequence.sequence_id: sequence.num_computed for sequence in running}
        coming = dict.fromkeys(ends, 0)
        for item in (item for step in self.in_flight for item in step.scheduled):
            sequence = item.sequence
            assert sequence.state is not SequenceState.WAITING, f"{named(sequence)} waits and is in flight"
            if sequence.state is SequenceState.RUNNING:
                end = ends[sequence.sequence_id]
                is_alone = self.num_stages == 1 or end == sequence.num_computed
                assert is_alone, f"{named(sequence)} is in two stages of a pipeline"
                assert item.start == end, f"{named(sequence)} has a step in flight from {item.start} on, after {end}"
                ends[sequence.sequence_id] += item.num_new_tokens
                coming[sequence.sequence_id] += item.samples
        for sequence in running:
            is_right = (sequence.num_scheduled, sequence.num_coming) == (
                ends[sequence.sequence_id],
                coming[sequence.sequence_id],
            )
            assert is_right, (
                f"{named(sequence)} has {sequence.num_scheduled=} {sequence.num_coming=}, in flight are "
                f"{coming[sequence.sequence_id]} tokens up to {ends[sequence.sequence_id]}"
            )

    def _check_running(self, sequence: Sequence) -> None:
        track, tables = self._tracks[sequence.sequence_id], sequence.tables
        most = min(self._needs.capacity(tables), self.limits.max_model_len, len(sequence.token_ids))
        assert sequence.num_computed <= most, f"{named(sequence)} has more computed tokens than {most}"
        num_sent = [min(sent, len(table)) for sent, table in zip(track.num_sent, tables, strict=True)]
        assert num_sent == track.num_sent, f"{named(sequence)} has {tables}, sent are {track.num_sent}"
        is_grown = any(sent < len(table) for sent, table in zip(num_sent, tables, strict=True))
        assert track.is_grown >= is_grown, f"{named(sequence)} has new pages in {tables}, sent are {num_sent}"
        pages = [page for table in tables for page in table if page != HOLE]
        assert len(pages) <= track.max_pages, f"{named(sequence)} holds more than {track.max_pages} pages"
        assert len(set(pages)) == len(pages), f"{named(sequence)} holds a page twice"
        for group, table in zip(self.groups, tables, strict=True):
            check_table(sequence, group, table, track.end, self.limits.max_num_batched_tokens)
        assert len(pages) == sum(self.pages_held(sequence)), f"{named(sequence)} holds {pages}, counted otherwise"
        num_full = max(sequence.num_kept, sequence.num_scheduled) // self.prefix.block_tokens
        num_registered = track.chain.num_blocks
        assert num_registered <= num_full, f"{named(sequence)}: {num_registered=} blocks, {num_full=}"
