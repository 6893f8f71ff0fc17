"""The benchmark of engines on ranks as far as it runs without a GPU: what its rows say, and the script once in a small way."""

import contextlib
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
gpu_ranks = import_module("gpu_ranks")

ALONE = {"tokens": [[1, 2], [3, 4]]}
STILL = {"allocations": 0, "segments": 0, "reserved_bytes": 0}


def rows(**found: dict) -> dict[str, dict]:
    named = {tuple(name.split("_")): entry for name, entry in found.items()}
    entries = {(mode, int(size)): gpu_ranks.numbered(entry) for (mode, size), entry in named.items()}
    return {row["measure"]: row for row in gpu_ranks.rows_of(entries)}


@pytest.mark.parametrize(("token", "num_different"), [(4, 0), (5, 1)])
def test_rank_benchmark_compares_tokens_with_one_rank(token: int, num_different: int) -> None:
    found = rows(exact_1=ALONE, stages_2={"tokens": [[1, 2], [3, token]]})
    row = found["2 ranks, stages: tokens against one"]
    assert row["values"] == {"compared": 4, "different": num_different}
    assert row["holds"] == (num_different == 0)


@pytest.mark.parametrize("key", [None, *STILL])
def test_rank_benchmark_allocation_on_any_rank_fails_its_row(key: str | None) -> None:
    moved = STILL | ({} if key is None else {key: 1})
    found = rows(reduce_2={"grown": {"0": STILL, "1": moved | {"steps": 9}}})
    assert found["2 ranks, reduce: after ready"]["holds"] == (key is None)


def test_rank_benchmark_uncompared_argmax_fails_its_row() -> None:
    reported = {"compared": 0, "different": 0, "misses": []}
    assert not rows(reduce_2={"own": {"1": reported}})["2 ranks, reduce: argmax of each rank"]["holds"]
    assert rows(reduce_2={"own": {"1": reported | {"compared": 3}}})["2 ranks, reduce: argmax of each rank"]["holds"]


def test_rank_benchmark_judges_memory_by_rank() -> None:
    facts = {"reserved_bytes": {"0": 1, "1": 1}, "symmetric_bytes": 1, "context_bytes": 1}
    entry = {"planned_bytes": {"0": 1000, "1": 1000}, "measured_bytes": {"0": 1009, "1": 1011}, **facts}
    row = rows(reduce_2=entry)["2 ranks, reduce: memory"]
    assert row["percent"] == {0: 0.9, 1: 1.1}
    assert not row["holds"]


@pytest.mark.parametrize(("seconds", "holds"), [(0.1, True), (2.6, False), (None, False)])
def test_rank_benchmark_late_or_missed_death_fails_its_row(seconds: float | None, holds: bool) -> None:
    row = rows(nodes_2={"killed": {"seconds": seconds, "words": "rank 1: it ended"}})
    assert row["2 ranks, nodes: one killed, the others' error"]["holds"] == holds


def test_node_environments_give_each_process_its_node() -> None:
    reported = gpu_ranks.node_environments(4, 2)
    keys = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    places = [tuple(own[key] for key in keys) for own in reported]
    assert places == [("0", "0", "0", "2"), ("1", "0", "1", "2"), ("2", "1", "0", "2"), ("3", "1", "1", "2")]
    assert len({own["NCCL_HOSTID"] for own in reported}) == 4


def test_rank_benchmark_failed_part_reports_its_error() -> None:
    assert rows(exact_4={"error": "it took more than 60 s"})["4 ranks, exact"]["error"] == "it took more than 60 s"


@pytest.mark.slow
def test_rank_benchmark_runs_on_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_ranks.py"), "--tiny", "--device", "cpu"]
    command += ["--parts", "exact-1,exact-2,reduce-2,nodes-2", "--out", str(tmp_path), "--commit", "none"]
    subprocess.run(command, check=True, timeout=300)
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text())["results"]
    assert not [row for row in results if not row.get("holds", True)]
    assert len([row for row in results if "holds" in row]) == 6


PROGRAMS = {
    "slow to start": ("sleep(0.5); ready(); sleep(0.3)", None),
    "never ready": ("sleep(60)", "late"),
    "slow when ready": ("ready(); sleep(60)", "late"),
    "ends before": ("pass", None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_rank_benchmark_times_a_part_from_ready(name: str, tmp_path: Path, monkeypatch) -> None:
    """Kernels that are compiled for the first time are no part of it; late ranks report where they are."""
    monkeypatch.setattr(gpu_ranks, "START_SECONDS", 0.8)
    monkeypatch.setattr(gpu_ranks, "TELL_SECONDS", 0.2)
    program, late = PROGRAMS[name]
    text = f"from pathlib import Path\nfrom time import sleep\ndef ready(): Path('result.kept').touch()\n{program}"
    child = subprocess.Popen([sys.executable, "-S", "-c", text], cwd=tmp_path)
    try:
        with contextlib.nullcontext() if late is None else pytest.raises(subprocess.TimeoutExpired):
            gpu_ranks.wait_part(child, tmp_path, 0.6)
        assert (child.poll() is None) == (late is not None)
        assert (tmp_path / "late").exists() == (late is not None)
    finally:
        child.kill()
        child.wait()


def test_sums_of_compressed_ranks_are_exact_where_compared() -> None:
    """DeepSeek-V4 has no batch_invariant, by which other models choose exact sums."""
    v4 = "DeepSeek-V4-Flash"
    assert [gpu_ranks.sums_of(v4, mode, 2) for mode in ("exact", "trace", "reduce", "experts")] == [
        *("exact", "exact", "reduce", "reduce")
    ]
    assert gpu_ranks.sums_of(v4, "exact", 1) == gpu_ranks.sums_of(gpu_ranks.MODEL, "exact", 2) == "auto"


def test_trace_names_first_part_that_differs() -> None:
    one = [["layer 0 attention takes", 3, 7], ["layer 0 attention gives", 3, 8], ["layer 0 experts takes", 3, 9]]

    def row(*prints: list) -> dict:
        found = rows(trace_1={"prints": one}, trace_2={"prints": [*prints]})
        return found["2 ranks, trace: parts of layers against one"]

    found = row(one[0], ["layer 0 attention gives", 3, 5], one[2])
    assert (found["values"], found["holds"]) == ({"compared": 3, "different": 1}, False)
    assert found["first_difference"] == {"first": 1, "place": "layer 0 attention gives", "rows": 3}
    assert (row(*one[:2])["values"], row(*one[:2])["holds"]) == ({"compared": 2, "different": 1}, False)
    assert row(*one)["holds"]
