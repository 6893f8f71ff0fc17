"""AsyncLLM: a model for asyncio programs that batches many callers; torch is imported when a model is opened."""

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import partial
from types import TracebackType
from typing import Unpack

from holdfast.api.llm import embedding_output, scoring_output
from holdfast.api.opened import Opened
from holdfast.api.options import ChatKeywords, chat_values, takes_vllm_names
from holdfast.config import Limits
from holdfast.engine.admission import Conversation, PreparedRequest, Prompt
from holdfast.engine.engine import Engine, EngineStats
from holdfast.engine.engine_thread import EngineThread, Health, Mailbox, MapReader
from holdfast.engine.memory_map import MemoryMap
from holdfast.engine.outputs import OutputAssembler
from holdfast.engine.pooling import Pooling
from holdfast.engine.scoring import Scoring, paired
from holdfast.errors import EngineDeadError
from holdfast.request.outputs import CompletionDelta, RequestOutput
from holdfast.request.pooling import EmbeddingRequestOutput, PoolingParams, ScoringRequestOutput
from holdfast.request.sampling_params import SamplingParams
from holdfast.text.chat_template import ChatTemplate

MAP_SECONDS = 0.2
"""Maximum age of a memory map."""
MAP_WAIT_SECONDS = 0.5
"""Maximum wait for a newer map."""
MAX_AT_ONCE = 64
"""Maximum texts of one call in the queue, so that other requests fit."""
GRAMMAR_THREADS = 4
"""Threads that compile grammars, so that a slow one does not delay others."""
_Preparation = tuple[Callable[[], PreparedRequest], object]
"""A function that prepares a request, and its params."""


class AsyncLLM(Opened):
    """A model that answers many callers at once, from any number of event loops.

    A request ends within one step after its task is cancelled or its generator closes. A slow reader gets missed text
    in its next output.

    >>> async for output in llm.generate("Hello", SamplingParams(max_tokens=20)):
    ...     print(output.outputs[0].text)
    """

    is_paced = True

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
        """Yield the whole answer so far each time it grows; the last output is `finished`.

        `SamplingParams(output_kind="delta")` yields only new text. `sampling_params` is vLLM's name for `params`.
        """
        given = self._given(params, sampling_params)
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
        """Like `generate`, for a conversation through the chat template."""
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
        """Yield new text as deltas, one per completion."""
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
        """Like `stream`, for a conversation."""
        return self._deltas(self._chat_preparation(messages, params, cache_salt, keywords), request_id)

    async def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> PreparedRequest:
        """Validate a request without queueing it; pass the result to `answer`."""
        return await self._prepared(*self._prompt_preparation(prompt, params, cache_salt))

    async def prepare_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> PreparedRequest:
        """Like `prepare`, for a conversation."""
        return await self._prepared(*self._chat_preparation(messages, params, cache_salt, keywords))

    async def prepare_pooled(
        self, prompt: Prompt, *, cache_salt: str | None = None, truncate: bool = False, priority: int = 0
    ) -> PreparedRequest:
        """Like `prepare`, for a pooled prompt; `truncate` cuts the end of a long one."""
        engine = self.engine
        options = {"cache_salt": cache_salt, "truncate": truncate, "priority": priority}
        return await self._prepared(partial(engine.prepare_pooled, prompt, **options))  # type: ignore[arg-type]

    async def prepare_score(self, scoring: Scoring, place: int) -> PreparedRequest:
        """Like `prepare`, for one request of a scoring."""
        return await self._prepared(partial(scoring.prepare, place))

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
        """Make a Scoring of pairs from equally long lists."""
        engine, own = self.engine, {"instruction": instruction, "cache_salt": cache_salt}
        return Scoring(engine, queries, documents, truncate=truncate, priority=priority, **own)

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Embed one prompt: the normalized final hidden state of its last token."""
        params, pooling = pooling_params or PoolingParams(), self.pooling
        pooling.check(params)
        truncate = params.truncate_prompt_tokens is not None
        prepared = await self.prepare_pooled(prompt, cache_salt=cache_salt, truncate=truncate)
        return embedding_output(pooling, await self._whole(prepared, request_id), params)

    async def score(self, text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[ScoringRequestOutput]:
        """Score pairs like `LLM.score`."""
        scoring = self.scoring(*paired(text_1, text_2))
        prepared = [await self.prepare_score(scoring, place) for place in range(len(scoring))]
        outputs = await self._whole_all(prepared)
        more = {place: again for place, one in enumerate(outputs) if (again := scoring.again(place, one)) is not None}
        later = dict(zip(more, await self._whole_all(list(more.values())), strict=True))
        scores = scoring.scores(outputs, later)
        return [scoring_output(scoring.used(outputs, place), score) for place, score in enumerate(scores)]

    async def _whole_all(self, prepared: Sequence[PreparedRequest]) -> list[RequestOutput]:
        """Answer many requests with a bounded number in the queue."""
        places = asyncio.Semaphore(min(MAX_AT_ONCE, self.max_queue))

        async def whole(one: PreparedRequest) -> RequestOutput:
            async with places:
                return await self._whole(one)

        return list(await asyncio.gather(*map(whole, prepared)))

    async def _whole(self, prepared: PreparedRequest, request_id: str | None = None) -> RequestOutput:
        """Return the finished output of a prepared request."""
        assembler = OutputAssembler(prepared.prompt, prepared.prompt_token_ids, prepared.params.n)
        async with aclosing(self.answer(prepared, request_id)) as batches:
            async for deltas in batches:
                for delta in deltas:
                    assembler.add(delta)
        return assembler.output()

    @property
    def pooling(self) -> Pooling:
        """The model's pooling."""
        return self._live().engine.pooling

    async def answer(
        self, prepared: PreparedRequest, request_id: str | None = None
    ) -> AsyncGenerator[list[CompletionDelta], None]:
        """Yield the deltas of each step, with one wake-up per step.

        An empty first list means that the queue accepted the request; a refusal raises.
        """
        with self._request(prepared, request_id) as mailbox:
            await mailbox.accepted()
            yield []
            is_last = False
            while not is_last:
                deltas, is_last = await mailbox.take()
                yield deltas

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests before the next step; readers get a last output whose finish_reason is "abort"."""
        for name in (request_id,) if isinstance(request_id, str) else request_id:
            self._live().abort(name)

    def health(self) -> Health:
        """Return liveness and the time since the last step. Never blocks."""
        return self._live().health()

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError with the cause if the engine has stopped. Never blocks."""
        self._live().engine.raise_if_dead()

    def stats(self) -> EngineStats:
        """Return counters since the start, and the current state."""
        return self._live().stats()

    def step_sizes(self) -> tuple[list[int], int]:
        """Return a histogram of tokens per step (bucket k: at most 2**k), and the sum of tokens."""
        front = self._live().engine.front
        return list(front.steps_by_size), front.num_step_tokens

    async def memory_map(self, wait_seconds: float = MAP_WAIT_SECONDS) -> MemoryMap | None:
        """Return pages by holder, at most MAP_SECONDS old unless the current step takes longer than the wait."""
        thread = self._live()
        known = thread.memory_map()
        if known is None or time.monotonic() - known.taken_at >= MAP_SECONDS:
            reader = MapReader()
            thread.ask_map(reader)
            await reader.wait(wait_seconds)
        return thread.memory_map()

    def check_room(self, num_sequences: int = 1) -> None:
        """Raise QueueFullError if the queue cannot take this many more sequences. Never blocks."""
        self._checked().check_room(num_sequences)

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence, answer included."""
        return self._live().engine.core.facts.longest

    @property
    def max_queue(self) -> int:
        """Maximum sequences in the queue."""
        return self._live().engine.core.facts.max_queue

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template."""
        return self._live().engine.chat_template

    def reset_prefix_cache(self) -> None:
        """Drop every cached prefix before the next step."""
        self._live().reset_prefix_cache()

    @property
    def core_pid(self) -> int | None:
        """Process id of the core; None if it runs in this process."""
        return getattr(self._live().engine.core, "pid", None)

    @property
    def limits(self) -> Limits:
        """Bounds of steps and sequences."""
        return self._live().engine.limits

    async def drain(self) -> None:
        """Refuse new requests, finish the others, then shut down."""
        thread = self._live()
        thread.drain()
        await asyncio.get_running_loop().run_in_executor(None, thread.join)
        self.shutdown()

    def shutdown(self) -> None:
        """Abort all requests, wait for the current step, and free the model. Idempotent."""
        self._finalizer()
        self._thread = None

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _start(self, engine: Engine) -> None:
        thread = EngineThread(engine)
        # One thread keeps prompts in order of arrival.
        prompt_thread = ThreadPoolExecutor(1, "holdfast-prompts")
        self._thread: EngineThread | None = thread
        self._prompt_thread = prompt_thread
        # Compiling a hostile grammar may take seconds; prompts must not wait for it.
        grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, "holdfast-grammars")
        self._grammar_threads = grammar_threads
        # Also runs at garbage collection and at exit.
        self._finalizer = weakref.finalize(self, _shut_down, thread, (prompt_thread, grammar_threads))

    def _live(self) -> EngineThread:
        if self._thread is None:
            raise EngineDeadError("api.shut_down", kind="AsyncLLM")
        return self._thread

    def _live_engine(self) -> Engine:
        return self._live().engine

    @property
    def engine(self) -> Engine:
        """The engine, in the process that opened it."""
        return self._checked().engine

    def _checked(self) -> EngineThread:
        """Return the live thread; raise ForkError in a forked child."""
        thread = self._live()
        thread.home.check()
        return thread

    def _prompt_preparation(
        self, prompt: object, params: SamplingParams | None, cache_salt: str | None
    ) -> _Preparation:
        engine, own = self.engine, self._given(params)
        return partial(engine.prepare, prompt, own, cache_salt=cache_salt), own

    def _chat_preparation(
        self,
        messages: object,
        params: SamplingParams | None,
        cache_salt: str | None,
        keywords: Mapping[str, object],
    ) -> _Preparation:
        engine, own = self.engine, self._given(params)
        values, options = chat_values(keywords)
        more = {"cache_salt": cache_salt, "template_options": values, "options": options}
        return partial(engine.prepare_chat, messages, own, **more), own  # type: ignore[arg-type]

    async def _outputs(self, preparation: _Preparation, request_id: str | None) -> AsyncGenerator[RequestOutput, None]:
        prepared = await self._prepared(*preparation)
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

    async def _deltas(self, preparation: _Preparation, request_id: str | None) -> AsyncGenerator[CompletionDelta, None]:
        prepared = await self._prepared(*preparation)
        with self._request(prepared, request_id) as mailbox:
            is_last = False
            while not is_last:
                deltas, is_last = await mailbox.take()
                for delta in deltas:
                    yield delta

    async def _prepared(self, prepare: Callable[[], PreparedRequest], params: object = None) -> PreparedRequest:
        """Check the queue, then prepare in another thread, so that a long prompt does not delay other requests.

        Compile the grammar of `params` first; `prepare` finds it in the cache.
        """
        self._checked().check_room(1)
        try:
            loop = asyncio.get_running_loop()
            if isinstance(params, SamplingParams) and params.structured_outputs is not None:
                check_grammar = self.engine.front.admission.check_form
                await loop.run_in_executor(self._grammar_threads, check_grammar, params)
            return await loop.run_in_executor(self._prompt_thread, prepare)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not a cancelled caller: the model was shut down meanwhile.
            raise EngineDeadError("api.shut_down", kind="AsyncLLM") from None

    @contextmanager
    def _request(self, prepared: PreparedRequest, request_id: str | None) -> Iterator[Mailbox]:
        thread, mailbox = self._live(), Mailbox(prepared.params.n)
        thread.submit(prepared, request_id, mailbox)
        try:
            yield mailbox
        finally:
            thread.withdraw(mailbox)


def _shut_down(thread: EngineThread, preparing: Iterable[ThreadPoolExecutor]) -> None:
    if thread.home.is_elsewhere:  # a forked child, where locks may never be released
        return
    for threads in preparing:
        threads.shutdown(wait=False, cancel_futures=True)
    thread.stop()
    thread.join()
    thread.engine.close()
