"""The benchmark of exchanges as far as it runs without a GPU: its records, and what it says of ranks that fail or hang."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
exchange_ranks = import_module("exchange_ranks")
gpu_exchange = import_module("gpu_exchange")


def test_exchange_benchmark_reports_slowest_rank_and_failures() -> None:
    found = [
        {"wrong": [], "num_checked": 3, "variants": {"a": 2.0, "b": 3.0}, "calls": {}},
        {"wrong": ["sum"], "num_checked": 3, "variants": {"a": 4.0, "b": "no"}, "error": "rank 1 did not end"},
    ]
    checks, variants = gpu_exchange.rows_of(2, found, 5120)
    assert checks["values"] == {"checked": 6, "wrong": 1}
    assert checks["errors"] == ["rank 1 did not end"]
    assert variants["measure"] == "2 ranks, sum of 16 x 5120"
    assert variants["values"] == {"a": 4.0, "b": "[3.0, 'no']"}


@pytest.mark.slow
def test_exchange_benchmark_failed_rank_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import sys, time\nif '1' in sys.argv[2:3]: raise ValueError('no')\ntime.sleep(60)\n")
    found = exchange_ranks.run_ranks([str(script)], 2, 30.0)
    assert found[0]["error"].startswith("rank 0 did not end")
    assert found[1]["error"].startswith("rank 1 ended with 1: ")
    assert found[1]["error"].endswith("ValueError: no")


@pytest.mark.slow
def test_exchange_benchmark_runs_on_cpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_exchange.py"),
        "--tiny",
        "--device",
        "cpu",
        "--ranks",
        "2",
    ]
    subprocess.run([*command, "--out", str(tmp_path), "--commit", "none"], check=True, timeout=300)
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert record["section"] == "gpu-exchange"
    assert record["results"][0]["values"]["wrong"] == 0
    assert record["results"][1]["unit"] == "us"
