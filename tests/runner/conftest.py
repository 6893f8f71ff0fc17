"""What tests of runners lean on."""

from typing import TYPE_CHECKING

import pytest

from holdfast.planning.target import ProcessBytes

if TYPE_CHECKING:
    from runner.tiny_runners import TinyBuilder


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of tiny runners to the byte: what Python and torch hold is taken to be nothing."""
    monkeypatch.setattr("holdfast.planning.target.measure_process", lambda vocab_size=0: ProcessBytes(0, 0))


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> "TinyBuilder":
    """build(family, readable=..., on_progress=..., max_position=..., **options) -> a runner and its account."""
    from runner.tiny_runners import TinyBuilder

    return TinyBuilder(tmp_path_factory.mktemp("tiny"))
