"""Engine: requests in, tokens out, one step at a time; a request can only fail itself; no torch.

A step: the scheduler says who runs, the runner runs them, each completion takes its token, and what it says is a delta.

    step        what LLM (through a Driver) and AsyncLLM (through an EngineThread) call again and again
    _step       schedule -> execute -> _book; only the runner can be interrupted
    _book       every token to the scheduler, then to its completion
    _advance    one completion: its text, its delta, its end

An exception in code that a request controls ends that request. An exception in the runner or the scheduler ends the
engine: every live request gets an error, and so does every later call. Ctrl-C comes through only while the runner
runs; the interrupted step is not booked, so that everything in it can be aborted, or simply runs again.

One thread at a time may call an engine (`prepare` and `prepare_chat` excepted). `LLM` and `AsyncLLM` drive it.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import NoReturn, Protocol

from holdfast.cache.groups import longest_sequence
from holdfast.config import Limits
from holdfast.engine.admission import Admission, ChatOptions, PreparedRequest, derive_seed, describe
from holdfast.engine.outputs import Completion, Ending
from holdfast.engine.scheduler import Scheduler
from holdfast.errors import EngineDeadError, QueueFullError, RequestError, refuse_transfer, shown
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.memory.report import MemoryReport
from holdfast.observability.log import get_logger
from holdfast.request.outputs import CompletionDelta
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, LiveStep, Sequence, SequenceResult, StepResult
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.tokenizer import Tokenizer

MAX_REQUEST_ID_CHARS = 256
_log = get_logger(__name__)


class StepRunner(Protocol):
    """The model on its device, as the engine sees it."""

    limits: Limits
    num_pages: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def execute(self, step: LiveStep) -> StepResult:
        """Run a step and choose its tokens. An exception ends the engine; a step cut short by Ctrl-C may come again."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One look at an engine."""

    num_running: int
    num_waiting: int
    """Sequences, like those above; a request with n completions is n of them."""
    num_unfinished_requests: int
    kv_usage: float
    """Share of the KV pages that sequences hold."""
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_prompt_tokens: int
    """Prompt tokens computed, those that a preemption made necessary again included."""
    num_output_tokens: int
    num_preemptions: int
    num_requests: int
    num_steps: int


class InterruptShield:
    """Holds SIGINT back inside the `with` block and delivers it at its end, or at once inside `lifted()`.

    Python hands SIGINT to the main thread only, between any two of its instructions; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._handler: object = None
        self._is_pending = False

    def __enter__(self) -> "InterruptShield":
        self._raise_shield()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deliver()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let interrupts through, a remembered one first; the shield is up again when the block is left by any way."""
        try:
            self._deliver()
            yield
        finally:
            self._raise_shield()

    def _raise_shield(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        # The default and ignoring dispositions raise nothing, and a handler set outside Python could not be put back.
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._remember)

    def _deliver(self) -> None:
        handler, self._handler = self._handler, None
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
            if self._is_pending:
                self._is_pending = False
                handler(signal.SIGINT, None)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self._is_pending = True


class Engine:
    """One model, one queue. Names that callers give are labels; integers that never repeat own pages and state."""

    def __init__(
        self,
        runner: StepRunner,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        scheduler: Scheduler,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        generation: GenerationDefaults | None = None,
        memory: MemoryReport | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.has_chat_template = chat_template is not None
        self.limits = runner.limits
        self.generation = generation or GenerationDefaults()
        """What the makers of the model advise."""
        self.memory = memory
        """Who holds how many bytes, planned and taken."""
        self.scheduler = scheduler
        """Queues and pages, to be looked at between two steps."""
        self._runner = runner
        self._release = release
        limits = runner.limits
        longest = longest_sequence(
            scheduler.groups, runner.num_pages, limits.max_model_len, limits.max_num_batched_tokens
        )
        self._admission = Admission(longest, runner.vocab_size, scheduler.max_queue, tokenizer, chat_template)
        self._seed = seed
        self._clock = clock
        self._requests: dict[str, dict[int, Completion]] = {}
        """Live completions by the request's name, then by sequence id."""
        self._by_sequence: dict[int, Completion] = {}
        self._num_requests = 0
        self._num_sequences = 0
        self._undelivered: list[CompletionDelta] = []
        self._death: Exception | None = None
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_steps = 0

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    def prepare(self, prompt: object, params: object, *, cache_salt: str | None = None) -> PreparedRequest:
        """Find everything that can be wrong with a request, and change nothing. Any thread may call this."""
        return self._admission.prepare(prompt, params, cache_salt)

    def prepare_chat(
        self,
        messages: object,
        params: object,
        *,
        cache_salt: str | None = None,
        template_options: Mapping[str, object] | None = None,
        options: ChatOptions | None = None,
    ) -> PreparedRequest:
        """The same for a conversation."""
        return self._admission.prepare_chat(messages, params, cache_salt, template_options, options)

    def add_request(
        self, request_id: str | None, prompt: object, params: SamplingParams, *, cache_salt: str | None = None
    ) -> str:
        """Check a request and queue it; returns its name."""
        self.raise_if_dead()
        return self.submit(self.prepare(prompt, params, cache_salt=cache_salt), request_id)

    def submit(self, prepared: PreparedRequest, request_id: str | None = None) -> str:
        """Queue a request that `prepare` found sound; returns its name. All of its completions are queued, or none."""
        self.raise_if_dead()
        name = self.unused_request_id() if request_id is None else self._checked_name(request_id)
        num_free = self.scheduler.max_queue - self.scheduler.num_waiting
        if prepared.params.n > num_free:
            raise QueueFullError(
                f"{prepared.params.n} more completions were asked",
                f"{self.scheduler.num_waiting} wait and the queue holds {self.scheduler.max_queue}",
                "try again later, or raise max_queue",
            )
        try:
            completions = list(self._completions(name, prepared))
        except Exception as error:
            raise RequestError(
                "a request was given", f"its text could not be set up: {describe(error)}", "change the request"
            ) from error
        with InterruptShield(), self._fatal():
            self._queue([completion.sequence for completion in completions])
            self._num_requests += 1
            self._num_sequences += len(completions)
            self._requests[name] = {completion.sequence.sequence_id: completion for completion in completions}
            self._by_sequence.update(self._requests[name])
        return name

    def unused_request_id(self) -> str:
        """A name that no live request has."""
        number = self._num_requests
        while str(number) in self._requests:
            number += 1
        return str(number)

    def abort(self, request_id: str) -> list[CompletionDelta]:
        """End a request now and give its pages back; the last deltas of its completions, none if it is not alive."""
        self.raise_if_dead()
        with InterruptShield(), self._fatal():
            told = [delta for delta in self._undelivered if delta.request_id == request_id]
            self._undelivered = [delta for delta in self._undelivered if delta.request_id != request_id]
            return told + self._end_request(request_id, Ending("abort"))

    def abort_all(self) -> list[CompletionDelta]:
        """End every live request."""
        self.raise_if_dead()
        return [delta for name in list(self._requests) for delta in self.abort(name)]

    def has_unfinished(self) -> bool:
        """True while a step could bring something."""
        return bool(self._requests or self._undelivered)

    def step(self) -> list[CompletionDelta]:
        """Run one step; what it added to each completion that got a token or ended.

        When the model fails, the error of every live request is returned, and the next call raises EngineDeadError.
        """
        if self._undelivered:
            return self._delivered()
        self.raise_if_dead()
        with InterruptShield() as shield:
            try:
                self._step(shield)
            except Exception as error:
                self._die(error)
        # Set aside until here, so that an interrupt at the end of the shield does not lose them.
        return self._delivered()

    def stats(self) -> EngineStats:
        """Counters since the start, and the state of now."""
        scheduler = self.scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_unfinished_requests=len(self._requests),
            kv_usage=scheduler.kv_usage,
            num_prefix_query_tokens=scheduler.num_prefix_query_tokens,
            num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_requests=self._num_requests,
            num_steps=self._num_steps,
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.raise_if_dead()
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Give all memory back, when every request has ended; nothing can run afterwards. May be called twice."""
        release, self._release = self._release, None
        if release is not None:
            del self._runner  # its views keep the memory alive
            release()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_transfer("an engine")

    def raise_if_dead(self) -> None:
        """EngineDeadError with the first cause, if there was one."""
        if self._death is not None:
            raise EngineDeadError(
                "the engine was asked to go on", f"it stopped at {describe(self._death)}", "make a new engine"
            ) from self._death

    def _delivered(self) -> list[CompletionDelta]:
        deltas, self._undelivered = self._undelivered, []
        return deltas

    def _checked_name(self, request_id: object) -> str:
        if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
            raise RequestError(
                f"request id {shown(request_id)} was given",
                f"a string of 1 to {MAX_REQUEST_ID_CHARS} characters works",
                "change it or leave it out",
            )
        if request_id in self._requests or any(delta.request_id == request_id for delta in self._undelivered):
            raise RequestError(
                f"request id {shown(request_id)} was given", "a live request has it already", "choose another"
            )
        return request_id

    def _completions(self, name: str, prepared: PreparedRequest) -> Iterator[Completion]:
        params, now = prepared.params, self._clock()
        seed = derive_seed(self._seed, self._num_requests) if params.seed is None else params.seed
        # What is asked of the prompt is the same for all completions, so the first one answers for them.
        later_params = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        for index in range(params.n):
            own_params = later_params if index else params
            sequence = Sequence(
                sequence_id=self._num_sequences + index,
                token_ids=list(prepared.prompt_token_ids),
                num_prompt_tokens=len(prepared.prompt_token_ids),
                params=own_params,
                seed=derive_seed(seed, index),
                max_tokens=prepared.max_tokens,
                cache_salt=prepared.cache_salt,
                use_prefix_cache=own_params.prompt_logprobs is None and not own_params.skip_reading_prefix_cache,
                bad_word_ids=prepared.bad_word_ids,
            )
            yield Completion(name, index, sequence, self.tokenizer, now)

    def _queue(self, sequences: list[Sequence]) -> None:
        try:
            for sequence in sequences:
                self.scheduler.add(sequence)
        except RequestError:
            for sequence in sequences:
                self.scheduler.finish(sequence)
            raise

    def _step(self, shield: InterruptShield) -> None:
        """Schedule, execute, book."""
        step = self.scheduler.schedule()
        assert step is not None, "nothing is in flight, and the scheduler waits"
        if not step.scheduled:
            assert not self._by_sequence, f"nobody is scheduled of {len(self._by_sequence)} that want to run"
            return
        now = self._clock()
        for item in step.scheduled:
            completion = self._by_sequence[item.sequence.sequence_id]
            if completion.scheduled_at is None:
                completion.scheduled_at = now
        try:
            with shield.lifted():
                result = self._runner.execute(step)
        except Exception:
            raise
        except BaseException:
            self.scheduler.forget_steps()
            raise
        assert len(result.results) == len(step.scheduled), f"{len(result.results)} results for {len(step.scheduled)}"
        self._book(step, result.results)

    def _book(self, step: LiveStep, results: tuple[SequenceResult, ...]) -> None:
        """Give every sequence its token, and tell."""
        token_ids: list[int | None] = []
        for item, result in zip(step.scheduled, results, strict=True):
            token_id = result.token_id
            if token_id is not None and not 0 <= token_id < self._runner.vocab_size:
                completion = self._by_sequence[item.sequence.sequence_id]
                ending = Ending("error", error=_no_token_reason(token_id, item.sequence))
                self._undelivered += self._end([completion], ending)
                # Numbers that are not finite may lie in pages that others would share.
                self.scheduler.reset_prefix_cache()
                token_id = None
            token_ids.append(token_id)
        self.scheduler.complete(step, [() if token_id is None else (token_id,) for token_id in token_ids])
        self._num_steps += 1
        now = self._clock()
        for item, result, token_id in zip(step.scheduled, results, token_ids, strict=True):
            num_prompt = min(item.num_new_tokens, item.sequence.num_prompt_tokens - item.start)
            self._num_prompt_tokens += max(num_prompt, 0)
            completion = self._by_sequence.get(item.sequence.sequence_id)
            if completion is not None:
                self._num_output_tokens += token_id is not None
                self._advance(completion, item.start, token_id, result, now)

    def _advance(
        self, completion: Completion, start: int, token_id: int | None, result: SequenceResult, now: float
    ) -> None:
        """Hand a completion its token; what fails in its text ends this request alone."""
        try:
            completion.collect_prompt_logprobs(start, result)
            if token_id is None:
                return
            delta, ending = completion.advance(token_id, result, self._runner.eos_token_ids, now)
        except Exception as error:
            _log.warning("request %s failed: %s", shown(completion.request_id), describe(error), exc_info=error)
            ending = Ending("error", error=f"its text could not be made: {describe(error)}")
            self._undelivered += self._end_request(completion.request_id, ending)
            return
        self._undelivered.append(delta)
        if ending is not None:
            self._forget(completion)

    def _end_request(self, request_id: str, ending: Ending) -> list[CompletionDelta]:
        return self._end(self._requests.get(request_id, {}).values(), ending)

    def _end(self, completions: Iterable[Completion], ending: Ending) -> list[CompletionDelta]:
        now = self._clock()
        deltas = []
        for completion in list(completions):
            deltas.append(completion.end(ending, now))
            self._forget(completion)
        return deltas

    def _forget(self, completion: Completion) -> None:
        """Its pages and its state are given back; the request goes with its last completion."""
        sequence = completion.sequence
        self.scheduler.finish(sequence)
        del self._by_sequence[sequence.sequence_id]
        siblings = self._requests[completion.request_id]
        del siblings[sequence.sequence_id]
        if not siblings:
            del self._requests[completion.request_id]

    def _die(self, cause: Exception) -> None:
        """Nothing below can be trusted any more, so it is not touched: every live request is told, and that is all."""
        _log.error("the engine stopped: %s", describe(cause), exc_info=cause)
        self._death = cause
        ending = Ending("error", error=f"the engine stopped at {describe(cause)}")
        now = self._clock()
        self._undelivered += [completion.end(ending, now) for completion in self._by_sequence.values()]
        self._by_sequence.clear()
        self._requests.clear()

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Outside of a step too, an exception below the engine ends it."""
        try:
            yield
        except RequestError:
            raise
        except Exception as error:
            self._die(error)
            self.raise_if_dead()


def _no_token_reason(token_id: int, sequence: Sequence) -> str:
    where = f"after {sequence.num_output_tokens} tokens"
    if token_id == NO_TOKEN and sequence.params.allowed_token_ids is not None:
        return f"no token could be chosen {where}: of allowed_token_ids none is left that is finite and not banned"
    if token_id == NO_TOKEN:
        return f"the model's numbers were not finite {where}, so no token could be chosen"
    return f"the model chose token {token_id} {where}, which is outside the vocabulary"
