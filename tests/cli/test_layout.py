"""Lines that fit a terminal: no word is cut, no status is lost, commands can be pasted, and bars give way first."""

import re
import shlex
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.eval_qualities import BROKEN, FEW, FP8, view
from cli.plan_requests import plan_request
from holdfast.cli.layout import CONTINUED, FULL, LIGHT, Line, Table, aligned, fitted, shrunk, table_lines, wrapped
from holdfast.cli.plan_view import CANNOT_START, DOES_NOT_FIT, FITS, PlanView, sweep, view_of
from holdfast.cli.tables import (
    LATER,
    memory_lines,
    owner_lines,
    plan_lines,
    quality_lines,
    refusal_lines,
    sweep_lines,
    worthwhile,
)
from holdfast.errors import PlanChange, PlanRow, PlanTable
from holdfast.memory.report import MemoryReport, MemoryRow

WIDTHS = (60, 80, 120)
MIB = 2**20
BARS = re.compile(f"[{FULL}{LIGHT}▏▎▍▌▋▊▉]+")


def words_of(lines: list[Line]) -> set[str]:
    """All but bars, which may be shorter, and the sign that a command goes on."""
    text = BARS.sub(" ", " ".join(line.text.removesuffix(CONTINUED) for line in lines))
    return set(text.split())


def check(lines: list[Line], num_columns: int) -> list[Line]:
    """Every word is whole and on a line that fits; nothing is left out and nothing is made up."""
    narrow = fitted(lines, num_columns)
    too_long = [line.text for line in narrow if len(line.text) > num_columns]
    assert not too_long, too_long
    assert words_of(narrow) == words_of(lines)
    assert "…" not in "".join(line.text for line in narrow)
    assert {line.style for line in narrow} == {line.style for line in lines} | ({""} & {line.style for line in narrow})
    return narrow


PLANS = [
    plan_request("Qwen3-32B", "rtx4090", quantization="mxfp4"),
    plan_request("Qwen3-32B", "rtx4090", max_model_len=32768),
    plan_request("Qwen3-8B", "v100-32g"),
    plan_request("Qwen3-8B", "rtx4090", kv_cache_dtype="turboquant_4bit_nc"),
    plan_request("DeepSeek-R1", "h200"),
    plan_request("DeepSeek-V4-Flash", "b200", tensor_parallel_size=8),
    plan_request("Llama-3.1-70B", "l4"),
    plan_request("Qwen3-30B-A3B", memory="17.3GiB"),
]


@cache
def view_at(place: int) -> PlanView:
    return view_of(PLANS[place], PLANS[place].declared.name)


@pytest.mark.each_value
@pytest.mark.parametrize("num_columns", WIDTHS)
@pytest.mark.parametrize(
    "place", range(len(PLANS)), ids=lambda place: f"{PLANS[place].declared.name} on {PLANS[place].target.name}"
)
def test_plan_lines_at_any_width_keep_words_and_status(place: int, num_columns: int) -> None:
    view = view_at(place)
    text = "\n".join(line.text for line in check(plan_lines(view), num_columns))
    flat = " ".join(text.split())
    assert flat.startswith(view.verdict)
    assert view.verdict.startswith({FITS: "YES: ", DOES_NOT_FIT: "NO: ", CANNOT_START: "CANNOT START: "}[view.status])
    assert ("KV cache size: " in text) == view.fits
    assert (LATER in flat) == (LATER in " ".join(view.not_in_this_version))
    for item in worthwhile(view):
        assert f"{item.kv_tokens:,} tokens" in text
    check(owner_lines(view), num_columns)


@pytest.mark.parametrize("num_columns", WIDTHS)
@pytest.mark.parametrize("place", [0, 3])
def test_sweep_lines_at_any_width_keep_every_cell(place: int, num_columns: int) -> None:
    request = PLANS[place]
    cells = sweep(request)
    text = "\n".join(line.text for line in check(sweep_lines(cells, request.target.name), num_columns))
    assert text.count("does not fit") == sum(cell.kv_tokens == 0 for cell in cells)
    assert "plan" in text
    if num_columns >= 80:
        assert BARS.search(text), "a chart of eighty columns still has bars"


REPORT = MemoryReport(
    (
        MemoryRow("weights", 513 * MIB, 513 * MIB, "180 tensors in float32"),
        MemoryRow(
            "kv pages", 180 * MIB, 180 * MIB, "256 pages of 16 tokens: every sequence at its longest needs no more"
        ),
        MemoryRow("python and torch", 304 * MIB, 304 * MIB, "the process itself: libraries, code, vocabulary"),
        MemoryRow(
            "workspace", 49 * MIB, 49 * MIB, "mlp needs most: wide float32 (2048, 3072), active float32 (2048, 1536)"
        ),
        MemoryRow("staging", 12 * MIB, None, "rows on their way to their place", ("load",)),
    ),
    2048 * MIB,
    "memory_limit",
    45 * 1024,
    4096,
    4096,
    measured_bytes=1070 * MIB,
    context_note="context of 4,096 tokens, shortened from the model's own 8,192: no more fits 2.00 GiB (memory_limit)",
)
TABLE = PlanTable(
    "serve",
    tuple(PlanRow(row.owner, row.planned_bytes, row.reason) for row in REPORT.rows),
    1100 * MIB,
    400 * MIB,
    "memory_limit",
)
CHANGES = (
    PlanChange("raise memory_limit to 1100MiB", "--memory-limit 1100MiB", 4096, 4096),
    PlanChange("keep KV pages in turboquant_k3v4_nc", "--kv-cache-dtype turboquant_k3v4_nc", 14_208, 8192),
    PlanChange("keep weights in int8, lower max_num_seqs to 4", "--quantization int8 --max-num-seqs 4", 4096, 4096),
)


@pytest.mark.parametrize("num_columns", WIDTHS)
def test_memory_refusal_and_quality_lines_fit_any_width(num_columns: int) -> None:
    text = " ".join(" ".join(line.text for line in check(memory_lines(REPORT), num_columns)).split())
    assert "only to load" in text
    assert "shortened from the model's own 8,192" in text
    refusal = "\n".join(line.text for line in check(refusal_lines(TABLE, CHANGES), num_columns))
    assert "what would fit, what costs least first" in refusal
    assert "--quantization" in refusal
    check(quality_lines(view(FP8, FEW, BROKEN)), num_columns)
    if num_columns >= 80:
        assert BARS.search(refusal)


def test_refusal_lines_without_changes_are_table_alone() -> None:
    assert refusal_lines(TABLE) == refusal_lines(TABLE, ())
    assert [line.text for line in refusal_lines(TABLE, CHANGES[:1])][-2:] == [
        "what would fit",
        "  raise memory_limit to 1100MiB  --memory-limit 1100MiB  4,096 tokens  1.00x of 4,096",
    ]


@pytest.mark.parametrize("num_columns", WIDTHS)
def test_fitted_wrapped_command_parses_unchanged(num_columns: int) -> None:
    command = view_at(0).commands[0]
    assert command is not None
    lines = fitted([Line(f"  {command}", is_command=True)], num_columns)
    # A shell takes out a backslash with the end of its line; shlex does not know that.
    typed = "\n".join(line.text for line in lines).replace("\\\n", "")
    assert shlex.split(typed) == shlex.split(command)


CELLS = st.text(st.sampled_from("abc █"), max_size=40).map(lambda text: " ".join(text.replace("█", "x").split()))


@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS, CELLS), min_size=1, max_size=6),
    st.integers(20, 130),
    st.sampled_from([(), (3,), (0, 3), (3, 1)]),
    st.sampled_from([(), (1,), (1, 2)]),
)
@settings(max_examples=150)
def test_table_lines_at_any_width_keep_words(
    rows, num_columns: int, wraps: tuple[int, ...], right: tuple[int, ...]
) -> None:
    lines = table_lines(Table(tuple(rows), right, None, wraps))
    assert [line.text for line in lines] == aligned(rows, right)
    narrow = fitted(lines, num_columns)
    assert words_of(narrow) >= words_of(lines), "in blocks below each other names are repeated"
    if max(len(line.text) for line in lines) <= num_columns:
        assert narrow == lines


@given(st.text(st.sampled_from("ab c"), max_size=60), st.integers(1, 30))
def test_wrapping_breaks_between_words_alone(text: str, num_columns: int) -> None:
    text = " ".join(text.split())
    pieces = wrapped(text, num_columns)
    assert " ".join(pieces) == text
    assert all(len(piece) <= num_columns or " " not in piece for piece in pieces)


@pytest.mark.parametrize(
    ("bar", "scale", "shorter"),
    [
        ("█" * 20, 0.5, "█" * 10),
        ("█" * 6 + "░" * 4, 0.5, "█" * 3 + "░" * 2),
        ("█" * 3 + "▌", 0.5, "█▊"),
        ("▏", 0.25, "▏"),
        ("", 0.5, ""),
        ("███", 0.0, ""),
    ],
)
def test_shrunk_scales_bar(bar: str, scale: float, shorter: str) -> None:
    assert shrunk(bar, scale) == shorter
