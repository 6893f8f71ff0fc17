"""Pages: well formed and harmless whatever the names in them; boxes, bars, dots and lines to scale; no colour twice."""

import math
import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.eval_qualities import BROKEN, FEW, FP8, quality, view
from cli.page_reader import Element, read_page
from cli.plan_requests import plan_request
from error_codes import raises_code
from holdfast.cli.page import (
    HEIGHT,
    MAP_ROWS,
    MAX_BOXES,
    WIDTH,
    Bar,
    HtmlTable,
    Part,
    Picture,
    Scale,
    bars,
    colours,
    environment,
    eval_page,
    label_heights,
    log_scale,
    memory_page,
    memory_parts,
    page,
    page_file,
    place_chart,
    plan_page,
    size_chart,
    strips,
    ticks,
    tooltip,
    with_small_ones_gathered,
    write_page,
)
from holdfast.cli.plan_view import Cell, Start, sweep, view_of
from holdfast.cli.tables import alternative_lines
from holdfast.errors import ConfigError
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import PHASES
from holdfast.memory.report import MemoryReport, MemoryRow

VERY_HOSTILE = "</title><script>alert(1)</script>\"'&<!--\x00\x1b[31m\udc80\u2028"


def rendered(body: str, title: str = "t", **values: object) -> str:
    """Render a page with a body of its own."""
    parts = '{% extends "page.html.jinja" %}{% from "page_parts.html.jinja" import paragraphs, picture, table %}'
    template = environment().from_string(parts + "{% block body %}" + body + "{% endblock %}")
    return page(template, title, **values)


def pictured(*pictures: Picture) -> str:
    return rendered("{% for one in pictures %}{{ picture(one) }}{% endfor %}", pictures=pictures)


def tabled(heading: tuple, rows: list, num_numbers: int, title: str = "t") -> str:
    return rendered("{{ table(made) }}", title, made=HtmlTable(heading, rows, num_numbers))


@given(st.text(st.characters(codec=None), max_size=40))
def test_rendered_any_text_round_trips_or_is_replaced(text: str) -> None:
    document = read_page(rendered("<p>{{ text }}</p>{{ paragraphs(['x'], text) }}", text, text=text))
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    assert document.all("title")[0].text == shown
    assert document.all("p")[0].text == shown
    assert document.all("p")[1].attributes.get("class", "") == shown
    rendered("", text).encode("utf-8")


def test_tabled_hostile_name_makes_no_element() -> None:
    document = read_page(tabled((VERY_HOSTILE,), [(VERY_HOSTILE, (VERY_HOSTILE,))], 0, VERY_HOSTILE))
    assert len(document.all("script")) == 1
    assert "alert" not in document.all("script")[0].text
    assert len(document.all("td")) == 1


def test_numbers_are_aligned_and_rows_have_classes() -> None:
    rows = [("total", ("a", "1", "b")), ("", ("c", "2", "d"))]
    made = read_page(tabled(("owner", "bytes", "why"), rows, 1))
    assert [cell.attributes.get("class") for cell in made.all("td")] == [None, "number", None] * 2
    assert [row.attributes.get("class") for row in made.all("tr")] == [None, "total", None]


@pytest.mark.parametrize(
    "name", ["", " ", "a\0b", "folder", "no/such/folder/page.html", "x" * 5000, "~nobody_at_all/p"]
)
def test_page_file_refuses_invalid_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with raises_code("cli.bad_page_file", ConfigError, option="--html", file=name):
        page_file(name, "--html")


def test_page_file_accepts_new_file_and_old_page(tmp_path: Path) -> None:
    (tmp_path / "old.html").write_text("<!DOCTYPE html>old")
    for name in ("old.html", "new.html"):
        assert page_file(str(tmp_path / name), "--html") == tmp_path / name


def test_page_file_refuses_to_replace_other_files(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{}")
    with raises_code("cli.bad_page_file", reason="a file that is not an HTML page has that name"):
        page_file(str(file), "--html")
    for text in ("", "<!DOCTYPE html>\n<html></html>"):
        file.write_text(text)
        assert page_file(str(file), "--html") == file


def test_page_file_refuses_unwritable_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with raises_code("cli.bad_page_file", reason="it is not writable"):
        page_file(str(tmp_path / "page.html"), "--html")


GIB = 2**30


def groups(parts: list[Part], num_rows: int) -> list[Element]:
    colour = colours([part.group for part in parts])
    return read_page(pictured(strips(parts, colour, num_rows, "memory"))).all("svg")[0].children


def drawn(parts: list[Part], num_rows: int) -> list[Element]:
    return [box for group in groups(parts, num_rows) for box in group.children]


all_sizes = st.lists(st.integers(1, 2**50), min_size=1, max_size=30)


@given(all_sizes, st.integers(1, 24))
def test_drawn_box_widths_match_bytes_and_fill_strips(numbers: list[int], num_rows: int) -> None:
    parts = [Part(f"g{place % 3}", f"n{place}", number, "") for place, number in enumerate(numbers)]
    boxes = drawn(parts, num_rows)
    total = sum(numbers)
    widths = [sum(float(rect.attributes["width"]) for rect in box.all("rect")) for box in boxes]
    assert [int(box.attributes["data-bytes"]) for box in boxes] == numbers
    for width, number in zip(widths, numbers, strict=True):
        assert width == pytest.approx(WIDTH * num_rows * number / total, abs=0.01 * (num_rows + 1))
    for rect in (rect for box in boxes for rect in box.all("rect")):
        x, width = float(rect.attributes["x"]), float(rect.attributes["width"])
        assert x >= 0
        assert x + width <= WIDTH + 0.02


@given(all_sizes, st.integers(1, 24))
def test_boxes_follow_one_another(numbers: list[int], num_rows: int) -> None:
    boxes = drawn([Part("g", str(place), number, "") for place, number in enumerate(numbers)], num_rows)
    rects = [
        (int(r.attributes["y"]), float(r.attributes["x"]), float(r.attributes["width"]))
        for b in boxes
        for r in b.all("rect")
    ]
    for (y, x, width), (next_y, next_x, _) in pairwise(rects):
        assert (next_y == y and next_x == pytest.approx(x + width, abs=0.03)) or (next_y > y and next_x == 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2**40)), max_size=60), st.integers(1, 20))
def test_gathering_loses_no_byte_and_keeps_groups(items: list[tuple[str, int]], max_boxes: int) -> None:
    parts = [Part(group, f"n{place}", number, "") for place, (group, number) in enumerate(items)]
    gathered = with_small_ones_gathered(parts, max_boxes)
    for group in "abc":
        assert sum(p.num_bytes for p in gathered if p.group == group) == sum(
            p.num_bytes for p in parts if p.group == group
        )
    assert len(gathered) <= max_boxes + 3


def test_with_small_ones_gathered_keeps_order_within_groups() -> None:
    parts = [Part("a", "1", 50, ""), Part("a", "2", 1, ""), Part("b", "3", 60, ""), Part("a", "4", 90, "")]
    assert [part.name for part in with_small_ones_gathered(parts, 3)] == ["1", "4", "2", "3"]
    assert [part.name for part in with_small_ones_gathered(parts, 2)] == ["4", "2 small ones", "3"]
    assert with_small_ones_gathered(parts, 2)[1].reason == "the largest is 1"


def test_thousands_of_tensors_are_still_a_small_picture() -> None:
    parts = [Part("weights", f"layers.{place}.weight", GIB + place, "in bfloat16") for place in range(5000)]
    gathered = with_small_ones_gathered(parts)
    assert len(gathered) == MAX_BOXES + 1
    assert gathered[-1].name == f"{5000 - MAX_BOXES} small ones"
    picture = pictured(strips(gathered, colours(["weights"]), 24, "memory"))
    assert len(picture) < 150_000


def test_tooltip_has_owner_bytes_share_and_reason() -> None:
    words = tooltip(Part("weights", "layers.3.qkv.weight", GIB, "fused, in bfloat16"), 4 * GIB)
    assert words == "weights/layers.3.qkv.weight: 1.00 GiB (1,073,741,824 bytes), 25.00%; fused, in bfloat16"
    assert tooltip(Part("free", "", 0, ""), 0) == "free: 0 B (0 bytes), 0.00%"


def test_groups_have_look_and_colour_of_parts() -> None:
    parts = [Part("weights", "w", 10, ""), Part("steps", "s", 10, "", "planned"), Part("free", "", 10, "", "free")]
    made = [group.attributes for group in groups(parts, 1)]
    colour = colours(["weights", "steps"])
    assert made == [
        {"fill": colour["weights"]},
        {"fill": colour["steps"], "class": "planned"},
        {"class": "free"},
    ]


def contrast_with_black(colour: list[int]) -> float:
    """The ratio of WCAG 2: 4.5 is the least for text."""
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    return (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05) / 0.05


def test_colours_are_distinct_and_readable() -> None:
    made = colours(f"owner {place}" for place in range(40))
    parts = {name: [int(colour[i : i + 2], 16) for i in (1, 3, 5)] for name, colour in made.items()}
    for (one, first), (other, second) in combinations(parts.items(), 2):
        assert math.dist(first, second) > 12, f"{one} and {other} look alike: {made[one]} {made[other]}"
    first = [parts[f"owner {place}"] for place in range(12)]
    assert min(math.dist(a, b) for a, b in combinations(first, 2)) > 30, "as many as a plan on a GPU has owners"
    for name, colour in parts.items():
        assert contrast_with_black(colour) >= 4.5, f"letters on {name} are hard to read: {made[name]}"
    assert min(math.dist(*pair) for pair in combinations(parts.values(), 2)) > 25, "and no two look alike"


def rows_under(document: Element, heading: str) -> list[Element]:
    """Rows of every table whose first column is called so."""
    tables = [table for table in document.all("table") if table.all("th")[0].text == heading]
    return [row for table in tables for row in table.all("tbody")[0].all("tr")]


@pytest.mark.parametrize("requested", [("Qwen3-32B", "h200"), ("Qwen3-30B-A3B", "h200")], ids=" ".join)
def test_plan_page_owners_have_distinct_colours(requested: tuple[str, str]) -> None:
    planned = view_of(plan_request(*requested), None)
    rows = rows_under(read_page(plan_page(planned, ())), "owner")[:-1]
    found = [row.all("span")[1].attributes["style"] for row in rows]
    assert len(found) == len(planned.rows) == len(set(found))


def test_plan_page_shows_cache_groups_when_layers_differ() -> None:
    planned = view_of(plan_request("gemma-3-12b-it", "h200"), None)
    text = plan_page(planned, ())
    assert "by cache group" in text
    assert all(group.name in text for group in planned.groups)
    assert len(planned.groups) == 2
    assert "by cache group" not in plan_page(view_of(plan_request("Qwen3-8B", "h200"), None), ())


def test_plan_page_sweep_bars_avoid_owner_colours() -> None:
    requested = plan_request("Qwen3-32B", "h200")
    cells = sweep(requested)
    document = read_page(plan_page(view_of(requested, None), cells))
    rows = rows_under(document, "owner")[:-1]
    owners = {row.all("span")[1].attributes["style"].removeprefix("background:") for row in rows}
    drawn = {box.attributes["fill"] for box in document.all("svg")[-1].all("rect") if "fill" in box.attributes}
    drawn |= {box.attributes["fill"] for box in document.all("svg")[-1].all("g") if "fill" in box.attributes}
    assert len(drawn) == len({cell.quantization for cell in cells}) > 1
    assert owners.isdisjoint(drawn)


def test_drawn_without_parts_is_empty() -> None:
    assert drawn([], 4) == []


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


def strip_boxes(page: str) -> tuple[list[Element], list[Element]]:
    """For the budget's strip and of the map."""
    budget, held = read_page(page).all("svg")
    return boxes_of(budget), boxes_of(held)


def boxes_of(picture: Element) -> list[Element]:
    return [box for group in picture.children for box in group.children]


def looks(page: str, number: int) -> list[str]:
    """Class or, without one, the colour of every group of boxes."""
    groups = [group.attributes for group in read_page(page).all("svg")[number].children]
    return [attributes.get("class", attributes.get("fill", "")) for attributes in groups]


def total(elements: list[Element]) -> int:
    return sum(int(element.attributes["data-bytes"]) for element in elements)


SMALL = ledger_of(
    ("weights/embed", 30 * MIB), ("weights/layers.0.qkv", 20 * MIB), ("kv pages/0.k", 25 * MIB), ("rope/table", 5 * MIB)
)


def test_memory_page_entry_boxes_match_their_bytes() -> None:
    page = memory_page("A-Model", report_of(SMALL), tuple(SMALL))
    budget, held = strip_boxes(page)
    assert [int(box.attributes["data-bytes"]) for box in held] == [entry.num_bytes for entry in SMALL]
    for box, entry in zip(held, SMALL, strict=True):
        width = sum(float(rect.attributes["width"]) for rect in box.all("rect"))
        assert width == pytest.approx(WIDTH * MAP_ROWS * entry.num_bytes / SMALL.total_bytes, rel=1e-4)
        assert f"{entry.num_bytes:,} bytes" in box.all("title")[0].text
        assert entry.owner in box.all("title")[0].text
        assert entry.reason in box.all("title")[0].text
    colour = colours(("weights", "kv pages", "workspace", "rope"))
    assert looks(page, 0) == [colour["weights"], colour["kv pages"], colour["rope"], "free"]
    assert total(budget) == report_of(SMALL).budget_bytes


def test_memory_page_table_adds_up_and_matches_box_colours() -> None:
    document = read_page(memory_page("A-Model", report_of(SMALL), tuple(SMALL)))
    *rows, last = document.all("tbody")[0].all("tr")
    cells = [[cell.text for cell in row.all("td")] for row in rows]
    assert [row[0] for row in cells] == ["weights", "kv pages", "rope"]
    assert sum(float(row[2].removesuffix(" MiB")) for row in cells) == 80
    assert last.all("td")[2].text == "80.00 MiB"
    shares = [float(row[3].removesuffix("%")) for row in cells]
    assert sum(shares) == pytest.approx(100, abs=0.05)
    swatches = [row.all("span")[1].attributes["style"].removeprefix("background:") for row in rows]
    assert swatches == [group.attributes["fill"] for group in document.all("svg")[0].children[:3]]
    assert "KV cache of 4,096 tokens, 1.00 KiB each: 8.00 requests of 512 tokens at once" in document.text


def test_memory_page_draws_planned_and_unaccounted_apart() -> None:
    step = MemoryRow("sampling", 10 * MIB, None, "temporaries")
    staging = MemoryRow("staging", 64 * MIB, None, "a ring", ("load",))
    report = report_of(SMALL, step, staging, measured=87 * MIB)
    parts = {(part.group, part.look): part.num_bytes for part in memory_parts(report, tuple(SMALL))}
    assert parts["sampling", "planned"] == 10 * MIB
    assert parts["unaccounted", "unknown"] == 7 * MIB
    assert not any(group == "staging" for group, _ in parts), "it is gone by now"
    page = memory_page("A-Model", report, tuple(SMALL))
    _, held = strip_boxes(page)
    assert total(held) == (80 + 10 + 7) * MIB
    assert "only to load" in page
    assert looks(page, 1)[-2:] == ["planned", "#9aa3ac"]


def test_memory_page_negative_unaccounted_is_text_only() -> None:
    page = memory_page("A-Model", report_of(SMALL, measured=70 * MIB), tuple(SMALL))
    assert total(strip_boxes(page)[1]) == 80 * MIB
    assert "-10.00 MiB" in page


def test_memory_page_without_entries_draws_rows() -> None:
    page = memory_page("A-Model", report_of(SMALL), ())
    assert total(strip_boxes(page)[1]) == 80 * MIB


def test_names_are_escaped_everywhere() -> None:
    hostile = ledger_of((f"weights/{HOSTILE}", MIB), (f"{HOSTILE}/x", MIB))
    document = read_page(memory_page(HOSTILE, report_of(hostile), tuple(hostile)))
    assert len(document.all("script")) == 1
    assert len(document.all("svg")) == 2
    assert HOSTILE in document.all("h1")[0].text
    assert any(HOSTILE in title.text for title in document.all("title"))


def test_memory_page_large_model_stays_under_100_kb() -> None:
    names = ("input_norm", "qkv.weight", "q_norm", "k_norm", "o.weight", "post_norm", "gate_up.weight", "down.weight")
    weights = [(f"weights/layers.{i}.{name}", 1024 if "norm" in name else 2**27) for i in range(64) for name in names]
    pages = [(f"kv pages/{i}.attention.{plane}", 2**29) for i in range(64) for plane in "kv"]
    large = ledger_of(*weights, *pages, ("workspace/layers", 2**28))
    page = memory_page("Qwen3-32B", report_of(large), tuple(large))
    assert len(page.encode()) < 100_000
    assert total(strip_boxes(page)[1]) == large.total_bytes


@given(
    st.lists(st.integers(0, 2**44), min_size=1, max_size=40),
    st.integers(1, 2**45),
    st.one_of(st.none(), st.integers(0, 2**45)),
)
def test_memory_page_any_report_adds_up(sizes: list[int], budget: int, measured: int | None) -> None:
    ledger = ledger_of(*((f"g{place % 11}/n{place}", size) for place, size in enumerate(sizes)))
    report = report_of(ledger, budget=budget, measured=measured)
    in_budget, held = strip_boxes(memory_page("m", report, tuple(ledger)))
    drawn = ledger.total_bytes + max(0, report.unaccounted_bytes or 0)
    assert total(held) == drawn
    assert total(in_budget) == max(drawn, budget)


def test_write_page_replaces_old_page(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("old")
    write_page(file, memory_page("A-Model", report_of(SMALL), tuple(SMALL)))
    read_page(file.read_text(encoding="utf-8"))


REQUEST = plan_request("Qwen3-8B", "rtx4090")
VIEW, CELLS = view_of(REQUEST, None), sweep(replace(REQUEST, config=replace(REQUEST.config, kv_near_tokens=0)))


def test_plan_page_phase_strips_fill_budget() -> None:
    document = read_page(plan_page(VIEW, CELLS))
    for phase, picture in zip(PHASES, document.all("svg"), strict=False):
        sizes = [int(box.attributes["data-bytes"]) for box in boxes_of(picture)]
        assert sum(sizes) == VIEW.budget_bytes
        assert sum(sizes[:-1]) == VIEW.phase_bytes[phase]


def test_plan_page_over_budget_is_drawn_whole() -> None:
    requested = plan_request("Qwen3-32B", "l4")
    planned = view_of(requested, None)
    document = read_page(plan_page(planned, sweep(requested)))
    serve = document.all("svg")[2]
    assert sum(int(box.attributes["data-bytes"]) for box in boxes_of(serve)) == planned.phase_bytes["serve"]
    (verdict,) = [part for part in document.all("p") if "verdict" in part.attributes.get("class", "")]
    assert verdict.text == planned.verdict == f"NO: {planned.short_text} on l4"
    assert document.all("p")[0] is verdict
    assert (
        f"serve: {planned.phase_bytes['serve'] / 2**30:.2f} GiB, {planned.short_bytes / 2**30:.2f} GiB short"
        in document.text
    )


def test_plan_page_tables_match_terminal_lines() -> None:
    document = read_page(plan_page(VIEW, CELLS))
    owners, ways = rows_under(document, "owner"), rows_under(document, "change")
    assert [row.all("td")[0].text for row in owners] == [*(row.owner for row in VIEW.rows), "total"]
    changes = [row.all("td")[0].text for row in ways if row.attributes.get("class") != "group"]
    assert sorted(changes) == sorted(item.change for item in VIEW.alternatives)
    shown = [line.text.strip() for line in alternative_lines(VIEW)]
    titles = [row.all("td")[0].text for row in ways if row.attributes.get("class") == "group"]
    assert titles == [line for line in shown if line in titles] == list(dict.fromkeys(titles))
    for words in (VIEW.verdict, VIEW.summary, VIEW.kv_text, *(choice.reason for choice in VIEW.choices)):
        assert words in document.text
    assert [part.text for part in document.all("code")] == [start.command for start in VIEW.starts]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_plan_page_text_has_contrast_aa(theme: str) -> None:
    """Text and marks against the page and against the area of a verdict and a command."""
    blocks = re.findall(r":root\{([^}]*)\}", rendered(""))
    assert len(blocks) == 2
    names = dict(re.findall(r"--(\w+):(#\w+)", blocks[0])) | (
        dict(re.findall(r"--(\w+):(#\w+)", blocks[1])) if theme == "dark" else {}
    )

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [part / 255 for part in bytes.fromhex(digits)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for text in ("text", "quiet", "mark"):
        for ground in ("page", "empty"):
            low, high = sorted(luminance(names[name]) for name in (text, ground))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def test_bars_of_the_chart_are_to_one_scale() -> None:
    chart = read_page(plan_page(VIEW, CELLS)).all("svg")[3]
    drawn = [bar for group in chart.children if group.name == "g" for bar in group.children]
    assert [int(bar.attributes["data-value"]) for bar in drawn] == [cell.kv_tokens for cell in CELLS]
    most = max(cell.kv_tokens for cell in CELLS)
    widths = [float(bar.all("rect")[0].attributes["width"]) for bar in drawn]
    for cell, width in zip(CELLS, widths, strict=True):
        assert width == pytest.approx(max(widths) * cell.kv_tokens / most, abs=0.02)
    assert max(widths) < WIDTH
    names = [text.text for text in chart.children if text.name == "text"]
    assert names == list(dict.fromkeys(cell.kv_cache_dtype for cell in CELLS))
    assert "this plan" in drawn[0].all("text")[0].text
    assert [bar.attributes.get("class") == "planned" for bar in drawn] == [not cell.runs for cell in CELLS]
    wider = ["4 layers wider" in bar.all("title")[0].text for bar in drawn]
    assert wider == [cell.kv_protected_layers == 4 for cell in CELLS]
    assert any(wider)


def test_names_are_escaped_in_a_plan() -> None:
    starts = (Start(HOSTILE, HOSTILE, 5, None),)
    planned = VIEW._replace(model=HOSTILE, summary=HOSTILE, budget_reason=HOSTILE, device=HOSTILE, starts=starts)
    document = read_page(plan_page(planned, (Cell(HOSTILE, HOSTILE, 5, True, True),)))
    assert len(document.all("script")) == 1
    assert HOSTILE in document.all("h1")[0].text


def test_bars_empty_or_zero_chart_is_valid() -> None:
    read_page(pictured(bars((), "nothing")))
    read_page(pictured(bars((Bar("bfloat16", 0, "0", "none", "#000", is_pale=False),), "one that is nothing")))


def charts(*qualities) -> tuple[Element, Element, Element]:
    document = read_page(eval_page(view(*qualities)))
    return document, *document.all("svg")


def named(chart: Element) -> dict[str, Element]:
    return {group.attributes["data-name"]: group for group in chart.all("g") if "data-name" in group.attributes}


def test_quality_chart_dots_lie_at_their_numbers() -> None:
    middle = quality("middle", math.sqrt(1040 * 400), mean_kl=math.sqrt(0.08 * 0.000512), p99_kl=0.1)
    _, chart, _ = charts(FP8, FEW, middle)
    dots = {name: group.all("circle")[0].attributes for name, group in named(chart).items()}
    x, y = ({name: float(dot[key]) for name, dot in dots.items()} for key in ("cx", "cy"))
    assert x["turboquant_3bit_nc"] < x["middle"] < x["fp8"]
    assert y["turboquant_3bit_nc"] < y["middle"] < y["fp8"], "more divergence is higher up"
    assert x["middle"] == pytest.approx((x["fp8"] + x["turboquant_3bit_nc"]) / 2, abs=0.2)
    assert y["middle"] == pytest.approx((y["fp8"] + y["turboquant_3bit_nc"]) / 2, abs=0.2)
    whisker = named(chart)["fp8"].all("line")[0].attributes
    assert float(whisker["y2"]) < float(whisker["y1"]) == y["fp8"]


def test_quality_chart_dot_title_has_figures() -> None:
    _, chart, _ = charts(FP8)
    said = named(chart)["fp8"].all("title")[0].text
    assert said == "fp8: 1,040 bytes, mean KL 0.000512, p99 0.0123, same top-1 99.12%, perplexity 12.6250"


def test_quality_chart_labels_do_not_overlap() -> None:
    alike = [quality(f"format {place}", 1000.0 + place, mean_kl=0.01, p99_kl=0.02) for place in range(6)]
    alike = [replace(one, kl_by_place=(0.01, 0.01)) for one in alike]
    for chart in charts(*alike)[1:]:
        heights = sorted(float(group.all("text")[0].attributes["y"]) for group in named(chart).values())
        assert len(heights) == 6
        assert all(high - low >= 13 for low, high in pairwise(heights))


def test_label_heights_stay_at_targets_where_possible() -> None:
    assert label_heights([100.0, 300.0, 200.0]) == [104, 304, 204]
    assert label_heights([100.0, 100.0, 99.0, 10.0]) == [104, 90, 76, 14]
    assert label_heights([]) == []


def test_quality_charts_leave_out_reference_and_non_finite() -> None:
    document, chart, lines = charts(FP8, BROKEN, quality("same", 2048.0))
    assert named(chart).keys() == {"fp8"}
    assert named(lines).keys() == {"fp8", "half"}
    assert len(named(lines)["half"].all("polyline")[0].attributes["points"].split()) == 1
    assert [row.all("td")[0].text for row in document.all("tbody")[0].all("tr")] == ["float32", "fp8", "half", "same"]
    assert "half: 1,023 of 2,046 predictions are not finite" in document.text


def test_lines_go_from_the_beginning_of_a_window_to_its_end() -> None:
    _, _, chart = charts(FP8, FEW)
    points = [
        tuple(map(float, point.split(",")))
        for point in named(chart)["turboquant_3bit_nc"].all("polyline")[0].attributes["points"].split()
    ]
    assert points[0][0] < points[1][0]
    assert points[0][1] > points[1][1], "the end of the window is worse"
    reported = [text.text for text in chart.all("text")]
    assert {"0", "1,024", "position in the window"} <= set(reported)


def test_quality_charts_stay_inside_picture() -> None:
    _, *both = charts(FP8, FEW, BROKEN)
    for chart in both:
        for name, most in (("cx", WIDTH), ("x1", WIDTH), ("x2", WIDTH), ("cy", HEIGHT), ("y1", HEIGHT), ("y2", HEIGHT)):
            found = [
                float(item.attributes[name])
                for kind in ("circle", "line")
                for item in chart.all(kind)
                if name in item.attributes
            ]
            assert all(0 <= number <= most for number in found)


@pytest.mark.parametrize("qualities", [(), (BROKEN,), (quality("zero", 10.0),), (FP8,), (FP8, FP8)], ids=len)
def test_quality_charts_of_few_formats_are_valid(qualities: tuple) -> None:
    read_page(pictured(size_chart(qualities, "bytes"), place_chart(qualities, 2)))
    read_page(eval_page(view(*qualities)))


def test_names_are_escaped_in_an_evaluation() -> None:
    made = view(quality(HOSTILE, 10.0, mean_kl=0.1, p99_kl=0.2, kl_by_place=(0.1,)))._replace(
        model=HOSTILE, text=HOSTILE
    )
    document = read_page(eval_page(made))
    assert len(document.all("script")) == 1
    assert HOSTILE in document.all("h1")[0].text


@given(st.lists(st.floats(1e-12, 1e9), min_size=1, max_size=5))
def test_log_scale_holds_numbers_with_round_ticks(numbers: list[float]) -> None:
    scale = log_scale(numbers, 100.0, 900.0)
    assert all(100 < scale(number) < 900 for number in numbers)
    marks = ticks(scale)
    assert all(scale.low <= mark <= scale.high for mark in marks)
    assert all(float(f"{mark:.1g}") == pytest.approx(mark) for mark in marks)


def test_scale_linear_is_even() -> None:
    scale = Scale(0.0, 8.0, 10.0, 90.0, is_log=False)
    assert [scale(number) for number in (0, 4, 8)] == [10, 50, 90]
