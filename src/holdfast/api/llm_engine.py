"""LLMEngine: vLLM's engine class, whose caller runs each step; torch is imported when a model is opened."""

from collections.abc import Iterable

from holdfast.api.opened import Opened
from holdfast.api.options import takes_vllm_names
from holdfast.engine.admission import Prompt
from holdfast.engine.engine import Engine
from holdfast.engine.outputs import OutputAssembler
from holdfast.errors import EngineDeadError
from holdfast.forks import HomeProcess
from holdfast.request.outputs import CompletionDelta, RequestOutput
from holdfast.request.sampling_params import RequestOutputKind, SamplingParams


class LLMEngine(Opened):
    """A model whose caller runs each step, from one thread at a time. `LLM` and `AsyncLLM` step by themselves.

    >>> engine.add_request("0", "Hello", SamplingParams(max_tokens=8))
    >>> while engine.has_unfinished_requests():
    ...     outputs = engine.step()
    """

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
        """Check and queue a request; return its id. Wait times start at this call, not at arrival_time."""
        prepared = self.engine.prepare(prompt, self._given(params, sampling_params))
        name = self.engine.submit(prepared, request_id)
        assembler = OutputAssembler(prepared.prompt, prepared.prompt_token_ids, prepared.params.n)
        self._requests[name] = (assembler, prepared.params.output_kind)
        return name

    def step(self) -> list[RequestOutput]:
        """Run one step; return an output per changed request, according to its output_kind."""
        return self._outputs(self.engine.step() if self.engine.has_unfinished() else [])

    def has_unfinished_requests(self) -> bool:
        """Return True while requests are unfinished."""
        return self.engine.has_unfinished()

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests without a final output."""
        return len(self._requests)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Abort requests at once, without further outputs."""
        for name in (request_id,) if isinstance(request_id, str) else request_id:
            self.engine.abort(name)
            self._requests.pop(name, None)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drop every cached prefix. Running requests keep their pages."""
        self.engine.reset_prefix_cache()
        return True

    @property
    def engine(self) -> Engine:
        """The engine, in the process that opened it."""
        self._home.check()
        if self._engine is None:
            raise EngineDeadError("api.shut_down", kind="LLMEngine")
        return self._engine

    def shutdown(self) -> None:
        """Free the model. Idempotent."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self._requests.clear()
            if not engine.is_dead:
                engine.abort_all()
                engine.settle()
            engine.close()

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
