"""Opening a model for a command."""

import io
import logging
import signal
import sys
from pathlib import Path

import pytest

from holdfast.cli.interrupt import leave
from holdfast.cli.opening import import_torch, model_name, open_quietly, open_visibly
from holdfast.config import EngineConfig
from holdfast.errors import ModelNotFoundError
from holdfast.loading.default_model import find_default_model


@pytest.fixture(autouse=True)
def _no_handlers() -> None:
    logging.getLogger("holdfast").handlers.clear()


def test_quietly(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_quietly(EngineConfig(model=str(tiny), max_num_seqs=1))
    assert capsys.readouterr() == ("", "")
    assert opened.name == tiny.name
    assert opened.context_tokens == 256
    assert opened.load_seconds > 0
    assert opened.llm.memory is opened.memory


def test_plain_lines_where_nobody_watches(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_visibly(EngineConfig(model=str(tiny)))
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"Loading {tiny.name}"
    assert second.startswith("Model loading took 394.75 KiB memory and ")


def test_a_bar_with_bytes_on_a_terminal(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    open_visibly(EngineConfig(model=str(tiny)))
    logging.getLogger("holdfast").handlers.clear()
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "Loading weights" in shown
    assert "394.8" in shown
    assert "Model loading took" not in shown


@pytest.mark.parametrize("open_model", [open_quietly, open_visibly])
def test_a_model_that_is_not_there(open_model, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        open_model(EngineConfig(model=str(tmp_path / "nothing")))


def test_names_are_short_and_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_name(EngineConfig(model=str(tmp_path / "A-Model/"))) == "A-Model"
    assert model_name(EngineConfig(model="x/bad\x1b[31m")) == "bad\\x1b[31m"
    assert model_name(EngineConfig()) == find_default_model().name
    monkeypatch.chdir(tmp_path)
    assert model_name(EngineConfig(model=".")) == tmp_path.name


def test_interrupts_are_exceptions_once_torch_is_there() -> None:
    before = signal.signal(signal.SIGINT, leave)
    try:
        import_torch()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        import_torch()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "a choice of somebody else is left alone"
    finally:
        signal.signal(signal.SIGINT, before)
