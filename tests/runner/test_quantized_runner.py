"""Runners with quantized weights: planned to the byte, the same in any company on a CPU, declined as text elsewhere."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from error_codes import raises_code
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.loading.declared import open_declared
from holdfast.planning.target import Target
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, WEIGHT_SCHEMES, WeightScheme
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner import build as building
from holdfast.runner.build import BuiltRunner, load_words
from kernels.exactness import require_native
from quant.whole_weights import quantize
from runner.tiny_runners import TinyBuilder, held_storages

# The tiny models have an inner width of 112, which mxfp4 cannot store.
NARROW = {"mxfp4": {"quantization_ignore": "*down*"}}


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyBuilder:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    return TinyBuilder(tmp_path)


def tokens(built: BuiltRunner, *prompts: list[int]) -> list[int | None]:
    """The next token of each prompt, all in one step."""
    return [result.token_id for result in built.runner.execute(step_of(list(prompts))).results]


def step_of(prompts: list[list[int]]) -> LiveStep:
    items = []
    for place, ids in enumerate(prompts):
        own = Sequence(place, list(ids), len(ids), SamplingParams(temperature=0.0), seed=0, max_tokens=1)
        own.tables[0] = list(range(4 * place, 4 * place + 4))
        items.append(ScheduledSequence.of(own, 0, len(ids)))
    return LiveStep(tuple(items))


@pytest.mark.parametrize(
    ("scheme", "family"), [*((scheme, "llama_tied") for scheme in WEIGHT_SCHEMES), ("fp8", "llama"), ("int8", "opt")]
)
def test_plan_and_ledger_agree_to_the_byte(build: TinyBuilder, scheme: str, family: str) -> None:
    built = build(family, quantization=scheme, max_model_len=64, **NARROW.get(scheme, {}))
    planned = sum(term.num_bytes for term in built.plan.memory.terms if term.group == "weights")
    assert built.ledger.group_bytes()["weights"] == planned == built.load_report.final_bytes
    own_bytes = sum(held_storages(built.runner).values()) - built.ledger.total_bytes
    assert 0 <= own_bytes < 4096, "what is held is in the ledger"
    assert tokens(built, [5, 6, 7])[0] is not None
    built.release()
    assert held_storages(built.runner) == {}


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_runner_row_has_same_bits_in_any_batch(build: TinyBuilder, scheme: str) -> None:
    require_native()
    built = build(quantization=scheme, batch_invariant=True, max_model_len=64, **NARROW.get(scheme, {}))
    prompts = [[5, 6, 7], [9] * 8, [200, 3, 77, 12, 90]]
    assert tokens(built, *prompts) == [tokens(built, prompt)[0] for prompt in prompts]
    hidden = [built.runner.hidden_rows(step_of(prompts[:count]))[:3].clone() for count in (1, 3)]
    logits = [built.runner.row_logits(rows)[2].clone() for rows in hidden]
    assert torch.equal(*logits)


def test_batch_invariant_quantized_products_on_gpu_refused(build, monkeypatch) -> None:
    gpu = Target("cuda", "cuda:0", 2**34, 2**34, 2**20, "a dummy", capability=(9, 0))
    monkeypatch.setattr(building, "device_target", lambda device, vocab_size=0: gpu)
    with pytest.raises(ConfigError, match="batch_invariant=True"):
        build(readable=False, quantization="fp8", batch_invariant=True, max_model_len=64)


def test_build_fp8_on_old_gpu_refused_before_reading(build, monkeypatch) -> None:
    old = Target("cuda", "cuda:0", 2**34, 2**34, 2**20, "a dummy", capability=(8, 0))
    monkeypatch.setattr(building, "device_target", lambda device, vocab_size=0: old)
    with pytest.raises(ConfigError, match="fp8"):
        build(readable=False, quantization="fp8", max_model_len=64)


def test_build_indivisible_columns_refused_before_reading(build) -> None:
    with pytest.raises(ConfigError, match="mxfp4"):
        build(readable=False, quantization="mxfp4", max_model_len=64)
    with raises_code("quant.no_such_weight", ConfigError, value="*down_porj*") as caught:
        build(readable=False, quantization="fp8", quantization_ignore="*down_porj*", max_model_len=64)
    assert caught.value.hints == ("Did you mean *down_proj*?",)


def test_build_quantized_over_budget_refused_with_table(build) -> None:
    with pytest.raises(MemoryPlanError) as caught:
        build(readable=False, quantization="fp8", memory_limit=100_000, max_model_len=64)
    assert caught.value.table is not None


def test_build_second_start_reads_kept_quantized_weights(build: TinyBuilder) -> None:
    first = build(quantization="int8", max_model_len=64)
    second = build(quantization="int8", max_model_len=64)
    assert tokens(first, [5, 6, 7]) == tokens(second, [5, 6, 7])
    assert second.load_report.read_bytes < 0.6 * first.load_report.read_bytes
    assert first.plan.memory.terms == second.plan.memory.terms


def test_build_quantization_without_effect_warns(build: TinyBuilder, caplog) -> None:
    with caplog.at_level("WARNING", "holdfast"):
        built = build(quantization="fp8", quantization_ignore="*", max_model_len=64)
    assert "quantization=fp8 changes nothing" in caplog.text
    assert tokens(built, [5, 6, 7]) == tokens(build(max_model_len=64), [5, 6, 7])


def test_load_words_is_one_line(build: TinyBuilder) -> None:
    line = load_words(build(quantization="fp8", max_model_len=64).load_report)
    assert line.startswith("final ")
    assert all(word in line for word in ("peak", "as planned", "GB/s", "reading", "placing"))
    assert "\n" not in line


def save_in_blocks(folder: Path) -> None:
    """Turn the matrices of a saved model into e4m3 with a scale a block, as fp8 checkpoints have them."""
    (file,) = folder.glob("*.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(file).items():
        tensors[name] = values
        if values.dim() == 2 and name.startswith("model.layers."):
            codes, scales = quantize(values.float(), FP8_BLOCK)
            tensors |= {name: codes, name.replace(".weight", ".weight_scale_inv"): scales}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(config))


def test_build_fp8_checkpoint_runs_as_stored(build: TinyBuilder, tmp_path: Path) -> None:
    """Its codes are those that quantizing the plain one gives, so its tokens are too."""
    plain = build(quantization="fp8_block", quantized_embeddings="none", max_model_len=64)
    wanted = tokens(plain, [5, 6, 7], [9] * 8)
    save_in_blocks(tmp_path / "llama")
    stored = build(max_model_len=64)
    assert stored.plan.resolved.recipe.scheme == FP8_BLOCK
    assert ("quantization", "fp8_block", "the checkpoint's own") in stored.plan.resolved.choices
    assert tokens(stored, [5, 6, 7], [9] * 8) == wanted
    planned = sum(term.num_bytes for term in stored.plan.memory.terms if term.group == "weights")
    assert stored.ledger.group_bytes()["weights"] == planned
    assert open_declared(str(tmp_path / "llama")).weight_bytes("float32") == planned
    with raises_code("plan.already_quantized", ConfigError, stored="fp8_block", value="int8"):
        build(readable=False, quantization="int8", max_model_len=64)


@pytest.mark.parametrize("scheme", [FP8, FP8_TENSOR], ids=lambda scheme: scheme.name)
def test_build_e4m3_head_runs_as_stored(build: TinyBuilder, tmp_path: Path, scheme: WeightScheme) -> None:
    build(max_model_len=64).release()
    folder = tmp_path / "llama"
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in ("lm_head.weight", "model.layers.0.mlp.down_proj.weight"):
        peak = tensors[name].abs().amax().view(1) if scheme.is_whole_tensor else None
        codes, scales = quantize(tensors[name].float(), scheme, peak)
        tensors |= {name: codes, f"{name}_scale": scales[0] if scheme.is_whole_tensor else scales}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fbgemm_fp8" if scheme == FP8 else "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    stored = build(max_model_len=64)
    assert stored.plan.resolved.recipe.head_scheme == scheme
    planned = sum(term.num_bytes for term in stored.plan.memory.terms if term.group == "weights")
    assert stored.ledger.group_bytes()["weights"] == planned
    saved = build(quantization=scheme.name, save_quantized=str(tmp_path / "saved"), max_model_len=64)
    again = build("saved", max_model_len=64)
    assert again.plan.resolved.recipe.head_scheme == scheme
    assert tokens(again, [5, 6, 7]) == tokens(saved, [5, 6, 7])
    assert tokens(stored, [5, 6, 7]), "steps run"


def test_build_saved_quantized_model_loads_as_model(build: TinyBuilder, tmp_path: Path) -> None:
    first = build(quantization="fp8", save_quantized=str(tmp_path / "saved"), max_model_len=64)
    second = build("saved", max_model_len=64)
    assert tokens(first, [5, 6, 7]) == tokens(second, [5, 6, 7])
    weights = [plan.memory.phase_bytes["serve"] for plan in (first.plan, second.plan)]
    assert weights[0] == weights[1]
    assert second.load_report.read_bytes < 0.6 * first.load_report.read_bytes
    assert open_declared(str(tmp_path / "saved")).weight_bytes("float32") == second.load_report.final_bytes
