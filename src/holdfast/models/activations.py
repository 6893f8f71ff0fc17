"""The tensors that a step of a decoder passes through, as workspace requests: what lives together, and what takes turns; no torch.

stream   lives through all layers:   x, a normed copy of it, and what the last product adds to it
layers   takes turns:                attention of a layer, then its MLP, and after the last layer logits
few      lives from start to end:    what products of few rows share
"""

from dataclasses import dataclass

from holdfast.memory.tensor_spec import TensorSpec
from holdfast.models.spec import ModelSpec

STREAM = "stream"
LAYERS = "layers"
FEW = "few"
FEW_ROWS = 16
"""Steps of up to so many rows take the kernels for few rows (kernels/skinny_linear.py)."""
FEW_BLOCK = 64
FEW_LEAST_COLUMNS = 2
FEW_PART_COLUMNS = 2 * 128 * FEW_BLOCK
"""A weight is cut along K only until there are enough programs, so parts times columns stay below this."""


@dataclass(frozen=True, slots=True)
class Request:
    """Tensors that one owner wants together, on one lane of the workspace."""

    lane: str
    owner: str
    specs: tuple[TensorSpec, ...]


def stream_request(spec: ModelSpec, num_rows: int, dtype: str) -> Request:
    """The residual stream, and two tensors as wide beside it."""
    shape = (num_rows, spec.hidden_size)
    return Request(STREAM, "stream", tuple(TensorSpec(name, shape, dtype) for name in ("x", "normed", "delta")))


def attention_request(spec: ModelSpec, num_rows: int, dtype: str, scratch: tuple[TensorSpec, ...]) -> Request:
    """One layer's attention: fused projection, queries, outputs, and the backend's scratch."""
    return Request(
        LAYERS,
        "attention",
        (
            TensorSpec("qkv", (num_rows, spec.qkv_size), dtype),
            TensorSpec("q", (num_rows, spec.num_heads, spec.head_dim), dtype),
            TensorSpec("attended", (num_rows, spec.query_size), dtype),
            *scratch,
        ),
    )


def mlp_request(spec: ModelSpec, num_rows: int, dtype: str) -> Request:
    """One layer's MLP: its widest products."""
    wide = TensorSpec("wide", (num_rows, (2 if spec.gated_mlp else 1) * spec.intermediate_size), dtype)
    active = TensorSpec("active", (num_rows, spec.intermediate_size), dtype)
    return Request(LAYERS, "mlp", (wide, active))


def head_request(spec: ModelSpec, num_logit_rows: int, dtype: str) -> Request:
    """Logits in float32, and what comes before them where the embedding is projected."""
    embedding_size = spec.embedding_size or spec.hidden_size
    return Request(
        LAYERS,
        "head",
        (
            TensorSpec("embedded", (num_logit_rows, embedding_size), dtype),
            TensorSpec("logits", (num_logit_rows, spec.vocab_size), "float32"),
        ),
    )


def embed_request(spec: ModelSpec, num_rows: int, dtype: str) -> Request:
    """Token embeddings before they are projected, and learned positions; nothing where neither is."""
    specs = []
    if spec.embedding_size is not None:
        specs.append(TensorSpec("tokens", (num_rows, spec.embedding_size), dtype))
    if spec.rope is None:
        specs.append(TensorSpec("position_ids", (num_rows,), "int64"))
        specs.append(TensorSpec("positions", (num_rows, spec.hidden_size), dtype))
    return Request(LAYERS, "embed", tuple(specs))


def takes_few(spec: ModelSpec, dtype: str, device_kind: str) -> bool:
    """Whether steps of few rows go through fused products: bfloat16 on a GPU, norm first, gate with silu.

    In float16 an x that is not yet divided by its rms could overflow.
    """
    widths = (spec.hidden_size, spec.query_size, spec.intermediate_size)
    return (
        device_kind == "cuda"
        and dtype == "bfloat16"
        and spec.norm == "rms"
        and spec.norm_first
        and spec.gated_mlp
        and spec.activation == "silu"
        and spec.has_final_norm
        and spec.embedding_size is None
        and all(width % FEW_BLOCK == 0 for width in widths)
    )


def few_request(spec: ModelSpec) -> Request:
    """Sums of squares by block, parts along K, and counters of parts that have arrived."""
    widest = max(spec.qkv_size, spec.hidden_size, spec.vocab_size)
    num_squares = max(FEW_ROWS * -(-spec.hidden_size // FEW_BLOCK), -(-spec.hidden_size // FEW_LEAST_COLUMNS))
    return Request(
        FEW,
        "few",
        (
            TensorSpec("squares", (num_squares,), "float32"),
            TensorSpec("parts", (FEW_ROWS * FEW_PART_COLUMNS,), "float32"),
            TensorSpec("arrived", (-(-widest // FEW_BLOCK),), "int32"),
        ),
    )
