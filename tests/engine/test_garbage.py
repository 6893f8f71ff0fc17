"""Garbage: a start is never looked at again, and does not keep the rest from being collected; that happens while there is nothing to do."""

import gc
import subprocess
import sys

import pytest

from engine.test_core import request
from engine.test_core_server import serve
from holdfast.engine import core_process
from holdfast.engine.garbage import IdleCollector
from holdfast.engine.messages import Submit

LIFE = """
import gc
from holdfast.engine.garbage import keep_start

start = [[] for _ in range(600_000)]
gc.collect()
keep_start()
assert gc.get_freeze_count() >= len(start)
before = gc.get_stats()[2]["collections"]
later = [[] for _ in range(120_000)]
print(gc.get_stats()[2]["collections"] - before)
"""


def num_full() -> int:
    """Collections of all objects so far."""
    return gc.get_stats()[2]["collections"]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python counts in another way")
def test_keep_start_does_not_delay_collections() -> None:
    done = subprocess.run([sys.executable, "-c", LIFE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_garbage_is_collected_after_so_much_work() -> None:
    collector, before, seen = IdleCollector(100), num_full(), []
    for num_done in (0, 99, 100, 101, 199, 200, 450, 451):
        collector.look(num_done)
        seen.append(num_full() - before)
    assert seen == [0, 0, 1, 1, 1, 2, 3, 3]


def test_core_server_collects_garbage_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(core_process, "COLLECT_STEPS", 6)
    monkeypatch.setattr(gc, "collect", lambda: seen.append(1))
    serve([Submit((request(0, max_tokens=5),))])
    assert seen == []
    serve([Submit((request(0, max_tokens=6),))])
    assert seen == [1]
