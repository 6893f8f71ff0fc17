"""AsyncLLM: a model for asyncio programs: many callers, one batch; torch is imported when a model is opened."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Unpack

from holdfast.api.chat_tokenizer import ChatTokenizer
from holdfast.api.llm import OnProgress, open_engine
from holdfast.api.options import ChatKeywords, EngineOptions, chat_values, sampling_params_from, takes_vllm_names
from holdfast.config import EngineConfig
from holdfast.engine.admission import Conversation, PreparedRequest, Prompt
from holdfast.engine.engine import Engine, EngineStats
from holdfast.engine.engine_thread import EngineThread, Health, Mailbox
from holdfast.engine.outputs import OutputAssembler
from holdfast.errors import EngineDeadError, RequestError, refuse_transfer
from holdfast.memory.report import MemoryReport
from holdfast.request.outputs import CompletionDelta, RequestOutput
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.vllm_names import missing_attribute
from holdfast.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model that answers many callers at once. Any event loop may call it, and several may at the same time.

    A request ends within one step of its reader: when the task is cancelled, when the loop over it is left, or when the
    generator is closed. A reader that is slower than the model finds what it missed in its next output.

    >>> async for output in llm.generate("Hello", SamplingParams(max_tokens=20)):
    ...     print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Open a model; the options are those of `LLM`. This blocks while the model loads."""
        config = EngineConfig.from_options(model=model, **options)
        self._start(open_engine(config, on_progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> "AsyncLLM":
        """An AsyncLLM over an engine that exists already, and that nobody else uses."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    @takes_vllm_names
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer so far, each time that it has grown; the last one is `finished`."""
        return self._outputs(self._prompt_preparation(prompt, params, cache_salt), request_id)

    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same for a conversation, through the model's chat template."""
        return self._outputs(self._chat_preparation(messages, params, cache_salt, keywords), request_id)

    @takes_vllm_names
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """What was added since the last time, one delta a completion."""
        return self._deltas(self._prompt_preparation(prompt, params, cache_salt), request_id)

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> AsyncGenerator[CompletionDelta, None]:
        """The same for a conversation."""
        return self._deltas(self._chat_preparation(messages, params, cache_salt, keywords), request_id)

    async def abort(self, request_id: str) -> None:
        """End a request before the next step; its reader gets a last output with finish_reason "abort"."""
        self._live().abort(request_id)

    def health(self) -> Health:
        """Whether the engine lives, and how long ago it last moved; never waits."""
        return self._live().health()

    def stats(self) -> EngineStats:
        """Counters since the start, and the state of now."""
        return self._live().engine.stats()

    def default_sampling_params(self) -> SamplingParams:
        """What the makers of the model advise; `SamplingParams()` where they say nothing."""
        return sampling_params_from(self._live().engine.generation)

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's name of `default_sampling_params`."""
        return self.default_sampling_params()

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer and the chat template, under the names that programs know from transformers."""
        engine = self._live().engine
        if engine.tokenizer is None:
            raise RequestError("the tokenizer was asked", "the engine has none", "open a model with a tokenizer")
        return ChatTokenizer(engine.tokenizer, engine.chat_template)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix before the next step."""
        self._live().reset_prefix_cache()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._live().engine.tokenizer

    @property
    def memory(self) -> MemoryReport:
        """Who holds how many bytes, planned and taken."""
        report = self._live().engine.memory
        assert report is not None, "this engine was put together without an account of its memory"
        return report

    async def drain(self) -> None:
        """Refuse new requests, answer the others, then shut down."""
        thread = self._live()
        thread.drain()
        await asyncio.get_running_loop().run_in_executor(None, thread.join)
        self.shutdown()

    def shutdown(self) -> None:
        """Abort what runs, wait for the step in progress, and let go of the model; may be called twice."""
        self._finalizer()
        self._thread = None

    if not TYPE_CHECKING:  # checkers go on to tell unknown names

        def __getattr__(self, name: str) -> object:
            return missing_attribute(self, name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_transfer("an AsyncLLM")

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _start(self, engine: Engine) -> None:
        thread = EngineThread(engine)
        # One thread, so that prompts are queued in the order in which they came.
        prompt_thread = ThreadPoolExecutor(1, "holdfast-prompts")
        self._thread: EngineThread | None = thread
        self._prompt_thread = prompt_thread
        # Also runs when nobody holds the AsyncLLM any more, and before the interpreter ends.
        self._finalizer = weakref.finalize(self, _shut_down, thread, prompt_thread)

    def _live(self) -> EngineThread:
        if self._thread is None:
            raise EngineDeadError("the model was asked to answer", "it was shut down", "make a new AsyncLLM")
        return self._thread

    def _asked(self) -> EngineThread:
        """The same for what needs an answer, which a forked child cannot have."""
        thread = self._live()
        thread.home.check()
        return thread

    def _prompt_preparation(
        self, prompt: object, params: SamplingParams | None, cache_salt: str | None
    ) -> Callable[[], PreparedRequest]:
        return partial(self._asked().engine.prepare, prompt, self._params(params), cache_salt=cache_salt)

    def _chat_preparation(
        self,
        messages: object,
        params: SamplingParams | None,
        cache_salt: str | None,
        keywords: Mapping[str, object],
    ) -> Callable[[], PreparedRequest]:
        prepare_chat = self._asked().engine.prepare_chat
        values, options = chat_values(keywords)
        own = {"cache_salt": cache_salt, "template_options": values, "options": options}
        return partial(prepare_chat, messages, self._params(params), **own)  # type: ignore[arg-type]

    def _params(self, params: SamplingParams | None) -> SamplingParams:
        return self.default_sampling_params() if params is None else params

    async def _outputs(
        self, prepare: Callable[[], PreparedRequest], request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        prepared = await self._prepared(prepare)
        assembler = OutputAssembler(prepared.prompt, prepared.prompt_token_ids, prepared.params.n)
        with self._request(prepared, request_id) as mailbox:
            is_last = False
            while not is_last:
                deltas, is_last = await mailbox.take()
                for delta in deltas:
                    assembler.add(delta)
                yield assembler.output()

    async def _deltas(
        self, prepare: Callable[[], PreparedRequest], request_id: str | None
    ) -> AsyncGenerator[CompletionDelta, None]:
        prepared = await self._prepared(prepare)
        with self._request(prepared, request_id) as mailbox:
            is_last = False
            while not is_last:
                deltas, is_last = await mailbox.take()
                for delta in deltas:
                    yield delta

    async def _prepared(self, prepare: Callable[[], PreparedRequest]) -> PreparedRequest:
        """Tokenizing a long prompt takes a while, in which other requests should not wait."""
        self._asked()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._prompt_thread, prepare)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled the caller: the prompt was still in line when the model was shut down.
            raise EngineDeadError("a request was given", "the engine was shut down", "make a new AsyncLLM") from None

    @contextmanager
    def _request(self, prepared: PreparedRequest, request_id: str | None) -> Iterator[Mailbox]:
        thread, mailbox = self._live(), Mailbox(prepared.params.n)
        thread.submit(prepared, request_id, mailbox)
        try:
            yield mailbox
        finally:
            thread.withdraw(mailbox)


def _shut_down(thread: EngineThread, prompt_thread: ThreadPoolExecutor) -> None:
    if thread.home.is_elsewhere:  # the parent goes on; here a lock may be held for ever
        return
    prompt_thread.shutdown(wait=False, cancel_futures=True)
    thread.stop()
    thread.join()
    thread.engine.close()
