"""Open a model for a command: a bar or plain lines on stderr while it loads, and a page of its memory if asked; no torch."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli.failures import log_plainly
from holdfast.cli.interrupt import raise_interrupts
from holdfast.cli.side_lines import MAX_PATH, write_line
from holdfast.config import EngineConfig
from holdfast.engine.engine import Engine
from holdfast.engine.llm import LLM, open_engine
from holdfast.engine.progress import is_watched
from holdfast.errors import shown
from holdfast.loading.default_model import find_default_model
from holdfast.memory.report import MemoryReport
from holdfast.memory.sizes import format_bytes

WEIGHTS_OWNER = "weights"
STARTING = "Starting"


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
        """The longest prompt and answer together."""
        return min(self.memory.max_model_len, self.memory.kv_tokens)


def import_torch() -> None:
    """Import all that a model needs; the end of the time in which Ctrl-C may simply leave."""
    import holdfast.engine.build  # noqa: F401

    raise_interrupts()


def report_file(option: str | None) -> Path | None:
    """Where --memory-report is to be written, refused before a model is touched; None where nobody asked."""
    if option is None:
        return None
    from holdfast.cli.page import page_file

    return page_file(option, "--memory-report")


def open_quietly(config: EngineConfig, report: Path | None = None) -> OpenedModel:
    """Load a model and say nothing."""
    log_plainly()
    started = time.monotonic()
    import_torch()
    engine = open_engine(config, lambda num_done, num_total: None)
    opened = _opened(config, engine, started)
    _write_report(opened, report)
    return opened


def open_visibly(config: EngineConfig, report: Path | None = None) -> OpenedModel:
    """Load a model where somebody waits: a bar on a terminal, two lines elsewhere."""
    log_plainly()
    started = time.monotonic()
    if is_watched():
        _import_torch_visibly()
        opened = _opened(config, open_engine(config, None), started)
    else:
        write_line(f"Loading {model_name(config)}")
        import_torch()
        opened = _opened(config, open_engine(config, lambda num_done, num_total: None), started)
        weights = sum(row.held_bytes or 0 for row in opened.memory.rows if row.owner == WEIGHTS_OWNER)
        write_line(f"Model loading took {format_bytes(weights)} memory and {opened.load_seconds:.2f} seconds")
    if _write_report(opened, report):
        write_line(f"memory report written to {shown(str(report), MAX_PATH)[1:-1]}")
    return opened


def model_name(config: EngineConfig) -> str:
    """The last part of the model's path."""
    path = find_default_model() if config.model is None else Path(config.model)
    return ascii(path.resolve().name)[1:-1]


def _write_report(opened: OpenedModel, file: Path | None) -> bool:
    if file is None:
        return False
    from holdfast.cli.page import memory_page, write_page

    write_page(file, memory_page(opened.name, opened.memory, opened.memory.entries))
    return True


def _import_torch_visibly() -> None:
    """It takes its seconds before there is anything to count. No spinner, which would hide the cursor for ever."""
    sys.stderr.write(STARTING)
    sys.stderr.flush()
    import_torch()
    sys.stderr.write(f"\r{' ' * len(STARTING)}\r")


def _opened(config: EngineConfig, engine: Engine, started: float) -> OpenedModel:
    assert isinstance(engine.memory, MemoryReport), f"an engine without an account of its memory: {engine.memory=}"
    return OpenedModel(model_name(config), engine, LLM.from_engine(engine), engine.memory, time.monotonic() - started)
