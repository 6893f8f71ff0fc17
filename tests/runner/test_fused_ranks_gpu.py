"""Ranks as processes on one GPU: the fused decode path over symmetric memory gives the ordinary way's logits, the same bits on every rank, and allocates nothing."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
gpu_fused_ranks = import_module("gpu_fused_ranks")

NEAR = 0.03
"""For the spread of the logits: some roundings to bfloat16 in another order."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "num_ranks", "options"),
    [
        ("Qwen3-32B", 2, []),
        ("Qwen3-32B", 4, ["--quantization", "int8"]),
        ("Qwen3-30B-A3B", 2, []),
        ("DeepSeek-V2-Lite", 4, []),
    ],
    ids=str,
)
def test_ranks_on_one_gpu(model: str, num_ranks: int, options: list[str]) -> None:
    command = [gpu_fused_ranks.__file__, "--tiny", "--device", "cuda", "--model", model, *options]
    found = gpu_fused_ranks.run_ranks(command, num_ranks, 120.0, gpu_fused_ranks.OVERLAP)
    assert not [entry["error"] for entry in found if "error" in entry]
    assert all(entry["takes_it"] for entry in found)
    rows = gpu_fused_ranks.rows_of(num_ranks, 2, found)
    assert len(rows) == len(gpu_fused_ranks.ROWS)
    for row in rows:
        assert {"plain", "fused", "two steps"} < set(row["values"])
        assert row["same_bits"], row
        assert max(row["off"].values()) < NEAR, row
        assert row["allocations"] == 0, row


@pytest.mark.slow
def test_gpu_fused_ranks_script_on_cpu_runs_unfused() -> None:
    command = [gpu_fused_ranks.__file__, "--tiny", "--device", "cpu"]
    found = gpu_fused_ranks.run_ranks(command, 2, 120.0)
    assert [entry.get("error") for entry in found] == [None, None]
    assert not any(entry["takes_it"] for entry in found)
    assert [set(row["values"]) for row in gpu_fused_ranks.rows_of(2, 2, found)] == [{"plain"}] * 3
