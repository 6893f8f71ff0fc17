"""What tests of runners lean on."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from runner.tiny_runners import TinyBuilder


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> "TinyBuilder":
    """build(family, readable=..., on_progress=..., max_position=..., **options) -> a runner and its account."""
    from runner.tiny_runners import TinyBuilder

    return TinyBuilder(tmp_path_factory.mktemp("tiny"))
