"""A device for simulations: the runner's slots as steps tell them, and steps that run between launch and collect.

It knows of the scheduler only what `Step` values say: who is in which slot, the pages at the end of each table, positions.
Launched steps run in order, each at the latest when it is collected. What a step writes for a sequence that has ended
since, its rows and its slot's last token, may come later still: at the collect. So a page or a slot that is given away
too early is overwritten under its new owner, and what that one reads is wrong.

The last token of each slot is kept on the device: a row whose token was not known when its step was launched takes it
from there, by the last writer.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from engine.shadow import Shadow, ShadowStates
from engine.simulated_world import Client, World, first_value, mix, next_token
from holdfast.request.step import Admitted, RowCopy, Step, StepItem


@dataclass(eq=False, slots=True)
class Held:
    """A sequence in a slot, as the runner knows it."""

    sequence_id: int
    token_ids: list[int]
    tables: list[list[int]]
    num_stored: int = 0
    fork_of: int = -1
    """Until its first step: the slot that it forks from."""
    num_computed: int = -1
    """Collected; -1 before its first step, which may start on cached pages."""
    num_scheduled: int = -1
    num_coming: int = 0
    num_late: int = 0
    """Launched parts that run at their collect."""
    num_accepted: int = 0
    """Draft tokens of its last step that a state outside the pages lacks."""


@dataclass(eq=False, slots=True)
class Launched:
    """What a step does for one sequence."""

    held: Held
    client: Client
    item: StepItem
    tokens: list[int | None]
    """Tokens of its positions; None if coming at the launch."""
    tables: list[list[int]]
    num_accepted: int = 0
    """Draft tokens before it that the state lacks."""
    chosen: tuple[int, ...] | None = None
    """Once it has run ..."""
    values: list[int] = field(default_factory=list)
    """... and the values of its rows."""
    is_late: bool = False
    source: "Launched | None" = None
    """What it forks from."""


@dataclass(eq=False, slots=True)
class Flight:
    """A launched step."""

    parts: list[Launched] = field(default_factory=list)
    copies: list[tuple[int, RowCopy]] = field(default_factory=list)
    """Rows that are there before anything is computed, and whose they are ..."""
    restored: list[tuple[int, int]] = field(default_factory=list)
    """... and states: the snapshot and the slot that gets it."""
    has_run: bool = False


class FakeDevice:
    """launch(), run() any number of times, collect() or cancel()."""

    def __init__(
        self, world: World, shadow: Shadow, client_of: Callable[[int], Client], see_pages: Callable, rng: Random
    ) -> None:
        self.slots: dict[int, Held] = {}
        self.flights: deque[Flight] = deque()
        self.num_steps = 0
        self.num_late = 0
        """Parts whose writes came as late as they could."""
        self._limits = world.limits
        self._groups = world.groups
        self._shadow = shadow
        self._client_of = client_of
        self._see_pages = see_pages
        self._rng = rng
        self._last_tokens = [-1] * world.limits.max_num_seqs
        rule = world.state_rule
        self.states = None if rule is None else ShadowStates(rule.grid, world.limits.max_num_seqs, rule.num_snapshots)

    def launch(self, step: Step) -> None:
        """Takes in what the step tells."""
        assert step.number == self.num_steps + 1, f"step {step.number} came behind step {self.num_steps}"
        self.num_steps = step.number
        for slot in step.released:
            assert slot in self.slots, f"slot {slot} is released, and it is empty"
            del self.slots[slot]
        for admitted in step.admitted:
            self._admit(admitted)
        flight = Flight(copies=[(one.sequence_id, copy) for one in step.admitted for copy in one.copies])
        flight.restored = [(one.state_from, one.slot) for one in step.admitted if one.state_from >= 0]
        for item in step.items:
            assert item.slot in self.slots, f"slot {item.slot} is running, and it is empty"
            part = self._accept(item, self.slots[item.slot])
            if part.held.fork_of >= 0:
                part.source = self._source(part, flight)
            flight.parts.append(part)
        slots = [item.slot for item in step.items]
        assert len(set(slots)) == len(slots), f"slots {slots} run in one step"
        self.flights.append(flight)

    def run(self, num_flights: int) -> None:
        """The oldest so many steps have run, at the latest now."""
        for flight in list(self.flights)[:num_flights]:
            if flight.has_run:
                continue
            self._catch_up()
            flight.has_run = True
            self._copy_rows(flight)
            now = []
            for part in flight.parts:
                is_surplus = part.client.num_final is not None and not self._is_read(part)
                # A copy for a fork follows the forward pass: later the source's state would have moved on.
                is_surplus = is_surplus and part.source is None
                part.is_late = bool(part.held.num_late) or (is_surplus and self._rng.random() < 0.7)
                part.held.num_late += part.is_late
                if not part.is_late:
                    now.append(part)
            self._compute(now)

    def _copy_rows(self, flight: Flight) -> None:
        for number, slot in flight.restored:
            assert self.states is not None, f"snapshot {number} of a model without states"
            self.states.restore(number, slot)
        for sequence_id, copy in flight.copies:
            self._shadow.copy_rows(copy)
            self._see_pages(self._client_of(sequence_id), [copy.target])

    def _catch_up(self) -> None:
        """Compute what was late and is read by now: the device runs steps in order."""
        late = [part for flight in self.flights for part in flight.parts if part.is_late]
        read = {id(part.held) for part in late if self._is_read(part)}
        # A fork reads a part of its source that follows the late one.
        forks = (part for flight in self.flights for part in flight.parts if part.source is not None)
        read |= {id(part.source.held) for part in forks if part.source is not None}
        for part in late:
            if id(part.held) in read:
                self._compute([part])
                part.is_late = False
                part.held.num_late -= 1

    def collect(self) -> list[tuple[int, ...]]:
        """Ends the oldest step; its tokens."""
        self.run(1)
        flight = self.flights.popleft()
        late = [part for part in flight.parts if part.is_late]
        self._compute(late)
        self.num_late += len(late)
        for part in late:
            part.held.num_late -= 1
        results = []
        for part in flight.parts:
            held, item, chosen = part.held, part.item, part.chosen
            assert chosen is not None, f"a part of step in slot {item.slot} has not run"
            num_rejected = len(item.proposals) - max(len(chosen) - 1, 0)
            held.num_computed = item.start + item.num_new_tokens - num_rejected
            if item.proposals:
                held.num_scheduled = held.num_computed
                held.num_accepted = len(item.proposals) - num_rejected
            held.num_coming -= item.samples
            held.token_ids += chosen
            results.append(chosen)
        return results

    def cancel(self) -> None:
        """Forget launched steps, run or not; what they sent stays."""
        for flight in self.flights:
            for part in flight.parts:
                held = part.held
                held.num_scheduled, held.num_coming, held.num_late = held.num_computed, 0, 0
        self.flights.clear()

    def _admit(self, admitted: Admitted) -> None:
        slot = admitted.slot
        assert 0 <= slot < len(self._last_tokens), f"slot {slot} is given, of {len(self._last_tokens)}"
        assert slot not in self.slots, f"slot {slot} is given, and it is taken"
        ids = [held.sequence_id for held in self.slots.values()]
        assert admitted.sequence_id not in ids, f"sequence {admitted.sequence_id} has two slots"
        tables: list[list[int]] = [[] for _ in self._groups]
        held = Held(admitted.sequence_id, list(admitted.token_ids), tables, admitted.num_stored, admitted.fork_of)
        self.slots[slot] = held

    def _accept(self, item: StepItem, held: Held) -> Launched:
        name = f"sequence {held.sequence_id}"
        client, end = self._client_of(held.sequence_id), item.start + item.num_new_tokens
        if held.num_scheduled < 0:
            held.num_computed = held.num_scheduled = item.start
        assert item.start == held.num_scheduled, f"{name} goes on at {item.start}, it was at {held.num_scheduled}"
        for table, pages in zip(held.tables, item.pages or [()] * len(held.tables), strict=True):
            table += pages
        for group, table in zip(self._groups, held.tables, strict=True):
            num_places = group.pages_for(end)
            assert len(table) >= num_places, f"{name} was sent {len(table)} of {num_places} places in {group.name}"
        num_known, num_guessed = len(held.token_ids) + held.num_coming, len(item.proposals)
        assert end - num_guessed <= num_known, f"{name} runs up to {end}, and {num_known} tokens are known or coming"
        assert item.samples == (end - num_guessed == num_known), f"{name} samples at {end} of {num_known}"
        tokens: list[int | None] = list(held.token_ids[item.start : end - num_guessed])
        tokens += [None] * (end - num_guessed - item.start - len(tokens))
        tokens += item.proposals
        held.num_scheduled = end
        held.num_coming += item.samples
        tables = [table[: group.pages_for(end)] for group, table in zip(self._groups, held.tables, strict=True)]
        num_accepted, held.num_accepted = held.num_accepted, 0
        return Launched(held, client, item, tokens, tables, num_accepted)

    def _source(self, fork: Launched, flight: Flight) -> Launched:
        """The part of the same step that a fork samples from: the same prompt, ended here, before it."""
        found = [part for part in flight.parts if part.item.slot == fork.held.fork_of]
        fork.held.fork_of = -1
        name = f"sequence {fork.held.sequence_id}"
        assert len(found) == 1, f"{name} forks from slot {fork.held.fork_of}, which is not in the step before it"
        item, own = found[0].item, fork.item
        assert found[0].source is None, f"{name} forks from a fork"
        assert item.start + item.num_new_tokens - len(item.proposals) == own.start + 1, f"{name} forks at {own.start}"
        assert own.num_new_tokens == 1, f"{name} forks with {own.num_new_tokens} tokens"
        return found[0]

    def _is_read(self, part: Launched) -> bool:
        """Whether others start on what it writes: steps run in order, so that it cannot come after them."""
        own = {page for table in part.tables for page in table}
        others = [held for held in self.slots.values() if held is not part.held]
        others += [other.held for flight in self.flights for other in flight.parts if other.held is not part.held]
        if any(copy.source in own for flight in self.flights for _, copy in flight.copies):
            return True
        if any(number == part.item.state_to for flight in self.flights for number, _ in flight.restored):
            return True
        return any(page in own and page >= 0 for held in others for table in held.tables for page in table) or any(
            other.source is part for flight in self.flights for other in flight.parts
        )

    def _compute(self, parts: list[Launched]) -> None:
        """All writes, then all reads, as the attention of a layer does; then copies for forks."""
        rows = [part for part in parts if part.source is None]
        ends = [self._write(part) for part in rows]
        for part, end in zip(rows, ends, strict=True):
            self._shadow.read(part.tables, part.item.start, end, part.client.truth, part.client.sequence)
        for part in parts:
            if part.source is not None:
                self._fork(part, part.source)
        for part in parts:
            if part.item.state_to >= 0:
                assert self.states is not None, f"snapshot {part.item.state_to} of a model without states"
                self.states.keep(part.item.slot, part.item.state_to)

    def _fork(self, part: Launched, source: Launched) -> None:
        """Copies what the fork does not share, and chooses from the last row of the source's prompt."""
        num_tokens = part.item.start + 1
        part.client.learn(num_tokens)
        written = self._shadow.copy(
            source.tables, part.tables, (source.item.slot, part.item.slot), part.held.num_stored, num_tokens
        )
        self._see_pages(part.client, written)
        if self.states is not None:
            self.states.fork(source.item.slot, part.item.slot)
        self._shadow.read(part.tables, part.item.start, num_tokens, part.client.truth, part.client.sequence)
        last = source.item.num_new_tokens - len(source.item.proposals) - 1
        part.chosen = (next_token(source.values[last]),)
        self._last_tokens[part.item.slot] = part.chosen[-1]

    def _write(self, part: Launched) -> int:
        """Computes its rows and chooses; where the positions end that a later step may read."""
        client, item = part.client, part.item
        client.learn(item.start + item.num_new_tokens)
        value: int | None = first_value(client.sequence.cache_salt)
        if item.start > 0:
            value = self._shadow.value_before(part.tables, item.start, client.truth, client.sequence)
            value = client.truth.values[item.start - 1] if value is None else value
        values: list[int] = []
        for token_id in part.tokens:
            value = mix(value, self._last_tokens[item.slot] if token_id is None else token_id)
            values.append(value)
        written = self._shadow.write(part.tables, item.start, values, item.slot, part.held.num_stored, client.truth)
        if self.states is not None:
            counts = len(item.proposals), part.num_accepted
            self.states.advance(item.slot, item.start, values, client.truth, client.sequence, *counts)
        self._see_pages(client, written)
        part.chosen, part.values = self._chosen(item, values), values
        if part.chosen:
            self._last_tokens[item.slot] = part.chosen[-1]
        return item.start + item.num_new_tokens - len(item.proposals) + max(len(part.chosen) - 1, 0)

    @staticmethod
    def _chosen(item: StepItem, values: list[int]) -> tuple[int, ...]:
        """The proposals that the model would have chosen itself, and one more."""
        if not item.samples:
            return ()
        chosen: list[int] = []
        rows = values[len(values) - len(item.proposals) - 1 :]
        for value, guess in zip(rows, (*item.proposals, None), strict=True):
            chosen.append(next_token(value))
            if chosen[-1] != guess:
                break
        return tuple(chosen)
