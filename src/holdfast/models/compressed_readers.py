"""The family with compressed attention: reads config.json of DeepSeek-V4, and spells its tensors; no torch.

DeepSeek writes the kinds of layers as `compress_ratios` (0, 4, 128) and `num_hash_layers`; transformers as
`layer_types` with `compress_rates`, and as `mlp_layer_types`. RoPE has one set of settings for all layers with
entries, or one for each kind. Absent keys take the default of transformers, except the kinds of layers: that default
matches no model.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from holdfast.kernels.geometry import MAX_LATENT_DIM
from holdfast.kernels.stream_geometry import MAX_STREAMS
from holdfast.memory.devices import read_data
from holdfast.models.settings import (
    MAX_EXPERT_WIDTH,
    MAX_EXPERTS,
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
    rope_of,
)
from holdfast.models.spec import (
    CompressedSpec,
    CompressorSpec,
    ExpertsSpec,
    IndexSpec,
    ModelSpec,
    RopeSpec,
    StreamsSpec,
)

NAME, ARCHITECTURE = "deepseek_v4", "DeepseekV4ForCausalLM"
SLIDING, OVERLAPPED, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
"""Kinds of layers: a window alone, overlapped entries with an index, entries of many tokens."""
KINDS_BY_RATIO: Mapping[int, str] = {0: SLIDING, 4: OVERLAPPED, 128: HEAVY}
RATE_KEYS: Mapping[str, tuple[str, int]] = {OVERLAPPED: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
"""An older key with the number of tokens per entry, and its default."""
MAX_RATIO = 256
TABLE, SCORES = "hash_moe", "moe"
"""Kinds of experts: looked up in a table by token, or chosen by score."""
MAX_ITERATIONS = 1000
MAX_CHOSEN = 2**17
"""Most entries that a row may choose: far more than any model does, and within the limit of their buffers."""
SCORING = "sqrtsoftplus"
METHOD = "noaux_tc"


def read_compressed(settings: Settings) -> ModelSpec:
    """Read DeepSeek-V4: a window and compressed entries, then experts, in every layer, with residual streams."""
    decline(settings, read_data("families.json")["declined"][NAME])
    num_layers = settings.count("num_hidden_layers", 43, MAX_LAYERS)
    num_drafts = settings.count("num_nextn_predict_layers", 1, MAX_LAYERS, low=0)
    num_heads = settings.count("num_attention_heads", 64, MAX_HEADS)
    max_position = settings.count("max_position_embeddings", 1_048_576, MAX_POSITIONS)
    head_dim, rope_dim = _read_dims(settings)
    kinds = _layer_kinds(settings, num_layers, num_drafts)
    made: dict[str, CompressorSpec | None] = {SLIDING: None}
    for kind in (OVERLAPPED, HEAVY):
        if kind in kinds:
            taken = {one.ratio for one in made.values() if one is not None}
            made[kind] = CompressorSpec(_read_ratio(settings, kind, taken), kind == OVERLAPPED)
    compressors = tuple(made[kind] for kind in kinds)
    window = settings.count("sliding_window", 128, MAX_POSITIONS)
    rope, local_rope = _read_ropes(settings, rope_dim, max_position)
    return ModelSpec(
        architecture=ARCHITECTURE,
        family=NAME,
        vocab_size=settings.count("vocab_size", 129280, MAX_VOCAB),
        hidden_size=settings.count("hidden_size", 4096, MAX_WIDTH),
        intermediate_size=settings.count("moe_intermediate_size", 2048, MAX_EXPERT_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=head_dim,
        max_position=max_position,
        checkpoint_dtype=read_dtype(settings),
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        activation=read_activation(settings, "hidden_act", "silu"),
        rope=rope,
        local_rope=local_rope,
        tied_embeddings=settings.flag("tie_word_embeddings", False),
        sliding_windows=(window,) * num_layers,
        experts=_read_experts(settings, num_layers),
        has_sinks=True,
        compressed=CompressedSpec(
            q_rank=settings.count("q_lora_rank", 1024, MAX_WIDTH),
            rope_dim=rope_dim,
            window=window,
            compressors=compressors,
            num_output_groups=_read_groups(settings, num_heads),
            output_rank=settings.count("o_lora_rank", 1024, MAX_WIDTH),
            index=_read_index(settings, compressors, rope_dim, max_position),
        ),
        streams=StreamsSpec(
            num_streams=settings.count("hc_mult", 4, MAX_STREAMS),
            num_iterations=settings.count("hc_sinkhorn_iters", 20, MAX_ITERATIONS),
            eps=settings.number("hc_eps", 1e-6),
        ),
        num_draft_layers=num_drafts,
    )


def _read_dims(settings: Settings) -> tuple[int, int]:
    """Read the elements of a head, and how many RoPE rotates: as a number, or as a share."""
    head_dim = settings.count("head_dim", 512, MAX_WIDTH)
    if head_dim > MAX_LATENT_DIM:
        raise settings.refuse("head_dim", head_dim, f"up to {MAX_LATENT_DIM}, which kernels support")
    key = "qk_rope_head_dim"
    share = settings.optional_number("partial_rotary_factor")
    if settings.values.get(key) is not None:
        rope_dim = settings.count(key, 64, MAX_WIDTH)
        if share is not None and int(head_dim * share) != rope_dim:
            raise settings.refuse("partial_rotary_factor", share, f"{key} = {rope_dim} of head_dim = {head_dim}")
    else:
        key, rope_dim = ("partial_rotary_factor", int(head_dim * share)) if share is not None else (key, head_dim // 8)
    if rope_dim < 2 or rope_dim % 2 or rope_dim > head_dim:
        wanted = f"an even number of rotated elements, at most head_dim = {head_dim},"
        raise settings.refuse(key, settings.values.get(key), wanted)
    return head_dim, rope_dim


def _layer_kinds(settings: Settings, num_layers: int, num_drafts: int) -> tuple[str, ...]:
    kinds = settings.texts("layer_types")
    if kinds is not None:
        if len(kinds) != num_layers or set(kinds) - set(KINDS_BY_RATIO.values()):
            wanted = f"{', '.join(KINDS_BY_RATIO.values())}, one for each of {num_layers} layers,"
            raise settings.refuse("layer_types", list(kinds), wanted)
        return kinds
    ratios = settings.values.get("compress_ratios")
    if ratios is None:
        raise settings.missing("compress_ratios", "nothing else says which layers compress, and how far")
    # Lists continue past the last layer, with draft layers, even if settings omit those.
    listed = ratios if isinstance(ratios, list) else []
    is_whole = num_layers <= len(listed) <= num_layers + max(1, num_drafts)
    if not is_whole or not all(type(ratio) is int and ratio in KINDS_BY_RATIO for ratio in listed):
        known = " or ".join(map(str, KINDS_BY_RATIO))
        raise settings.refuse("compress_ratios", ratios, f"a list of {known} for each of {num_layers} layers")
    return tuple(KINDS_BY_RATIO[ratio] for ratio in listed[:num_layers])


def _read_ratio(settings: Settings, kind: str, taken: set[int]) -> int:
    """Read the tokens per entry, distinct for each kind. They divide a page, whose tokens are a power of two."""
    old_key, default = RATE_KEYS[kind]
    rates = settings.part("compress_rates")
    key, where = (old_key, settings) if old_key in settings or rates is None else (kind, rates)
    ratio = where.count(key, default, MAX_RATIO, low=2)
    if ratio & (ratio - 1):
        raise where.refuse(key, ratio, "a power of two, which divides the tokens of a page")
    if ratio in taken:
        raise where.unsupported(
            key, f"entries of {ratio} tokens overlap in other layers, and one ratio is one kind here"
        )
    return ratio


def _read_ropes(settings: Settings, rope_dim: int, max_position: int) -> tuple[RopeSpec, RopeSpec]:
    """Read RoPE of layers with entries, and of those without. yarn never multiplies cos and sin here."""
    theta = settings.number("rope_theta", 10_000.0, low=2.0)
    theirs = settings.number("compress_rope_theta", 160_000.0, low=2.0)
    flat = settings.part("rope_scaling") or settings.part("rope_parameters") or Settings({}, settings.file)
    kinds = {key: flat.part(key) for key in ("main", "compress") if isinstance(flat.values.get(key), dict)}
    main, entries = kinds.get("main"), kinds.get("compress")
    if main is None or entries is None:
        plain = {key: value for key, value in flat.values.items() if key not in ("main", "compress", "rope_theta")}
        entries = Settings(plain, flat.file, flat.section)
        main = Settings({"rope_theta": flat.number("rope_theta", theta, low=2.0)}, flat.file, flat.section)
    own = Settings({key: settings.values[key] for key in ("head_dim",) if key in settings}, settings.file)
    local_rope = rope_of(own, _without_share(main), theta, rope_dim, max_position)
    rope = rope_of(own, _without_share(entries), theirs, rope_dim, max_position)
    if rope.kind == "yarn" and rope.attention_factor is None:
        rope = replace(rope, attention_factor=1.0)
    return rope, local_rope


def _without_share(rope: Settings) -> Settings:
    """Drop the rotated share of a head, which has been read."""
    values = {key: value for key, value in rope.values.items() if key != "partial_rotary_factor"}
    return Settings(values, rope.file, rope.section)


def _read_groups(settings: Settings, num_heads: int) -> int:
    num_groups = settings.count("o_groups", 8, MAX_HEADS)
    if num_heads % num_groups:
        raise settings.refuse("o_groups", num_groups, f"a divisor of num_attention_heads = {num_heads}")
    return num_groups


def _read_index(
    settings: Settings, compressors: tuple[CompressorSpec | None, ...], rope_dim: int, max_position: int
) -> IndexSpec | None:
    """Read the index that chooses among overlapped entries; None if no layer has any.

    If a context has fewer entries than are chosen, all are taken. More than the longest context can have is an error.
    """
    ratios = [one.ratio for one in compressors if one is not None and one.is_overlapped]
    if not ratios:
        return None
    num_heads, head_dim = read_index_sizes(settings, 64, 128, rope_dim)
    num_entries = max(1, max_position // ratios[0])
    top_k = settings.count("index_topk", min(512, num_entries), MAX_POSITIONS)
    if top_k > min(num_entries, MAX_CHOSEN):
        most = f"at most {min(num_entries, MAX_CHOSEN)}: the longest context has {num_entries} entries, and so many"
        raise settings.refuse("index_topk", top_k, most)
    return IndexSpec(num_heads, head_dim, top_k, turns_neighbours=True)


def _read_experts(settings: Settings, num_layers: int) -> ExpertsSpec:
    """Read the experts of every layer; the first layers choose by token."""
    if read_activation(settings, "hidden_act", "silu") != "silu":
        raise settings.unsupported("hidden_act", "experts are gated with silu here")
    if settings.text("scoring_func", SCORING) != SCORING:
        raise settings.unsupported("scoring_func", f"scores of {NAME} are a {SCORING} of logits")
    if settings.text("topk_method", METHOD) != METHOD:
        raise settings.unsupported("topk_method", f"experts of {NAME} are chosen by {METHOD}")
    if not settings.flag("norm_topk_prob", True):
        raise settings.unsupported("norm_topk_prob", "shares of this family are divided by their sum")
    num_experts = settings.count("n_routed_experts", 256, MAX_EXPERTS)
    check_total(settings, "n_routed_experts", num_experts, num_layers)
    inner = settings.count("moe_intermediate_size", 2048, MAX_EXPERT_WIDTH)
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=settings.count("num_experts_per_tok", min(6, num_experts), num_experts),
        intermediate_size=inner,
        shared_size=inner * settings.count("n_shared_experts", 1, MAX_EXPERTS),
        normalizes=True,
        scoring=SCORING,
        has_score_bias=True,
        share_scale=settings.number("routed_scaling_factor", 1.5),
        silu_limit=_read_limit(settings),
        table_layers=read_mlp_layers(settings, num_layers, (TABLE, SCORES), TABLE, ("num_hash_layers", 3)),
        table_size=settings.count("vocab_size", 129280, MAX_VOCAB),
    )


def _read_limit(settings: Settings) -> float | None:
    """Read the clamp on gate and up; None if it is absent or zero."""
    if settings.values.get("swiglu_limit", 10.0) is None:
        return None
    return settings.number("swiglu_limit", 10.0, low=0.0) or None


_NAMES = read_data("deepseek_v4_names.json")
SPELLINGS: Mapping[str, str] = _NAMES["model"]
"""Maps transformers' modules and tensors of a whole model to DeepSeek's. A head has the name that all families use."""
LAYER_SPELLINGS: Mapping[str, str] = _NAMES["layer"]
"""Renames within a layer, after its number. transformers writes some of these names back ambiguously (attn.norm)."""
PREFIX = "model."


def _pattern(names: Mapping[str, str], prefix: str) -> re.Pattern[str]:
    """Match whole components of a name, the longest first."""
    longest = sorted(names, key=len, reverse=True)
    return re.compile(rf"({prefix})({'|'.join(map(re.escape, longest))})(?=\.|$)")


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Compile the names within a layer, and those of a whole model, once they are needed: plans do without."""
    return _pattern(LAYER_SPELLINGS, r"layers\.\d+\."), _pattern(SPELLINGS, "")


def respell(name: str) -> str:
    """Return DeepSeek's name of a tensor from any of the three spellings."""
    name = name.removeprefix(PREFIX)
    for pattern, names in zip(_patterns(), (LAYER_SPELLINGS, SPELLINGS), strict=True):
        if found := pattern.match(name):
            return found[1] + names[found[2]] + name[found.end() :]
    return name
