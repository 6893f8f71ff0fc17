"""Declarations of attention backends: layer spec, step bounds, scratch buffers, memory terms; no torch of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdfast.cache.spec import LayerCache
from holdfast.memory.planner import Term
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import bytes_for

HALF_PRECISION = ("float16", "bfloat16")
MAX_PARTIALS = 1024
"""Most split-KV partials of a step, one per row and split. Long contexts take longer splits, not more memory."""
MIN_SPLIT_TOKENS = 256
ROWS_AT_ONCE = 1024
"""Most rows of a step whose queries are in the latent space, or whose scores are held, together."""
PARTIAL_HEAD_ROWS = 2 * 2 * 132 * 64
"""Rows times heads of latent split-KV partials: two waves over 132 multiprocessors, two tiles of 64 heads in each."""
SELECTED = "selected"
"""Scratch buffer of each row's selected tokens, kept from one layer with an index to the next."""
INDEX_SCORE_BYTES = 128 * 2**20
"""Most bytes of index scores that a GPU holds at once."""
SCORE_ALIGNMENT = 64
"""A row of index scores is a multiple of this many columns."""
BLOCK_ROWS, BLOCK_TOKENS = 1024, 1024
"""Rows times heads, and tokens, whose scores plain torch holds at once."""
INDEX_SCORES = 2**20
"""Rows times tokens whose index scores plain torch holds at once, unless one row has more."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention and cache of one layer. Each family has a subclass."""

    cache: LayerCache
    num_heads: int
    scale: float
    window: int | None
    """Newest tokens that a token attends to, itself included; None for all."""
    max_model_len: int
    dtype: str
    """torch's name of the type of queries and outputs."""
    device_kind: str
    """cpu or cuda."""
    group: int = 0
    """Cache group of the layer: its slots and its page table."""
    has_key_bias: bool = False
    """True if grouped attention's quantized pages hold keys without bias; attention adds its part to the scores."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The most that one step can hold."""

    max_num_seqs: int
    max_num_rows: int
    page_tokens: int


class BackendDeclaration:
    """A backend's supported layers and bytes, known without building it."""

    name: ClassVar[str]
    can_be_captured: ClassVar[bool] = False
    """True if a graph of its launches serves other steps than the captured one."""
    can_be_invariant: ClassVar[bool] = False
    """True if a row can get the same bits whatever else is in the batch."""

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """Return None, or why this layer cannot run here."""
        raise NotImplementedError

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """List the workspace of `attend` beside queries and outputs: one set for all layers."""
        return ()

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        """List the memory the backend holds for life: tile lists, mask templates."""
        return ()


def unsupported_device(spec: AttentionSpec) -> str | None:
    """Return why our GPU kernels reject the layer (device or dtype), or None."""
    if spec.device_kind != "cuda":
        return f"it runs on GPUs, not on {spec.device_kind}"
    if spec.dtype not in HALF_PRECISION:
        return f"it computes in half precision, not in {spec.dtype}"
    return None


def unsupported_pages(spec: AttentionSpec) -> str | None:
    """Return why plain pages of another dtype do not fit these queries, or None."""
    kv_format = spec.cache.format
    if not kv_format.is_quantized and {kv_format.key_dtype, kv_format.value_dtype} != {spec.dtype}:
        return f"pages must be {spec.dtype}, the type of the queries"
    return None


def max_partials(max_model_len: int, bounds: StepBounds) -> int:
    """Count the split-KV partials of the largest step; 0 if no context is long enough to be split."""
    if max_model_len <= MIN_SPLIT_TOKENS:
        return 0
    return min(MAX_PARTIALS, bounds.max_num_rows * -(-max_model_len // MIN_SPLIT_TOKENS))


def partial_specs(num_partials: int, num_heads: int, width: int, dtype: str = "float32") -> tuple[TensorSpec, ...]:
    """Declare split-KV partials: unnormalized outputs and their log-sum-exp. None if nothing is split."""
    if not num_partials:
        return ()
    return (
        TensorSpec("partial_out", (num_partials, width), dtype),
        TensorSpec("partial_lse", (num_partials, num_heads), "float32"),
    )


def score_columns(num_keys: int) -> int:
    """Round the width of a row of index scores up, so that rows begin aligned."""
    return -(-num_keys // SCORE_ALIGNMENT) * SCORE_ALIGNMENT


def score_rows(num_keys: int, bounds: StepBounds) -> int:
    """Count the rows whose scores against all keys are held at once. Long contexts take fewer rows, not more memory."""
    most = INDEX_SCORE_BYTES // bytes_for("float32", (score_columns(num_keys),))
    return max(1, min(most, ROWS_AT_ONCE, bounds.max_num_rows))


def head_block_rows(num_heads: int) -> int:
    """Count the rows that plain torch attends for at once."""
    return max(1, BLOCK_ROWS // num_heads)


def index_block_rows(num_heads: int, num_tokens: int) -> int:
    """Count the rows whose index scores against so many tokens plain torch holds at once."""
    return max(1, min(BLOCK_ROWS // max(1, num_heads), INDEX_SCORES // num_tokens))


def index_term(num_heads: int, index_dim: int, num_keys: int, what: str) -> Term:
    """Declare the memory of plain torch's top-k over up to `num_keys` index keys."""
    rows = index_block_rows(num_heads, 1)
    num_elements = 8 * max(INDEX_SCORES, num_keys) + 2 * rows * num_heads * BLOCK_TOKENS
    num_elements += 2 * (BLOCK_TOKENS + rows * num_heads) * index_dim
    reason = f"index scores of {rows} rows against {BLOCK_TOKENS} {what} at a time, and the largest of all"
    return Term("attention/index", bytes_for("float32", (num_elements,)), reason)
