"""Runner: runs steps on one device: rows, model, logits, chosen tokens; on a GPU by a captured graph if one fits.

    launch(step)   checks a step; on a GPU enqueues all of it: inputs, model, choices, copies of results
    collect()      returns the results of the oldest step; only this waits, and on a CPU it computes the step

So on a GPU one step runs while the next is prepared. One stream runs everything in order. Device buffers serve one step
after the other; the host writes a step's inputs once the step before the last has been collected. A token that the
previous step is still choosing comes from the device. Only choices that need such a token on the host wait for it:
collect() makes those of the next step after it has read the results of this one.

In a pipeline each rank computes its stage of a step in launch(). In collect(), rank 0 receives from the last stage,
which has the logits. So as many steps are in flight as there are stages; a sequence is in one of them. All stages run
steps in one order. A step that chooses nothing ends for rank 0 before the last stage has computed it; its pages are
read or written again only after it. The graph of a step follows from the step alone, so all stages replay or none
does: both sides pad rows to one size, and rank 0 fetches as many argmaxes as the last stage's graph sends. Host inputs
are copied in the stream, after the graphs of earlier steps. Their mirror is rewritten once that copy is done
(memory/arena.py), however many steps are in flight.

T rows of a step, R rows whose logits are wanted, S sequences that sample, H hidden, V vocabulary
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch

from holdfast.attention.backend import AttentionBackend, Batch, StepPlan
from holdfast.cache.chunks import ring_tables
from holdfast.cache.groups import CacheGroup
from holdfast.cache.states import NO_PLACE, StateRule
from holdfast.config import Limits
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.kernels.sampling.last_tokens import NO_SLOT
from holdfast.memory.arena import has_failed, keep_with_process
from holdfast.models.model import Model
from holdfast.observability.log import get_logger
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence, SequenceResult, StepResult, TokenLogprobs
from holdfast.request.step import Step
from holdfast.runner.graphs import StepGraphs
from holdfast.runner.invariance import padded_rows
from holdfast.runner.pooled_rows import PooledCopy, PooledRows
from holdfast.runner.sampling.batch import Choice, Choosing, SequenceSample
from holdfast.runner.sampling.device_sampler import MAX_UNDER_WAY, DeviceSampler
from holdfast.runner.sampling.sampler import HostSampler
from holdfast.runner.sampling.shared_sampler import SharedSampler
from holdfast.runner.slots import Slots
from holdfast.runner.step_inputs import BatchBuffers

log = get_logger(__name__)


CopyCache = Callable[[SequenceABC[tuple[int, int]], tuple[int, int] | None], None]
"""Copies pages, each pair from the first to the second, and the states of one slot to another if two slots are given."""


class WantedRows(NamedTuple):
    """Rows of a step whose logits are wanted: sampled rows and prompts with logprobs."""

    logit_rows: list[int]
    prompt_rows: list[tuple[int, int]]
    """By scheduled sequence: first logit row and count of prompt logprobs; (0, 0) without."""
    sampled: list[int]
    """Indices into the logit rows to choose from."""
    choices: list[Choice]
    keep_slots: list[int]
    """By choice: the slot that stores it on the device for the next step."""
    pooled: list[int]
    """Indices into the logit rows whose hidden states go to the host."""

    @property
    def has_prompts(self) -> bool:
        return len(self.sampled) < len(self.logit_rows)

    @classmethod
    def of(cls, step: LiveStep) -> "WantedRows":
        wanted = cls([], [], [], [], [], [])
        row, has_forks, prompt_ends = 0, step.has_forks, dict[int, int]()
        for item in step.scheduled:
            if item.source is not None:
                wanted.prompt_rows.append((0, 0))
                wanted._add_choices(item, prompt_ends[item.source.slot])
                continue
            sequence, end, num_prompt = item.sequence, row + item.num_new_tokens, 0
            if sequence.params.prompt_logprobs is not None:
                num_prompt = item.num_prompt_logits
            if has_forks:
                prompt_ends[sequence.slot] = end - len(item.proposals)
            wanted.prompt_rows.append((len(wanted.logit_rows), num_prompt) if num_prompt else (0, 0))
            wanted.logit_rows.extend(range(row, row + num_prompt))
            if item.samples:
                wanted._add_choices(item, end)
            row = end
        return wanted

    def _add_choices(self, item: ScheduledSequence, end: int) -> None:
        """Add a choice after the last token and after each draft token; with drafts the next step waits."""
        count = 1 + len(item.proposals)
        if item.sequence.is_pooled:
            self.pooled.append(len(self.logit_rows))
        self.sampled.extend(range(len(self.logit_rows), len(self.logit_rows) + count))
        self.logit_rows.extend(range(end - count, end))
        self.choices.extend(Choice(item.sequence, item.num_tokens + nth) for nth in range(count))
        self.keep_slots.extend([NO_SLOT] * count if item.proposals else [item.sequence.slot])


@dataclass(eq=False, slots=True)
class _Flight:
    """A launched step that is not collected."""

    step: LiveStep
    choosing: Choosing | None = None
    """None before the step is computed, or if `result` is set."""
    pooled: PooledCopy | None = None
    """Hidden states being copied to the host."""
    result: StepResult | None = None
    is_booked: bool = False
    elsewhere: WantedRows | None = None
    """Rows whose logits another stage has, once this stage is computed."""


@dataclass(frozen=True, eq=False)
class RunnerParts:
    """Allocated parts that a runner is built from."""

    model: Model
    backend: AttentionBackend
    buffers: BatchBuffers
    sampler: HostSampler | DeviceSampler | SharedSampler
    limits: Limits
    groups: SequenceABC[CacheGroup]
    """Cache groups."""
    num_pages: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    device: torch.device
    mesh: Mesh = ALONE
    """Gives this rank's pipeline stage and whether it samples."""
    row_sizes: SequenceABC[int] = ()
    """Row counts whose products round alike: every step is padded to one. Empty if any count will do."""
    copy_cache: CopyCache | None = None
    """Copies pages for prefixes with open rows, and pages and states for forks."""
    pooled_rows: PooledRows | None = None
    """Copies hidden states to the host."""
    state_rule: StateRule | None = None
    """How prompts are cut, if the model has states outside the pages."""


class Runner:
    """Runs steps over parts that were allocated before."""

    def __init__(self, parts: RunnerParts) -> None:
        self.limits, self.groups, self.state_rule = parts.limits, tuple(parts.groups), parts.state_rule
        self.num_pages, self.vocab_size = parts.num_pages, parts.vocab_size
        self.eos_token_ids = parts.eos_token_ids
        self.model, self.backend = parts.model, parts.backend
        self.buffers, self.sampler = parts.buffers, parts.sampler
        device = self.device = parts.device
        self.num_stages = parts.mesh.num_stages
        self._logits_on_other_stage = not parts.mesh.is_last_stage
        self._is_sampling_rank = parts.mesh.rank == 0
        self.row_sizes = tuple(parts.row_sizes)
        self._most_sampled = parts.limits.sampled_rows
        self._copy_cache = parts.copy_cache
        self.pooled_rows = parts.pooled_rows
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.graphs: StepGraphs | None = None
        self._is_kept = False
        self._dummy_ids = count(-1, -1)
        self._slots = Slots(self.limits, self.groups, self.num_pages, self.vocab_size, self.state_rule)
        self._flights: deque[_Flight] = deque()
        self._collected: _Flight | None = None
        """The oldest flight, if its results were returned."""
        self._stage_ends: deque[torch.cuda.Event] = deque()
        """End events of the last steps begun here, in a pipeline on a GPU."""
        has_slots = self.buffers.keep_slots_T is not None
        assert has_slots or not self.sampler.keeps_tokens, "chosen tokens have no slots to be kept by"

    @property
    def can_run_ahead(self) -> bool:
        """True if a step can usefully launch before the last one is collected: on a GPU."""
        return self.sampler.keeps_tokens

    @property
    def padded_sizes(self) -> tuple[int, ...]:
        """Row counts that steps with prompts are padded to; larger steps are not padded."""
        return self.row_sizes or (() if self.graphs is None else self.graphs.mixed_sizes)

    @torch.inference_mode()
    def launch(self, step: Step) -> None:
        """Accept a step, and on a GPU begin it, at most one beyond the oldest uncollected. Raise if it is invalid."""
        self.advance()
        is_staged = self.num_stages > 1
        if self.can_run_ahead and not is_staged:
            assert len(self._flights) < MAX_UNDER_WAY, f"{len(self._flights)} steps are in flight"
        flight = _Flight(self._slots.accept(step))
        self._flights.append(flight)
        if self.can_run_ahead or self._logits_on_other_stage:
            try:
                with self.on_stream(), self._throttle_stage() if is_staged else nullcontext():
                    self.begin(flight)
            except Exception:  # an exchange may raise too
                self._keep_if_failed()
                raise

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight. After an interrupt, call it again, or on a CPU cancel()."""
        self.advance()
        assert self._flights, "no step is in flight"
        flight = self._flights[0]
        try:
            with torch.inference_mode(), self.on_stream():
                result = self._settle(flight) if self.can_run_ahead else self._compute(flight)
        except Exception:
            self._keep_if_failed()
            raise
        # Python checks signals in calls and loops. So an interrupt comes before this line, and nothing was returned, or
        # after the caller has the result. The next call does the rest.
        self._collected = flight
        return result

    def run(self, step: Step) -> None:
        """Run a step whose tokens another rank chooses; `take_result` books them later."""
        self.launch(step)
        if not self.can_run_ahead:
            with torch.inference_mode():
                self._compute(self._flights[-1])

    def take_result(self, result: StepResult) -> None:
        """Book the oldest step with another rank's tokens."""
        assert self._flights, "no step is in flight"
        flight = self._flights.popleft()
        self._slots.book(flight.step, result)

    def cancel(self) -> bool:
        """Drop all steps in flight; their admissions, pages and releases stand. Return True if done.

        Return False if steps begin in launch() and some are in flight.
        """
        self.advance()
        if (self.can_run_ahead or self._logits_on_other_stage) and self._flights:
            return False
        self._flights.clear()
        self._slots.forget_flights()
        return True

    @torch.inference_mode()
    def execute(self, step: LiveStep) -> StepResult:
        """Run one step over the caller's sequences, and wait for it; nothing else may be in flight."""
        self._check_idle()
        flight = _Flight(step)
        with self.on_stream():
            return self._compute(flight)

    @torch.inference_mode()
    def hidden_rows(self, step: LiveStep) -> torch.Tensor:
        """Run a step and choose nothing: the final hidden states of every row, [T, H], valid until the next step."""
        self._check_idle()
        with self.on_runner_stream():
            batch = self.fill_batch(step, list(range(step.num_tokens)))
            hidden_TH = self.model.hidden(batch, self.backend.plan(batch))[: step.num_tokens]
            self.sampler.end_step()
            return hidden_TH

    @torch.inference_mode()
    def row_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """float32 logits of up to PROMPT_ROWS of these rows: [R, V], valid until the next call or step."""
        with self.on_runner_stream():
            return self.model.logits(hidden_RH)

    @torch.inference_mode()
    def warm(
        self,
        rows: SequenceABC[int],
        graphs: StepGraphs | None,
        on_progress: Callable[[int, int], None],
        on_warm: Callable[[int, int], None] | None = None,
    ) -> None:
        """Run every kernel specialization, so that nothing compiles afterwards, and capture the graphs.

        Steps of `rows` rows launch all specializations together (runner/graphs.py). `on_progress(done, total)`
        counts graphs, `on_warm` the steps before them.
        """
        with self.on_stream():
            step, logit_rows = self._dummy_step(self.limits.max_num_batched_tokens)
            batch = self.fill_batch(step, logit_rows)
            self.model.step_logits(batch, self.backend.plan(batch, captured=True))  # every tile size
            self.sampler.end_step()
            for start, num_rows in self.backend.eager_steps():
                batch = self.fill_batch(self.eager_step(start, num_rows), [num_rows - 1])
                self.model.hidden(batch, self.backend.plan(batch))
                self.sampler.end_step()
            if self._copy_cache is not None:
                self._copy_cache([(0, self.num_pages - 1)], (0, self.limits.max_num_seqs - 1))
            for number, num_rows in enumerate(rows, 1):
                if on_warm is not None:
                    on_warm(number, len(rows) + 1)
                self._warm_rows(num_rows)
        if graphs is not None and self.stream is not None:
            with self.on_stream():
                self._capture(graphs, self.stream, on_progress)
                self.stream.synchronize()
            self.graphs = graphs

    def _capture(self, graphs: StepGraphs, stream: torch.cuda.Stream, on_progress: Callable[[int, int], None]) -> None:
        """Capture every graph of this rank. All ranks capture the same sizes in the same order."""
        batches = {}

        def run(size: int, is_decode: bool) -> torch.Tensor:
            if (size, is_decode) not in batches:
                batches.clear()
                batch = self.capture_batch(size, is_decode, graphs)
                batches[size, is_decode] = batch, self.backend.plan(batch, captured=True)
            return self.run_captured(*batches[size, is_decode])

        def meet(size: int, is_decode: bool) -> None:
            if self._logits_on_other_stage:
                self.sampler.find_argmax(_absent(graphs.logit_rows(size, is_decode)))

        graphs.capture(run, stream, on_progress, meet)

    def run_captured(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Run what a graph captures: resolve tokens, run this stage's layers, then, if it is the last, argmax."""
        self.sampler.resolve(batch.token_ids_T)
        logits_RV = self.model.step_logits(batch, plan)
        if self._logits_on_other_stage:
            self.sampler.end_step()
        else:
            self.sampler.find_argmax(logits_RV, self._keep_slots(logits_RV.shape[0]))
        return logits_RV

    def _warm_rows(self, num_rows: int) -> None:
        """Run both paths of `num_rows` rows: small batches take the fused decode path if all logits are wanted."""
        batch = self.buffers.fill(LiveStep(()), [], num_rows)
        plan = self.backend.plan(batch, captured=True)
        self.sampler.resolve(batch.token_ids_T)
        hidden_TH = self.model.hidden(batch, plan)
        self.sampler.end_step()
        if num_rows <= max(self._most_sampled, PROMPT_ROWS) and self._logits_on_other_stage:
            self.model.step_logits(batch, plan)
            self.sampler.end_step()
            self._warm_choices(_absent(num_rows))
        elif num_rows <= max(self._most_sampled, PROMPT_ROWS):
            self.model.logits(hidden_TH)
            self._warm_choices(self.model.step_logits(batch, plan))

    def _warm_choices(self, logits_RV: torch.Tensor) -> None:
        """Warm the sampler on these logits, or jointly with the stage that has them."""
        num_chosen = min(len(logits_RV), self._most_sampled)
        self.sampler.find_argmax(logits_RV[:num_chosen], self._keep_slots(num_chosen))
        self.sampler.warm(logits_RV)

    def close(self) -> None:
        """Free the graphs and all memory; nothing can run afterwards. Idempotent."""
        if self._flights and self.stream is not None:
            with suppress(RuntimeError):  # a device that has failed runs nothing any more
                self.stream.synchronize()
        self._flights.clear()
        if self._keep_if_failed():
            return
        if self.graphs is not None:
            self.graphs.release()
            self.graphs = None
        for name in ("model", "backend", "buffers", "sampler", "_copy_cache", "pooled_rows"):
            vars(self).pop(name, None)

    def _keep_if_failed(self) -> bool:
        """Return True if the device has failed; then keep all, with its pinned memory, until the process ends."""
        if not self._is_kept and has_failed(self.device):
            log.error("%s has failed: what the engine holds there is free when this process ends", self.device)
            keep_with_process(self)
            self._is_kept = True
        return self._is_kept

    def on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @contextmanager
    def _throttle_stage(self) -> Iterator[None]:
        """On a GPU stage, begin no step before the one before the last has ended."""
        if self.stream is None:
            yield
            return
        has_all = len(self._stage_ends) == MAX_UNDER_WAY
        end = self._stage_ends.popleft() if has_all else torch.cuda.Event()
        end.synchronize()
        yield
        end.record(self.stream)
        self._stage_ends.append(end)

    @contextmanager
    def on_runner_stream(self) -> Iterator[None]:
        """On the runner's stream, after what the caller's stream has begun and before what it begins next."""
        if self.stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            yield
        outside.wait_stream(self.stream)

    def begin(self, flight: _Flight) -> None:
        """Copy what prefixes lack, compute a step, then copy for forks and snapshots. A GPU only enqueues."""
        self._restore(flight.step.step)
        self._begin_rows(flight)
        self._keep_states(flight.step.step)
        for item in flight.step.scheduled if flight.step.has_forks else ():
            if item.source is not None:
                self._copy_fork(item.sequence, item.source, item.num_tokens)

    def _restore(self, step: Step) -> None:
        """Copy pages whose first rows admitted sequences continue, and snapshots of states to their slots.

        No row of this step is written yet. A copy has the whole page, because rows of a group with several chunks a
        page lie apart. The sequence writes what follows its rows before it reads that.
        """
        for one in step.admitted:
            if one.state_from != NO_PLACE:
                self._copy_state(self._snapshot_place(one.state_from), one.slot)
        pairs = [(copy.source, copy.target) for one in step.admitted for copy in one.copies]
        if pairs:
            assert self._copy_cache is not None, "prefixes with open rows need a cache that can be copied"
            self._copy_cache(pairs, None)

    def _keep_states(self, step: Step) -> None:
        """Copy states of slots to snapshots; every row of this step has been computed."""
        for item in step.items:
            if item.state_to != NO_PLACE:
                self._copy_state(item.slot, self._snapshot_place(item.state_to))

    def _snapshot_place(self, number: int) -> int:
        """Return the place of a snapshot among the states: after those of the slots."""
        return self.limits.max_num_seqs + number

    def _copy_state(self, source: int, target: int) -> None:
        assert self._copy_cache is not None, "snapshots need a cache that can be copied"
        self._copy_cache([], (source, target))

    def _copy_fork(self, fork: Sequence, source: Sequence, num_tokens: int) -> None:
        """Copy the pages of the source after those that the fork shares, and its states. No later step has begun."""
        pairs: list[tuple[int, int]] = []
        for group, table, pages in zip(self.groups, source.tables, fork.tables, strict=True):
            for own in group.copied(fork.num_stored, num_tokens):
                pairs += zip(table[own.start : own.stop], pages[own.start : own.stop], strict=True)
        assert self._copy_cache is not None, "forks need a cache that can be copied"
        self._copy_cache(pairs, (source.slot, fork.slot))

    def _begin_rows(self, flight: _Flight) -> None:
        """Compute the rows of a step, and begin to choose.

        Exception: prompt logprobs are read back in blocks, so such a step, and those in flight before it, are finished
        when this returns; their results wait for collect().
        """
        wanted = WantedRows.of(flight.step)
        if self._logits_on_other_stage:
            self.compute_stage(flight.step, wanted)
            flight.elsewhere = wanted
            return
        if not wanted.has_prompts:
            flight.choosing = self._choose(flight, wanted)
            return
        is_follower = not self._is_sampling_rank  # rank 0 sends the result later
        for earlier in self._flights:
            if earlier is flight or is_follower:
                break
            self._settle(earlier)
        flight.result = self._with_prompt_logprobs(flight.step, wanted)
        if self._flights and self.can_run_ahead and not is_follower:
            self._settle(flight)

    def _compute(self, flight: _Flight) -> StepResult:
        """Return a step's results; begin it if it has not begun."""
        if flight.result is None:
            if flight.choosing is None and flight.elsewhere is None:
                self.begin(flight)
            if flight.elsewhere is not None:
                flight.result = self._meet_last_stage(flight.step, flight.elsewhere)
            elif flight.choosing is not None:
                samples = flight.choosing.read()
                flight.result = _result_of(flight.step, samples, pooled=_read_pooled(flight.pooled))
        assert flight.result is not None, "the step has not begun"
        return flight.result

    def compute_stage(self, step: LiveStep, wanted: WantedRows) -> None:
        """Compute this stage of a step and send its rows to the next."""
        found = self.graph_for(step, wanted)
        if found is not None:
            self._replay(step, wanted, *found)
            return
        if step.scheduled:
            batch = self.fill_batch(step, wanted.logit_rows)
            self.model.step_logits(batch, self.backend.plan(batch))
        self.sampler.end_step()

    def _meet_last_stage(self, step: LiveStep, wanted: WantedRows) -> StepResult:
        """Get the choices of a step whose logits the last stage has; nothing on ranks that do not sample.

        On a GPU the stream waits, and later steps of this stage may queue after it: the last stage needs none of them
        for this one.
        """
        if not self._is_sampling_rank:
            return StepResult(())
        if wanted.has_prompts:
            return self._prompt_results(step, wanted, None)
        if not wanted.logit_rows:
            return _result_of(step, ())
        num_logits, argmax_S, found = len(wanted.logit_rows), None, self.graph_for(step, wanted)
        if self.graphs is not None and found is not None:
            self.sampler.find_argmax(_absent(self.graphs.logit_rows(*found)))
            argmax_S = self.sampler.argmax_S[:num_logits]
        choosing = self.sampler.launch(_absent(num_logits), wanted.choices, self.eos_token_ids, argmax_S)
        return _result_of(step, choosing.read())

    def _settle(self, flight: _Flight) -> StepResult:
        """Compute and book a step after all before it are settled; then make choices that waited for its tokens."""
        result = self._compute(flight)
        if not flight.is_booked:
            self._slots.book(flight.step, result)
            for later in self._flights:
                if later is not flight and later.choosing is not None:
                    later.choosing.choose_late()
            flight.is_booked = True
        return result

    def advance(self) -> None:
        """Retire the step whose results were returned."""
        if self._flights and self._flights[0] is self._collected:
            self._settle(self._flights[0])
            self._flights.popleft()
        self._collected = None

    def _check_idle(self) -> None:
        self.advance()
        assert not self._flights, f"{len(self._flights)} steps are in flight"

    def _keep_slots(self, num_rows: int) -> torch.Tensor | None:
        slots_T = self.buffers.keep_slots_T
        return None if slots_T is None or not self.sampler.keeps_tokens else slots_T[:num_rows]

    def fill_batch(self, step: LiveStep, logit_rows: list[int], keep_slots: SequenceABC[int] = ()) -> Batch:
        """Fill the buffers; pad rows and wanted rows to step sizes, if there are any.

        The last layer writes wanted rows in place of rows. If forks want more than there are, the step is padded.
        """
        num_rows = self._padded(max(step.num_tokens, len(logit_rows)))
        num_logits = self._padded(len(logit_rows)) if logit_rows else 0
        batch = self.buffers.fill(step, logit_rows, num_rows, num_logits, keep_slots)
        is_coming = any(item.num_tokens > item.sequence.num_tokens for item in step.scheduled)
        if is_coming or self.sampler.shares_tokens:
            self.sampler.resolve(batch.token_ids_T)
        return batch

    def _padded(self, num_rows: int) -> int:
        """Return the least step size of at least `num_rows`."""
        return padded_rows(num_rows, self.row_sizes) if self.row_sizes else num_rows

    def graph_for(self, step: LiveStep, wanted: WantedRows) -> tuple[int, bool] | None:
        """Return the size and `is_decode` of a step's graph, or None if its kernels launch one by one.

        In a pipeline a step that chooses nothing has no graph: the last stage's graph would send rank 0 argmaxes that
        it does not wait for, since a long prompt continues in the first stage before the last has seen it.
        """
        num_rows, num_logits, is_staged = step.num_tokens, len(wanted.logit_rows), self.num_stages > 1
        if self.graphs is None or not step.scheduled or wanted.has_prompts or (is_staged and not num_logits):
            return None
        if wanted.pooled:  # small batches have no normed hidden states in a graph
            return None
        is_decode = num_logits == num_rows == len(step.scheduled) and not step.has_forks
        if self.row_sizes and is_decode:
            # Prompt rows take large tiles there (attention/tile_scheduler.py); decode steps have none.
            is_decode = all(item.start >= item.sequence.num_prompt_tokens for item in step.scheduled)
        size = self.graphs.size_for(num_rows, num_logits, is_decode)
        return None if size is None else (size, is_decode)

    def _replay(self, step: LiveStep, wanted: WantedRows, size: int, is_decode: bool) -> torch.Tensor:
        """Replay a step's graph; return logits with padding, none before the last stage."""
        assert self.graphs is not None, "nothing was captured"
        num_logits = self.graphs.logit_rows(size, is_decode)
        batch = self.buffers.fill(step, wanted.logit_rows, size, num_logits, wanted.keep_slots, is_listed=not is_decode)
        self.backend.plan(batch, captured=True)
        return self.graphs.replay(size, is_decode)

    def _choose(self, flight: _Flight, wanted: WantedRows) -> Choosing:
        """Run the model for a step without prompt logprobs, and begin to choose."""
        step = flight.step
        num_logits, found = len(wanted.logit_rows), self.graph_for(step, wanted)
        if not step.scheduled:
            return self.sampler.launch(None, [], self.eos_token_ids)
        if found is None:
            batch = self.fill_batch(step, wanted.logit_rows, wanted.keep_slots)
            plan = self.backend.plan(batch)
            if not num_logits:
                self.model.hidden(batch, plan)
                return self.sampler.launch(None, [], self.eos_token_ids)
            if wanted.pooled:
                hidden_RH = self.model.hidden(batch, plan)
                flight.pooled = self._send_pooled(hidden_RH, wanted)
                logits_RV = self.model.logits(hidden_RH)
            else:
                logits_RV = self.model.step_logits(batch, plan)
            logits_SV, argmax_S = logits_RV[:num_logits], None
        else:
            logits_SV = self._replay(step, wanted, *found)[:num_logits]
            argmax_S = self.sampler.argmax_S[:num_logits]
            if not num_logits:
                return self.sampler.launch(None, [], self.eos_token_ids)
        keep_slots_S = self._keep_slots(num_logits)
        return self.sampler.launch(logits_SV, wanted.choices, self.eos_token_ids, argmax_S, keep_slots_S)

    def _with_prompt_logprobs(self, step: LiveStep, wanted: WantedRows) -> StepResult:
        batch = self.fill_batch(step, wanted.logit_rows)
        return self._prompt_results(step, wanted, self.model.hidden(batch, self.backend.plan(batch)))

    def _prompt_results(self, step: LiveStep, wanted: WantedRows, hidden_RH: torch.Tensor | None) -> StepResult:
        """Make results of final hidden states; None if another stage has them."""
        pooled = None if hidden_RH is None else self._send_pooled(hidden_RH, wanted)
        prompts = [
            self._prompt_logprobs(item, *rows, hidden_RH) if rows[1] else ()
            for item, rows in zip(step.scheduled, wanted.prompt_rows, strict=True)
        ]
        samples: list[SequenceSample] = []
        for row, choice in zip(wanted.sampled, wanted.choices, strict=True):
            logits_1V = self._logits_of(hidden_RH, row, 1)
            samples += self.sampler.launch(logits_1V, [choice], self.eos_token_ids).read()
        return _result_of(step, samples, prompts, _read_pooled(pooled))

    def _send_pooled(self, hidden_RH: torch.Tensor, wanted: WantedRows) -> PooledCopy | None:
        """Begin to copy pooled rows to the host; on rank 0 only."""
        if not wanted.pooled or not self._is_sampling_rank:
            return None
        assert self.pooled_rows is not None, "pooled rows need buffers on the host"
        return self.pooled_rows.send(hidden_RH, wanted.pooled)

    def _logits_of(self, hidden_RH: torch.Tensor | None, first_row: int, num_rows: int) -> torch.Tensor:
        if hidden_RH is None:
            return _absent(num_rows)
        # Multiply neighbours too, up to a step size: another row count could round differently in the head.
        num_multiplied = self._padded(num_rows)
        first = min(first_row, len(hidden_RH) - num_multiplied)
        logits_RV = self.model.logits(hidden_RH[first : first + num_multiplied])
        return logits_RV[first_row - first :][:num_rows]

    def _prompt_logprobs(
        self, item: ScheduledSequence, first_row: int, num_rows: int, hidden_RH: torch.Tensor | None
    ) -> tuple[TokenLogprobs, ...]:
        num_top = item.sequence.params.prompt_logprobs
        assert num_top is not None, f"{item.sequence.sequence_id=} has no prompt logprobs"
        logprobs: list[TokenLogprobs] = []
        for offset in range(0, num_rows, PROMPT_ROWS):
            count = min(PROMPT_ROWS, num_rows - offset)
            logits_TV = self._logits_of(hidden_RH, first_row + offset, count)
            target_start = item.start + offset + 1
            targets = item.sequence.token_ids[target_start : target_start + count]
            logprobs.extend(self.sampler.prompt_logprobs(logits_TV, targets, num_top))
        return tuple(logprobs)

    def capture_batch(self, size: int, is_decode: bool, graphs: StepGraphs) -> Batch:
        """Fill a step of this shape: padding alone, or dummy prompts whose last rows are wanted."""
        if is_decode:
            return self.buffers.fill(LiveStep(()), [], size)
        step, logit_rows = self._dummy_step(size)
        return self.buffers.fill(step, logit_rows, size, graphs.logit_rows(size, is_decode), is_listed=True)

    def eager_step(self, start: int, num_rows: int) -> LiveStep:
        """Make a step of one sequence after a context of arbitrary data on the first pages."""
        length = start + num_rows
        sequence = self.dummy_sequence(length, 0)
        return LiveStep((ScheduledSequence.of(sequence, start, num_rows),))

    def dummy_sequence(self, length: int, slot: int) -> Sequence:
        """Make a sequence on the first pages, with the states of a slot."""
        sequence = Sequence(next(self._dummy_ids), [0] * length, length, SamplingParams(), seed=0, max_tokens=1)
        sequence.tables, sequence.slot = ring_tables(self.groups, length, length), slot
        return sequence

    def _dummy_step(self, num_rows: int) -> tuple[LiveStep, list[int]]:
        """Make prompts of `num_rows` rows in all, on the first pages, still empty; only their last rows are wanted."""
        longest = self.limits.max_model_len
        items, logit_rows, row = [], [], 0
        while row < num_rows and len(items) < self.limits.max_num_seqs:
            length = min(longest, num_rows - row)
            sequence = self.dummy_sequence(length, len(items))
            items.append(ScheduledSequence.of(sequence, 0, length))
            row += length
            if len(logit_rows) < num_rows - 1:
                logit_rows.append(row - 1)
        return LiveStep(tuple(items)), logit_rows


def _absent(num_rows: int) -> torch.Tensor:
    """Return a stand-in for logits of another stage: only their row count is known."""
    return torch.empty((num_rows, 0))


def _read_pooled(copy: PooledCopy | None) -> list[bytes]:
    return [] if copy is None else copy.read()


def _result_of(
    step: LiveStep,
    samples: Iterable[SequenceSample],
    prompts: SequenceABC[tuple[TokenLogprobs, ...]] | None = None,
    pooled: Iterable[bytes] = (),
) -> StepResult:
    """Group choices by sequence: the longest accepted run of draft tokens, and the token after it."""
    own_samples, vectors = iter(samples), iter(pooled)
    results = []
    for index, item in enumerate(step.scheduled):
        prompt = () if prompts is None else prompts[index]
        if not item.samples:
            results.append(SequenceResult.of(None, None, prompt))
            continue
        own = [next(own_samples) for _ in range(1 + len(item.proposals))]
        if item.proposals:
            refused = (nth for nth, token_id in enumerate(item.proposals) if own[nth].token_id != token_id)
            del own[next(refused, len(item.proposals)) + 1 :]
        logprobs = tuple(sample.logprobs for sample in own if sample.logprobs is not None)
        vector = next(vectors, b"") if item.sequence.is_pooled else b""
        results.append(SequenceResult(tuple(sample.token_id for sample in own), logprobs, prompt, vector))
    return StepResult(tuple(results))
