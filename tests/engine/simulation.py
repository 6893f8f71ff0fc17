"""A seeded simulator: the real Scheduler, hostile clients, a fake model, and a shadow of the KV cache.

The fake model: the value of a position is a mix of the value at the position before it, *as read back from the page
that should hold it*, and its token. The next token is a function of the last value. So whatever goes wrong with pages
(a page handed out twice, reused too early, shared by mistake, never computed) changes what is read, and what is read
is compared with the truth at every position that attention would touch, in every group, in every step. The salt is
mixed in too, so a page that crosses salts is a wrong read. Pages that no sequence holds or may find are poisoned. States
outside the pages are compared with the truth whenever a sequence goes on.
"""

import sys
from array import array
from collections import Counter, deque
from collections.abc import Sequence as SequenceABC
from hashlib import sha256
from random import Random
from time import process_time

from engine.fake_device import FakeDevice
from engine.shadow import Shadow, Truth
from engine.simulated_world import VOCABULARY, Client, World, colliding_hash, first_value, solo_run
from holdfast.cache.groups import HOLE, tokens_again
from holdfast.cache.prefix import strong_hash
from holdfast.engine.scheduler import Scheduler
from holdfast.engine.sharing import hit_start
from holdfast.errors import QueueFullError, RequestError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence, SequenceState
from holdfast.request.step import RowCopy
from request.frames import decode_step, encode_step

SALTS = (b"", b"", b"a", b"b")
PARAMS = SamplingParams()
PRIORITIES = {number: SamplingParams(priority=number) for number in (-3, 0, 0, 1, 7)}


def rank(sequence: Sequence) -> tuple[int, int]:
    """What comes first of two sequences has the lower one."""
    return sequence.params.priority, sequence.sequence_id


class WatchedScheduler(Scheduler):
    """Scheduler that tries each admission again that it leaves out, and counts what each preemption frees."""

    has_priorities = False

    def preempt_last(self) -> Sequence:
        before, holds_any = self.pool.num_available, any(self.running[-1].tables)
        sequence = super().preempt_last()
        # A sequence that starts anew holds nothing, nor does a window of one token at the end of a page. A more important
        # sequence may share the pages.
        may_free_none = not holds_any or self.has_priorities or all(group.window == 1 for group in self.groups)
        assert may_free_none or self.pool.num_available > before, f"{sequence.sequence_id} gave way for nothing"
        return sequence

    def is_still_blocked(self, sequence: Sequence) -> bool:
        is_blocked = super().is_still_blocked(sequence)
        if is_blocked:
            num_left = self.pool.num_available - sum(map(self._claim, self.running))
            for hit in (self.hit(sequence), self.prefix.miss()) if self._windows else (self.hit(sequence),):
                num_taken = self._num_taken(sequence, hit_start(hit, self.tokens_again))
                assert num_taken > num_left, f"{sequence.sequence_id} fits on {hit.num_tokens} tokens and waits"
        return is_blocked


class Simulation:
    """One world from its seed. `run` raises AssertionError at the first thing that is wrong."""

    def __init__(self, seed: int, world: World | None = None) -> None:
        self.world = world or World.from_seed(seed)
        self.groups, self.block = self.world.groups, self.world.block
        self.rng = Random(f"events {seed}")
        limits = self.world.limits
        self.scheduler = WatchedScheduler(
            limits,
            self.world.num_pages,
            self.world.caches_prefixes,
            self.world.max_queue,
            groups=self.groups,
            prefix_root=seed.to_bytes(8, "big"),
            prefix_hash=colliding_hash if self.world.collides else strong_hash,
            num_stages=self.world.num_stages,
            is_invariant=self.world.is_invariant,
            state_rule=self.world.state_rule,
        )
        self.scheduler.has_priorities = self.world.has_priorities
        self.shadow = Shadow(self.world.shadows, self.world.num_pages)
        self.page_epochs = [-1] * self.world.num_pages
        self._writer_of = [0] * self.world.num_pages
        """The step that last writes each page."""
        self._forks: dict[int, Sequence] = {}
        """By the last schedule(): those that fork, and from whom."""
        self._copies: dict[int, tuple[RowCopy, ...]] = {}
        """By the last schedule(): rows that those who start get copies of."""
        self.epoch = 0
        self.alive: dict[int, Client] = {}
        """In order of arrival."""
        self.clients: dict[int, Client] = {}
        """Those that are gone too."""
        self.flights: deque[LiveStep] = deque()
        self.late_rng = Random(f"late events {seed}")
        self.priority_rng = Random(f"priorities {seed}")
        self.pace_rng = Random(f"pace {seed}")
        self._limit: int | None = None
        """On the rows of prompts in the last schedule()."""
        self.device = FakeDevice(self.world, self.shadow, self.clients.__getitem__, self._see_pages, self.late_rng)
        self.history: list[list[int]] = []
        longest = max(limits.max_model_len, 1)
        self.bases = [[self.rng.randrange(VOCABULARY) for _ in range(longest)] for _ in range(2)]
        self.counts: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        """What is no event of its own."""
        self.worst_preemptions = 0
        self.num_hit_tokens = 0
        self._admitted: set[int] = set()
        """By the last schedule()."""
        self._num_ran = 0
        """Before the last schedule()."""
        self._safe: dict[int, int] = {}
        """For each that ran after the last admission: tokens without a preemption."""
        self.evict = self.scheduler.pool.on_evict
        self.scheduler.pool.on_evict = self._see_eviction
        self._trace = sha256()
        self._num_sequences = 0

    @property
    def num_events(self) -> int:
        return self.counts.total()

    @property
    def num_reads(self) -> int:
        return self.shadow.num_reads

    @property
    def digest(self) -> str:
        """Digest of every decision of the scheduler."""
        return self._trace.hexdigest()

    def run(self, num_events: int) -> None:
        """Random events, then no more arrivals: all that is left has to finish within the promised bound."""
        rng = self.rng
        while self.num_events < num_events:
            for _ in range(rng.choice((0, 0, 0, 1) if self.world.comes_together else (0, 1, 1, 2, 3))):
                if self.scheduler.num_waiting < self.world.max_queue or rng.random() < 0.1:
                    self.arrive()
            if self.world.comes_together and self.scheduler.num_waiting < 5 and rng.random() < 0.3:
                self.arrive_together()
            if rng.random() < self.world.abort_share:
                self.abort()
            if rng.random() < 0.01:
                self.reset()
            self.step()
        max_steps = len(self.alive) * self.world.limits.max_model_len * (1 + self.world.run_ahead)
        if self.world.has_priorities:
            max_steps *= 2
        for _ in range(max_steps + 1 + self.world.run_ahead):
            if not self.alive and not self.flights:
                break
            self.step(interrupted=False)
        assert not self.alive, f"{len(self.alive)} sequences are left after {max_steps} steps without arrivals"
        scheduler = self.scheduler
        left = (scheduler.num_waiting, scheduler.num_running, scheduler.pool.num_available)
        assert left == (0, 0, self.world.num_pages), f"waiting, running, free pages at the end: {left}"
        counted, seen = scheduler.num_preemptions, self.counts["preempt"]
        assert counted == seen, f"the scheduler counts {counted} preemptions of {seen}"

    def arrive(self, client: Client | None = None) -> None:
        """A client asks; it is refused exactly when it has to be."""
        client = client or self._random_client()
        sequence, limits = client.sequence, self.world.limits
        longest = min(sequence.num_prompt_tokens + sequence.max_tokens - 1, limits.max_model_len)
        cannot_run = sequence.num_tokens > limits.max_model_len
        cannot_run |= self.world.most_pages(longest) > self.world.num_pages
        is_full = self.scheduler.num_waiting >= self.world.max_queue
        try:
            self.scheduler.add(sequence)
        except QueueFullError:
            assert is_full, f"queue full at {self.scheduler.num_waiting} of {self.world.max_queue}"
            self.counts["queue full"] += 1
        except RequestError:
            assert cannot_run, f"{sequence} is refused without need"
            self.counts["refuse"] += 1
        else:
            assert not is_full, f"{self.scheduler.num_waiting} wait, {self.world.max_queue=}"
            assert not cannot_run, f"{longest} tokens taken in, which can never run"
            self.alive[sequence.sequence_id] = client
            self.counts["arrive"] += 1

    def arrive_together(self) -> None:
        """Add two to eight sequences with one prompt or one beginning; a few have another salt or must not share."""
        rng, longest = self.rng, self.world.limits.max_model_len
        first = self._random_client()
        prompt, salt = first.prompt[:longest], first.sequence.cache_salt
        self.arrive(first)
        for _ in range(rng.randint(1, 7)):
            own = list(prompt)
            if rng.random() < 0.3:
                own[rng.randrange(len(own)) :] = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
            most = max(longest - len(own), 1)
            max_tokens = min(rng.choice((1, self.block, self.block + 1, 4 * self.block)), most)
            other = rng.choice(SALTS) if rng.random() < 0.15 else salt
            client = self.new_client(own, max_tokens, other, use_prefix_cache=rng.random() < 0.95)
            self._set_end(client)
            self.arrive(client)
            if rng.random() < self.world.abort_share / 4:
                self.abort()
        self.seen["bursts"] += 1

    def abort(self) -> None:
        """A client goes away: any one, in any state, sometimes twice."""
        if not self.alive:
            return
        self._leave(self.alive[self.rng.choice(list(self.alive))])
        self.counts["abort"] += 1

    def reset(self) -> None:
        """The weights change, say: nothing computed before may be found by those who come after."""
        self.scheduler.reset_prefix_cache()
        self.epoch += 1
        self.counts["reset"] += 1
        self.scheduler.check()

    def step(self, interrupted: bool = True) -> None:
        """One round of the engine: launch ahead, book the oldest, with aborts, resets and failures at the worst moment."""
        rng, scheduler, late = self.rng, self.scheduler, self.late_rng
        self._stop_late()
        while len(self.flights) <= self.world.run_ahead:
            self._limit = self.pace_rng.choice((None, 0, 0, 1, 2, 3, 5, 9)) if self.world.is_paced else None
            step = scheduler.schedule(self.propose if self.world.guess_share else None, self._limit)
            self.see_schedule(step)
            if step is None or not step.scheduled:
                break
            if interrupted and self.world.is_late and late.random() < self.world.abort_share / 2:
                self.abort()
        self.device.run(late.randint(0, len(self.flights)) if self.world.is_late else 1)
        step = self.flights[0] if self.flights else LiveStep(())
        self.counts["step"] += 1
        if interrupted and rng.random() < self.world.abort_share:
            for _ in range(rng.choice((1, 1, 2))):
                self.abort()
            if rng.random() < 0.02:
                self.reset()
            scheduler.check()
            if rng.random() < 0.05:
                self.forget()
                return
        if self.flights:
            self.collect(step)
        scheduler.check()

    def forget(self) -> None:
        """Everything in flight is dropped, though some of it may have run."""
        self.counts["failed step"] += 1
        self.device.cancel()
        self.scheduler.forget_steps()
        has_states = self.world.state_rule is not None or any(group.has_state for group in self.groups)
        num_booked = self.scheduler.num_steps - len(self.flights)
        for item in (item for step in self.flights for item in step.scheduled):
            client = self.clients[item.sequence.sequence_id]
            is_alive, client.num_flying, client.num_coming = client.num_final is None, 0, 0
            if not is_alive:
                client.is_placed = False
            elif (has_states or client.basis > num_booked) and not client.is_anew:
                # A step that was never completed takes everything from those that it ran.
                client.num_lost += client.num_held
                client.is_anew, client.is_placed, client.epoch = True, False, self.epoch
                self._safe.clear()
        self.flights.clear()
        self.scheduler.check()

    def collect(self, step: LiveStep) -> None:
        """Books the oldest step."""
        chosen = self.device.collect()
        self._record(step, chosen)
        failed = [index for index, tokens in enumerate(chosen) if tokens and self.rng.random() < 0.01]
        for index in failed:
            chosen[index] = ()
        self.flights.popleft()
        self.scheduler.complete(step, chosen)
        self._check_sources()
        self._see_results(step, chosen, failed)

    def propose(self, sequence: Sequence) -> list[int]:
        """What may follow, right or not; more than anybody may use."""
        client, late = self.clients[sequence.sequence_id], self.late_rng
        num_tokens = sequence.num_tokens
        assert client.num_coming == 0, f"{sequence} drafts after unknown tokens"
        client.learn(num_tokens + 6)
        guesses = client.tokens[num_tokens : num_tokens + late.choice((0, 1, 2, 4, 6))]
        if guesses and late.random() < 0.5:
            guesses[late.randrange(len(guesses))] = late.randrange(VOCABULARY)
        client.guesses = tuple(guesses)
        return guesses

    def see_schedule(self, step: LiveStep | None, waits: bool = True) -> None:
        """Checks what schedule() decided, then launches it; `waits`: those that may speculate wait for their tokens."""
        if step is None:
            assert self.flights, "nothing is in flight, and nothing is scheduled"
            self.seen["drain"] += 1
        items = () if step is None else step.scheduled
        number = 0 if step is None else step.step.number
        for item in items:
            client = self.alive[item.sequence.sequence_id]
            if not client.is_running:
                client.epoch = self.epoch
            for page in self._written(item):
                self._writer_of[page], self.page_epochs[page] = number, client.epoch
        self._forks = {item.sequence.sequence_id: item.source for item in items if item.source is not None}
        self._copies = {one.sequence_id: one.copies for one in step.step.admitted} if step is not None else {}
        self._see_changes(items)
        self._check_step(step, waits)
        self.shadow.poison(self.scheduler.pool.owner_counts(), self.scheduler.pool.kept_pages())
        if step is None or not items:
            return
        for item in items:
            client = self.alive[item.sequence.sequence_id]
            client.num_flying += item.num_new_tokens
            client.num_coming += item.samples
            client.is_placed = True
        self._check_snapshots(step)
        self.flights.append(step)
        reported = step.step
        if self.world.travels:
            reported = decode_step(encode_step(reported))
            assert reported == step.step, f"{step.step} came as {reported}"
        self.device.launch(reported)
        self._check_mirror(items)
        self._check_sources()

    def book(self, client: Client, item: ScheduledSequence, tokens: tuple[int, ...]) -> None:
        """Enters what a completed step did for a client, and looks whether the sequence has just that."""
        num_accepted = max(len(tokens) - 1, 0)
        client.num_given += len(tokens)
        client.num_run += item.num_new_tokens - len(item.proposals) + num_accepted
        self.seen["proposals"] += len(item.proposals)
        self.seen["accepted"] += num_accepted
        self._check_account(client)

    def check_against_solo(self, client: Client) -> None:
        """A sequence's tokens are those that it would have had alone."""
        sequence = client.sequence
        solo = solo_run(client.prompt, sequence.cache_salt, sequence.num_tokens)
        assert sequence.token_ids == solo, f"{sequence} differs from its solo run {solo}"

    def _finish(self, sequence: Sequence) -> None:
        for _ in range(self.rng.choice((1, 1, 2))):
            self.scheduler.finish(sequence)
        assert sequence.state is SequenceState.FINISHED, f"{sequence} is not finished"
        assert not any(sequence.tables), f"{sequence} is finished and holds pages"
        self._safe.pop(sequence.sequence_id, None)
        self.worst_preemptions = max(self.worst_preemptions, sequence.num_preemptions)
        self.history = [*self.history[-7:], list(sequence.token_ids)]

    def _random_client(self) -> Client:
        rng, limits = self.rng, self.world.limits
        page, longest = self.block, limits.max_model_len
        nasty = (1, page - 1, page, page + 1, 2 * page, 2 * page + 1, 3 * page + 1, 4 * page + 2)
        length = rng.choice((*nasty, *nasty, *nasty, rng.randint(1, longest), longest))
        length = min(max(length, 1), longest)
        # Prefixes that every group can serve are rarer, so there more of the prompts have one.
        kind = rng.random() * (1.0 if len(self.groups) == 1 else 0.8)
        if kind < 0.5 or not self.history:
            prompt = rng.choice(self.bases)[:length]
        elif kind < 0.6:  # the same second page behind another first one
            prompt = [rng.randrange(VOCABULARY), *rng.choice(self.bases)[1:length]]
        elif kind < 0.7:
            prompt = rng.choice(self.bases)[: length // 2]
            prompt += [rng.randrange(VOCABULARY) for _ in range(length - len(prompt))]
        else:
            prompt = rng.choice(self.history)[: rng.choice((length, longest))]
        if rng.random() < 0.01:
            prompt += [0] * (longest + 1 - len(prompt))
        room = max(longest - len(prompt), 1)
        capacity = self.world.num_pages * page - len(prompt) + 1
        max_tokens = min(rng.choice((1, page, page + 1, 4 * page, max(capacity, 1), longest)), room)
        salt = rng.choice(SALTS if len(self.groups) == 1 else SALTS[:3])
        client = self.new_client(prompt, max_tokens, salt, use_prefix_cache=rng.random() < 0.9)
        self._set_end(client)
        return client

    def _set_end(self, client: Client) -> None:
        """Decide how many tokens a client takes, how late that is learned, and whether it speculates."""
        max_tokens = client.sequence.max_tokens
        if self.rng.random() >= self.world.long_share:
            client.num_outputs = self.rng.randint(1, min(max_tokens, 6))
        if self.world.is_late:
            late = self.late_rng
            if late.random() < 0.3:  # ends by an unforeseen token
                client.num_outputs = late.randint(1, max_tokens)
            client.lag = late.choice((0, 0, 1, 3))
            client.sequence.may_speculate = late.random() < self.world.guess_share

    def new_client(self, prompt: list[int], max_tokens: int, salt: bytes, use_prefix_cache: bool) -> Client:
        """A client that takes all its tokens, with a sequence number of its own."""
        sequence = Sequence(
            sequence_id=self._num_sequences,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=self._random_params(),
            seed=0,
            max_tokens=max_tokens,
            cache_salt=salt,
            use_prefix_cache=use_prefix_cache,
        )
        self._num_sequences += 1
        truth = Truth(self.world.shadows, self.world.state_rule, len(prompt))
        client = Client(sequence, prompt, max_tokens, truth, last_value=first_value(salt))
        self.clients[sequence.sequence_id] = client
        return client

    def _random_params(self) -> SamplingParams:
        if not self.world.has_priorities:
            return PARAMS
        return PRIORITIES[self.priority_rng.choice(tuple(PRIORITIES))]

    def _written(self, item: ScheduledSequence) -> list[int]:
        """Pages that a step writes for a sequence."""
        sequence = item.sequence
        first = sequence.num_stored if item.source is not None else max(item.start, sequence.num_stored)
        pages: list[int] = []
        for group, table in zip(self.groups, sequence.tables, strict=True):
            own = table if group.is_state else table[first // group.page_tokens :]
            pages += [page for page in own if page != HOLE]
        return pages

    def _see_changes(self, items: SequenceABC[ScheduledSequence]) -> None:
        """Who was admitted, with which hits, and who was preempted by the schedule() that just ran."""
        in_step = {item.sequence.sequence_id for item in items}
        ran = [client.sequence for client in self.alive.values() if client.is_running]
        self._num_ran = len(ran)
        victims: list[Sequence] = []
        num_preempted, num_admitted = self.counts["preempt"], 0
        self._admitted.clear()
        for sequence_id, client in self.alive.items():
            sequence = client.sequence
            is_running = sequence.state is SequenceState.RUNNING
            if sequence.num_preemptions != client.num_preemptions:
                assert sequence.num_preemptions == client.num_preemptions + 1, f"{sequence} preempted twice at once"
                assert client.is_running, f"{sequence} was preempted and did not run"
                assert not is_running, f"{sequence} runs in the step that preempted it"
                assert sequence_id not in in_step, f"{sequence} was preempted and is in the step"
                assert not self.flights, f"{sequence} was preempted with {len(self.flights)} steps in flight"
                client.num_preemptions += 1
                client.is_placed = False
                client.num_lost += client.num_held
                victims.append(sequence)
                self.counts["preempt"] += 1
            elif is_running and not client.is_running:
                assert sequence_id in in_step, f"{sequence} was admitted and does not run"
                self._admitted.add(sequence_id)
                num_admitted += 1
                self._check_hit(sequence)
                client.basis = self._basis(sequence)
                client.num_found += sequence.num_computed
                self.num_hit_tokens += sequence.num_computed
                self.counts["share"] += sequence.num_computed > 0
            else:
                assert is_running == client.is_running, f"{sequence} changed sides without a reason"
            client.is_anew = False
            client.is_running = is_running
            self._check_account(client)
        self._check_victims(victims)
        if self.counts["preempt"] > num_preempted:
            assert not num_admitted, f"{num_admitted} were admitted in a step that preempted"
            has_outgrown = any(one.num_tokens > self._safe.get(one.sequence_id, 0) for one in ran)
            assert has_outgrown, f"preempted though none of {self._safe} has outgrown what admission promised"
        if num_admitted:
            smallest = min((group.page_tokens for group in self.groups if not group.is_state), default=0)
            # What this step itself brings is not part of the promise.
            self._safe = {
                one.sequence_id: one.num_tokens + self.clients[one.sequence_id].num_coming + smallest
                for one in self.scheduler.running
            }

    def _basis(self, sequence: Sequence) -> int:
        """The latest step in flight, or about to be, that computes what a sequence starts on; 0: none."""
        if sequence.sequence_id in self._forks or self._copies.get(sequence.sequence_id):
            return self.scheduler.num_steps
        num_booked = self.scheduler.num_steps - len(self.flights) - 1
        start = max(sequence.num_computed, sequence.num_stored)
        steps = [
            self._writer_of[page]
            for group, table in zip(self.groups, sequence.tables, strict=True)
            for page in (() if group.is_state else table[: start // group.page_tokens])
            if page != HOLE
        ]
        return max((step for step in steps if step > num_booked), default=0)

    def _check_victims(self, victims: list[Sequence]) -> None:
        """A preempted sequence is less important or younger than all that stayed; an admitted one the reverse."""
        running = [one.sequence for one in self.alive.values() if one.is_running]
        waiting = [one.sequence for one in self.alive.values() if not one.is_running]
        if victims and running:
            first, last = min(map(rank, victims)), max(map(rank, running))
            assert last < first, f"{first} gave way, and {last} stayed"
        admitted = [one for one in running if one.sequence_id in self._admitted]
        if admitted and waiting:
            last, first = max(map(rank, admitted)), min(map(rank, waiting))
            assert last < first, f"{last} was admitted before {first}"

    def _see_eviction(self, page: int) -> None:
        """A page of a window leaves a hole: its entry stays, as long as it is of use."""
        prefix = self.scheduler.prefix
        entry = prefix.by_page[page]
        is_window = not prefix.is_whole[entry.slots.index(page)]
        num_left, has_children = entry.num_pages - 1, bool(entry.children)
        self.evict(page)
        if is_window and (num_left or has_children):
            assert entry.is_registered, f"page {page} of a window took its entry with it"

    def _check_account(self, client: Client) -> None:
        """Nothing that was given or computed is gone, or there twice: a model that says the same again would hide it."""
        sequence, num_tokens = client.sequence, len(client.prompt) + client.num_given
        assert sequence.num_tokens == num_tokens, f"{sequence} has not the {client.num_given} outputs that it was given"
        assert sequence.num_computed == client.num_held, (
            f"{sequence} has not the {client.num_held} positions of its account"
        )

    def _check_mirror(self, items: SequenceABC[ScheduledSequence]) -> None:
        """In the device's slots are those who run and those who have something in flight, with the pages they have here."""
        held = {slot: one.sequence_id for slot, one in self.device.slots.items()}
        placed = {client.sequence.slot: number for number, client in self.alive.items() if client.is_placed}
        found = {slot: number for slot, number in held.items() if number in self.alive}
        assert found == placed, f"the device has {found} in its slots, they are in {placed}"
        for number in held.values():
            client = self.clients[number]
            assert client.num_final is None or client.num_flying, f"the device has no release for {number} has ended"
        for item in items:
            tables = self.device.slots[item.sequence.slot].tables
            for group, table, own in zip(self.groups, tables, item.sequence.tables, strict=True):
                same = [page for page, right in zip(table, own, strict=False) if right in (HOLE, page)]
                is_same = len(table) == len(own) == len(same)
                assert is_same, f"{item.sequence} has other pages in its slot: {group.name} {table}"

    def _check_hit(self, sequence: Sequence) -> None:
        start = max(sequence.num_computed, sequence.num_stored)
        if sequence.sequence_id in self._forks:
            self._check_fork(sequence, self._forks[sequence.sequence_id])
            return
        assert start % self.block == 0, f"{sequence} starts inside a page"
        resumed = max(start - tokens_again(self.groups), 0)
        assert sequence.num_computed == resumed, f"{sequence} does not begin with what its state is made of"
        for group in self.groups:
            is_anew = start == 0 or not group.is_state or (group.state_period and start % group.state_period == 0)
            assert is_anew, f"{sequence} starts inside a state"
        assert start < sequence.num_tokens, f"{sequence} has nothing left to compute"
        may_hit = sequence.use_prefix_cache and self.world.can_hit
        assert may_hit or start == 0, f"{sequence} must not use cached pages"
        if sequence.num_preemptions == 0:
            assert sequence.num_cached_tokens == start, f"{sequence} reports the wrong hits"
        pages = [
            page
            for group, table in zip(self.groups, sequence.tables, strict=True)
            for page in (() if group.is_state else table[: start // group.page_tokens])
            if page != HOLE
        ]
        pages += self._check_copies(sequence, start)
        ages = [self.page_epochs[page] for page in pages]
        assert all(age == self.epoch for age in ages), f"{sequence} hits pages from before a reset: {ages=}"

    def _check_copies(self, sequence: Sequence, start: int) -> list[int]:
        """It gets all rows of the pages that it starts inside, on its own pages; where they are copied from."""
        copies, needed = self._copies.get(sequence.sequence_id, ()), list[tuple[int, int, int]]()
        for index, (own, table) in enumerate(zip(self.world.shadows, sequence.tables, strict=True)):
            group = own.group
            num_rows = 0 if group.is_state else start % group.page_tokens // own.ratio
            if num_rows:
                needed.append((index, table[start // group.page_tokens], num_rows))
        given = [(copy.group, copy.target, copy.num_rows) for copy in copies]
        assert given == needed, f"{sequence} starts at {start} with {copies}, it needs {needed}"
        self.seen["rows copied"] += sum(copy.num_rows for copy in copies)
        return [copy.source for copy in copies]

    def _check_sources(self) -> None:
        """A page that a step in flight copies from is held: it is not given away, and its rows stay registered."""
        for copy in (copy for live in self.flights for one in live.step.admitted for copy in one.copies):
            is_held = self.scheduler.pool.num_owners(copy.source) > 0
            assert is_held, f"page {copy.source} is released before {copy} has run"

    def _check_fork(self, sequence: Sequence, source: Sequence) -> None:
        """It has the prompt and the salt of its source, which started after the last reset, and shares whole blocks."""
        assert self.world.caches_prefixes, f"{sequence} forks without sharing"
        assert sequence.use_prefix_cache, f"{sequence} must compute its whole prompt"
        is_twin = source.token_ids[: source.num_prompt_tokens] == sequence.token_ids
        assert is_twin, f"{sequence} forks from another prompt: {source}"
        assert source.cache_salt == sequence.cache_salt, f"{sequence} forks across salts"
        assert sequence.num_computed == sequence.num_tokens - 1, f"{sequence} does not start at its last token"
        assert sequence.num_stored % self.block == 0, f"{sequence} shares half a block"
        epoch = self.clients[source.sequence_id].epoch
        assert epoch == self.epoch, f"{sequence} forks from {source}, which started before a reset"
        self.seen["forks"] += 1

    def _check_step(self, step: LiveStep | None, waits: bool) -> None:
        if step is None:
            return
        limits = self.world.limits
        assert len(step.scheduled) <= limits.max_num_seqs, f"{len(step.scheduled)} sequences in a step"
        assert step.num_tokens <= limits.max_num_batched_tokens, f"{step.num_tokens} tokens in a step"
        order = [item.sequence.sequence_id for item in step.scheduled]
        ranks = [rank(item.sequence) for item in step.scheduled if item.sequence.sequence_id not in self._admitted]
        ranks_new = [rank(item.sequence) for item in step.scheduled if item.sequence.sequence_id in self._admitted]
        is_right = ranks == sorted(ranks) and ranks_new == sorted(ranks_new)
        if not self.world.has_priorities:
            is_right = order == [number for number in self.alive if number in order]
        assert is_right, f"{order} is not the order of arrival"
        self._check_limit(step)
        if self._must_run(waits):
            oldest = self._leader().sequence.sequence_id
            assert order[:1] == [oldest], f"the oldest sequence {oldest} does not run: {order}"
        if self.world.num_stages > 1:
            self._check_share(step)
        num_rows = sum(1 + len(item.proposals) for item in step.scheduled if item.samples)
        assert num_rows <= limits.sampled_rows, f"{num_rows} rows choose in a step"
        for item in step.scheduled:
            self._check_item(item)
            sequence, end = item.sequence, item.start + item.num_new_tokens
            for group, table in zip(self.groups, sequence.tables, strict=True):
                far = max(end, sequence.num_stored + 1) if sequence.num_stored else end
                far = end if item.source is not None else far
                num_pages = group.state_pages if group.is_state else -(-far // group.page_tokens)
                # What a longer step was given, that was then not taken or was forgotten, is kept.
                may_have_more = self.world.is_late or self.world.has_priorities or self.world.is_paced
                is_enough = len(table) == num_pages or (may_have_more and len(table) > num_pages)
                assert is_enough, f"{sequence} has not {num_pages} pages for {end} tokens"
                first = max(item.start, sequence.num_stored)
                for page in table if group.is_state else table[first // group.page_tokens :]:
                    assert page != HOLE, f"{sequence} writes into a hole of {group.name}"
                    self._check_writer(item, page)

    def _check_limit(self, step: LiveStep) -> None:
        """No more rows of prompts than are allowed, but one for the first of those that run."""
        if self._limit is None:
            return
        # A piece of a prompt is allowed if any row is.
        limit, num_rows = max(self._limit, self.world.grid if self._limit else 0), 0
        for place, item in enumerate(step.scheduled):
            own, is_new = item.num_rows - len(item.proposals), item.sequence.sequence_id in self._admitted
            num_rows += own if own > 1 or (is_new and place) else 0
            if self.world.state_rule is not None and place == 0 and (own > 1 or is_new):
                limit = max(limit, self.world.grid)
        assert num_rows <= limit, f"{num_rows} rows of prompts in a step of at most {self._limit}"
        self.seen["limited"] += num_rows == limit

    def _check_writer(self, item: ScheduledSequence, page: int) -> None:
        """A page that is written belongs to one sequence, and to those that start on it in this very step.

        Rows of a long page may be registered, and copied, while rows behind them are written.
        """
        pool, prefix = self.scheduler.pool, self.scheduler.prefix
        is_pending = prefix.pending.get(page) == self.scheduler.num_steps
        num_new = sum(
            page in table
            for number in self._admitted
            if number != item.sequence.sequence_id
            for table in self.alive[number].sequence.tables
        )
        num_copies = sum([page] in held.tables for held in self.scheduler._quarantine if held.slot < 0)
        assert pool.num_owners(page) == 1 + num_new + num_copies, f"page {page} is written and has other owners"
        entry = prefix.by_page.get(page)
        is_long = entry is not None and prefix.spans[entry.slots.index(page)] > 1
        assert not num_new or is_pending, f"page {page} is shared and is not registered"
        is_kept = pool.is_kept(page)
        if entry is not None and is_long:
            first = max(item.start, item.sequence.num_stored)
            is_kept = (entry.index + 1) * self.block > first
        assert is_pending or not is_kept, f"page {page} is written and holds a registered prefix"

    def _check_share(self, step: LiveStep) -> None:
        """In a pipeline: none twice, at most a stage's share, and none left out while places are free."""
        num_stages, limits, running = self.world.num_stages, self.world.limits, self.scheduler.num_running
        for item in step.scheduled:
            in_flight = self.alive[item.sequence.sequence_id].num_flying
            assert not in_flight, f"{item.sequence} is in two stages of a pipeline"
        num_new = len(self._admitted)
        num_old, num_free = len(step.scheduled) - num_new, num_stages - len(self.flights)
        num_idle = sum(client.is_running and not client.num_flying for client in self.alive.values()) - num_new
        share = min(-(-(running - num_new) // num_stages), -(-num_idle // num_free))
        # Those that gave way in this step were counted when it was cut.
        most = share if self._num_ran == running - num_new else -(-self._num_ran // num_stages)
        assert num_old <= most, f"{num_old} of {self._num_ran} that run are more than a share of {num_stages} stages"
        num_more = num_new + min(self.scheduler.num_waiting, self.scheduler._slots.num_free)
        most = min(-(-(running - num_new + num_more) // num_stages), -(-(num_idle + num_more) // num_free))
        assert not num_new or len(step.scheduled) <= most, f"{num_old} and {num_new} new ones are more than a share"
        # A piece of a prompt may be longer than what is left.
        took_all = step.num_tokens > limits.max_num_batched_tokens - self.world.grid or self._limit is not None
        is_full = took_all or num_old >= share
        assert is_full, f"{num_idle} of {self._num_ran} have nothing in flight, and {num_old} are in the step"
        self.seen["shared"] += num_idle > num_old

    def _see_results(self, step: LiveStep, chosen: list[tuple[int, ...]], failed: list[int]) -> None:
        for index, (item, tokens) in enumerate(zip(step.scheduled, chosen, strict=True)):
            sequence = item.sequence
            client = self.clients[sequence.sequence_id]
            client.num_flying -= item.num_new_tokens
            client.num_coming -= item.samples
            if client.num_final is not None:
                assert sequence.num_tokens == client.num_final, f"{sequence} was finished and got a token"
                assert not any(sequence.tables), f"{sequence} was finished and got pages"
                self.seen["surplus tokens"] += len(tokens)
                continue
            self.book(client, item, tokens)
            if index not in failed and not self._has_ended(client):
                continue
            if index not in failed:
                self.check_against_solo(client)
            self._leave(client)
            self.counts["finish"] += 1

    def _has_ended(self, client: Client) -> bool:
        """It has its last token, and that is known."""
        num_outputs = client.sequence.num_output_tokens
        if num_outputs >= client.num_outputs and client.lag and client.num_rounds_left is None:
            client.num_rounds_left = client.lag
        is_last = num_outputs >= client.num_outputs and client.num_rounds_left is None
        return is_last or num_outputs >= client.sequence.max_tokens

    def _stop_late(self) -> None:
        """The front reports an end some tokens late."""
        for client in [client for client in self.alive.values() if client.num_rounds_left is not None]:
            assert client.num_rounds_left is not None, "just looked"
            client.num_rounds_left -= 1
            if client.num_rounds_left == 0:
                self.check_against_solo(client)
                self._leave(client)
                self.counts["finish"] += 1
                self.seen["late stop"] += 1

    def _leave(self, client: Client) -> None:
        """Ends a client, in flight or not."""
        sequence = client.sequence
        del self.alive[sequence.sequence_id]
        client.num_final = sequence.num_tokens
        if client.num_flying:
            self.seen["quarantined pages"] += sum(page != HOLE for table in sequence.tables for page in table)
            self.seen["quarantined sequences"] += 1
        self._finish(sequence)

    def _leader(self) -> Client:
        """Return the first that ran, or of all: the most important, then the oldest."""
        ran = [one for number, one in self.alive.items() if one.is_running and number not in self._admitted]
        return min(ran or self.alive.values(), key=lambda client: rank(client.sequence))

    def _must_run(self, waits: bool) -> bool:
        """The oldest has something left to compute that is not in flight, and nothing to wait for."""
        if not self.alive:
            return False
        client = self._leader()
        sequence, limits = client.sequence, self.world.limits
        if not self.flights:
            return True
        if self.world.num_stages > 1 and client.num_flying:
            return False
        if not client.is_running or (waits and sequence.may_speculate and client.num_coming):
            return False
        longest = min(len(client.prompt) + sequence.max_tokens - 1, limits.max_model_len)
        has_windows = any(group.window is not None for group in self.groups)
        is_far = has_windows and client.num_flying > limits.max_num_batched_tokens - self.world.grid
        num_tokens = min(sequence.num_tokens + client.num_coming, longest)
        return num_tokens > client.num_held + client.num_flying and not is_far

    def _check_item(self, item: ScheduledSequence) -> None:
        """Positions from the right one on, none of no use, and a token chosen behind the last."""
        sequence, client = item.sequence, self.alive[item.sequence.sequence_id]
        start, num_guessed = client.num_held + client.num_flying, len(item.proposals)
        assert item.start == start, f"{sequence} starts at {item.start}"
        assert item.num_new_tokens > num_guessed, f"{sequence} runs {item.num_new_tokens} tokens"
        num_tokens, end = sequence.num_tokens + client.num_coming, item.start + item.num_new_tokens
        assert end - num_guessed <= min(num_tokens, self.world.limits.max_model_len), f"{sequence} runs up to {end}"
        longest = min(len(client.prompt) + sequence.max_tokens - 1, self.world.limits.max_model_len)
        assert end <= longest, f"{sequence} runs up to {end}, and of {longest} tokens something comes"
        assert item.samples == (end - num_guessed == num_tokens), f"{sequence} samples at {end} of {num_tokens}"
        if self.world.state_rule is not None and item.source is None:
            self._check_piece(item, len(client.prompt))
        if self.world.is_invariant:
            is_alike = end <= len(client.prompt) or item.num_new_tokens == 1
            assert is_alike, (
                f"{sequence} runs rows of its prompt and others, or several of these: {item.start} to {end}"
            )
            self.seen["rows again"] += client.is_running and end <= sequence.num_tokens - 1 and end > len(client.prompt)
        is_wanted = item.proposals == client.guesses[:num_guessed] and (sequence.may_speculate or not num_guessed)
        assert is_wanted, f"{sequence} is given {item.proposals} of {client.guesses}"

    def _check_piece(self, item: ScheduledSequence, num_prompt: int) -> None:
        """A piece of a prompt from one multiple of the grid to another, or to its end; a last row alone; or a later row.

        Draft tokens follow single rows.
        """
        num_drafts, rule = len(item.proposals), self.world.state_rule
        start, end, grid = item.start, item.start + item.num_new_tokens - num_drafts, self.world.grid
        assert rule is None or num_drafts <= rule.num_drafts, f"{item.sequence} has {num_drafts} draft tokens"
        is_row = item.num_new_tokens == 1 + num_drafts and (start >= num_prompt - 1)
        is_chunks = end <= num_prompt and start % grid == 0 and (end % grid == 0 or end == num_prompt)
        has_lone_row = end % grid == 1 and end == num_prompt
        assert is_row or (is_chunks and not has_lone_row), f"{item.sequence} runs [{start}, {end}) of {num_prompt}"
        self.seen["rows again"] += (
            item.sequence.num_preemptions > 0 and num_prompt <= start < item.sequence.num_tokens - 1
        )
        self.seen["lone rows"] += start == num_prompt - 1 and start % grid == 0

    def _check_snapshots(self, step: LiveStep) -> None:
        """Who starts inside a prompt gets a state; a step ends where it keeps one; no place in use in flight is written."""
        used = [(one.state_from, None) for flight in self.flights for one in flight.step.admitted]
        used += [
            (item.state_to, own.sequence)
            for flight in self.flights
            for item, own in zip(flight.step.items, flight.scheduled, strict=True)
        ]
        starts = {one.slot: one.state_from for one in step.step.admitted}
        given = [item.state_to for item in step.step.items if item.state_to >= 0]
        assert len(set(given)) == len(given), f"snapshots {given} are written twice in a step"
        owners = {item.state_to: own.sequence for item, own in zip(step.step.items, step.scheduled, strict=True)}
        busy = [place for place, who in used if place in given and who is not owners[place]]
        self.seen["overwritten in flight"] += sum(place in given for place, _ in used)
        assert not busy, f"snapshots {busy} are written, and steps in flight use them"
        for item, own in zip(step.step.items, step.scheduled, strict=True):
            if self.world.state_rule is not None and item.slot in starts:
                is_right = (starts[item.slot] >= 0) == (item.start > 0 and own.source is None)
                assert is_right, f"{own.sequence} starts at {item.start} with snapshot {starts[item.slot]}"
                self.seen["snapshots read"] += starts[item.slot] >= 0
            if item.state_to >= 0:
                end = item.start + item.num_new_tokens
                is_end = end % self.block == 0 and end <= own.sequence.num_prompt_tokens
                assert is_end, f"{own.sequence} keeps its state at {end}, inside a block"
                self.seen["snapshots written"] += 1

    def _see_pages(self, client: Client, pages: list[int]) -> None:
        for page in pages:
            self.page_epochs[page] = client.epoch

    def _record(self, step: LiveStep, chosen: list[tuple[int, ...]]) -> None:
        numbers = [len(self.alive), self.scheduler.pool.num_available]
        for item, tokens in zip(step.scheduled, chosen, strict=True):
            numbers += (item.sequence.sequence_id, item.start, item.num_new_tokens, *tokens)
            for table in item.sequence.tables:
                numbers += table
        self._trace.update(array("q", numbers).tobytes())


def main(num_worlds: int, num_events: int, kind: str = "", first_seed: str = "0") -> None:
    """For a longer run by hand: PYTHONPATH=tests python tests/engine/simulation.py 1000 10000 late."""
    counts: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    num_reads = worst = num_hit_tokens = 0
    start = process_time()
    for seed in range(int(first_seed), int(first_seed) + num_worlds):
        kinds = {
            "late": World.late,
            "compressed": World.compressed,
            "near": World.near,
            "unequal": World.unequal,
            "piped": World.piped,
            "invariant": World.invariant,
            "together": World.together,
            "paced": World.paced,
            "stateful": World.stateful,
        }
        simulation = Simulation(seed, kinds.get(kind, World.from_seed)(seed))
        try:
            simulation.run(num_events)
        except AssertionError as error:
            error.add_note(f"in the world of seed {seed}, after {simulation.num_events} events")
            raise
        counts += simulation.counts
        seen += simulation.seen
        num_reads += simulation.num_reads
        num_hit_tokens += simulation.num_hit_tokens
        worst = max(worst, simulation.worst_preemptions)
    seconds = process_time() - start
    print(f"{counts.total():,} events in {num_worlds} worlds, {counts.total() / seconds:,.0f} a second: {dict(counts)}")
    print(f"{num_reads:,} rows read back; {num_hit_tokens:,} tokens of hits; {dict(seen)}")
    print(f"at worst {worst} preemptions of one sequence; no violation")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
