"""Workspace requests for the tensors of a decoder step: what lives together and what takes turns; no torch.

stream           lives through all layers:   x, a normed copy, and the last product's output, not yet added to x
chosen           lives through all layers:   tokens that a layer chose (DSA), if later layers attend to them too
layers           takes turns:                attention of a layer, then its MLP or its experts, and after the last layer logits
quantized rows   takes turns:                quantized inputs (codes) of one product at a time
gathered         takes turns:                inputs of output projections, all-gathered over the ranks
row scaled       lives from start to end:    what medium-batch products with e4m3 weights share on a GPU
fused decode     lives from start to end:    what GEMVs and small-batch GEMMs share
"""

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.attention.declarations import SELECTED
from holdfast.families.state.spec import SCRATCH
from holdfast.kernels.geometry import (
    BLOCK_SCALED_BLOCK_N,
    BLOCK_SCALED_ROWS,
    FUSED_DECODE_ROWS,
    GEMV_MIN_BLOCK_N,
    NUM_GATE_AMAX,
    QUANTIZED_DECODE_ROWS,
    ROW_SCALED_BLOCK_N,
    ROW_SCALED_ROWS,
    ROW_SCALED_SPLIT_ROWS,
    SMALL_BATCH_BLOCK_N,
    SPLIT_K_COLUMNS,
    block_scaled_splits,
    order_specs,
    row_scaled_splits,
)
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.spec import ExpertsSpec, ModelSpec
from holdfast.quant.weight_schemes import AS_STORED, WeightRecipe, WeightScheme

STREAM = "stream"
CHOSEN = "chosen"
LAYERS = "layers"
QUANTIZED_ROWS = "quantized_rows"
GATHERED = "gathered"
ROW_SCALED = "row_scaled"
FUSED_DECODE = "fused_decode"


@dataclass(frozen=True, slots=True)
class Request:
    """Tensors that one owner needs together, on one lane of the workspace."""

    lane: str
    owner: str
    specs: tuple[TensorSpec, ...]


class StepRequests(NamedTuple):
    """Workspace requests of a step. Those that a model does not need are empty."""

    stream: Request
    chosen: Request
    embed: Request
    attention: Request
    state: Request
    mlp: Request
    experts: Request | None
    codes: Request
    gathered: Request


def step_requests(
    spec: ModelSpec, num_rows: int, dtype: str, scratch: tuple[TensorSpec, ...], recipe: WeightRecipe
) -> StepRequests:
    """List all requests. A plan reserves those of the largest step; every step acquires its own by the same names."""
    experts = spec.experts
    return StepRequests(
        stream_request(spec, num_rows, dtype),
        chosen_request(spec, scratch),
        embed_request(spec, num_rows, dtype),
        attention_request(spec, num_rows, dtype, scratch),
        state_request(spec, num_rows, dtype, scratch),
        mlp_request(spec, num_rows, dtype),
        None if experts is None else experts_request(experts, spec.hidden_size, num_rows, dtype),
        quantized_rows_request(spec, num_rows, 0, recipe),
        gathered_request(spec, num_rows, dtype),
    )


def stream_request(spec: ModelSpec, num_rows: int, dtype: str) -> Request:
    """Request the residual stream, and two more tensors of its width."""
    shape = (num_rows, spec.hidden_size)
    return Request(STREAM, "stream", tuple(TensorSpec(name, shape, dtype) for name in ("x", "normed", "delta")))


def chosen_request(spec: ModelSpec, scratch: tuple[TensorSpec, ...]) -> Request:
    """Pick the backend's scratch that must outlive a layer: none unless layers share choices."""
    specs = tuple(one for one in scratch if one.name == SELECTED) if spec.shares_choices else ()
    return Request(CHOSEN, "chosen", specs)


def attention_request(spec: ModelSpec, num_rows: int, dtype: str, scratch: tuple[TensorSpec, ...]) -> Request:
    """Request one layer's attention: fused projection, queries, outputs, and most of the backend's scratch."""
    lasting = chosen_request(spec, scratch).specs
    own = spec.attention.tensors(spec.num_heads, spec.head_dim, num_rows, dtype)
    others = (one for one in scratch if one not in lasting and not one.name.startswith(SCRATCH))
    return Request(LAYERS, "attention", (*own, *others))


def state_request(spec: ModelSpec, num_rows: int, dtype: str, scratch: tuple[TensorSpec, ...]) -> Request:
    """Request a layer with a state: its projections, its output, and its backend's scratch; empty without such layers."""
    own = () if spec.state is None else spec.state.tensors(num_rows, dtype)
    return Request(LAYERS, "state", (*own, *(one for one in scratch if one.name.startswith(SCRATCH))))


def mlp_request(spec: ModelSpec, num_rows: int, dtype: str) -> Request:
    """Request one layer's MLP: its widest products."""
    wide = TensorSpec("wide", (num_rows, (2 if spec.gated_mlp else 1) * spec.intermediate_size), dtype)
    active = TensorSpec("active", (num_rows, spec.intermediate_size), dtype)
    return Request(LAYERS, "mlp", (wide, active))


def experts_request(experts: ExpertsSpec, hidden_size: int, num_rows: int, dtype: str) -> Request:
    """Request one layer's experts: logits and choices of every row, and the output of each chosen expert.

    A pair is a row and one of its experts. The shared expert's output lives beside them until all are summed.
    """
    choices, num_pairs = (num_rows, experts.top_k), num_rows * experts.top_k
    specs = [
        TensorSpec("router", (num_rows, experts.num_experts), "float32"),
        TensorSpec("expert_ids", choices, "int32"),
        TensorSpec("shares", choices, "float32"),
        TensorSpec("active", (num_pairs, experts.intermediate_size), dtype),
        TensorSpec("routed", (num_pairs, hidden_size), dtype),
    ]
    if experts.shared_size:
        specs += [
            TensorSpec("shared_wide", (num_rows, 2 * experts.shared_size), dtype),
            TensorSpec("shared_active", (num_rows, experts.shared_size), dtype),
            TensorSpec("shared", (num_rows, hidden_size), dtype),
        ]
    if experts.has_shared_gate:
        specs.append(TensorSpec("shared_logit", (num_rows, 1), "float32"))
    if experts.num_local is not None:
        specs.append(TensorSpec("local_ids", choices, "int32"))
    specs += order_specs(num_rows, experts.top_k, experts.num_experts, experts.num_local)
    return Request(LAYERS, "experts", tuple(specs))


def gathered_inputs(spec: ModelSpec) -> list[tuple[str, int, int]]:
    """List inputs of output projections that ranks gather: weight kind, rows per step row, and a rank's columns."""
    if not spec.gathers:
        return []
    inputs = [("linear", 1, spec.attended_size)]
    if spec.state is not None:
        inputs.append(("linear", 1, spec.state.value_size))
    if spec.has_mlp:
        inputs.append(("linear", 1, spec.intermediate_size))
    experts = spec.experts
    if experts is not None and experts.shared_size:
        inputs.append(("linear", 1, experts.shared_size))
    if experts is not None and experts.num_local is None:
        inputs.append(("expert", experts.top_k, experts.intermediate_size))
    return inputs


def gathered_request(spec: ModelSpec, num_rows: int, dtype: str) -> Request:
    """Request a buffer for such inputs of all ranks, used by one product at a time; empty if ranks do not gather."""
    widest = max((count * width for _, count, width in gathered_inputs(spec)), default=0)
    specs = (TensorSpec("gathered", (num_rows * spec.num_ranks * widest,), dtype),) if widest else ()
    return Request(GATHERED, "gathered", specs)


def room_elements(spec: ModelSpec, num_rows: int) -> int:
    """Return the elements of the largest part of a step that peers read from a rank; 0 if one rank has all."""
    if spec.num_ranks == 1:
        return 0
    sizes = [max(spec.hidden_size, spec.embedding_size or 0)]
    sizes += [count * width for _, count, width in gathered_inputs(spec)]
    if spec.gathers and spec.experts is not None and spec.experts.num_local is not None:
        sizes.append(spec.experts.top_k * spec.hidden_size)  # pairs, each from the rank that has its expert
    return num_rows * max(sizes)


def quantized_rows_request(spec: ModelSpec, num_rows: int, num_logit_rows: int, recipe: WeightRecipe) -> Request:
    """Request a buffer for one product's quantized input, codes and scales; empty if no product takes such input.

    Both are vectors, and a product takes views of them (`quantized_view` in kernels/gemm/linear.py).
    """
    products = [
        (num_inputs, width, scheme.block_columns or width)
        for kind, num_inputs, width in _products(spec, num_rows, num_logit_rows)
        if (scheme := recipe.scheme_for(kind, ())) is not None and scheme.quantizes_activations
    ]
    if not products:
        return Request(QUANTIZED_ROWS, "quantized_rows", ())
    num_codes = max(num_inputs * width for num_inputs, width, _ in products)
    num_scales = max(num_inputs * -(-width // block) for num_inputs, width, block in products)
    codes, scales = TensorSpec("codes", (num_codes,), "float8_e4m3fn"), TensorSpec("scales", (num_scales,), "float32")
    return Request(QUANTIZED_ROWS, "quantized_rows", (codes, scales))


def row_scaled_request(spec: ModelSpec, recipe: WeightRecipe) -> Request:
    """Request the `TileScratch` of products by e4m3 weights, row-scaled or block-scaled, for batches of some rows.

    Empty for other weights. With scales by block no gate is fused, so there are no amax.
    """
    scheme = recipe.scheme_for("linear", ())
    if scheme is None or not scheme.quantizes_activations:
        return Request(ROW_SCALED, "row_scaled", ())
    in_blocks = scheme.block_columns > 0
    splits_of, block_n = (
        (block_scaled_splits, BLOCK_SCALED_BLOCK_N) if in_blocks else (row_scaled_splits, ROW_SCALED_BLOCK_N)
    )
    splits = [(size_n, splits_of(size_n, size_k)) for size_n, size_k in _weight_shapes(spec)]
    widest = max((size_n * num_splits for size_n, num_splits in splits if num_splits > 1), default=0)
    num_blocks = max((-(-size_n // block_n) for size_n, num_splits in splits if num_splits > 1), default=0)
    gated = max(spec.intermediate_size if spec.has_mlp else 0, spec.experts.shared_size if spec.experts else 0)
    num_amax = 0 if in_blocks else ROW_SCALED_ROWS * -(-gated // ROW_SCALED_BLOCK_N)
    return Request(
        ROW_SCALED,
        "row_scaled",
        (
            TensorSpec("parts", ((BLOCK_SCALED_ROWS if in_blocks else ROW_SCALED_SPLIT_ROWS) * widest,), "float32"),
            TensorSpec("arrived", (num_blocks,), "int32"),
            TensorSpec("row_amax", (num_amax,), "int32"),
        ),
    )


def _weight_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """List outputs and inputs of the layers' weights other than experts, and of projections of the embedding."""
    hidden, embedding = spec.hidden_size, spec.embedding_size or spec.hidden_size
    shapes = [*spec.layer_products]
    if embedding != hidden:
        shapes += [(hidden, embedding), (embedding, hidden)]
    if spec.has_mlp:
        width = spec.intermediate_size
        shapes += [((2 if spec.gated_mlp else 1) * width, hidden), (hidden, width)]
    if spec.experts is not None and spec.experts.shared_size:
        shapes += [(2 * spec.experts.shared_size, hidden), (hidden, spec.experts.shared_size)]
    return shapes


def _products(spec: ModelSpec, num_rows: int, num_logit_rows: int) -> list[tuple[str, int, int]]:
    """List the kinds of weights that a step multiplies by, with rows and columns of their inputs."""
    hidden = spec.hidden_size
    embedding = spec.embedding_size or hidden
    products = [("linear", num_rows, size_k) for _, size_k in spec.layer_products]
    products.append(("head", num_logit_rows, embedding))
    if embedding != hidden:
        products += [("linear", num_rows, embedding), ("linear", num_logit_rows, hidden)]
    if spec.has_mlp:
        products.append(("linear", num_rows, spec.intermediate_size))
    if spec.experts is not None:
        products.append(("expert", num_rows, hidden))
        products.append(("expert", num_rows * spec.experts.top_k, spec.experts.intermediate_size))
    if spec.experts is not None and spec.experts.shared_size:
        products.append(("linear", num_rows, spec.experts.shared_size))
    # Quantizing takes whole rows.
    products += [(kind, num_rows * count, spec.num_ranks * width) for kind, count, width in gathered_inputs(spec)]
    return products


def head_request(spec: ModelSpec, num_logit_rows: int, dtype: str) -> Request:
    """Request float32 logits, and their input if the embedding is projected; empty if another stage has the head."""
    embedding_size = spec.embedding_size or spec.hidden_size
    if not spec.is_last_stage:
        return Request(LAYERS, "head", ())
    return Request(
        LAYERS,
        "head",
        (
            TensorSpec("embedded", (num_logit_rows, embedding_size), dtype),
            TensorSpec("logits", (num_logit_rows, spec.vocab_size), "float32"),
        ),
    )


def embed_request(spec: ModelSpec, num_rows: int, dtype: str) -> Request:
    """Request token embeddings before projection, and learned positions; empty without either, or on a later stage."""
    specs = []
    if not spec.is_first_stage:
        return Request(LAYERS, "embed", ())
    if spec.embedding_size is not None:
        specs.append(TensorSpec("tokens", (num_rows, spec.embedding_size), dtype))
    if spec.rope is None:
        specs.append(TensorSpec("position_ids", (num_rows,), "int64"))
        specs.append(TensorSpec("positions", (num_rows, spec.hidden_size), dtype))
    return Request(LAYERS, "embed", tuple(specs))


def takes_fused_decode(spec: ModelSpec, dtype: str, device_kind: str, recipe: WeightRecipe = AS_STORED) -> bool:
    """Return True if small batches can take the fused decode path: bfloat16 on a GPU, norm first, gate with silu.

    Ranks add up parts and gather none (`exact` keeps the products of one rank). No index chooses tokens (DSA), no table
    chooses experts, the residual is one stream. Weights beside experts are plain, or have eight bits and a row scale.
    In float16 an x whose RMSNorm is deferred could overflow.
    Two more checks follow: of the weights (`declined` in models/fused_decode.py) and of a step (`fits_fused_decode`).
    """
    products = ((spec.hidden_size, spec.query_size),) if spec.latent is None else spec.attention_products
    products += () if spec.state is None else ((spec.hidden_size, spec.state.value_size),)
    widths = (*(size for shape in products for size in shape), *((spec.intermediate_size,) if spec.has_mlp else ()))
    scheme = layer_scheme(spec, recipe)
    return (
        device_kind == "cuda"
        and dtype == "bfloat16"
        and not spec.gathers
        and (spec.latent is None or spec.latent.index is None)
        and spec.compressed is None
        and spec.streams is None
        and (spec.experts is None or not spec.experts.table_layers)
        and (scheme is None or scheme.block_columns == 0)
        and spec.norm == "rms"
        and spec.norm_first
        and spec.gated_mlp
        and spec.activation == "silu"
        and spec.has_final_norm
        and spec.embedding_size is None
        and not spec.has_output_norms
        and spec.logit_softcap is None
        and all(width % SMALL_BATCH_BLOCK_N == 0 for width in widths)
    )


def layer_scheme(spec: ModelSpec, recipe: WeightRecipe) -> WeightScheme | None:
    """Return the scheme of the layers' products other than experts.

    None if they are plain: a checkpoint that quantizes only its experts has a recipe that excludes all others.
    """
    if recipe.scheme is None or not recipe.ignore:
        return recipe.scheme
    ignored = frozenset(recipe.ignore)
    mlp = ("gate_up" if spec.gated_mlp else "up", "down")

    def modules(layer: int) -> tuple[str, ...]:
        own = spec.state.modules if spec.state is not None and spec.has_state(layer) else spec.attention.modules
        return own if spec.layer_experts(layer) is not None else (*own, *mlp)

    names = (f"layers.{layer}.{module}.weight" for layer in range(spec.num_layers) for module in modules(layer))
    return None if all(name in ignored for name in names) else recipe.scheme


def fits_fused_decode(num_rows: int, spec: ModelSpec, recipe: WeightRecipe = AS_STORED) -> bool:
    """Return True if a step of `num_rows` rows is a small batch, for a model that `takes_fused_decode`."""
    scheme = layer_scheme(spec, recipe)
    quantizes = scheme is not None and scheme.quantizes_activations
    if quantizes and spec.experts is None and spec.latent is None and spec.num_ranks == 1:
        return num_rows <= QUANTIZED_DECODE_ROWS
    return num_rows <= FUSED_DECODE_ROWS


def fused_decode_request(spec: ModelSpec, recipe: WeightRecipe = AS_STORED) -> Request:
    """Request sums of squares by block, split-K partials, arrival counters, and amax if weights are quantized."""
    head = spec.vocab_size if spec.is_last_stage else 0
    widest = max(head, *(size_n for size_n, _ in spec.layer_products))
    num_squares = max(
        FUSED_DECODE_ROWS * -(-spec.hidden_size // SMALL_BATCH_BLOCK_N), -(-spec.hidden_size // GEMV_MIN_BLOCK_N)
    )
    specs = [
        TensorSpec("squares", (num_squares,), "float32"),
        TensorSpec("parts", (FUSED_DECODE_ROWS * SPLIT_K_COLUMNS,), "float32"),
        TensorSpec("arrived", (-(-widest // SMALL_BATCH_BLOCK_N),), "int32"),
    ]
    if layer_scheme(spec, recipe) is not None:
        specs += [
            TensorSpec("amax", (num_squares,), "float32"),
            TensorSpec("input_amax", (FUSED_DECODE_ROWS,), "float32"),
            TensorSpec("gate_amax", (FUSED_DECODE_ROWS * NUM_GATE_AMAX,), "int32"),
        ]
    return Request(FUSED_DECODE, "fused_decode", tuple(specs))
