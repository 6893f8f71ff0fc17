"""Fixtures of the command line's tests: a tiny model, and a way to run commands without a new process."""

from pathlib import Path

import pytest

from cli.cli_models import Here, make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a chat template."""
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template."""
    return make_model(tmp_path_factory.mktemp("bare") / "model", has_template=False)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """here("run", model, "-p", "Hello", stdin=b"...") -> how it ended."""
    return Here(monkeypatch, capsys)
