"""The view of a plan: the planner's own numbers, the same as text, a command that makes it again, and the sweep."""

import json
import shlex
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from cli.plan_requests import plan_request
from holdfast.cli.plan_commands import plan_command, start_command
from holdfast.cli.plan_view import Cell, PlanView, plain_number, summary_of, sweep, token_text, view_of
from holdfast.cli.tables import EIGHTHS, SWEEP_CELLS, sweep_bar, sweep_lines
from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.errors import MemoryPlanError
from holdfast.memory.planner import PHASES
from holdfast.planning.alternatives import Alternative, in_scheme, list_alternatives
from holdfast.planning.fit import fit_runner
from holdfast.planning.resolve import PlanRequest, resolve
from holdfast.planning.target import cpu_target
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, KV_FORMATS

FITTING = plan_request("Qwen3-8B", "h200", max_model_len=8192)


TOO_LONG = plan_request("Qwen3-8B", "rtx4090", max_model_len=1_000_000)


TOO_LARGE = plan_request("Qwen3-32B", "l4")


@pytest.mark.parametrize("requested", [FITTING, plan_request("DeepSeek-V4-Flash", "b200", tensor_parallel_size=8)])
def test_view_that_fits_equals_plan(requested: PlanRequest) -> None:
    view, plan = view_of(requested, None), fit_runner(requested)
    assert view.fits
    assert view.short_bytes == 0
    assert view.phase_bytes == plan.memory.phase_bytes
    assert (view.kv_tokens, view.max_concurrency) == (plan.kv_tokens, plan.max_concurrency)
    assert view.kv_bytes_per_token == plan.kv_bytes_per_token
    assert view.budget_bytes == plan.memory.budget_bytes
    assert view.not_in_this_version == plan.not_in_this_version
    assert view.alternatives == list_alternatives(resolve(requested))


@pytest.mark.parametrize("requested", [TOO_LONG, TOO_LARGE], ids=["context", "model"])
def test_view_over_budget_shortfall_equals_refusal(requested: PlanRequest) -> None:
    view = view_of(requested, None)
    with pytest.raises(MemoryPlanError) as caught:
        fit_runner(requested)
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


def test_view_command_given_only_where_it_works() -> None:
    assert view_of(FITTING, None).command == "holdfast serve --max-model-len 8192"
    changed = view_of(TOO_LONG, None)
    smallest = next(item for item in changed.alternatives if item.is_smallest)
    assert smallest.option == "max_model_len"
    assert f"--max-model-len {smallest.value}" in (changed.command or "")
    assert view_of(TOO_LARGE, None).command == (
        "holdfast serve --quantization mxfp4 --memory-utilization 0.98 --max-num-batched-tokens 2048 --max-num-seqs 4"
    )
    other = view_of(plan_request("SmolLM2-135M", memory="900MiB", max_model_len=8192), None)
    assert other.command is None, "another GPU is no option"
    assert other.best_command == "holdfast plan --gpu rtx4060ti-8g --max-model-len 8192"
    ranks = replace(FITTING, mesh=Mesh(tensor_size=2))
    assert "--tensor-parallel-size 2" in (view_of(ranks, None).command or "")
    hybrid = replace(ranks, declared=plan_request("gemma-4-31B-it").declared)
    assert view_of(hybrid, None).command is None, "nothing runs it yet"
    quantized = replace(FITTING, config=FITTING.config.with_quantization("fp8"))
    assert "--quantization fp8" in (view_of(quantized, None).command or "")
    revised = replace(FITTING, config=EngineConfig(revision="v9"))
    view = view_of(revised, "Qwen/Qwen3-8B")
    assert all("Qwen/Qwen3-8B " in command for command in (view.command or "", *filter(None, view.commands)))
    assert all("--revision v9" in command for command in (view.command or "", *filter(None, view.commands)))


def test_json_has_stable_names_and_plain_values() -> None:
    record = json.loads(json.dumps(view_of(FITTING, None).as_dict()))
    assert list(record) == [
        "verdict",
        "status",
        "for",
        "speed",
        "best_command",
        "model",
        "target",
        "fits",
        "short_bytes",
        "budget",
        "kv_bytes_per_token",
        "kv_tokens",
        "max_model_len",
        "context_note",
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
        "kind",
        "option",
        "value",
        "settings",
        "command",
        "fits",
        "kv_tokens",
        "max_model_len",
        "max_concurrency",
        "is_smallest",
        "speed",
    }


def test_numbers_are_whole_where_they_can_be() -> None:
    assert plain_number(Fraction(7)) == 7
    assert isinstance(plain_number(Fraction(7)), int)
    assert plain_number(Fraction(1, 2)) == 0.5


def test_view_kv_text_names_tokens_or_bytes_per_token() -> None:
    fitting: PlanView = view_of(plan_request("Qwen3-8B", "h200", max_model_len=8192, max_num_seqs=2), None)
    assert fitting.kv_text == (
        "KV cache size: 16,384 tokens (144.00 KiB each), Maximum concurrency for 8,192 tokens per request: 2.00x"
    )
    assert view_of(TOO_LARGE, None).kv_text == "a token of KV takes 256.00 KiB"


def words_of(requested: PlanRequest) -> str:
    return summary_of(requested, resolve(requested))


def change(option: str, value: object) -> Alternative:
    return Alternative("", ((option, str(value)),), "lever", 1, 1, True, True)


def test_words_of_request_are_one_line() -> None:
    assert words_of(plan_request(max_model_len=4096, max_num_seqs=1)) == (
        "Qwen3-8B on NVIDIA H200: weights in bfloat16, KV pages in bfloat16, context 4,096, one sequence, 8,192 tokens a step"
    )
    several = words_of(plan_request(tensor_parallel_size=4, quantization="fp8", kv_cache_dtype="turboquant_k8v4"))
    assert several.startswith(
        "Qwen3-8B on each of 4 x NVIDIA H200: weights in fp8, KV pages in turboquant_k8v4, context 40,960"
    )
    mixed = words_of(plan_request(kv_cache_dtype="turboquant_4bit_nc", kv_protected_dtype="auto"))
    assert "KV pages in turboquant_4bit_nc, 4 of 36 layers in bfloat16, context 40,960" in mixed
    assert "on the CPU of this machine" in words_of(replace(plan_request(), target=cpu_target()))


def test_words_of_one_token_use_singular() -> None:
    one = words_of(plan_request(max_num_batched_tokens=1, quantization="none"))
    assert "weights in bfloat16" in one
    assert one.endswith(", 1 token a step")


def test_words_of_hostile_name_stay_on_one_line() -> None:
    requested = plan_request()
    hostile = replace(requested, declared=replace(requested.declared, name="a\nb\x1b[2J"))
    words = words_of(hostile)
    assert words.isprintable()
    assert words.startswith("a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}[2J on ")


def test_token_text_gives_exact_or_average_bytes() -> None:
    assert token_text(Fraction(147456)) == "144.00 KiB"
    assert token_text(Fraction(1000, 3)) == "333.33 B on average"


def test_start_command_repeats_only_given_options() -> None:
    assert start_command(plan_request(), "Qwen3-8B") == "holdfast serve Qwen/Qwen3-8B"
    assert start_command(replace(plan_request(), target=cpu_target()), None) == "holdfast serve --device cpu"
    alone = plan_request(max_num_seqs=1)
    assert start_command(alone, "Qwen3-8B") == "holdfast serve Qwen/Qwen3-8B --max-num-seqs 1", "no switch"
    assert start_command(alone, "Qwen3-8B", None, "chat") == "holdfast chat Qwen/Qwen3-8B"
    assert start_command(alone, "Qwen3-8B", None, "run") == "holdfast run Qwen/Qwen3-8B -p Hello"
    full = plan_request(
        dtype="float16",
        max_model_len=8192,
        max_num_batched_tokens=512,
        page_tokens=32,
        memory_utilization=0.95,
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_memory="7GiB",
        kv_cache_dtype="turboquant_3bit_nc",
        kv_protected_layers=6,
        kv_protected_dtype="auto",
    )
    assert shlex.split(start_command(full, "Qwen3-8B") or "")[3:] == [
        *("--dtype", "float16"),
        *("--kv-cache-memory", "7GiB"),
        *("--kv-cache-dtype", "turboquant_3bit_nc"),
        *("--kv-protected-layers", "6"),
        *("--kv-protected-dtype", "auto"),
        *("--max-model-len", "8192"),
        *("--max-num-batched-tokens", "512"),
        *("--page-tokens", "32"),
        *("--memory-utilization", "0.95"),
        "--enforce-eager",
        *("--max-num-seqs", "4"),
    ]


def test_ranks_of_several_nodes_are_started_by_a_launcher() -> None:
    """Without one such a start is refused."""

    def reported(nnodes: int | None) -> str:
        requested = plan_request(tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=nnodes)
        return start_command(requested, "Qwen3-8B") or ""

    assert reported(None).startswith("holdfast serve Qwen/Qwen3-8B ")
    command = reported(2)
    assert command == (
        "torchrun --nnodes 2 --node-rank NODE --nproc-per-node 2 --master-addr FIRST_NODE --master-port 29500 "
        "-m holdfast serve Qwen/Qwen3-8B --tensor-parallel-size 2 --pipeline-parallel-size 2 --nnodes 2 "
        "--no-core-process"
    )
    assert "--nnodes 3 --node-rank NODE --nproc-per-node ITS_RANKS " in reported(3)


def test_start_command_keeps_zero_protected_layers() -> None:
    command = start_command(plan_request(kv_cache_dtype="turboquant_3bit_nc", kv_protected_layers=0), "Qwen3-8B")
    assert command is not None
    assert command.endswith("--kv-protected-layers 0")
    assert "--kv-protected-dtype" not in command


def test_plan_command_repeats_same_plan() -> None:
    assert plan_command(plan_request("Qwen3-8B", "rtx4090"), "Qwen3-8B") == "holdfast plan Qwen3-8B --gpu rtx4090"
    assert plan_command(plan_request(memory="24GiB", tensor_parallel_size=2), "x") == (
        "holdfast plan x --memory 24GiB --tensor-parallel-size 2"
    )
    assert plan_command(plan_request(memory="24GB"), "x") == "holdfast plan x --memory 24000000000B"
    assert plan_command(replace(plan_request(), target=cpu_target()), None) == "holdfast plan"
    moved = plan_command(plan_request(max_num_seqs=4), "x", change("gpu", "b200"))
    assert moved == "holdfast plan x --gpu b200 --max-num-seqs 4"
    indexed = plan_request("DeepSeek-V4-Flash", index_cache_dtype="fp8", tensor_parallel_size=4)
    assert plan_command(indexed, "x", change("memory_utilization", 0.98)) == (
        "holdfast plan x --gpu h200 --tensor-parallel-size 4 --index-cache-dtype fp8 --memory-utilization 0.98"
    )
    assert plan_command(plan_request(), "x", change("memory_limit", "4GiB")) is None, "plans have no such option"


def test_start_command_quotes_path_for_shell(tmp_path: Path) -> None:
    folder = tmp_path / "a model; rm -rf"
    folder.mkdir()
    command = start_command(plan_request(), str(folder))
    assert shlex.split(command or "")[2] == str(folder)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("max_model_len", "2048", "--max-model-len 2048"),
        ("memory_utilization", 0.93, "--memory-utilization 0.93"),
        ("enforce_eager", "true", "--enforce-eager"),
        ("max_num_seqs", 16, "--max-num-seqs 16"),
        ("kv_cache_dtype", "turboquant_k8v4", "--kv-cache-dtype turboquant_k8v4"),
    ],
)
def test_start_command_includes_change(option: str, value: object, words: str) -> None:
    command = start_command(plan_request(max_model_len=4096), "Qwen3-8B", change(option, value))
    assert command is not None
    assert words in command
    assert command.count("--max-num-seqs") == (option == "max_num_seqs")
    assert "true" not in command


def test_another_gpu_is_no_option_of_a_command() -> None:
    assert start_command(plan_request(), "Qwen3-8B", change("gpu", "b200")) is None


REQUEST = plan_request("Qwen3-8B", "rtx4090", max_num_seqs=64, kv_near_tokens=0)
CELLS = sweep(REQUEST)


def in_format(name: str) -> PlanRequest:
    return replace(REQUEST, config=replace(REQUEST.config, kv_cache_dtype=name))


def test_sweep_cells_equal_plans_of_their_formats() -> None:
    for cell in CELLS:
        alone = fit_runner(in_scheme(in_format(cell.kv_cache_dtype), cell.quantization))
        assert cell.kv_tokens == alone.kv_tokens
        assert cell.kv_protected_layers == len(alone.resolved.protected.layers)
        assert cell.runs
    assert [cell for cell in CELLS if cell.is_planned] == [CELLS[0]]


def test_formats_go_from_the_requested_one_to_fewer_bytes() -> None:
    names = list(dict.fromkeys(cell.kv_cache_dtype for cell in CELLS))
    assert names[0] == "bfloat16"
    assert set(names) == {"bfloat16", *(name for name, value in KV_FORMATS.items() if value.is_quantized)}
    sizes = [resolve(in_format(name)).bytes_per_token() for name in names]
    assert all(larger > smaller for larger, smaller in pairwise(sizes))
    assert {cell.quantization for cell in CELLS} == {"none", "fp8", "mxfp4"}


def test_sweep_always_includes_requested_formats() -> None:
    cells = sweep(plan_request("Qwen3-8B", "h200", quantization="int8", kv_cache_dtype="fp8"))
    assert [(cell.kv_cache_dtype, cell.quantization) for cell in cells if cell.is_planned] == [("fp8", "int8")]
    assert {cell.quantization for cell in cells if cell.runs} == {"none", "fp8", "mxfp4", "int8"}
    on_old = sweep(plan_request("Qwen3-8B", "a100-80g"))
    assert {cell.quantization for cell in on_old} == {"none", "int8", "mxfp4"}, "it has no products in fp8"
    assert all(cell.runs for cell in sweep(plan_request("Qwen3-8B", "h200", tensor_parallel_size=2)))


def test_sweep_leaves_out_contradictory_formats() -> None:
    """Protected layers in k8v4 are no wider than pages in k8v4."""
    cells = sweep(plan_request(kv_cache_dtype="fp8", kv_protected_layers=2, kv_protected_dtype="float32"))
    assert {cell.kv_protected_layers for cell in cells} == {2}
    narrow = sweep(
        plan_request(kv_cache_dtype="turboquant_k3v4_nc", kv_protected_layers=36, kv_protected_dtype="turboquant_k8v4")
    )
    names = {cell.kv_cache_dtype for cell in narrow}
    narrower = {"turboquant_k5v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"}
    assert names == narrower, "quantized ones of equal size too"


def test_sweep_unsupported_model_runs_no_cell() -> None:
    cells = sweep(plan_request("gemma-4-31B-it", "h200"))
    assert not any(cell.runs for cell in cells)
    assert any(cell.kv_tokens for cell in cells)


def test_sweep_lines_without_fit_say_does_not_fit() -> None:
    cells = sweep(plan_request("DeepSeek-V2", "rtx3060"))
    assert {cell.kv_tokens for cell in cells} == {0}
    assert all("does not fit" in line.text for line in sweep_lines(cells, "a GPU")[2:])


def test_sweep_lines_have_bar_per_cell_and_name_per_format() -> None:
    title, heading, *lines = sweep_lines(CELLS, "NVIDIA H200")
    assert "NVIDIA H200" in title.text
    assert heading.text.split() == ["KV", "pages", "weights", "tokens"]
    assert len(lines) == len(CELLS)
    assert sum(line.text.startswith("bfloat16") for line in lines) == 1
    assert lines[0].text.endswith("this plan")
    for cell, line in zip(CELLS[1:], lines[1:], strict=True):
        assert line.text.endswith("not in this version") == (line.style == "dim") == (not cell.runs)
    wider = [line.text for line in lines if "4 layers wider" in line.text]
    assert [text.split()[0] for text in wider] == [
        name for name in dict.fromkeys(cell.kv_cache_dtype for cell in CELLS) if DEFAULT_PROTECTED_LAYERS.get(name) == 4
    ]
    assert all(f"{cell.kv_tokens:,}" in line.text for cell, line in zip(CELLS, lines, strict=True))
    longest = max(range(len(CELLS)), key=lambda place: CELLS[place].kv_tokens)
    assert lines[longest].text.count(EIGHTHS[8]) == SWEEP_CELLS


@pytest.mark.parametrize(
    ("value", "cells"), [(0, ""), (1, "▏"), (500, "█" * 20), (512, "█" * 20 + "▌"), (1000, "█" * 40)]
)
def test_bars_count_eighths(value: int, cells: str) -> None:
    assert sweep_bar(value, 1000) == cells.ljust(SWEEP_CELLS)


def test_sweep_lines_without_cells_draw_no_chart() -> None:
    assert len(sweep_lines((), "a GPU")) == 2
    assert sweep_lines((Cell("bfloat16", "none", 0, True, True),), "a GPU")[2].text.endswith("this plan")
