"""Opened: what LLM, AsyncLLM and LLMEngine share, read from their engine; no torch."""

from typing import TYPE_CHECKING, NoReturn, Self

from holdfast.api.chat_tokenizer import ChatTokenizer
from holdfast.api.options import sampling_params_from
from holdfast.config import EngineConfig
from holdfast.engine.engine import Engine, EngineStats
from holdfast.errors import RequestError, refuse_transfer
from holdfast.memory.report import MemoryReport
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.vllm_names import missing_attribute
from holdfast.text.tokenizer import Tokenizer


class Opened:
    """A model in a program; it cannot be pickled or copied."""

    @property
    def engine(self) -> Engine:
        """The engine, for measurements; one thread at a time may call it."""
        raise NotImplementedError

    def _live_engine(self) -> Engine:
        """Return the engine, also in a forked child; raise EngineDeadError after shutdown."""
        return self.engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **others: object) -> Self:
        """vLLM's constructor from parsed options; its other arguments have no effect."""
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> ChatTokenizer:
        """Return tokenizer and chat template under the names of transformers."""
        engine = self._live_engine()
        if engine.tokenizer is None:
            raise RequestError("api.no_tokenizer")
        return ChatTokenizer(engine.tokenizer, engine.chat_template)

    def default_sampling_params(self) -> SamplingParams:
        """Return the model's recommendation, or `SamplingParams()`."""
        return sampling_params_from(self._live_engine().generation)

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's name of `default_sampling_params`."""
        return self.default_sampling_params()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._live_engine().tokenizer

    @property
    def memory(self) -> MemoryReport:
        """Planned and held bytes by owner."""
        report = self._live_engine().memory
        assert report is not None, "this engine was made without a memory report"
        return report

    def stats(self) -> EngineStats:
        """Return counters since the start, and the current state."""
        return self._live_engine().stats()

    if not TYPE_CHECKING:  # type checkers still report unknown names

        def __getattr__(self, name: str) -> object:
            return missing_attribute(self, name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_transfer(f"an {type(self).__name__}")
