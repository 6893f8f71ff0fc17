"""Readers of config.json with latent attention (MLA): DeepSeek-V2, V3, V3.2, GLM-4.7-Flash and GLM-5; no torch.

Absent keys take the default of transformers. Draft layers (multi-token prediction) are counted, so that their
tensors are recognized, but are not part of the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any

from holdfast.kernels.geometry import LATENT_MULTIPLE, LATENT_ROPE_DIMS, MAX_LATENT_DIM
from holdfast.memory.devices import read_data
from holdfast.models.settings import (
    MAX_EXPERT_WIDTH,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Settings,
    check_total,
    decline,
    read_activation,
    read_dtype,
    read_index_sizes,
    read_mlp_layers,
    read_rope,
    stretched,
)
from holdfast.models.spec import ExpertsSpec, GroupScore, IndexSpec, LatentSpec, ModelSpec, RopeSpec, Scoring

GREEDY, LIMITED_GREEDY, CORRECTED = "greedy", "group_limited_greedy", "noaux_tc"
"""Choice of experts (`topk_method`): among all; in the groups with the largest score; in those with the two largest,
by corrected scores."""
MAX_SHARED_EXPERTS = 1024
SPARSE, DENSE = "sparse", "dense"
FULL, SHARED = "full", "shared"
"""A layer has an index, or reuses the choice of the last layer before it with an index (`indexer_types`)."""


@dataclass(frozen=True, slots=True)
class LatentFamily:
    """Fixed values of a family, and transformers' defaults for absent keys."""

    name: str
    architecture: str
    scoring: Scoring
    methods: tuple[str, ...]
    """The ways to choose experts that it supports; the first is the default."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int
    q_rank: int
    nope_dim: int
    value_dim: int
    num_experts: int
    top_k: int | None
    expert_size: int
    num_shared: int
    num_groups: int | None
    groups_taken: int | None
    share_scale: float
    num_dense_layers: int
    num_draft_layers: int
    norm_eps: float = 1e-6
    kv_rank: int = 512
    rope_dim: int = 64
    normalizes: bool = True
    index: IndexSpec | None = None
    """The index that chooses the tokens to attend to; None: layers attend to all."""
    shares_choices: bool = False
    """Layers may lack an index and reuse the choice of an earlier layer."""


def _read_row(row: Mapping[str, Any]) -> LatentFamily:
    index = None if row.get("index") is None else IndexSpec(**row["index"])
    return LatentFamily(**{**row, "methods": tuple(row["methods"]), "index": index})


_DATA = read_data("families.json")
LATENT_FAMILIES = {name: _read_row(row) for name, row in _DATA["latent"].items()}
"""Keyed by `model_type`."""


def read_latent(family: LatentFamily, settings: Settings) -> ModelSpec:
    """Read a decoder with latent attention in every layer."""
    decline(settings, _DATA["declined"]["latent"])
    num_heads = settings.count("num_attention_heads", family.num_heads, MAX_HEADS)
    if settings.optional_count("num_key_value_heads", None, MAX_HEADS) not in (None, 1, num_heads):
        raise settings.unsupported("num_key_value_heads", "all query heads share one latent here")
    latent = _read_dims(settings, family)
    num_layers = settings.count("num_hidden_layers", family.num_layers, MAX_LAYERS)
    max_position = settings.count("max_position_embeddings", family.max_position, MAX_POSITIONS)
    rope = _read_rope(settings, latent.rope_dim, max_position)
    num_drafts = settings.count("num_nextn_predict_layers", family.num_draft_layers, MAX_LAYERS, low=0)
    if family.index is not None:
        index = _read_index(settings, family.index, latent, stretched(rope, max_position))
        shared = _read_shared(settings, family, num_layers, num_drafts)
        latent = replace(latent, index=replace(index, shared_layers=shared))
    has_bias = settings.flag("attention_bias", False)
    return ModelSpec(
        architecture=family.architecture,
        family=family.name,
        vocab_size=settings.count("vocab_size", family.vocab_size, MAX_VOCAB),
        hidden_size=settings.count("hidden_size", family.hidden_size, MAX_WIDTH),
        intermediate_size=settings.count("intermediate_size", family.intermediate_size, MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=latent.row_dim,
        max_position=stretched(rope, max_position),
        checkpoint_dtype=read_dtype(settings),
        norm_eps=settings.number("rms_norm_eps", family.norm_eps),
        activation=read_activation(settings, "hidden_act", "silu"),
        qkv_bias=has_bias,
        o_bias=has_bias,
        rope=rope,
        tied_embeddings=settings.flag("tie_word_embeddings", False),
        experts=_read_experts(settings, family, num_layers),
        attention_scale=latent.query_dim**-0.5 * _temperature(rope),
        latent=latent,
        num_draft_layers=num_drafts,
    )


def _read_dims(settings: Settings, family: LatentFamily) -> LatentSpec:
    """Read widths of queries, latents and values; refuse those that no kernel supports."""
    kv_rank = settings.count("kv_lora_rank", family.kv_rank, MAX_WIDTH)
    if kv_rank % LATENT_MULTIPLE or kv_rank > MAX_LATENT_DIM:
        wanted = f"a multiple of {LATENT_MULTIPLE} up to {MAX_LATENT_DIM}, which kernels support"
        raise settings.refuse("kv_lora_rank", kv_rank, wanted)
    rope_dim = settings.count("qk_rope_head_dim", family.rope_dim, MAX_HEAD_DIM)
    if rope_dim not in LATENT_ROPE_DIMS:
        wanted = f"{' or '.join(map(str, LATENT_ROPE_DIMS))}, which kernels support"
        raise settings.refuse("qk_rope_head_dim", rope_dim, wanted)
    return LatentSpec(
        q_rank=settings.optional_count("q_lora_rank", family.q_rank, MAX_WIDTH),
        kv_rank=kv_rank,
        nope_dim=settings.count("qk_nope_head_dim", family.nope_dim, MAX_HEAD_DIM),
        rope_dim=rope_dim,
        value_dim=settings.count("v_head_dim", family.value_dim, MAX_HEAD_DIM),
    )


def _read_index(settings: Settings, default: IndexSpec, latent: LatentSpec, max_position: int) -> IndexSpec:
    """Read sizes of the index, as kernels support them. It may choose any number of tokens that a context can have."""
    if latent.q_rank is None:
        raise settings.missing("q_lora_rank", "an index takes its queries from there")
    num_heads, head_dim = read_index_sizes(settings, default.num_heads, default.head_dim, latent.rope_dim)
    top_k = settings.count("index_topk", min(default.top_k, max_position), MAX_POSITIONS)
    if top_k > max_position:
        raise settings.refuse("index_topk", top_k, f"at most the {max_position} tokens of the longest context")
    if settings.values.get("indexer_rope_interleave") not in (None, default.turns_neighbours):
        turned = "neighbouring elements" if default.turns_neighbours else "halves"
        raise settings.unsupported("indexer_rope_interleave", f"rope turns {turned} of this family's index")
    return replace(default, num_heads=num_heads, head_dim=head_dim, top_k=top_k)


def _read_shared(settings: Settings, family: LatentFamily, num_layers: int, num_drafts: int) -> frozenset[int]:
    """Read the layers that reuse an earlier choice: as listed, else by pattern, else by frequency."""
    key, kinds = _listed_indexers(settings)
    if kinds is None:
        every = max(1, settings.count("index_topk_freq", 1, MAX_LAYERS, low=0))
        key, skipped = "index_topk_freq", settings.count("index_skip_topk_offset", 2, MAX_LAYERS, low=0)
        kinds = tuple(FULL if max(layer - skipped + 1, 0) % every == 0 else SHARED for layer in range(num_layers))
    # Some lists continue past the last layer, with draft layers.
    if not num_layers <= len(kinds) <= num_layers + num_drafts or set(kinds) - {FULL, SHARED}:
        wanted = f"{FULL} or {SHARED} for each of {num_layers} layers"
        raise settings.refuse(key, settings.values.get(key), wanted)
    shared = frozenset(layer for layer in range(num_layers) if kinds[layer] == SHARED)
    if shared and not family.shares_choices:
        raise settings.unsupported(key, f"every layer of {family.name} chooses its tokens itself")
    if 0 in shared:
        raise settings.refuse(
            key, settings.values.get(key), f"{FULL} for the first layer, before which nothing is chosen,"
        )
    return shared


def _listed_indexers(settings: Settings) -> tuple[str, tuple[str, ...] | None]:
    """Return the kinds of layers, by name or letter, and their key; None if neither is there."""
    kinds = settings.texts("indexer_types")
    if kinds is not None:
        return "indexer_types", kinds
    key = "index_topk_pattern"
    pattern = settings.values.get(key)
    if not isinstance(pattern, str):
        return key, settings.texts(key)
    letters = {"F": FULL, "S": SHARED}
    return key, tuple(letters.get(letter, letter) for letter in pattern)


def _read_rope(settings: Settings, rope_dim: int, max_position: int) -> RopeSpec:
    """Read RoPE. yarn must state its factor and original context, since scores depend on them too."""
    part = settings.part("rope_scaling") or settings.part("rope_parameters")
    if part is not None and part.text("rope_type", part.text("type", "default")) == "yarn":
        for key in ("factor", "original_max_position_embeddings"):
            if part.values.get(key) is None:
                raise part.missing(key, "scores and rotations of yarn follow from it")
    return read_rope(settings, rope_dim, max_position)


def _temperature(rope: RopeSpec) -> float:
    """Return yarn's factor on scores, beside its effect on cos and sin; 1 if it states none."""
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * log(rope.factor) + 1.0) ** 2


def _read_experts(settings: Settings, family: LatentFamily, num_layers: int) -> ExpertsSpec | None:
    """Read the experts of all layers but the dense ones; None if no layer has any."""
    first_few = "first_k_dense_replace", family.num_dense_layers
    dense_layers = read_mlp_layers(settings, num_layers, (SPARSE, DENSE), DENSE, first_few)
    if len(dense_layers) == num_layers:
        return None
    if read_activation(settings, "hidden_act", "silu") != "silu":
        raise settings.unsupported("hidden_act", "experts are gated with silu here")
    num_experts = settings.count("n_routed_experts", family.num_experts, MAX_EXPERTS)
    check_total(settings, "n_routed_experts", num_experts, num_layers - len(dense_layers))
    if family.top_k is None:
        top_k = settings.required_count("num_experts_per_tok", num_experts)
    else:
        top_k = settings.count("num_experts_per_tok", family.top_k, num_experts)
    normalizes = settings.flag("norm_topk_prob", family.normalizes)
    if normalizes and family.scoring == "softmax":
        raise settings.unsupported("norm_topk_prob", "shares of this family are scores as they are, times a factor")
    method = _read_method(settings, family)
    num_groups, groups_taken = _read_groups(settings, family, method, num_experts, top_k)
    group_scores: dict[str, GroupScore] = {CORRECTED: "two_largest"}
    inner = settings.count("moe_intermediate_size", family.expert_size, MAX_EXPERT_WIDTH)
    has_shared = settings.values.get("n_shared_experts", family.num_shared) is not None
    num_shared = settings.count("n_shared_experts", family.num_shared, MAX_SHARED_EXPERTS, low=0) if has_shared else 0
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=inner,
        shared_size=num_shared * inner,
        normalizes=normalizes,
        dense_layers=dense_layers,
        scoring=family.scoring,
        num_groups=num_groups,
        groups_taken=groups_taken,
        group_score=group_scores.get(method, "largest"),
        has_score_bias=method == CORRECTED,
        share_scale=settings.number("routed_scaling_factor", family.share_scale),
    )


def _read_method(settings: Settings, family: LatentFamily) -> str:
    """Read how experts are chosen. The scoring function is fixed in a family, and a file may only agree."""
    if settings.text("scoring_func", family.scoring) != family.scoring:
        raise settings.unsupported("scoring_func", f"scores of {family.name} are a {family.scoring} of logits")
    method = settings.text("topk_method", family.methods[0])
    if method not in family.methods:
        why = f"experts of {family.name} are chosen by {' or '.join(family.methods)}"
        raise settings.unsupported("topk_method", why)
    return method


def _read_groups(
    settings: Settings, family: LatentFamily, method: str, num_experts: int, top_k: int
) -> tuple[int, int]:
    """Read the groups of experts, and how many of them a token chooses from; one group of all if unlimited."""
    if method == GREEDY:
        return 1, 1
    num_groups = _group_count(settings, "n_group", family.num_groups)
    if num_experts % num_groups:
        raise settings.refuse("n_group", num_groups, f"a divisor of n_routed_experts = {num_experts}")
    group_size, least = num_experts // num_groups, 2 if method == CORRECTED else 1
    if group_size < least:
        wanted = f"groups of {least} experts and more out of {num_experts}"
        raise settings.refuse("n_group", num_groups, wanted)
    groups_taken = _group_count(settings, "topk_group", family.groups_taken)
    if groups_taken > num_groups:
        raise settings.refuse("topk_group", groups_taken, f"at most n_group = {num_groups}")
    if top_k > groups_taken * group_size:
        wanted = f"at most the {groups_taken * group_size} experts of {groups_taken} groups"
        raise settings.refuse("num_experts_per_tok", top_k, wanted)
    return num_groups, groups_taken


def _group_count(settings: Settings, key: str, default: int | None) -> int:
    if default is None and settings.values.get(key) is None:
        raise settings.missing(key, "experts are chosen by groups, whose number is needed")
    return settings.count(key, default or 1, MAX_EXPERTS)
