"""AsyncLLM: a model for asyncio programs: many callers, one batch; torch is imported when a model is opened."""

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Unpack

from holdfast.api.chat_tokenizer import ChatTokenizer
from holdfast.api.llm import OnProgress, embedding_output, open_engine, scoring_output
from holdfast.api.options import (
    ChatKeywords,
    EngineOptions,
    chat_values,
    one_of_params,
    sampling_params_from,
    takes_vllm_names,
)
from holdfast.config import EngineConfig, Limits
from holdfast.engine.admission import Conversation, PreparedRequest, Prompt
from holdfast.engine.engine import Engine, EngineStats
from holdfast.engine.engine_thread import EngineThread, Health, Mailbox, MapReader
from holdfast.engine.memory_map import MemoryMap
from holdfast.engine.outputs import OutputAssembler
from holdfast.engine.pooling import Pooling
from holdfast.engine.scoring import Scoring, paired
from holdfast.errors import EngineDeadError, RequestError, refuse_transfer
from holdfast.memory.report import MemoryReport
from holdfast.request.outputs import CompletionDelta, RequestOutput
from holdfast.request.pooling import EmbeddingRequestOutput, PoolingParams, ScoringRequestOutput
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.vllm_names import missing_attribute
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.tokenizer import Tokenizer

MAP_SECONDS = 0.2
"""Between two looks at the pages of a model, whoever asks."""
MAP_WAIT_SECONDS = 0.5
"""For a newer one than is known."""
MAX_AT_ONCE = 64
"""Texts of one call that are queued at once, so that other requests find room."""
FORM_THREADS = 4
"""That forms of answers are tried out in: one that takes long does not keep the others waiting."""


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
        self._start(open_engine(config.paced(), on_progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> "AsyncLLM":
        """An AsyncLLM over an engine that exists already, and that nobody else uses."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **others: object) -> "AsyncLLM":
        """vLLM's way to open a model; what it takes beside the options has no effect here."""
        return cls(**vars(engine_args))

    @takes_vllm_names
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer so far, each time that it has grown; the last one is `finished`.

        `SamplingParams(output_kind="delta")` gives what was added instead. `sampling_params` is another name of `params`.
        """
        given = one_of_params(params, sampling_params)
        return self._outputs(self._prompt_preparation(prompt, given, cache_salt), request_id)

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

    async def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> PreparedRequest:
        """Everything that can be wrong with a request, found before it is queued; `answer` takes what comes back."""
        return await self._prepared(self._prompt_preparation(prompt, params, cache_salt))

    async def prepare_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> PreparedRequest:
        """The same for a conversation."""
        return await self._prepared(self._chat_preparation(messages, params, cache_salt, keywords))

    async def prepare_pooled(
        self, prompt: Prompt, *, cache_salt: str | None = None, truncate: bool = False, priority: int = 0
    ) -> PreparedRequest:
        """The same for a prompt whose hidden state is wanted, cut at its end if `truncate` and it is too long."""
        engine = self._asked().engine
        options = {"cache_salt": cache_salt, "truncate": truncate, "priority": priority}
        return await self._prepared(_Preparation(None, partial(engine.prepare_pooled, prompt, **options)))  # type: ignore[arg-type]

    async def prepare_score(self, scoring: Scoring, place: int) -> PreparedRequest:
        """The same for one request of a scoring, which `scoring` makes."""
        return await self._prepared(_Preparation(None, partial(scoring.prepare, place)))

    def scoring(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        cache_salt: str | None = None,
        truncate: bool = False,
        priority: int = 0,
    ) -> Scoring:
        """Pairs of texts to be scored; the lists are equally long."""
        engine, own = self._asked().engine, {"instruction": instruction, "cache_salt": cache_salt}
        return Scoring(engine, queries, documents, truncate=truncate, priority=priority, **own)

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> EmbeddingRequestOutput:
        """The embedding of one prompt: the final hidden state of its last token, of unit length."""
        params, pooling = pooling_params or PoolingParams(), self.pooling
        pooling.check(params)
        truncate = params.truncate_prompt_tokens is not None
        prepared = await self.prepare_pooled(prompt, cache_salt=cache_salt, truncate=truncate)
        return embedding_output(pooling, await self._whole(prepared, request_id), params)

    async def score(self, text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[ScoringRequestOutput]:
        """Scores of pairs, as `LLM.score` has them."""
        scoring = self.scoring(*paired(text_1, text_2))
        prepared = [await self.prepare_score(scoring, place) for place in range(len(scoring))]
        outputs = await self._whole_all(prepared)
        more = {place: again for place, one in enumerate(outputs) if (again := scoring.again(place, one)) is not None}
        later = dict(zip(more, await self._whole_all(list(more.values())), strict=True))
        scores = scoring.scores(outputs, later)
        return [scoring_output(scoring.used(outputs, place), score) for place, score in enumerate(scores)]

    async def _whole_all(self, prepared: Sequence[PreparedRequest]) -> list[RequestOutput]:
        """The outputs of many, a few of them queued at a time."""
        room = asyncio.Semaphore(min(MAX_AT_ONCE, self.max_queue))

        async def whole(one: PreparedRequest) -> RequestOutput:
            async with room:
                return await self._whole(one)

        return list(await asyncio.gather(*map(whole, prepared)))

    async def _whole(self, prepared: PreparedRequest, request_id: str | None = None) -> RequestOutput:
        """The output of a request that was prepared, when it is finished."""
        assembler = OutputAssembler(prepared.prompt, prepared.prompt_token_ids, prepared.params.n)
        async with aclosing(self.answer(prepared, request_id)) as batches:
            async for deltas in batches:
                for delta in deltas:
                    assembler.add(delta)
        return assembler.output()

    @property
    def pooling(self) -> Pooling:
        """What the model can give beside answers."""
        return self._live().engine.pooling

    async def answer(
        self, prepared: PreparedRequest, request_id: str | None = None
    ) -> AsyncGenerator[list[CompletionDelta], None]:
        """What was added since the last time, one delta a completion that has grown: a wake-up a step, not one a delta.

        The first list is empty: the queue has taken the request. A refusal is raised in its place.
        """
        with self._request(prepared, request_id) as mailbox:
            await mailbox.accepted()
            yield []
            is_last = False
            while not is_last:
                deltas, is_last = await mailbox.take()
                yield deltas

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several, before the next step; readers get a last output with finish_reason "abort"."""
        for name in (request_id,) if isinstance(request_id, str) else request_id:
            self._live().abort(name)

    def health(self) -> Health:
        """Whether the engine lives, and how long ago it last moved; never waits."""
        return self._live().health()

    def raise_if_dead(self) -> None:
        """EngineDeadError, with the cause, where the engine has stopped; never waits."""
        self._live().engine.raise_if_dead()

    def stats(self) -> EngineStats:
        """Counters since the start, and the state of now."""
        return self._live().stats()

    def step_sizes(self) -> tuple[list[int], int]:
        """Steps by their tokens, computed of prompts and chosen (place k: at most 2**k, and more than half), and all tokens of them."""
        front = self._live().engine.front
        return list(front.steps_by_size), front.num_step_tokens

    async def memory_map(self, wait_seconds: float = MAP_WAIT_SECONDS) -> MemoryMap | None:
        """Who holds which pages: at most MAP_SECONDS old, or older where the step in progress takes longer than one waits."""
        thread = self._live()
        known = thread.memory_map()
        if known is None or time.monotonic() - known.taken_at >= MAP_SECONDS:
            reader = MapReader()
            thread.ask_map(reader)
            await reader.wait(wait_seconds)
        return thread.memory_map()

    def check_room(self, num_sequences: int = 1) -> None:
        """QueueFullError where so many more would find no place to wait: before their prompts cost anything; never waits."""
        self._asked().check_room(num_sequences)

    def default_sampling_params(self) -> SamplingParams:
        """What the makers of the model advise; `SamplingParams()` where they say nothing."""
        return sampling_params_from(self._live().engine.generation)

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's name of `default_sampling_params`."""
        return self.default_sampling_params()

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, its answer included."""
        return self._live().engine.core.facts.longest

    @property
    def max_queue(self) -> int:
        """Sequences that may wait at once."""
        return self._live().engine.core.facts.max_queue

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's own, where it has one."""
        return self._live().engine.chat_template

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

    @property
    def core_pid(self) -> int | None:
        """Of the process that runs the model, where that is one of its own."""
        return getattr(self._live().engine.core, "pid", None)

    @property
    def limits(self) -> Limits:
        """What steps and sequences are bounded by."""
        return self._live().engine.limits

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
        # Compiling a hostile form may take seconds, in which prompts should not wait.
        form_threads = ThreadPoolExecutor(FORM_THREADS, "holdfast-forms")
        self._form_threads = form_threads
        # Also runs when nobody holds the AsyncLLM any more, and before the interpreter ends.
        self._finalizer = weakref.finalize(self, _shut_down, thread, (prompt_thread, form_threads))

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
    ) -> "_Preparation":
        engine, asked = self._asked().engine, self._params(params)
        return _Preparation.of(engine, asked, partial(engine.prepare, prompt, asked, cache_salt=cache_salt))

    def _chat_preparation(
        self,
        messages: object,
        params: SamplingParams | None,
        cache_salt: str | None,
        keywords: Mapping[str, object],
    ) -> "_Preparation":
        engine, asked = self._asked().engine, self._params(params)
        values, options = chat_values(keywords)
        own = {"cache_salt": cache_salt, "template_options": values, "options": options}
        return _Preparation.of(engine, asked, partial(engine.prepare_chat, messages, asked, **own))  # type: ignore[arg-type]

    def _params(self, params: SamplingParams | None) -> SamplingParams:
        return self.default_sampling_params() if params is None else params

    async def _outputs(
        self, preparation: "_Preparation", request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        prepared = await self._prepared(preparation)
        assembler = OutputAssembler(prepared.prompt, prepared.prompt_token_ids, prepared.params.n)
        with self._request(prepared, request_id) as mailbox:
            is_last = False
            while not is_last:
                deltas, is_last = await mailbox.take()
                for delta in deltas:
                    assembler.add(delta)
                output = assembler.reading(deltas, prepared.params.output_kind)
                if output is not None:
                    yield output

    async def _deltas(
        self, preparation: "_Preparation", request_id: str | None
    ) -> AsyncGenerator[CompletionDelta, None]:
        prepared = await self._prepared(preparation)
        with self._request(prepared, request_id) as mailbox:
            is_last = False
            while not is_last:
                deltas, is_last = await mailbox.take()
                for delta in deltas:
                    yield delta

    async def _prepared(self, preparation: "_Preparation") -> PreparedRequest:
        """Tokenizing a long prompt takes a while, in which other requests should not wait; one that finds no place is not begun."""
        self._asked().check_room(1)
        try:
            loop = asyncio.get_running_loop()
            if preparation.check_form is not None:
                await loop.run_in_executor(self._form_threads, preparation.check_form)
            return await loop.run_in_executor(self._prompt_thread, preparation.prepare)
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


@dataclass(frozen=True, slots=True)
class _Preparation:
    """What is done before a request is queued."""

    check_form: Callable[[], None] | None
    """Where its answer has a form; what this finds out is remembered for what follows."""
    prepare: Callable[[], PreparedRequest]

    @classmethod
    def of(cls, engine: Engine, params: SamplingParams, prepare: Callable[[], PreparedRequest]) -> "_Preparation":
        has_form = isinstance(params, SamplingParams) and params.structured_outputs is not None
        return cls(partial(engine.check_form, params) if has_form else None, prepare)


def _shut_down(thread: EngineThread, preparing: Iterable[ThreadPoolExecutor]) -> None:
    if thread.home.is_elsewhere:  # the parent goes on; here a lock may be held for ever
        return
    for threads in preparing:
        threads.shutdown(wait=False, cancel_futures=True)
    thread.stop()
    thread.join()
    thread.engine.close()
