"""The family with compressed attention: config.json to spec in both spellings as transformers reads them; numbers beyond any model refused in a sentence."""

import json
from typing import Any

import pytest
import torch

from holdfast.errors import ModelError
from holdfast.kernels.attention.rope_rows import fill_rope_rows
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.compressed_readers import respell
from holdfast.models.grouped_readers import FAMILIES, parameters, read_spec, unread_tensors
from holdfast.models.rope import make_step_rope
from holdfast.models.spec import CompressorSpec, IndexSpec, ModelSpec, StreamsSpec
from models.tiny_compressed import COMPRESSED_MODELS

ARCHITECTURE = "DeepseekV4ForCausalLM"
TINY: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "model_type": "deepseek_v4",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 64,
    "index_head_dim": 16,
    "index_topk": 3,
    "compress_ratios": [0, 128, 4, 128, 4],
    "compress_rate_hca": 8,
    "sliding_window": 8,
    "hc_mult": 4,
    "hc_eps": 1e-4,
    "num_hash_layers": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 512,
    "rope_theta": 500.0,
    "compress_rope_theta": 3000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
"""As DeepSeek spells it."""


def config_with(**changes: Any) -> dict[str, Any]:
    return TINY | changes


def theirs_of(config: dict[str, Any]) -> Any:
    import transformers

    options = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    return transformers.DeepseekV4Config(**options)


def check_same(spec: ModelSpec, config: Any) -> None:
    """Every number that the spec has of a config of transformers."""
    compressed, experts = spec.compressed, spec.experts
    assert compressed is not None
    assert experts is not None
    rates = config.compress_rates
    wanted = {
        "sliding_attention": None,
        "compressed_sparse_attention": CompressorSpec(rates["compressed_sparse_attention"], True),
        "heavily_compressed_attention": CompressorSpec(rates["heavily_compressed_attention"], False),
    }
    assert compressed.compressors == tuple(wanted[kind] for kind in config.layer_types)
    index = IndexSpec(config.index_n_heads, config.index_head_dim, config.index_topk, turns_neighbours=True)
    assert compressed.index == (index if "compressed_sparse_attention" in config.layer_types else None)
    assert spec.streams == StreamsSpec(config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps)
    for ours, name in (
        (spec.vocab_size, "vocab_size"),
        (spec.hidden_size, "hidden_size"),
        (spec.num_layers, "num_hidden_layers"),
        (spec.num_heads, "num_attention_heads"),
        (spec.num_kv_heads, "num_key_value_heads"),
        (spec.head_dim, "head_dim"),
        (spec.norm_eps, "rms_norm_eps"),
        (spec.max_position, "max_position_embeddings"),
        (spec.tied_embeddings, "tie_word_embeddings"),
        (spec.num_draft_layers, "num_nextn_predict_layers"),
        (compressed.q_rank, "q_lora_rank"),
        (compressed.rope_dim, "qk_rope_head_dim"),
        (compressed.window, "sliding_window"),
        (compressed.num_output_groups, "o_groups"),
        (compressed.output_rank, "o_lora_rank"),
        (experts.num_experts, "n_routed_experts"),
        (experts.top_k, "num_experts_per_tok"),
        (experts.intermediate_size, "moe_intermediate_size"),
        (experts.shared_size, "moe_intermediate_size"),
        (experts.share_scale, "routed_scaling_factor"),
        (experts.silu_limit, "swiglu_limit"),
        (experts.scoring, "scoring_func"),
        (experts.table_size, "vocab_size"),
    ):
        assert ours == getattr(config, name), name
    tables = {layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "hash_moe"}
    assert experts.table_layers == tables
    assert experts.normalizes
    assert experts.has_score_bias
    assert spec.sliding_windows == (config.sliding_window,) * spec.num_layers
    assert spec.score_scale == config.head_dim**-0.5
    assert spec.has_sinks


def test_read_spec_absent_keys_default_as_in_transformers():
    least = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}
    spec, config = read_spec({"architectures": [ARCHITECTURE], **least}), theirs_of(least)
    check_same(spec, config)
    family = FAMILIES[ARCHITECTURE]
    assert (family.bos_token_id, family.eos_token_ids) == (config.bos_token_id, (config.eos_token_id,))


@pytest.mark.parametrize("case", ["as DeepSeek spells it", *COMPRESSED_MODELS])
def test_read_spec_both_spellings_match_transformers(case):
    own = TINY if case == "as DeepSeek spells it" else {"architectures": [ARCHITECTURE], **COMPRESSED_MODELS[case]}
    theirs = theirs_of(own)
    spec = read_spec(own)
    check_same(spec, theirs)
    written = json.loads(theirs.to_json_string(use_diff=False))
    assert read_spec(written | {"architectures": [ARCHITECTURE], "dtype": None}) == spec


ROPES: dict[str, dict[str, Any]] = {
    "yarn": {},
    "nothing": {"rope_scaling": None},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "thetas among them": {"rope_scaling": {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 64}},
}


@pytest.mark.parametrize("case", ROPES)
def test_rotations_are_those_of_transformers(case):
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    config = config_with(**ROPES[case])
    spec, theirs = read_spec(config), theirs_of(config)
    assert spec.layer_rope(0) is spec.local_rope
    assert all(spec.layer_rope(layer) is spec.rope for layer in range(1, 5))
    step = make_step_rope(spec, 90, 90, torch.float32, torch.device("cpu"))
    assert step.rows is not None
    fill_rope_rows(torch.arange(90), step.rows)
    rotary = DeepseekV4RotaryEmbedding(theirs)
    for layer, kind in ((0, "main"), (1, "compress"), (2, "compress")):
        table, entries, ratio = step.rotaries[layer], step.entries[layer], spec.entry_ratio(layer)
        assert table is not None
        assert (entries is None) == (ratio == 0)
        cos, sin = rotary(torch.zeros(1), torch.arange(90)[None], layer_type=kind)
        torch.testing.assert_close(table.cos_TP, cos[0], rtol=0, atol=2e-6)
        torch.testing.assert_close(table.sin_TP, sin[0], rtol=0, atol=2e-6)
        if entries is not None:
            first = torch.arange(90) // ratio * ratio
            assert torch.equal(entries.cos_TP, table.cos_TP[first])
            assert torch.equal(entries.sin_TP, table.sin_TP[first])


def test_models_that_were_released():
    flash, pro, base = (
        read_spec({**CATALOGUE[f"DeepSeek-V4-{name}"], "quantization_config": None})
        for name in ("Flash", "Pro", "Flash-Base")
    )
    assert flash == base, "only what is stored differs"
    for spec, counts in ((flash, (2, 21, 20)), (pro, (0, 30, 31))):
        compressed, experts = spec.compressed, spec.experts
        assert compressed is not None
        assert experts is not None
        kinds = (None, CompressorSpec(4, True), CompressorSpec(128, False))
        assert tuple(compressed.compressors.count(kind) for kind in kinds) == counts
        assert (compressed.window, compressed.rope_dim, spec.head_dim, spec.max_position) == (128, 64, 512, 2**20)
        assert (experts.table_layers, experts.silu_limit, experts.top_k) == ({0, 1, 2}, 10.0, 6)
        assert spec.rope is not None
        assert spec.local_rope is not None
        assert (spec.rope.theta, spec.rope.factor, spec.rope.attention_factor) == (160_000.0, 16.0, 1.0)
        assert (spec.local_rope.theta, spec.local_rope.kind) == (10_000.0, "default")
        assert unread_tensors(spec) == ((f"layers.{spec.num_layers}.", "mtp."), "drafts of tokens")
    assert flash.experts is not None
    assert pro.experts is not None
    assert (flash.experts.share_scale, pro.experts.share_scale) == (1.5, 2.5)


def test_names_of_modules_become_those_that_are_shipped():
    """Every name of a model of transformers; its stacked experts go by the names that stacked ones have."""
    import transformers

    with torch.device("meta"):
        model = transformers.DeepseekV4ForCausalLM(theirs_of(TINY))
    spec = read_spec(TINY)
    named = {respell(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert len(named) == len(model.state_dict())
    for parameter in parameters(spec):
        layouts = (parameter.parts, *parameter.layouts)
        assert any(all(named.get(part.tensor) == part.shape for part in parts) for parts in layouts), parameter.name
        for part in parameter.parts:
            assert respell(part.tensor) == part.tensor
            assert respell(f"model.{part.tensor}") == part.tensor
    for theirs, shipped in (
        ("model.layers.12.attn.norm.weight", "layers.12.attn.kv_norm.weight"),
        ("model.layers.3.attn.wkv.scale", "layers.3.attn.wkv.scale"),
        ("layers.3.ffn.experts.7.w1.scale", "layers.3.ffn.experts.7.w1.scale"),
        ("head.weight", "lm_head.weight"),
        ("header.weight", "header.weight"),
        ("layers.1.mlpx.weight", "layers.1.mlpx.weight"),
        ("mtp.0.attn.norm.weight", "mtp.0.attn.norm.weight"),
    ):
        assert respell(theirs) == shipped


TYPED = {"compress_ratios": None, "layer_types": ["sliding_attention"] * 4 + ["compressed_sparse_attention"]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"compress_ratios": None}, "has no compress_ratios.* nothing else says which layers compress"),
        ({"compress_ratios": [0, 4, 4, 4]}, "compress_ratios = .*.* a list of 0 or 4 or 128 for each of 5 layers"),
        ({"compress_ratios": [0] * 7}, "compress_ratios = .*.* a list of 0 or 4 or 128 for each of 5 layers"),
        ({"compress_ratios": [0, 4, 8, 4, 4]}, "compress_ratios = .*.* a list of 0 or 4 or 128"),
        ({"compress_ratios": [0, 4, True, 4, 4]}, "compress_ratios = .*.* a list of 0 or 4 or 128"),
        ({"compress_ratios": 4}, "compress_ratios = 4.* a list of 0 or 4 or 128"),
        ({"compress_rate_hca": 12}, "compress_rate_hca = 12.* a power of two, which divides the tokens of a page"),
        ({"compress_rate_hca": 512}, "compress_rate_hca = 512.* a whole number from 2 to 256"),
        (
            {"compress_rate_hca": 4},
            "compress_rate_hca = 4.* entries of 4 tokens overlap in other layers, and one ratio",
        ),
        ({"compress_rate_csa": 1}, "compress_rate_csa = 1.* a whole number from 2"),
        (
            TYPED | {"compress_rates": {"compressed_sparse_attention": 3}},
            "compress_rates.compressed_sparse_attention = 3.* a power of two",
        ),
        (TYPED | {"layer_types": ["sliding_attention"]}, "layer_types = .*, one for each of 5 layers"),
        (TYPED | {"layer_types": ["full_attention"] * 5}, "layer_types = .*.* sliding_attention, compressed_sparse"),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types = .*.* hash_moe or moe for each of 5 layers"),
        ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types = .*.* hash_moe or moe"),
        ({"index_topk": 129}, "index_topk = 129.* at most 128: the longest context has 128 entries"),
        ({"index_topk": 2**30, "max_position_embeddings": 2**31 - 1}, "index_topk = 1073741824.* at most 131072"),
        ({"index_topk": 0}, "index_topk = 0.* a whole number from 1"),
        ({"index_topk": -3}, "index_topk = -3.* a whole number from 1"),
        ({"index_n_heads": 65}, "index_n_heads = 65.* up to 64 heads, which kernels support"),
        ({"index_head_dim": 40}, "index_head_dim = 40.* a multiple of 16 up to 128"),
        (
            {"qk_rope_head_dim": 32},
            "index_head_dim = 16.* at least qk_rope_head_dim = 32, since so many of its elements are rotated",
        ),
        ({"sliding_window": 0}, "sliding_window = 0.* a whole number from 1"),
        ({"sliding_window": None}, "sliding_window = None.* a whole number from 1"),
        ({"o_groups": 3}, "o_groups = 3.* a divisor of num_attention_heads = 4"),
        ({"o_groups": 0}, "o_groups = 0.* a whole number from 1"),
        (
            {"qk_rope_head_dim": 7},
            "qk_rope_head_dim = 7.* an even number of rotated elements, at most head_dim = 32",
        ),
        (
            {"qk_rope_head_dim": 34},
            "qk_rope_head_dim = 34.* an even number of rotated elements, at most head_dim = 32",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5.* qk_rope_head_dim = 8 of head_dim = 32"),
        ({"qk_rope_head_dim": None, "partial_rotary_factor": 0.1}, "partial_rotary_factor = 0.1.* an even number"),
        ({"head_dim": 576}, "head_dim = 576.* up to 512, which kernels support"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'.* scores of deepseek_v4 are a sqrtsoftplus of logits"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'.* experts of deepseek_v4 are chosen by noaux_tc"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False.* shares of this family are divided by their sum"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.* experts are gated with silu here"),
        ({"n_group": 4}, "n_group = 4.* experts of this family stand in no groups"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4.* all query heads share one vector here"),
        ({"n_shared_experts": 0}, "n_shared_experts = 0.* a whole number from 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9.* a whole number from 1 to 8"),
        ({"hc_mult": 5}, "hc_mult = 5.* a whole number from 1 to 4"),
        ({"hc_mult": 0}, "hc_mult = 0"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters = 0"),
        ({"hc_eps": 0}, "hc_eps = 0.* a number above 0"),
        ({"swiglu_limit": -1.0}, "swiglu_limit = -1.0.* a number from 0 up"),
        ({"num_hash_layers": -1}, "num_hash_layers = -1.* a whole number from 0"),
        ({"rope_scaling": {"type": "yarn"}}, "has no rope_scaling.factor.* a number"),
        ({"rope_scaling": {"type": "ntk"}}, "the kinds of rotary positions are"),
        ({"q_lora_rank": None}, "q_lora_rank = None.* a whole number from 1"),
        ({"n_routed_experts": 2**16}, "n_routed_experts = 65536.* at most 26214 in each of 5 layers"),
        (
            {"model_type": "deepseek_v3"},
            "model_type = 'deepseek_v3'.* 'deepseek_v4', the type of DeepseekV4ForCausalLM",
        ),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(changes, sentence):
    with pytest.raises(ModelError, match=sentence) as caught:
        read_spec(config_with(**changes))
    assert "\n" not in str(caught.value)


def test_read_spec_accepts_absent_and_excess_values():
    assert read_spec(config_with(compress_ratios=[*TINY["compress_ratios"], 0])) == read_spec(TINY)
    for limit in (0, 0.0, None):
        experts = read_spec(config_with(swiglu_limit=limit)).experts
        assert experts is not None
        assert experts.silu_limit is None
    windows = read_spec(config_with(compress_ratios=[0] * 5, index_topk=-1)).compressed
    assert windows is not None
    assert windows.index is None, "no caller needs how many it would choose"
    most = read_spec(config_with(index_topk=128)).compressed
    assert most is not None
    assert most.index is not None
    assert most.index.top_k == 128, "as many as a context has"
    whole = read_spec(config_with(qk_rope_head_dim=32, index_head_dim=32)).compressed
    assert whole is not None
    assert whole.rope_dim == 32
    assert read_spec(config_with(num_hash_layers=9)).experts.table_layers == set(range(5))  # type: ignore[union-attr]
