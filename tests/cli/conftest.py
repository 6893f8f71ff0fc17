"""Fixtures of the command line's tests: a tiny model, and a way to run commands without a new process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.cli_models import Here, forget_log, make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a chat template."""
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the one before without a chat template."""
    return make_model(tmp_path_factory.mktemp("bare") / "model", has_template=False)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """here("run", model, "-p", "Hello", stdin=b"...") -> how it ended."""
    return Here(monkeypatch, capsys)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can go on for a long time."""
    return make_model(tmp_path_factory.mktemp("endless") / "A-Model", max_position_embeddings=100_000)


@pytest.fixture(autouse=True)
def no_log_is_left() -> Iterator[None]:
    yield
    forget_log()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test names and no caller has is not looked for on the Hub, in this process and in those that it starts."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
