"""Engine: a front and a core joined: requests in, deltas out, one step at a time; a request can only fail itself; no torch.

    step     what LLM (through a Driver) and AsyncLLM (through an EngineThread) call again and again:
             the core gives what a step brought, the front makes text of it while the next one runs

The core is an `EngineCore` here, or one in a process of its own (engine/core_process.py).

An exception in code that a request controls ends that request. An exception in the core ends the engine: every live
request gets an error, and so does every later call. Ctrl-C comes through only while a result is awaited; steps that
were not collected are scheduled anew or collected later, so that everything in them can be aborted, or simply goes on.

One thread at a time may call an engine (`prepare`, `prepare_chat` and `stats` excepted). `LLM` and `AsyncLLM` drive it.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import NoReturn

from holdfast.config import Limits
from holdfast.engine.admission import ChatOptions, PreparedRequest, describe
from holdfast.engine.core import Core, EngineCore, Waiting
from holdfast.engine.front import Front
from holdfast.engine.memory_map import MemoryMap
from holdfast.engine.messages import Ending
from holdfast.engine.pooling import Pooling
from holdfast.engine.scheduler import Scheduler
from holdfast.errors import EngineDeadError, RequestError, refuse_transfer
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.memory.report import MemoryReport
from holdfast.observability.log import get_logger
from holdfast.request.outputs import CompletionDelta
from holdfast.request.sampling_params import SamplingParams
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.grammar import Vocabulary
from holdfast.text.tokenizer import Tokenizer

_log = get_logger(__name__)


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
    num_proposed_tokens: int = 0
    """Tokens that were guessed ahead and checked (speculative) ..."""
    num_accepted_tokens: int = 0
    """... and those of them that became part of an answer."""


class InterruptShield:
    """Holds SIGINT back inside the `with` block and delivers it at its end, or at once inside `lifted()`.

    Python hands SIGINT to the main thread only, between any two of its instructions; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        """Whoever is to hear of it; None where nobody would."""
        self._is_lifted = False
        self._is_pending = False

    def __enter__(self) -> "InterruptShield":
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            # The default and ignoring dispositions raise nothing, and a handler set outside Python could not be put back.
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            if self._is_pending:
                handler(signal.SIGINT, None)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let interrupts through, a remembered one first; the shield is up again when the block is left by any way.

        Setting a handler takes Python longer than a flag, and a step of a small model is short.
        """
        try:
            self._is_lifted = True
            if self._is_pending:
                self._is_pending = False
                self._hear(signal.SIGINT, None)
            yield
        finally:
            self._is_lifted = False

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        if self._is_lifted and self._handler is not None:
            # Up while this one is on its way out of the block; a handler that only takes note leaves it lifted.
            self._is_lifted = False
            self._handler(signum, frame)
            self._is_lifted = True
        else:
            self._is_pending = True


class Engine:
    """One model, one queue."""

    def __init__(
        self,
        core: Core,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        generation: GenerationDefaults | None = None,
        vocabulary: Vocabulary | None = None,
        takes_priorities: bool = True,
        pooling: Pooling | None = None,
    ) -> None:
        self.core = core
        self.front = Front(core.facts, tokenizer, chat_template, seed, clock, vocabulary, takes_priorities)
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.has_chat_template = chat_template is not None
        self.generation = generation or GenerationDefaults()
        """What the makers of the model advise."""
        self.pooling = pooling or Pooling()
        """What the model can give beside answers."""
        self._death: Exception | None = None

    @property
    def limits(self) -> Limits:
        return self.core.facts.limits

    @property
    def memory(self) -> MemoryReport | None:
        """Who holds how many bytes, planned and taken."""
        return self.core.memory

    @property
    def scheduler(self) -> Scheduler:
        """Queues and pages of a core in this process, to be looked at between two steps."""
        assert isinstance(self.core, EngineCore), "the scheduler is in another process"
        return self.core.scheduler

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    def prepare(self, prompt: object, params: object, *, cache_salt: str | None = None) -> PreparedRequest:
        """Find everything that can be wrong with a request, and change nothing. Any thread may call this."""
        self.pooling.check_answers()
        return self.front.prepare(prompt, params, cache_salt)

    def prepare_pooled(
        self, prompt: object, *, cache_salt: str | None = None, truncate: bool = False, priority: int = 0
    ) -> PreparedRequest:
        """The same for a prompt whose hidden state is wanted, cut at its end if `truncate` and it is too long."""
        return self.front.prepare_pooled(prompt, cache_salt, truncate=truncate, priority=priority)

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
        self.pooling.check_answers()
        return self.front.prepare_chat(messages, params, cache_salt, template_options, options)

    def check_form(self, params: object) -> None:
        """The part of `prepare` that may take seconds: whether the form of an answer can be met. Any thread may call this."""
        self.front.check_form(params)

    def add_request(
        self, request_id: str | None, prompt: object, params: SamplingParams, *, cache_salt: str | None = None
    ) -> str:
        """Check a request and queue it; returns its name."""
        self.raise_if_dead()
        return self.submit(self.prepare(prompt, params, cache_salt=cache_salt), request_id)

    def submit(self, prepared: PreparedRequest, request_id: str | None = None) -> str:
        """Queue a request that `prepare` found sound; returns its name. All of its completions are queued, or none."""
        self.raise_if_dead()
        name = self.unused_request_id() if request_id is None else self.front.checked_name(request_id)
        with InterruptShield(), self._fatal():
            self.core.check_room(prepared.params.n)
            opened = self.front.open(prepared, name)
            self.core.submit(opened.sequences)
            self.front.register(opened)
        return name

    def unused_request_id(self) -> str:
        """A name that no live request has."""
        return self.front.unused_name()

    def abort(self, request_id: str) -> list[CompletionDelta]:
        """End a request now and give its pages back; the last deltas of its completions, none if it is not alive."""
        self.raise_if_dead()
        with InterruptShield(), self._fatal():
            deltas, sequence_ids = self.front.end_request(request_id, Ending("abort"))
            if sequence_ids:
                self.core.abort(sequence_ids)
            return deltas

    def hang_up(self, request_id: str) -> None:
        """Any thread: `abort` follows as soon as the step in progress ends, which may be at its next layer if it has no others."""
        self.core.hang_up(self.front.sequence_ids(request_id))

    def abort_all(self) -> list[CompletionDelta]:
        """End every live request."""
        self.raise_if_dead()
        return [delta for name in self.front.names() for delta in self.abort(name)]

    def has_unfinished(self) -> bool:
        """True while a step could bring something."""
        return bool(self.front.num_unfinished or self.front.has_undelivered)

    def step(self) -> list[CompletionDelta]:
        """Run one step; what it added to each completion that got a token or ended.

        When the model fails, the error of every live request is returned, and the next call raises EngineDeadError.
        """
        if self.front.has_undelivered:
            return self.front.deliver()
        self.raise_if_dead()
        with InterruptShield() as shield:
            try:
                ended = self.front.take(self.core.step(shield.lifted))
                if ended:
                    self.core.abort(ended)
            except Exception as error:
                self._die(error)
        # Set aside until here, so that an interrupt at the end of the shield does not lose them.
        return self.front.deliver()

    def settle(self) -> None:
        """Nobody waits any more: let steps in flight end, so that all pages come back."""
        if not self.is_dead:
            self._guarded(self.core.settle)

    def watch(self) -> None:
        """Look after an engine that has nothing to do: a core in another process may have ended."""
        if not self.is_dead:
            self._guarded(self.core.watch)

    def ask_map(self) -> None:
        """Have a look taken at the pages; it comes with a step, or with `watch` where there is none to run."""
        self.raise_if_dead()
        with InterruptShield(), self._fatal():
            self.core.ask_map()

    def take_map(self) -> MemoryMap | None:
        """Who holds which pages, once the look that was asked for is here."""
        taken = self.core.take_map()
        return None if taken is None else self.front.named_map(taken)

    def stats(self) -> EngineStats:
        """Counters since the start, and the state of now, or of the last message of a core in another process."""
        core = self.core.stats()
        return EngineStats(
            num_running=core.num_running,
            num_waiting=core.num_waiting,
            num_unfinished_requests=self.front.num_unfinished,
            kv_usage=core.kv_usage,
            num_prefix_query_tokens=core.num_prefix_query_tokens,
            num_prefix_hit_tokens=core.num_prefix_hit_tokens,
            num_prompt_tokens=core.num_prompt_tokens,
            num_output_tokens=self.front.num_output_tokens,
            num_preemptions=core.num_preemptions,
            num_requests=self.front.num_requests,
            num_steps=core.num_steps,
            num_proposed_tokens=core.num_proposed_tokens,
            num_accepted_tokens=core.num_accepted_tokens,
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.raise_if_dead()
        with self._fatal():
            self.core.reset_prefix_cache()

    def close(self) -> None:
        """Give all memory back, when every request has ended; nothing can run afterwards. May be called twice."""
        self.front.close()
        self.core.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_transfer("an engine")

    def raise_if_dead(self) -> None:
        """EngineDeadError with the first cause, if there was one."""
        if self._death is not None:
            # What a core in a process of its own died of says who and why, and what to do is said here.
            death = self._death
            words = f"{death.asked}; {death.has}" if isinstance(death, EngineDeadError) else describe(death)
            raise EngineDeadError(
                "the engine was asked to go on", f"it stopped at {words}", "make a new engine"
            ) from self._death

    def _guarded(self, call: Callable[[Waiting], None]) -> None:
        with InterruptShield() as shield:
            try:
                call(shield.lifted)
            except Exception as error:
                self._die(error)

    def _die(self, cause: Exception) -> None:
        """Nothing below can be trusted any more, so it is not touched: every live request is told, and that is all."""
        # Where a rank, or a core, is gone the sentence says all: frames of whoever waited for it are not the cause.
        is_told = isinstance(cause, EngineDeadError)
        _log.error("the engine stopped: %s", describe(cause), exc_info=None if is_told else cause)
        self._death = cause
        self.front.end_all(Ending("error", error=f"the engine stopped at {describe(cause)}"))

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
