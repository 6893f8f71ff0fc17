"""EngineCore: scheduler and runner, token ids in and out, no text; a step may run while the next is prepared; no torch.

    step      fill, collect the oldest step in flight, book it
    _fill     schedule and launch, until 1 + run_ahead steps are in flight
    _collect  the only wait, and the only place where Ctrl-C arrives
    _book     give every token to the scheduler; end by eos, stop token and length; outputs

    run_ahead 0    launch 1, collect 1 | launch 2, collect 2 | ...
    run_ahead 1    launch 1, launch 2, collect 1 | launch 3, collect 2 | ...

**Pipelines.** With stages, run_ahead is one less than their number: each has a step, with sequences of its own
(engine/scheduler.py). So every token that a step begins with is known at its launch, and only a stop string or an abort
makes surplus. The core launches the next steps before it returns the tokens of a step: otherwise the first stage would
wait for text.

**Surplus.** With steps in flight the core learns the end of a sequence late: a step late for eos or a stop token, and
later for a stop string or an abort. It drops what steps in flight bring to that sequence and counts it nowhere. An end
by length is known before, so it has no surplus.

**Draft tokens.** With a proposer a step may bring a sequence several tokens (engine/ngram.py). Drafting needs the last
token on the host, so no step runs ahead of a drafting sequence's step, unless it backs off or stages must stay busy.
Penalties and bad words need every token before the next choice, so such sequences never draft.

**Ctrl-C.** An interrupted wait leaves the steps where they are. On a CPU they are cancelled and scheduled anew; on a
GPU they stay in flight and the next call collects them. A result that had arrived is kept for it.

**Pace.** While sequences decode, a pacer limits the prompt rows of a step (engine/pacing.py). The core has the clock: a
step begins at its launch or when the one before it was collected, whichever is later, and ends when it is collected.

**Hang-ups.** If every live sequence of a step hangs up while a CPU computes it, the step stops at the next layer. It is
cancelled like an interrupted one, and its sequences end.

**Grammars.** A request with a grammar (structured outputs) is held until a thread has compiled it, and then joins the
queue. An error of the grammar ends that request alone.

Exceptions of scheduler and runner propagate, and the core cannot be used afterwards.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from holdfast.cache.groups import longest_sequence, unrewindable
from holdfast.config import Limits
from holdfast.engine.memory_map import MAX_WAITING_SHOWN, CoreMap, GroupPages, SequencePages, phase_of
from holdfast.engine.messages import CoreFacts, CoreOutputs, CoreRequest, CoreStats, Ending, SequenceOutput
from holdfast.engine.ngram import NgramProposer
from holdfast.engine.pacing import StepPacer
from holdfast.engine.pulse import CoreCounts, CorePulse, HangUps
from holdfast.engine.scheduler import Scheduler
from holdfast.errors import MessageError, QueueFullError, RequestError
from holdfast.memory.report import MemoryReport
from holdfast.request.sequence import (
    NO_TOKEN,
    LiveStep,
    ScheduledSequence,
    Sequence,
    SequenceResult,
    SequenceState,
    StepResult,
)
from holdfast.request.step import Step
from holdfast.request.structured import StructuredOutputs
from holdfast.text.grammar import Grammars

GRAMMAR_SECONDS = 0.02
"""Longest time an idle step waits for a grammar to compile."""

Waiting = Callable[[], AbstractContextManager[object]]
"""Context around every wait, in which an interrupt may arrive."""


class StepStoppedError(Exception):
    """Ends a step on a CPU between two layers because all its sequences hung up."""


class StepRunner(Protocol):
    """The model on its device, as the core sees it."""

    limits: Limits
    num_pages: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def launch(self, step: Step) -> None:
        """Start a step, without waiting for it."""
        ...

    def collect(self) -> StepResult:
        """Return the result of the oldest launched step. After an interrupt, call it again or `cancel`."""
        ...

    def cancel(self) -> bool:
        """Forget all launched steps that were not collected, if none has touched the device; else False."""
        ...


class Core(Protocol):
    """Core of an engine: an EngineCore in this process, or a CoreProcess. Methods as in `EngineCore`."""

    @property
    def facts(self) -> CoreFacts: ...
    @property
    def memory(self) -> MemoryReport | None: ...
    @property
    def num_queued(self) -> int: ...
    def check_room(self, num_sequences: int) -> None: ...
    def submit(self, requests: SequenceABC[CoreRequest]) -> None: ...
    def abort(self, sequence_ids: Iterable[int]) -> None: ...
    def hang_up(self, sequence_ids: Iterable[int]) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def step(self, waiting: Waiting = nullcontext) -> CoreOutputs: ...
    def settle(self, waiting: Waiting = nullcontext) -> None: ...
    def watch(self, waiting: Waiting = nullcontext) -> None: ...
    def stats(self) -> CoreStats: ...
    def pulse(self) -> CorePulse | None: ...
    def ask_map(self) -> None: ...
    def take_map(self) -> CoreMap | None: ...
    def close(self) -> None: ...


class CoreResources(NamedTuple):
    """Resources of a core besides its queue, and their release."""

    memory: MemoryReport | None = None
    release: Callable[[], None] | None = None
    watch: Callable[[], None] | None = None
    """Raises if another rank is gone."""


NO_RESOURCES = CoreResources()


@dataclass(eq=False, slots=True)
class _Live:
    sequence: Sequence
    submitted_at: float
    scheduled_at: float | None = None


class EngineCore:
    """One model and one queue of sequences, numbered by integers that only grow. One thread at a time."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
        run_ahead: int = 0,
        *,
        proposer: NgramProposer | None = None,
        max_queue: int | None = None,
        grammars: Grammars | None = None,
        pacer: StepPacer | None = None,
        resources: CoreResources = NO_RESOURCES,
    ) -> None:
        """`max_queue`: the front's limit, if the scheduler takes more because some requests are on their way."""
        assert run_ahead >= 0, f"{run_ahead=}"
        rewinds = None if proposer is None else unrewindable(scheduler.groups)
        assert rewinds is None, f"proposals cannot be rejected: {rewinds}"
        rule = scheduler.state_rule
        assert proposer is None or rule is None or proposer.num_proposals <= rule.num_drafts, f"{proposer=} {rule=}"
        limits = runner.limits
        self.facts = CoreFacts(
            limits,
            longest_sequence(scheduler.groups, runner.num_pages, limits.max_model_len, limits.max_num_batched_tokens),
            runner.vocab_size,
            tuple(sorted(runner.eos_token_ids)),
            scheduler.max_queue if max_queue is None else max_queue,
        )
        self.memory, self._release, self._watch = resources
        self.scheduler = scheduler
        self.proposer = proposer
        self.runner: StepRunner | None = runner
        self._eos_token_ids = runner.eos_token_ids
        self._vocab_size = runner.vocab_size
        self._clock = clock
        self.run_ahead = run_ahead
        """Steps launched before the result of the one before is known; may change between two steps."""
        self.pacer, self.hang_ups = pacer, HangUps()
        self.grammars = grammars
        self._held: dict[int, Sequence] = {}
        """Sequences that wait for their grammar, or then for a place in the queue."""
        self._prepared: deque[int] = deque()
        """Held sequences whose grammar is compiled."""
        self.in_flight: deque[LiveStep] = deque()
        """The oldest first."""
        self._begun: deque[tuple[float, int]] = deque()
        """Launch time and number of decoding sequences of each step in flight."""
        self._collected_at, self._may_read = 0.0, True
        """End of the last step, and whether a prompt may wait or be half computed."""
        self._kept: StepResult | None = None
        """Result of the oldest step, if it had arrived before an interrupt."""
        self._live: dict[int, _Live] = {}
        self._num_known = 0
        """One more than the largest id so far."""
        self._num_prompt_tokens = 0
        self._num_steps = 0
        self._num_proposed_tokens = 0
        self._num_accepted_tokens = 0
        self._map: CoreMap | None = None

    @property
    def num_queued(self) -> int:
        """Sequences that wait. Any thread."""
        return self.scheduler.num_waiting + len(self._held)

    @property
    def awaits_decode(self) -> bool:
        """True if the oldest step in flight has one token per sequence: the shortest kind of step."""
        return all(item.num_new_tokens == 1 for item in self.in_flight[0].scheduled) if self.in_flight else False

    @property
    def has_unfinished(self) -> bool:
        """True while there is a step to run or collect."""
        return bool(self._live or self.in_flight)

    def check_room(self, num_sequences: int) -> None:
        """Raise QueueFullError if the queue cannot take `num_sequences` more."""
        refuse_full(num_sequences, self.num_queued, self.scheduler.max_queue)

    def submit(self, requests: SequenceABC[CoreRequest]) -> None:
        """Queue the sequences of one request, all or none."""
        ids = [request.sequence_id for request in requests]
        if not ids or ids != sorted(set(ids)) or ids[0] < self._num_known:
            raise MessageError("wire.wrong_sequences", ids=ids[:8], expected=f"from {self._num_known} on")
        self.check_room(len(requests))
        if requests[0].is_pooled and self.scheduler.num_stages > 1:
            raise RequestError("request.pooled_pipeline", stages=self.scheduler.num_stages)
        now, sequences = self._clock(), [_sequence(request) for request in requests]
        for sequence in sequences:
            sequence.may_speculate = self._may_speculate(sequence)
        grammar = requests[0].params.structured_outputs
        if grammar is None:
            self._queue(sequences)
        else:
            self._hold(sequences, grammar)
        self._num_known = ids[-1] + 1
        self._live.update({sequence.sequence_id: _Live(sequence, now) for sequence in sequences})

    def _queue(self, sequences: list[Sequence]) -> None:
        try:
            for sequence in sequences:
                self.scheduler.add(sequence)
        except RequestError:
            for sequence in sequences:
                self.scheduler.finish(sequence)
            raise

    def _hold(self, sequences: list[Sequence], grammar: StructuredOutputs) -> None:
        """Hold sequences until their grammar is compiled."""
        if self.grammars is None:
            raise RequestError("request.no_grammars", field=grammar.kind)
        for sequence in sequences:
            self.scheduler.check_fits(sequence)
        self.grammars.begin([sequence.sequence_id for sequence in sequences], grammar)
        self._held.update({sequence.sequence_id: sequence for sequence in sequences})

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """End sequences. Idempotent."""
        ids = list(sequence_ids)
        unknown = [sequence_id for sequence_id in ids if not 0 <= sequence_id < self._num_known]
        if unknown:
            raise MessageError("wire.wrong_sequences", ids=unknown[:8], expected=f"below {self._num_known}")
        for sequence_id in ids:
            live = self._live.pop(sequence_id, None)
            if live is not None:
                self._finish(live.sequence)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.scheduler.reset_prefix_cache()

    def step(self, waiting: Waiting = nullcontext) -> CoreOutputs:
        """Launch steps as far as possible, and return the outputs of the oldest in flight."""
        failed = self._take_prepared(waiting) if self._held else ()
        if failed:
            return CoreOutputs(failed, self.stats())
        if self._live:
            self._fill()
        if not self.in_flight:
            assert len(self._live) == len(self._held), f"none of {len(self._live)} live sequences is scheduled"
            return CoreOutputs((), self.stats())
        result = self._collect(waiting)
        if result is None:
            return CoreOutputs((), self.stats())
        step = self.in_flight.popleft()
        self._time(step, *self._begun.popleft())
        outputs = tuple(self._book(step, result.results))
        if self._live and self.scheduler.num_stages > 1:
            self._fill()
        return CoreOutputs(outputs, self.stats())

    def settle(self, waiting: Waiting = nullcontext) -> None:
        """Wait for steps in flight whose sequences have all ended, so that their pages are released."""
        while self.in_flight and not self._live:
            self.step(waiting)

    def watch(self, waiting: Waiting = nullcontext) -> None:
        """Raise if another rank is gone."""
        if self._watch is not None:
            self._watch()

    @property
    def has_ranks(self) -> bool:
        """True if other ranks compute too."""
        return self._watch is not None

    def stats(self) -> CoreStats:
        """Return the current state and the counters since the start."""
        scheduler = self.scheduler
        return CoreStats(
            num_running=scheduler.num_running,
            num_waiting=self.num_queued,
            num_prefix_query_tokens=scheduler.num_prefix_query_tokens,
            num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
            num_snapshot_hits=scheduler.num_snapshot_hits,
            num_prompt_tokens=self._num_prompt_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_submitted=self._num_known,
            kv_usage=scheduler.kv_usage,
            num_proposed_tokens=self._num_proposed_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )

    @property
    def counts(self) -> CoreCounts:
        """The stats that change when a step begins."""
        scheduler = self.scheduler
        return CoreCounts(scheduler.num_running, self.num_queued, self._num_known, scheduler.kv_usage)

    def pulse(self) -> CorePulse | None:
        """None: the core is in this process."""
        return None

    def ask_map(self) -> None:
        """Take a map now."""
        self._map = self.map()

    def take_map(self) -> CoreMap | None:
        """Return the map that was taken, once."""
        taken, self._map = self._map, None
        return taken

    def map(self) -> CoreMap:
        """Map the pages of every sequence."""
        scheduler, pool, now = self.scheduler, self.scheduler.pool, self._clock()
        counts = zip(scheduler.groups, pool.num_owned_by_group, pool.num_cached_by_group, strict=True)
        return CoreMap(
            num_pages=pool.num_pages,
            num_free=pool.num_free,
            groups=tuple(GroupPages(group.name, group.page_tokens, owned, cached) for group, owned, cached in counts),
            sequences=tuple(
                self._pages_of(sequence, now)
                for sequence in (*scheduler.running, *scheduler.first_waiting(MAX_WAITING_SHOWN))
            ),
            num_waiting=self.num_queued,
            num_steps=self._num_steps,
            num_snapshots=0 if scheduler.snapshots is None else scheduler.snapshots.num_places,
            num_snapshots_held=0 if scheduler.snapshots is None else scheduler.snapshots.num_held,
        )

    def _pages_of(self, sequence: Sequence, now: float) -> SequencePages:
        is_running = sequence.state is SequenceState.RUNNING
        return SequencePages(
            phase_of(is_running, sequence.num_kept, sequence.num_prompt_tokens),
            sequence.num_prompt_tokens,
            sequence.num_output_tokens,
            sequence.num_kept,
            sequence.num_cached_tokens,
            sequence.num_preemptions,
            sequence.params.priority,
            self.scheduler.pages_held(sequence),
            now - self._live[sequence.sequence_id].submitted_at,
            sequence.sequence_id,
        )

    def close(self) -> None:
        """Release all memory. Idempotent."""
        release, self._release = self._release, None
        if self.grammars is not None:
            self.grammars.close()
        if release is not None:
            self.runner = None  # its views keep the memory alive
            release()

    def _take_prepared(self, waiting: Waiting) -> tuple[SequenceOutput, ...]:
        """Queue sequences whose grammar is compiled, as far as places are free; return the ends of those whose grammar failed."""
        grammars, failed = self.grammars, []
        assert grammars is not None, "no grammars are followed"
        if not self.in_flight and not self._prepared and len(self._held) == len(self._live):
            with waiting():
                grammars.wait(GRAMMAR_SECONDS)
        for sequence_ids, error in grammars.ready():
            for sequence_id in sequence_ids:
                if error is None:
                    self._prepared.append(sequence_id)
                else:
                    grammar = self._held.pop(sequence_id).params.structured_outputs
                    del self._live[sequence_id]
                    failed.append(
                        SequenceOutput(sequence_id, ending=Ending("error", error=_grammar_failure(grammar, error)))
                    )
        while self._prepared and self.scheduler.num_waiting < self.scheduler.max_queue:
            sequence = self._held.pop(self._prepared.popleft(), None)
            if sequence is not None:
                self.scheduler.add(sequence)
        return tuple(failed)

    def _fill(self) -> None:
        runner = self.runner
        assert runner is not None, "the core is closed"
        while len(self.in_flight) <= self.run_ahead and not (self.in_flight and self._is_guessing()):
            num_decoding, most_rows = self._pace()
            step = self.scheduler.schedule(None if self.proposer is None else self._propose, most_rows)
            # None: a step in flight must end first.
            if step is None or not step.scheduled:
                return
            now = self._clock()
            for item in step.scheduled:
                live = self._live[item.sequence.sequence_id]
                if live.scheduled_at is None:
                    live.scheduled_at = now
            runner.launch(step.step)
            self.in_flight.append(step)
            self._begun.append((now, num_decoding))

    def _pace(self) -> tuple[int, int | None]:
        """Return the decoding sequences, 0 if not counted, and the prompt rows for the next step."""
        scheduler = self.scheduler
        if self.pacer is None or not (self._may_read or scheduler.num_waiting):
            return 0, None
        num_decoding = scheduler.num_decoding
        self._may_read = scheduler.num_waiting > 0 or num_decoding < scheduler.num_running
        return num_decoding, self.pacer.prompt_rows(num_decoding)

    def _time(self, step: LiveStep, launched_at: float, num_decoding: int) -> None:
        """Report the duration of a collected step to the pacer."""
        now, collected_at = self._clock(), self._collected_at
        self._collected_at = now
        if self.pacer is not None:
            num_rows = sum(item.num_rows for item in step.scheduled if item.num_new_tokens - len(item.proposals) > 1)
            self.pacer.see(
                step.num_tokens, num_rows, num_decoding or len(step.scheduled), now - max(launched_at, collected_at)
            )

    def hang_up(self, sequence_ids: Iterable[int]) -> None:
        """Announce an abort. Any thread."""
        self.hang_ups.add(sequence_ids)

    def check_needed(self) -> None:
        """Raise StepStoppedError if all sequences of the step hung up. Called between layers on a CPU."""
        step = self.in_flight[0] if self.in_flight else None
        if step is not None and self.hang_ups.has_all(
            item.sequence.sequence_id for item in step.scheduled if item.sequence.sequence_id in self._live
        ):
            raise StepStoppedError

    def _collect(self, waiting: Waiting) -> StepResult | None:
        """Return the result of the oldest step; None if it was stopped, which ended its sequences."""
        runner = self.runner
        assert runner is not None, "the core is closed"
        result, self._kept = self._kept, None
        if result is not None:
            return result
        try:
            with waiting():
                result = runner.collect()
        except StepStoppedError:
            stopped = [item.sequence.sequence_id for item in self.in_flight[0].scheduled]
            is_cancelled = self._cancel(runner)
            assert is_cancelled, "a step was stopped that cannot be cancelled"
            self.abort(stopped)
            return None
        except Exception:
            raise
        except BaseException:
            if result is not None:
                self._kept = result
            else:
                self._cancel(runner)
            raise
        return result

    def _cancel(self, runner: StepRunner) -> bool:
        """Forget all steps in flight, if the runner can."""
        if not runner.cancel():
            return False
        self.in_flight.clear()
        self._begun.clear()
        self._may_read = True
        self.scheduler.forget_steps()
        return True

    def _book(self, step: LiveStep, results: tuple[SequenceResult, ...]) -> list[SequenceOutput]:
        """Give every sequence its tokens; return the outputs of those that still live."""
        assert len(results) == len(step.scheduled), f"{len(results)} results for {len(step.scheduled)}"
        brought = [self._cut(item.sequence, result) for item, result in zip(step.scheduled, results, strict=True)]
        self.scheduler.complete(step, [token_ids for token_ids, _ in brought])
        self._num_steps += 1
        outputs = []
        for item, result, (token_ids, ending) in zip(step.scheduled, results, brought, strict=True):
            live = self._live.get(item.sequence.sequence_id)
            if live is None:
                continue
            self._num_proposed_tokens += len(item.proposals)
            self._num_accepted_tokens += min(len(token_ids), max(len(result.token_ids) - 1, 0))
            num_prompt = min(item.num_new_tokens, item.sequence.num_prompt_tokens - item.start)
            self._num_prompt_tokens += max(num_prompt, 0)
            if token_ids or ending is not None or result.prompt_logprobs:
                outputs.append(_output(live, item, result, token_ids, ending))
            if ending is not None:
                del self._live[item.sequence.sequence_id]
                self._finish(item.sequence)
            elif self.proposer is not None:
                self._learn(self.proposer, item, len(result.token_ids) - 1)
        return outputs

    def _is_guessing(self) -> bool:
        """True if a running sequence needs its last token to draft: launching ahead would exclude it and halve the batch."""
        if self.proposer is None or self.scheduler.num_stages > 1:
            return False
        return any(item.sequence.may_speculate for step in self.in_flight for item in step.scheduled)

    def _propose(self, sequence: Sequence) -> tuple[int, ...]:
        assert self.proposer is not None, "there is no proposer"
        return self.proposer.propose(sequence.sequence_id, sequence.token_ids)

    def _learn(self, proposer: NgramProposer, item: ScheduledSequence, num_accepted: int) -> None:
        """Report accepted draft tokens to the proposer; a sequence that backs off may run ahead."""
        sequence = item.sequence
        if item.proposals:
            proposer.book(sequence.sequence_id, num_accepted, sequence.num_tokens)
        sequence.may_speculate = self._may_speculate(sequence)

    def _may_speculate(self, sequence: Sequence) -> bool:
        """True if its next step may have draft tokens: sampling needs no earlier tokens on the host.

        While prompt logprobs are computed, they take the rows.
        """
        params = sequence.params
        if self.proposer is None or params.has_penalties or sequence.bad_word_ids:
            return False
        if params.structured_outputs is not None:
            return False
        if params.prompt_logprobs is not None and sequence.num_output_tokens == 0:
            return False
        return not self.proposer.is_waiting(sequence.sequence_id, sequence.num_tokens)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._held.pop(sequence.sequence_id, None)
        if self.grammars is not None:
            self.grammars.forget(sequence.sequence_id)
        if self.proposer is not None:
            self.proposer.forget(sequence.sequence_id)

    def _cut(self, sequence: Sequence, result: SequenceResult) -> tuple[tuple[int, ...], Ending | None]:
        """Return its tokens up to the one that ends it, and the ending; no tokens if it ended before."""
        if sequence.sequence_id not in self._live:
            return (), None
        params, num_output_tokens = sequence.params, sequence.num_output_tokens
        for place, token_id in enumerate(result.token_ids):
            if not 0 <= token_id < self._vocab_size:
                return result.token_ids[:place], self._without_token(token_id, sequence, num_output_tokens)
            num_output_tokens += 1
            may_stop = num_output_tokens >= params.min_tokens
            ending: Ending | None = None
            # A complete grammar allows no more tokens, whatever the other parameters are.
            is_end = (may_stop and not params.ignore_eos) or params.structured_outputs is not None
            if is_end and token_id in self._eos_token_ids:
                ending = Ending("stop")
            elif may_stop and token_id in params.stop_token_ids:
                ending = Ending("stop", token_id)
            elif num_output_tokens >= sequence.max_tokens:
                ending = Ending("length")
            if ending is not None:
                return result.token_ids[: place + 1], ending
        return result.token_ids, None

    def _without_token(self, token_id: int, sequence: Sequence, num_output_tokens: int) -> Ending:
        """Return the ending of a sequence without a valid token."""
        grammar = sequence.params.structured_outputs
        if grammar is not None and self.grammars is not None and token_id == NO_TOKEN:
            if self.grammars.is_complete(sequence.sequence_id):
                return Ending("stop")
            failure = self.grammars.failure(sequence.sequence_id)
            if failure is not None:
                return Ending("error", error=f"after {num_output_tokens} tokens {_grammar_failure(grammar, failure)}")
        # If the request itself banned every token, keep the prefix cache: any client could reset it otherwise.
        # Logits that are not finite show in the next request that has them.
        if sequence.params.allowed_token_ids is None and not (grammar is not None and sequence.params.bad_words):
            self._distrust(sequence)
        return Ending("error", error=_no_token_reason(token_id, sequence, num_output_tokens))

    def _distrust(self, sequence: Sequence) -> None:
        """Drop cached prefixes: pages with values that are not finite may be shared."""
        self._finish(sequence)
        self.scheduler.reset_prefix_cache()


def refuse_full(num_sequences: int, num_waiting: int, max_queue: int) -> None:
    """Raise QueueFullError for more sequences than free places."""
    if num_sequences > max_queue - num_waiting:
        raise QueueFullError("request.queue_full", count=num_sequences, waiting=num_waiting, maximum=max_queue)


def _grammar_failure(grammar: StructuredOutputs | None, failure: str) -> str:
    return f"structured_outputs.{'' if grammar is None else grammar.kind} could not be followed: {failure}"


def _sequence(request: CoreRequest) -> Sequence:
    tokens = request.token_ids
    return Sequence(
        *(request.sequence_id, list(tokens), len(tokens), request.params, request.seed, request.max_tokens),
        *(request.cache_salt, request.use_prefix_cache, request.bad_word_ids, request.is_pooled),
    )


def _output(
    live: _Live, item: ScheduledSequence, result: SequenceResult, token_ids: tuple[int, ...], ending: Ending | None
) -> SequenceOutput:
    sequence = live.sequence
    assert live.scheduled_at is not None, f"sequence {sequence.sequence_id} ran before it was scheduled"
    has_failed = ending is not None and ending.finish_reason == "error"
    if sequence.is_pooled:
        token_ids = ()  # it only ends the sequence
    return SequenceOutput(
        sequence_id=sequence.sequence_id,
        token_ids=token_ids,
        logprobs=result.logprobs[: len(token_ids)],
        ending=ending,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        queue_seconds=live.scheduled_at - live.submitted_at,
        prompt_start=item.start,
        prompt_logprobs=result.prompt_logprobs,
        pooled=b"" if has_failed else result.pooled,
    )


def _no_token_reason(token_id: int, sequence: Sequence, num_output_tokens: int) -> str:
    after, grammar = f"after {num_output_tokens} tokens", sequence.params.structured_outputs
    if token_id != NO_TOKEN:
        return f"the model chose token {token_id} {after}, which is outside the vocabulary"
    if grammar is None and sequence.params.allowed_token_ids is None:
        return f"the logits were not finite {after}, so no token could be sampled"
    allowed = "allowed_token_ids" if grammar is None else f"structured_outputs.{grammar.kind}"
    return f"no token could be sampled {after}: {allowed} leaves none that is finite and not banned"


def weak_check(core: EngineCore) -> Callable[[], None]:
    """Return a call of `core.check_needed` that does not keep the core alive: the core holds the runner that calls it."""
    own = weakref.ref(core)

    def check() -> None:
        if (found := own()) is not None:
            found.check_needed()

    return check
