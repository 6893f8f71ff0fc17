"""Kill -9 and SIGSTOP of every rank and of the parent at every station: noticed in time, an error for callers, nothing left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from engine.fake_rank import BOTH_PLACES
from engine.rank_groups import STATIONS, open_group, start, with_tests
from holdfast.engine.vital_signs import SILENCE_SECONDS, process_state

NOTICED_SECONDS, GONE_SECONDS = 2.5, 5.0
VICTIMS = {
    "script": ("parent", "rank 1", "rank 2"),
    "front": ("parent", "rank 0", "rank 1", "rank 2"),
    "launched": ("parent", "rank 1"),
}
"""In a script rank 0 is the parent; with a front rank 0 is the core process; launched ranks have no parent, but rank 0 is
named as one."""
PARENTS = ("script", "front")
CASES = [
    (kind, victim, how, station)
    for kind, victims in VICTIMS.items()
    for victim, how, station in product(victims, ("KILL", "STOP"), STATIONS)
]
APART = [("nodes", "parent", how, "step") for how in ("KILL", "STOP")]
"""Ranks of a launcher that are not on one machine, as they think."""
QUICK = {
    ("script", "rank 1", "KILL", "step"),
    ("script", "rank 2", "STOP", "idle"),
    ("launched", "parent", "KILL", "load"),
    ("front", "parent", "KILL", "warm"),
    ("front", "rank 0", "KILL", "plan"),
}
"""Each kind, victim, signal and station is in one of them."""


def test_rank_death_cases_cover_every_value():
    assert len(CASES) >= 60
    assert set(CASES) >= QUICK
    for place in range(4):
        assert {case[place] for case in QUICK} == {case[place] for case in CASES}


def marked(case):
    return pytest.param(*case, id="-".join(case), marks=() if case in QUICK else pytest.mark.slow)


def lives(pid: int) -> bool:
    """Whether it has memory: neither gone nor waiting to be reaped."""
    return Path(f"/proc/{pid}").exists() and process_state(pid)[0] not in "ZX"


class Program:
    """The program, its processes by name, and what it said."""

    def __init__(self, kind: str, station: str, folder: Path) -> None:
        words = [sys.executable, "-P", "-m", "engine.fake_ranked", kind, station]
        environment = with_tests(dict(os.environ)) | {BOTH_PLACES: str(folder), "RANK": "0"}
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
        ranks = () if kind in PARENTS else (1, 2)
        self._others = [subprocess.Popen(words, env=environment | {"RANK": str(rank)}) for rank in ranks]
        arrived = "step" if station == "locked" else station
        files = {"rank 1": f"{arrived}-1.pid", "rank 2": f"{arrived}-2.pid"}
        if kind == "front":
            files["rank 0"] = "core-0.pid"
        until = time.monotonic() + 60
        while not all((folder / file).exists() for file in files.values()):
            assert time.monotonic() < until, "the ranks did not come so far"
            assert self.process.poll() is None, "the program has ended"
            time.sleep(0.01)
        self.pids = {name: int((folder / file).read_text()) for name, file in files.items()}
        self.pids["parent"] = self.process.pid

    def left(self, names, until: float) -> list[str]:
        """Those that still live at that time."""
        while (left := [name for name in names if lives(self.pids[name])]) and time.monotonic() < until:
            time.sleep(0.02)
        return left

    def error(self) -> tuple[float, str]:
        """When it failed, and why."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it said nothing"
        return tuple(json.loads(line))

    def end(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (self.process, *self._others):
            process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.parametrize(("kind", "victim", "how", "station"), [marked(case) for case in CASES + APART])
def test_rank_death_is_noticed_and_leaves_no_process(kind, victim, how, station, tmp_path):
    program = Program(kind, station, tmp_path)
    try:
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(program.pids[victim], getattr(signal, f"SIG{how}"))
        others = [name for name in program.pids if name != "parent"]
        if victim == "parent":
            most = GONE_SECONDS if kind in PARENTS else SILENCE_SECONDS + NOTICED_SECONDS
            assert program.left(others, began + most) == []
            if how == "STOP":
                os.kill(program.pids["parent"], signal.SIGCONT)
                assert program.error()[1]
        else:
            at, words = program.error()
            assert at - began < NOTICED_SECONDS, f"{at - began:.2f} s: {words}"
            assert "rank" in words or "core process" in words.lower()
            if kind == "launched" and how == "STOP":
                others.remove(victim)  # it is the launcher's to end, and its connection is gone
            assert program.left(others, began + GONE_SECONDS) == []
        assert program.left(["parent"], began + 2 * GONE_SECONDS) == []
    finally:
        program.end()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", "launched", "nodes"])
def test_rank_0_holding_the_gil_between_steps_is_alive(kind, tmp_path):
    program = Program(kind, "locked", tmp_path)
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "locked-0.pid").exists():
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(4.0)
        assert all(map(lives, program.pids.values()))
    finally:
        program.end()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["launched", "nodes"])
def test_ranks_of_a_launcher_raise_no_alarm_on_a_loaded_machine(kind, tmp_path):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8 * (os.cpu_count() or 1))]
    try:
        program = Program(kind, "step", tmp_path)
        try:
            time.sleep(15.0)
            assert all(map(lives, program.pids.values()))
        finally:
            program.end()
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_rank_group_raises_no_alarm_under_eightfold_load(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", with_tests(dict(os.environ))["PYTHONPATH"])
    num_busy = 8 * (os.cpu_count() or 1)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
    try:
        group = open_group(num_ranks=4)
        try:
            start(group, 120.0)
            until = time.monotonic() + 20
            while time.monotonic() < until:
                group.raise_if_dead()
                time.sleep(0.1)
        finally:
            group.end()
    finally:
        for process in busy:
            process.kill()
            process.wait()
