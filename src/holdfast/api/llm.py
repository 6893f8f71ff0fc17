"""LLM: offline inference: generate, chat and stream; torch is imported when a model is opened."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from threading import Event
from types import TracebackType
from typing import Unpack

from holdfast.api.opened import Opened
from holdfast.api.options import ChatKeywords, chat_values, takes_vllm_names
from holdfast.api.progress import GenerationBar
from holdfast.engine.admission import Conversation, PreparedRequest, Prompt
from holdfast.engine.driver import Driver
from holdfast.engine.engine import Engine, EngineStats
from holdfast.engine.outputs import DeltaBuffer, OutputAssembler
from holdfast.engine.pooling import Pooling
from holdfast.engine.scoring import Scoring, paired, pooled_of
from holdfast.errors import EngineDeadError, PromptError, RequestError
from holdfast.observability.log import get_logger
from holdfast.request.outputs import CompletionDelta, RequestOutput
from holdfast.request.pooling import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from holdfast.request.sampling_params import SamplingParams

_log = get_logger(__name__)
OPEN_ENDED_WARNED = Event()
"""Set after the first warning about a missing max_tokens."""

Prompts = Prompt | list[int] | SequenceABC[Prompt | list[int]]
Params = SamplingParams | SequenceABC[SamplingParams]


class LLM(Opened):
    """A model for offline inference. Calls from several threads run in turn; `AsyncLLM` batches them.

    >>> llm = LLM()
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].text
    """

    def _start(self, engine: Engine) -> None:
        self._driver: Driver | None = Driver(engine)

    @takes_vllm_names
    def generate(
        self,
        prompts: Prompts | None = None,
        params: Params | None = None,
        *,
        progress: bool = True,
        sampling_params: Params | None = None,
        use_tqdm: object = None,
        prompt_token_ids: SequenceABC[object] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, in order.

        A prompt is text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`; special tokens in a text are
        parsed. All prompts are checked before the first one runs. `params` is one value for all prompts or a list; its
        default is the model's recommendation. `sampling_params` and `use_tqdm` are vLLM's names for `params` and
        `progress`.
        """
        engine = self.engine
        many = _prompts(prompts, prompt_token_ids)
        prepared = _prepare_all("prompt", many, self._given(params, sampling_params), engine.prepare)
        open_ended = [request.max_tokens for request in prepared if request.params.max_tokens is None]
        if open_ended:
            _warn_open_ended(max(open_ended))
        return self._run(prepared, _shows(progress, use_tqdm))

    def chat(
        self,
        messages: Conversation | SequenceABC[Conversation],
        params: Params | None = None,
        *,
        progress: bool = True,
        sampling_params: Params | None = None,
        use_tqdm: object = None,
        **keywords: Unpack[ChatKeywords],
    ) -> list[RequestOutput]:
        """Answer one conversation or many with the chat template; `ChatKeywords` lists the other options."""
        is_many = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        engine = self.engine
        values, options = chat_values(keywords)

        def prepare(conversation: object, own_params: object) -> PreparedRequest:
            return engine.prepare_chat(conversation, own_params, template_options=values, options=options)

        many = messages if is_many else [messages]
        prepared = _prepare_all("conversation", many, self._given(params, sampling_params), prepare)
        return self._run(prepared, _shows(progress, use_tqdm))

    @takes_vllm_names
    def embed(
        self,
        prompts: Prompts | None = None,
        pooling_params: PoolingParams | None = None,
        *,
        progress: bool = True,
        use_tqdm: object = None,
        truncate_prompt_tokens: int | None = None,
        prompt_token_ids: SequenceABC[object] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed one prompt or many, in order: the normalized final hidden state of each last token."""
        params = _pooling_params(pooling_params, truncate_prompt_tokens)
        outputs = self._pooled(prompts, prompt_token_ids, params, _shows(progress, use_tqdm))
        return [embedding_output(self._live().engine.pooling, output, params) for output in outputs]

    @takes_vllm_names
    def encode(
        self,
        prompts: Prompts | None = None,
        pooling_params: PoolingParams | None = None,
        *,
        progress: bool = True,
        use_tqdm: object = None,
        truncate_prompt_tokens: int | None = None,
        prompt_token_ids: SequenceABC[object] | None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Like `embed`, with `outputs.data` as a float32 tensor."""
        import torch

        if pooling_task not in (None, "embed"):
            raise RequestError("value.not_one_of", name="pooling_task", accepted=["embed"], value=pooling_task)
        params = _pooling_params(pooling_params, truncate_prompt_tokens)
        outputs = self._pooled(prompts, prompt_token_ids, params, _shows(progress, use_tqdm))
        pooling = self._live().engine.pooling
        return [
            PoolingRequestOutput(
                output.request_id,
                PoolingOutput(torch.from_numpy(pooling.vector(pooled_of(output), params))),
                output.prompt_token_ids,
                num_cached_tokens=output.num_cached_tokens,
            )
            for output in outputs
        ]

    @takes_vllm_names
    def score(
        self,
        text_1: str | SequenceABC[str],
        text_2: str | SequenceABC[str],
        *,
        progress: bool = True,
        use_tqdm: object = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs by cosine or a reranker: one text with each of several, or two equally long lists.

        `instruction` is the task of a reranker.
        """
        truncate = _pooling_params(None, truncate_prompt_tokens).truncate_prompt_tokens is not None
        first, second = paired(text_1, text_2)
        scoring = Scoring(self.engine, first, second, instruction=instruction, truncate=truncate)
        outputs = self._run([scoring.prepare(place) for place in range(len(scoring))], _shows(progress, use_tqdm))
        more = {place: again for place, one in enumerate(outputs) if (again := scoring.again(place, one)) is not None}
        later = dict(zip(more, self._run(list(more.values()), False) if more else (), strict=True))
        scores = scoring.scores(outputs, later)
        return [scoring_output(scoring.used(outputs, place), score) for place, score in enumerate(scores)]

    def _pooled(
        self, prompts: object, prompt_token_ids: object, params: PoolingParams, progress: bool
    ) -> list[RequestOutput]:
        engine, truncate = self.engine, params.truncate_prompt_tokens is not None
        engine.pooling.check(params)

        def prepare(prompt: object, _: object) -> PreparedRequest:
            return engine.prepare_pooled(prompt, truncate=truncate)

        many = _prompts(prompts, prompt_token_ids)
        return self._run(_prepare_all("prompt", many, SamplingParams(), prepare), progress)

    @takes_vllm_names
    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> Iterator[CompletionDelta]:
        """Yield the delta of each step. Closing the generator aborts the request."""
        return self._stream(self.engine.prepare(prompt, self._given(params), cache_salt=cache_salt))

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> Iterator[CompletionDelta]:
        """Like `stream`, for a conversation."""
        values, options = chat_values(keywords)
        own = {"cache_salt": cache_salt, "template_options": values, "options": options}
        return self._stream(self.engine.prepare_chat(messages, self._given(params), **own))  # type: ignore[arg-type]

    @property
    def engine(self) -> Engine:
        """The engine, for measurements; call it from one thread at a time."""
        driver = self._live()
        driver.home.check()
        return driver.engine

    def _live_engine(self) -> Engine:
        return self._live().engine

    def stats(self) -> EngineStats:
        """Return counters since the start, and the current state."""
        return self._live().stats()

    def reset_prefix_cache(self) -> None:
        """Drop every cached prefix."""
        self._live().reset_prefix_cache()

    def shutdown(self) -> None:
        """Abort all requests and free the model. Idempotent."""
        if self._driver is not None:
            driver, self._driver = self._driver, None
            driver.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _live(self) -> Driver:
        if self._driver is None:
            raise EngineDeadError("api.shut_down", kind="LLM")
        return self._driver

    def _run(self, prepared: list[PreparedRequest], progress: bool) -> list[RequestOutput]:
        """Submit requests as the queue has space, and step until all finish."""
        driver = self._live()
        waiting = deque(prepared)
        assemblers: list[OutputAssembler] = []
        before = driver.engine.stats()
        with driver.call() as call, GenerationBar(len(prepared), progress) as bar:
            while waiting or call.num_unfinished:
                while waiting:
                    assembler = _assembler(waiting[0])
                    if not call.try_submit(waiting[0], assembler):
                        break
                    assemblers.append(assembler)
                    waiting.popleft()
                call.pump()
                now = driver.engine.stats()
                bar.count(
                    len(assemblers) - call.num_unfinished,
                    now.num_prompt_tokens - before.num_prompt_tokens,
                    now.num_output_tokens - before.num_output_tokens,
                )
        outputs = [assembler.output() for assembler in assemblers]
        if any(output.error is not None for output in outputs):
            driver.engine.raise_if_dead()
        return outputs

    def _stream(self, prepared: PreparedRequest) -> Iterator[CompletionDelta]:
        # Nothing is queued before the first `next`: a generator that never starts cannot clean up.
        driver, buffer = self._live(), DeltaBuffer()
        with driver.call() as call:
            while not call.try_submit(prepared, buffer):
                call.pump()
            is_over = False
            while not is_over:
                call.pump()
                deltas, is_over = call.take(buffer)
                for delta in deltas:
                    if delta.error is not None:
                        driver.engine.raise_if_dead()
                    yield delta


def _pooling_params(params: PoolingParams | None, truncate_prompt_tokens: int | None) -> PoolingParams:
    if params is not None and not isinstance(params, PoolingParams):
        raise RequestError("api.not_pooling_params", kind=type(params).__name__)
    own = params or PoolingParams()
    return own if truncate_prompt_tokens is None else replace(own, truncate_prompt_tokens=truncate_prompt_tokens)


def embedding_output(pooling: Pooling, output: RequestOutput, params: PoolingParams) -> EmbeddingRequestOutput:
    """Make the output of an embedding request."""
    vector_H = pooling.vector(pooled_of(output), params)
    return EmbeddingRequestOutput(
        output.request_id,
        EmbeddingOutput(vector_H.tolist()),
        output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def scoring_output(used: SequenceABC[RequestOutput], score: float) -> ScoringRequestOutput:
    """Make the output of a scored pair."""
    token_ids = [token_id for output in used for token_id in output.prompt_token_ids]
    num_cached = sum(output.num_cached_tokens for output in used)
    return ScoringRequestOutput(used[-1].request_id, ScoringOutput(score), token_ids, num_cached_tokens=num_cached)


def _warn_open_ended(max_tokens: int) -> None:
    """Warn once that an answer may fill the context; vLLM's default is 16 tokens."""
    if not OPEN_ENDED_WARNED.is_set():
        OPEN_ENDED_WARNED.set()
        _log.warning(
            "max_tokens is not set, so an answer may have up to %d tokens, the rest of the context (vLLM's default is 16); "
            "set SamplingParams(max_tokens=...) to bound it (logged once)",
            max_tokens,
        )


def _shows(progress: bool, use_tqdm: object) -> bool:
    return progress if use_tqdm is None else bool(use_tqdm)


def _assembler(prepared: PreparedRequest) -> OutputAssembler:
    return OutputAssembler(prepared.prompt, prepared.prompt_token_ids, prepared.params.n)


def _prompts(prompts: object, prompt_token_ids: object) -> SequenceABC[object]:
    """Return prompts as a list; a list of integers is one prompt of token ids."""
    if (prompts is None) == (prompt_token_ids is None):
        raise PromptError("api.prompts_or_ids")
    if prompts is None:
        prompts = prompt_token_ids
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        prompts = [prompts]
    if not isinstance(prompts, list | tuple):
        raise PromptError("api.not_prompts", kind=type(prompts).__name__)
    return [{"prompt_token_ids": prompt} if _is_ids(prompt) else prompt for prompt in prompts]


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(type(item) is int for item in prompt)


def _prepare_all(
    what: str,
    prompts: SequenceABC[object],
    params: Params,
    prepare: Callable[[object, object], PreparedRequest],
) -> list[PreparedRequest]:
    """Prepare all prompts before any runs; an error names its prompt."""
    if not isinstance(prompts, list | tuple):
        raise PromptError("api.not_prompts", kind=type(prompts).__name__)
    each = params if isinstance(params, list | tuple) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise RequestError("api.params_count", num_params=len(each), num_prompts=len(prompts), what=what)
    prepared = []
    for place, (prompt, own_params) in enumerate(zip(prompts, each, strict=True)):
        try:
            prepared.append(prepare(prompt, own_params))
        except RequestError as error:
            if len(prompts) > 1:
                error.within(f"{what} {place}")
            raise
    return prepared
