"""Releases by name and by settings: their packed weights are those of files that were written, to the byte."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.cli_models import make_model
from for_each import for_each
from holdfast.loading.declared import declare_file, open_declared
from holdfast.loading.release import as_mixed, as_named
from holdfast.loading.release_names import RELEASES, Release, find_release
from holdfast.loading.writing.gguf_plan import MIXES
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.spec import ModelSpec
from holdfast.quant.weight_schemes import EXPANDED, PackedPolicy, WeightRecipe
from loading.packed.packed_models import MODELS, MOE, make_packed
from loading.state_files import write_state_file
from loading.test_convert import WIDE, quantized
from models.tiny_states import save_state_model

POLICIES = (EXPANDED, PackedPolicy("all", "cpu"), PackedPolicy("with_kernel", "cpu"), PackedPolicy("all", "cuda"))
EIGHT_LAYERS = WIDE | {"num_hidden_layers": 8, "intermediate_size": 512}
FOLDERS: dict[str, dict[str, Any]] = {
    "llama": EIGHT_LAYERS,
    "tied, rows of 96": EIGHT_LAYERS | {"tie_word_embeddings": True, "hidden_size": 96, "num_attention_heads": 4},
    "qwen2": WIDE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "experts": WIDE | MOE | {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 3},
}
STATES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def assert_equal_weights(named: DeclaredModel, stored: DeclaredModel) -> None:
    """Equal schemes of every part, and equal bytes in memory, whatever stays packed."""
    assert named.packed == stored.packed
    for policy in POLICIES:
        recipe = WeightRecipe(packed=policy)
        for dtype in ("bfloat16", "float32"):
            assert named.group_bytes(dtype, recipe) == stored.group_bytes(dtype, recipe), f"{policy} in {dtype}"


@pytest.mark.parametrize("target", MIXES)
@pytest.mark.parametrize("name", FOLDERS)
def test_as_mixed_equals_the_file_that_quantize_writes(name: str, target: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "m", **FOLDERS[name])
    quantized(source, tmp_path / "m.gguf", target)
    named = as_mixed(declare_file(str(source)), MIXES[target])
    assert named is not None
    stored = open_declared(str(tmp_path / "m.gguf"))
    assert_equal_weights(named, stored)
    assert named.on_disk is not None
    assert stored.on_disk is not None
    assert set(named.on_disk.types) == set(stored.on_disk.types)
    assert named.on_disk.embedding_type == stored.on_disk.embedding_type
    assert 0 < stored.on_disk.num_bytes - named.on_disk.num_bytes < 2**18, "the header alone"


@pytest.mark.parametrize("name", ["3.5", "3.5 moe", "next"])
def test_as_mixed_equals_the_file_of_gated_delta_nets(name: str, tmp_path: Path) -> None:
    """`llama-quantize` reads the names of a file; so does a conversion from file to file."""
    theirs = save_state_model(name, tmp_path / "m", **STATES)
    quantized(write_state_file(tmp_path / "plain.gguf", theirs), tmp_path / "m.gguf", "q4_k")
    named, stored = as_mixed(declare_file(str(tmp_path / "m")), MIXES["q4_k"]), open_declared(str(tmp_path / "m.gguf"))
    assert named is not None
    assert {one.state for one in (spec_of(named), spec_of(stored))} == {spec_of(stored).state}
    # Gates are no packed weights of either: they are multiplied in the type of activations.
    assert_equal_weights(without_gates(named), without_gates(stored))


def spec_of(declared: DeclaredModel) -> ModelSpec:
    assert declared.spec is not None, declared.not_runnable
    return declared.spec


def without_gates(declared: DeclaredModel) -> DeclaredModel:
    return replace(declared, packed={name: own for name, own in declared.packed.items() if "in_gates" not in name})


@pytest.mark.parametrize("sizes", [{}, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("layout", MODELS)
def test_declare_file_packs_what_its_settings_declare(layout: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "m", *MODELS[layout], **sizes, dtype="bfloat16")
    assert_equal_weights(declare_file(str(folder / "config.json")), open_declared(str(folder)))


@for_each(
    "key, value",
    [
        ("modules_to_not_convert", ["down_proj"]),
        ("modules_to_not_convert", ["model.layers.0.mlp.down_proj"]),
        ("ignore", ["re:.*down_proj$"]),
        ("exclude_modules", ["*.down_proj"]),
        ("dynamic", {r"-:.*\.down_proj": {}}),
        ("extra_config", {"model.layers.0.mlp.down_proj": {"bits": 16}}),
    ],
)
def test_declare_file_leaves_excluded_modules_plain(tmp_path_factory, key: str, value: object) -> None:
    settings, make = MODELS["awq"]
    folder = make_packed(tmp_path_factory.mktemp("m") / "m", settings | {key: value}, make, plain=("down_proj",))
    found = declare_file(str(folder / "config.json"))
    assert_equal_weights(found, open_declared(str(folder)))
    assert "layers.0.down.weight" not in found.packed


@for_each(
    "name, title",
    [
        ("Qwen3.6-27B:Q4_K_M", "Q4_K_M"),
        ("unsloth/Qwen3.6-27B-GGUF:q4_k_m", "Q4_K_M"),
        ("Qwen3-8B:Q4_K", "Q4_K_M"),
        ("Qwen3-8B-Q8_0", "Q8_0"),
        ("Qwen/QwQ-32B-AWQ", "AWQ"),
        ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "GPTQ-Int4"),
        ("x/y-GPTQ-Int8", "GPTQ-Int8"),
        ("RedHatAI/Qwen3-30B-A3B-quantized.w4a16", "w4a16"),
        ("nvidia/Qwen3-30B-A3B-NVFP4", "NVFP4"),
        ("Qwen3-8B:Q4_K_S", None),
        ("Qwen3-8B:UD-Q4_K_XL", None),
        ("Qwen3-8B-GGUF", None),
        ("awq/Qwen3-8B", None),
    ],
)
def test_find_release_reads_the_storage_in_a_name(name: str, title: str | None) -> None:
    found = find_release(name)
    assert (None if found is None else found.title) == title


@pytest.mark.parametrize("release", RELEASES, ids=lambda one: one.title)
def test_as_named_every_release_packs_the_matrices_of_layers(release: Release) -> None:
    declared = open_declared(f"Qwen3-8B:{release.title}")
    assert declared.release == release.title
    layers = {name for name in declared.packed if name.startswith("layers.")}
    assert len(layers) == 36 * 4
    num_bytes = declared.weight_bytes("bfloat16", WeightRecipe(packed=POLICIES[-1]))
    assert 4 <= 8 * num_bytes / 8.19e9 <= 10.5, "bits a weight"


@for_each("name", ["gpt-oss-20b:Q4_K_M", "phi-4:Q4_K_M", "gpt-oss-20b-AWQ"])
def test_as_named_without_files_of_the_family_changes_nothing(name: str) -> None:
    declared = open_declared(name)
    assert (declared.release, dict(declared.packed)) == ("", {})
    assert as_named(declared, "Qwen3-8B") is declared
