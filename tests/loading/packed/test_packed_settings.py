"""Settings of packed checkpoints: the layouts that they declare, and the formats that are refused by name."""

from typing import Any

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.packed.layout import AWQ, FP8, GPTQ, INT8, MODELOPT_NVFP4, MXFP4, NVFP4, PACKED_INT, PackedLayout
from holdfast.loading.packed.settings import CACHE_NOTE, TABLES, read_packed
from loading.packed.packed_settings import auto_round, awq, compressed, floats, gptq, integers, modelopt

INT4 = integers()
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


@for_each(
    "config, layouts",
    [
        (awq(), [PackedLayout(AWQ, 4, 128, "words")]),
        (awq(-1, version="GEMM", backend="autoawq"), [PackedLayout(AWQ, 4, 0, "words")]),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, [PackedLayout(AWQ, 4, 64, "words")]),
        (gptq(), [PackedLayout(GPTQ, 4, 128, "words_less_one")]),
        (gptq(version=2), [PackedLayout(GPTQ, 4, 128, "words")]),
        (gptq(sym=True, order=True), [PackedLayout(GPTQ, 4, 128, "middle", has_order=True)]),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, [PackedLayout(GPTQ, 8, 0, "middle")]),
        (
            gptq(dynamic={"-:lm_head": {}, "+:up": {"bits": 8, "sym": True}, "down": {"group_size": 32}}),
            [
                PackedLayout(GPTQ, 4, 128, "words_less_one"),
                PackedLayout(GPTQ, 8, 128, "middle"),
                PackedLayout(GPTQ, 4, 32, "words_less_one"),
            ],
        ),
        (auto_round("auto_round:auto_gptq", sym=False), [PackedLayout(GPTQ, 4, 128, "words_less_one")]),
        (auto_round("auto_round", sym=False), [PackedLayout(GPTQ, 4, 128, "words")]),
        (auto_round("auto_round:gptqmodel"), [PackedLayout(GPTQ, 4, 128, "middle")]),
        (auto_round("auto_round:auto_awq", 32), [PackedLayout(AWQ, 4, 32, "words")]),
        (auto_round("auto_round:llm_compressor"), [PackedLayout(PACKED_INT, 4, 128)]),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 8, "group_size": 32},
            [PackedLayout(PACKED_INT, 8, 32)],
        ),
        (auto_round("auto_round:llm_compressor", sym=False), [PackedLayout(PACKED_INT, 4, 128, "words")]),
        (auto_round("auto_round:llm_compressor", data_type="nv_fp4"), [PackedLayout(NVFP4, 4, 16)]),
        (auto_round("auto_round:llm_compressor", data_type="mx_fp"), [PackedLayout(MXFP4, 4, 32)]),
        ({"quant_method": "auto-round", "backend": "auto_round", "bits": 4, "group_size": 128, "sym": False,
          "extra_config": {"lm_head": {"bits": 16}, "up_proj": {"bits": 8}}},
         [PackedLayout(GPTQ, 4, 128, "words"), PackedLayout(GPTQ, 8, 128, "words")]),
        (compressed("pack-quantized", INT4), [PackedLayout(PACKED_INT, 4, 128)]),
        (compressed("pack-quantized", integers(-1, 8, False)), [PackedLayout(PACKED_INT, 8, 0, "words")]),
        (compressed("pack-quantized", integers(32, order="group")), [PackedLayout(PACKED_INT, 4, 32, has_order=True)]),
        (compressed("pack-quantized", integers(32, order="weight")), [PackedLayout(PACKED_INT, 4, 32)]),
        (compressed("int-quantized", integers(-1, 8)), [PackedLayout(INT8, 8, 0)]),
        (compressed("naive-quantized", integers(-1, 8, False)), [PackedLayout(INT8, 8, 0, "plain")]),
        (compressed("int-quantized", integers(-1, 8) | {"strategy": "tensor"}), [PackedLayout(INT8, 8, 0)]),
        (compressed("nvfp4-pack-quantized", floats(16)), [PackedLayout(NVFP4, 4, 16)]),
        (compressed("mxfp4-pack-quantized", floats(32)), [PackedLayout(MXFP4, 4, 32)]),
        (compressed("mixed-precision", floats(16), E4M3), [PackedLayout(NVFP4, 4, 16), PackedLayout(FP8, 8, 0)]),
        (modelopt(), [PackedLayout(MODELOPT_NVFP4, 4, 16)]),
        (modelopt("W4A16_NVFP4", quant_method="modelopt_fp4"), [PackedLayout(MODELOPT_NVFP4, 4, 16)]),
        (modelopt("FP8"), [PackedLayout(FP8, 8, 0)]),
        (
            modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}),
            [PackedLayout(FP8, 8, 0), PackedLayout(MODELOPT_NVFP4, 4, 16)],
        ),
    ],
)  # fmt: skip
def test_read_packed_declares_the_layouts(config: dict[str, Any], layouts: list[PackedLayout]) -> None:
    found = read_packed(config)
    assert found is not None
    assert list(found.layouts) == layouts


@for_each(
    "config",
    [
        None,
        {},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "mxfp4"},
        compressed("float-quantized", E4M3),
    ],
)
def test_read_packed_weights_that_load_unchanged_are_none(config: dict[str, Any] | None) -> None:
    assert read_packed(config) is None


@for_each(
    "config, key, instead",
    [
        *(({"quant_method": name}, "quant_method", "take") for name in TABLES["declined_methods"]),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method", "--quantization mxfp4 or int8"),
        ({"quant_method": "exl3"}, "quant_method", "AWQ, GPTQ or GGUF"),
        ({"quant_method": "sparse-thing"}, "quant_method", "fp8, fbgemm_fp8, mxfp4, awq, gptq"),
        ({"bits": 4}, "quant_method", "awq, gptq"),
        (awq(version="gemv"), "version", "gemm"),
        (awq(version="gemv_fast"), "version", "gemm"),
        (awq(version="llm-awq"), "version", "gemm"),
        (awq(backend="llm-awq"), "backend", "gemm"),
        (awq(bits=8), "bits", "4 bits"),
        (gptq(bits=3), "bits", "4 and 8"),
        (gptq(bits=2), "bits", "4 and 8"),
        (gptq(checkpoint_format="gptq_p"), "checkpoint_format", "gptq and gptq_v2"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format", "gptq and gptq_v2"),
        (gptq(checkpoint_format=None, format="gptq_p"), "format", "gptq and gptq_v2"),
        (gptq(dynamic={"+:up": {"bits": 3}}), "dynamic.+:up.bits", "4 and 8"),
        (gptq(rotation="hadamard"), "rotation", "codes mean"),
        (auto_round("auto_round:auto_gptq", rotation_config={"hadamard_type": "hadamard"}), "rotation_config", "mean"),
        (gptq(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config", "codes mean"),
        (gptq(pack_dtype="int16"), "pack_dtype", "codes mean"),
        (auto_round("auto_round:exllamav2"), "packing_format", "auto_round:auto_gptq"),
        ({"quant_method": "auto-round", "bits": 4}, "packing_format", "auto_round:auto_gptq"),
        (compressed("marlin-24", INT4), "format", "pack-quantized"),
        (compressed("nvfp4-pack-quantized", INT4), "format", "pack-quantized"),
        (compressed("pack-quantized", integers(bits=3)), "weights.num_bits", "4 and 8"),
        (compressed("pack-quantized", INT4 | {"strategy": "block"}), "weights.strategy", "group, channel"),
        (compressed("pack-quantized", INT4 | {"group_size": None}), "weights.group_size", "number of inputs"),
        (compressed("pack-quantized", INT4 | {"dynamic": True}), "weights.dynamic", "stored"),
        (compressed("nvfp4-pack-quantized", floats(16) | {"group_size": 64}), "weights.group_size", "16 and 32"),
        (compressed("nvfp4-pack-quantized", floats(16) | {"symmetric": False}), "weights.symmetric", "zero points"),
        (compressed("pack-quantized", INT4, transform_config={"a": 1}), "transform_config", "codes mean"),
        (compressed("pack-quantized", INT4, sparsity_config={"format": "sparse-24"}), "sparsity_config", "codes mean"),
        (modelopt("W4A16_AWQ"), "quant_algo", "NVFP4"),
        (modelopt("MXFP8"), "quant_algo", "NVFP4"),
        (modelopt(group_size=32), "group_size", "groups of 16"),
        (modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A16_AWQ"}}), "a.quant_algo", "NVFP4"),
    ],
)
def test_read_packed_other_formats_are_refused_by_name(config: dict[str, Any], key: str, instead: str) -> None:
    with raises_code("weights.unsupported_setting", UnsupportedModelError) as caught:
        read_packed(config)
    assert str(caught.value.values["key"]).endswith(key)
    assert instead in str(caught.value.values["reason"])


@for_each(
    "config",
    [
        {"quant_method": 7},
        awq(group_size="128"),
        awq(group_size=0),
        awq(group_size=True),
        awq(version=[1]),
        {"quant_method": "awq"},
        gptq(checkpoint_format={}),
        gptq(dynamic=[1]),
        gptq(dynamic={"+:a": 3}),
        gptq(sym=1),
        gptq(desc_act="true"),
        auto_round("auto_round") | {"packing_format": 3},
        compressed("pack-quantized", INT4) | {"format": ["pack-quantized"]},
        compressed("pack-quantized", INT4 | {"symmetric": 0}),
        compressed("pack-quantized"),
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        modelopt() | {"quant_algo": ["NVFP4"]},
        modelopt("MIXED_PRECISION"),
        modelopt("MIXED_PRECISION", quantized_layers=["a"]),
    ],
)
def test_read_packed_malformed_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ModelFormatError) as caught:
        read_packed(config)
    assert caught.value.code.startswith("architecture.")


def test_read_packed_names_scales_of_kv_pages_as_unused() -> None:
    for config in (
        modelopt(kv_cache_scheme={"num_bits": 8}),
        {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}},
    ):
        found = read_packed(config)
        assert found is not None
        assert "unused" in found.notes[1]
    plain = read_packed(modelopt())
    assert plain is not None
    assert len(plain.notes) == 1


def test_read_packed_accepts_what_exporters_write() -> None:
    """Symmetric AWQ stores its zero points; a dense sparsity_config leaves out nothing."""
    assert read_packed(awq(zero_point=False, sym=True)) == read_packed(awq())
    dense = {"format": "dense", "global_sparsity": 0.1, "registry_requires_subclass": False}
    said = compressed("pack-quantized", integers(32))
    assert read_packed(said | {"sparsity_config": dense}) == read_packed(said)
    aliases = (read_packed(auto_round(name)) for name in ("auto_round:awq", "auto_round:auto_awq"))
    assert len(set(aliases)) == 1


def test_read_packed_without_act_order_may_be_null() -> None:
    assert read_packed(gptq(desc_act=None)) == read_packed(gptq(desc_act=False))


@for_each("sym", [True, False])
def test_read_packed_symmetric_layers_beside_others_share_a_layout(sym: bool) -> None:
    """Their headers are equal. Layers of other groups have layouts of their own."""
    found = read_packed(gptq(64, sym=sym, dynamic={"+:a": {"sym": not sym}, "+:b": {"group_size": 32}}))
    assert found is not None
    kinds = [(layout.group_size, layout.zeros, layout.may_be_middle) for layout in found.layouts]
    assert kinds == [(64, "words_less_one", True), (32, "middle" if sym else "words_less_one", False)]


def test_read_packed_of_quantized_pages_alone_has_no_layout() -> None:
    found = read_packed({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"})
    assert found is not None
    assert found.layouts == ()
    assert found.notes == (CACHE_NOTE,)


@for_each("packing", ["auto_round:auto_awq", "auto_round:llm_compressor", "auto_round:auto_gptq"])
def test_read_packed_auto_round_layers_may_differ(packing: str) -> None:
    own = {"model.layers.0.mlp.up_proj": {"group_size": 32}, "lm_head": {"bits": 16}}
    found = read_packed(auto_round(packing, 128, extra_config=own))
    assert found is not None
    assert [layout.group_size for layout in found.layouts] == [128, 32]
