"""The backends as the planner sees them, the fastest first: who takes which layer, and what each will hold; no torch of its own."""

import os
import shutil
import sys
from collections.abc import Sequence

from holdfast.attention.spec import AttentionSpec, BackendDeclaration, StepBounds
from holdfast.errors import UnsupportedModelError
from holdfast.memory.planner import Term
from holdfast.memory.tensor_spec import TensorSpec
from holdfast.quant.formats import DTYPE_BYTES, bytes_for

SPLIT_ROWS = 1024
"""Most (row, split) pairs whose partial results are kept at once: long contexts take longer splits, never more memory."""
MIN_SPLIT_TOKENS = 256
TILE_FIELDS = 8
QUERY_ROWS = 128
"""Rows of queries times heads of a group in one tile of a prefill."""
MAX_MASK_ROWS = 128
MASK_ELEMENTS = 2**22
"""The mask template of plain torch holds block rows x context; longer contexts take lower blocks, not more memory."""


class NativePagedDeclaration:
    """C kernels over float32 pages on a CPU."""

    name = "native_paged"
    can_be_captured = False
    can_be_invariant = True

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if spec.device_kind != "cpu":
            return f"it runs on CPU only, not on {spec.device_kind}"
        planes = {plane.name: plane.dtype for plane in spec.cache.planes}
        if planes.keys() != {"k", "v"}:
            return f"the format {spec.cache.format.name} is not plain keys and values"
        if {spec.dtype, *planes.values()} != {"float32"}:
            return "it computes in float32 over float32 pages only"
        return None if _has_native() else "it needs a C compiler"

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        return ()

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        return ()


class TritonPagedDeclaration:
    """Triton kernels over half-precision pages on a GPU."""

    name = "triton_paged"
    can_be_captured = True
    can_be_invariant = True

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if spec.device_kind != "cuda":
            return f"it runs on GPUs, not on {spec.device_kind}"
        planes = {plane.name: plane.dtype for plane in spec.cache.planes}
        if planes.keys() != {"k", "v"}:
            return f"the format {spec.cache.format.name} is not plain keys and values"
        if set(planes.values()) != {spec.dtype}:
            return f"pages must be {spec.dtype}, the type of the queries"
        if spec.dtype not in ("float16", "bfloat16"):
            return f"it computes in half precision, not in {spec.dtype}"
        if spec.cache.head_dim > 256 or spec.cache.head_dim % 8:
            return f"head_dim is {spec.cache.head_dim}, and a multiple of 8 up to 256 is computed"
        if spec.num_heads % spec.cache.num_kv_heads:
            return f"{spec.num_heads} query heads do not divide into {spec.cache.num_kv_heads} key heads"
        if spec.num_heads // spec.cache.num_kv_heads > QUERY_ROWS:
            return f"{spec.num_heads // spec.cache.num_kv_heads} query heads share a key head, {QUERY_ROWS} may"
        return None

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        rows = split_rows(specs[0].max_model_len, bounds)
        if rows == 0:
            return ()
        num_heads = max(spec.num_heads for spec in specs)
        width = max(spec.num_heads * spec.cache.head_dim for spec in specs)
        return (
            TensorSpec("partial_out", (rows, width), "float32"),
            TensorSpec("partial_lse", (rows, num_heads), "float32"),
        )

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        tiles, num_windows = max_tiles(specs, bounds), len({spec.window for spec in specs})
        list_bytes = bytes_for("int32", (num_windows, tiles + 1, TILE_FIELDS))
        row_bytes = bytes_for("int32", (num_windows, bounds.max_num_rows, 2))
        return (
            Term("attention/tiles", list_bytes, f"{tiles} tiles of a step's work, for {num_windows} windows"),
            Term("attention/rows", row_bytes, "where each row's partial results lie"),
        )


class TorchPagedDeclaration:
    """Plain torch over any plain pages, anywhere."""

    name = "torch_paged"
    can_be_captured = False
    can_be_invariant = False

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if spec.num_heads % spec.cache.num_kv_heads:
            return f"{spec.num_heads} query heads do not divide into {spec.cache.num_kv_heads} key heads"
        missing = {"k", "v"} - {plane.name for plane in spec.cache.planes}
        return f"the format {spec.cache.format.name} keeps no plain {' or '.join(sorted(missing))}" if missing else None

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        return ()

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        rows, max_model_len = mask_rows(specs[0].max_model_len), specs[0].max_model_len
        num_windows = len({spec.window for spec in specs})
        mask_bytes = num_windows * rows * (max_model_len + rows) * DTYPE_BYTES[specs[0].dtype]
        return (Term("attention/masks", mask_bytes, f"{num_windows} templates of {rows} rows"),)


DECLARATIONS: tuple[BackendDeclaration, ...] = (
    NativePagedDeclaration(),
    TritonPagedDeclaration(),
    TorchPagedDeclaration(),
)


def choose_declaration(specs: Sequence[AttentionSpec]) -> BackendDeclaration:
    """The first that declines no layer, or an error with everybody's reason."""
    declined = []
    for declaration in DECLARATIONS:
        reasons = {reason: None for spec in specs if (reason := declaration.unsupported(spec)) is not None}
        if not reasons:
            return declaration
        declined.append(f"{declaration.name}: {', '.join(reasons)}")
    raise UnsupportedModelError(
        "attention for this model was asked",
        f"no backend fits ({'; '.join(declined)})",
        "choose another kv_cache_dtype",
    )


def _has_native() -> bool:
    """Whether the C kernels run here: known where torch is loaded, and else as good as a compiler in sight."""
    if "torch" in sys.modules:
        from holdfast.kernels.native_library import native_library

        return native_library() is not None
    return os.environ.get("HOLDFAST_NATIVE") != "0" and any(map(shutil.which, ("cc", "gcc", "clang")))


def mask_rows(max_model_len: int) -> int:
    """Rows of a block in plain torch, so that the mask template keeps to its size."""
    return max(16, min(MAX_MASK_ROWS, MASK_ELEMENTS // max_model_len))


def split_rows(max_model_len: int, bounds: StepBounds) -> int:
    """(row, split) pairs that partial results are kept for: none where no context is long enough to be split."""
    if max_model_len <= MIN_SPLIT_TOKENS:
        return 0
    return min(SPLIT_ROWS, bounds.max_num_rows * -(-max_model_len // MIN_SPLIT_TOKENS))


def max_tiles(specs: Sequence[AttentionSpec], bounds: StepBounds) -> int:
    """Tiles of the largest step: whole ones, the last one of each sequence, and one for each split."""
    group = max(spec.num_heads // spec.cache.num_kv_heads for spec in specs)
    rows_per_tile = max(1, QUERY_ROWS // group)
    tiles = -(-bounds.max_num_rows // rows_per_tile) + min(bounds.max_num_seqs, bounds.max_num_rows)
    return tiles + split_rows(specs[0].max_model_len, bounds)
