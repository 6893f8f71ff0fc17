"""docs/ranks.md: its table of plans is what `holdfast plan` says."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.app import run

PAGE = (Path(__file__).parent.parent / "docs" / "ranks.md").read_text(encoding="utf-8")
SIZES = {
    "one GPU": (),
    "tensor 2, `reduce`": ("--tensor-parallel-size", "2"),
    "tensor 2, `exact`": ("--tensor-parallel-size", "2", "--tensor-parallel-sums", "exact"),
    "tensor 4": ("--tensor-parallel-size", "4"),
    "tensor 2 x 2 stages": ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    "4 stages": ("--pipeline-parallel-size", "4"),
    "tensor 8": ("--tensor-parallel-size", "8"),
}


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert run(["plan", "Qwen3-32B", "--gpu", "h200", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("label", SIZES)
def test_ranks_page_table_matches_plan(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *SIZES[label])

    def held(*owners: str) -> int:
        return sum(term["bytes"] for term in found["terms"] if term["owner"].partition("/")[0] in owners)

    exchanged = held("exchange", "pipeline", "collectives") / 2**20
    cells = [f"{held('weights') / 2**30:.2f} GiB", f"{exchanged:.0f} MiB", f"{held('workspace') / 2**30:.2f} GiB"]
    assert f"| {label} | {' | '.join(cells)} | {found['kv_tokens']:,} |" in PAGE
