"""LLM: a model in a program: generate, chat and stream; torch is imported when a model is opened."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Unpack

from holdfast.api.chat_tokenizer import ChatTokenizer
from holdfast.api.options import (
    ChatKeywords,
    EngineOptions,
    chat_values,
    one_of_params,
    sampling_params_from,
    takes_vllm_names,
)
from holdfast.api.preparing_bar import PreparingBar
from holdfast.api.progress import DownloadBar, GenerationBar, LoadingBar
from holdfast.config import EngineConfig
from holdfast.engine.admission import Conversation, PreparedRequest, Prompt
from holdfast.engine.driver import Driver
from holdfast.engine.engine import Engine, EngineStats
from holdfast.engine.outputs import DeltaBuffer, OutputAssembler
from holdfast.engine.pooling import Pooling
from holdfast.engine.scoring import Scoring, paired, pooled_of
from holdfast.errors import EngineDeadError, PromptError, RequestError, refuse_transfer
from holdfast.loading.locate import refuse_wrong_path
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.report import MemoryReport
from holdfast.observability.log import get_logger, log_in_scripts
from holdfast.observability.preparing import OnPrepare, prepare_silently
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
from holdfast.request.vllm_names import missing_attribute
from holdfast.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from holdfast.loading.hub.download import Watch

_log = get_logger(__name__)
_ROOM_TOLD = Event()

OnProgress = Callable[[int, int], None]
"""Called with bytes read and bytes to read while a model loads."""


class LLM:
    """A model that answers. Several threads may call it and take turns; `AsyncLLM` answers many callers at once.

    >>> llm = LLM()
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Open a model: a folder, a GGUF file, owner/name on the Hub, or None for the default one. `holdfast.EngineConfig` explains the options.

        vLLM's names are understood: those without an effect here are taken, with one line in the log, and those that are
        not in this version say what to do. A name that nobody knows raises and tells the nearest.
        """
        config = EngineConfig.from_options(model=model, **options)
        self._driver: Driver | None = Driver(open_engine(config, on_progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> "LLM":
        """An LLM over an engine that exists already."""
        llm = cls.__new__(cls)
        llm._driver = Driver(engine)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLM":
        """vLLM's way to open a model from options that a command line has filled in."""
        return cls(**vars(engine_args))

    @takes_vllm_names
    def generate(
        self,
        prompts: Prompt | list[int] | SequenceABC[Prompt | list[int]] | None = None,
        params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        *,
        progress: bool = True,
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        use_tqdm: object = None,
        prompt_token_ids: SequenceABC[object] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; the outputs are in the order of the prompts.

        A prompt is text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`; special tokens written out
        in a text are understood. All prompts are checked before the first one runs. Params are for all prompts, or one
        for each; without them the advice of the model's makers holds. `sampling_params` and `use_tqdm` are other names
        of `params` and `progress`, and `prompt_token_ids` is another way to give prompts.
        """
        engine = self._asked().engine
        many = _prompts(prompts, prompt_token_ids)
        prepared = _prepare_all("prompt", many, self._params(params, sampling_params), engine.prepare)
        open_ended = [request.max_tokens for request in prepared if request.params.max_tokens is None]
        if open_ended:
            _tell_room(max(open_ended))
        return self._run(prepared, progress if use_tqdm is None else bool(use_tqdm))

    def chat(
        self,
        messages: Conversation | SequenceABC[Conversation],
        params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        *,
        progress: bool = True,
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        use_tqdm: object = None,
        **keywords: Unpack[ChatKeywords],
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template; `ChatKeywords` explains the other options."""
        is_many = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        engine = self._asked().engine
        values, options = chat_values(keywords)

        def prepare(conversation: object, own_params: object) -> PreparedRequest:
            return engine.prepare_chat(conversation, own_params, template_options=values, options=options)

        many = messages if is_many else [messages]
        prepared = _prepare_all("conversation", many, self._params(params, sampling_params), prepare)
        return self._run(prepared, progress if use_tqdm is None else bool(use_tqdm))

    @takes_vllm_names
    def embed(
        self,
        prompts: Prompt | list[int] | SequenceABC[Prompt | list[int]] | None = None,
        pooling_params: PoolingParams | None = None,
        *,
        progress: bool = True,
        use_tqdm: object = None,
        truncate_prompt_tokens: int | None = None,
        prompt_token_ids: SequenceABC[object] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed one prompt or many: the final hidden state of the last token, of unit length; in the order of the prompts."""
        params = _pooling_params(pooling_params, truncate_prompt_tokens)
        outputs = self._pooled(prompts, prompt_token_ids, params, progress if use_tqdm is None else bool(use_tqdm))
        return [embedding_output(self._live().engine.pooling, output, params) for output in outputs]

    @takes_vllm_names
    def encode(
        self,
        prompts: Prompt | list[int] | SequenceABC[Prompt | list[int]] | None = None,
        pooling_params: PoolingParams | None = None,
        *,
        progress: bool = True,
        use_tqdm: object = None,
        truncate_prompt_tokens: int | None = None,
        prompt_token_ids: SequenceABC[object] | None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """The same with `outputs.data` as a float32 tensor."""
        import torch

        if pooling_task not in (None, "embed"):
            raise RequestError(f"pooling_task={pooling_task!r} was given", "embed works", "use embed or score")
        params = _pooling_params(pooling_params, truncate_prompt_tokens)
        outputs = self._pooled(prompts, prompt_token_ids, params, progress if use_tqdm is None else bool(use_tqdm))
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
        """Score pairs: one text with each of several, or two lists in step; by cosine, or as a reranker judges.

        `instruction` is the task that a reranker is given.
        """
        truncate = _pooling_params(None, truncate_prompt_tokens).truncate_prompt_tokens is not None
        first, second = paired(text_1, text_2)
        scoring = Scoring(self._asked().engine, first, second, instruction=instruction, truncate=truncate)
        shows = progress if use_tqdm is None else bool(use_tqdm)
        outputs = self._run([scoring.prepare(place) for place in range(len(scoring))], shows)
        more = {place: again for place, one in enumerate(outputs) if (again := scoring.again(place, one)) is not None}
        later = dict(zip(more, self._run(list(more.values()), False) if more else (), strict=True))
        scores = scoring.scores(outputs, later)
        return [scoring_output(scoring.used(outputs, place), score) for place, score in enumerate(scores)]

    def _pooled(
        self, prompts: object, prompt_token_ids: object, params: PoolingParams, progress: bool
    ) -> list[RequestOutput]:
        engine, truncate = self._asked().engine, params.truncate_prompt_tokens is not None
        engine.pooling.check(params)

        def prepare(prompt: object, _: object) -> PreparedRequest:
            return engine.prepare_pooled(prompt, truncate=truncate)

        many = _prompts(prompts, prompt_token_ids)
        return self._run(_prepare_all("prompt", many, SamplingParams(), prepare), progress)

    @takes_vllm_names
    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> Iterator[CompletionDelta]:
        """What each step adds, as it comes. A generator that is closed or left aborts its request."""
        own_params = self.default_sampling_params() if params is None else params
        return self._stream(self._asked().engine.prepare(prompt, own_params, cache_salt=cache_salt))

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> Iterator[CompletionDelta]:
        """The same for a conversation."""
        values, options = chat_values(keywords)
        own_params = self.default_sampling_params() if params is None else params
        prepare_chat = self._asked().engine.prepare_chat
        return self._stream(
            prepare_chat(messages, own_params, cache_salt=cache_salt, template_options=values, options=options)
        )

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer and the chat template, under the names that programs know from transformers."""
        engine = self._live().engine
        if engine.tokenizer is None:
            raise RequestError("the tokenizer was asked", "the engine has none", "open a model with a tokenizer")
        return ChatTokenizer(engine.tokenizer, engine.chat_template)

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's name of `default_sampling_params`."""
        return self.default_sampling_params()

    def _params(
        self,
        params: SamplingParams | SequenceABC[SamplingParams] | None,
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None,
    ) -> SamplingParams | SequenceABC[SamplingParams]:
        given = one_of_params(params, sampling_params)
        return self.default_sampling_params() if given is None else given

    def default_sampling_params(self) -> SamplingParams:
        """What the makers of the model advise; `SamplingParams()` where they say nothing."""
        return sampling_params_from(self._live().engine.generation)

    @property
    def engine(self) -> Engine:
        """What answers, for those who measure it; one thread at a time may call it."""
        return self._asked().engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._live().engine.tokenizer

    @property
    def memory(self) -> MemoryReport:
        """Who holds how many bytes, planned and taken."""
        report = self._live().engine.memory
        assert report is not None, "this engine was put together without an account of its memory"
        return report

    def stats(self) -> EngineStats:
        """Counters since the start, and the state of now."""
        return self._live().stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._live().reset_prefix_cache()

    def shutdown(self) -> None:
        """Abort what runs and let go of the model; may be called twice."""
        if self._driver is not None:
            driver, self._driver = self._driver, None
            driver.close()

    if not TYPE_CHECKING:  # checkers go on to tell unknown names

        def __getattr__(self, name: str) -> object:
            return missing_attribute(self, name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_transfer("an LLM")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _live(self) -> Driver:
        if self._driver is None:
            raise EngineDeadError("the model was asked to answer", "it was shut down", "make a new LLM")
        return self._driver

    def _asked(self) -> Driver:
        """The same for what needs an answer, which a forked child cannot have."""
        driver = self._live()
        driver.home.check()
        return driver

    def _run(self, prepared: list[PreparedRequest], progress: bool) -> list[RequestOutput]:
        """Feed requests as the queue has room, and step until all are answered."""
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
                bar.update(
                    len(assemblers) - call.num_unfinished,
                    now.num_prompt_tokens - before.num_prompt_tokens,
                    now.num_output_tokens - before.num_output_tokens,
                )
        outputs = [assembler.output() for assembler in assemblers]
        if any(output.error is not None for output in outputs):
            driver.engine.raise_if_dead()
        return outputs

    def _stream(self, prepared: PreparedRequest) -> Iterator[CompletionDelta]:
        # Nothing is queued before the first delta is asked for: a generator that never starts cannot clean up.
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


def open_engine(
    config: EngineConfig,
    on_progress: OnProgress | None,
    model: OpenModel | None = None,
    *,
    on_prepare: OnPrepare | None = None,
) -> Engine:
    """Build an engine, with bars on the terminal unless the caller counts for itself; `model` is open already, if given."""
    log_in_scripts()
    model = open_headers(config) if model is None else model
    if config.core_process:
        from holdfast.engine.core_process import connect_engine as build_engine
    else:
        # Torch comes with it, which a wrong path does not wait for.
        from holdfast.engine.build import build_engine

    with ExitStack() as stack:
        on_prepare = on_prepare or (prepare_silently if on_progress else stack.enter_context(PreparingBar()))
        return build_engine(config, on_progress or stack.enter_context(LoadingBar()), model, on_prepare=on_prepare)


def open_headers(config: EngineConfig, watch: "Watch | None" = None) -> OpenModel:
    """The model of a config, found or downloaded, with its headers read and its weights not."""
    if config.model is not None:
        refuse_wrong_path(config.model)
    from holdfast.loading.model_files import open_model

    return open_model(config.model, config.load_format, config.revision, watch or DownloadBar)


def _pooling_params(params: PoolingParams | None, truncate_prompt_tokens: int | None) -> PoolingParams:
    if params is not None and not isinstance(params, PoolingParams):
        raise RequestError(
            f"pooling_params of type {type(params).__name__} were given", "PoolingParams work", "pass those"
        )
    own = params or PoolingParams()
    return own if truncate_prompt_tokens is None else replace(own, truncate_prompt_tokens=truncate_prompt_tokens)


def embedding_output(pooling: Pooling, output: RequestOutput, params: PoolingParams) -> EmbeddingRequestOutput:
    """The embedding of a pooled request."""
    vector_H = pooling.vector(pooled_of(output), params)
    return EmbeddingRequestOutput(
        output.request_id,
        EmbeddingOutput(vector_H.tolist()),
        output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def scoring_output(used: SequenceABC[RequestOutput], score: float) -> ScoringRequestOutput:
    """The score of a pair, and what it came from."""
    token_ids = [token_id for output in used for token_id in output.prompt_token_ids]
    num_cached = sum(output.num_cached_tokens for output in used)
    return ScoringRequestOutput(used[-1].request_id, ScoringOutput(score), token_ids, num_cached_tokens=num_cached)


def _tell_room(max_tokens: int) -> None:
    """Warn once in a process how long an answer may become: programs that were written for vLLM count on 16 tokens."""
    if not _ROOM_TOLD.is_set():
        _ROOM_TOLD.set()
        _log.warning(
            "max_tokens is left out, so an answer may have up to %d tokens: all that the context has room for (vLLM's default "
            "is 16); SamplingParams(max_tokens=...) bounds it (told once)",
            max_tokens,
        )


def _assembler(prepared: PreparedRequest) -> OutputAssembler:
    return OutputAssembler(prepared.prompt, prepared.prompt_token_ids, prepared.params.n)


def _prompts(prompts: object, prompt_token_ids: object) -> SequenceABC[object]:
    """Prompts in a list, whichever way they were given; a list of integers is one prompt in token ids."""
    if (prompts is None) == (prompt_token_ids is None):
        raise PromptError(
            "no prompts were given" if prompts is None else "prompts and prompt_token_ids were given",
            "one of the two works",
            'pass a string, a list of them, or {"prompt_token_ids": [1, 2, 3]}',
        )
    if prompts is None:
        prompts = prompt_token_ids
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        prompts = [prompts]
    if not isinstance(prompts, list | tuple):
        raise PromptError(
            f"prompts of type {type(prompts).__name__} were given", "one prompt or a list of them works", "pass a list"
        )
    return [{"prompt_token_ids": prompt} if _is_ids(prompt) else prompt for prompt in prompts]


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(type(item) is int for item in prompt)


def _prepare_all(
    what: str,
    prompts: SequenceABC[object],
    params: SamplingParams | SequenceABC[SamplingParams],
    prepare: Callable[[object, object], PreparedRequest],
) -> list[PreparedRequest]:
    """Check everything before anything runs; an error names the place of what is wrong."""
    if not isinstance(prompts, list | tuple):
        raise PromptError(
            f"prompts of type {type(prompts).__name__} were given", "one prompt or a list of them works", "pass a list"
        )
    each = params if isinstance(params, list | tuple) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise RequestError(
            f"{len(each)} params were given for {len(prompts)} {what}s",
            "one for all works, and one for each",
            "make the lists equally long",
        )
    prepared = []
    for place, (prompt, own_params) in enumerate(zip(prompts, each, strict=True)):
        try:
            prepared.append(prepare(prompt, own_params))
        except RequestError as error:
            if len(prompts) == 1:
                raise
            raise type(error)(f"{what} {place}: {error.asked}", error.has, error.do) from error
    return prepared
