"""EngineCore: scheduler and runner, token ids in and out, no text; a step may run while the next is prepared; no torch.

    step      fill, collect the oldest step in flight, book it
    _fill     schedule and launch, until 1 + run_ahead steps are in flight
    _collect  the only wait, and the only place where Ctrl-C comes through
    _book     every token to the scheduler; ends by eos, stop token and length; outputs

    run_ahead 0    launch 1, collect 1 | launch 2, collect 2 | ...
    run_ahead 1    launch 1, launch 2, collect 1 | launch 3, collect 2 | ...

**Pipelines.** With stages, run_ahead is one less than their number: a step is in each of them, with sequences of its own
(engine/scheduler.py). So every token that a step begins with is known when it is launched, and nothing of it is surplus but by
a stop string or an abort. What can run next is launched before a step's tokens are handed out: the first stage would wait else
while text is made of them, and a lone sequence with it.

**Surplus.** With steps in flight the end of a sequence is learned late: by eos or stop token a step late, by a stop
string or an abort whenever the front says so. What steps in flight still bring to it is dropped and counted nowhere.
An end by length is known before, and brings none.

**Proposals.** With a proposer a sequence may bring several tokens in a step (engine/ngram.py). It must have its last token on
the host for that, so that no step runs ahead of one that it is in, unless it backs off or stages are to be kept busy. Penalties and bad words need every
token before they choose the next, so that sequences with them never have proposals.

**Ctrl-C.** An interrupted wait leaves the steps where they are: on a CPU they are cancelled and scheduled anew, on a
GPU they stay in flight and are collected by the next call. A result that was there already is kept for it.

**Pace.** While sequences decode, a pacer limits the rows of prompts in a step (engine/pacing.py). The core has the clock: a step
begins when it is launched or when the one before it was collected, whichever is later, and ends when it is collected.

**Hang-ups.** If every live sequence of a step is hung up while a CPU computes it, the step stops at the next layer. It is
cancelled like an interrupted one, and its sequences end.

**Forms.** A request whose answers have a form (structured outputs) is held until that is compiled, in a thread beside the step
loop, and joins the queue then; meanwhile the others run on. What goes wrong with it ends that request alone.

An exception of scheduler or runner comes through as it is; nothing here can be used afterwards.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from holdfast.cache.groups import longest_sequence, unrewindable
from holdfast.config import Limits
from holdfast.engine.memory_map import MAX_WAITING_SHOWN, CoreMap, GroupPages, SequencePages
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

HELD_SECONDS = 0.02
"""That a step waits for a form to be compiled at the most, where there is nothing else to do."""

Waiting = Callable[[], AbstractContextManager[object]]
"""Entered around every wait: what is inside may be interrupted."""


class StepStoppedError(Exception):
    """Ends a step on a CPU between two layers: no live sequence is in it any more."""


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
        """What the oldest launched step has chosen. An interrupted call may be made again, or followed by `cancel`."""
        ...

    def cancel(self) -> bool:
        """Forget all launched steps that were not collected, if none has touched the device; else False."""
        ...


class Core(Protocol):
    """What an engine drives: an EngineCore of its own, or one in a process of its own."""

    @property
    def facts(self) -> CoreFacts: ...

    @property
    def memory(self) -> MemoryReport | None:
        """Who holds how many bytes, planned and taken."""
        ...

    def check_room(self, num_sequences: int) -> None:
        """QueueFullError where so many more find no place to wait."""
        ...

    def submit(self, requests: SequenceABC[CoreRequest]) -> None:
        """Queue the sequences of one request, all or none; RequestError or QueueFullError where they cannot be."""
        ...

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """End sequences; those that have ended already are passed over."""
        ...

    def hang_up(self, sequence_ids: Iterable[int]) -> None:
        """Any thread: these are about to be aborted, so that a step with no others may stop."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        ...

    def step(self, waiting: Waiting = nullcontext) -> CoreOutputs:
        """What the next step brings; nothing where there is nobody to run."""
        ...

    def settle(self, waiting: Waiting = nullcontext) -> None:
        """Wait for what still runs for nobody."""
        ...

    def watch(self, waiting: Waiting = nullcontext) -> None:
        """Look after a core that has nothing to do; raises where it is gone."""
        ...

    def stats(self) -> CoreStats: ...

    def pulse(self) -> CorePulse | None:
        """Any thread: how its process is at this moment, seen from outside; None where it is this process."""
        ...

    def ask_map(self) -> None:
        """Have a look taken at the pages, between two steps."""
        ...

    def take_map(self) -> CoreMap | None:
        """The look that was asked for, once it is here."""
        ...

    @property
    def num_queued(self) -> int:
        """Any thread: sequences that wait, or are on their way there, as far as is known here."""
        ...

    def close(self) -> None:
        """Give all memory back; nothing can run afterwards. May be called twice."""
        ...


@dataclass(eq=False, slots=True)
class _Live:
    sequence: Sequence
    submitted_at: float
    scheduled_at: float | None = None


class EngineCore:
    """One model, one queue of sequences, known by integers that only grow. One thread at a time."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
        run_ahead: int = 0,
        *,
        proposer: NgramProposer | None = None,
        max_queue: int | None = None,
        memory: MemoryReport | None = None,
        release: Callable[[], None] | None = None,
        grammars: Grammars | None = None,
        watch: Callable[[], None] | None = None,
        pacer: StepPacer | None = None,
    ) -> None:
        """`max_queue` is what the front is told, where the scheduler takes more (a few may be on their way to it).

        `watch` looks after what computes elsewhere, and raises where it is gone.
        """
        assert run_ahead >= 0, f"{run_ahead=}"
        rewinds = None if proposer is None else unrewindable(scheduler.groups)
        assert rewinds is None, f"proposals cannot be rejected: {rewinds}"
        self.facts = _facts(runner, scheduler, max_queue)
        self.memory = memory
        self.scheduler = scheduler
        """Queues and pages, to be looked at between two steps."""
        self.proposer = proposer
        """Where proposals come from, if there are any."""
        self.runner: StepRunner | None = runner
        self._eos_token_ids = runner.eos_token_ids
        self._vocab_size = runner.vocab_size
        self._clock = clock
        self.run_ahead = run_ahead
        """Steps that are launched before the result of the one before is known; may be changed between two steps."""
        self.pacer, self.hang_ups = pacer, HangUps()
        """Limits rows of prompts while sequences decode, None: no limit, may be changed between two steps; clients that are gone."""
        self._release = release
        self._watch = watch
        self.grammars = grammars
        """Whoever follows the forms of answers; the runner asks the same one."""
        self._held: dict[int, Sequence] = {}
        """Sequences that wait for their form to be compiled, or then for room in the queue."""
        self._prepared: deque[int] = deque()
        """Those of them whose form is there."""
        self._in_flight: deque[LiveStep] = deque()
        """The oldest first."""
        self._begun: deque[tuple[float, int]] = deque()
        """Of each of these: when it was launched, and how many sequences decoded."""
        self._collected_at, self._may_read = 0.0, True
        """When the last step ended, and whether a prompt may wait or be half read."""
        self._kept: StepResult | None = None
        """Of the oldest, where its result was there when an interrupt came."""
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
        """Any thread: sequences that wait."""
        return self._num_waiting

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def awaits_decode(self) -> bool:
        """Whether the oldest step in flight has one token of each sequence: it is as short as steps are."""
        return all(item.num_new_tokens == 1 for item in self._in_flight[0].scheduled) if self._in_flight else False

    @property
    def has_unfinished(self) -> bool:
        """True while a step has to be run or collected."""
        return bool(self._live or self._in_flight)

    def check_room(self, num_sequences: int) -> None:
        """QueueFullError where so many more find no place to wait."""
        refuse_full(num_sequences, self._num_waiting, self.scheduler.max_queue)

    @property
    def _num_waiting(self) -> int:
        return self.scheduler.num_waiting + len(self._held)

    def submit(self, requests: SequenceABC[CoreRequest]) -> None:
        """Queue the sequences of one request, all or none."""
        ids = [request.sequence_id for request in requests]
        if not ids or ids != sorted(set(ids)) or ids[0] < self._num_known:
            raise MessageError("wire.wrong_sequences", ids=ids[:8], expected=f"from {self._num_known} on")
        self.check_room(len(requests))
        if requests[0].is_pooled and self.scheduler.num_stages > 1:
            raise RequestError(
                f"a pooled request came to a model in {self.scheduler.num_stages} pipeline stages",
                "hidden states stay in the last stage",
                "start the engine with tensor_parallel_size instead of pipeline_parallel_size",
            )
        now, sequences = self._clock(), [_sequence(request) for request in requests]
        for sequence in sequences:
            sequence.may_speculate = self._may_speculate(sequence)
        form = requests[0].params.structured_outputs
        if form is None:
            self._queue(sequences)
        else:
            self._hold(sequences, form)
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

    def _hold(self, sequences: list[Sequence], form: StructuredOutputs) -> None:
        """Until their form is compiled."""
        if self.grammars is None:
            raise RequestError(
                f"structured_outputs.{form.kind} was asked", "this core follows no forms", "leave it out"
            )
        for sequence in sequences:
            self.scheduler.check_fits(sequence)
        self.grammars.begin([sequence.sequence_id for sequence in sequences], form)
        self._held.update({sequence.sequence_id: sequence for sequence in sequences})

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """End sequences; those that have ended already are passed over."""
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
        """Launch what can be launched, and give what the oldest step in flight has brought."""
        failed = self._take_prepared(waiting) if self._held else ()
        if failed:
            return CoreOutputs(failed, self.stats())
        if self._live:
            self._fill()
        if not self._in_flight:
            assert len(self._live) == len(self._held), f"nobody is scheduled of {len(self._live)} that want to run"
            return CoreOutputs((), self.stats())
        result = self._collect(waiting)
        if result is None:
            return CoreOutputs((), self.stats())
        step = self._in_flight.popleft()
        self._time(step, *self._begun.popleft())
        outputs = tuple(self._book(step, result.results))
        if self._live and self.scheduler.num_stages > 1:
            self._fill()
        return CoreOutputs(outputs, self.stats())

    def settle(self, waiting: Waiting = nullcontext) -> None:
        """Wait for steps in flight, where nobody waits for what they bring: the pages of their sequences come back."""
        while self._in_flight and not self._live:
            self.step(waiting)

    def watch(self, waiting: Waiting = nullcontext) -> None:
        """Other ranks may be gone; nothing else can happen to it while nobody calls."""
        if self._watch is not None:
            self._watch()

    @property
    def has_ranks(self) -> bool:
        """Whether something computes elsewhere, which is to be watched."""
        return self._watch is not None

    def stats(self) -> CoreStats:
        """Counters since the start, and the state of now."""
        scheduler = self.scheduler
        return CoreStats(
            num_running=scheduler.num_running,
            num_waiting=self._num_waiting,
            num_prefix_query_tokens=scheduler.num_prefix_query_tokens,
            num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
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
        """The part of `stats` that changes when a step begins."""
        scheduler = self.scheduler
        return CoreCounts(scheduler.num_running, self._num_waiting, self._num_known, scheduler.kv_usage)

    def pulse(self) -> CorePulse | None:
        """Whoever drives it knows."""
        return None

    def ask_map(self) -> None:
        """Look at the pages now."""
        self._map = self.map()

    def take_map(self) -> CoreMap | None:
        """The look that was asked for."""
        taken, self._map = self._map, None
        return taken

    def map(self) -> CoreMap:
        """Who holds which pages."""
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
            num_waiting=self._num_waiting,
            num_steps=self._num_steps,
        )

    def _pages_of(self, sequence: Sequence, now: float) -> SequencePages:
        return SequencePages(
            sequence.sequence_id,
            sequence.state is SequenceState.RUNNING,
            sequence.num_prompt_tokens,
            sequence.num_output_tokens,
            sequence.num_kept,
            sequence.num_cached_tokens,
            sequence.num_preemptions,
            sequence.params.priority,
            self.scheduler.pages_held(sequence),
            now - self._live[sequence.sequence_id].submitted_at,
        )

    def close(self) -> None:
        """Give all memory back."""
        release, self._release = self._release, None
        if self.grammars is not None:
            self.grammars.close()
        if release is not None:
            self.runner = None  # its views keep the memory alive
            release()

    def _take_prepared(self, waiting: Waiting) -> tuple[SequenceOutput, ...]:
        """Sequences whose form is compiled join the queue, as far as it has room; the ends of those whose form failed."""
        grammars, failed = self.grammars, []
        assert grammars is not None, "forms are followed by nobody"
        if not self._in_flight and not self._prepared and len(self._held) == len(self._live):
            with waiting():
                grammars.wait(HELD_SECONDS)
        for sequence_ids, error in grammars.ready():
            for sequence_id in sequence_ids:
                if error is None:
                    self._prepared.append(sequence_id)
                else:
                    form = self._held.pop(sequence_id).params.structured_outputs
                    del self._live[sequence_id]
                    failed.append(SequenceOutput(sequence_id, ending=Ending("error", error=_form_words(form, error))))
        while self._prepared and self.scheduler.num_waiting < self.scheduler.max_queue:
            sequence = self._held.pop(self._prepared.popleft(), None)
            if sequence is not None:
                self.scheduler.add(sequence)
        return tuple(failed)

    def _fill(self) -> None:
        runner = self.runner
        assert runner is not None, "the core is closed"
        while len(self._in_flight) <= self.run_ahead and not (self._in_flight and self._is_guessing()):
            num_decoding, most_rows = self._pace()
            step = self.scheduler.schedule(None if self.proposer is None else self._propose, most_rows)
            # None: not before a step in flight has ended.
            if step is None or not step.scheduled:
                return
            now = self._clock()
            for item in step.scheduled:
                live = self._live[item.sequence.sequence_id]
                if live.scheduled_at is None:
                    live.scheduled_at = now
            runner.launch(step.step)
            self._in_flight.append(step)
            self._begun.append((now, num_decoding))

    def _pace(self) -> tuple[int, int | None]:
        """Sequences that decode, 0 if that was not counted, and the most rows of prompts for the next step."""
        scheduler = self.scheduler
        if self.pacer is None or not (self._may_read or scheduler.num_waiting):
            return 0, None
        num_decoding = scheduler.num_decoding
        self._may_read = scheduler.num_waiting > 0 or num_decoding < scheduler.num_running
        return num_decoding, self.pacer.prompt_rows(num_decoding)

    def _time(self, step: LiveStep, launched_at: float, num_decoding: int) -> None:
        """Tell the pacer how long a collected step took."""
        now, collected_at = self._clock(), self._collected_at
        self._collected_at = now
        if self.pacer is not None:
            num_rows = sum(item.num_rows for item in step.scheduled if item.num_new_tokens - len(item.proposals) > 1)
            self.pacer.see(
                step.num_tokens, num_rows, num_decoding or len(step.scheduled), now - max(launched_at, collected_at)
            )

    def hang_up(self, sequence_ids: Iterable[int]) -> None:
        """Any thread: these are about to be aborted."""
        self.hang_ups.add(sequence_ids)

    def check_needed(self) -> None:
        """Called between layers on a CPU; raises if no live sequence is in the step."""
        step = self._in_flight[0] if self._in_flight else None
        if step is not None and self.hang_ups.has_all(
            item.sequence.sequence_id for item in step.scheduled if item.sequence.sequence_id in self._live
        ):
            raise StepStoppedError

    def _collect(self, waiting: Waiting) -> StepResult | None:
        """The result of the oldest step; None if it was stopped, and then its sequences have ended."""
        runner = self.runner
        assert runner is not None, "the core is closed"
        result, self._kept = self._kept, None
        if result is not None:
            return result
        try:
            with waiting():
                result = runner.collect()
        except StepStoppedError:
            stopped = [item.sequence.sequence_id for item in self._in_flight[0].scheduled]
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
        self._in_flight.clear()
        self._begun.clear()
        self._may_read = True
        self.scheduler.forget_steps()
        return True

    def _book(self, step: LiveStep, results: tuple[SequenceResult, ...]) -> list[SequenceOutput]:
        """Give every sequence its tokens; what the step has brought to those that still live."""
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
        """Whether somebody who runs waits for tokens to propose from: a step ahead would leave them out, and halve every batch."""
        if self.proposer is None or self.scheduler.num_stages > 1:
            return False
        return any(item.sequence.may_speculate for step in self._in_flight for item in step.scheduled)

    def _propose(self, sequence: Sequence) -> tuple[int, ...]:
        assert self.proposer is not None, "nobody proposes"
        return self.proposer.propose(sequence.sequence_id, sequence.token_ids)

    def _learn(self, proposer: NgramProposer, item: ScheduledSequence, num_accepted: int) -> None:
        """What became of a sequence's proposals; one that backs off may run ahead until it proposes again."""
        sequence = item.sequence
        if item.proposals:
            proposer.book(sequence.sequence_id, num_accepted, sequence.num_tokens)
        sequence.may_speculate = self._may_speculate(sequence)

    def _may_speculate(self, sequence: Sequence) -> bool:
        """Whether its next step may have proposals: nothing in its choices needs the tokens before them on the host.

        While log-probabilities of the prompt are made, rows of the step are theirs.
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
        """Its tokens up to the one that ends it, if one does; none for a sequence that has ended before."""
        if sequence.sequence_id not in self._live:
            return (), None
        params, num_output_tokens = sequence.params, sequence.num_output_tokens
        for place, token_id in enumerate(result.token_ids):
            if not 0 <= token_id < self._vocab_size:
                return result.token_ids[:place], self._without_token(token_id, sequence, num_output_tokens)
            num_output_tokens += 1
            may_stop = num_output_tokens >= params.min_tokens
            ending: Ending | None = None
            # A form that is complete lets nothing follow, whatever else was asked.
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
        """How a sequence ends that no token could be chosen for."""
        form = sequence.params.structured_outputs
        if form is not None and self.grammars is not None and token_id == NO_TOKEN:
            if self.grammars.is_complete(sequence.sequence_id):
                return Ending("stop")
            failure = self.grammars.failure(sequence.sequence_id)
            if failure is not None:
                return Ending("error", error=f"after {num_output_tokens} tokens {_form_words(form, failure)}")
        # Where a request may have banned every token itself, nothing is wrong with anybody's pages: else any client could
        # have all cached prefixes forgotten. Numbers that are not finite show in the next request that has them.
        if sequence.params.allowed_token_ids is None and not (form is not None and sequence.params.bad_words):
            self._distrust(sequence)
        return Ending("error", error=_no_token_reason(token_id, sequence, num_output_tokens))

    def _distrust(self, sequence: Sequence) -> None:
        """Numbers that are not finite may lie in pages that others would share."""
        self._finish(sequence)
        self.scheduler.reset_prefix_cache()


def _facts(runner: StepRunner, scheduler: Scheduler, max_queue: int | None) -> CoreFacts:
    limits = runner.limits
    return CoreFacts(
        limits,
        longest_sequence(scheduler.groups, runner.num_pages, limits.max_model_len, limits.max_num_batched_tokens),
        runner.vocab_size,
        tuple(sorted(runner.eos_token_ids)),
        scheduler.max_queue if max_queue is None else max_queue,
    )


def refuse_full(num_sequences: int, num_waiting: int, max_queue: int) -> None:
    """For more sequences than there are places to wait."""
    if num_sequences > max_queue - num_waiting:
        raise QueueFullError(
            f"{num_sequences} more completions were asked",
            f"{num_waiting} wait and the queue holds {max_queue}",
            "try again later, or raise max_queue",
        )


def _form_words(form: StructuredOutputs | None, failure: str) -> str:
    return f"structured_outputs.{'' if form is None else form.kind} could not be followed: {failure}"


def _sequence(request: CoreRequest) -> Sequence:
    return Sequence(
        sequence_id=request.sequence_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=len(request.token_ids),
        params=request.params,
        seed=request.seed,
        max_tokens=request.max_tokens,
        cache_salt=request.cache_salt,
        use_prefix_cache=request.use_prefix_cache,
        bad_word_ids=request.bad_word_ids,
        is_pooled=request.is_pooled,
    )


def _output(
    live: _Live,
    item: ScheduledSequence,
    result: SequenceResult,
    token_ids: tuple[int, ...],
    ending: Ending | None,
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
    where = f"after {num_output_tokens} tokens"
    form = sequence.params.structured_outputs
    if token_id == NO_TOKEN and form is not None:
        return (
            f"no token could be chosen {where}: of those that structured_outputs.{form.kind} allows none is left that is "
            "finite and not banned (bad_words, allowed_token_ids)"
        )
    if token_id == NO_TOKEN and sequence.params.allowed_token_ids is not None:
        return f"no token could be chosen {where}: of allowed_token_ids none is left that is finite and not banned"
    if token_id == NO_TOKEN:
        return f"the model's numbers were not finite {where}, so no token could be chosen"
    return f"the model chose token {token_id} {where}, which is outside the vocabulary"
