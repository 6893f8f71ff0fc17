"""Text for people: columns and bars, and every figure of memory, plans and evaluations in its place."""

import dataclasses
import math
import re
import sys
from dataclasses import replace

import pytest

from cli.eval_qualities import BROKEN, FEW, FP8, quality, view
from cli.plan_requests import plan_request
from holdfast.cli.layout import FULL, LIGHT, aligned
from holdfast.cli.plan_view import PlanView, view_of
from holdfast.cli.tables import (
    BAR_CELLS,
    FIGURES,
    EvalView,
    alternative_lines,
    cells_of,
    change_text,
    headings,
    kl_text,
    memory_lines,
    owner_lines,
    plan_lines,
    progress_line,
    quality_cells,
    quality_lines,
    rate_text,
    refusal_lines,
    show_beside,
)
from holdfast.errors import PlanRow, PlanTable
from holdfast.eval.answers import Answers, Valid
from holdfast.eval.kv_quality import Behaviour, Result
from holdfast.eval.quality import Quality
from holdfast.eval.recall import Recall
from holdfast.memory.report import MemoryReport, MemoryRow, RankMemory
from holdfast.planning.speed import Range, SpeedEstimate


def test_cells_are_padded_and_numbers_are_to_the_right() -> None:
    assert aligned([("a", "1", "x"), ("bbb", "22", "")], right=(1,)) == ["a     1  x", "bbb  22"]
    assert aligned([], right=()) == []


def test_cells_of_rounds_share_to_cells() -> None:
    assert [cells_of(value, 100, 20) for value in (0, 2, 50, 100)] == [0, 0, 10, 20]
    assert cells_of(0, 0, 20) == 0


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


def memory_texts(report: MemoryReport, is_compact: bool = False) -> list[str]:
    return [line.text for line in memory_lines(report, is_compact)]


def test_memory_lines_have_owner_rows_and_total() -> None:
    heading, *rows, total, meaning = memory_texts(REPORT)
    assert heading.split() == ["owner", "planned", "held", "why"]
    assert [re.split(r"\s{2,}", row)[0] for row in rows] == ["weights", "kv pages", "activations"]
    assert all(row.reason in line for row, line in zip(REPORT.rows, rows, strict=True))
    assert "as needed" in rows[2]
    assert "100.00 MiB" in total
    assert "75.00 MiB" in total
    assert "of 200.00 MiB: memory_limit" in total
    assert "KV cache size: 1,024 tokens" in meaning
    assert "Maximum concurrency for 512 tokens per request: 2.00x" in meaning


def test_other_ranks_have_a_line_each() -> None:
    ranks = (RankMemory(1, "cuda:1", 90 * MIB, 80 * MIB, 85 * MIB), RankMemory(2, "cpu", 90 * MIB, 80 * MIB))
    *_, first, second = memory_texts(dataclasses.replace(REPORT, ranks=ranks))
    assert first == "rank 1 (cuda:1): planned 90.00 MiB, holds 80.00 MiB, 85.00 MiB measured"
    assert second == "rank 2 (cpu): planned 90.00 MiB, holds 80.00 MiB"


def test_bars_show_the_share_and_how_much_of_it_is_held() -> None:
    bars = [re.findall(f"[{FULL}{LIGHT}]+", line) for line in memory_texts(REPORT)[1:4]]
    assert [bar[0].count(FULL) for bar in bars] == [0.6 * BAR_CELLS, 0.15 * BAR_CELLS, 0]
    assert [bar[0].count(LIGHT) for bar in bars] == [0, 0.15 * BAR_CELLS, 0.1 * BAR_CELLS]


def test_memory_lines_zero_sizes_do_not_raise() -> None:
    empty = MemoryReport((MemoryRow("weights", 0, None, ""),), 0, "", 0, 0, 1)
    assert memory_texts(empty)[1].startswith("weights")


def test_plain_lines_where_none_watches(capsys: pytest.CaptureFixture[str]) -> None:
    show_beside(memory_lines(REPORT))
    assert capsys.readouterr().err == "\n".join(memory_texts(REPORT)) + "\n"


def test_memory_lines_fit_terminal_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    show_beside(memory_lines(REPORT))
    shown = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capsys.readouterr().err.splitlines()]
    assert max(map(len, shown)) <= 60
    words = " ".join(memory_texts(REPORT)).split()
    assert sorted(set(words) - set(" ".join(shown).split())) == [
        word for word in sorted(set(words)) if FULL in word or LIGHT in word
    ]


def test_memory_lines_compact_leaves_out_why() -> None:
    lines = memory_texts(REPORT, is_compact=True)
    assert len(lines) == len(memory_texts(REPORT))
    assert max(map(len, lines[:-1])) < 60
    assert not any(row.reason in line for row in REPORT.rows for line in lines)


def test_memory_lines_show_unaccounted_and_measured() -> None:
    measured = dataclasses.replace(REPORT, measured_bytes=80 * MIB)
    *_, unaccounted, device, meaning = memory_texts(measured)
    assert unaccounted.split()[:3] == ["unaccounted", "5.00", "MiB"]
    assert device.split()[:3] == ["measured", "80.00", "MiB"]
    assert meaning.startswith("KV cache size")
    fewer = memory_texts(dataclasses.replace(REPORT, measured_bytes=70 * MIB))
    assert "-5.00 MiB" in fewer[-3], "a ledger that holds more than the device is worth a line too"


def test_memory_lines_load_only_owner_is_not_summed() -> None:
    staging = MemoryRow("staging", 64 * MIB, None, "64 MiB at a time", ("load",))
    report = dataclasses.replace(REPORT, rows=(*REPORT.rows, staging))
    line = next(line for line in memory_texts(report) if line.startswith("staging"))
    assert "only to load" in line
    assert FULL not in line
    assert LIGHT not in line
    assert "100.00 MiB" in memory_texts(report)[-2], "it is not part of the sum"


TABLE = PlanTable(
    "serve",
    (PlanRow("weights", 60 * MIB, "12 tensors"), PlanRow("kv pages", 40 * MIB, "for one longest sequence")),
    100 * MIB,
    64 * MIB,
    "memory_limit",
)


def test_refusal_lines_show_shortfall() -> None:
    heading, weights, pages, total, budget, short = [line.text for line in refusal_lines(TABLE)]
    assert heading.split() == ["owner", "needed", "why"]
    assert weights.count(FULL) == 0.6 * BAR_CELLS
    assert pages.endswith("for one longest sequence")
    assert [line.split()[:3] for line in (total, budget, short)] == [
        ["total", "100.00", "MiB"],
        ["budget", "64.00", "MiB"],
        ["short", "36.00", "MiB"],
    ]


def test_show_beside_zero_columns_prints_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "0")
    show_beside(memory_lines(REPORT))
    assert "60.00 MiB" in capsys.readouterr().err


FITTING = view_of(plan_request("Qwen3-32B", "h200"), "Qwen3-32B")


TOO_LONG = view_of(plan_request("Qwen3-8B", "rtx4090", max_model_len=1_000_000), "Qwen3-8B")


TOO_LARGE = view_of(plan_request("GLM-4.5", "l4"), "GLM-4.5")


def text_of(view: PlanView) -> str:
    return "\n".join(line.text for line in plan_lines(view))


def test_owner_lines_have_three_phases() -> None:
    heading, *lines = owner_lines(FITTING)
    assert heading.text.split() == ["owner", "load", "capture", "serve", "why"]
    owners = [re.split(r"\s{2,}", line.text)[0] for line in lines]
    assert owners == [*(row.owner for row in FITTING.rows), "total", "left"]
    staging = next(line.text for line in lines if line.text.startswith("staging"))
    assert staging.split()[3:5] == ["-", "-"]


def test_bars_are_shares_of_the_budget() -> None:
    bars = {line.text.split("  ")[0]: line.text for line in owner_lines(FITTING)[1:]}
    share = next(row for row in FITTING.rows if row.owner == "weights").peak_bytes / FITTING.budget_bytes
    assert bars["weights"].count(FULL) == round(BAR_CELLS * share)
    drawn = sum(line.count(FULL) + line.count(LIGHT) for line in bars.values())
    assert BAR_CELLS - 2 <= drawn <= BAR_CELLS + 2


def test_plan_lines_that_fit_show_tokens_choices_and_command() -> None:
    text = text_of(FITTING)
    verdict, requested = text.splitlines()[:2]
    assert verdict.startswith(f"YES: {FITTING.kv_tokens:,} tokens")
    assert requested.startswith("Qwen3-32B on NVIDIA H200: weights in bfloat16")
    assert "budget 125.82 GiB: 90% of the device's 139.80 GiB" in text
    assert f"KV cache size: {FITTING.kv_tokens:,} tokens (256.00 KiB each)" in text
    assert "Maximum concurrency for 40,960 tokens per request:" in text
    assert "chosen\n  dtype           bfloat16  the checkpoint's own" in text
    assert "what else would fit" in text
    assert "\n  holdfast serve Qwen/Qwen3-32B\n" in text
    assert "short" not in text


def test_plan_lines_over_budget_show_smallest_change() -> None:
    text = text_of(TOO_LONG)
    assert re.search(r"left or short .* -\d", text)
    assert text.startswith(f"NO: {TOO_LONG.short_text} on rtx4090\n")
    smallest = next(item for item in TOO_LONG.alternatives if item.is_smallest)
    assert f"what fits best: {smallest.change}: {smallest.kv_tokens:,} tokens" in text
    assert "costs no quality" not in [line.text for line in alternative_lines(TOO_LONG)], "no lever is enough"
    marked = [line for line in alternative_lines(TOO_LONG) if "→" in line.text]
    assert len(marked) == 1
    assert smallest.change in marked[0].text
    assert marked[0].style == "green"
    assert f"\n  holdfast serve Qwen/Qwen3-8B --max-model-len {smallest.value}\n" in text


def test_changes_stand_under_what_they_cost() -> None:
    view = view_of(plan_request("Qwen3-32B", "rtx4090", quantization="mxfp4"), "Qwen3-32B")
    lines = [line.text for line in alternative_lines(view)]
    titles = ["costs no quality", "changes answers a little", "more of this GPU", "another GPU"]
    assert [line for line in lines if line in titles] == titles
    assert re.search(r"raise memory_utilization to 0.98 with .* 17,456 tokens ", lines[1])
    assert "shortened from the model's own 40,960" in text_of(view)


def test_plan_lines_hide_changes_that_give_nothing() -> None:
    """All sequences of a small model are at their longest on an H200: pages in fewer bits give no token more."""
    small = view_of(plan_request("SmolLM2-135M", "h200"), None)
    formats = [item for item in small.alternatives if item.kind == "format"]
    assert {item.kv_tokens for item in formats} == {small.kv_tokens}
    text = "\n".join(line.text for line in alternative_lines(small))
    assert "keep KV pages in fp8" not in text
    assert re.search(r"\d+ other changes are not enough alone, or give no more", text)


def test_plan_lines_folded_fit_eighty_columns() -> None:
    for shown in (FITTING, TOO_LONG, TOO_LARGE):
        lines = [line.text for line in owner_lines(shown, has_all=False)]
        assert max(map(len, lines)) <= 80
        folded = next(line for line in lines if " small owners" in line)
        small = shown.folded_rows[-1]
        assert folded.startswith(small.owner)
        assert sum(row.peak_bytes < 0.01 * max(shown.phase_bytes.values()) for row in shown.rows) > 2
        for phase in ("load", "capture", "serve"):
            assert sum(row.phase_bytes.get(phase, 0) for row in shown.folded_rows) == shown.phase_bytes[phase]


SPEED = SpeedEstimate(Range(38.0, 44.2), 12, Range(390.0, 451.0), Range(0.21, 0.26), "Contexts of 1,024 tokens.")


def test_plan_lines_tell_speed_where_it_is_known() -> None:
    shown = FITTING._replace(
        speed=SPEED, alternatives=tuple(item._replace(speed=SPEED) for item in FITTING.alternatives)
    )
    assert shown.verdict == f"YES: {FITTING.kv_tokens:,} tokens, about 41 tokens/s for one stream"
    text = text_of(shown)
    assert re.search(r"one stream +38 to 44 tokens/s\n", text)
    assert re.search(r"12 streams +390 to 450 tokens/s together\n", text)
    assert re.search(r"first token +210 to 260 ms\n", text)
    assert "Contexts of 1,024 tokens." in text
    assert re.search(r"take h100 +[\d,]+ tokens +41 tokens/s", text)
    record = shown.as_dict()
    assert record["speed"]["one_stream"] == {"low": 38.0, "high": 44.2}  # type: ignore[index]
    assert record["alternatives"][0]["speed"]["batch_size"] == 12  # type: ignore[index]


@pytest.mark.parametrize(
    ("rate", "words"), [(0.004567, "0.0046"), (0.5, "0.5"), (9.96, "10"), (41.4, "41"), (1234.0, "1,200")]
)
def test_rate_words_have_two_digits(rate: float, words: str) -> None:
    assert rate_text(rate) == words


def test_plan_lines_unsupported_model_offers_no_command() -> None:
    text = text_of(TOO_LARGE)
    assert text.startswith("CANNOT START: this version does not run GLM-4.5; nor does it fit: ")
    assert TOO_LARGE.not_in_this_version[0] in text
    assert "holdfast " not in text
    assert "of any length" in text.splitlines()[1]
    assert "not enough alone" in text


@pytest.mark.parametrize("view", [FITTING, TOO_LONG, TOO_LARGE], ids=lambda view: view.model)
def test_plan_lines_are_printable_and_stripped(view: PlanView) -> None:
    for line in plan_lines(view):
        assert "\n" not in line.text
        assert line.text == line.text.rstrip()
        assert line.text.isprintable()


def test_alternative_lines_name_changed_context() -> None:
    gpu = next(line.text for line in alternative_lines(FITTING) if line.text.strip().startswith("take h100 "))
    assert re.search(r"1\.00x of \d\d,\d{3}", gpu)


def test_quality_cells_have_measured_figures() -> None:
    reference, fp8, few = quality_cells(view(FP8, FEW))
    assert reference == ("float32", "4,096", "0.50x", "12.5000 ±0.25", *[""] * 6, "512.0")
    divergences = ("0.000512", "0.0123", "0.0234", "0.0345")
    assert fp8 == ("fp8", "1,040", "1.97x", "12.6250 ±0.25", "+1.000% ±0.21", *divergences, "99.12%", "256.0")
    assert few[2] == "5.12x"


def test_lines_are_as_wide_as_their_columns() -> None:
    lines = [line.text for line in quality_lines(view(FP8, FEW))]
    assert lines[0] == "Tiny, float32 on cpu: 2 windows of 1,024 tokens of book.txt, 2,046 predictions"
    heading, *rows = lines[2:6]
    assert all(name in heading for name in ("format", "bytes/token", *FIGURES))
    assert {len(row) for row in (heading, *rows)} == {len(heading)}
    assert [row.split()[0] for row in rows] == ["float32", "fp8", "turboquant_3bit_nc"]
    assert "over float32 pages, in nats" in lines[-1]


def test_quality_lines_report_non_finite_format() -> None:
    made = view(FP8, BROKEN)
    assert quality_cells(made)[2][3:10] == (*["not finite"] * 6, "50.00%")
    assert quality_lines(made)[-1].text == "half: 1,023 of 2,046 predictions are not finite"
    assert quality_lines(made)[-1].style == "bold red"


def behaving(*results: tuple[Quality, Behaviour]) -> EvalView:
    """A view of contenders with answers and recall, the first as the reference."""
    made = view()._replace(qualities=[])
    for result in results:
        made = made.with_result(Result(*result))
    return made


ANSWERS = Answers(32, (32, 3, 8, 5), Valid(4, 4, 0), Valid(4, 3, 0))
RECALL = (Recall(500, 4, 40, 2, math.log(0.12), 3.0), Recall(4096, 4, 40, 4, math.log(0.5), 1.0))


def test_quality_cells_have_answers_and_recall() -> None:
    worse = replace(ANSWERS, json=Valid(4, 2, 2), tools=Valid(4, 3, 1))
    made = behaving((quality("float32", 9.0), Behaviour(ANSWERS, RECALL)), (FP8, Behaviour(worse, RECALL[:1] * 2)))
    assert headings(made)[-5:] == ("same tokens", "JSON", "tool calls", "recall 500", "recall 4K")
    reference, fp8 = quality_cells(made)
    assert reference[-5:] == ("", "4 of 4", "3 of 4", "2 of 4, 12%", "4 of 4, 50%")
    assert fp8[-5:-1] == ("6.5 of 32", "2 of 4", "3 of 4", "2 of 4, 12%")
    text = "\n".join(line.text for line in quality_lines(made))
    assert "in the median of 4 continuations of code and prose; never different: fp8 1" in text
    assert "valid over float32 pages and not any more: fp8 2 JSON and 1 tool calls" in text
    assert "right word among 40" in text
    line = progress_line(made)
    assert line.startswith("fp8: perplexity 12.6250 ±0.25 (+1.000% ±0.21); mean KL 0.000512, p99.9 0.0234; ")
    assert line.endswith(
        "same tokens 6.5 of 32; JSON 2 of 4; tool calls 3 of 4; recall 500 2 of 4, 12%; recall 4K 2 of 4, 12%"
    )


def test_quality_cells_without_chat_have_no_json() -> None:
    answers = replace(ANSWERS, json=None, tools=None)
    made = behaving((quality("float32", 9.0), Behaviour(answers)), (FP8, Behaviour(answers)))
    assert headings(made)[-2:] == ("tokens/s", "same tokens")
    assert quality_cells(made)[1][-1] == "6.5 of 32"
    assert headings(behaving((quality("float32", 9.0), Behaviour()), (FP8, Behaviour())))[-1] == "tokens/s"


def test_quality_lines_print_each_note_once() -> None:
    noted = [quality(name, 10.0, note="layers 0,1 in fp8") for name in ("a", "b")]
    lines = [line.text for line in quality_lines(view(*noted, quality("c", 10.0, note="layers 0, in float32"), FP8))]
    assert lines[-2:] == ["layers 0,1 in fp8: a, b", "layers 0, in float32: c"]


def test_quality_summary_one_window_is_singular() -> None:
    assert "one window of 1,024 tokens" in view(FP8)._replace(num_windows=1).summary


@pytest.mark.parametrize(
    ("number", "words"), [(0.0, "0"), (1.2345e-7, "1.23e-07"), (0.012345, "0.0123"), (12345.0, "1.23e+04")]
)
def test_divergences_of_any_size_are_short(number: float, words: str) -> None:
    assert kl_text(number) == words


def test_change_text_has_sign() -> None:
    assert change_text(9.0, 10.0) == "-10.000%"
    assert change_text(10.0, 10.0) == "+0.000%"
    assert change_text(float("nan"), 10.0) == "not finite"


def test_bytes_that_are_no_whole_number_are_shown() -> None:
    assert quality_cells(view(quality("odd", 1040.5)))[1][1] == "1,040.5"
