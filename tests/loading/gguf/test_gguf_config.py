"""GGUF metadata as a config.json: numbers arrive, what is not computed is declined, wrong values are refused by name."""

from array import array
from pathlib import Path

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import HoldfastError, ModelFormatError, UnsupportedModelError
from holdfast.loading.gguf.config import decimal, gguf_config
from holdfast.loading.gguf.file import TYPES, GGUFFile, GGUFTensor
from holdfast.models.blueprints.read import PLANNED_FAMILIES
from holdfast.models.grouped_readers import read_spec
from holdfast.models.spec import ExpertsSpec, ModelSpec

F32, F16, Q8_0, BF16 = TYPES[0], TYPES[1], TYPES[8], TYPES[30]
SINGLE = 9.999999747378752e-06
"""1e-5 after a trip through float32."""


def file(arch: str = "llama", *, tensors: tuple[GGUFTensor, ...] = (), **keys: object) -> GGUFFile:
    """A header in memory; double underscores in keyword names stand for dots, and None takes a key out."""
    metadata: dict[str, object] = {
        "general.architecture": arch,
        f"{arch}.block_count": 2,
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": 64,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": SINGLE,
        "tokenizer.ggml.tokens": ["a"] * 100,
    }
    for key, value in keys.items():
        full = key.replace("__", ".")
        full = full if full.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{full}"
        metadata[full] = value
    stored = {"token_embd.weight": GGUFTensor("token_embd.weight", Q8_0, (128, 64), 0, 8704)}
    stored |= {tensor.name: tensor for tensor in tensors}
    present = {key: value for key, value in metadata.items() if value is not None}
    return GGUFFile(Path("some.gguf"), 3, 32, 0, 10**6, 0, present, stored)


def spec(arch: str = "llama", **keys: object):
    return read_spec(gguf_config(file(arch, **keys)), "some.gguf")


def test_gguf_config_reads_the_numbers_of_a_llama():
    found = spec()
    assert (found.architecture, found.family) == ("LlamaForCausalLM", "llama")
    assert (found.hidden_size, found.intermediate_size, found.num_layers) == (64, 96, 2)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 16)
    assert (found.vocab_size, found.max_position, found.norm_eps) == (128, 256, 1e-5)
    assert found.rope is not None
    assert (found.rope.theta, found.rope.kind) == (10_000.0, "default")
    assert found.tied_embeddings


def test_gguf_config_qwen3_has_own_head_dim_and_qk_norm():
    found = spec("qwen3", attention__key_length=32, attention__value_length=32, rope__freq_base=1e6)
    assert (found.head_dim, found.query_size, found.qk_norm) == (32, 128, True)
    assert found.rope is not None
    assert found.rope.theta == 1e6


def test_gguf_config_with_a_head_tensor_unties_the_embedding():
    head = GGUFTensor("output.weight", F16, (128, 64), 0, 16384)
    assert not gguf_config(file(tensors=(head,)))["tie_word_embeddings"]


def test_gguf_config_without_kv_head_count_uses_head_count():
    assert spec(attention__head_count_kv=None).num_kv_heads == 4


def test_gguf_config_equal_numbers_per_layer_become_one():
    found = spec(attention__head_count=array("i", [4, 4]), feed_forward_length=array("I", [96, 96]))
    assert (found.num_heads, found.intermediate_size) == (4, 96)
    with pytest.raises(ModelFormatError):
        spec(attention__head_count=array("i", [4, 2]))


@pytest.mark.parametrize(
    ("arch", "architecture"),
    [("llama", "MistralForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_gguf_config_sliding_window_is_in_every_layer(arch, architecture):
    found = spec(arch, attention__sliding_window=64)
    assert found.architecture == architecture
    assert found.sliding_windows == (64, 64)
    assert spec(arch, attention__sliding_window=0).sliding_windows == ()


def test_gguf_config_reads_linear_rope_scaling():
    for keys in ({"rope__scaling__factor": 4.0}, {"rope__scale_linear": 4.0}):
        rope = spec(**keys).rope
        assert rope is not None
        assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_gguf_config_rope_scaling_none_is_default():
    rope = spec(rope__scaling__type="none", rope__scaling__factor=8.0).rope
    assert rope is not None
    assert rope.kind == "default"


def test_gguf_config_reads_yarn():
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
    rope = spec("qwen2", **yarn).rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 64)
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (32.0, 1.0, None)
    rope = spec("qwen2", **yarn, rope__scaling__yarn_beta_fast=16.0, rope__scaling__yarn_attn_factor=1.5).rope
    assert rope is not None
    assert (rope.beta_fast, rope.attention_factor) == (16.0, 1.5)
    rope = spec("qwen2", **yarn, rope__scaling__attn_factor=2.0).rope
    assert rope is not None
    assert rope.attention_factor == pytest.approx(2.2772588722239782)


@for_each("ggml_type, dtype", [(F32, "float32"), (F16, "float16"), (BF16, "bfloat16"), (Q8_0, "bfloat16")])
def test_gguf_config_dtype_is_that_of_most_elements(ggml_type, dtype):
    big = GGUFTensor("blk.0.ffn_up.weight", ggml_type, (1024, 64), 0, 0)
    assert gguf_config(file(tensors=(big,)))["dtype"] == dtype


@for_each("written", [1e-5, 1e-6, 5e-324, 0.1, 500_000.0, 1e30, 1 / 3])
def test_decimal_undoes_single_precision(written):
    rounded = array("f", [written])[0]
    assert array("f", [decimal(rounded)])[0] == rounded
    if written not in (5e-324, 1 / 3):
        assert decimal(rounded) == written


BROKEN = {
    "no architecture": ({"general__architecture": None}, "general.architecture"),
    "architecture a number": ({"general__architecture": 3}, "general.architecture"),
    "no layers": ({"block_count": None}, "llama.block_count"),
    "zero layers": ({"block_count": 0}, "llama.block_count"),
    "a billion layers": ({"block_count": 10**9}, "llama.block_count"),
    "layers as text": ({"block_count": "2"}, "llama.block_count"),
    "layers as a bool": ({"block_count": True}, "llama.block_count"),
    "no width": ({"embedding_length": None}, "llama.embedding_length"),
    "width 2**63": ({"embedding_length": 2**63}, "llama.embedding_length"),
    "no inner width": ({"feed_forward_length": None}, "llama.feed_forward_length"),
    "no heads": ({"attention__head_count": None}, "llama.attention.head_count"),
    "heads that do not divide": ({"attention__head_count": 7}, "llama.attention.head_count"),
    "key heads that do not divide": ({"attention__head_count_kv": 3}, "num_key_value_heads"),
    "odd head": ({"attention__key_length": 15}, "head_dim"),
    "no context": ({"context_length": None}, "llama.context_length"),
    "context negative": ({"context_length": -1}, "llama.context_length"),
    "no epsilon": ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
    "epsilon NaN": ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
    "epsilon infinite": ({"attention__layer_norm_rms_epsilon": float("inf")}, "layer_norm_rms_epsilon"),
    "base zero": ({"rope__freq_base": 0.0}, "rope.freq_base"),
    "base as text": ({"rope__freq_base": "1e4"}, "rope.freq_base"),
    "factor negative": ({"rope__scaling__factor": -1.0}, "rope.scaling.factor"),
    "window negative": ({"attention__sliding_window": -5}, "sliding_window"),
    "more tokens than rows": ({"tokenizer__ggml__tokens": ["a"] * 129}, "tokenizer.ggml.tokens"),
    "tokens that are numbers": ({"tokenizer__ggml__tokens": array("i", [1])}, "tokenizer.ggml.tokens"),
}


@for_each("case", BROKEN)
def test_gguf_config_wrong_value_is_refused_by_name(case):
    keys, named = BROKEN[case]
    with pytest.raises(ModelFormatError) as caught:
        spec(**keys)
    assert "some.gguf" in str(caught.value)
    assert named in str(caught.value)


DECLINED = {
    "mixture of experts": {"expert_count": 8},
    "value heads of another width": {"attention__value_length": 8},
    "half of a head rotated": {"rope__dimension_count": 8},
    "another attention scale": {"attention__scale": 0.5},
    "soft cap": {"final_logit_softcapping": 30.0},
    "logit scale": {"logit_scale": 0.25},
    "encoder": {"attention__causal": False},
    "window pattern": {"attention__sliding_window_pattern": array("B", [1, 0])},
    "longrope": {"rope__scaling__type": "longrope"},
    "part of yarn": {"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 0.5},
    "longer rotations": {"rope__scaling__attn_factor": 1.2},
    "adapter": {"general__type": "adapter"},
}


@for_each("case", DECLINED)
def test_gguf_config_unsupported_setting_is_declined(case):
    with raises_code("gguf.unsupported_setting", UnsupportedModelError) as caught:
        spec(**DECLINED[case])
    assert "\n" not in str(caught.value)


def test_gguf_config_neutral_values_change_nothing():
    neutral = {"expert_count": 0, "logit_scale": 1.0, "attention__causal": True, "attention__scale": 0.25}
    assert spec(**neutral, split__count=1, general__type="model", rope__scaling__factor=0.0) == spec()


@for_each("arch", ["opt", "mamba2", "gemma2", "", "x" * 500])
def test_gguf_config_unknown_architecture_is_declined(arch):
    with raises_code("gguf.unsupported_architecture", UnsupportedModelError) as caught:
        gguf_config(file(arch))
    assert len(str(caught.value)) < 300


def test_gguf_config_without_embedding_tensor_is_refused():
    empty = file()
    with raises_code("gguf.wrong_tensor", HoldfastError):
        gguf_config(GGUFFile(empty.path, 3, 32, 0, 0, 0, empty.metadata, {}))


EXPERTS = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
    "expert_shared_feed_forward_length": 40,
}
ARCHITECTURES = {"qwen2moe": "Qwen2MoeForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}


def tensor(name: str, *shape: int) -> GGUFTensor:
    return GGUFTensor(name, TYPES[0], shape, 0, 0)


ROUTERS = tuple(tensor(f"blk.{layer}.ffn_gate_inp.weight", 8, 64) for layer in range(2))


def experts_spec(arch: str, tensors: tuple[GGUFTensor, ...] = ROUTERS, **keys: object) -> ModelSpec:
    return read_spec(gguf_config(file(arch, tensors=tensors, **(EXPERTS | keys))), "some.gguf")


def test_gguf_config_reads_the_numbers_of_experts():
    two, three = experts_spec("qwen2moe"), experts_spec("qwen3moe")
    assert [two.architecture, three.architecture] == list(ARCHITECTURES.values())
    assert two.experts == ExpertsSpec(8, 3, 24, shared_size=40, has_shared_gate=True, normalizes=False)
    assert three.experts == ExpertsSpec(8, 3, 24, normalizes=True)
    assert (two.hidden_size, two.intermediate_size, two.num_layers, two.qk_norm) == (64, 96, 2, False)
    assert three.qk_norm


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gguf_config_expert_weights_norm_sets_normalizes(arch):
    for normalizes in (False, True):
        experts = experts_spec(arch, expert_weights_norm=normalizes).experts
        assert experts is not None
        assert experts.normalizes == normalizes


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gguf_config_moe_sliding_window_is_in_every_layer(arch):
    """Whichever layers the settings of a family would give it to."""
    assert experts_spec(arch, attention__sliding_window=64).sliding_windows == (64, 64)
    assert experts_spec(arch).sliding_windows == ()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gguf_config_neutral_expert_values_change_nothing(arch):
    neutral = {
        "leading_dense_block_count": 0,
        "expert_gating_func": 1,
        "expert_weights_scale": 1.0,
        "expert_shared_count": 1,
        "expert_group_count": 0,
        "interleave_moe_layer_step": 1,
        "swiglu_clamp_exp": array("f", [0.0, 0.0]),
    }
    assert experts_spec(arch, **neutral) == experts_spec(arch)


@for_each(
    "key, value",
    [
        ("leading_dense_block_count", 1),
        ("expert_gating_func", 2),
        ("expert_weights_scale", 2.5),
        ("expert_weights_scale", float("nan")),
        ("expert_group_count", 4),
        ("moe_every_n_layers", 2),
        ("swiglu_clamp_exp", array("f", [0.0, 7.0])),
        ("logit_scale", 0.5),
    ],
)
def test_gguf_config_unsupported_expert_setting_is_declined(key, value):
    with raises_code("gguf.unsupported_setting", UnsupportedModelError):
        experts_spec("qwen3moe", **{key: value})


BROKEN_GGUF_EXPERTS: dict[str, tuple[dict[str, object], str]] = {
    "no count": ({"expert_count": None}, "qwen2moe.expert_count"),
    "no experts": ({"expert_count": 0}, "qwen2moe.expert_count"),
    "a billion experts": ({"expert_count": 10**9}, "qwen2moe.expert_count"),
    "count as text": ({"expert_count": "8"}, "qwen2moe.expert_count"),
    "more experts than routers know": ({"expert_count": 9}, "blk.0.ffn_gate_inp.weight"),
    "another width than routers have": ({"embedding_length": 128}, "blk.0.ffn_gate_inp.weight"),
    "more layers than routers": ({"block_count": 3}, "blk.2.ffn_gate_inp.weight"),
    "no used count": ({"expert_used_count": None}, "qwen2moe.expert_used_count"),
    "none used": ({"expert_used_count": 0}, "qwen2moe.expert_used_count"),
    "more used than there are": ({"expert_used_count": 9}, "qwen2moe.expert_used_count"),
    "no width": ({"expert_feed_forward_length": None}, "qwen2moe.expert_feed_forward_length"),
    "width 2**40": ({"expert_feed_forward_length": 2**40}, "qwen2moe.expert_feed_forward_length"),
    "widths by layer": ({"expert_feed_forward_length": array("I", [24, 32])}, "'an array of 2 values'"),
    "no shared width": ({"expert_shared_feed_forward_length": None}, "qwen2moe.expert_shared_feed_forward_length"),
    "shared width 0": ({"expert_shared_feed_forward_length": 0}, "qwen2moe.expert_shared_feed_forward_length"),
    "norm as a number": ({"expert_weights_norm": 1}, "qwen2moe.expert_weights_norm"),
}


@for_each("case", BROKEN_GGUF_EXPERTS)
def test_gguf_config_wrong_expert_value_is_refused_by_name(case):
    keys, named = BROKEN_GGUF_EXPERTS[case]
    with pytest.raises(ModelFormatError) as caught:
        experts_spec("qwen2moe", ROUTERS, **keys)
    assert "some.gguf" in str(caught.value)
    assert named in str(caught.value)


def test_gguf_config_single_expert_tensor_is_declined():
    split = tensor("blk.1.ffn_up.7.weight", 24, 64)
    with raises_code("gguf.single_expert", UnsupportedModelError):
        experts_spec("qwen3moe", (*ROUTERS, split))
    with raises_code("gguf.unsupported_setting", UnsupportedModelError):
        gguf_config(file("llama", tensors=(split,), expert_count=8))


@pytest.mark.parametrize(
    ("arch", "architecture"),
    [
        ("gpt-oss", "GptOssForCausalLM"),
        ("deepseek32", "DeepseekV32ForCausalLM"),
        ("glm-dsa", "GlmMoeDsaForCausalLM"),
    ],
)
def test_gguf_config_family_for_folders_only_names_its_folder(arch, architecture):
    with raises_code("gguf.unsupported_architecture", UnsupportedModelError) as caught:
        spec(general__architecture=arch)
    assert architecture in str(caught.value)


FOLDERS = {"gpt-oss": "GptOssForCausalLM", "glm-dsa": "GlmMoeDsaForCausalLM"}


@for_each("arch", FOLDERS)
def test_gguf_config_family_without_reader_names_its_folder(arch):
    """The folder runs, or holdfast plan takes it."""
    with raises_code("gguf.unsupported_architecture", UnsupportedModelError, architecture=arch) as caught:
        spec(general__architecture=arch)
    assert f"{FOLDERS[arch]} folder" in str(caught.value)
    assert ("holdfast plan" in str(caught.value)) is (FOLDERS[arch] in PLANNED_FAMILIES)


@pytest.mark.parametrize(("arch", "is_planned"), [("mamba", False), ("glm4moe", True)])
def test_gguf_config_unsupported_family_names_no_folder(arch, is_planned):
    with raises_code("gguf.unsupported_architecture", UnsupportedModelError) as caught:
        spec(general__architecture=arch)
    message = str(caught.value)
    assert f"describes a {arch}. GGUF files of llama, qwen2," in message
    assert "A folder of the same model would not run either." in message
    assert ("holdfast plan" in message) is is_planned
