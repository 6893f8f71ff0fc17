"""LLMEngine: a model that a program steps itself, under vLLM's names; torch is imported when a model is opened."""

from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING, NoReturn, Unpack

from holdfast.api.chat_tokenizer import ChatTokenizer
from holdfast.api.llm import OnProgress, open_engine
from holdfast.api.options import EngineOptions, one_of_params, sampling_params_from, takes_vllm_names
from holdfast.config import EngineConfig
from holdfast.engine.admission import Prompt
from holdfast.engine.engine import Engine, EngineStats
from holdfast.engine.outputs import OutputAssembler
from holdfast.errors import EngineDeadError, RequestError, refuse_transfer
from holdfast.forks import HomeProcess
from holdfast.memory.report import MemoryReport
from holdfast.request.outputs import CompletionDelta, RequestOutput
from holdfast.request.sampling_params import RequestOutputKind, SamplingParams
from holdfast.request.vllm_names import missing_attribute


class LLMEngine:
    """A model whose steps the caller runs, one thread at a time. `LLM` and `AsyncLLM` step by themselves.

    >>> engine.add_request("0", "Hello", SamplingParams(max_tokens=8))
    >>> while engine.has_unfinished_requests():
    ...     outputs = engine.step()
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Open a model; the options are those of `LLM`."""
        self._start(open_engine(EngineConfig.from_options(model=model, **options), on_progress))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **others: object) -> "LLMEngine":
        """vLLM's way to open a model; what it takes beside the options has no effect here."""
        return cls(**vars(engine_args))

    @classmethod
    def from_engine(cls, engine: Engine) -> "LLMEngine":
        """An LLMEngine over an engine that exists already, and that nothing else steps."""
        own = cls.__new__(cls)
        own._start(engine)
        return own

    @takes_vllm_names
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        *,
        sampling_params: SamplingParams | None = None,
    ) -> str:
        """Check a request and queue it; returns its name. Waiting is counted from this call, not from arrival_time."""
        given = one_of_params(params, sampling_params)
        prepared = self.engine.prepare(prompt, sampling_params_from(self.engine.generation) if given is None else given)
        name = self.engine.submit(prepared, request_id)
        assembler = OutputAssembler(prepared.prompt, prepared.prompt_token_ids, prepared.params.n)
        self._requests[name] = (assembler, prepared.params.output_kind)
        return name

    def step(self) -> list[RequestOutput]:
        """Run one step; an output of each request that it changed, by the output_kind of its params."""
        return self._outputs(self.engine.step() if self.engine.has_unfinished() else [])

    def has_unfinished_requests(self) -> bool:
        """True while a step could bring something."""
        return self.engine.has_unfinished()

    def get_num_unfinished_requests(self) -> int:
        """Requests whose last output is still to come."""
        return len(self._requests)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several, now; no output of theirs comes any more."""
        for name in (request_id,) if isinstance(request_id, str) else request_id:
            self.engine.abort(name)
            self._requests.pop(name, None)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix. Requests that run keep their pages, which no other request finds any more."""
        self.engine.reset_prefix_cache()
        return True

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer and the chat template, under the names that programs know from transformers."""
        if self.engine.tokenizer is None:
            raise RequestError("the tokenizer was asked", "the engine has none", "open a model with a tokenizer")
        return ChatTokenizer(self.engine.tokenizer, self.engine.chat_template)

    @property
    def engine(self) -> Engine:
        """What answers, in the process that opened it."""
        self._home.check()
        if self._engine is None:
            raise EngineDeadError("the model was asked to answer", "it was shut down", "make a new LLMEngine")
        return self._engine

    @property
    def memory(self) -> MemoryReport | None:
        """Who holds how many bytes, planned and taken."""
        return self.engine.memory

    def stats(self) -> EngineStats:
        """Counters since the start, and the state of now."""
        return self.engine.stats()

    def shutdown(self) -> None:
        """Let go of the model; may be called twice."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self._requests.clear()
            if not engine.is_dead:
                engine.abort_all()
                engine.settle()
            engine.close()

    if not TYPE_CHECKING:  # checkers go on to tell unknown names

        def __getattr__(self, name: str) -> object:
            return missing_attribute(self, name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_transfer("an LLMEngine")

    def _start(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._home = HomeProcess("an LLMEngine")
        self._requests: dict[str, tuple[OutputAssembler, RequestOutputKind | str]] = {}

    def _outputs(self, deltas: list[CompletionDelta]) -> list[RequestOutput]:
        grown: dict[str, list[CompletionDelta]] = {}
        for delta in deltas:
            if delta.request_id in self._requests:
                grown.setdefault(delta.request_id, []).append(delta)
        found = []
        for name, own in grown.items():
            assembler, kind = self._requests[name]
            for delta in own:
                assembler.add(delta)
            output = assembler.reading(own, kind)
            if output is not None:
                found.append(output)
            if assembler.finished:
                del self._requests[name]
        return found
