"""Names of checkpoint tensors by family, and the parameters that a spec makes of them; no torch."""

from dataclasses import dataclass

from holdfast.models.parameters import Parameter, Part
from holdfast.models.spec import ModelSpec


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


def list_parameters(spec: ModelSpec, names: CheckpointNames) -> tuple[Parameter, ...]:
    """Every parameter of the decoder, in the order of computation."""
    hidden, embedding = spec.hidden_size, spec.embedding_size or spec.hidden_size
    parameters = [_matrix("embed", [(names.embed, spec.vocab_size)], embedding)]
    if spec.rope is None:
        num_positions = spec.max_position + spec.position_offset
        parameters.append(_matrix("positions", [(names.positions, num_positions)], hidden))
    if embedding != hidden:
        parameters.append(_matrix("embed_in", [(names.embed_in, hidden)], embedding))
    for layer in range(spec.num_layers):
        parameters += _list_layer(spec, names, f"layers.{layer}.", names.layer.format(layer))
    if spec.has_final_norm:
        parameters += _norm(spec, "final_norm", names.final_norm, hidden)
    if embedding != hidden:
        parameters.append(_matrix("embed_out", [(names.embed_out, embedding)], hidden))
    if not spec.tied_embeddings:
        parameters.append(_matrix("lm_head", [(names.lm_head, spec.vocab_size)], embedding))
    return tuple(parameters)


def _list_layer(spec: ModelSpec, names: CheckpointNames, ours: str, theirs: str) -> list[Parameter]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    qkv = [(theirs + names.q, spec.query_size), (theirs + names.k, spec.kv_size), (theirs + names.v, spec.kv_size)]
    up = [(theirs + names.up, inner)]
    up_name = f"{ours}up"
    if spec.gated_mlp:
        up_name, up = f"{ours}gate_up", [(theirs + names.gate, inner), *up]
    parameters = [
        *_norm(spec, f"{ours}attn_norm", theirs + names.attn_norm, hidden),
        *_linear(f"{ours}qkv", qkv, hidden, spec.qkv_bias),
    ]
    if spec.qk_norm:
        parameters.append(_vector(f"{ours}q_norm.weight", [(f"{theirs}{names.q_norm}.weight", spec.head_dim)]))
        parameters.append(_vector(f"{ours}k_norm.weight", [(f"{theirs}{names.k_norm}.weight", spec.head_dim)]))
    return [
        *parameters,
        *_linear(f"{ours}o", [(theirs + names.o, hidden)], spec.query_size, spec.o_bias),
        *_norm(spec, f"{ours}mlp_norm", theirs + names.mlp_norm, hidden),
        *_linear(up_name, up, hidden, spec.mlp_bias),
        *_linear(f"{ours}down", [(theirs + names.down, hidden)], inner, spec.mlp_bias),
    ]


def _linear(name: str, modules: list[tuple[str, int]], num_columns: int, has_bias: bool) -> list[Parameter]:
    weight = _matrix(name, modules, num_columns)
    if not has_bias:
        return [weight]
    return [weight, _vector(f"{name}.bias", [(f"{module}.bias", num_rows) for module, num_rows in modules])]


def _norm(spec: ModelSpec, name: str, module: str, width: int) -> list[Parameter]:
    kinds = ("weight", "bias") if spec.norm == "layer" else ("weight",)
    return [_vector(f"{name}.{kind}", [(f"{module}.{kind}", width)]) for kind in kinds]


def _matrix(name: str, modules: list[tuple[str, int]], num_columns: int) -> Parameter:
    return _stack(f"{name}.weight", [(f"{module}.weight", (rows, num_columns)) for module, rows in modules])


def _vector(name: str, tensors: list[tuple[str, int]]) -> Parameter:
    return _stack(name, [(tensor, (num_rows,)) for tensor, num_rows in tensors])


def _stack(name: str, tensors: list[tuple[str, tuple[int, ...]]]) -> Parameter:
    """One parameter whose rows are those of the given tensors, one after the other."""
    parts: list[Part] = []
    row = 0
    for tensor, shape in tensors:
        parts.append(Part(tensor, row, shape))
        row += shape[0]
    return Parameter(name, (row, *tensors[0][1][1:]), tuple(parts))
