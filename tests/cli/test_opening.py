"""Opening a model for a command."""

import io
import logging
import signal
import sys
from pathlib import Path

import pytest

from cli.page_reader import read_page
from holdfast.cli.interrupt import leave
from holdfast.cli.opening import import_torch, model_name, open_quietly, open_visibly, report_file
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, ModelNotFoundError
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


def test_the_memory_is_drawn_where_it_is_asked(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.html"
    opened = open_quietly(EngineConfig(model=str(tiny), max_num_seqs=1), file)
    assert capsys.readouterr() == ("", "")
    document = read_page(file.read_text(encoding="utf-8"))
    owners = [row.all("td")[0].text for row in document.all("tbody")[0].all("tr")]
    assert owners[: len(opened.memory.rows)] == [row.owner for row in opened.memory.rows]
    drawn = [box for group in document.all("svg")[1].children for box in group.children]
    only_planned = sum(
        row.planned_bytes for row in opened.memory.rows if row.held_bytes is None and "serve" in row.phases
    )
    unaccounted = max(0, opened.memory.unaccounted_bytes or 0)
    total = sum(int(box.attributes["data-bytes"]) for box in drawn)
    assert total == opened.memory.held_bytes + only_planned + unaccounted
    file.unlink()
    open_visibly(EngineConfig(model=str(tiny)), file)
    assert capsys.readouterr().err.splitlines()[-1] == f"memory report written to {file}"
    assert file.exists()


def test_where_the_memory_is_drawn_is_checked_first(tmp_path: Path) -> None:
    assert report_file(None) is None
    assert report_file(str(tmp_path / "memory.html")) == tmp_path / "memory.html"
    with pytest.raises(ConfigError, match=r"--memory-report .* was asked; it is a folder"):
        report_file(str(tmp_path))


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
