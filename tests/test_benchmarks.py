"""The GPU benchmarks as far as they run without one: their arithmetic, their records, and every script once in a small way."""

import json
import mmap
import random
import sys
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import doc_tables
from attention.steps import Geometry, build
from cli.cli_models import make_model
from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.engine.core import EngineCore
from holdfast.families.grouped.native_backend import NativePagedAttention
from holdfast.families.grouped.torch_backend import TorchPagedAttention
from holdfast.families.grouped.triton_backend import TritonPagedAttention

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
gpu_records = import_module("gpu_records")
gpu_engines = import_module("gpu_engines")
gpu_insides = import_module("gpu_insides")
gpu_memory = import_module("gpu_memory")
gpu_decode = import_module("gpu_decode")
gpu_steady = import_module("gpu_steady")
gpu_groups = import_module("gpu_groups")
gpu_attention = import_module("gpu_attention")
checkpoints = import_module("checkpoints")
memory_watch = import_module("memory_watch")
load_case = import_module("load_case")
gpu_load = import_module("gpu_load")
gpu_quantized = import_module("gpu_quantized")
dummy_models = import_module("dummy_models")
gpu_before_after = import_module("gpu_before_after")
gpu_invariance = import_module("gpu_invariance")
window_pages = import_module("window_pages")
ngram = import_module("ngram")
structured = import_module("structured")
MIB = 2**20


# --- records


def test_gpu_records_command_leaves_out_machine_paths() -> None:
    argv = ["/somewhere/else/benchmarks/gpu_memory.py", "--out", "/tmp/x", "--cases", "0,3", "--commit=abc", "--tiny"]
    assert gpu_records.command(argv) == "python benchmarks/gpu_memory.py --cases 0,3 --tiny"


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "h200-2026-01-31-memory.json"), ("GeForce RTX 4090!", "geforce-rtx-4090-2026-01-31-memory.json")],
)
def test_record_name_has_gpu_benchmark_and_date(device: str, name: str) -> None:
    assert gpu_records.record_name(device, "memory", "2026-01-31") == name


def arguments(out: Path, **settings) -> SimpleNamespace:
    return SimpleNamespace(**{"device": "cpu", "commit": None, "out": out, "tiny": True, **settings})


@pytest.mark.parametrize(("given", "found", "commit"), [("abc", "def", "abc"), (None, "def", "def")])
def test_gpu_record_is_readable_and_has_commit(tmp_path: Path, monkeypatch, given, found, commit) -> None:
    monkeypatch.setenv(gpu_records.COMMIT_VARIABLE, found)
    results = [{"measure": "decode, batch 1", "unit": "tokens/s", "values": {"holdfast": 62.5}}]
    made = gpu_records.make_record("gpu-decode", results, "M", "s", arguments(tmp_path, commit=given), {"more": 1})
    path = gpu_records.write_record(made, "decode", arguments(tmp_path))
    record = doc_tables.read_record(path)
    assert record["commit"] == commit
    assert record["versions"]["torch"] == torch.__version__
    assert {"python", "holdfast", "triton"} <= record["versions"].keys()
    assert record["more"] == 1


def test_budget_counts_down() -> None:
    times = iter([10.0, 13.0, 21.5])
    budget = gpu_records.Budget(10.0, lambda: next(times))
    assert budget.left_seconds == 7.0
    assert budget.left_seconds == -1.5


CHILD = """
import sys, time
sys.path[:0] = [{benchmarks!r}, {source!r}]
from pathlib import Path
from gpu_records import leave
print("on the way")
{work}
leave({{"answer": 42}}, Path(sys.argv[sys.argv.index("--result") + 1]))
"""


def child(tmp_path: Path, work: str) -> list[str]:
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(benchmarks=str(ROOT / "benchmarks"), source=str(ROOT / "src"), work=work))
    return [str(script)]


def test_run_child_waits_until_looked_at(tmp_path: Path) -> None:
    found = gpu_records.run_child(child(tmp_path, ""), 60, lambda: {"seen": True})
    assert found == {"answer": 42, "seen": True}


def test_failed_child_leaves_its_output(tmp_path: Path, capsys) -> None:
    found = gpu_records.run_child(child(tmp_path, "raise ValueError('no room')"), 60)
    assert found == {"error": "ValueError: no room"}
    assert "on the way" in capsys.readouterr().err


def test_run_child_past_time_limit_is_ended(tmp_path: Path, monkeypatch) -> None:
    ended = []
    monkeypatch.setattr(
        gpu_records, "end_child", lambda process: (ended.append(process), process.kill(), process.wait())
    )
    found = gpu_records.run_child(child(tmp_path, "time.sleep(60)"), 0.2)
    assert "more than 0 s" in found["error"]
    assert len(ended) == 1
    ended[0].stdin.close()


def test_print_table_has_line_per_row(capsys) -> None:
    gpu_records.print_table("T", ("what", "n"), [("a", 1), ("bb", None), ("c", 1234.5)])
    assert capsys.readouterr().out.splitlines() == ["", "T", "what     n", "a        1", "bb       -", "c     1234"]


# --- memory


def segment(address: int, *blocks: tuple[int, str], pool=(0, 0)) -> dict:
    return {
        "address": address,
        "segment_pool_id": pool,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


def test_measured_by_owner_gives_every_byte_one_owner() -> None:
    segments = [
        segment(1000, (500, "active_allocated"), (100, "inactive")),
        segment(5000, (64, "active_allocated"), (36, "active_pending_free")),
        segment(9000, (10, "active_allocated"), (30, "inactive"), pool=(0, 1)),
    ]
    blocks = gpu_memory.blocks_of(segments)
    end = gpu_memory.Look(used=740 + 300, reserved=740, allocated=600)
    storages = {"weights": {1000: 400}, "kv pages": {5000: 60}}
    found = gpu_memory.measured_by_owner(blocks, storages, end, graph_driver_bytes=40, before=20)
    assert found == {
        "weights": 400,
        "kv pages": 60,
        "libraries": 36,
        "cuda graphs": 80,
        "allocator": 204,
        "cuda context": 240,
    }
    assert sum(found.values()) == end.used - 20


def test_errors_are_of_the_plan_and_the_worst_is_a_large_owner() -> None:
    planned = {"weights": 1000 * MIB, "kv pages": 100 * MIB, "rope": 1 * MIB}
    measured = {"weights": 1005 * MIB, "kv pages": 98 * MIB, "rope": 2 * MIB, "allocator": 60 * MIB}
    rows = gpu_memory.compare(planned, measured)
    assert [row["owner"] for row in rows] == ["weights", "kv pages", "allocator", "rope"]
    assert {row["owner"]: row["percent"] for row in rows} == {
        "weights": 0.5,
        "kv pages": -2.0,
        "rope": 100.0,
        "allocator": 100.0,
    }
    assert gpu_memory.worst(rows)["owner"] == "allocator"
    assert gpu_memory.worst([row for row in rows if row["owner"] != "allocator"])["owner"] == "kv pages"


def test_gpu_memory_cases_cover_required_range() -> None:
    cases = gpu_memory.CASES
    first = cases[0]
    assert first == gpu_memory.Case("Qwen3-32B", 40960, 256, 8192, False, 0.98)
    assert len(set(cases)) == len(cases) >= 11
    assert {case.enforce_eager for case in cases} == {True, False}
    lengths, sequences = [{case[i] for case in cases} for i in (1, 2)]
    assert (min(lengths), max(lengths)) == (4096, 2**20)
    assert (min(sequences), max(sequences)) == (1, 512)
    assert gpu_memory.CASES[2].words == "Qwen2.5-7B-Instruct, 1M x 8, 4096 tokens a step, graphs"


def test_gpu_memory_failed_case_is_row_with_message() -> None:
    row = gpu_memory.finding(gpu_memory.CASES[0], {"error": "no room"}, None)
    assert row["error"] == "no room"
    assert "holds" not in row
    assert gpu_memory.constants([row]) == {}


@pytest.fixture(scope="module")
def tiny_finding() -> dict:
    case = gpu_memory.TINY_CASES[0]
    found = json.loads(json.dumps(gpu_memory.run_case(case, True, "cpu")))
    return gpu_memory.finding(case, found, None)


def test_gpu_memory_tiny_engine_holds_plan(tiny_finding: dict) -> None:
    errors = {row["owner"]: row["percent"] for row in tiny_finding["owners"] if row["owner"] != "sampling"}
    del errors["python and torch"]  # held outside of what a ledger sees
    del errors["pooling"]  # one row, which the walk over modules does not reach; the ledger has it
    assert errors == dict.fromkeys(("weights", "kv pages", "workspace", "inputs", "rope"), 0.0)
    assert "other" not in errors


def test_gpu_memory_case_is_shown_and_recorded(tiny_finding: dict, tmp_path: Path, capsys) -> None:
    gpu_memory.show([tiny_finding, gpu_memory.finding(gpu_memory.CASES[1], {"error": "no room"}, None)])
    assert "no room" in capsys.readouterr().out
    record = gpu_records.make_record("gpu-memory", [tiny_finding], "M", "s", arguments(tmp_path), {})
    gpu_records.write_record(record, "memory", arguments(tmp_path))
    assert "| Qwen3-0.6B, 0K x 4" in doc_tables.section_tables(tmp_path, "gpu-memory")


# --- engines


class Thing:
    """Stands for an object of ours."""

    __module__ = "holdfast.somewhere"

    def __init__(self, **parts) -> None:
        self.__dict__.update(parts)


def test_tensors_of_finds_each_tensor_by_shortest_path() -> None:
    shared = torch.zeros(4)
    deep = Thing(far=[Thing(again=shared), {"key": (torch.zeros(2),)}], stranger=SimpleNamespace(tensor=torch.ones(1)))
    deep.itself = deep
    found = dict(gpu_engines.tensors_of(Thing(near=shared, deep=deep)))
    assert list(found) == ["near", "deep.far[1][key][0]"]
    assert found["near"] is shared


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("decoder.workspace._arenas[layers].tensors[layers]", "workspace"),
        ("backend._lists[None].tensor", "attention"),
        ("buffers.page_table.table.tensor", "inputs"),
        ("sampler.argmax_S", "sampling"),
        ("model.layers[0].attention.rotary.cos_TP", "rope"),
        ("model._rope.rows.frequency_SP", "rope"),
        ("model.layers[0].attention.qkv.weight_NK", "weights"),
        ("_invented", "other"),
    ],
)
def test_owner_of_path_gives_owner(path: str, owner: str) -> None:
    assert gpu_engines.owner_of(path) == owner


@pytest.mark.parametrize(
    ("backend_type", "kv_dtype"),
    [
        (NativePagedAttention, "float32"),
        (TorchPagedAttention, "float16 turboquant_3bit_nc"),
        (TritonPagedAttention, "float16 turboquant_k8v4"),
    ],
)
def test_pages_are_found_under_every_backend(backend_type, kv_dtype: str) -> None:
    dtype = torch.float32 if kv_dtype == "float32" else torch.float16
    geometry = Geometry(kv_dtype=kv_dtype, windows=(None, None), dtype=dtype)
    storage = geometry.storage(num_pages=4)
    found = gpu_engines.storages_by_owner(Thing(backend=build(backend_type, geometry, storage)), "cpu")
    pages = {plane.untyped_storage().data_ptr() for layer in range(2) for plane in storage.planes(layer).values()}
    assert found["kv pages"].keys() == pages
    assert found.keys() <= {"kv pages", "attention"}


def test_moved_finds_moved_tensors_but_no_new_views() -> None:
    before = {"a": (100, 100), "b": (108, 100)}
    assert gpu_engines.moved(before, {**before, "view": (116, 100)}) == []
    assert gpu_engines.moved(before, {"a": (100, 100), "b": (109, 100), "new": (300, 300)}) == ["b", "new"]
    flying = {**before, "_collected.choosing.chosen_S": (400, 400)}
    assert gpu_engines.moved(flying, {**flying, "_collected.choosing.chosen_S": (500, 500)}) == []


# --- decode


def test_decode_rate_is_difference_of_best_runs() -> None:
    assert gpu_decode.decode_rate(8, (17, 81), {17: [1.5, 1.2], 81: [2.2, 2.4]}) == pytest.approx(8 * 64 / 1.0)


def test_gpu_decode_roof_rate_of_one_stream_is_known() -> None:
    assert gpu_decode.roof_rate(1, 0, 63_970_000_000, 262144) == pytest.approx(68.3, abs=0.05)
    assert gpu_decode.roof_rate(128, 561, 63_970_000_000, 262144) < 128 * 68.3


def test_rates_of_all_engines_stand_side_by_side(tmp_path: Path, capsys) -> None:
    shape = gpu_decode.Shape(batches=(1, 8), lengths=(1, 11), transformers_batches=(1,), transformers_lengths=(1, 3))
    ours = {
        "weight_bytes": 4.37e10,
        "kv_bytes_per_token": 0,
        "decode": [
            {"batch": 1, "seconds": {"1": [1.0], "11": [1.125]}, "graph_seconds": 0.0125},
            {"batch": 8, "seconds": {"1": [1.0], "11": [1.5]}},
        ],
        "prefill_seconds": [9.0, 1.0],
    }
    others = {"decode": [{"batch": 1, "seconds": {"1": [1.0], "3": [1.5]}}], "prefill_seconds": [9.0, 2.0]}
    found = {"default": ours, "transformers": others, "invariant": {"error": "no"}}
    results = [*gpu_decode.decode_results(found, shape), gpu_decode.prefill_result(found, shape)]
    assert [row["values"] for row in results] == [
        {"holdfast": 80.0, "transformers": 4.0},
        {"holdfast": 160.0},
        {"holdfast": 8192.0, "transformers": 4096.0},
    ]
    assert results[0]["percent_of_roof"] == 80.0
    assert results[0]["graph_alone"] == {"holdfast": 80.0}
    gpu_decode.show(results)
    assert "decode, batch 8" in capsys.readouterr().out
    gpu_records.write_record(
        gpu_records.make_record("gpu-decode", results, "M", "s", arguments(tmp_path), {}), "d", arguments(tmp_path)
    )
    assert "| decode, batch 1 | 80 | 80 | 80 | 4 |" in doc_tables.section_tables(tmp_path, "gpu-decode")


def test_gpu_decode_tiny_engine_is_timed() -> None:
    shape = gpu_decode.TINY._replace(batches=(2,), num_repeats=1)
    found = json.loads(json.dumps(gpu_decode.run_holdfast("default", "Qwen3-32B", shape, True, "cpu")))
    ((row,), prefill) = gpu_decode.decode_results({"default": found}, shape), found["prefill_seconds"]
    assert row["seconds"].keys() == {"holdfast"}
    assert len(prefill) == 2
    embedding = gpu_engines.TINY["vocab_size"] * gpu_engines.TINY["hidden_size"] * 4
    assert embedding < found["weight_bytes"] < 4 * embedding, "the head is read, the embedding is not"


# --- steady


@given(st.integers(0, 7), st.integers(0, 8191), st.integers(0, 31))
def test_fingerprints_change_with_one_bit(row: int, column: int, bit: int) -> None:
    logits_RV = torch.linspace(-3, 3, 8 * 8192).view(8, 8192)
    before = gpu_insides.fingerprints(logits_RV)
    changed_RV = logits_RV.clone()
    changed_RV.view(torch.int32)[row, column] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    after = gpu_insides.fingerprints(changed_RV)
    assert [index for index in range(8) if before[index] != after[index]] == [row]


def test_fingerprints_are_of_bits_and_do_not_overflow() -> None:
    zeros = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [0.0, float("nan")]])
    assert len(set(gpu_insides.fingerprints(zeros))) == 3
    largest = torch.full((1, 2**19), -1, dtype=torch.int32).view(torch.float32)
    assert gpu_insides.fingerprints(largest)[0] > 2**60


class FakeEngine:
    """Answers every live request with one token a step, until it has all of them."""

    def __init__(self) -> None:
        self.live: dict[str, list] = {}
        self.sizes: list[int] = []

    def add_request(self, name: str, prompt: dict, params) -> str:
        assert prompt["prompt_token_ids"]
        self.live[name] = [params.max_tokens, params.seed]
        return name

    def abort(self, name: str) -> None:
        del self.live[name]

    def abort_all(self) -> None:
        self.live.clear()

    def raise_if_dead(self) -> None:
        return

    def step(self) -> list[SimpleNamespace]:
        self.sizes.append(len(self.live))
        deltas = []
        for name, entry in list(self.live.items()):
            entry[0] -= 1
            reason = "length" if entry[0] == 0 else None
            deltas.append(SimpleNamespace(request_id=name, token_ids=(entry[0],), finish_reason=reason, error=None))
            if reason:
                del self.live[name]
        return deltas


@given(st.integers(0, 2**16), st.integers(2, 12), st.integers(1, 12))
def test_traffic_changes_every_step_and_is_deterministic(seed: int, most: int, most_change: int) -> None:
    traffic = gpu_steady.Traffic([[1, 2], [3]], seed, most, most_change)
    engines = FakeEngine(), FakeEngine()
    traces = [traffic.drive(SimpleNamespace(engine=engine), 30) for engine in engines]
    sizes = engines[0].sizes
    assert len(sizes) == 30
    assert all(1 <= abs(one - other) <= most_change for one, other in pairwise(sizes))
    assert 1 <= min(sizes) <= max(sizes) <= most
    assert traces[0] == traces[1]
    assert all("first" in tokens for tokens in traces[0].tokens), "contexts grow"


def test_differences_are_counted() -> None:
    one = gpu_steady.Trace([{"a": (1,), "b": (2,)}, {"a": (3,)}], 0)
    other = gpu_steady.Trace([{"a": (1,), "b": (9,)}, {"c": (3,)}], 0)
    assert gpu_steady.different_tokens(one, one) == (3, 0)
    assert gpu_steady.different_tokens(one, other) == (4, 3)
    assert gpu_steady.different_rows([[1, 2], [3]], [[1, 2], [3]]) == (3, 0)
    assert gpu_steady.different_rows([[1, 2], [3]], [[1, 5], []]) == (3, 2)


@pytest.fixture(scope="module")
def tiny_steps() -> dict:
    shape = gpu_steady.TINY._replace(num_decode_steps=12, num_mixed_steps=8, num_compared_steps=6, num_poisoned_steps=6)
    return gpu_steady.run_mode("invariant", "Qwen3-0.6B", shape, True, "cpu")


def test_gpu_steady_tiny_engine_is_still_and_equal(tiny_steps: dict) -> None:
    assert all(row["holds"] for row in tiny_steps["phases"]), tiny_steps["phases"]
    assert all(row["holds"] for row in tiny_steps["comparisons"]), tiny_steps["comparisons"]
    first = tiny_steps["phases"][0]
    assert first["num_decode_steps"] == first["num_replays"] == first["num_batch_changes"] == 12
    assert any("replayed up to 255 tokens" in row["comparison"] for row in tiny_steps["comparisons"])


def test_gpu_steady_holds_if_the_host_runs_ahead(monkeypatch) -> None:
    begin = EngineCore.__init__

    def begin_ahead(core: EngineCore, *arguments, **settings) -> None:
        begin(core, *arguments, **{**settings, "run_ahead": 1})

    monkeypatch.setattr(EngineCore, "__init__", begin_ahead)
    shape = gpu_steady.TINY._replace(num_decode_steps=12, num_mixed_steps=8, num_compared_steps=6, num_poisoned_steps=6)
    found = gpu_steady.run_mode("default", "Qwen3-0.6B", shape, True, "cpu")
    assert found["phases"][0]["num_steps"] == 13
    assert all(row["holds"] for row in (*found["phases"], *found["comparisons"])), found


def test_stretches_and_comparisons_are_shown_and_recorded(tiny_steps: dict, tmp_path: Path, capsys) -> None:
    strict = {"phase": "decode, graphs, a wait raises", "error": "waited", "holds": False}
    found = {"default": {**tiny_steps, "phases": [*tiny_steps["phases"], strict]}}
    results = gpu_steady.rows_of(found)
    gpu_steady.show(results)
    assert "NaN in a page that is read" in capsys.readouterr().out
    record = gpu_records.make_record("gpu-steady", results, "M", "s", arguments(tmp_path), {})
    gpu_records.write_record(record, "steady", arguments(tmp_path))
    text = doc_tables.section_tables(tmp_path, "gpu-steady")
    assert "| as it is: decode, graphs | 12 |  | 0 |" in text
    assert "| as it is: decode, graphs, a wait raises |  |  | waited |" in text


def test_ears_notice_difference_between_graph_and_eager(tmp_path: Path) -> None:
    opened = gpu_engines.open_engine("Qwen3-0.6B", tmp_path, True, "cpu", max_model_len=64, max_num_seqs=2)
    ears = gpu_insides.Ears(opened)
    replay = ears.replay

    def wrong_replay(size: int, is_decode: bool) -> torch.Tensor:
        logits_RV = replay(size, is_decode).clone()
        logits_RV[0, 7] += 1e-3
        return logits_RV

    ears.replay = wrong_replay
    with ears.listening(compare=True) as heard:
        opened.llm.generate([{"prompt_token_ids": [1, 2, 3]}], gpu_steady.sampling(0, 4, 0), progress=False)
    assert (heard.num_compared, heard.num_mismatched) == (4, 4)


# --- attention


def test_scratch_does_not_grow_with_the_context() -> None:
    at_128k, at_1m = (gpu_attention.scratch_bytes(gpu_attention.FULL, length) for length in (2**17, 2**20))
    assert at_128k == at_1m < 100e6


def test_attention_is_checked_before_it_is_timed(device: torch.device) -> None:
    shape = gpu_attention.TINY._replace(mixed=((0, 1), (40, 1), (3, 20)))
    checked = gpu_attention.check(shape, device)
    assert checked["is_right"], checked
    assert len(checked["errors"]) == 4


def test_gpu_attention_check_rejects_wrong_kernel(device: torch.device, monkeypatch) -> None:
    exact = gpu_attention.exact_rows
    monkeypatch.setattr(gpu_attention, "exact_rows", lambda rig: exact(rig).mul_(1.1))
    checked = gpu_attention.check(gpu_attention.TINY._replace(mixed=((5, 1),)), device)
    assert not checked["is_right"]


def test_pages_of_a_rig_are_shuffled_and_apart() -> None:
    shape = gpu_attention.TINY._replace(dtype="float32")
    rig = gpu_attention.make_rig(shape, [(199, 1)] * 3, 2, torch.device("cpu"))
    pages = [page for sequence in rig.batch.sequences for page in sequence.tables[0]]
    assert sorted(pages) == list(range(39))
    assert pages != sorted(pages)
    assert rig.stored(1, "k", rig.batch.sequences[2]).shape == (200, 2, 16)


def test_verdicts_are_those_of_the_issue() -> None:
    def decode(name: str, percent: float, speed: float) -> dict:
        return {"measure": f"decode, {name}", "unit": "TB/s", "percent_of_roof": percent, "speed_against_sdpa": speed}

    prefill = {"measure": "prefill", "unit": "TFLOPS", "speed_against_sdpa": 0.71}
    rows = [decode("32 x 8192", 86, 1.2), decode("8 x 32768", 85, 1.0), decode("1 x 8192", 40, 0.92), prefill]
    assert list(gpu_attention.verdicts(rows).values()) == [True, True, True]
    rows = [decode("32 x 8192", 84, 1.2), decode("1 x 8192", 40, 0.90), {**prefill, "speed_against_sdpa": 0.69}]
    assert list(gpu_attention.verdicts(rows).values()) == [False, False, False]


# --- loads


MOE = "Qwen1.5-MoE-A2.7B"


def tiny_checkpoint(folder: Path, name: str = MOE, **settings):
    return checkpoints.write_checkpoint(folder, name, **{**dummy_models.tiny_settings(name), **settings})


def test_checkpoint_is_shuffled_over_files(tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path, num_files=3)
    files = sorted(made.path.glob("*.safetensors"))
    stored = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            names = list(opened.offset_keys())
            assert names != sorted(names)
            stored |= {name: opened.get_tensor(name) for name in names}
    assert len(files) == 3
    assert len(stored) == made.num_tensors
    assert sum(tensor.nbytes for tensor in stored.values()) == made.num_bytes
    assert {name.split(".")[5] for name in stored if ".mlp.experts." in name} == {str(expert) for expert in range(8)}
    matrix, norm = (stored[f"model.{name}.weight"].float() for name in ("layers.0.mlp.experts.7.up_proj", "norm"))
    assert matrix.std() == pytest.approx(0.02, rel=0.1)
    assert norm.mean() == pytest.approx(1.0, abs=0.1)
    assert not stored["model.layers.0.mlp.experts.6.up_proj.weight"].equal(matrix)
    assert checkpoints.read_seconds(made.path) > 0


def test_long_tensor_repeats_the_numbers(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoints, "BUFFER_VALUES", 1000)
    made = tiny_checkpoint(tmp_path, "Qwen3-8B", num_files=1)
    with safe_open(next(made.path.glob("*.safetensors")), "pt") as opened:
        values = opened.get_tensor("lm_head.weight").flatten().view(torch.int16)
    assert values[-1000:].equal(values[-2000:-1000])
    assert len(values.unique()) > 100


def test_headers_alone_take_no_disk_space(tmp_path: Path) -> None:
    whole, headers = (tiny_checkpoint(tmp_path / str(alone), headers_only=alone) for alone in (False, True))
    for one, other in zip(sorted(whole.path.glob("*")), sorted(headers.path.glob("*")), strict=True):
        assert (one.name, one.stat().st_size) == (other.name, other.stat().st_size)
    blocks = [sum(file.stat().st_blocks for file in made.path.glob("*.safetensors")) for made in (whole, headers)]
    assert blocks[1] < blocks[0] / 2


def test_writing_stops_when_the_time_is_over(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        tiny_checkpoint(tmp_path, stop_at=0.0)


def test_memory_that_comes_and_goes_is_seen() -> None:
    # Pages straight from the system: malloc could hand back some that a test before this one has left resident.
    block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with memory_watch.MemoryWatch("cpu", 0.001) as watch, block:
        for start in range(0, len(block), mmap.PAGESIZE):
            block[start] = 1
        time.sleep(0.05)
    assert 60 * MIB < watch.taken["RssAnon"] < 200 * MIB
    assert watch.num_looks > 3


@pytest.mark.parametrize(("scheme", "load_format"), [("fp8", "auto"), ("bfloat16", "auto"), ("mxfp4", "dummy")])
def test_load_case_measures_load(tmp_path: Path, scheme: str, load_format: str) -> None:
    made = tiny_checkpoint(tmp_path)
    headers = str(made.path) if load_format == "dummy" else None
    case = load_case.Case(MOE, scheme, str(made.path), load_format, headers, num_loads=2)
    found = json.loads(json.dumps(load_case.run_case(case, "cpu")))
    row = gpu_load.finding(case._asdict(), "M", found)
    assert row["read_bytes"] == row["source_bytes"] == made.num_bytes
    assert len(row["seconds"]) == 2
    assert row["predicted_final"] > made.num_bytes / 4
    assert (row["num_quantized"] == 0) == (scheme == "bfloat16")
    assert row["host"]["second load"]["RssAnon"] < 64 * MIB
    if headers is not None:
        assert all(row["same_plan"][name] for name in ("weights", "moves", "final bytes"))
        bare = load_case.planned_case(case._replace(scheme="bfloat16")).plan
        same = load_case.compare_plans(load_case.planned_case(case).plan, bare, "cpu")
        assert [name for name, is_same in same.items() if is_same] == ["staging bytes"]


def test_load_case_fingerprint_changes_with_one_byte() -> None:
    weights = {"a": torch.arange(300.0), "b": torch.ones(4, dtype=torch.bfloat16)}
    before = load_case.fingerprint(weights)
    assert load_case.fingerprint({name: tensor.clone() for name, tensor in weights.items()}) == before
    weights["a"].view(torch.uint8)[77] ^= 1
    assert load_case.fingerprint(weights) != before


def load_arguments(tmp_path: Path, *more: str):
    given = gpu_load.parse(["--tiny", "--device", "cpu", "--out", str(tmp_path / "records"), *more])
    given.commit = "c"
    return given


def test_gpu_load_records_every_kind_of_load(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv(load_case.CACHE_VARIABLE, "")  # put back afterwards
    models = ["--models", f"{MOE},Qwen3-8B", "--cache-model", MOE, "--max-bytes", "450000", "--schemes", "fp8,bfloat16"]
    given = load_arguments(tmp_path, *models)

    def run_case(case, seconds: float) -> dict:
        return json.loads(json.dumps(load_case.run_case(load_case.Case(**{"num_loads": 2, **case}), "cpu")))

    run = gpu_load.Run(given, gpu_records.Budget(1000.0), run_case)
    run.all(tmp_path)
    assert [row["measure"] for row in run.results] == [
        "Qwen3-32B, fp8, dummy weights",
        "Qwen3-8B, fp8",
        "Qwen3-8B, bfloat16",
        f"{MOE}, fp8, dummy weights",
        f"{MOE}, bfloat16, dummy weights",
    ]
    assert "were allowed" in run.checkpoints[MOE]["not_written"]
    assert run.checkpoints["Qwen3-8B"]["num_files"] == 4
    given.max_bytes, given.models, given.dummy = float("inf"), (MOE,), ""
    run.all(tmp_path)
    gpu_load.show(run.results)
    last = run.results[-1]
    assert last["measure"] == f"{MOE}, fp8, from the cache"
    assert last["verdicts"]["the same weights from the cache"]
    assert 0.5 < last["read_share"] < 0.9, "the embedding is a large part of so small a model"
    (record,) = (tmp_path / "records").glob("*-load.json")
    assert [row["measure"] for row in doc_tables.read_record(record)["results"]][-1] == last["measure"]
    assert list(tmp_path.glob("*/*.safetensors")) == [], "what was written is gone"
    assert "from the cache: cache bytes <= 0.6 x" in capsys.readouterr().out


def test_load_without_time_is_skipped_and_a_failed_one_kept(tmp_path: Path, capsys) -> None:
    given = load_arguments(tmp_path, "--models", "Qwen3-8B", "--dummy", "")
    late = gpu_load.Run(given, gpu_records.Budget(1.0), lambda case, seconds: {})
    late.all(tmp_path)
    assert (late.results, late.left_out) == ([], ["Qwen3-8B"])
    failed = gpu_load.Run(given, gpu_records.Budget(1000.0), lambda case, seconds: {"error": "no room"})
    failed.all(tmp_path)
    assert [row["error"] for row in failed.results] == ["no room"] * 3
    gpu_load.show(failed.results)
    assert "Qwen3-8B, fp8, from the cache: no room" in capsys.readouterr().out


def test_gpu_load_no_room_refuses_oversized_checkpoint(tmp_path: Path) -> None:
    assert gpu_load.no_room(tmp_path, 10**6, float("inf")) is None
    assert "1.0 were allowed" in gpu_load.no_room(tmp_path, 2 * 10**9, 1e9)
    assert "the disk has" in gpu_load.no_room(tmp_path, 10**18, float("inf"))


def device_load(over: int = 32 * MIB, seconds: float = 1.0, host: int = 200 * MIB) -> dict:
    final = dict.fromkeys(("allocated", "reserved", "used"), 1000 * MIB)
    return {
        "seconds": seconds,
        "plan_seconds": 0.1,
        **dict.fromkeys(("read_bytes", "source_bytes"), 30 * 10**9),
        **dict.fromkeys(("num_weights", "num_quantized", "num_moves", "num_readers", "predicted_host"), 1),
        **{f"{part}_seconds": seconds / 2 for part in ("read", "copy", "place")},
        "predicted_final": 1000 * MIB,
        "predicted_peak": 1032 * MIB,
        "pinned_bytes": 192 * MIB,
        "final": final,
        "peak": {name: num + over for name, num in final.items()},
        "left": dict.fromkeys(final, 0),
        "host": {"RssAnon": host},
        "host_with_plan": host,
        "host_left": 0,
    }


def test_verdicts_on_loads_are_those_of_the_issue() -> None:
    case = {"model": "M", "scheme": "fp8", "load_format": "auto"}
    unwatched = {name: value for name, value in device_load(seconds=0.75).items() if name != "host"}
    row = gpu_load.finding(case, "M", {"loads": [device_load(host=999 * MIB), device_load(), unwatched]})
    assert row["values"] == {"holdfast": 40.0}
    assert row["gb_per_second_of_each"] == dict.fromkeys(("read", "copy", "place"), 80.0)
    assert len(gpu_load.verdicts(row)) == 6
    assert all(gpu_load.verdicts(row).values())
    row = gpu_load.finding(case, "M", {"loads": [device_load(), device_load(65 * MIB, 1.3, 257 * MIB)]})
    assert [holds for words, holds in gpu_load.verdicts(row).items() if "GB/s" not in words] == [False] * 5
    row = gpu_load.finding(case, "M", {"loads": [device_load(seconds=1.3)]})
    assert not gpu_load.verdicts(row)[">= 25 GB/s"]
    dummy = gpu_load.finding({**case, "load_format": "dummy"}, "M", {"loads": [device_load(seconds=1.3)]})
    assert ">= 25 GB/s" not in gpu_load.verdicts(dummy)


# --- quantized weights


def test_step_weights_exclude_embedding_and_unused_experts() -> None:
    sizes = {"embed.weight": 100, "layers.0.qkv.weight": 7, "layers.0.experts.down.weight": 80, "lm_head.weight": 50}
    step = gpu_quantized.step_weights(sizes, False, 8, 2)
    assert step == gpu_quantized.StepBytes(57, 10, 8, 2)
    assert step.of(2.5) == 82
    assert gpu_quantized.step_weights({"embed.weight": 100}, True, 0, 0).of(0.0) == 100


def test_schemes_stand_side_by_side_with_their_roofs(tmp_path: Path, capsys) -> None:
    shape = gpu_quantized.Shape(lengths=(1, 11))

    def engine(seconds: float, dense: int) -> dict:
        entry = {"batch": 1, "seconds": {"1": [1.0], "11": [1.0 + seconds]}, "graph_seconds": seconds / 20}
        step = {"dense": dense, "expert": dense // 4, "num_experts": 16, "top_k": 4}
        distinct = {"batch": 1, "measured": 0.0, "uniform": 4.0}
        return {
            "decode": [{**entry, "distinct_experts": distinct}],
            "step_bytes": step,
            "kv_bytes_per_token": 0,
        }

    found = {
        ("Qwen3-32B", "fp8"): engine(0.1, int(4.37e9)),
        ("Qwen3-32B", "none"): engine(0.2, int(8.74e9)),
        ("Qwen3-8B", "fp8"): {"error": "no room"},
    }
    (row,) = gpu_quantized.rows_of(found, shape, "cuda")
    assert row["values"] == {"fp8": 100.0, "bfloat16": 50.0}
    assert row["milliseconds"] == {"fp8": 10.0, "bfloat16": 20.0}
    assert row["roof"] == {"fp8": 1000.0, "bfloat16": 500.0}, "of the experts that were counted: none"
    assert row["percent_of_roof"] == {"fp8": 10.0, "bfloat16": 10.0}
    assert row["distinct_experts"]["fp8"] == {"batch": 1, "measured": 0.0, "uniform": 4.0}
    assert row["graph_alone"] == {"fp8": 200.0, "bfloat16": 100.0}
    assert row["against_unquantized"] == {"fp8": 2.0}
    assert row["verdicts"] == {"fp8 >= 105 tokens/s": False}
    gpu_quantized.show([row])
    shown = capsys.readouterr().out
    assert "NO   Qwen3-32B, batch 1: fp8 >= 105 tokens/s" in shown
    assert "0.0, uniform 4.0" in shown
    gpu_quantized.write(found, shape, arguments(tmp_path))
    (path,) = tmp_path.glob("*-quantized.json")
    assert doc_tables.read_record(path)["engines"]["Qwen3-8B, fp8"] == {"error": "no room"}


@pytest.mark.parametrize(("model", "quantization"), [("Qwen3-32B", "fp8"), (MOE, "fp8"), (MOE, "none")])
def test_tiny_quantized_engine_is_timed(model: str, quantization: str) -> None:
    _, shape = gpu_quantized.parse(["--tiny", "--batches", "2"])
    found = json.loads(json.dumps(gpu_quantized.run_engine(model, quantization, shape, True, "cpu")))
    (row,) = gpu_quantized.rows_of({(model, quantization): found}, shape, "cpu")
    (engine,) = row["values"]
    assert engine == (quantization if quantization != "none" else "float32")
    embedding = dummy_models.TINY["vocab_size"] * dummy_models.TINY["hidden_size"] * 4
    step = gpu_quantized.StepBytes(**found["step_bytes"])
    read = step.of(step.num_experts)
    assert found["weight_bytes"] - embedding - 20_000 < read <= found["weight_bytes"] - embedding, "padding aside"
    if model == MOE:
        distinct = found["decode"][0]["distinct_experts"]
        assert 2.0 <= distinct["measured"] <= 4.0
        assert (distinct["batch"], distinct["uniform"]) == (2, 3.5)
        assert row["distinct_experts"][engine] == distinct
        assert (step.num_experts, step.top_k) == (8, 2)
    else:
        assert "distinct_experts" not in found["decode"][0]
        assert "distinct_experts" not in row


def test_gpu_quantized_model_without_batches_needs_some(capsys) -> None:
    with pytest.raises(SystemExit):
        gpu_quantized.parse(["--models", "Qwen3-4B"])
    assert "Qwen3-4B: no batches are known" in capsys.readouterr().err
    assert gpu_quantized.parse(["--models", "Qwen3-4B", "--batches", "1,8"])[1].batches == (1, 8)


# --- the README


def test_sections_are_written_where_the_document_has_their_marks(tmp_path: Path) -> None:
    plain = {"date": "2026-01-31", "machine": "m", "model": "A", "settings": "s"}
    result = {"measure": "decode, batch 1", "unit": "tokens/s", "values": {"holdfast": 62.5}}
    (tmp_path / "a.json").write_text(json.dumps({**plain, "results": [result]}))
    (tmp_path / "b.json").write_text(json.dumps({**plain, "model": "B", "section": "gpu-decode", "results": [result]}))
    begin, end = doc_tables.section_marks("gpu-decode")
    document = f"{doc_tables.BEGIN}\n{doc_tables.END}\n{begin}\nstale\n{end}\n"
    written = doc_tables.written(document, tmp_path)
    general, _, section = written.partition(begin)
    assert "A, s, on m" in general
    assert "B, s, on m" not in general
    assert "B, s, on m" in section
    assert "| decode, batch 1 | 62.5 |" in section
    assert "stale" not in written
    assert doc_tables.written(written, tmp_path) == written
    without = f"{doc_tables.BEGIN}\n{doc_tables.END}\n"
    assert "B, s, on m" not in doc_tables.written(without, tmp_path)


@pytest.mark.parametrize("section", sorted(doc_tables.SECTIONS))
def test_section_tables_without_records_say_so(tmp_path: Path, section: str) -> None:
    assert doc_tables.section_tables(tmp_path, section) == "No record is committed yet."


def test_sampling_of_traffic_follows_from_numbers_alone() -> None:
    numbers = random.Random(0).sample(range(1000), 20)
    assert [gpu_steady.sampling(n, 5, 1) for n in numbers] == [gpu_steady.sampling(n, 5, 1) for n in numbers]


# --- models with windows on a GPU


def test_gpu_groups_roof_rate_counts_windows_and_experts() -> None:
    read = {"weight_bytes": 100, "num_experts": 0, "top_k": 0, "expert_bytes": 0, "kv_layers": [(1, None), (1, 10)]}
    rate = gpu_decode.READ_BYTES_PER_SECOND
    assert gpu_groups.roof_rate(1, 50, read) == pytest.approx(rate / (100 + 50 + 10))
    assert gpu_groups.roof_rate(4, 5, read) == pytest.approx(4 * rate / (100 + 4 * 10))
    experts = read | {"num_experts": 4, "top_k": 1, "expert_bytes": 80}
    assert gpu_groups.roof_rate(1, 0, experts, 1.0) == pytest.approx(rate / (20 + 20))
    assert gpu_groups.roof_rate(2, 0, experts, 1.5) == pytest.approx(2 * rate / (20 + 30))


def test_gpu_groups_tiny_engine_with_windows_is_watched(tmp_path: Path) -> None:
    case = gpu_groups.TINY_CASES["mistral-7b"]
    found = json.loads(json.dumps(gpu_groups.run_case(case, True, "cpu")))
    rows = {row["measure"]: row for row in gpu_groups.rows_of(case, found)}
    assert rows["Mistral-7B-v0.1, decode, batch 1"]["values"]["holdfast"] > 0
    assert rows["Mistral-7B-v0.1, sequences of 120"]["most_running"] == 3
    assert rows["Mistral-7B-v0.1, after ready"]["values"]["num_compilations"] == 0
    assert gpu_groups.rows_of(case, {"error": "no"})[0]["error"] == "no"


# --- pages of windows


def test_window_pages_run_more_sequences_on_same_pages() -> None:
    traffic = window_pages.Traffic(num_requests=6, prompt_tokens=60, output_tokens=20)
    limits = Limits(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=80, page_tokens=4)
    groups = CacheGroup("whole context", 4), CacheGroup("window of 9", 4, window=9)
    before, after = (window_pages.drive(limits, (group,), 40, traffic, every=10) for group in groups)
    assert (before.most_running, after.most_running) == (2, 6)
    assert after.num_steps < before.num_steps
    assert (after.in_prompt, after.in_decode) == ([groups[1].most_held(16)], [3])
    assert max(point["pages"]["window of 9"] for point in after.points) <= 40


def test_window_pages_plan_has_window_and_budget() -> None:
    plan = window_pages.make_plan("fp8", window_pages.Traffic())
    assert [group.window for group in plan.cache.cache_groups()] == [4096]
    assert plan.memory.budget_bytes < 24 * 2**30


# --- before and after


def test_rate_of_is_difference_of_medians() -> None:
    seconds = {"17": [1.0, 9.0, 1.1], "217": [3.1, 3.0, 0.1]}
    assert gpu_before_after.rate_of(4, seconds) == pytest.approx(4 * 200 / 1.9)


def test_rows_of_a_batch_that_one_tree_ran_are_left_out() -> None:
    case = gpu_before_after.ENGINES["32b-bf16"]
    one, four = ({"batch": batch, "seconds": {"1": [1.0], "11": [1.5]}} for batch in (1, 4))
    (row,) = gpu_before_after.rows_of(case, {"old": {"decode": [one]}, "new": {"decode": [one, four]}}, 100)
    assert (row["measure"], row["ratio"]) == ("Qwen3-32B, bfloat16, batch 1", 1.0)
    assert gpu_before_after.rows_of(case, {"old": {"error": "no room"}, "new": {"decode": [one]}}, 100) == []


def test_rows_of_prefill_compare_the_medians() -> None:
    case = gpu_before_after.ENGINES["32b-bf16"]
    found = {"old": {"prefill_seconds": [9.0, 2.0, 1.0]}, "new": {"prefill_seconds": [1.0, 1.0, 5.0]}}
    (row,) = gpu_before_after.rows_of(case, found, 100)
    assert row["measure"] == "Qwen3-32B, bfloat16, prefill of 100 tokens"
    assert (row["values"], row["ratio"]) == ({"old": 50.0, "new": 100.0}, 2.0)


@pytest.mark.slow
def test_gpu_before_after_runs_tree_by_public_names(tmp_path: Path, capsys) -> None:
    case, shape = gpu_before_after.ENGINES["30b-a3b-fp8"], gpu_before_after.TINY
    task = gpu_before_after.task_of(case, tmp_path, shape, True, "cpu")
    found = gpu_before_after.run_case(task, ROOT, 300)
    assert [entry["batch"] for entry in found["decode"]] == [1, 3]
    assert [entry["distinct_experts"]["uniform"] for entry in found["decode"]] == [2.0, 4.62]
    rows = gpu_before_after.rows_of(case, {"old": found, "new": found}, shape.prefill_tokens)
    gpu_before_after.show(rows)
    assert "Qwen3-30B-A3B, fp8, batch 3" in capsys.readouterr().out
    record = gpu_records.make_record("gpu-before-after", rows, "M", "s", arguments(tmp_path), {})
    kept = doc_tables.read_record(gpu_records.write_record(record, "before-after", arguments(tmp_path)))
    assert [row["values"].keys() for row in kept["results"]] == [{"old", "new"}] * 3


@pytest.mark.parametrize(
    "argv",
    [[], ["--tree", "."], ["--tree", str(ROOT)] * 3, ["--tree", str(ROOT), "--tree", "/nowhere"]],
)
def test_gpu_before_after_needs_two_trees(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_before_after.parse(argv)


# --- proposals


@pytest.mark.slow
def test_proposals_are_measured_beside_none(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", max_position_embeddings=1024)
    options = arguments(tmp_path, model=str(model), speculative="ngram:2", rounds=1)
    task = ngram.Task("repeat", "abababab", 24)
    results = ngram.run_all(options, (task,), [1, 2])
    assert [result["measure"] for result in results] == ["repeat, batch 1", "repeat, batch 2"]
    for result in results:
        assert result["identical"]
        assert result["first_differences"] == []
        assert result["values"]["plain"] > 0
        assert 0 <= result["accepted"] <= result["proposed"]
    record = gpu_records.make_record("ngram", results, "M", "s", options, {})
    gpu_records.write_record(record, "ngram", options)
    table = doc_tables.section_tables(tmp_path, "ngram")
    assert "| repeat, batch 1 |" in table
    assert "| yes |" in table


def test_first_difference_is_printed_with_its_logit_gap() -> None:
    plain = ngram.Run([[1, 2, 3], [4, 5]], [[0.5, 0.001, 0.2], [1.0, 1.0]], 1.0, 0, 0)
    other = plain._replace(token_ids=[[1, 9, 9], [4, 5]])
    assert ngram.first_differences(plain, other) == [{"answer": 0, "token": 1, "gap of logits": 0.001}]
    assert ngram.first_differences(plain, plain) == []
    differing = {"identical": False, "first_differences": ngram.first_differences(plain, other)}
    assert doc_tables.SECTIONS["ngram"]["same tokens"](differing) == "until token 1 (gap 0.001)"


# --- structured outputs


@pytest.mark.slow
def test_masks_are_measured_beside_none(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", max_position_embeddings=1024)
    options = arguments(tmp_path, model=str(model), batch=2, rounds=1, steps=4, tiny=True)
    results = structured.run_all(options)
    assert [result["measure"] for result in results][:2] == [
        "json schema, greedy, batch 2",
        "json schema, random, batch 2",
    ]
    for result in results:
        assert 0 < result["values"]["masks"] < result["values"]["structured"]
        assert result["steps"] == [4]
    record = gpu_records.make_record("structured", results, "M", "s", options, {})
    gpu_records.write_record(record, "structured", options)
    assert "| json schema, greedy, batch 2 |" in doc_tables.section_tables(tmp_path, "structured")


def test_differing_rows_are_printed_as_ranges() -> None:
    rows = [16, 17, 18, 19, 20, 64, 128]
    assert list(gpu_invariance.ranges([17, 18, 20, 64], rows)) == ["17 to 18", "20 to 64"]
    assert list(gpu_invariance.ranges([], rows)) == []
    assert list(gpu_invariance.ranges([128], rows)) == ["128"]
    whole, halves = (gpu_invariance.products_of("Qwen3-32B", size) for size in (1, 2))
    assert [(product.size_n, product.size_k) for product in whole if product.is_head] == [(151936, 5120)]
    assert all(product.size_n == product.all_n for product in whole)
    assert len(halves) == len(whole) == 5
    assert {product.size_n / product.all_n for product in halves} == {0.5}
