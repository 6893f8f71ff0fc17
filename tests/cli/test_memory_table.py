"""The memory table: every owner, bars in proportion, and the words that people grep for."""

import re

import pytest

from holdfast.cli import memory_table
from holdfast.cli.memory_table import BAR_CELLS, HELD, PLANNED, memory_lines, write_memory
from holdfast.memory.report import MemoryReport, MemoryRow

MIB = 2**20
REPORT = MemoryReport(
    (
        MemoryRow("weights", 60 * MIB, 60 * MIB, "12 tensors in float32"),
        MemoryRow("kv pages", 30 * MIB, 15 * MIB, "64 pages of 16 tokens"),
        MemoryRow("activations", 10 * MIB, None, "one layer's temporaries"),
    ),
    200 * MIB,
    "memory_limit",
    480 * 1024,
    1024,
    512,
)


def test_every_owner_has_a_line_and_the_sum_is_told() -> None:
    heading, *rows, total, meaning = memory_lines(REPORT)
    assert heading.split() == ["owner", "planned", "held", "why"]
    assert [re.split(r"\s{2,}", row)[0] for row in rows] == ["weights", "kv pages", "activations"]
    assert all(row.reason in line for row, line in zip(REPORT.rows, rows, strict=True))
    assert "while a step runs" in rows[2]
    assert "100.00 MiB" in total
    assert "75.00 MiB" in total
    assert "of 200.00 MiB: memory_limit" in total
    assert "KV cache size: 1,024 tokens" in meaning
    assert "Maximum concurrency for 512 tokens per request: 2.00x" in meaning


def test_bars_show_the_share_and_how_much_of_it_is_held() -> None:
    bars = [re.findall(f"[{HELD}{PLANNED}]+", line) for line in memory_lines(REPORT)[1:4]]
    assert [bar[0].count(HELD) for bar in bars] == [0.6 * BAR_CELLS, 0.15 * BAR_CELLS, 0]
    assert [bar[0].count(PLANNED) for bar in bars] == [0, 0.15 * BAR_CELLS, 0.1 * BAR_CELLS]


def test_nothing_at_all_is_no_division_by_zero() -> None:
    empty = MemoryReport((MemoryRow("weights", 0, None, ""),), 0, "", 0, 0, 1)
    assert memory_lines(empty)[1].startswith("weights")


def test_plain_lines_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    write_memory(REPORT)
    assert capsys.readouterr().err == "\n".join(memory_lines(REPORT)) + "\n"


def test_a_terminal_gets_lines_that_fit_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(memory_table, "is_watched", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    write_memory(REPORT)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(memory_lines(REPORT))
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines) <= 60
