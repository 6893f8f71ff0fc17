"""The memory page: every entry to scale, sums that agree with the table, and harmless names."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.page_reader import Element, read_page
from holdfast.cli.memory_html import MAP_ROWS, memory_page, memory_parts, write_memory_page
from holdfast.cli.strip_map import WIDTH
from holdfast.memory.ledger import Ledger
from holdfast.memory.report import MemoryReport, MemoryRow

MIB = 2**20
HOSTILE = "<script>alert(1)</script>&\"'</svg>"


def ledger_of(*entries: tuple[str, int]) -> Ledger:
    ledger = Ledger()
    for owner, num_bytes in entries:
        ledger.record(owner, num_bytes, f"{owner} is needed")
    return ledger


def report_of(ledger: Ledger, *more: MemoryRow, budget: int = 0, measured: int | None = None) -> MemoryReport:
    rows = [MemoryRow(owner, held, held, "because") for owner, held in ledger.group_bytes().items()]
    rows = sorted([*rows, *more], key=lambda row: -row.planned_bytes)
    return MemoryReport(tuple(rows), budget or 2 * ledger.total_bytes, "memory_limit", 1024, 4096, 512, {}, measured)


def boxes(page: str) -> tuple[list[Element], list[Element]]:
    """Of the budget's strip and of the map."""
    budget, held = read_page(page).all("svg")
    return _boxes(budget), _boxes(held)


def _boxes(picture: Element) -> list[Element]:
    return [box for group in picture.children for box in group.children]


def looks(page: str, number: int) -> list[str]:
    return [group.attributes["class"] for group in read_page(page).all("svg")[number].children]


def total(elements: list[Element]) -> int:
    return sum(int(element.attributes["data-bytes"]) for element in elements)


SMALL = ledger_of(
    ("weights/embed", 30 * MIB), ("weights/layers.0.qkv", 20 * MIB), ("kv pages/0.k", 25 * MIB), ("rope/table", 5 * MIB)
)


def test_every_entry_is_a_box_as_large_as_its_bytes() -> None:
    page = memory_page("A-Model", report_of(SMALL), tuple(SMALL))
    budget, held = boxes(page)
    assert [int(box.attributes["data-bytes"]) for box in held] == [entry.num_bytes for entry in SMALL]
    for box, entry in zip(held, SMALL, strict=True):
        width = sum(float(rect.attributes["width"]) for rect in box.all("rect"))
        assert width == pytest.approx(WIDTH * MAP_ROWS * entry.num_bytes / SMALL.total_bytes, rel=1e-4)
        assert f"{entry.num_bytes:,} bytes" in box.all("title")[0].text
        assert entry.owner in box.all("title")[0].text
        assert entry.reason in box.all("title")[0].text
    assert looks(page, 0) == ["c0", "c1", "c3", "free"]
    assert total(budget) == report_of(SMALL).budget_bytes


def test_the_table_adds_up_and_has_the_colours_of_the_boxes() -> None:
    document = read_page(memory_page("A-Model", report_of(SMALL), tuple(SMALL)))
    *rows, last = document.all("tbody")[0].all("tr")
    cells = [[cell.text for cell in row.all("td")] for row in rows]
    assert [row[0] for row in cells] == ["weights", "kv pages", "rope"]
    assert sum(float(row[2].removesuffix(" MiB")) for row in cells) == 80
    assert last.all("td")[2].text == "80.00 MiB"
    shares = [float(row[3].removesuffix("%")) for row in cells]
    assert sum(shares) == pytest.approx(100, abs=0.05)
    swatches = [row.all("span")[1].attributes["class"] for row in rows]
    assert swatches == ["swatch c0", "swatch c1", "swatch c3"]
    assert "KV cache of 4,096 tokens, 1.00 KiB each: 8.00 requests of 512 tokens at once" in document.text


def test_what_is_planned_only_and_what_nobody_holds_are_drawn_apart() -> None:
    step = MemoryRow("sampling", 10 * MIB, None, "temporaries")
    staging = MemoryRow("staging", 64 * MIB, None, "a ring", ("load",))
    report = report_of(SMALL, step, staging, measured=87 * MIB)
    parts = {(part.group, part.look): part.num_bytes for part in memory_parts(report, tuple(SMALL))}
    assert parts["sampling", "planned"] == 10 * MIB
    assert parts["unaccounted", "unknown"] == 7 * MIB
    assert not any(group == "staging" for group, _ in parts), "it is gone by now"
    page = memory_page("A-Model", report, tuple(SMALL))
    _, held = boxes(page)
    assert total(held) == (80 + 10 + 7) * MIB
    assert "only to load" in page
    assert {look.split()[-1] for look in looks(page, 1)} >= {"planned", "unknown"}


def test_a_device_that_says_less_than_the_ledger_is_told_and_not_drawn() -> None:
    page = memory_page("A-Model", report_of(SMALL, measured=70 * MIB), tuple(SMALL))
    assert total(boxes(page)[1]) == 80 * MIB
    assert "-10.00 MiB" in page


def test_without_entries_the_rows_are_drawn() -> None:
    page = memory_page("A-Model", report_of(SMALL), ())
    assert total(boxes(page)[1]) == 80 * MIB


def test_names_are_escaped_everywhere() -> None:
    hostile = ledger_of((f"weights/{HOSTILE}", MIB), (f"{HOSTILE}/x", MIB))
    document = read_page(memory_page(HOSTILE, report_of(hostile), tuple(hostile)))
    assert len(document.all("script")) == 1
    assert len(document.all("svg")) == 2
    assert HOSTILE in document.all("h1")[0].text
    assert any(HOSTILE in title.text for title in document.all("title"))


def test_a_large_model_is_a_few_tens_of_kilobytes() -> None:
    names = ("input_norm", "qkv.weight", "q_norm", "k_norm", "o.weight", "post_norm", "gate_up.weight", "down.weight")
    weights = [(f"weights/layers.{i}.{name}", 1024 if "norm" in name else 2**27) for i in range(64) for name in names]
    pages = [(f"kv pages/{i}.attention.{plane}", 2**29) for i in range(64) for plane in "kv"]
    large = ledger_of(*weights, *pages, ("workspace/layers", 2**28))
    page = memory_page("Qwen3-32B", report_of(large), tuple(large))
    assert len(page.encode()) < 100_000
    assert total(boxes(page)[1]) == large.total_bytes


@given(
    st.lists(st.integers(0, 2**44), min_size=1, max_size=40),
    st.integers(1, 2**45),
    st.one_of(st.none(), st.integers(0, 2**45)),
)
def test_any_report_is_a_sound_page_whose_bytes_add_up(sizes: list[int], budget: int, measured: int | None) -> None:
    ledger = ledger_of(*((f"g{place % 11}/n{place}", size) for place, size in enumerate(sizes)))
    report = report_of(ledger, budget=budget, measured=measured)
    in_budget, held = boxes(memory_page("m", report, tuple(ledger)))
    drawn = ledger.total_bytes + max(0, report.unaccounted_bytes or 0)
    assert total(held) == drawn
    assert total(in_budget) == max(drawn, budget)


def test_an_old_page_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("old")
    write_memory_page(file, "A-Model", report_of(SMALL), tuple(SMALL))
    assert re.match("<!DOCTYPE html>", file.read_text(encoding="utf-8"))
