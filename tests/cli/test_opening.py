"""Opening a model for a command."""

import contextlib
import io
import logging
import signal
import sys
from pathlib import Path

import pytest

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


class Swallower:
    """An import that is interrupted, and drops the interrupt, as torch does around numpy."""

    def find_spec(self, name: str, *others: object) -> None:
        if name == "holdfast.engine.build":
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_an_import_drops_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "meta_path", [Swallower(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "holdfast.engine.build", raising=False)
    with pytest.raises(KeyboardInterrupt):
        import_torch()
    assert signal.getsignal(signal.SIGINT) is handler
