"""DeepSeek-V4 on ranks that share one GPU: the same tokens on every rank, those of one rank with exact sums, and no allocation after ready."""

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


def check_rows(rows: dict[str, dict], num_ranks: int) -> None:
    assert not [row for row in rows.values() if not row.get("holds", True)]
    tokens = rows[f"{num_ranks} ranks, exact: tokens against one"]["values"]
    assert tokens["compared"] > 0
    assert tokens["different"] == 0
    for mode in ("reduce", "experts"):
        if f"{num_ranks} ranks, {mode}: after ready" in rows:
            assert rows[f"{num_ranks} ranks, {mode}: argmax of each rank"]["holds"]


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_entry_ranks_on_one_gpu_match_one(tmp_path: Path, num_ranks: int) -> None:
    """In graphs; experts sliced and whole."""
    parts = "exact-1", f"exact-{num_ranks}", f"reduce-{num_ranks}", f"experts-{num_ranks}"
    check_rows(run_parts(tmp_path, "cuda", *parts), num_ranks)


@pytest.mark.gpu
def test_entry_stages_on_one_gpu_allocate_nothing(tmp_path: Path) -> None:
    """In graphs; windows alone in the first stage. Its steps have fewer rows than those of one rank, and round otherwise."""
    rows = run_parts(tmp_path, "cuda", "stages-2")
    assert not [row for row in rows.values() if not row.get("holds", True)]
    assert rows["2 ranks, stages: after ready"]["values"]["rank 1 steps"] > 0


@pytest.mark.slow
def test_entry_stages_on_cpu_match_one(tmp_path: Path) -> None:
    rows = run_parts(tmp_path, "cpu", "exact-1", "stages-2")
    assert not [row for row in rows.values() if not row.get("holds", True)]
    assert rows["2 ranks, stages: tokens against one"]["values"]["compared"] > 0


@pytest.mark.slow
def test_entry_ranks_on_cpu_match_one(tmp_path: Path) -> None:
    check_rows(run_parts(tmp_path, "cpu", "exact-1", "exact-2", "reduce-2"), 2)
