"""The scheduler as a hypothesis state machine: any order of calls, small pools, full accounting after each."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.simulated_world import World
from engine.simulation import PARAMS, Simulation
from holdfast.cache.groups import HOLE
from holdfast.config import Limits
from holdfast.errors import QueueFullError, RequestError
from holdfast.request.sequence import Sequence, SequenceState

POWERS_OF_TWO = st.sampled_from([1, 2, 4, 8])


class SchedulerMachine(RuleBasedStateMachine):
    """Where the simulator plays a plausible engine, this plays one that calls whatever it likes."""

    @initialize(
        page_tokens=POWERS_OF_TWO,
        num_pages=st.integers(8, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 40),
        context_share=st.sampled_from([1.0, 0.7, 0.3]),
        caches_prefixes=st.booleans(),
        collides=st.booleans(),
        num_guess_rows=st.sampled_from([0, 1, 30]),
    )
    def start(
        self,
        page_tokens: int,
        num_pages: int,
        max_num_seqs: int,
        budget: int,
        context_share: float,
        caches_prefixes: bool,
        collides: bool,
        num_guess_rows: int,
    ) -> None:
        max_model_len = max(int(num_pages * page_tokens * context_share), 2)
        limits = Limits(max_num_seqs, budget, max_model_len, page_tokens, max_num_seqs + num_guess_rows)
        # The simulation lends its checks and its shadow; the events come from hypothesis.
        self.simulation = Simulation(0, World(limits, num_pages, 4, caches_prefixes, collides, is_late=True))
        self.scheduler = self.simulation.scheduler
        self.limits = limits
        self.gone: list[Sequence] = []

    @rule(
        length=st.integers(0, 40),
        kind=st.sampled_from([0, 0, 1]),
        max_tokens=st.integers(1, 60),
        salt=st.sampled_from([b"", b"", b"a"]),
        use_prefix_cache=st.sampled_from([True, True, True, False]),
        may_speculate=st.booleans(),
    )
    def add(
        self, length: int, kind: int, max_tokens: int, salt: bytes, use_prefix_cache: bool, may_speculate: bool
    ) -> None:
        prompt = [(kind + position * position) % 5 for position in range(length)]
        client = self.simulation.new_client(
            prompt, max(min(max_tokens, self.limits.max_model_len - length), 1), salt, use_prefix_cache
        )
        client.sequence.may_speculate = may_speculate
        num_waiting = self.scheduler.num_waiting
        try:
            self.scheduler.add(client.sequence)
        except QueueFullError:
            assert num_waiting == 4
        except RequestError:
            is_too_long = length > self.limits.max_model_len
            assert length == 0 or is_too_long
        else:
            assert 0 < length <= self.limits.max_model_len
            self.simulation.alive[client.sequence.sequence_id] = client

    @precondition(lambda self: self.scheduler.num_in_flight < 3)
    @rule(guesses=st.booleans())
    def schedule(self, guesses: bool) -> None:
        step = self.scheduler.schedule(self.simulation.propose if guesses else None)
        self.simulation.see_schedule(step, waits=guesses)

    @precondition(lambda self: self.simulation.flights)
    @rule(num_steps=st.integers(1, 3))
    def run_some(self, num_steps: int) -> None:
        self.simulation.device.run(num_steps)

    @precondition(lambda self: self.simulation.flights)
    @rule()
    def forget(self) -> None:
        self.simulation.forget()

    @precondition(lambda self: self.simulation.flights)
    @rule()
    def complete(self) -> None:
        simulation = self.simulation
        step = simulation.flights.popleft()
        chosen = simulation.device.collect()
        self.scheduler.complete(step, chosen)
        for item, tokens in zip(step.scheduled, chosen, strict=True):
            client = simulation.clients[item.sequence.sequence_id]
            client.num_flying -= item.num_new_tokens
            client.num_coming -= item.samples
            if client.num_final is not None:
                assert item.sequence.num_tokens == client.num_final
                continue
            simulation.book(client, item, tokens)
            if item.sequence.num_output_tokens >= item.sequence.max_tokens:
                simulation.check_against_solo(client)
                self.leave(item.sequence)

    @precondition(lambda self: self.simulation.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.simulation.alive)))
        self.leave(self.simulation.alive[number].sequence)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def finish_again(self, data: st.DataObject) -> None:
        self.scheduler.finish(data.draw(st.sampled_from(self.gone[-4:])))

    @rule()
    def reset(self) -> None:
        self.simulation.reset()

    @rule(number=st.integers(10**6, 10**6 + 3))
    def finish_a_stranger(self, number: int) -> None:
        self.scheduler.finish(Sequence(number, [1], 1, PARAMS, 0, 1))

    def leave(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        del self.simulation.alive[sequence.sequence_id]
        self.simulation.clients[sequence.sequence_id].num_final = sequence.num_tokens
        self.gone.append(sequence)

    @invariant()
    def is_accounted_for(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        alive = self.simulation.alive.values()
        assert scheduler.num_running == sum(one.sequence.state is SequenceState.RUNNING for one in alive)
        assert scheduler.num_running + scheduler.num_waiting == len(alive)
        held = {page for one in alive for table in one.sequence.tables for page in table if page != HOLE}
        num_held = sum(scheduler.pages_by_group().values())
        assert scheduler.pool.num_available == scheduler.pool.num_pages - num_held
        assert num_held == len(held) if not scheduler.num_in_flight else num_held >= len(held)
        assert scheduler.num_in_flight == len(self.simulation.flights)
        assert 0 <= scheduler.kv_usage <= 1

    def teardown(self) -> None:
        """Whatever was done: all that is left finishes within the promised bound."""
        if not hasattr(self, "simulation"):
            return
        while self.simulation.flights:
            self.complete()
        for _ in range(len(self.simulation.alive) * self.limits.max_model_len):
            if not self.simulation.alive:
                break
            self.schedule(True)
            self.complete()
            self.is_accounted_for()
        assert not self.simulation.alive
        assert self.scheduler.pool.num_available == self.scheduler.pool.num_pages


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=max(70, settings().max_examples), stateful_step_count=40)
