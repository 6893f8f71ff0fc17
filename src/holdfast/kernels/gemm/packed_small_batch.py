"""Small batches by packed weights, with RMSNorm in the prologue and gate or residual in the epilogue, as small_batch.py has it.

M rows, N outputs, K inputs

Tiles of kernels/gemm/packed_mma.py multiply codes as stored. Parts of a weight (q, k, v) are a launch each if they are
stored in several schemes. A gate and a residual take a weight of one part.
"""

from torch import Tensor

from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, ResidualStream, SmallBatchScratch
from holdfast.kernels.gemm.packed_linear import own_room
from holdfast.kernels.gemm.packed_mma import Fusion, num_squares, packed_mma
from holdfast.kernels.packed_kernels import has_tiles
from holdfast.quant.packed_weight import PackedPart, PackedWeight


def unsupported(weight: PackedWeight, takes_parts: bool) -> str | None:
    """Return why tiles do not take a weight with prologue and epilogue; None if they do.

    `takes_parts`: the product has neither a gate nor a residual.
    """
    without = next((part for part in weight.parts if not has_tiles(part.scheme, weight.shape[-1])), None)
    if without is not None:
        return f"no tiles take rows in {without.scheme.title} of {weight.shape[-1]} columns"
    if len(weight.parts) > 1 and not takes_parts:
        return f"parts of a weight are stored in {' and '.join(weight.titles)}"
    return None


def packed_normed_linear(
    rows: NormedRows, weight: PackedWeight, bias_N: Tensor | None, gated: bool, y_MN: Tensor, scratch: SmallBatchScratch
) -> Tensor:
    """Compute norm(x) @ weight.T + bias, or silu(upper half) * lower half of it, into `y_MN`, in its type."""
    assert not gated or len(weight.parts) == 1, f"gate and up are stored in {weight.titles}"
    _multiply_parts(rows.scaled_MK, weight, bias_N, y_MN, gated, Fusion(rows, scratch.squares))
    return y_MN


def packed_batch_linear(a_MK: Tensor, weight: PackedWeight, bias_N: Tensor | None, y_MN: Tensor) -> Tensor:
    """Compute a @ weight.T + bias into `y_MN` without prologue or epilogue: a rank's part of a sum."""
    _multiply_parts(a_MK, weight, bias_N, y_MN, False, Fusion())
    return y_MN


def packed_linear_add(a_MK: Tensor, weight: PackedWeight, bias_N: Tensor | None, stream: ResidualStream) -> NormedRows:
    """x += a @ weight.T + bias, with the next RMSNorm deferred."""
    assert len(weight.parts) == 1, f"one product adds to the stream, and rows are stored in {weight.titles}"
    assert stream.scaled_MN.stride() == stream.x_MN.stride(), f"{stream.scaled_MN.stride()=} {stream.x_MN.stride()=}"
    _multiply_parts(a_MK, weight, bias_N, stream.x_MN, False, Fusion(stream=stream))
    return NormedRows(stream.scaled_MN, num_squares(stream.x_MN.shape[1]), stream.eps)


def _multiply_parts(
    x_MK: Tensor, weight: PackedWeight, bias_N: Tensor | None, y_MN: Tensor, gated: bool, fusion: Fusion
) -> None:
    for part in weight.parts:
        rows = slice(part.row_start, part.row_start + part.num_rows)
        bias, out_MN = None if bias_N is None else bias_N[rows], y_MN if gated else y_MN[:, rows]
        packed_mma(x_MK, part, bias, out_MN, room_of(weight, part, x_MK), 0, gated, fusion=fusion)


def room_of(weight: PackedWeight, part: PackedPart, x_MK: Tensor) -> Tensor:
    """Return the scratch of products with a weight."""
    return own_room(part, x_MK) if weight.room is None else weight.room
