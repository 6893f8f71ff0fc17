"""The view of a plan: sums, groups, and the same numbers as the planner's."""

import json
from fractions import Fraction

import pytest

from cli.plan_wishes import wish
from holdfast.cli.plan_view import PlanView, plain_number, view_of
from holdfast.errors import MemoryPlanError
from holdfast.memory.planner import PHASES
from holdfast.runner.planning.alternatives import list_alternatives
from holdfast.runner.planning.plan_fit import Wish, find_fit, fit_runner

FITTING = wish("Qwen3-8B", "h200", max_model_len=8192)
TOO_LONG = wish("Qwen3-8B", "rtx4090", max_model_len=1_000_000)
TOO_LARGE = wish("Qwen3-32B", "l4")


@pytest.mark.parametrize("asked", [FITTING, wish("DeepSeek-V4-Flash", "b200", tensor_parallel_size=8)])
def test_a_plan_that_fits_is_the_planners(asked: Wish) -> None:
    view, plan = view_of(asked, None), fit_runner(asked)
    assert view.fits
    assert view.short_bytes == 0
    assert view.phase_bytes == plan.memory.phase_bytes
    assert (view.kv_tokens, view.max_concurrency) == (plan.kv_tokens, plan.max_concurrency)
    assert view.kv_bytes_per_token == plan.kv_bytes_per_token
    assert view.budget_bytes == plan.memory.budget_bytes
    assert view.not_in_this_version == plan.not_in_this_version
    assert view.alternatives == list_alternatives(asked)


@pytest.mark.parametrize("asked", [TOO_LONG, TOO_LARGE], ids=["context", "model"])
def test_a_plan_that_does_not_fit_is_as_short_as_the_refusal_says(asked: Wish) -> None:
    view = view_of(asked, None)
    with pytest.raises(MemoryPlanError) as caught:
        find_fit(asked)
    table = caught.value.table
    assert table is not None
    assert not view.fits
    assert view.short_bytes == table.short_bytes
    assert view.phase_bytes[table.phase] == table.needed_bytes
    assert {row.owner: row.phase_bytes[table.phase] for row in view.rows if table.phase in row.phase_bytes} == {
        row.owner: row.num_bytes for row in table.rows
    }
    assert (view.kv_tokens, view.max_concurrency) == (0, 0.0)


def test_rows_are_groups_that_add_up_to_the_phases() -> None:
    view = view_of(FITTING, None)
    for phase in PHASES:
        assert sum(row.phase_bytes.get(phase, 0) for row in view.rows) == view.phase_bytes[phase]
    peaks = [row.peak_bytes for row in view.rows]
    assert peaks == sorted(peaks, reverse=True)
    by_owner = {row.owner: row for row in view.rows}
    assert by_owner["weights"].reason.startswith("layers: ")
    assert "serve" not in by_owner["staging"].phase_bytes
    assert "load" not in by_owner["kv pages"].phase_bytes


def test_the_command_is_there_where_it_would_work() -> None:
    assert view_of(FITTING, None).command == "holdfast chat --max-model-len 8192 --max-num-seqs 256"
    changed = view_of(TOO_LONG, None)
    smallest = next(item for item in changed.alternatives if item.is_smallest)
    assert smallest.option == "max_model_len"
    assert f"--max-model-len {smallest.value}" in (changed.command or "")
    assert view_of(TOO_LARGE, None).command is None, "another GPU is no option"
    ranks = FITTING._replace(tensor_parallel_size=2)
    assert view_of(ranks, None).command is None, "nothing runs it yet"
    quantized = FITTING._replace(config=FITTING.config.with_quantization("fp8"))
    assert "--quantization fp8 " in (view_of(quantized, None).command or "")


def test_json_has_stable_names_and_plain_values() -> None:
    record = json.loads(json.dumps(view_of(FITTING, None).as_dict()))
    assert list(record) == [
        "model",
        "target",
        "fits",
        "short_bytes",
        "budget",
        "kv_bytes_per_token",
        "kv_tokens",
        "max_model_len",
        "max_concurrency",
        "terms",
        "phases",
        "choices",
        "alternatives",
        "not_in_this_version",
        "command",
    ]
    assert record["kv_bytes_per_token"] == 36 * 2 * 8 * 128 * 2
    assert isinstance(record["kv_bytes_per_token"], int)
    for phase, num_bytes in record["phases"].items():
        assert num_bytes == sum(term["bytes"] for term in record["terms"] if phase in term["phases"])
        assert num_bytes <= record["budget"]["bytes"]
    assert record["terms"][-1]["owner"] == "kv pages"
    assert record["terms"][-1]["bytes"] == record["kv_tokens"] * record["kv_bytes_per_token"]
    assert set(record["alternatives"][0]) == {
        "change",
        "option",
        "value",
        "fits",
        "kv_tokens",
        "max_concurrency",
        "not_in_this_version",
        "is_smallest",
    }


def test_numbers_are_whole_where_they_can_be() -> None:
    assert plain_number(Fraction(7)) == 7
    assert isinstance(plain_number(Fraction(7)), int)
    assert plain_number(Fraction(1, 2)) == 0.5


def test_words_about_tokens() -> None:
    fitting: PlanView = view_of(wish("Qwen3-8B", "h200", max_model_len=8192, max_num_seqs=2), None)
    assert fitting.kv_words == (
        "KV cache size: 16,384 tokens (144.00 KiB each), Maximum concurrency for 8,192 tokens per request: 2.00x"
    )
    assert view_of(TOO_LARGE, None).kv_words == "a token of KV takes 256.00 KiB"
