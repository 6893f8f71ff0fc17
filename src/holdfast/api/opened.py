"""Opened: base of LLM, AsyncLLM and LLMEngine: opens a model and reads facts from its engine; no torch."""

from collections.abc import Callable
from contextlib import ExitStack
from os import PathLike
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar, Unpack

from holdfast.api.chat_tokenizer import ChatTokenizer
from holdfast.api.options import EngineOptions, sampling_params_from
from holdfast.api.progress import DownloadBar, LoadingBar, PreparingBar
from holdfast.config import EngineConfig
from holdfast.engine.engine import Engine, EngineStats
from holdfast.errors import RequestError, refuse_transfer
from holdfast.loading.locate import refuse_wrong_path
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.report import MemoryReport
from holdfast.observability.log import log_in_scripts
from holdfast.observability.preparing import OnPrepare, prepare_silently
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.vllm_names import missing_attribute
from holdfast.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from holdfast.loading.hub.download import Watch

OnProgress = Callable[[int, int], None]
"""Callback with bytes read and total bytes while a model loads."""
_Params = TypeVar("_Params")


class Opened:
    """An open model; it cannot be pickled or copied."""

    is_paced = False
    """True if steps are short by default, because many callers wait for their next token."""

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Open a folder, a GGUF file, owner/name on the Hub, or None for the default model; `EngineConfig` has the options.

        vLLM's names work: those without effect are logged once, and unsupported ones raise with advice.
        The call blocks while the model loads.
        """
        config = EngineConfig.from_options(model=model, **options)
        self._start(open_engine(config.paced() if self.is_paced else config, on_progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """Wrap an existing engine that has no other user."""
        own = cls.__new__(cls)
        own._start(engine)
        return own

    def _start(self, engine: Engine) -> None:
        raise NotImplementedError

    def _given(self, params: _Params | None, sampling_params: _Params | None = None) -> _Params | SamplingParams:
        """Return the params given under either name, or the model's defaults."""
        if params is not None and sampling_params is not None:
            raise RequestError("api.params_twice")
        given = sampling_params if params is None else params
        return self.default_sampling_params() if given is None else given

    @property
    def engine(self) -> Engine:
        """The engine, for measurements; call it from one thread at a time."""
        raise NotImplementedError

    def _live_engine(self) -> Engine:
        """Return the engine, also in a forked child; raise EngineDeadError after shutdown."""
        return self.engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **others: object) -> Self:
        """vLLM's constructor from parsed options; other arguments have no effect."""
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> ChatTokenizer:
        """Return tokenizer and chat template with transformers' method names."""
        engine = self._live_engine()
        if engine.tokenizer is None:
            raise RequestError("api.no_tokenizer")
        return ChatTokenizer(engine.tokenizer, engine.chat_template)

    def default_sampling_params(self) -> SamplingParams:
        """Return the model's recommendation, or `SamplingParams()`."""
        return sampling_params_from(self._live_engine().generation)

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's name for `default_sampling_params`."""
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


def open_engine(
    config: EngineConfig,
    on_progress: OnProgress | None,
    model: OpenModel | None = None,
    *,
    on_prepare: OnPrepare | None = None,
) -> Engine:
    """Build an engine, with progress bars unless callbacks are given; `model` is an already open model."""
    log_in_scripts()
    model = open_headers(config) if model is None else model
    if config.core_process:
        from holdfast.engine.core_process import connect_engine as build_engine
    else:
        # Imports torch, so a wrong path must be refused first.
        from holdfast.engine.build import build_engine

    with ExitStack() as stack:
        on_prepare = on_prepare or (prepare_silently if on_progress else stack.enter_context(PreparingBar()))
        return build_engine(config, on_progress or stack.enter_context(LoadingBar()), model, on_prepare=on_prepare)


def open_headers(config: EngineConfig, watch: "Watch | None" = None) -> OpenModel:
    """Find or download the model of a config and read its headers, not its weights."""
    if config.model is not None:
        refuse_wrong_path(config.model)
    from holdfast.loading.model_files import open_model

    return open_model(config.model, config.load_format, config.revision, watch or DownloadBar)
