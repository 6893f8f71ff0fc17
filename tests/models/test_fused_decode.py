"""The fused decode path comes to the logits of the ordinary way, whatever the weights are; and which weights cannot take it.

Both ways quantize activations by the same rule: the scale of a row follows from its largest number, and 1 / rms is a factor of the
whole row, so it is all one whether codes are made before the norm is finished or after. Products therefore get the same codes,
but for a number that lies so near the middle between two that the last digit of float32 decides. Such a number moves by one
step of e4m3, which is a small part of what quantizing does to all numbers: bounds follow from these two.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import cycle
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
import torch

from holdfast.kernels.gemm.deferred_rms_norm import RowAmax
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, NUM_GATE_AMAX
from holdfast.layers.mlp import GatedMLP, Linear
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models import activations, fused_decode
from holdfast.models.activations import fused_decode_request
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.decoder_layer import DecoderLayer, DecoderParts, LayerBuilder
from holdfast.models.fused_decode import make_scratch
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.rope import StepRope
from holdfast.quant.packed_schemes import PackedScheme, integer_scheme
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import AS_STORED, FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4, WeightRecipe, WeightScheme
from kernels.exactness import same_bits
from kernels.gemm.test_packed_linear import random_part
from kernels.gemm_references import normed_linear_reference, row_amax_reference
from kernels.triton_cases import QUIET
from loading.tiny_models import save_tiny
from models.fused_decode_steps import CPU, LIMITS, decode, make_rig, placed, use_references
from models.test_decoder_quantized import quantized, quantized_model, tiny
from models.tiny_experts import EXPERT_MODELS, assembled, config_of, tensors_of
from runner.drive import LoadedModel

DENSE = {
    "qwen3": "norms of heads",
    "llama_bias": "biases everywhere",
    "llama_tied": "the head is the embedding",
}
SPARSE = {
    "qwen2_moe": "a shared expert in every layer",
    "qwen2_moe normalized, every second layer": "dense and sparse layers in turn",
    "qwen3_moe not normalized, dense layers": "sparse between dense layers",
    "gpt_oss": "biases everywhere, sinks, windows in every other layer",
}
MODELS = pytest.mark.parametrize("name", [*DENSE, *SPARSE])
SCHEMES = pytest.mark.parametrize("scheme", [None, FP8, FP8_TENSOR, INT8], ids=lambda one: one.name if one else "plain")
ROUNDING = 2e-5
"""For logits around one in float32, after some layers."""


def errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The largest of every row of logits."""
    assert found.isfinite().all(), "a logit is no number"
    return (found - wanted).abs().amax(-1).flatten()


@pytest.mark.each_value
@MODELS
@SCHEMES
@pytest.mark.parametrize("counts", [(1, 5), pytest.param((1, 2, 5), marks=pytest.mark.slow)], ids=["some", "more"])
def test_logits_are_those_of_the_ordinary_way(name, scheme, counts, monkeypatch):
    use_references(monkeypatch)
    recipe = WeightRecipe(scheme, "all")
    ours, numbers = quantized_model(name, recipe)
    off, noise = [], []
    for num_rows in counts:
        wanted = decode(make_rig(ours, recipe, fused=False), num_rows)
        off.append(errors(decode(make_rig(ours, recipe), num_rows), wanted))
        noise.append(errors(decode(make_rig(numbers, fused=False), num_rows), wanted))
    if scheme is None or not scheme.quantizes_activations:
        assert torch.cat(off).max() < ROUNDING
        return
    # What a number between two codes changes stays in the cache: one shows in all later steps of its row.
    assert torch.cat(off).median() < ROUNDING, "codes are others"
    assert torch.cat(noise).min() > 1000 * ROUNDING, "inputs are not quantized at all"
    assert torch.cat(off).max() < 0.25 * torch.cat(noise).median(), "more than a number between two codes"


def experts_alone(num_layers: int) -> WeightRecipe:
    """As a checkpoint has it that stores its experts in mxfp4, and all else plain."""
    plain = tuple(f"layers.{layer}.{name}.weight" for layer in range(num_layers) for name in ("qkv", "o"))
    return WeightRecipe(MXFP4, "none", plain)


def test_plain_layers_with_experts_of_four_bits(monkeypatch):
    use_references(monkeypatch)
    recipe = experts_alone(4)
    ours, _ = quantized_model("gpt_oss", recipe)
    assert isinstance(ours.weights["layers.3.experts.down.weight"], QuantizedWeight)
    assert reason(ours, recipe) is None
    for num_rows in (1, 4):
        wanted = decode(make_rig(ours, recipe, fused=False), num_rows)
        assert errors(decode(make_rig(ours, recipe), num_rows), wanted).max() < ROUNDING


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_takes_fused_decode_accepts_gpt_oss_as_stored(name):
    declared = declare_config(CATALOGUE[name], name)
    assert declared.spec is not None
    recipe = declared.stored_recipe
    assert recipe is not None
    assert activations.takes_fused_decode(declared.spec, "bfloat16", "cuda", recipe)
    names = [spec.name for spec in activations.fused_decode_request(declared.spec, recipe).specs]
    assert names == ["squares", "parts", "arrived"], "no weight of theirs takes rows as codes"
    assert not activations.takes_fused_decode(declared.spec, "bfloat16", "cuda", WeightRecipe(MXFP4))


@pytest.mark.parametrize("embeddings", ["none", "head"])
@pytest.mark.parametrize("scheme", [FP8, INT8], ids=lambda one: one.name)
def test_fused_decode_accepts_plain_head_and_embedding(embeddings, scheme, monkeypatch):
    use_references(monkeypatch)
    recipe = WeightRecipe(scheme, embeddings)
    ours, _ = quantized_model("qwen3", recipe)
    assert isinstance(ours.weights["lm_head.weight"], torch.Tensor) == (embeddings == "none")
    off = errors(decode(make_rig(ours, recipe), 3), decode(make_rig(ours, recipe, fused=False), 3))
    assert off.median() < ROUNDING
    assert off.max() < 0.05


def test_fused_decode_runs_only_small_batches_of_wanted_rows(monkeypatch):
    use_references(monkeypatch)
    rows = []
    begin = fused_decode.defer_rms_norm
    monkeypatch.setattr(fused_decode, "defer_rms_norm", lambda stream: rows.append(len(stream.x_MN)) or begin(stream))
    decode(make_rig(tiny("qwen3")), 3, num_steps=4)
    assert rows == 4 * [3], "prompts go the ordinary way, and decode steps begin once"
    rows.clear()
    decode(make_rig(tiny("qwen3"), fused=False), 3, num_steps=1)
    assert rows == []
    monkeypatch.setattr(activations, "FUSED_DECODE_ROWS", 2)
    decode(make_rig(tiny("qwen3")), 3, num_steps=1)
    assert rows == [], "there are more rows than the kernels take"
    decode(make_rig(tiny("qwen3")), 2, num_steps=1)
    assert rows == [2]


@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe"])
def test_rows_of_padding_change_nothing(name, monkeypatch):
    use_references(monkeypatch)
    recipe = WeightRecipe(FP8)
    ours, _ = quantized_model(name, recipe)
    for num_rows in (1, 3):
        padded = decode(make_rig(ours, recipe, row_sizes=(5, LIMITS.max_num_batched_tokens)), num_rows)
        assert errors(padded, decode(make_rig(ours, recipe), num_rows)).max() < ROUNDING


def with_a_loud_layer(model: LoadedModel) -> LoadedModel:
    """The gate of layer 0 leaves a million times more, and the product behind it takes it back."""
    weights = dict(model.weights)
    for name, factor in (("gate_up", 1e3), ("down", 1e-6)):
        weight = weights[f"layers.0.{name}.weight"]
        assert isinstance(weight, QuantizedWeight), "it is to be quantized"
        weights[f"layers.0.{name}.weight"] = replace(weight, scales=weight.scales * factor)
    return LoadedModel(model.spec, weights)


def test_amax_of_a_gate_are_cleared_before_the_next_layer_s(monkeypatch):
    """Else a loud layer would leave the quiet ones behind it no codes but zero."""
    use_references(monkeypatch)
    recipe = WeightRecipe(FP8)
    loud = with_a_loud_layer(quantized_model("qwen3", recipe)[0])
    found, amax = decode(make_rig(loud, recipe), 5), []

    def fresh(rows, weight, bias, gated, y, scratch) -> torch.Tensor:
        if gated:
            scratch.amax.gated.zero_()
        out = normed_linear_reference(rows, weight, bias, gated, y, scratch)
        if gated:
            amax.append(float(out.abs().max()))
        return out

    monkeypatch.setattr(fused_decode, "normed_linear", fresh)
    assert same_bits(found, decode(make_rig(loud, recipe), 5)), "as if every layer had scratch of its own"
    assert min(amax[0::3]) > 1e4 * max(amax[1::3] + amax[2::3]), "the first of three layers is loud"
    use_references(monkeypatch)
    assert errors(found, decode(make_rig(loud, recipe, fused=False), 5)).median() < ROUNDING

    layers = cycle(range(3))

    def once_a_step(a, values, cleared) -> RowAmax:
        return row_amax_reference(a, values, cleared[: 0 if next(layers) else len(cleared)])

    monkeypatch.setattr(fused_decode, "row_amax", once_a_step)
    assert errors(decode(make_rig(loud, recipe), 5), found).median() > 0.05, "it would show if they were not"


def test_fused_decode_clears_amax_of_its_own_rows(monkeypatch):
    use_references(monkeypatch)
    recipe = WeightRecipe(FP8)
    seen = []

    def watched(a, values, cleared):
        seen.append((len(a), cleared.data_ptr(), cleared.numel()))
        return row_amax_reference(a, values, cleared)

    monkeypatch.setattr(fused_decode, "row_amax", watched)
    rig = make_rig(quantized_model("llama_tied", recipe)[0], recipe)
    assert rig.decoder.fused is not None, "it was declined"
    places = rig.decoder.fused.scratch.amax.gated
    decode(rig, 2, num_steps=1)
    assert seen == 2 * [(2, places.data_ptr(), 2 * NUM_GATE_AMAX)]
    assert places.numel() == FUSED_DECODE_ROWS * NUM_GATE_AMAX


def test_int8_asks_for_no_amax(monkeypatch):
    use_references(monkeypatch)

    def refuse(*_):
        raise AssertionError("a kernel was launched in vain")

    monkeypatch.setattr(fused_decode, "row_amax", refuse)
    recipe = WeightRecipe(INT8)
    decode(make_rig(quantized_model("qwen3", recipe)[0], recipe), 2, num_steps=1)
    decode(make_rig(tiny("qwen3")), 2, num_steps=1)


def reason(model: LoadedModel, recipe: WeightRecipe) -> str | None:
    return make_rig(model, recipe, fused=False).decoder.fused_decode_declined()


@pytest.mark.each_value
@MODELS
@SCHEMES
def test_weights_that_can_go_this_way(name, scheme):
    for embeddings in ("none", "head", "all"):
        recipe = WeightRecipe(scheme, embeddings)
        assert reason(quantized_model(name, recipe)[0], recipe) is None


@pytest.mark.parametrize("scheme", [MXFP4, FP8_BLOCK], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("name", "num_weights"), [("qwen3", 12), ("qwen2_moe", 4), ("qwen3_moe not normalized, dense layers", 10)]
)
def test_blocks_of_columns_are_declined(name, num_weights, scheme):
    recipe = WeightRecipe(scheme)
    expected = f"0 of {num_weights} weights are plain, and the others are not all of eight bits with scales by row"
    assert reason(quantized_model(name, recipe)[0], recipe) == expected


def test_layers_of_both_kinds_are_declined():
    for ignore, num_plain in (("layers.1.down", 1), ("layers.0.*", 4), ("layers.*.qkv", 3)):
        recipe = WeightRecipe(FP8, ignore=(ignore,))
        assert (reason(quantized_model("qwen3", recipe)[0], recipe) or "").startswith(
            f"{num_plain} of 12 weights are plain"
        )


@pytest.mark.parametrize("scheme", [FP8, INT8], ids=lambda one: one.name)
def test_fused_decode_declines_quantized_head_over_plain_layers(scheme):
    recipe = WeightRecipe(scheme, ignore=("layers.*",))
    assert reason(quantized_model("qwen3", recipe)[0], recipe) == "the head is in int8 and layers are not"


def test_fused_decode_declines_head_in_fp8_blocks():
    recipe = WeightRecipe(FP8)
    model, _ = quantized_model("qwen3", recipe)
    (head,) = (one for one in parameters(model.spec) if one.name == "lm_head.weight")
    weights = {**model.weights, head.name: quantized(tiny("qwen3").weights[head.name], FP8_BLOCK, head)}
    assert reason(LoadedModel(model.spec, weights), recipe) == "the head is in fp8_block and layers are not"


def test_layers_in_codes_of_two_kinds_are_declined():
    """A checkpoint may be so. A gate in int8 would leave no amax for the product in e4m3 behind it."""
    recipe = WeightRecipe(FP8)
    model, _ = quantized_model("qwen3", recipe)
    (gate,) = (one for one in parameters(model.spec) if one.name == "layers.1.gate_up.weight")
    weights = {**model.weights, gate.name: quantized(tiny("qwen3").weights[gate.name], INT8, gate)}
    expected = "weights have codes of different kinds, float8_e4m3fn and int8"
    assert reason(LoadedModel(model.spec, weights), recipe) == expected


def test_fused_decode_declines_a_table_or_limit_in_any_layer():
    """Each of three layers alone."""
    spec = read_spec(
        {"architectures": ["Qwen3MoeForCausalLM"], **EXPERT_MODELS["qwen3_moe"][1], "num_hidden_layers": 3}
    )
    assert spec.experts is not None
    table = {f"layers.{layer}.router.table": torch.zeros(9, 1, dtype=torch.int32) for layer in range(3)}
    weights = {one.name: torch.zeros(one.shape) for one in parameters(spec)} | table

    def layers_with(tables: set[int]) -> list[DecoderLayer[Any]]:
        own = replace(spec, experts=replace(spec.experts, table_layers=frozenset(tables)))
        rope = StepRope(None, (None,) * 3, (None,) * 3)
        builder = LayerBuilder(DecoderParts(own, weights, cast(Any, None), rope, cast(Any, None), ()))
        return [builder.layer(index, builder.attention(index)) for index in range(3)]

    assert fused_decode.declined(layers_with(set()), None) is None
    for layer in range(3):
        assert "from a table by token id" in (fused_decode.declined(layers_with({layer}), None) or "")
        layers, product = layers_with(set()), Linear(torch.zeros(2, 2))
        layers[layer] = layers[layer]._replace(mlp=GatedMLP(product, product, "silu", limit=7.0))
        assert "has a limit on its gate" in (fused_decode.declined(layers, None) or "")


def test_fused_decode_declined_decoder_logs_reason_runs_unfused(caplog):
    """It is reported to take the kernels, as one is whose recipe does not say everything about its weights."""
    recipe = WeightRecipe(MXFP4)
    ours, _ = quantized_model("qwen3", recipe)
    with caplog.at_level(logging.INFO, logger="holdfast.models.layer_stack"):
        rig = make_rig(ours, recipe)
    assert rig.decoder.fused is None
    (message,) = [record.getMessage() for record in caplog.records if "fused decode path" in record.getMessage()]
    assert message.endswith(
        "because 0 of 12 weights are plain, and the others are not all of eight bits with scales by row"
    )
    assert same_bits(decode(rig, 2), decode(make_rig(ours, recipe, fused=False), 2))


INT4 = integer_scheme("int4", 4, 32, "float16")
INT4_ZEROS = integer_scheme("int4 with zeros", 4, 32, "float16", "uint8")


def packed(model: LoadedModel, changes: Mapping[str, AnyWeight] | None = None) -> LoadedModel:
    """Pack products and experts of a model: query and key in one scheme, value in another."""
    weights: dict[str, Any] = {**model.weights}
    for index, parameter in enumerate(parameters(model.spec)):
        if parameter.kind not in ("linear", "expert", "head") or "embed" in parameter.name:
            continue
        rows, shape = [(INT4, parameter.shape[-2])], parameter.shape
        if parameter.name.endswith("qkv.weight"):
            num_values = model.spec.num_kv_heads * model.spec.head_dim
            rows = [(INT4, shape[-2] - num_values), (INT4_ZEROS, num_values)]
        weights[parameter.name] = packed_weight(rows, shape, index)
    return LoadedModel(model.spec, weights | dict(changes or {}))


def packed_weight(rows: list[tuple[PackedScheme, int]], shape: tuple[int, ...], seed: int = 0) -> PackedWeight:
    parts, start = [], 0
    for scheme, num_rows in rows:
        parts.append(random_part(scheme, (*shape[:-2], num_rows, shape[-1]), start, seed=seed + start))
        start += num_rows
    return PackedWeight(shape, tuple(parts))


@pytest.mark.parametrize("name", ["qwen3", "llama_bias", "qwen2_moe", "qwen3_moe not normalized, dense layers"])
def test_logits_of_packed_weights_are_those_of_the_ordinary_way(name, monkeypatch):
    use_references(monkeypatch)
    model = packed(tiny(name))
    rig = make_rig(model)
    assert rig.decoder.fused is not None, rig.decoder.fused_decode_declined()
    for num_rows in (1, 3):
        wanted = decode(make_rig(model, fused=False), num_rows)
        assert errors(decode(make_rig(model), num_rows), wanted).max() < ROUNDING * max(1.0, float(wanted.std()))


def test_fused_decode_declines_packed_weights_that_tiles_do_not_take():
    """Parts in two schemes before a gate or a residual, schemes without tiles, quantized weights beside packed ones."""
    model = tiny("qwen3")
    for name in ("layers.1.gate_up.weight", "layers.2.down.weight", "layers.0.o.weight"):
        shape = tuple(model.weights[name].shape)
        halves = packed_weight([(INT4, shape[0] // 2), (INT4_ZEROS, shape[0] // 2)], shape)
        assert reason(packed(model, {name: halves}), AS_STORED) == (
            "parts of a weight are stored in int4 and int4 with zeros"
        )
    shape = tuple(model.weights["layers.1.qkv.weight"].shape)
    int8 = integer_scheme("int8", 8, 0, "float16", is_signed=True)
    other = packed_weight([(int8, shape[0])], shape)
    expected = f"no tiles take rows in int8 of {shape[1]} columns"
    assert reason(packed(model, {"layers.1.qkv.weight": other}), AS_STORED) == expected
    (down,) = (one for one in parameters(model.spec) if one.name == "layers.1.down.weight")
    beside = {down.name: quantized(model.weights[down.name], INT8, down)}
    assert reason(packed(model, beside), AS_STORED) == "some weights are packed and others quantized"


def test_fused_decode_declines_stored_int8_without_scratch_for_amax():
    """A checkpoint may store what a scheme has, and no scheme is planned."""
    model, _ = quantized_model("qwen3", WeightRecipe(INT8))
    expected = "weights are quantized as the checkpoint stores them, and the plan has no scratch for their amax"
    assert reason(model, AS_STORED) == expected


def tensors(specs: tuple[TensorSpec, ...]) -> list[torch.Tensor]:
    """Every byte is set."""
    made = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]
    for tensor in made:
        tensor.view(torch.uint8).fill_(0xFF)
    return made


@pytest.mark.parametrize("recipe", [AS_STORED, WeightRecipe(FP8), WeightRecipe(INT8)], ids=["plain", "fp8", "int8"])
def test_fused_decode_scratch_zeroes_counters_and_amax_only(recipe):
    specs = fused_decode_request(tiny("qwen3").spec, recipe).specs
    made = tensors(specs)
    scratch = make_scratch({spec.name: tensor for spec, tensor in zip(specs, made, strict=True)})
    held = (scratch.squares, scratch.partials, scratch.arrived, *(scratch.amax or ()))
    assert len(held) == len(made) == (3 if recipe is AS_STORED else 6)
    for own, tensor, spec in zip(held, made, specs, strict=True):
        assert own is tensor
        if spec.name in ("arrived", "gate_amax"):
            assert not own.any(), spec.name
        else:
            assert (own.view(torch.uint8) == 0xFF).all(), f"{spec.name} was touched in vain"
    assert [spec.name for spec in specs][3:] == ([] if recipe is AS_STORED else ["amax", "input_amax", "gate_amax"])


@cache
def small(scheme: WeightScheme | None) -> LoadedModel:
    """Few programs, for the interpreter's sake, and blocks of both kinds: whole ones of 128 inputs, and less than one."""
    with TemporaryDirectory() as folder:
        widths = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 16, "vocab_size": 40}
        model = save_tiny("qwen3", folder, num_hidden_layers=2, **widths)
    spec, recipe = read_spec(config_of(model)), WeightRecipe(scheme)
    weights: dict[str, torch.Tensor | QuantizedWeight] = {**assembled(parameters(spec), tensors_of(model, "separate"))}
    for parameter in parameters(spec):
        own, values = recipe.scheme_for(parameter.kind, (parameter.name,)), weights[parameter.name]
        if own is not None and isinstance(values, torch.Tensor):
            weights[parameter.name] = quantized(values, own, parameter)
    return LoadedModel(spec, weights)


@QUIET
@pytest.mark.parametrize(
    ("scheme", "num_rows", "num_steps"),
    [
        (FP8, 1, 1),
        (FP8, 3, 2),
        (INT8, 3, 1),
        pytest.param(INT8, 1, 5, marks=pytest.mark.gpu),
        pytest.param(None, 1, 5, marks=pytest.mark.gpu),
        pytest.param(None, 3, 5, marks=pytest.mark.gpu),
    ],
    ids=lambda one: one.name if isinstance(one, WeightScheme) else str(one),
)
def test_fused_decode_with_real_kernels_matches_unfused(device, scheme, num_rows, num_steps):
    """In the interpreter in float32, and as exact as the ordinary way in bfloat16 on a GPU."""
    dtype, recipe = "float32" if device.type == "cpu" else "bfloat16", WeightRecipe(scheme)
    model = placed(small(scheme), getattr(torch, dtype), device)
    exact = decode(make_rig(placed(model, torch.float32, CPU), recipe, fused=False), num_rows, num_steps)

    def off(fused: bool) -> float:
        rig = make_rig(model, recipe, fused, "triton_paged", dtype, device=device)
        return float((decode(rig, num_rows, num_steps).cpu() - exact).square().mean().sqrt())

    # A number between two codes may become either.
    between = 5e-3 if scheme is not None and scheme.quantizes_activations else ROUNDING
    assert off(fused=True) < 3 * off(fused=False) + between
    assert exact.std() > 0.5, "errors are to be small beside it"


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_fused_decode_packed_with_real_kernels_matches_unfused(device, num_rows):
    """As exact as the ordinary way, whose products are the same tiles; and it runs in as many steps."""
    model = packed(small(None))
    exact = decode(make_rig(placed(model, torch.float32, CPU), fused=False), num_rows, 3)

    def off(fused: bool) -> float:
        rig = make_rig(
            placed(model, torch.bfloat16, device), AS_STORED, fused, "triton_paged", "bfloat16", device=device
        )
        assert (rig.decoder.fused is not None) == fused
        return float((decode(rig, num_rows, 3).cpu() - exact).square().mean().sqrt())

    assert off(fused=True) < 3 * off(fused=False) + ROUNDING
    assert exact.std() > 0.5, "errors are to be small beside it"
