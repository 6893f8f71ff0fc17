"""The option --budget SECONDS: no test starts after it, and the summary counts those that did not run."""

import time

import pytest

STARTED = pytest.StashKey[float]()
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def add_option(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.addoption("--budget", type=float, help="seconds after which no further test starts; the rest is counted")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Start no test after the budget has ended."""
    budget = item.config.getoption("budget")
    if budget is None:
        return None
    started = item.session.stash.setdefault(STARTED, time.monotonic())
    return True if time.monotonic() - started > budget else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report how many tests the budget left out."""
    if config.getoption("budget") is None:
        return
    num_run = sum(len(terminalreporter.stats.get(outcome, ())) for outcome in OUTCOMES)
    num_selected = terminalreporter._numcollected - len(terminalreporter.stats.get("deselected", ()))
    if num_selected > num_run:
        terminalreporter.write_line(f"the budget ended before {num_selected - num_run} tests: make test runs them")
