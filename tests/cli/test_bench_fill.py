"""`holdfast bench fill`: every family fills its declared context, the record's keys, exit codes, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import doc_tables
from cli.cli_models import Ended, Here, refuse
from holdfast.cli import bench_fill
from holdfast.cli.fill_ladder import PROMPT, TRACE, TWO_TRACES, Ladder
from holdfast.cli.terminal import INTERRUPTED
from holdfast.loading import named_dummy
from holdfast.runner.runner import Runner
from runner.gpu_traffic import write_model

FAMILIES = ("qwen3", "windows", "gpt_oss", "gemma3", "latent", "sparse", "compressed_small")
DECLARED = 240
QUICK = ("--max-model-len", DECLARED, "--answer-tokens", 3, "--turns", 4)
DUMMY = ("--load-format", "dummy", "--tokenizer", "none", "--memory-limit", "6GiB", "--kv-cache-memory", "48MiB")
SHORT = {"sparse": 120, "compressed_small": 200}
"""Contexts of families that a CPU computes slowly; prefixes of 128 tokens are found."""
KEYS = {"tokens", "free_bytes", "allocations", "tokens_per_s", "hit_tokens", "compilations"}


class Filling:
    """fill(model, *options) -> how the command ended, and its record."""

    def __init__(self, here: Here, folder: Path) -> None:
        self._here, self._file = here, folder / "fill.json"

    def __call__(self, model: Path, *options: object) -> tuple[Ended, dict[str, Any]]:
        self._file.unlink(missing_ok=True)
        ended = self._here("bench", "fill", model, *QUICK, *options, "--json", self._file)
        text = self._file.read_text() if self._file.exists() else "{}"
        return ended, json.loads(text, parse_constant=refuse)


@pytest.fixture
def fill(here: Here, tmp_path: Path) -> Filling:
    return Filling(here, tmp_path)


def assert_filled(
    ended: Ended,
    record: dict[str, Any],
    names: tuple[str, ...] = (PROMPT, TRACE, TWO_TRACES),
    declared: int = DECLARED,
) -> None:
    assert ended.code == 0, ended
    assert record["ok"] is True
    assert record["declared_tokens"] == record["filled_tokens"] == declared
    assert [rung["name"] for rung in record["rungs"]] == list(names)
    assert all(rung.keys() >= KEYS for rung in record["rungs"])
    assert {rung["tokens"] for rung in record["rungs"]} == {declared}
    assert {rung["allocations"] for rung in record["rungs"]} == {0}
    assert {rung["compilations"] for rung in record["rungs"]} == {0}
    assert all(rung["tokens_per_s"] > 0 and rung["free_bytes"] > 0 for rung in record["rungs"])


PACKED = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 259,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 512,
}


def test_bench_fill_release_by_name_needs_no_file(fill: Filling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummy blocks of a Q4_K_M, whose output projections take value heads in turn."""
    monkeypatch.setattr(named_dummy, "is_known", lambda name: True)
    monkeypatch.setattr(named_dummy, "find_model", lambda name: ("Tiny-1B", PACKED))
    ended, record = fill(Path("owner/Tiny-1B:Q4_K_M"), *DUMMY, "--device", "cpu", "--max-model-len", 200)
    assert_filled(ended, record, declared=200)
    assert "Tiny-1B:Q4_K_M" in ended.out


@pytest.mark.parametrize("family", FAMILIES)
def test_bench_fill_every_family_reaches_last_token(fill: Filling, tmp_path: Path, family: str) -> None:
    declared = SHORT.get(family, DECLARED)
    ended, record = fill(write_model(tmp_path, family), *DUMMY, "--device", "cpu", "--max-model-len", declared)
    assert_filled(ended, record, declared=declared)
    assert ended.out.startswith(f"FILLED: {declared} of {declared} declared tokens, 0 allocations after ready\n")
    one, trace, two = record["rungs"]
    assert one["hit_tokens"] == 0
    assert 0 < trace["hit_tokens"] <= two["hit_tokens"]


STATES = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 259,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 48,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
    },
    "tie_word_embeddings": False,
}
"""A tiny model with gated delta nets, whose sequences keep states beside pages."""


def write_states(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(STATES))
    return folder


@pytest.mark.parametrize("snapshots", ["0", pytest.param("1", marks=pytest.mark.slow), "4"])
def test_bench_fill_states_reach_last_token(fill: Filling, tmp_path: Path, snapshots: str) -> None:
    """A hit needs a snapshot; without one every turn computes its whole prompt."""
    options = (*DUMMY, "--device", "cpu", "--state-snapshots", snapshots)
    ended, record = fill(write_states(tmp_path), *options)
    assert_filled(ended, record)
    assert (record["rungs"][1]["hit_tokens"] > 0) is (snapshots != "0")


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [(), ("--enforce-eager",)], ids=["graphs", "eager"])
@pytest.mark.parametrize("kv_format", ["auto", "turboquant_k8v4"])
def test_bench_fill_states_on_gpu_take_no_memory(
    fill: Filling, tmp_path: Path, eager: tuple[str, ...], kv_format: str
) -> None:
    options = (*DUMMY[:4], "--kv-cache-memory", "256MiB", "--kv-cache-dtype", kv_format, *eager)
    assert_filled(*fill(write_states(tmp_path), *options))


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [(), ("--enforce-eager",)], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bench_fill_on_gpu_takes_no_memory(fill: Filling, tmp_path: Path, family: str, eager: tuple[str, ...]) -> None:
    ended, record = fill(write_model(tmp_path, family), *DUMMY[:4], "--kv-cache-memory", "256MiB", *eager)
    assert_filled(ended, record)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["turboquant_k8v4", "turboquant_4bit_nc"])
def test_bench_fill_quantized_pages_on_gpu_take_no_memory(fill: Filling, tmp_path: Path, kv_format: str) -> None:
    options = (*DUMMY[:4], "--kv-cache-memory", "256MiB", "--kv-cache-dtype", kv_format)
    assert_filled(*fill(write_model(tmp_path, "qwen3_wide"), *options))


def test_bench_fill_record_renders_as_table(fill: Filling, tmp_path: Path, tiny: Path) -> None:
    ended, record = fill(tiny, "--max-model-len", "100")
    assert ended.code == 0, ended
    records = tmp_path / "records"
    records.mkdir()
    (records / "record.json").write_text(json.dumps(record))
    table = doc_tables.section_tables(records, "fill")
    assert "model, 100 declared tokens, 4 turns, answers of 3 tokens, max_model_len=100, on" in table
    assert "| one prompt | 100 | 0 |" in table


def test_bench_fill_own_tokenizer_and_default_turns(here: Here, tiny: Path) -> None:
    """50 turns do not fit a context of 256 tokens."""
    ended = here("bench", "fill", tiny)
    assert ended.code == 0, ended
    verdict, settings, heading, *rows = ended.out.splitlines()
    assert verdict == "FILLED: 256 of 256 declared tokens, 0 allocations after ready"
    assert settings.endswith("3 turns, answers of 64 tokens")
    assert heading.split()[:2] == ["tokens", "hit"]
    assert [row.partition("  ")[0] for row in rows] == [PROMPT, TRACE, TWO_TRACES]
    assert "one prompt: filled 256 of 256 tokens" in ended.err


PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * 16
"""A page of the tiny model: keys and values of 2 layers, 2 heads of 16 in float32, 16 tokens."""


@pytest.mark.parametrize(
    ("num_pages", "names"), [(7, (PROMPT, TRACE)), (13, (PROMPT, TRACE)), (14, (PROMPT, TRACE, TWO_TRACES))]
)
def test_bench_fill_exact_pages_fill_without_preemption(
    here: Here, tiny: Path, num_pages: int, names: tuple[str, ...]
) -> None:
    """A context of 100 tokens takes 7 pages; 13 of them are more than 200 tokens, and no two contexts."""
    memory = ("--max-model-len", "100", "--answer-tokens", "3", "--kv-cache-memory", num_pages * PAGE_BYTES)
    ended = here("bench", "fill", tiny, *memory, "--json", "-")
    assert ended.code == 0, ended
    record = json.loads(ended.out)
    assert [rung["name"] for rung in record["rungs"]] == list(names)
    assert [rung["num_preemptions"] for rung in record["rungs"]] == [0] * len(names)
    assert list(record["left_out"]) == ([] if TWO_TRACES in names else [TWO_TRACES])
    assert ("left out: two agent traces (the pages hold 1 whole context at once)" in ended.err) == (len(names) == 2)


def test_bench_fill_one_sequence_leaves_out_two_agents(fill: Filling, tmp_path: Path) -> None:
    options = (*DUMMY, "--device", "cpu", "--max-num-seqs", "1")
    ended, record = fill(write_model(tmp_path, "qwen3"), *options)
    assert_filled(ended, record, names=(PROMPT, TRACE))
    assert record["left_out"] == {TWO_TRACES: "max_num_seqs is 1"}


def test_bench_fill_without_prefix_cache_still_fills(fill: Filling, tmp_path: Path) -> None:
    ended, record = fill(write_model(tmp_path, "qwen3"), *DUMMY, "--device", "cpu", "--no-enable-prefix-caching")
    assert_filled(ended, record)
    assert {rung["hit_tokens"] for rung in record["rungs"]} == {0}


def test_bench_fill_kept_tensor_is_allocation(fill: Filling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect, kept = Runner.collect, []

    def leak(self: Any) -> Any:
        kept.append(torch.empty(8))
        self.model.leaked = kept
        return collect(self)

    monkeypatch.setattr(Runner, "collect", leak)
    ended, record = fill(write_model(tmp_path, "qwen3"), *DUMMY, "--device", "cpu")
    assert ended.code == 1, ended
    assert (record["filled_tokens"], record["ok"]) == (DECLARED, False)
    assert all(rung["allocations"] > 0 for rung in record["rungs"])
    assert ended.out.startswith("NOT FILLED: ")


def test_bench_fill_failed_step_writes_record_and_exits_one(
    fill: Filling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, steps = Runner.launch, []

    def fail(self: Any, step: Any) -> None:
        steps.append(step)
        if len(steps) == 12:
            raise RuntimeError("CUDA out of memory")
        launch(self, step)

    monkeypatch.setattr(Runner, "launch", fail)
    ended, record = fill(write_model(tmp_path, "qwen3"), *DUMMY, "--device", "cpu")
    assert ended.code == 1, ended
    assert record["ok"] is False
    assert record["filled_tokens"] < DECLARED
    assert "out of memory" in record["rungs"][-1]["error"]
    assert "out of memory" in ended.out.splitlines()[0]


def test_bench_fill_interrupt_keeps_finished_rungs(
    fill: Filling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, turns = Ladder._turn, []

    def interrupt(self: Any, *arguments: Any) -> None:
        turns.append(arguments)
        if len(turns) == 4:
            raise KeyboardInterrupt
        turn(self, *arguments)

    monkeypatch.setattr(Ladder, "_turn", interrupt)
    ended, record = fill(write_model(tmp_path, "qwen3"), *DUMMY, "--device", "cpu")
    assert ended.code == INTERRUPTED, ended
    one, trace = record["rungs"]
    assert (one["tokens"], one["error"]) == (DECLARED, None)
    assert (trace["tokens"], trace["error"]) == (DECLARED // 2, "interrupted")
    assert record["ok"] is False
    assert "stopping: the rungs so far are written" in ended.err


def test_bench_fill_record_is_saved_after_each_rung(
    fill: Filling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    climb, saved = Ladder.climb, []

    def read_before(self: Any, *arguments: Any) -> Any:
        file = tmp_path / "fill.json"
        saved.append([rung["name"] for rung in json.loads(file.read_text())["rungs"]] if file.exists() else [])
        return climb(self, *arguments)

    monkeypatch.setattr(Ladder, "climb", read_before)
    assert_filled(*fill(write_model(tmp_path, "qwen3"), *DUMMY, "--device", "cpu"))
    assert saved == [[], [PROMPT], [PROMPT, TRACE]]


def test_bench_fill_context_that_does_not_fit_is_plan_refusal(fill: Filling, tmp_path: Path) -> None:
    options = (*DUMMY[:4], "--device", "cpu", "--kv-cache-memory", "64KiB")
    ended, record = fill(write_model(tmp_path, "qwen3"), *options)
    assert ended.code == 1
    assert record == {}
    assert ended.out == ""
    assert type(ended.error).__name__ == "MemoryPlanError", ended


REFUSED = [
    (("--turns", "0"), "value.out_of_range"),
    (("--turns", "x"), "value.out_of_range"),
    (("--answer-tokens", "0"), "value.out_of_range"),
    (("--turns", "9", "--max-model-len", "100", "--answer-tokens", "12"), "bench.fill_turns"),
    (("--max-model-len", "64"), "bench.fill_no_prompt"),
    (("--core-process",), "bench.fill_one_process"),
    (("--tensor-parallel-size", "2"), "bench.fill_one_process"),
    (("--threads", "100000"), "value.out_of_range"),
    (("--json", "no/such/folder/record.json"), "bench.record_folder"),
    (("--memory-report", "no/such/folder/memory.html"), "its folder does not exist"),
    (("--max-model-len", "0"), "value.out_of_range"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_bench_fill_refuses_bad_options(here: Here, tiny: Path, options: tuple[str, ...], words: str) -> None:
    ended = here("bench", "fill", tiny, *options)
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.count("\n") == 1, ended
    assert ended.refuses(words), ended


def test_bench_fill_short_model_context_is_refused(here: Here, tiny: Path) -> None:
    ended = here("bench", "fill", tiny, "--answer-tokens", "256")
    assert ended.code == 2
    assert ended.refuses("bench.fill_no_prompt", declared=256, answer_tokens=256), ended


def test_bench_fill_meter_reads_budget_less_memory_on_cpu(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.cli.opened_model import open_quietly
    from holdfast.config import EngineConfig
    from holdfast.memory.profiler import DeviceBytes

    opened = open_quietly(EngineConfig(model=str(tiny), memory_limit="2GiB", max_num_seqs=2))
    meter = bench_fill.DeviceMeter(opened)
    monkeypatch.setattr(bench_fill, "measure", lambda device: DeviceBytes(5, 6, 7 << 20, 8 << 30))
    assert meter.free_bytes() == (2 << 30) - (7 << 20)
    monkeypatch.setattr(bench_fill, "measure", lambda device: None)
    assert meter.free_bytes() is None
    assert meter.take_allocations() == 0
