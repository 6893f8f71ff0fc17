"""The memory table: every owner, bars in proportion, and the words that people grep for."""

import dataclasses
import re

import pytest

from holdfast.cli.columns import FULL, LIGHT
from holdfast.cli.memory_table import BAR_CELLS, memory_lines, refusal_lines, write_memory
from holdfast.engine import progress
from holdfast.errors import PlanRow, PlanTable
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
    assert "as needed" in rows[2]
    assert "100.00 MiB" in total
    assert "75.00 MiB" in total
    assert "of 200.00 MiB: memory_limit" in total
    assert "KV cache size: 1,024 tokens" in meaning
    assert "Maximum concurrency for 512 tokens per request: 2.00x" in meaning


def test_bars_show_the_share_and_how_much_of_it_is_held() -> None:
    bars = [re.findall(f"[{FULL}{LIGHT}]+", line) for line in memory_lines(REPORT)[1:4]]
    assert [bar[0].count(FULL) for bar in bars] == [0.6 * BAR_CELLS, 0.15 * BAR_CELLS, 0]
    assert [bar[0].count(LIGHT) for bar in bars] == [0, 0.15 * BAR_CELLS, 0.1 * BAR_CELLS]


def test_nothing_at_all_is_no_division_by_zero() -> None:
    empty = MemoryReport((MemoryRow("weights", 0, None, ""),), 0, "", 0, 0, 1)
    assert memory_lines(empty)[1].startswith("weights")


def test_plain_lines_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    write_memory(REPORT)
    assert capsys.readouterr().err == "\n".join(memory_lines(REPORT)) + "\n"


def test_a_terminal_gets_lines_that_fit_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    write_memory(REPORT)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(memory_lines(REPORT))
    shown = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert max(map(len, shown[:-1])) <= 60
    assert shown[-1] == memory_lines(REPORT)[-1], "a sentence is not cut"


def test_a_compact_table_leaves_out_why() -> None:
    lines = memory_lines(REPORT, is_compact=True)
    assert len(lines) == len(memory_lines(REPORT))
    assert max(map(len, lines[:-1])) < 60
    assert not any(row.reason in line for row in REPORT.rows for line in lines)


def test_what_the_device_says_and_nobody_holds() -> None:
    measured = dataclasses.replace(REPORT, measured_bytes=80 * MIB)
    *_, unaccounted, device, meaning = memory_lines(measured)
    assert unaccounted.split()[:3] == ["unaccounted", "5.00", "MiB"]
    assert device.split()[:3] == ["measured", "80.00", "MiB"]
    assert meaning.startswith("KV cache size")
    fewer = memory_lines(dataclasses.replace(REPORT, measured_bytes=70 * MIB))
    assert "-5.00 MiB" in fewer[-3], "a ledger that holds more than the device is worth a line too"


def test_an_owner_that_is_gone_by_now() -> None:
    staging = MemoryRow("staging", 64 * MIB, None, "64 MiB at a time", ("load",))
    report = dataclasses.replace(REPORT, rows=(*REPORT.rows, staging))
    line = next(line for line in memory_lines(report) if line.startswith("staging"))
    assert "only to load" in line
    assert FULL not in line
    assert LIGHT not in line
    assert "100.00 MiB" in memory_lines(report)[-2], "it is not part of the sum"


TABLE = PlanTable(
    "serve",
    (PlanRow("weights", 60 * MIB, "12 tensors"), PlanRow("kv pages", 40 * MIB, "for one longest sequence")),
    100 * MIB,
    64 * MIB,
    "memory_limit",
)


def test_a_refusal_is_the_table_with_the_shortfall() -> None:
    heading, weights, pages, total, budget, short = refusal_lines(TABLE)
    assert heading.split() == ["owner", "needed", "why"]
    assert weights.count(FULL) == 0.6 * BAR_CELLS
    assert pages.endswith("for one longest sequence")
    assert [line.split()[:3] for line in (total, budget, short)] == [
        ["total", "100.00", "MiB"],
        ["budget", "64.00", "MiB"],
        ["short", "36.00", "MiB"],
    ]


def test_a_terminal_that_says_it_has_no_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    monkeypatch.setenv("COLUMNS", "0")
    write_memory(REPORT)
    assert "60.00 MiB" in capsys.readouterr().err
