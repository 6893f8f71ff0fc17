"""Middle batches by e4m3 weights with scales by row: rows as codes through the tensor cores, near the speed of memory.

M rows, N outputs, K inputs, J blocks of N

The weight is the first operand of the tensor cores and the rows are the second, as in kernels/gemm/quantized_tiles.py; scales
of weight and rows come in the epilogue, because they are factors of a whole result. A weight of few outputs is split along
K (split-K): its shape alone decides into how many, and whoever finishes last adds the partial sums in their order. So a row's
bits do not depend on the others. Gate and up are one product with the gate in its epilogue, which leaves the amax of every
row by block of outputs, so that the next kernel can code the rows without another pass over them.
"""

import torch
from torch import Tensor

from holdfast.kernels.activation import REFERENCES, activated_numbers
from holdfast.kernels.fp8 import kernel_codes, loaded_numbers, size_bits
from holdfast.kernels.gemm.gemv import sum_partials
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, RowAmaxBits, TileScratch
from holdfast.kernels.geometry import (
    ROW_SCALED_BLOCK_K,
    ROW_SCALED_BLOCK_N,
    ROW_SCALED_PROGRAMS,
    ROW_SCALED_ROWS,
    ROW_SCALED_SPLIT_ROWS,
    row_scaled_splits,
)
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit_counting,
    next_power_of_two,
    pdl_launch,
    supports_pdl,
    tl,
)
from holdfast.quant.quantized_weight import QuantizedWeight

# ruff: noqa: ANN001, ANN201 the arguments of kernels have no types
# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false


def row_form(num_rows: int) -> int:
    """Rows of a tile, or 0 where there are too many for these kernels: what of a launch follows from the number of rows."""
    return max(16, next_power_of_two(num_rows)) if num_rows <= ROW_SCALED_SPLIT_ROWS else 0


def takes(weight: Tensor | QuantizedWeight, num_rows: int, scratch: TileScratch | None) -> bool:
    """Whether these kernels, and not torch's scaled product, multiply so many rows by the weight: see kernels/geometry.py for why."""
    if not isinstance(weight, QuantizedWeight) or len(weight.shape) != 2:
        return False
    if not weight.scheme.quantizes_activations or weight.scheme.block_columns:
        return False
    is_split = scratch is not None and row_scaled_splits(*weight.shape) > 1
    return num_rows <= (ROW_SCALED_SPLIT_ROWS if is_split else ROW_SCALED_ROWS)


def takes_gate(
    gate_up: Tensor | QuantizedWeight, down: Tensor | QuantizedWeight, num_rows: int, scratch: TileScratch | None
) -> bool:
    """Whether the gate comes in the epilogue of gate and up, and rows as codes between the two products."""
    both = (gate_up, down)
    return num_rows <= ROW_SCALED_ROWS and scratch is not None and all(takes(one, num_rows, None) for one in both)


def row_scaled_linear(rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor) -> Tensor:
    """rows @ weight.T + bias into `out_MN`, in its type."""
    _launch(rows, weight, bias_N, out_MN)
    return out_MN


def row_scaled_linear_reference(
    rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor
) -> Tensor:
    """The same in plain torch."""
    y = rows.codes_TK.float() @ weight.codes.float().t() * (rows.scales_TB * weight.scales.view(1, -1))
    return out_MN.copy_((y if bias_N is None else y + bias_N.float()).to(out_MN.dtype))


def row_scaled_gate(
    rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, kind: str, out_MI: Tensor
) -> RowAmaxBits:
    """The activation of the upper half of rows @ weight.T + bias times the lower half, into `out_MI`; and the amax of what is stored."""
    assert rows.scratch is not None, "a gated product leaves amax, and has no room for them"
    return RowAmaxBits(rows.scratch.amax, _launch(rows, weight, bias_N, out_MI, kind))


def row_scaled_gate_reference(
    rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, kind: str, out_MI: Tensor
) -> RowAmaxBits:
    """The same in plain torch; a row is one block."""
    assert rows.scratch is not None, "a gated product leaves amax, and has no room for them"
    wide = torch.empty(len(out_MI), weight.shape[0], device=out_MI.device)
    gate, up = row_scaled_linear_reference(rows, weight, bias_N, wide).chunk(2, dim=-1)
    out_MI.copy_((REFERENCES[kind](gate) * up).to(out_MI.dtype))
    rows.scratch.amax[: len(out_MI)] = (out_MI.float().view(torch.int32) & 0x7FFFFFFF).amax(-1)
    return RowAmaxBits(rows.scratch.amax, 1)


def _launch(rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor, kind: str = "") -> int:
    """Launch the kernel; how many blocks of outputs it was cut into."""
    (num_rows, size_k), size_n, scratch = rows.codes_TK.shape, out_MN.shape[1], rows.scratch
    block_m, num_blocks = row_form(num_rows), -(-size_n // ROW_SCALED_BLOCK_N)
    assert block_m, f"{num_rows} rows, and these kernels take {ROW_SCALED_SPLIT_ROWS}"
    assert weight.shape == (size_n * (2 if kind else 1), size_k), f"{weight.shape=} {out_MN.shape=} {size_k=}"
    splits = 1 if kind or scratch is None else row_scaled_splits(size_n, size_k)
    if scratch is not None:
        assert splits == 1 or splits * num_rows * size_n <= scratch.partials.numel(), f"{scratch.partials.shape=}"
        assert splits == 1 or num_blocks <= scratch.arrived.numel(), f"{scratch.arrived.shape=}"
        assert not kind or num_rows * num_blocks <= scratch.amax.numel(), f"{scratch.amax.shape=}"
    shared = (weight.scales,) * 3 if scratch is None else scratch
    pdl = supports_pdl(out_MN)
    row_scaled_tile_kernel[(num_blocks, splits)](
        kernel_codes(rows.codes_TK), rows.scales_TB, kernel_codes(weight.codes), weight.scales,
        bias_N if bias_N is not None else weight.scales, out_MN, *shared, num_rows, size_n, size_k,
        -(-size_k // (splits * ROW_SCALED_BLOCK_K)) * ROW_SCALED_BLOCK_K,
        KIND=kind, HAS_BIAS=bias_N is not None, EVEN_K=size_k % ROW_SCALED_BLOCK_K == 0, NUM_SPLITS=splits,
        BLOCK_M=block_m, BLOCK_N=ROW_SCALED_BLOCK_N, BLOCK_K=ROW_SCALED_BLOCK_K,
        NUM_STAGES=num_stages(block_m, num_blocks * splits), PLAIN=is_interpreted(), PDL=pdl,
        num_warps=8 if block_m == 128 else 4, **pdl_launch(pdl),
    )  # fmt: skip
    return num_blocks


def num_stages(block_m: int, num_programs: int) -> int:
    """Blocks of K on their way: six, or four where a multiprocessor has several programs at once, each with its own."""
    return 4 if block_m == 128 or num_programs > 2 * ROW_SCALED_PROGRAMS else 6


@jit_counting("num_rows")
def row_scaled_tile_kernel(
    p_x, p_x_scales, p_codes, p_scales, p_bias, p_out, p_partials, p_arrived, p_amax,
    num_rows, size_n, size_k, split_k,
    KIND: constexpr, HAS_BIAS: constexpr, EVEN_K: constexpr, NUM_SPLITS: constexpr, BLOCK_M: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    GATED: constexpr = KIND != ""
    i_n = tl.program_id(0)
    i_split = tl.program_id(1)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < size_n
    m_m = o_m < num_rows
    m_nm = m_n[:, None] & m_m[None, :]
    p_w = p_codes + o_n[:, None].to(tl.int64) * size_k + o_k[None, :]
    p_rows = p_x + o_m[None, :].to(tl.int64) * size_k + o_k[:, None]
    up_offset = size_n.to(tl.int64) * size_k
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    b_up_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first_k = i_split * split_k
    if PDL:
        tl.extra.cuda.gdc_wait()
    for k in tl.range(first_k, tl.minimum(first_k + split_k, size_k), BLOCK_K, num_stages=NUM_STAGES):
        m_w = m_n[:, None]
        m_x = m_m[None, :]
        if not EVEN_K:
            m_w = m_w & (k + o_k < size_k)[None, :]
            m_x = m_x & (k + o_k < size_k)[:, None]
        b_w = tl.load(p_w + k, mask=m_w, other=0.0, eviction_policy="evict_first")
        b_x = loaded_numbers(tl.load(p_rows + k, mask=m_x, other=0.0), PLAIN)
        # Tensor cores add e4m3 products in few bits: the sum goes on in float32 after every 128 columns.
        b_y = tl.dot(loaded_numbers(b_w, PLAIN), b_x, b_y, max_num_imprecise_acc=128)
        if GATED:
            b_up = tl.load(p_w + up_offset + k, mask=m_w, other=0.0, eviction_policy="evict_first")
            b_up_y = tl.dot(loaded_numbers(b_up, PLAIN), b_x, b_up_y, max_num_imprecise_acc=128)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if NUM_SPLITS > 1:
        p_partial = p_partials + (o_m[None, :] * size_n + o_n[:, None])
        partial_size = num_rows * size_n
        tl.store(p_partial + i_split * partial_size, b_y, mask=m_nm)
        tl.debug_barrier()
        arrived = tl.atomic_add(p_arrived + i_n, 1, sem="acq_rel")
        if arrived != NUM_SPLITS - 1:
            return
        tl.store(p_arrived + i_n, 0)
        b_y = sum_partials(p_partial, partial_size, m_nm, NUM_SPLITS)
    b_x_scales = tl.load(p_x_scales + o_m, mask=m_m, other=0.0)
    b_y *= tl.load(p_scales + o_n, mask=m_n, other=0.0)[:, None] * b_x_scales[None, :]
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        b_up_y *= tl.load(p_scales + size_n + o_n, mask=m_n, other=0.0)[:, None] * b_x_scales[None, :]
        if HAS_BIAS:
            b_up_y += tl.load(p_bias + size_n + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        b_y = activated_numbers(b_y, KIND) * b_up_y
    b_out = b_y.to(p_out.dtype.element_ty)
    tl.store(p_out + o_m[None, :].to(tl.int64) * size_n + o_n[:, None], b_out, mask=m_nm)
    if GATED:
        # As integers: NaN is above all numbers there, and is not lost.
        b_sizes = tl.where(m_n[:, None], size_bits(b_out.to(tl.float32)), 0)
        tl.store(p_amax + o_m * tl.num_programs(0) + i_n, tl.max(b_sizes, axis=0), mask=m_m)
