"""Stored schemes: planes of a quantized checkpoint, carried out on small arrays and compared number by number."""

import copy
import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from error_codes import raises_code
from for_each import for_each
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ConfigError, ModelFormatError, UnsupportedModelError
from holdfast.loading.declared import open_declared
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_directory, open_directory_without_weights
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.planning.stored_schemes import (
    StoredSchemes,
    code_rows,
    dummy_source,
    is_followed,
    matches,
    read_stored_schemes,
    scale_parts,
)
from holdfast.loading.sources import dummy
from holdfast.memory.ledger import Ledger
from holdfast.models.parameters import Parameter, Part
from holdfast.models.sharding import shard_parameters
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4, WeightRecipe
from loading.header_source import HeaderSource, entry, experts, stacked

MODULES = ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
MODULES += ["model.layers.11.mlp.gate_proj", "model.layers.11.self_attn.q_proj", "model.layers.2.mlp.experts.7.up_proj"]


@for_each(
    "text",
    [
        r".*layers\.0\.mlp\.(gate|up)_proj",
        r".*layers\.0\.mlp\.(?:gate|up)_proj$",
        r"model\.layers\.(11|2)\.(mlp|self_attn)\.(gate|q)_proj",
        r"^model.layers.11.self_attn.*",
        r"(lm_head|.*experts\.7\.(up|down)_proj)$",
        r".*(q|k|v)_proj|lm_head",
        r".*mlp.gate$",
        r"(|lm_)head",
        r"layers",
        r"model.*mlp.*proj$",
        r"model\.layers\..*\.up_proj$",
        r"",
    ],
)
def test_matches_expression_agrees_with_re_match(text):
    assert is_followed(f"re:{text}")
    wanted = [module for module in MODULES if re.match(text, module)]
    assert [module for module in MODULES if matches(f"re:{text}", module)] == wanted


def test_matches_slow_expressions_end_in_linear_time():
    """Python's own would try for as long as the machine stands."""
    assert not matches("re:" + ".*a" * 20 + "b", "a" * 60 + "!")
    assert not is_followed("re:" + "(a|a)" * 60 + "b")
    assert not is_followed("re:" + "(" * 1500 + "a" + ")" * 1500 + "+")


@for_each("text", ["(?!.*experts).*", "a{2}", "(a", "a)", "[ab]", r"\d+", "*a", "a+", "a?", "(a|b)*", "(a|b)?c", r"\bx", "(?i)a",
     "\\", r"(a)\1", "a^b", "a$b", r"model\.*mlp", r"a\\.*b", "(?P<x>a)"])  # fmt: skip
def test_matches_unknown_expression_matches_nothing(text):
    assert not is_followed(f"re:{text}")
    assert not any(matches(f"re:{text}", module) for module in MODULES)


def test_is_followed_accepts_plain_names_and_simple_wildcards():
    assert is_followed("model.layers.0(")
    assert is_followed("model.layers.*.self_attn")
    assert not is_followed("model.layers.*[01].self_attn")
    assert [module for module in MODULES if matches("mlp.gate", module)] == MODULES[1:2]


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_leaves_alone_follows_each_pattern_of_each_key():
    """Two keys of two patterns each, and a weight that is made of two tensors of which either may be named."""
    patterns = {"modules_to_not_convert": ["model.layers.0.mlp", "lm_head"], "ignored_layers": ["re:.*kv_a.*", "gate"]}
    stored = read_stored_schemes(BLOCKS | patterns)
    assert stored is not None
    left = ["model.layers.0.mlp.up_proj", "lm_head", "model.layers.5.kv_a_proj", "model.layers.7.gate"]
    for name in left:
        assert stored.leaves_alone([f"{name}.weight"])
        assert stored.leaves_alone(["model.layers.1.mlp.up_proj.weight", f"{name}.weight"])
    assert not stored.leaves_alone(["model.layers.1.mlp.up_proj.weight", "model.layers.1.q_proj.weight"])
    odd = read_stored_schemes(BLOCKS | {"modules_to_not_convert": ["lm_head", "re:(?!a)b"]})
    assert odd is not None
    assert odd.unread_pattern == "re:(?!a)b"


def compressed(strategy="channel", group=None, **weights):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **weights}
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, **(group or {})}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "kv_cache_scheme": None,
        "version": "0.9",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


@for_each(
    "config, scheme, endings, ignore",
    [
        (BLOCKS, FP8_BLOCK, ("_scale_inv", "_scale", ".scale"), ()),
        (BLOCKS | {"modules_to_not_convert": ["a", "b"]}, FP8_BLOCK, ("_scale_inv", "_scale", ".scale"), ("a", "b")),
        (BLOCKS | {"expert_dtype": "fp8"}, FP8_BLOCK, (".scale", "_scale_inv", "_scale"), ()),
        (BLOCKS | {"scale_fmt": "ue8m0"}, FP8_BLOCK, ("_scale_inv", "_scale", ".scale"), ()),
        ({"quant_method": "fp8", "activation_scheme": "static"}, FP8_TENSOR, ("_scale",), ()),
        ({"quant_method": "fp8", "weight_block_size": None, "ignored_layers": ["x"]}, FP8_TENSOR, ("_scale",), ("x",)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, FP8, ("_scale",), ()),
        (compressed(), FP8, ("_scale",), ("lm_head",)),
        (compressed("tensor"), FP8_TENSOR, ("_scale",), ("lm_head",)),
        (compressed("block", block_structure=[128, 128]), FP8_BLOCK, ("_scale", "_scale_inv"), ("lm_head",)),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]},
            MXFP4,
            (),
            ("model.embed_tokens",),
        ),
    ],
)
def test_read_stored_schemes_reads_known_configs(config, scheme, endings, ignore):
    before = copy.deepcopy(config)
    stored = read_stored_schemes(config)
    assert stored is not None
    assert (stored.scheme, stored.scale_endings, stored.ignore) == (scheme, endings, ignore)
    assert config == before


@pytest.mark.parametrize("config", [None, {}])
def test_read_stored_schemes_without_config_is_none(config):
    assert read_stored_schemes(config) is None


@for_each("config, setting", [
        ({"quant_method": "gptq", "bits": 4}, "quant_method = 'gptq'"),
        ({"bits": 4}, "quant_method = ''"),
        (BLOCKS | {"weight_block_size": [64, 64]}, "weight_block_size = [64, 64]"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (BLOCKS | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = {'num_bits': 8}"),
        (BLOCKS | {"rotation": "hadamard"}, "rotation = 'hadamard'"),
        (compressed("group"), "config_groups.group_0.weights.strategy = 'group'"),
        (compressed(num_bits=4), "weights.num_bits = 4"),
        (compressed(type="int"), "weights.type = 'int'"),
        (compressed(symmetric=False), "weights.symmetric = False"),
        (compressed(dynamic=True), "weights.dynamic = True"),
        (compressed("block", block_structure=[64, 64]), "block_structure = [64, 64]"),
        (compressed(group={"targets": ["re:.*q_proj"]}), "targets = ['re:.*q_proj']"),
        (compressed(group={"input_activations": None}), "input_activations = None"),
        (compressed(group={"input_activations": {"num_bits": 4}}), "input_activations.num_bits = 4"),
        (compressed(group={"input_activations": {"type": "int"}}), "input_activations.type = 'int'"),
        (compressed(group={"output_activations": {"num_bits": 8}}), "output_activations = "),
        (compressed() | {"format": "pack-quantized"}, "format = 'pack-quantized'"),
        (compressed() | {"sparsity_config": {"format": "sparse"}}, "sparsity_config = "),
        (
            compressed() | {"config_groups": {"a": compressed()["config_groups"]["group_0"], "b": compressed("tensor")["config_groups"]["group_0"]}},
            "config_groups = ['a', 'b']",
        ),
    ])  # fmt: skip
def test_read_stored_schemes_unknown_setting_is_refused(config, setting):
    with raises_code("weights.unsupported_setting", UnsupportedModelError) as caught:
        read_stored_schemes(config)
    assert str(caught.value).startswith("config.json: quantization_config.")
    assert setting in str(caught.value)


@for_each(
    "config",
    [
        {"quant_method": 7},
        BLOCKS | {"modules_to_not_convert": "lm_head"},
        BLOCKS | {"ignored_layers": [1]},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": []},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": 3}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"]}}},
    ],
)
def test_read_stored_schemes_wrong_type_is_refused(config):
    with pytest.raises(ModelFormatError):
        read_stored_schemes(config)


def runs(parts):
    return [(part.row_start, part.row_range, part.repeats) for part in parts]


@for_each(
    "part, block_rows, wanted",
    [
        (Part("t", 0, (256, 128)), 128, [(0, (0, 2), 1)]),
        (Part("t", 0, (256, 128)), 64, [(0, (0, 2), 2)]),
        (Part("t", 0, (320, 128)), 64, [(0, (0, 2), 2), (4, (2, 3), 1)]),
        (Part("t", 0, (200, 128)), 128, [(0, (0, 2), 1)]),
        (Part("t", 0, (512, 128), rows=(64, 448)), 64, [(0, (0, 1), 1), (1, (1, 3), 2), (5, (3, 4), 1)]),
        (Part("t", 0, (2, 192, 128)), 64, [(0, (0, 1), 2), (2, (1, 2), 1), (3, (2, 3), 2), (5, (3, 4), 1)]),
        (Part("t", 0, (2, 256, 128)), 128, [(0, (0, 4), 1)]),
        (Part("t", 0, (2, 256, 128), rows=(128, 384)), 128, [(0, (1, 3), 1)]),
    ],
)
def test_scale_parts_repeat_for_each_smaller_block(part, block_rows, wanted):
    settled = FP8_BLOCK.with_parts([block_rows])
    parts = scale_parts([part], FP8_BLOCK, settled, ("_scale_inv",), {})
    assert runs(parts) == wanted
    for own in parts:
        own.check()
        assert own.tensor == "t_scale_inv"


def test_scales_of_a_transposed_tensor_are_transposed():
    part = Part("t", 0, (2, 384, 256), is_transposed=True, columns=(128, 384))
    (own,) = scale_parts([part], FP8_BLOCK, FP8_BLOCK, ("_scale_inv",), {})
    assert (own.shape, own.is_transposed, own.columns, own.num_rows) == ((2, 3, 2), True, (1, 3), 4)
    (own,) = scale_parts([part], FP8, FP8, ("_scale",), {})
    assert (own.shape, own.num_rows, own.num_columns) == ((2, 1, 256), 512, 1)


def test_scale_parts_are_consecutive_with_the_present_name():
    entries = {name: entry(name, shape, "float32") for name, shape in (("a_scale_inv", (1, 2)), ("b_scale", (2, 2)))}
    parts = scale_parts(
        [Part("a", 0, (128, 256)), Part("b", 128, (256, 256))],
        FP8_BLOCK,
        FP8_BLOCK,
        ("_scale_inv", "_scale", ".scale"),
        entries,
    )
    assert [(part.tensor, part.row_start) for part in parts] == [("a_scale_inv", 0), ("b_scale", 1)]


@for_each(
    "shape, wanted",
    [((6, 1), [(0, (2, 4), 1)]), ((6,), [(0, (2, 4), 1)]), ((1,), [(0, (0, 1), 2)]), ((), [(0, (0, 1), 2)])],
)
def test_scales_by_row_or_tensor(shape, wanted):
    part = Part("t", 0, (6, 8), rows=(2, 4), whole_rows=(0, 6))
    assert runs(scale_parts([part], FP8, FP8, ("_scale",), {"t_scale": entry("t_scale", shape, "float32")})) == wanted


@pytest.mark.parametrize("is_transposed", [False, True])
def test_scales_by_row_of_matrices_in_one_row_each(is_transposed):
    part = Part("t", 0, (2, 8, 6) if is_transposed else (2, 6, 8), rows=(2, 9), is_transposed=is_transposed)
    parts = scale_parts([part], FP8, FP8, ("_scale",), {"t_scale": entry("t_scale", (2, 6), "float32")})
    assert runs(parts) == [(0, (2, 6), 1), (4, (0, 3), 1)]
    assert [own.columns for own in parts] == [(0, 1), (1, 2)]
    for own in parts:
        own.check()


def test_mxfp4_parts():
    part = Part("experts.down_proj", 6, (2, 96, 3), rows=(0, 3), columns=(32, 96), is_transposed=True)
    codes = code_rows(part, MXFP4, packs_rows=False)
    codes.check()
    assert codes.tensor == "experts.down_proj_blocks"
    assert (codes.shape, codes.columns, codes.source_rows, codes.source_columns) == ((2, 3, 3, 16), (16, 48), 6, 48)
    assert (codes.row_start, codes.rows, codes.matrix_rows) == (6, (0, 3), 3)
    (scales,) = scale_parts([codes], MXFP4, MXFP4, (), {})
    scales.check()
    assert (scales.tensor, scales.shape, scales.rows, scales.columns) == (
        "experts.down_proj_scales",
        (2, 3, 3),
        (0, 3),
        (1, 3),
    )
    assert code_rows(Part("a.weight", 0, (6, 64)), MXFP4, packs_rows=False).tensor == "a_blocks"


E4M3 = torch.float8_e4m3fn
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "torch_dtype": "bfloat16",
}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
LEFT_OUT = "model.layers.0.self_attn.o_proj"
SETTINGS = {
    "blocks": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [LEFT_OUT]},
    "tensors": {"quant_method": "fp8"},
    "channels": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": GROUP},
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
SCHEMES = {"blocks": "fp8_block", "tensors": "fp8_tensor", "channels": "fp8", "mxfp4": "mxfp4"}


def stored_tensors(how, name, kind, shape):
    """What a checkpoint has for one tensor of the model."""
    if how == "mxfp4" or kind not in ("linear", "expert") or (how == "blocks" and name.startswith(LEFT_OUT)):
        return {name: torch.ones(shape, dtype=torch.bfloat16)}
    ending, scales = {
        "blocks": ("_scale_inv", (-(-shape[0] // 128), -(-shape[1] // 128))),
        "tensors": ("_scale", ()),
        "channels": ("_scale", (shape[0], 1)),
    }[how]
    return {name: torch.ones(shape).to(E4M3), name + ending: torch.ones(scales)}


def write_checkpoint(folder, how, parameters):
    tensors = {}
    for parameter in parameters:
        if how == "mxfp4" and parameter.kind == "expert":
            continue
        for part in parameter.parts:
            tensors |= stored_tensors(how, part.tensor, parameter.kind, part.shape)
    if how == "mxfp4":
        for name, rows, blocks in (("gate_up_proj", 128, 4), ("down_proj", 128, 2)):
            prefix = f"model.layers.0.mlp.experts.{name}"
            tensors[f"{prefix}_blocks"] = torch.ones(4, rows, blocks, 16, dtype=torch.uint8)
            tensors[f"{prefix}_scales"] = torch.ones(4, rows, blocks, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file(tensors, folder / "model.safetensors")


def write_config(folder, how):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": SETTINGS[how]}))


def loaded(model, plan):
    ledger = Ledger()
    weights = load_weights(plan, model.source, "cpu", ledger, lambda done, total: None).weights
    return weights, ledger.group_peaks()


@for_each("how", SETTINGS)
def test_dummy_planes_are_planned_and_held_as_real_ones(how, tmp_path, monkeypatch):
    monkeypatch.setattr(dummy, "TABLE_VALUES", 1021)  # a table that fits into the staging of so small a model
    write_config(tmp_path, how)
    without_weights = open_directory_without_weights(tmp_path)
    write_checkpoint(tmp_path, how, without_weights.parameters)
    real = open_directory(tmp_path)
    for mesh in (Mesh(), Mesh(0, 1, 1, 2) if how == "blocks" else Mesh(1, 2, 1, 2)):  # 64 columns would cut a block
        parameters = [shard_parameters(model.parameters, mesh, 4, 2) for model in (without_weights, real)]
        plans = [
            plan_load(own, model.source, "bfloat16", stored=model.stored)
            for own, model in zip(parameters, (without_weights, real), strict=True)
        ]
        assert plans[0].weights == plans[1].weights
        assert Counter(plans[0].moves) == Counter(plans[1].moves)
        for kind in ("cpu", "cuda"):
            assert plans[0].staging_bytes(kind) == plans[1].staging_bytes(kind)
        (weights, peaks), (_, real_peaks) = loaded(without_weights, plans[0]), loaded(real, plans[1])
        assert peaks == real_peaks
        quantized = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedWeight)}
        assert {weight.scheme.name for weight in quantized.values()} == {SCHEMES[how]}
        assert ("layers.0.o.weight" in quantized) == (how in ("channels", "tensors"))
        for name, weight in quantized.items():
            spread = 64**-0.5 if "experts.down" in name else 128**-0.5
            values = dequantize(weight)
            assert values.isfinite().all(), name
            assert 0.8 * spread < values.std() < 1.25 * spread, name
            assert len(values.unique()) > 16, name


def test_open_without_weights_unknown_scheme_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "hqq"}}))
    with raises_code("weights.unsupported_setting", UnsupportedModelError):
        open_directory_without_weights(tmp_path)


def test_dummy_source_of_unquantized_weights_is_plain():
    entries = dummy_source([experts(2, 4, 32)], "float16", None).entries
    assert {entry.dtype for entry in entries.values()} == {"float16"}
    left_out = StoredSchemes(MXFP4, ignore=("experts",))
    source = dummy_source([experts(2, 4, 33)], "float16", left_out)
    assert plan_load([experts(2, 4, 33)], source, "float16", stored=left_out).num_quantized == 0
    with raises_code("weights.unsupported_scheme", UnsupportedModelError):
        dummy_source([experts(2, 4, 33)], "float16", StoredSchemes(MXFP4))


def test_open_without_weights_unreadable_pattern_is_refused(tmp_path):
    """Headers would tell; without them a pattern that is not followed leaves nothing to go by, in a plan neither."""
    stored = {"quant_method": "fp8", "modules_to_not_convert": [r"re:model\.layers\.\d+\.mlp"]}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": stored}))
    for use in (open_directory_without_weights, lambda folder: open_declared(str(folder))):
        with raises_code("weights.unsupported_setting", UnsupportedModelError):
            use(tmp_path)


IN_BLOCKS = StoredSchemes(FP8_BLOCK, ("_scale_inv", "_scale"))
ROWS = StoredSchemes(FP8, ("_scale",))
TENSORS = StoredSchemes(FP8_TENSOR, ("_scale",))
MX = StoredSchemes(MXFP4)
E4M3_NAME = "float8_e4m3fn"
NO_RECIPE = WeightRecipe()


def plan_of(parameters, entries, stored, recipe=NO_RECIPE):
    return plan_load(parameters, HeaderSource(entries), "bfloat16", recipe, stored)


def carried_out(plan, tensors):
    """Every plane that a plan fills, by copying numbers as its moves say."""
    planes = {spec.name: np.full(spec.shape, -1) for spec in plan.specs}
    for move in plan.moves:
        part = move.part
        array = tensors[move.tensor]
        if part.is_transposed:
            array = np.swapaxes(array, -1, -2)
        rows = array.reshape(part.source_rows, part.source_columns)
        (top, low), (left, right) = part.row_range, part.column_range
        out = planes[move.target].reshape(-1, part.num_columns)
        out[part.row_start : part.row_start + part.num_rows] = np.repeat(
            rows[top:low, left:right], part.repeats, axis=0
        )
    assert all((plane >= 0).all() for plane in planes.values())
    return planes


def spread(scales, scheme, shape):
    """The scale of every element."""
    scales = scales[..., None] if scheme.block_columns == 0 else scales
    wide = np.repeat(scales, scheme.block_columns or shape[-1], axis=-1)[..., : shape[-1]]
    return np.repeat(wide, scheme.block_rows, axis=-2)[..., : shape[-2], :]


def checkpoint(parts, scale_shape, rows_each, columns_each, random):
    """Codes and scales of whole tensors, their entries, and the scale of each element of them."""
    entries, tensors, spreads = [], {}, {}
    for part in {part.tensor: part for part in parts}.values():
        codes = random.integers(0, 256, part.shape)
        shape = scale_shape(part.shape)
        scales = random.integers(1, 10**6, shape)
        name = part.tensor + ("_scale_inv" if rows_each == 128 else "_scale")
        entries += [entry(part.tensor, part.shape, E4M3_NAME), entry(name, shape, "float32")]
        tensors |= {part.tensor: codes, name: scales}
        full = scales.reshape(*part.shape[:-2], -(-part.shape[-2] // rows_each), -(-part.shape[-1] // columns_each))
        wide = np.repeat(np.repeat(full, rows_each, axis=-2), columns_each, axis=-1)
        spreads[part.tensor] = wide[..., : part.shape[-2], : part.shape[-1]]
    return entries, tensors, spreads


def scales_of(parameter, parts, spreads):
    """What the scale of each element of a parameter should be."""
    out = np.zeros((parameter.num_rows, parameter.num_columns), dtype=int)
    for part in parts:
        rows = spreads[part.tensor].reshape(part.source_rows, part.source_columns)
        (top, low), (left, right) = part.row_range, part.column_range
        out[part.row_start : part.row_start + part.num_rows] = rows[top:low, left:right]
    return out.reshape(parameter.shape)


def block_shape(shape):
    return (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_plan_load_fused_blocks_keep_their_scales(data):
    heights = [16 * height for height in data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))]
    size = data.draw(st.sampled_from([1, 2, 4]))
    whole = stacked("layers.0.gate_up.weight", [size * height for height in heights], 200, split="rows")
    rank = data.draw(st.integers(0, size - 1))
    (parameter,) = shard_parameters([whole], Mesh(rank, size), 1, 1)
    entries, tensors, spreads = checkpoint(whole.parts, block_shape, 128, 128, np.random.default_rng(0))
    plan = plan_of([parameter], entries, IN_BLOCKS)
    (weight,) = plan.weights
    assert weight.scheme is not None
    assert 128 % weight.scheme.block_rows == 0
    planes = carried_out(plan, tensors)
    got = spread(planes[f"{parameter.name}.scale"], weight.scheme, parameter.shape)
    assert (got == scales_of(parameter, parameter.parts, spreads)).all()
    assert (planes[parameter.name] == scales_of(parameter, parameter.parts, tensors)).all()


@for_each(
    "heights, block_rows, num_scale_moves",
    [([256, 128], 128, 2), ([576, 192, 192], 64, 6), ([200], 128, 1), ([64, 64], 64, 2)],
)
def test_plan_load_block_rows_follow_the_part_boundaries(heights, block_rows, num_scale_moves):
    parameter = stacked("layers.0.qkv.weight", heights, 256)
    entries, _, _ = checkpoint(parameter.parts, block_shape, 128, 128, np.random.default_rng(0))
    plan = plan_of([parameter], entries, IN_BLOCKS)
    assert plan.weights[0].scheme == FP8_BLOCK.with_parts([block_rows])
    assert sum(move.target.endswith(".scale") for move in plan.moves) == num_scale_moves
    assert all(move.scheme is None for move in plan.moves), "nothing is quantized"
    assert plan.specs[1].shape == (-(-sum(heights) // block_rows), 2)


@for_each("layout", [0, 1])
@for_each("inner", [128, 192])
@for_each("mesh", [Mesh(), Mesh(1, 2), Mesh(0, 1, 1, 2), Mesh(1, 2, 1, 2)])
def test_plan_load_experts_in_blocks_keep_their_scales(layout, inner, mesh):
    whole = experts(4, inner, 128)
    parts = (whole.parts, *whole.layouts)[layout]
    (parameter,) = shard_parameters([whole], mesh, 1, 1)
    entries, tensors, spreads = checkpoint(parts, block_shape, 128, 128, np.random.default_rng(0))
    plan = plan_of([parameter], entries, IN_BLOCKS)
    (weight,) = plan.weights
    own = (parameter.parts, *parameter.layouts)[layout]
    got = spread(carried_out(plan, tensors)[f"{parameter.name}.scale"], weight.scheme, parameter.shape)
    assert (got == scales_of(parameter, own, spreads)).all()


@pytest.mark.each_pair
@pytest.mark.parametrize(
    ("scale_shape", "rows_each"),
    [
        (lambda shape: (shape[0], 1), 1),
        (lambda shape: (shape[0],), 1),
        (lambda shape: (), 10**6),
        (lambda shape: (1,), 10**6),
    ],
    ids=["[N, 1]", "[N]", "a number", "[1]"],
)
@pytest.mark.parametrize("stored", [ROWS, TENSORS], ids=["fp8", "fp8_tensor"])
@pytest.mark.parametrize("size", [1, 2])
def test_scales_by_row_or_tensor_are_kept_by_row(scale_shape, rows_each, stored, size):
    whole = stacked("layers.0.gate_up.weight", [6, 4, 4], 8, split="rows")
    for rank in range(size):
        (parameter,) = shard_parameters([whole], Mesh(rank, size), 1, 1)
        entries, tensors, spreads = checkpoint(whole.parts, scale_shape, rows_each, 8, np.random.default_rng(0))
        plan = plan_of([parameter], [*entries, entry("t0.input_scale", (), "float32")], stored)
        assert plan.weights[0].scheme == stored.scheme
        scales = carried_out(plan, tensors)[f"{parameter.name}.scale"]
        assert scales.shape == (14 // size,)
        assert (spread(scales, FP8, parameter.shape) == scales_of(parameter, parameter.parts, spreads)).all()


@pytest.mark.parametrize("ones", [(1, 1), (6, 1), (6,)], ids=["by expert", "by row", "by row, without a last 1"])
def test_scales_of_stacked_experts(ones):
    whole = experts(4, 3, 8)
    entries, tensors, spreads = checkpoint(
        whole.layouts[0], lambda shape: (shape[0], *ones), 6 // ones[0], 8, np.random.default_rng(0)
    )
    plan = plan_of([whole], entries, ROWS)
    scales = carried_out(plan, tensors)[f"{whole.name}.scale"]
    assert scales.shape == (4, 6)
    assert (spread(scales, FP8, whole.shape) == scales_of(whole, whole.layouts[0], spreads)).all()


def test_scales_of_experts_of_their_own():
    whole = experts(4, 3, 8)
    entries, tensors, spreads = checkpoint(whole.parts, lambda shape: (), 10**6, 8, np.random.default_rng(0))
    scales = carried_out(plan_of([whole], entries, TENSORS), tensors)[f"{whole.name}.scale"]
    assert (spread(scales, FP8, whole.shape) == scales_of(whole, whole.parts, spreads)).all()


def mx_checkpoint(random, count=4, rows=12, columns=128):
    blocks = random.integers(0, 256, (count, rows, columns // 32, 16))
    scales = random.integers(0, 256, (count, rows, columns // 32))
    tensors = {"experts.gate_up_blocks": blocks, "experts.gate_up_scales": scales}
    return [entry(name, array.shape, "uint8") for name, array in tensors.items()], tensors


@for_each("mesh", [Mesh(), Mesh(1, 2), Mesh(0, 1, 1, 2), Mesh(2, 3)])
def test_plan_load_takes_mxfp4_experts_unchanged(mesh):
    whole = experts(4, 6, 128)
    (parameter,) = shard_parameters([whole], mesh, 1, 1)
    entries, tensors = mx_checkpoint(np.random.default_rng(0))
    plan = plan_of([parameter], entries, MX)
    assert plan.weights[0].scheme == MXFP4
    planes = carried_out(plan, tensors)
    per, inner = 4 // mesh.expert_size, 6 // mesh.tensor_size
    chosen = slice(mesh.expert_rank * per, (mesh.expert_rank + 1) * per)
    rows = [half + mesh.tensor_rank * inner + row for half in (0, 6) for row in range(inner)]
    wanted = tensors["experts.gate_up_blocks"].reshape(4, 12, 64)[chosen][:, rows]
    assert (planes[parameter.name] == wanted).all()
    assert (planes[f"{parameter.name}.scale"] == tensors["experts.gate_up_scales"][chosen][:, rows]).all()


def test_plan_load_plain_experts_beside_mxfp4_take_any_shape():
    whole = experts(4, 6, 40)
    entries = [entry(part.tensor, part.shape) for part in whole.parts]
    assert plan_of([whole], entries, MX).num_quantized == 0
    with raises_code("weights.unsupported_scheme", UnsupportedModelError):
        plan_of([whole], [entry("experts.gate_up_blocks", (4, 12, 1, 16), "uint8")], MX)


def test_plan_load_splits_columns_of_mxfp4_experts():
    parts = (Part("experts.gate_up", 0, (4, 12, 128)),)
    whole = Parameter("layers.0.experts.down.weight", (4, 12, 128), parts, "expert", "columns")
    (parameter,) = shard_parameters([whole], Mesh(1, 2), 1, 1)
    entries, tensors = mx_checkpoint(np.random.default_rng(0))
    planes = carried_out(plan_of([parameter], entries, MX), tensors)
    assert (planes[parameter.name] == tensors["experts.gate_up_blocks"].reshape(4, 12, 64)[..., 32:]).all()
    assert (planes[f"{parameter.name}.scale"] == tensors["experts.gate_up_scales"][..., 2:]).all()
    (odd,) = shard_parameters([whole], Mesh(1, 8), 1, 1)
    with raises_code("weights.unsupported_scheme", UnsupportedModelError):
        plan_of([odd], entries, MX)


def test_plan_load_splits_columns_of_blocks():
    whole = stacked("layers.0.o.weight", [256], 512, split="columns")
    entries, tensors, spreads = checkpoint(whole.parts, block_shape, 128, 128, np.random.default_rng(0))
    (parameter,) = shard_parameters([whole], Mesh(1, 2), 1, 1)
    plan = plan_of([parameter], entries, IN_BLOCKS)
    got = spread(carried_out(plan, tensors)["layers.0.o.weight.scale"], FP8_BLOCK, parameter.shape)
    assert (got == scales_of(parameter, parameter.parts, spreads)).all()
    assert plan.read_bytes == 256 * 256 + 2 * 2 * 4
    (odd,) = shard_parameters([whole], Mesh(1, 8), 1, 1)
    with raises_code("weights.unsupported_scheme", UnsupportedModelError):
        plan_of([odd], entries, IN_BLOCKS)


QKV = stacked("layers.0.qkv.weight", [128, 128], 128)
NAMES = ("t0", "t1")


def qkv_entries(dtype=E4M3_NAME):
    codes = [entry(name, (128, 128), dtype) for name in NAMES]
    return codes + [entry(f"{name}_scale_inv", (1, 1), "float32") for name in NAMES]


def test_plan_load_missing_scale_or_code_is_refused():
    with raises_code("weights.missing_tensors", ModelFormatError):
        plan_of([QKV], qkv_entries()[:-1], IN_BLOCKS)
    with raises_code("weights.missing_tensors", ModelFormatError):
        plan_of([QKV], qkv_entries()[1:], IN_BLOCKS)


def test_plan_load_scale_of_wrong_shape_or_type_is_refused():
    entries = [*qkv_entries()[:-1], entry("t1_scale_inv", (2, 1), "float32")]
    with raises_code("weights.wrong_shape", ModelFormatError):
        plan_of([QKV], entries, IN_BLOCKS)
    entries = [*qkv_entries()[:-1], entry("t1_scale_inv", (1, 1), "int8")]
    with raises_code("weights.unsupported_dtype", UnsupportedModelError):
        plan_of([QKV], entries, IN_BLOCKS)


def test_scales_may_be_exponents_and_nothing_else_may():
    entries = [*qkv_entries()[:-1], entry("t1_scale_inv", (1, 1), "uint8")]
    plan = plan_of([QKV], entries, IN_BLOCKS)
    assert [spec.dtype for spec in plan.specs] == [E4M3_NAME, "float32"]
    assert [move.tensor_dtype for move in plan.moves] == [E4M3_NAME, E4M3_NAME, "float32", "uint8"]
    norm = Parameter("norm.weight", (8,), (Part("norm.weight", 0, (8,)),), "norm", dtype="float32")
    with raises_code("weights.unsupported_dtype", UnsupportedModelError):
        plan_of([QKV, norm], [*entries, entry("norm.weight", (8,), "uint8")], IN_BLOCKS)


def test_plan_load_scale_without_codes_is_unexpected():
    entries = [entry(name, (128, 128)) for name in NAMES]
    assert plan_of([QKV], entries, IN_BLOCKS).num_quantized == 0, "headers say what is quantized"
    with raises_code("weights.unexpected_tensors", ModelFormatError):
        plan_of([QKV], qkv_entries("bfloat16"), IN_BLOCKS)


def test_plan_load_parts_stored_differently_are_refused():
    entries = [entry("t1", (128, 128)) if item.name == "t1" else item for item in qkv_entries()]
    with raises_code("weights.unsupported_dtype", UnsupportedModelError):
        plan_of([QKV], entries, IN_BLOCKS)


def test_plan_load_quantizing_twice_is_refused_if_different():
    with raises_code("weights.already_quantized", ConfigError):
        plan_of([QKV], qkv_entries(), IN_BLOCKS, WeightRecipe(INT8))
    assert plan_of([QKV], qkv_entries(), IN_BLOCKS, WeightRecipe(FP8_BLOCK)).num_quantized == 1


def test_plan_load_modules_left_unquantized_stay_so():
    head = Parameter("lm_head.weight", (64, 128), (Part("lm_head.weight", 0, (64, 128)),), "head")
    other = Parameter("layers.0.o.weight", (64, 128), (Part("layers.0.o.weight", 0, (64, 128)),))
    entries = [*qkv_entries(), entry("lm_head.weight", (64, 128)), entry("layers.0.o.weight", (64, 128))]
    stored = StoredSchemes(FP8_BLOCK, ("_scale_inv",), ("lm_head",))
    plan = plan_of([QKV, head, other], entries, stored, WeightRecipe(FP8_BLOCK))
    assert [weight.stored_as for weight in plan.weights] == ["fp8_block", "bfloat16", "fp8_block"]
    assert {move.target: move.scheme for move in plan.moves}["layers.0.o.weight"] == FP8_BLOCK, "quantized on the way"


def test_stored_schemes_are_used_only_if_codes_exist():
    names = [entry("t0", (128, 128)), entry("t0.input_scale", (), E4M3_NAME)]
    assert ROWS.used_by({one.name: one for one in names}) is None
    assert ROWS.used_by({one.name: one for one in qkv_entries()}) is ROWS
    assert StoredSchemes(FP8, (), ("lm_head", "re:(?!a)b")).unread_pattern == "re:(?!a)b"
    assert ROWS.unread_pattern is None


def test_plan_load_codes_declared_unquantized_are_refused():
    stored = StoredSchemes(FP8_BLOCK, ("_scale_inv",), ("t1",))
    with raises_code("model.mismatch", ModelFormatError):
        plan_of([QKV], qkv_entries(), stored)


@for_each(
    "pattern, left_alone",
    [
        ("lm_head", ["lm_head.weight"]),
        ("model.layers.1", ["model.layers.1.mlp.gate.weight"]),
        ("gate", ["model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight"]),
        ("mlp.gate", ["model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight"]),
        ("re:.*lm_head", ["lm_head.weight"]),
        ("re:.*mlp.gate$", ["model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight"]),
        (r"re:^model\.layers\.1\.", ["model.layers.1.mlp.gate.weight"]),
        ("re:.*gate_proj", ["model.layers.1.mlp.gate_proj.weight"]),
        ("re:.*layers.1.*gate$", ["model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight"]),
        ("re:lm_head$", ["lm_head.weight"]),
        ("re:lm$", []),
        ("re:layers", []),
        ("re:(a+)+$", []),
        ("re:.*zz.*gate", []),
        ("re:.*lm_head.*lm_head$", []),
        ("mode", []),
        ("model.layers.*.mlp.gate", ["model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight"]),
        ("model.layers.*.self_attn", []),
        ("*lm_head", []),
    ],
)
def test_leaves_alone_matches_patterns_of_modules(pattern, left_alone):
    tensors = ["lm_head.weight", "model.layers.1.mlp.gate.weight", "model.layers.11.mlp.gate.weight"]
    tensors.append("model.layers.1.mlp.gate_proj.weight")
    stored = StoredSchemes(FP8, ("_scale",), (pattern,))
    if pattern in ("model.layers.1", r"re:^model\.layers\.1\.", "model.layers.*.mlp.gate"):
        left_alone = [*left_alone, "model.layers.1.mlp.gate_proj.weight"]
    assert [tensor for tensor in tensors if stored.leaves_alone([tensor])] == left_alone


def test_stored_schemes_cover_heads_by_row_but_no_routers():
    assert IN_BLOCKS.kinds == ("linear", "expert")
    assert ROWS.kinds == ("linear", "expert", "head")
    assert MX.kinds == ("expert",)
    router = Parameter("layers.0.router.weight", (4, 8), (Part("gate", 0, (4, 8)),), "router")
    with raises_code("weights.unsupported_dtype", UnsupportedModelError):
        plan_of([router], [entry("gate", (4, 8), E4M3_NAME)], ROWS)
    head = Parameter("lm_head.weight", (128, 128), (Part("lm_head.weight", 0, (128, 128)),), "head")
    entries = [
        entry("lm_head.weight", (128, 128), E4M3_NAME),
        entry("lm_head.weight_scale_inv", (1, 1), "float32"),
    ]
    with raises_code("weights.unsupported_dtype", UnsupportedModelError):
        plan_of([head], entries, IN_BLOCKS)
