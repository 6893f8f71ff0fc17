"""quantization_config: the ways that are read, and everything else declined in words."""

import copy

import pytest

from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.planning.stored_schemes import read_stored_schemes
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, MXFP4

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


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


@pytest.mark.parametrize(
    ("config", "scheme", "endings", "ignore"),
    [
        (BLOCKS, FP8_BLOCK, ("_scale_inv", "_scale"), ()),
        (BLOCKS | {"modules_to_not_convert": ["a", "b"]}, FP8_BLOCK, ("_scale_inv", "_scale"), ("a", "b")),
        (BLOCKS | {"scale_fmt": "ue8m0"}, FP8_BLOCK, ("_scale_inv", "_scale"), ()),
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
def test_known_ways_are_read(config, scheme, endings, ignore):
    before = copy.deepcopy(config)
    stored = read_stored_schemes(config)
    assert stored is not None
    assert (stored.scheme, stored.scale_endings, stored.ignore) == (scheme, endings, ignore)
    assert config == before


@pytest.mark.parametrize("config", [None, {}])
def test_nothing_is_nothing(config):
    assert read_stored_schemes(config) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method = 'gptq'; checkpoints quantized by fp8, fbgemm_fp8"),
        ({"bits": 4}, "quant_method = ''"),
        (BLOCKS | {"weight_block_size": [64, 64]}, "weight_block_size = [64, 64]; [128, 128] is understood"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt = 'e5m2'; 'e4m3' or 'float8_e4m3fn' is understood"),
        (BLOCKS | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = {'num_bits': 8}; nothing is understood"),
        (BLOCKS | {"rotation": "hadamard"}, "rotation = 'hadamard'; nothing is understood"),
        (compressed("group"), "config_groups.group_0.weights.strategy = 'group'; channel, tensor, block"),
        (compressed(num_bits=4), "weights.num_bits = 4; 8 is understood"),
        (compressed(type="int"), "weights.type = 'int'; 'float' is understood"),
        (compressed(symmetric=False), "weights.symmetric = False"),
        (compressed(dynamic=True), "weights.dynamic = True"),
        (compressed("block", block_structure=[64, 64]), "block_structure = [64, 64]"),
        (compressed(group={"targets": ["re:.*q_proj"]}), "targets = ['re:.*q_proj']"),
        (compressed(group={"input_activations": None}), "input_activations = None"),
        (compressed(group={"input_activations": {"num_bits": 4}}), "input_activations.num_bits = 4; 8 is understood"),
        (compressed(group={"input_activations": {"type": "int"}}), "input_activations.type = 'int'; 'float' is understood"),
        (compressed(group={"output_activations": {"num_bits": 8}}), "output_activations = "),
        (compressed() | {"format": "pack-quantized"}, "format = 'pack-quantized'"),
        (compressed() | {"sparsity_config": {"format": "sparse"}}, "sparsity_config = "),
        (
            compressed() | {"config_groups": {"a": compressed()["config_groups"]["group_0"], "b": compressed("tensor")["config_groups"]["group_0"]}},
            "config_groups = ['a', 'b']; they store weights as fp8, fp8_tensor",
        ),
    ],
)  # fmt: skip
def test_anything_else_is_declined(config, words):
    with pytest.raises(UnsupportedModelError) as caught:
        read_stored_schemes(config)
    assert str(caught.value).startswith("config.json says quantization_config.")
    assert words in str(caught.value)


@pytest.mark.parametrize(
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
def test_wrong_types_are_refused(config):
    with pytest.raises(ModelFormatError, match=r"config.json"):
        read_stored_schemes(config)
