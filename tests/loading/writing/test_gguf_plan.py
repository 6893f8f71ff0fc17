"""Types of tensors in a quantized GGUF file, as llama.cpp chooses them."""

import gguf

from for_each import for_each
from holdfast.loading.gguf.file import TYPES
from holdfast.loading.writing.gguf_plan import MIXES, TYPE_NUMBERS, gguf_name, is_better_layer
from holdfast.models.parameters import LLAMA_NAMES, NAMES

LAYERS = 32
CHOSEN = {
    ("q4_k", "blk.5.attn_q.weight", (4096, 4096)): "Q4_K",
    ("q4_k", "blk.0.attn_v.weight", (1024, 4096)): "Q6_K",
    ("q4_k", "blk.4.attn_v.weight", (1024, 4096)): "Q4_K",
    ("q4_k", "blk.6.ffn_down.weight", (4096, 11008)): "Q6_K",
    ("q4_k", "blk.6.ffn_down_exps.weight", (8, 4096, 768)): "Q6_K",
    ("q4_k", "blk.6.ffn_up_exps.weight", (8, 768, 4096)): "Q4_K",
    ("q4_k", "blk.5.attn_q.weight", (576, 576)): "Q5_0",
    ("q4_k", "blk.6.attn_qkv.weight", (10240, 5120)): "Q6_K",
    ("q4_k", "blk.6.ffn_down_shexp.weight", (2048, 512)): "Q6_K",
    ("q4_k", "blk.5.attn_qkv.weight", (10240, 5120)): "Q4_K",
    ("q4_k", "blk.6.ssm_out.weight", (5120, 6144)): "Q4_K",
    ("q4_k", "blk.6.ssm_conv1d.weight", (10240, 4)): "F32",
    ("q4_k", "blk.6.ssm_a", (48,)): "F32",
    ("q4_k", "blk.0.attn_v.weight", (192, 576)): "Q8_0",
    ("q4_k", "blk.5.attn_q.weight", (576, 1000)): "F16",
    ("q4_k", "output.weight", (32000, 4096)): "Q6_K",
    ("q4_k", "output.weight", (32000, 576)): "Q8_0",
    ("q4_k", "token_embd.weight", (32000, 4096)): "Q4_K",
    ("q4_0", "output.weight", (32000, 4096)): "Q6_K",
    ("q4_0", "blk.0.attn_v.weight", (1024, 4096)): "Q4_0",
    ("q4_0", "blk.0.ffn_down.weight", (576, 1500)): "F16",
    ("q8_0", "output.weight", (32000, 4096)): "Q8_0",
    ("q8_0", "blk.0.attn_q.weight", (576, 576)): "Q8_0",
    ("q8_0", "blk.0.attn_norm.weight", (4096,)): "F32",
    ("q8_0", "blk.0.attn_q.bias", (4096,)): "F32",
    ("q8_0", "blk.0.ffn_gate_inp.weight", (8, 4096)): "F32",
    ("q8_0", "rope_freqs.weight", (64,)): "F32",
}
"""Llama of 32 layers with a head of its own."""


@for_each("case, kind", CHOSEN.items())
def test_choose_takes_the_type_of_llama_cpp(case, kind):
    target, name, shape = case
    assert MIXES[target].choose(name, shape, LAYERS, has_head=True)[0] == kind


def test_choose_tied_embedding_has_the_type_of_a_head():
    shape = (32000, 4096)
    assert MIXES["q4_k"].choose("token_embd.weight", shape, LAYERS, has_head=False) == ("Q6_K", "the head")
    assert MIXES["q4_k"].choose("token_embd.weight", shape, LAYERS, has_head=True) == ("Q4_K", "")


def test_choose_gives_a_reason_for_every_other_type():
    for (target, name, shape), kind in CHOSEN.items():
        _, reason = MIXES[target].choose(name, shape, LAYERS, has_head=True)
        assert bool(reason) == (kind != MIXES[target].type), name


def test_is_better_layer_covers_both_ends_and_every_third():
    better = [layer for layer in range(LAYERS) if is_better_layer(layer, LAYERS)]
    assert better == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]


def test_mixes_have_the_numbers_of_the_package():
    numbers = {"q4_k": "MOSTLY_Q4_K_M", "q4_0": "MOSTLY_Q4_0", "q8_0": "MOSTLY_Q8_0"}
    assert {target: gguf.LlamaFileType[name].value for target, name in numbers.items()} == {
        target: mix.file_type for target, mix in MIXES.items()
    }
    for kind in TYPES.values():
        assert gguf.GGMLQuantizationType[kind.name].value == TYPE_NUMBERS[kind.name]


NAMED = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
    "model.layers.12.self_attn.q_proj.bias": "blk.12.attn_q.bias",
    "model.layers.0.mlp.gate.weight": "blk.0.ffn_gate_inp.weight",
    "model.layers.0.mlp.shared_expert_gate.weight": "blk.0.ffn_gate_inp_shexp.weight",
    "model.layers.0.mlp.shared_expert.down_proj.weight": "blk.0.ffn_down_shexp.weight",
    "model.layers.3.post_attention_layernorm.weight": "blk.3.ffn_norm.weight",
}


@for_each("theirs, ours", NAMED.items())
def test_gguf_name_is_that_of_a_conversion(theirs, ours):
    assert gguf_name(theirs, LLAMA_NAMES) == ours


def test_gguf_name_of_gemma_follows_its_own_norms():
    name = "model.layers.3.post_attention_layernorm.weight"
    assert gguf_name(name, NAMES["gemma3"]) == "blk.3.post_attention_norm.weight"
