"""`holdfast plan --list`, and the document with the same tables."""

import json
from math import prod
from pathlib import Path

import pytest

from cli.cli_models import Here
from holdfast.cli.plan_names import ModelRow, billions, model_rows
from holdfast.loading.declared import open_declared
from holdfast.memory.devices import GPUS
from holdfast.models.catalogue import CATALOGUE
from model_tables import DOCUMENT, written


@pytest.fixture(scope="module")
def rows() -> tuple[ModelRow, ...]:
    """Every model of the catalogue, counted once."""
    return model_rows()


@pytest.fixture
def counted(rows: tuple[ModelRow, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists take the rows that were counted already."""
    for module in ("holdfast.cli.plan_names", "model_tables"):
        monkeypatch.setattr(f"{module}.model_rows", lambda: rows)


@pytest.mark.usefixtures("counted")
def test_plan_list_fits_80_columns(here: Here) -> None:
    ended = here("plan", "--list")
    assert ended.code == 0, ended
    lines = ended.out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in CATALOGUE:
        assert any(line.startswith(f"{name} ") for line in lines), name
    for key, gpu in GPUS.items():
        (line,) = (line for line in lines if line.startswith(f"{key} "))
        assert line.endswith("too old to run") == gpu.is_too_old
    (planned,) = (line for line in lines if line.startswith("phi-4 "))
    assert planned.startswith("phi-4 *")


@pytest.mark.usefixtures("counted")
def test_plan_list_json_has_models_and_gpus(here: Here) -> None:
    record = json.loads(here("plan", "--list", "--json").out)
    models = {row["name"]: row for row in record["models"]}
    assert models.keys() == CATALOGUE.keys()
    assert models["Llama-3.1-8B"]["parameters"] == 8_030_261_248
    assert models["phi-4"]["runs"] is False
    assert [gpu["key"] for gpu in record["gpus"] if not gpu["runs"]] == [key for key in GPUS if GPUS[key].is_too_old]


@pytest.mark.usefixtures("counted")
def test_model_document_matches_code_tables() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == written(text), "run: python scripts/model_tables.py"


def test_billions_rounds_parameter_counts(rows: tuple[ModelRow, ...]) -> None:
    assert [billions(count) for count in (134_515_008, 999_885_952, 8_030_261_248)] == ["135M", "1.0B", "8.0B"]
    assert [row.name for row in rows] == list(CATALOGUE)


@pytest.mark.parametrize(
    "name", ["Qwen3-30B-A3B", "OPT-125m", "Qwen2.5-7B-Instruct", "DeepSeek-V2-Lite", "gpt-oss-20b", "GLM-5.2"]
)
def test_sizes_are_those_of_all_layers(name: str, rows: tuple[ModelRow, ...]) -> None:
    """A list counts a layer and takes it as often as there are layers; here every tensor is counted."""
    declared = open_declared(name)
    (row,) = (row for row in rows if row.name == declared.name)
    assert row.parameters == sum(prod(weight.shape) for weight in declared.parameters() if weight.group != "mtp")
    assert row.weight_bytes == declared.weight_bytes(declared.checkpoint_dtype)


def test_plan_ambiguous_name_prints_assumption(here: Here) -> None:
    out = here("plan", "Qwen/Qwen3-8B-FP8", "--gpu", "a100").out
    assert "--gpu 'a100' is taken as a100-80g, with 80 GB; there is a100-40g too" in " ".join(out.split())
    assert "Qwen3-8B is planned with weights in bfloat16, not FP8: add --quantization fp8" in " ".join(out.split())
    plain = here("plan", "Qwen3-8B", "--gpu", "4090").out
    assert "is taken as" not in plain
    assert "is planned with" not in plain


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("Qwen/Qwen3-8B-GGUF:Q4_K_ZZ",), "tag Q4_K_ZZ was not checked"),
        (("Qwen/Qwen3-8B:FOO",), "tag FOO was not checked"),
        (("Qwen/Qwen3-8B@v9",), "revision v9 was not checked"),
        (("Qwen3-8B", "--revision", "v9"), "revision v9 was not checked"),
        (("Qwen/Qwen3-8B-GGUF:Q4_K_ZZ", "--revision", "v9"), "tag Q4_K_ZZ and revision v9 were not checked"),
        (("Qwen/Qwen3-8B-GGUF/q.gguf",), "file q.gguf was not checked"),
    ],
)
def test_tag_or_revision_that_was_not_checked_has_a_note(
    here: Here, typed: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    words = f"Qwen3-8B is planned with weights in bfloat16, from the catalogue's figures; {words}: pass the file or"
    if len(typed) == 1:
        assert words in " ".join(here("plan", *typed, "--gpu", "4090").out.split())
    (note,) = json.loads(here("plan", *typed, "--gpu", "4090", "--json").out)["notes"]
    assert note.startswith(words)


@pytest.mark.parametrize(
    ("typed", "start", "words"),
    [
        (
            "Qwen/Qwen3-8B-GGUF:Q4_K_M",
            "",
            "Q4_K_M, as llama.cpp mixes it, from the catalogue's figures; tag Q4_K_M was not",
        ),
        ("Qwen/Qwen3-8B-AWQ", "", "AWQ, with the usual settings, from the catalogue's figures: pass the file"),
        ("qwen3-8b:q8_0", "path/to/Qwen3-8B-Q8_0", "Q8_0, as llama.cpp mixes it, from the catalogue's figures: pass"),
    ],
)
def test_plan_release_by_name_is_packed_and_keeps_its_name(here: Here, typed: str, start: str, words: str) -> None:
    """The printed command opens what was planned, not the plain model."""
    options = ("--gpu", "4090", "--packed-weights", "as_stored", "--json")
    record = json.loads(here("plan", typed, *options).out)
    assert any(f"planned with weights in {words}" in note for note in record["notes"]), record["notes"]
    assert record["best_command"].startswith(f"holdfast serve {start or typed} ")
    assert ": weights in " + words.partition(",")[0] in " ".join(here("plan", typed, *options[:-1]).out.split())
    weights = sum(term["bytes"] for term in record["terms"] if term["owner"].startswith("weights"))
    assert weights < 10e9


def test_plan_cached_revision_has_no_note(here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo, commit = tmp_path / "models--Qwen--Qwen3-8B", "a" * 40
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "snapshots" / commit / "config.json").write_text(json.dumps(dict(CATALOGUE["Qwen3-8B"])))
    (repo / "refs").mkdir()
    (repo / "refs" / "v9").write_text(commit)
    assert json.loads(here("plan", "Qwen/Qwen3-8B@v9", "--gpu", "4090", "--json").out)["notes"] == []


def test_plan_gpu_count_prefix_sets_tensor_parallel_size(here: Here) -> None:
    record = json.loads(here("plan", "Qwen3-32B", "--gpu", "2x4090", "--json").out)
    assert record == json.loads(here("plan", "Qwen3-32B", "--gpu", "rtx4090", "-tp", "2", "--json").out)


def test_parts_that_are_not_loaded_are_named(here: Here) -> None:
    (note,) = json.loads(here("plan", "gemma-3-4b-it", "--gpu", "4090", "--json").out)["notes"]
    assert note == "the text model alone is planned and run: weights for images are left unread"
    assert json.loads(here("plan", "gemma-3-1b-it", "--gpu", "4090", "--json").out)["notes"] == []
    (note,) = json.loads(here("plan", "GLM-4.7-Flash", "--gpu", "h200", "--json").out)["notes"]
    assert note == "layers that draft tokens (multi-token prediction: 1) are neither planned nor loaded"
    assert json.loads(here("plan", "DeepSeek-V2-Lite", "--gpu", "h200", "--json").out)["notes"] == []


def test_plan_of_a_config_file_prints_commands_with_it(here: Here, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dict(CATALOGUE["Qwen3.5-35B-A3B"])))
    record = json.loads(here("plan", "Qwen4-35B-A3B", "--config", str(file), "--gpu", "4090", "--json").out)
    known = json.loads(here("plan", "Qwen3.5-35B-A3B", "--gpu", "4090", "--json").out)
    assert record["model"] == "Qwen4-35B-A3B"
    assert (record["short_bytes"], record["notes"]) == (known["short_bytes"], known["notes"])
    commands = [way["command"] for way in record["alternatives"] if way["command"]]
    assert commands
    assert all(f"Qwen4-35B-A3B --config {file}" in command for command in commands)


def test_plan_of_parameters_is_marked_as_an_estimate(here: Here) -> None:
    record = json.loads(here("plan", "Qwen4-32B", "--parameters", "32B", "--gpu", "h200", "--json").out)
    assert record["model"] == "Qwen4-32B (estimate)"
    assert record["verdict"].startswith("CANNOT START: an estimate has no weights; ")
    assert record["notes"][0].startswith("this is an estimate: 32,000,000,000 parameters are counted exactly")
    assert "an estimate of 32B parameters is not a model" in str(record["not_in_this_version"])
    assert any("--parameters 32B" in way["command"] for way in record["alternatives"] if way["command"])


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("--parameters", "32"), "--parameters"),
        (("Qwen3-32B", "--parameters", "32B"), "cli.model_is_known"),
        (("--parameters", "3B", "--config", "x.json"), "exclude each other"),
        (("--config", "no/such.json"), "No such file"),
        (("Qwen4-32B",), "--parameters 32B"),
        (("foo/Qwen4-32B",), "--parameters 32B"),
    ],
)
def test_plan_of_a_model_by_other_means_refuses(here: Here, typed: tuple[str, ...], words: str) -> None:
    ended = here("plan", *typed, "--gpu", "4090")
    assert ended.code in (1, 2)
    assert ended.out == ""
    assert ended.refuses(words), ended


def test_plan_for_a_laptop_prints_commands_for_it(here: Here) -> None:
    record = json.loads(here("plan", "Qwen3-8B", "--gpu", "4090m", "--json").out)
    assert record["target"] == json.loads(here("plan", "Qwen3-8B", "--gpu", "rtx4090-laptop", "--json").out)["target"]
    commands = [way["command"] for way in record["alternatives"] if way["command"] and "--gpu" in way["command"]]
    assert any("--gpu rtx4090-laptop" in command for command in commands)
