"""Symmetric memory among 2 and 4 processes on one GPU, which take turns on it: every call to the bit, eager and in a graph."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
exchange_ranks = import_module("exchange_ranks")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 4])
def test_symmetric_calls_are_exact_eager_and_in_graphs(size: int) -> None:
    command = [exchange_ranks.__file__, "--device", "cuda"]
    found = exchange_ranks.run_ranks(command, size, 180.0, exchange_ranks.OVERLAP)
    assert not [entry["error"] for entry in found if "error" in entry]
    assert [entry["wrong"] for entry in found] == [[]] * size
    assert all(entry["num_checked"] > 50 for entry in found)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "stages"), [(2, 2), (4, 2)])
def test_symmetric_ranks_send_rows_from_stage_to_stage(size: int, stages: int) -> None:
    command = [exchange_ranks.__file__, "--device", "cuda", "--stages", str(stages)]
    found = exchange_ranks.run_ranks(command, size, 180.0, exchange_ranks.OVERLAP)
    assert not [entry["error"] for entry in found if "error" in entry]
    assert [entry["wrong"] for entry in found] == [[]] * size
    assert found[0]["num_checked"] >= 8 * stages


@pytest.mark.slow
def test_exchange_calls_are_exact_among_cpu_processes() -> None:
    command = [exchange_ranks.__file__, "--device", "cpu", "--tiny"]
    found = exchange_ranks.run_ranks(command, 3, 180.0)
    assert [entry.get("error") for entry in found] == [None] * 3
    assert [entry["wrong"] for entry in found] == [[]] * 3
