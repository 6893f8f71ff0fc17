"""quick_logging: whoever reads the log hears loggers that keep their records to themselves too, and nobody else joins them."""

import logging

import pytest

SHUT = logging.getLogger("a logger that is shut")
SHUT.propagate = False


def test_whoever_reads_the_log_hears_all_loggers(caplog: pytest.LogCaptureFixture):
    SHUT.warning("heard")
    assert caplog.messages == ["heard"]


def test_others_hear_the_root():
    assert SHUT.handlers == []
    assert "LogCaptureHandler" in {type(handler).__name__ for handler in logging.root.handlers}
