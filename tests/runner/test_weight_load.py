"""Loads of weights: from the source or from what an earlier start has kept, kept for the next, saved as a model."""

import json
import logging
from pathlib import Path

import pytest
import torch

from error_codes import raises_code
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, ModelFormatError
from holdfast.loading.model_files import open_model
from holdfast.loading.sources.files import MANIFEST_FILE
from holdfast.memory.ledger import Ledger
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import HEAD_SCHEME
from holdfast.runner.weight_load import WeightLoad, plan_weights
from loading.tiny_models import save_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    save_tiny("llama", path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def planned(folder: Path, uses_cache: bool = True, load_format: str = "auto", **options) -> WeightLoad:
    config = EngineConfig.from_options(**{"quantization": "fp8"} | options)
    return plan_weights(config, open_model(str(folder), load_format), "float32", config.recipe, uses_cache)


def loaded(load: WeightLoad) -> dict[str, torch.Tensor]:
    """Every plane by name."""
    planes = {}
    for name, weight in load.run("cpu", Ledger(), lambda done, total: None).weights.items():
        planes |= (
            {name: weight.codes, f"{name}.scale": weight.scales}
            if isinstance(weight, QuantizedWeight)
            else {name: weight}
        )
    return planes


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, plane in one.items():
        assert torch.equal(plane.view(torch.uint8), other[name].view(torch.uint8)), name


def test_weight_load_second_start_reads_kept_weights(folder: Path, cache: Path) -> None:
    first = planned(folder)
    assert first.slot is not None
    assert first.slot.hit is None
    assert first.taken_plan is first.plan
    weights = loaded(first)
    assert len(list(cache.iterdir())) == 1
    second = planned(folder)
    assert second.slot is not None
    assert second.slot.hit is not None
    assert second.taken_plan is second.slot.hit[1]
    assert second.staging("cpu").num_bytes >= second.taken_plan.staging_bytes("cpu")
    assert_same(loaded(second), weights)
    assert_same(loaded(planned(folder, weight_cache="off")), weights)


def test_settings_that_change_during_the_load_are_not_saved(folder: Path, tmp_path: Path) -> None:
    load = planned(folder, save_quantized=str(tmp_path / "saved"), weight_cache="off")
    settings = folder / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"num_hidden_layers": 1}))
    with pytest.raises(ConfigError, match=r"changed while it was loaded: config\.json was changed"):
        loaded(load)
    assert not (tmp_path / "saved").exists()


def test_weight_load_keeps_only_quantized_weights_with_cache_on(folder: Path, cache: Path) -> None:
    for load in (
        planned(folder, quantization=None),
        planned(folder, weight_cache="off"),
        planned(folder, uses_cache=False),
        planned(folder, load_format="dummy"),
    ):
        assert load.slot is None
        loaded(load)
    assert not cache.exists() or not list(cache.iterdir())


def test_other_recipes_are_kept_apart(folder: Path, cache: Path) -> None:
    loads = [{}, {"quantization": "int8"}, {"quantized_embeddings": "none"}, {"quantization_ignore": "*down_proj*"}]
    for number, options in enumerate(loads):
        load = planned(folder, **options)
        assert load.slot is not None
        assert load.slot.hit is None, options
        loaded(load)
        assert len(list(cache.iterdir())) == number + 1


def test_weight_load_damaged_cache_is_dropped_and_requantized(folder: Path, cache: Path, caplog) -> None:
    weights = loaded(planned(folder))
    (kept,) = cache.iterdir()
    file = kept / "model-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    damaged = planned(folder)
    assert damaged.slot is not None
    assert damaged.slot.hit is not None, "headers are sound"
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert_same(loaded(damaged), weights)
    again = planned(folder)
    assert again.slot is not None
    assert again.slot.hit is not None, "written again"
    assert_same(loaded(again), weights)


def test_weight_load_cache_on_without_cache_raises(folder: Path, tmp_path: Path, monkeypatch) -> None:
    with raises_code("runner.weight_cache", ConfigError, reason="weights are dummies"):
        planned(folder, weight_cache="on", load_format="dummy")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "file"))
    with raises_code("runner.weight_cache", ConfigError):
        planned(folder, weight_cache="on")
    assert planned(folder).slot is None, "auto goes on without"


def test_weight_load_unwritable_cache_raises_only_if_on(folder: Path, monkeypatch) -> None:
    for choice in ("auto", "on"):
        load = planned(folder, weight_cache=choice)
        monkeypatch.setattr(type(load.slot), "save", lambda slot, weights: "the disk is full")
        if choice == "auto":
            loaded(load)
        else:
            with raises_code("runner.weight_cache", ConfigError, reason="the disk is full"):
                loaded(load)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_weight_load_nonfinite_weights_are_not_kept(folder: Path, cache: Path, quantization: str) -> None:
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][5, 2] = float("nan")
    save_file(tensors, file)
    loaded(planned(folder, quantization=quantization, allow_nonfinite=True))
    assert list(cache.iterdir()) == []
    with pytest.raises(ModelFormatError, match="is not finite in row 5"):
        loaded(planned(folder, quantization=quantization))
    with raises_code("runner.weight_cache", ConfigError, fix="Leave it out."):
        loaded(planned(folder, quantization=quantization, allow_nonfinite=True, weight_cache="on"))


def test_folder_of_unknown_user_raises(folder: Path) -> None:
    with raises_code("runner.bad_folder", ConfigError):
        planned(folder, save_quantized="~no-user-of-this-name/x")


def test_weight_load_own_scheme_quantizes_head_left_plain(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        if name.endswith("_proj.weight"):
            tensors[f"{name}_scale"] = torch.tensor(tensor.abs().max().item() / 448)
            tensor = (tensor / tensors[f"{name}_scale"]).to(torch.float8_e4m3fn)
        tensors[name] = tensor
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    for quantization, head in ((None, None), ("fp8_tensor", HEAD_SCHEME)):
        load = planned(folder, quantization=quantization)
        assert {weight.name: weight.scheme for weight in load.plan.weights}["lm_head.weight"] == head


def test_weights_that_are_no_numbers_are_refused_unless_allowed(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tmp_path / "broken"
    path.mkdir()
    save_tiny("llama", path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"down_proj.weight.* row 3.*--allow-nonfinite"):
        loaded(planned(path))
    assert loaded(planned(path, allow_nonfinite=True))


def test_weight_load_save_quantized_refuses_existing_folder(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    weights = loaded(planned(folder, save_quantized=str(target)))
    assert (target / MANIFEST_FILE).is_file()
    assert (target / "config.json").is_file()
    with raises_code("weights.cannot_save", ConfigError, reason="the folder is not empty"):
        planned(folder, save_quantized=str(target))
    with raises_code("weights.cannot_save", ConfigError, reason="its parent folder does not exist"):
        planned(folder, save_quantized=str(tmp_path / "no" / "such"))
    assert weights
    fix = "Copy the folder saved, which is already saved so"
    with raises_code("weights.cannot_save", ConfigError, reason="nothing is quantized on load", fix=fix):
        planned(target, save_quantized=str(tmp_path / "again"))
    with raises_code("weights.cannot_save", ConfigError):
        planned(folder, save_quantized=str(tmp_path / "plain"), quantization_ignore="*")
