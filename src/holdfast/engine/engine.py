"""Engine: a front and a core: requests in, deltas out, one step at a time; a request can only fail itself; no torch.

    step     LLM (through a Driver) and AsyncLLM (through an EngineThread) call it in a loop:
             the core returns the outputs of a step, and the front makes text of them while the next step runs

The core is an `EngineCore` here, or one in a process of its own (engine/core_process.py).

An exception in code that a request controls ends that request. An exception in the core ends the engine: every live
request and every later call gets an error. Ctrl-C arrives only while a result is awaited; steps that were not collected
are scheduled anew or collected later, so their requests can be aborted or go on.

One thread at a time may call an engine (`prepare`, `prepare_chat` and `stats` excepted). `LLM` and `AsyncLLM` drive it.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import NoReturn

from holdfast.config import Limits
from holdfast.engine.admission import PreparedRequest, describe
from holdfast.engine.core import Core, EngineCore, Waiting
from holdfast.engine.front import Front
from holdfast.engine.memory_map import MemoryMap
from holdfast.engine.messages import CoreStats, Ending
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
class EngineStats(CoreStats):
    """State of an engine: that of its core, and the counters of its front."""

    num_unfinished_requests: int = 0
    num_output_tokens: int = 0
    num_requests: int = 0


class InterruptShield:
    """Defers SIGINT to the end of the `with` block, or delivers it at once inside `lifted()`.

    Python delivers SIGINT to the main thread only; in other threads this does nothing.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._is_lifted = False
        self._is_pending = False

    def __enter__(self) -> "InterruptShield":
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            # The default and ignoring dispositions raise nothing, and a handler set outside Python cannot be restored.
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._on_signal)
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
        """Deliver interrupts inside the block, a deferred one first.

        A flag, because setting a handler is slow compared with a step of a small model.
        """
        try:
            self._is_lifted = True
            if self._is_pending:
                self._is_pending = False
                self._on_signal(signal.SIGINT, None)
            yield
        finally:
            self._is_lifted = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._is_lifted and self._handler is not None:
            # Defer others while this one propagates; a handler that only takes note leaves the shield lifted.
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
        self.pooling = pooling or Pooling()
        self.front = Front(
            core.facts, tokenizer, chat_template, seed, clock, vocabulary, takes_priorities, self.pooling
        )
        admission = self.front.admission
        # They check a request and change no state. Any thread.
        self.prepare, self.prepare_pooled = admission.prepare, admission.prepare_pooled
        self.prepare_chat = admission.prepare_chat
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.has_chat_template = chat_template is not None
        self.generation = generation or GenerationDefaults()
        """Sampling defaults of the model's files."""
        self._death: Exception | None = None

    @property
    def limits(self) -> Limits:
        return self.core.facts.limits

    @property
    def memory(self) -> MemoryReport | None:
        """Planned and held bytes of each owner."""
        return self.core.memory

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of a core in this process."""
        assert isinstance(self.core, EngineCore), "the scheduler is in another process"
        return self.core.scheduler

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    def add_request(
        self, request_id: str | None, prompt: object, params: SamplingParams, *, cache_salt: str | None = None
    ) -> str:
        """Check and queue a request; return its name."""
        self.raise_if_dead()
        return self.submit(self.prepare(prompt, params, cache_salt=cache_salt), request_id)

    def submit(self, prepared: PreparedRequest, request_id: str | None = None) -> str:
        """Queue a prepared request, all of its completions or none; return its name."""
        self.raise_if_dead()
        name = self.front.unused_name() if request_id is None else self.front.checked_name(request_id)
        with InterruptShield(), self._fatal():
            self.core.check_room(prepared.params.n)
            completions = self.front.open(prepared, name)
            self.core.submit([completion.request for completion in completions])
            self.front.register(name, completions)
        return name

    def abort(self, request_id: str) -> list[CompletionDelta]:
        """End a request and release its pages; return its last deltas. Idempotent."""
        self.raise_if_dead()
        with InterruptShield(), self._fatal():
            deltas, sequence_ids = self.front.end_request(request_id, Ending("abort"))
            if sequence_ids:
                self.core.abort(sequence_ids)
            return deltas

    def hang_up(self, request_id: str) -> None:
        """Announce an abort, so that a step without other requests may stop at its next layer. Any thread."""
        self.core.hang_up(self.front.sequence_ids(request_id))

    def abort_all(self) -> list[CompletionDelta]:
        """End every live request."""
        self.raise_if_dead()
        return [delta for name in self.front.names() for delta in self.abort(name)]

    def has_unfinished(self) -> bool:
        """True while a step could return deltas."""
        return bool(self.front.num_unfinished or self.front.has_undelivered)

    def step(self) -> list[CompletionDelta]:
        """Run one step; return a delta for each completion that got a token or ended.

        If the model fails, every live request gets an error delta, and the next call raises EngineDeadError.
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
        # Only now, so that an interrupt at the end of the shield does not lose them.
        return self.front.deliver()

    def settle(self) -> None:
        """Let steps in flight end after the last request, so that all pages are released."""
        if not self.is_dead:
            self._guarded(self.core.settle)

    def watch(self) -> None:
        """Check an idle engine: its core process may have ended."""
        if not self.is_dead:
            self._guarded(self.core.watch)

    def ask_map(self) -> None:
        """Request a map of the pages; it arrives with a step, or with `watch` if idle."""
        self.raise_if_dead()
        with InterruptShield(), self._fatal():
            self.core.ask_map()

    def take_map(self) -> MemoryMap | None:
        """Return the requested map once it has arrived."""
        taken = self.core.take_map()
        return None if taken is None else self.front.named_map(taken)

    def stats(self) -> EngineStats:
        """Return the current state, or that of the core process's last message, and the counters since the start."""
        front = self.front
        return EngineStats(
            **asdict(self.core.stats()),
            num_unfinished_requests=front.num_unfinished,
            num_output_tokens=front.num_output_tokens,
            num_requests=front.num_requests,
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.raise_if_dead()
        with self._fatal():
            self.core.reset_prefix_cache()

    def close(self) -> None:
        """Release all memory, after every request has ended. Idempotent."""
        self.front.close()
        self.core.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_transfer("an engine")

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError with the first cause, if there was one."""
        if self._death is not None:
            death = self._death
            reason = death.values.get("reason", str(death)) if isinstance(death, EngineDeadError) else describe(death)
            raise EngineDeadError("engine.dead", reason=reason) from death

    def _guarded(self, call: Callable[[Waiting], None]) -> None:
        with InterruptShield() as shield:
            try:
                call(shield.lifted)
            except Exception as error:
                self._die(error)

    def _die(self, cause: Exception) -> None:
        """Fail every live request; the core is not touched any more."""
        # An EngineDeadError names the rank or process that is gone: the traceback here is not the cause.
        _log.error(
            "the engine stopped: %s", describe(cause), exc_info=None if isinstance(cause, EngineDeadError) else cause
        )
        self._death = cause
        self.front.end_all(Ending("error", error=f"the engine stopped: {describe(cause)}"))

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """An exception of the core ends the engine, outside a step too."""
        try:
            yield
        except RequestError:
            raise
        except Exception as error:
            self._die(error)
            self.raise_if_dead()
