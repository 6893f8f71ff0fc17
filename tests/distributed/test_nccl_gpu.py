"""NCCL among 2 and 4 processes that share one GPU and pretend to be nodes: every call to the bit, eager and in a graph; a peer that dies."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
exchange_ranks = import_module("exchange_ranks")
COMMAND = [exchange_ranks.__file__, "--device", "cuda", "--nccl"]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_nccl_calls_are_exact_eager_and_in_graphs(size: int) -> None:
    found = exchange_ranks.run_ranks(COMMAND, size, 180.0)
    assert not [entry["error"] for entry in found if "error" in entry]
    assert [entry["wrong"] for entry in found] == [[]] * size
    assert all(entry["num_checked"] > 50 for entry in found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "stages", "way"),
    [(2, 2, []), (3, 3, []), (4, 2, ["--plain"]), (4, 2, [])],
    ids=["2", "3", "2x2", "linked"],
)
def test_nccl_sends_rows_from_node_to_node(size: int, stages: int, way: list[str]) -> None:
    command = [*COMMAND, "--stages", str(stages), *way]
    found = exchange_ranks.run_ranks(command, size, 180.0, exchange_ranks.OVERLAP)
    assert not [entry["error"] for entry in found if "error" in entry]
    assert [entry["wrong"] for entry in found] == [[]] * size
    assert found[0]["num_checked"] >= 8 * stages


@pytest.mark.gpu
def test_nccl_wait_for_dead_peer_ends_on_abandon() -> None:
    *others, dead = exchange_ranks.run_ranks([*COMMAND, "--kill"], 3, 180.0, after_failure_s=20.0)
    assert "ended with -9" in dead["error"]
    assert not [entry["error"] for entry in others if "error" in entry]
    assert all(0.4 < entry["waited_seconds"] < 1.5 for entry in others), others
    assert all(entry["closed_seconds"] < 20.0 for entry in others), others  # NCCL alone waits for minutes
