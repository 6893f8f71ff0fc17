"""A plan as lines: every owner in every phase, the smallest change marked, what is not there yet dim."""

import re

import pytest

from cli.plan_wishes import wish
from holdfast.cli.columns import FULL, LIGHT
from holdfast.cli.plan_table import BAR_CELLS, LATER, alternative_lines, owner_lines, plan_lines
from holdfast.cli.plan_view import PlanView, view_of

FITTING = view_of(wish("Qwen3-32B", "h200"), "Qwen3-32B")
TOO_LONG = view_of(wish("Qwen3-8B", "rtx4090", max_model_len=1_000_000), "Qwen3-8B")
TOO_LARGE = view_of(wish("DeepSeek-R1", "l4"), "DeepSeek-R1")


def text_of(view: PlanView) -> str:
    return "\n".join(line.text for line in plan_lines(view))


def test_every_owner_has_a_line_with_three_phases() -> None:
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


def test_what_fits_is_told_with_tokens_choices_and_a_command() -> None:
    text = text_of(FITTING)
    assert text.splitlines()[0].startswith("Qwen3-32B on NVIDIA H200: weights in bfloat16")
    assert "budget 125.82 GiB: 90% of the device's 139.80 GiB" in text
    assert f"KV cache size: {FITTING.kv_tokens:,} tokens (256.00 KiB each)" in text
    assert "Maximum concurrency for 40,960 tokens per request:" in text
    assert "chosen\n  dtype           bfloat16  the checkpoint's own" in text
    assert "what else would fit" in text
    assert "to start it\n  holdfast chat path/to/Qwen3-32B --max-num-seqs 256" in text
    assert "short" not in text


def test_what_does_not_fit_is_the_table_with_the_shortfall_and_the_smallest_change() -> None:
    text = text_of(TOO_LONG)
    assert re.search(r"left or short .* -\d", text)
    assert "it does not fit: " in text
    smallest = next(item for item in TOO_LONG.alternatives if item.is_smallest)
    assert f"the smallest change that fits: {smallest.change}" in text
    marked = [line for line in alternative_lines(TOO_LONG) if "→" in line.text]
    assert len(marked) == 1
    assert smallest.change in marked[0].text
    assert marked[0].style == "green"
    assert f"to start it with that change\n  holdfast chat path/to/Qwen3-8B --max-model-len {smallest.value}" in text


def test_what_is_not_in_this_version_is_dim_and_said() -> None:
    lines = alternative_lines(FITTING)
    later = [line for line in lines if LATER in line.text]
    assert later
    assert {line.style for line in later} == {"dim"}
    assert len(lines) == sum(item.fits for item in FITTING.alternatives) + (
        any(not item.fits for item in FITTING.alternatives)
    )


def test_a_model_that_cannot_run_says_why_and_offers_no_command() -> None:
    text = text_of(TOO_LARGE)
    assert "it cannot be started yet" in text
    assert TOO_LARGE.not_in_this_version[0] in text
    assert "holdfast chat" not in text
    assert "of any length" in text.splitlines()[0]
    assert "not enough alone" in text


@pytest.mark.parametrize("view", [FITTING, TOO_LONG, TOO_LARGE], ids=lambda view: view.model)
def test_lines_are_lines(view: PlanView) -> None:
    for line in plan_lines(view):
        assert "\n" not in line.text
        assert line.text == line.text.rstrip()
        assert line.text.isprintable()


def test_a_change_that_brings_another_context_says_so() -> None:
    gpu = next(line.text for line in alternative_lines(FITTING) if line.text.strip().startswith("take h100 "))
    assert re.search(r"1\.00x of \d\d,\d{3}", gpu)
