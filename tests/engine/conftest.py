"""Engines of fakes, one step after the other and with a step running ahead."""

import pytest

from engine import fakes


@pytest.fixture(params=[0, 1], ids=["in turn", "ahead"])
def run_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What runs ahead in every engine of this test that says nothing else."""
    monkeypatch.setattr(fakes, "usual_run_ahead", request.param)
    return request.param
