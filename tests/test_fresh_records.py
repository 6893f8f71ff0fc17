"""The renewal of records on one GPU: what is compiled first, what runs, and what is left out when the time is short."""

import json
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.models.catalogue import CATALOGUE
from holdfast.quant.formats import KV_FORMATS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
dummy_models = import_module("dummy_models")
gpu_fresh = import_module("gpu_fresh")
gpu_groups = import_module("gpu_groups")
gpu_latent = import_module("gpu_latent")
gpu_memory = import_module("gpu_memory")
gpu_records = import_module("gpu_records")


def test_gpu_fresh_tiny_run_writes_record_and_lists_rest(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setenv(gpu_records.COMMIT_VARIABLE, "")
    command = ["gpu_fresh.py", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]
    monkeypatch.setattr("sys.argv", command)
    gpu_fresh.main()
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert (record["section"], record["commit"]) == ("gpu-quantized", "abc")
    assert record["engine_settings"]["Qwen3-32B, float32"]["options"]["max_num_seqs"] == 3
    printed = capfd.readouterr().out
    assert "compiled the kernels of 1 engines" in printed
    assert "left out: late: python benchmarks/gpu_decode.py --only default" in printed


def test_gpu_fresh_run_parts_skips_what_is_too_long(tmp_path: Path, monkeypatch) -> None:
    seconds, ran = [0.0], []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        ran.append((Path(command[1]).name, command[-1]))
        seconds[0] += 30.0
        return SimpleNamespace(returncode=int("fails.py" in command[1]))

    monkeypatch.setattr(gpu_fresh.subprocess, "run", run)
    parts = [
        gpu_fresh.Part(name, f"{name}.py", 20, least) for name, least in (("fails", 5), ("long", 99), ("short", 60))
    ]
    arguments = SimpleNamespace(device="cpu", out=tmp_path, tiny=False)
    left_out = gpu_fresh.run_parts(parts, arguments, gpu_records.Budget(100.0, lambda: seconds[0]))
    assert ran == [("fails.py", "36"), ("short.py", "36")]
    assert [part.name for part in left_out] == ["fails", "long"]


def test_gpu_fresh_rehearsal_reports_failed_engine(tmp_path: Path, capsys) -> None:
    part = gpu_fresh.Part("p", "gpu_quantized.py --models Qwen3-32B", 9, 9, ("No-Model,none",))
    arguments = SimpleNamespace(device="cpu", out=tmp_path, tiny=True)
    assert gpu_fresh.rehearse([part], arguments, 60.0) == 0
    assert "the kernels of p, No-Model,none are not all compiled: 1: " in capsys.readouterr().out


def test_gpu_fresh_parts_name_existing_cases() -> None:
    options = {part.name: shlex.split(part.command) for part in gpu_fresh.PARTS}

    def value(name: str, option: str) -> list[str]:
        words = options[name]
        return words[words.index(option) + 1].split(",")

    assert set(value("V4", "--cases")) <= gpu_latent.CASES.keys()
    assert set(value("gpt-oss", "--cases")) <= gpu_groups.CASES.keys()
    assert set(value("KV formats", "--formats")) == KV_FORMATS.keys() - {"float32", "float16"}
    cases = [gpu_memory.CASES[int(number)] for number in value("memory", "--cases")]
    assert sum(case.kv_cache_dtype.startswith("turboquant") for case in cases) == 4
    assert all((ROOT / "benchmarks" / words[0]).is_file() for words in options.values())
    assert sum(part.least_seconds for part in gpu_fresh.PARTS[:7]) < 400


@pytest.mark.parametrize(("name", "num_layers"), [("Qwen3-32B", 2), ("gpt-oss-20b", 2), ("DeepSeek-V4-Flash", 4)])
def test_few_layers_keep_every_kind_of_layer(name: str, num_layers: int) -> None:
    config: dict[str, Any] = dict(CATALOGUE[name])
    few = dummy_models.few_layers(config)
    assert few.pop("num_hidden_layers") == num_layers
    assert all(set(layers) == set(config[key]) for key, layers in few.items())
    assert all(len(value) <= num_layers for value in few.values())
