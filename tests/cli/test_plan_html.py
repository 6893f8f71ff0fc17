"""The page of a plan: phases to scale, bars to scale, and the words of the table."""

from pathlib import Path

import pytest

from cli.page_reader import Element, read_page
from cli.plan_wishes import wish
from holdfast.cli.plan_html import CHART_WIDTH, plan_page, sweep_chart, write_plan_page
from holdfast.cli.plan_sweep import Cell, sweep
from holdfast.cli.plan_view import view_of
from holdfast.cli.web_page import page
from holdfast.memory.planner import PHASES

ASKED = wish("Qwen3-8B", "rtx4090")
VIEW, CELLS = view_of(ASKED, None), sweep(ASKED)
HOSTILE = "</svg><script>alert(1)</script>"


def boxes(picture: Element) -> list[Element]:
    return [box for group in picture.children for box in group.children]


def test_every_phase_is_a_strip_that_fills_the_budget() -> None:
    document = read_page(plan_page(VIEW, CELLS))
    for phase, picture in zip(PHASES, document.all("svg"), strict=False):
        sizes = [int(box.attributes["data-bytes"]) for box in boxes(picture)]
        assert sum(sizes) == VIEW.budget_bytes
        assert sum(sizes[:-1]) == VIEW.phase_bytes[phase]


def test_a_plan_that_does_not_fit_is_drawn_whole() -> None:
    asked = wish("Qwen3-32B", "l4")
    view = view_of(asked, None)
    document = read_page(plan_page(view, sweep(asked)))
    serve = document.all("svg")[2]
    assert sum(int(box.attributes["data-bytes"]) for box in boxes(serve)) == view.phase_bytes["serve"]
    assert "It does not fit: " in document.text
    assert (
        f"serve: {view.phase_bytes['serve'] / 2**30:.2f} GiB, {view.short_bytes / 2**30:.2f} GiB short" in document.text
    )


def test_the_tables_say_what_the_terminal_says() -> None:
    document = read_page(plan_page(VIEW, CELLS))
    owners, ways = document.all("tbody")
    assert [row.all("td")[0].text for row in owners.all("tr")] == [*(row.owner for row in VIEW.rows), "total"]
    assert [row.all("td")[0].text for row in ways.all("tr")] == [item.change for item in VIEW.alternatives]
    dim = [row.attributes.get("class") == "not-yet" for row in ways.all("tr")]
    assert dim == [item.not_in_this_version is not None for item in VIEW.alternatives]
    assert VIEW.asked in document.text
    assert VIEW.kv_words in document.text
    assert VIEW.command in document.all("code")[0].text


def test_bars_of_the_chart_are_to_one_scale() -> None:
    chart = read_page(plan_page(VIEW, CELLS)).all("svg")[3]
    bars = [bar for group in chart.children if group.name == "g" for bar in group.children]
    assert [int(bar.attributes["data-tokens"]) for bar in bars] == [cell.kv_tokens for cell in CELLS]
    most = max(cell.kv_tokens for cell in CELLS)
    widths = [float(bar.all("rect")[0].attributes["width"]) for bar in bars]
    for cell, width in zip(CELLS, widths, strict=True):
        assert width == pytest.approx(max(widths) * cell.kv_tokens / most, abs=0.02)
    assert max(widths) < CHART_WIDTH
    names = [text.text for text in chart.children if text.name == "text"]
    assert names == list(dict.fromkeys(cell.kv_cache_dtype for cell in CELLS))
    assert "asked" in bars[0].all("text")[0].text
    assert ["planned" in bar.attributes["class"] for bar in bars] == [not cell.runs for cell in CELLS]
    wider = ["4 layers wider" in bar.all("title")[0].text for bar in bars]
    assert wider == [cell.kv_protected_layers == 4 for cell in CELLS]
    assert any(wider)


def test_names_are_escaped() -> None:
    view = VIEW._replace(model=HOSTILE, asked=HOSTILE, budget_reason=HOSTILE, command=HOSTILE)
    document = read_page(plan_page(view, (Cell(HOSTILE, HOSTILE, 5, True, True),)))
    assert len(document.all("script")) == 1
    assert HOSTILE in document.all("h1")[0].text


def test_an_empty_chart_is_sound() -> None:
    read_page(page("t", sweep_chart(())))
    read_page(page("t", sweep_chart((Cell("bfloat16", "none", 0, True, True),))))


def test_a_page_is_written_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    write_plan_page(str(file), VIEW, CELLS, is_told=True)
    assert "plan.html" in capsys.readouterr().err
    assert len(file.read_bytes()) < 60_000
    write_plan_page(str(file), VIEW, CELLS, is_told=False)
    assert capsys.readouterr() == ("", "")
