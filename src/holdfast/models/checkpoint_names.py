"""Names of checkpoint tensors by family, and the parameters that a spec makes of them; no torch."""

from dataclasses import dataclass

from holdfast.models.expert_parameters import EXPERT_NAMES, ExpertNames, list_experts
from holdfast.models.parameters import Kind, Parameter, Split
from holdfast.models.spec import ModelSpec
from holdfast.models.stacked_parts import stacked


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """What a family calls its modules; names in a layer follow `layer` with the layer's number filled in."""

    embed: str
    layer: str
    attn_norm: str
    q: str
    k: str
    v: str
    o: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    final_norm: str
    positions: str = ""
    embed_in: str = ""
    embed_out: str = ""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    lm_head: str = "lm_head"
    experts: ExpertNames = EXPERT_NAMES


LLAMA_NAMES = CheckpointNames(
    embed="model.embed_tokens",
    layer="model.layers.{}.",
    attn_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    final_norm="model.norm",
)
OPT_NAMES = CheckpointNames(
    embed="model.decoder.embed_tokens",
    layer="model.decoder.layers.{}.",
    attn_norm="self_attn_layer_norm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    gate="",
    up="fc1",
    down="fc2",
    final_norm="model.decoder.final_layer_norm",
    positions="model.decoder.embed_positions",
    embed_in="model.decoder.project_in",
    embed_out="model.decoder.project_out",
)


def list_parameters(spec: ModelSpec, names: CheckpointNames, with_layouts: bool = True) -> tuple[Parameter, ...]:
    """Every parameter of the decoder, in the order of computation; a plan of memory does without other layouts."""
    hidden, embedding = spec.hidden_size, spec.embedding_size or spec.hidden_size
    embed_kind: Kind = "head" if spec.tied_embeddings else "embedding"
    parameters = [_matrix("embed", [(names.embed, spec.vocab_size)], embedding, embed_kind, "rows")]
    if spec.rope is None:
        num_positions = spec.max_position + spec.position_offset
        parameters.append(_matrix("positions", [(names.positions, num_positions)], hidden, "embedding", "none"))
    if embedding != hidden:
        parameters.append(_matrix("embed_in", [(names.embed_in, hidden)], embedding, "linear", "none"))
    for layer in range(spec.num_layers):
        parameters += _list_layer(spec, names, layer, with_layouts)
    if spec.has_final_norm:
        parameters += _norm(spec, "final_norm", names.final_norm)
    if embedding != hidden:
        parameters.append(_matrix("embed_out", [(names.embed_out, embedding)], hidden, "linear", "none"))
    if not spec.tied_embeddings:
        parameters.append(_matrix("lm_head", [(names.lm_head, spec.vocab_size)], embedding, "head", "rows"))
    return tuple(parameters)


def _list_layer(spec: ModelSpec, names: CheckpointNames, layer: int, with_layouts: bool) -> list[Parameter]:
    ours, theirs, hidden = f"layers.{layer}.", names.layer.format(layer), spec.hidden_size
    qkv = [(theirs + names.q, spec.query_size), (theirs + names.k, spec.kv_size), (theirs + names.v, spec.kv_size)]
    parameters = [
        *_norm(spec, f"{ours}attn_norm", theirs + names.attn_norm),
        *_linear(f"{ours}qkv", qkv, hidden, "rows", spec.qkv_bias),
    ]
    if spec.qk_norm:
        for name, module in (("q_norm", names.q_norm), ("k_norm", names.k_norm)):
            parameters.append(
                _vector(f"{ours}{name}.weight", [(f"{theirs}{module}.weight", spec.head_dim)], "norm", "none")
            )
    parameters += _linear(f"{ours}o", [(theirs + names.o, hidden)], spec.query_size, "columns", spec.o_bias)
    parameters += _norm(spec, f"{ours}mlp_norm", theirs + names.mlp_norm)
    experts = spec.layer_experts(layer)
    if experts is not None:
        return [*parameters, *list_experts(experts, names.experts, hidden, ours, theirs, with_layouts)]
    return [*parameters, *_list_mlp(spec, names, ours, theirs)]


def _list_mlp(spec: ModelSpec, names: CheckpointNames, ours: str, theirs: str) -> list[Parameter]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    up_name, up = f"{ours}up", [(theirs + names.up, inner)]
    if spec.gated_mlp:
        up_name, up = f"{ours}gate_up", [(theirs + names.gate, inner), *up]
    return [
        *_linear(up_name, up, hidden, "rows", spec.mlp_bias),
        *_linear(f"{ours}down", [(theirs + names.down, hidden)], inner, "columns", spec.mlp_bias),
    ]


def _linear(
    name: str, modules: list[tuple[str, int]], num_columns: int, split: Split, has_bias: bool
) -> list[Parameter]:
    weight = _matrix(name, modules, num_columns, "linear", split)
    if not has_bias:
        return [weight]
    # Ranks that share columns add up their products, so a bias belongs to all of them together.
    bias_split: Split = "rows" if split == "rows" else "none"
    biases = [(f"{module}.bias", num_rows) for module, num_rows in modules]
    return [weight, _vector(f"{name}.bias", biases, "bias", bias_split)]


def _norm(spec: ModelSpec, name: str, module: str) -> list[Parameter]:
    kinds: dict[str, Kind] = {"weight": "norm", "bias": "bias"} if spec.norm == "layer" else {"weight": "norm"}
    return [
        _vector(f"{name}.{end}", [(f"{module}.{end}", spec.hidden_size)], kind, "none") for end, kind in kinds.items()
    ]


def _matrix(name: str, modules: list[tuple[str, int]], num_columns: int, kind: Kind, split: Split) -> Parameter:
    tensors = [(f"{module}.weight", (rows, num_columns)) for module, rows in modules]
    return stacked(f"{name}.weight", tensors, kind, split)


def _vector(name: str, tensors: list[tuple[str, int]], kind: Kind, split: Split) -> Parameter:
    return stacked(name, [(tensor, (num_rows,)) for tensor, num_rows in tensors], kind, split)
