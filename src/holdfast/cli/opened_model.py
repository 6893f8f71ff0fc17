"""Open a command's model with progress, read prompts from options and pipes, measure speed; no torch."""

import gc
import math
import os
import select
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from holdfast.api.llm import LLM
from holdfast.api.opened import open_engine, open_headers
from holdfast.api.options import ADVISED
from holdfast.api.progress import DownloadBar, LoadingBar, PreparingBar, is_watched
from holdfast.cli.options import Given
from holdfast.cli.start_line import StartLine
from holdfast.cli.terminal import MAX_PATH, log_plainly, raise_interrupts, raising_interrupts, write_line
from holdfast.config import NO_TOKENIZER, EngineConfig
from holdfast.engine.admission import ChatOptions, PreparedRequest
from holdfast.engine.engine import Engine
from holdfast.errors import ConfigError, HoldfastError, PromptError, shown
from holdfast.loading.hub.download import Download
from holdfast.loading.hub.names import parse_hub_name
from holdfast.loading.locate import existing_path
from holdfast.loading.model_files import find_default_model
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.memory.report import MemoryReport
from holdfast.memory.sizes import format_bytes
from holdfast.observability.preparing import Preparing
from holdfast.request.outputs import CompletionDelta, RequestOutput
from holdfast.request.sampling_params import SamplingParams

WEIGHTS_OWNER = "weights"
MAX_STDIN_BYTES = 64 * 2**20
PATIENCE_SECONDS = 3.0
"""Silence of piped input before a line reports the wait."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LEAST_ADDRESS_SPACE = 2**29
"""Minimum address space; torch and its libraries map more."""
LEAST_FILES = 8
"""Minimum of files open at once during imports and loading."""
CHOOSING = ("top_p", "top_k", "min_p", "n")
"""Options that need random sampling."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that is ready to answer."""

    name: str
    engine: Engine
    llm: LLM
    memory: MemoryReport
    load_seconds: float

    @property
    def context_tokens(self) -> int:
        """Maximum tokens of a prompt with its answer."""
        return min(self.memory.max_model_len, self.memory.kv_tokens)


def refuse_small_limits() -> None:
    """Fail early if a process limit is too small; libraries would print messages or abort."""
    try:
        import resource
    except ImportError:
        return
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY and address_space < LEAST_ADDRESS_SPACE:
        raise MemoryError("libraries alone map more than this process may")
    with ExitStack() as held:
        for _ in range(LEAST_FILES):
            held.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def import_torch(config: EngineConfig | None = None) -> None:
    """Import the engine with torch; after this, Ctrl-C raises KeyboardInterrupt.

    With `core_process`, the other process imports torch.
    """
    refuse_small_limits()
    if config is None or not config.core_process:
        import holdfast.engine.build  # noqa: F401

    raise_interrupts()


def report_file(option: str | None) -> Path | None:
    """Check the path of --memory-report before the model is opened."""
    if option is None:
        return None
    from holdfast.cli.page import page_file

    return page_file(option, "--memory-report")


@contextmanager
def _collections_paused() -> Iterator[None]:
    """Pause garbage collection: imported objects live to the end, and scanning them repeatedly is slow."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def refuse_bare_ids(config: EngineConfig) -> None:
    """Refuse --tokenizer none for a command that reads and writes text."""
    if config.tokenizer == NO_TOKENIZER:
        raise ConfigError("cli.no_tokenizer")


@_collections_paused()
def open_quietly(config: EngineConfig, report: Path | None = None) -> OpenedModel:
    """Load a model silently."""
    log_plainly()
    refuse_small_limits()
    started = time.monotonic()
    model = open_headers(config, quiet_download)
    import_torch(config)
    engine = open_engine(config, lambda num_done, num_total: None, model)
    opened = _opened(config, engine, started)
    _write_report(opened, report)
    return opened


@_collections_paused()
def open_visibly(config: EngineConfig, report: Path | None = None, start: StartLine | None = None) -> OpenedModel:
    """Load a model, with a start line and bars on a terminal, or one line per stage elsewhere."""
    log_plainly()
    refuse_small_limits()
    started = time.monotonic()
    with start or StartLine() as line:
        line.show("Reading headers")
        model = open_headers(config, partial(_download_after, line))
        if not is_watched():
            write_line(f"Loading {model_name(config)}")
        if "torch" not in sys.modules:
            line.report("Importing torch")
        import_torch(config)
        with _Stages(line) as stages:
            engine = open_engine(config, stages.count, model, on_prepare=stages.prepare)
    opened = _opened(config, engine, started)
    if not is_watched():
        weights = sum(row.held_bytes or 0 for row in opened.memory.rows if row.owner == WEIGHTS_OWNER)
        disk = opened.memory.disk
        was = "" if disk is None else f", from {format_bytes(disk.on_disk.num_bytes)} on disk"
        write_line(f"Model loading took {format_bytes(weights)} memory and {opened.load_seconds:.2f} seconds{was}")
    if opened.memory.kv_note:
        write_line(opened.memory.kv_note)
    if _write_report(opened, report):
        write_line(f"memory report written to {shown(str(report), MAX_PATH)[1:-1]}")
    return opened


@contextmanager
def shown_download(download: Download) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, a line elsewhere; Ctrl-C stops it and leaves no partial file."""
    if not is_watched():
        write_line(f"Downloading {download.summary}")
    with raising_interrupts(), DownloadBar(download) as count:
        yield count


@contextmanager
def _download_after(line: StartLine, download: Download) -> Iterator[Callable[[int], None]]:
    """Show a download in place of the start line."""
    line.clear()
    with shown_download(download) as count:
        yield count


@contextmanager
def quiet_download(download: Download) -> Iterator[Callable[[int], None]]:
    """Download silently."""
    with raising_interrupts():
        yield lambda num_bytes: None


class _Stages:
    """Startup progress of an engine: a line for stages and bars for counts; without a terminal, a line per kind."""

    def __init__(self, line: StartLine) -> None:
        self._line = line
        self._reported: set[str] = set()
        self._bars = ExitStack()

    def __enter__(self) -> "_Stages":
        self._loading = self._bars.enter_context(LoadingBar())
        self._preparing = self._bars.enter_context(PreparingBar())
        return self

    def __exit__(self, *ended: object) -> None:
        self._bars.close()

    def count(self, num_done: int, num_total: int) -> None:
        """Report bytes of weights."""
        self._report_once(f"Reading {format_bytes(num_total)} of weights", is_bar=True)
        self._loading(num_done, num_total)

    def prepare(self, preparing: Preparing) -> None:
        """Report the progress of planning, compilation or capture."""
        is_bar = preparing.num_total > 0
        note = f", {preparing.note}" if preparing.note else ""
        self._report_once(preparing.what if is_watched() else preparing.what + note, is_bar=is_bar)
        self._preparing(preparing)

    def _report_once(self, stage: str, *, is_bar: bool) -> None:
        if stage in self._reported:
            return
        self._reported.add(stage)
        if is_bar and is_watched():
            self._line.clear()
        else:
            self._line.report(stage)


def model_name(config: EngineConfig) -> str:
    """Return the last part of the model's path or name."""
    if config.model is not None and (name := parse_hub_name(config.model)) and existing_path(config.model) is None:
        return name.label
    path = find_default_model() if config.model is None else Path(config.model)
    return ascii(path.resolve().name)[1:-1]


def _write_report(opened: OpenedModel, file: Path | None) -> bool:
    if file is None:
        return False
    from holdfast.cli.page import memory_page, write_page

    write_page(file, memory_page(opened.name, opened.memory, opened.memory.entries))
    return True


def _opened(config: EngineConfig, engine: Engine, started: float) -> OpenedModel:
    assert isinstance(engine.memory, MemoryReport), f"an engine without a memory report: {engine.memory=}"
    return OpenedModel(model_name(config), engine, LLM.from_engine(engine), engine.memory, time.monotonic() - started)


def read_prompt(option: str | None) -> str:
    """Join the option and piped input with a blank line; at least one must be given."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _read_all(sys.stdin.buffer)
    parts = [part for part in (option, piped) if part]
    if not parts:
        raise PromptError("cli.no_prompt")
    return "\n\n".join(parts)


def decode(data: bytes, what: str = "standard input") -> str:
    """Decode UTF-8, without a byte order mark."""
    try:
        return data.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        found = f"0x{error.object[error.start]:02x}"
        raise PromptError("cli.not_utf8", what=what, place=error.start, found=found) from error


def _read_all(stream: BinaryIO) -> str:
    _report_waiting(stream)
    data = stream.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise PromptError("cli.long_stdin", limit_mib=MAX_STDIN_BYTES >> 20)
    text = decode(data)
    # The newline at the end of a file is not part of the prompt.
    return text.removesuffix("\n").removesuffix("\r")


def _report_waiting(stream: BinaryIO) -> None:
    """Print a line if standard input stays open and silent, because that looks like a hang."""
    try:
        ready, _, _ = select.select([stream], [], [], PATIENCE_SECONDS)
    except (OSError, ValueError):
        return  # not a file, or a system that selects sockets only
    if not ready:
        write_line("waiting for standard input to end; start with < /dev/null to leave it out")


def sampling_params(given: Given, generation: GenerationDefaults) -> SamplingParams:
    """Prefer given options, then the model's defaults, then greedy unless an option needs random sampling."""
    advised: Given = {name: getattr(generation, name) for name in ADVISED if getattr(generation, name) is not None}
    greedy: Given = {} if any(name in given for name in CHOOSING) else {"temperature": 0.0}
    return SamplingParams(**(greedy | advised | given))


def prepare(
    engine: Engine,
    prompt: str | list[Mapping[str, object]],
    params: SamplingParams,
    max_tokens: int,
    reading: ChatOptions | None = None,
) -> PreparedRequest:
    """Prepare a request; by default its max_tokens is `max_tokens` or what the context leaves."""
    is_text = isinstance(prompt, str)
    prepared = engine.prepare(prompt, params) if is_text else engine.prepare_chat(prompt, params, options=reading)
    if params.max_tokens is not None:
        return prepared
    bounded = min(prepared.max_tokens, max(max_tokens, params.min_tokens))
    return replace(prepared, params=replace(params, max_tokens=max(bounded, params.min_tokens)), max_tokens=bounded)


def stream(llm: LLM, prepared: PreparedRequest) -> Generator[CompletionDelta, None, None]:
    """Stream an answer; raise if the engine failed. Closing the generator ends the request."""
    deltas = llm.stream({"prompt_token_ids": prepared.prompt_token_ids}, prepared.params)
    assert isinstance(deltas, Generator), f"not a generator: {deltas=}"
    with closing(deltas):
        for delta in deltas:
            if delta.error is not None:
                raise HoldfastError("cli.answer_failed", reason=delta.error)
            yield delta


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens and seconds of one request; a rate is None if nothing was measured."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float | None
    prefill_rate: float | None
    decode_rate: float | None

    @property
    def line(self) -> str:
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        parts = [f"prompt {self.num_prompt_tokens} tokens{cached}", f"generated {self.num_output_tokens} tokens"]
        if self.first_token_seconds is not None:
            parts.append(f"first token {self.first_token_seconds:.3f} s")
        rates = (("prefill", self.prefill_rate), ("decode", self.decode_rate))
        return ", ".join([*parts, *(f"{name} {rate:.1f} tokens/s" for name, rate in rates if rate is not None)])


def speed_of(output: RequestOutput) -> Speed:
    """Compute the speed of a finished request."""
    num_output = sum(len(completion.token_ids) for completion in output.outputs)
    num_prompt, metrics = len(output.prompt_token_ids), output.metrics
    if metrics is None:
        return Speed(num_prompt, output.num_cached_tokens, num_output, None, None, None, None, None)
    num_computed = num_prompt - metrics.num_cached_tokens
    return Speed(
        num_prompt,
        metrics.num_cached_tokens,
        num_output,
        metrics.queue_seconds,
        metrics.first_token_seconds,
        metrics.total_seconds,
        _rate(num_computed, metrics.first_token_seconds - metrics.queue_seconds),
        _rate(num_output - len(output.outputs), metrics.total_seconds - metrics.first_token_seconds),
    )


def _rate(num_tokens: int, seconds: float) -> float | None:
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 and math.isfinite(seconds) else None
