"""DeepSeek-V4 on ranks that share one device: the same choice on every rank, with exact sums that of one rank, and no allocation after ready."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "gpu_ranks.py"


def run_parts(folder: Path, device: str, *parts: str) -> dict[str, dict]:
    """The rows of a record of tiny engines."""
    command = [sys.executable, str(SCRIPT), "--tiny", "--device", device, "--model", "DeepSeek-V4-Flash"]
    command += ["--parts", ",".join(parts), "--out", str(folder), "--commit", "none"]
    subprocess.run(command, check=True, timeout=300)
    (path,) = folder.iterdir()
    return {row["measure"]: row for row in json.loads(path.read_text())["results"]}


def check_rows(rows: dict[str, dict], *labels: str) -> None:
    """Other tests use the device too, so its memory is not compared here."""
    assert not [row for name, row in rows.items() if not row.get("holds", True) and not name.endswith("memory")]
    for label in labels:
        assert rows[f"{label}: argmax of each rank"]["holds"]
        assert rows[f"{label}: after ready"]["holds"]


@pytest.mark.gpu
def test_entry_ranks_on_one_gpu_choose_alike(tmp_path: Path) -> None:
    """In graphs, with slices of experts and whole ones; exact ones are compared at the sizes of a model (gpu_ranks.py)."""
    check_rows(run_parts(tmp_path, "cuda", "reduce-4", "experts-2"), "4 ranks, reduce", "2 ranks, experts")


@pytest.mark.gpu
def test_entry_stages_on_one_gpu_allocate_nothing(tmp_path: Path) -> None:
    """In graphs; windows alone in the first stage. Its steps have fewer rows than those of one rank, and round otherwise."""
    rows = run_parts(tmp_path, "cuda", "stages-2")
    check_rows(rows)
    assert rows["2 ranks, stages: after ready"]["values"]["rank 1 steps"] > 0


@pytest.mark.slow
def test_entry_stages_on_cpu_match_one(tmp_path: Path) -> None:
    rows = run_parts(tmp_path, "cpu", "exact-1", "stages-2")
    assert not [row for row in rows.values() if not row.get("holds", True)]
    assert rows["2 ranks, stages: tokens against one"]["values"]["compared"] > 0


@pytest.mark.slow
def test_entry_ranks_on_cpu_have_bits_of_one(tmp_path: Path) -> None:
    """Every part of every layer: tokens alone hid that sums were not exact."""
    rows = run_parts(tmp_path, "cpu", "trace-1", "trace-2")
    values = rows["2 ranks, trace: parts of layers against one"]["values"]
    assert values["compared"] > 0
    assert values["different"] == 0


@pytest.mark.slow
def test_entry_ranks_on_cpu_match_one(tmp_path: Path) -> None:
    rows = run_parts(tmp_path, "cpu", "exact-1", "exact-2", "reduce-2")
    check_rows(rows, "2 ranks, reduce")
    tokens = rows["2 ranks, exact: tokens against one"]["values"]
    assert tokens["compared"] > 0
    assert tokens["different"] == 0
