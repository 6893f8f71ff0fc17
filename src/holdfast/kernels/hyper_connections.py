"""Hyper-connections (mHC): residual streams mixed around a block by shares computed from the streams.

T rows, S streams, H hidden, X = S H, M = (2 + S) S shares of a row, C splits, P columns of a split's sums

A row's shares are `pre` S | `post` S | `comb` S S. A block reads sum_j pre_j X_j; from its output y, stream k becomes
post_k y + sum_j comb_jk X_j. Shares are one product of the streams with a float32 weight, divided by their rms; comb is
made doubly stochastic by Sinkhorn-Knopp. Around a block there are two launches: `combine_streams` takes the output of the
last block and stores partial sums of the next mix by split; `enter_block` turns them into shares and the block's input
with its RMSNorm. Sums have a fixed order: there are no atomics.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.fp8 import BLOCK_COLUMNS, as_bits, store_coded_groups
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.stream_geometry import (
    MANY_ROWS_BLOCK,
    MAX_SPLITS,
    MAX_STREAMS,
    STREAM_COLUMNS,
    chunks_of_split,
    num_shares,
    num_splits,
    row_block,
    sum_columns,
)
from holdfast.kernels.triton_compat import (
    check_dense,
    constexpr,
    is_interpreted,
    jit,
    jit_counting,
    kernel_constant,
    next_power_of_two,
    tl,
    wait_then_release,
)

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


INVERSE_ASM = kernel_constant("rcp.approx.ftz.f32 $0, $1;")
COLUMNS_PER_WARP = 2048
"""Columns of a block's input per warp: a thread holds 64 of every stream. All warps repeat the computation of shares,
so more warps cost time: for 4096 columns on an H200, 4.0 us for one row and 41 for 2048; with 1024 columns a warp 4.3
and 55."""


class StreamMix(NamedTuple):
    """float32 weight, bias and scales of a mix."""

    weight_MX: Tensor
    bias_M: Tensor
    scale_3: Tensor
    """Scales of pre, post and comb."""


class HeadMix(NamedTuple):
    """Like `StreamMix`, after the last layer, with pre alone."""

    weight_SX: Tensor
    bias_S: Tensor
    scale_1: Tensor


class MixNumbers(NamedTuple):
    """Constants that all mixes of a model share."""

    norm_eps: float
    """Epsilon of the rms."""
    eps: float
    """Added to pre and comb, and to the sums that divide comb."""
    num_iterations: int
    """Iterations of Sinkhorn-Knopp."""


def row_form(num_rows: int) -> int:
    """Return the rows of a program: the specialization for this number of rows."""
    return row_block(num_rows)


def combine_streams_reference(
    x_TSH: Tensor, y_TH: Tensor | None, shares_TM: Tensor | None, weight_MX: Tensor | None, parts: Tensor | None
) -> Tensor:
    """Replace X_k by post_k y + sum_j comb_jk X_j if y is given; its rows and those of shares may lie apart.

    With the weight of the next mix, store the sums of it and of the squares of x by split into `parts`, for `enter_block`.
    """
    num_streams = x_TSH.shape[1]
    if y_TH is not None and shares_TM is not None:
        post_TS1 = shares_TM[:, num_streams : 2 * num_streams, None]
        comb_TSS = shares_TM[:, 2 * num_streams :].unflatten(1, (num_streams, num_streams))
        # Stream by stream: the rounding of a batched product depends on the number of rows.
        mixed_TSH = post_TS1 * y_TH.float()[:, None]
        for j in range(num_streams):
            mixed_TSH = mixed_TSH + comb_TSS[:, j, :, None] * x_TSH[:, j, None].float()
        x_TSH.copy_(mixed_TSH)
    if weight_MX is not None and parts is not None:
        parts_CTP = view_parts(x_TSH, len(weight_MX), parts).zero_()
        parts_CTP[0, :, : len(weight_MX) + 1] = _sums_reference(x_TSH, weight_MX)
    return x_TSH


def enter_block_reference(
    x_TSH: Tensor,
    parts: Tensor,
    mix: StreamMix | HeadMix,
    numbers: MixNumbers,
    shares_TM: Tensor,
    norm_weight_H: Tensor,
    rms_eps: float,
    out_TH: Tensor,
) -> Tensor:
    """Compute shares from the sums in `parts`, and the RMSNorm of the collapsed streams sum_j pre_j X_j, rounded first."""
    sums_TP = view_parts(x_TSH, len(mix[0]), parts).sum(dim=0)[:, : len(mix[0]) + 1]
    shares_TM.copy_(_shares_reference(sums_TP, x_TSH, mix, numbers))
    pre_TS1 = shares_TM[:, : x_TSH.shape[1], None]
    block_TH = (pre_TS1 * x_TSH.float()).sum(dim=1).to(x_TSH.dtype).float()
    rms_T1 = torch.rsqrt(block_TH.square().mean(-1, keepdim=True) + rms_eps)
    return out_TH.copy_(block_TH * rms_T1 * norm_weight_H.float())


def view_parts(x_TSH: Tensor, num_sums: int, parts: Tensor) -> Tensor:
    """View the scratch buffer as [C, T, P]: sums by split and row, those of squares in column `num_sums`."""
    num_rows, _, hidden_size = x_TSH.shape
    shape = (num_splits(num_rows, hidden_size), num_rows, sum_columns(num_sums))
    assert parts.dtype == torch.float32, f"{parts.dtype=}, not float32"
    assert parts.dim() == 1, f"{parts.shape=} is no vector"
    assert parts.numel() >= shape[0] * shape[1] * shape[2], f"space for {parts.numel()} sums, not {shape}"
    return parts[: shape[0] * shape[1] * shape[2]].view(shape)


def _sums_reference(x_TSH: Tensor, weight_MX: Tensor) -> Tensor:
    """Return [T, M + 1]: a product with each row of the weight, and the sum of squares."""
    x_TX = x_TSH.flatten(1).float()
    # Row by row: the rounding of a product depends on the number of rows.
    sums = [torch.cat((weight_MX @ x_X, x_X.square().sum(dim=0, keepdim=True))) for x_X in x_TX]
    return torch.stack(sums) if sums else x_TX.new_empty(0, len(weight_MX) + 1)


def _shares_reference(sums_TP: Tensor, x_TSH: Tensor, mix: StreamMix | HeadMix, numbers: MixNumbers) -> Tensor:
    (_, num_streams, hidden_size), bias, scale = x_TSH.shape, mix[1], mix[2]
    rms_T1 = torch.rsqrt(sums_TP[:, -1:] / (num_streams * hidden_size) + numbers.norm_eps)
    mixed_TM = sums_TP[:, :-1] * rms_T1
    pre_TS = torch.sigmoid(mixed_TM[:, :num_streams] * scale[0] + bias[:num_streams]) + numbers.eps
    if isinstance(mix, HeadMix):
        return pre_TS
    after = slice(num_streams, 2 * num_streams)
    post_TS = 2.0 * torch.sigmoid(mixed_TM[:, after] * scale[1] + bias[after])
    comb_TY = mixed_TM[:, 2 * num_streams :] * scale[2] + bias[2 * num_streams :]
    comb_TSS = comb_TY.unflatten(1, (num_streams, num_streams)).softmax(dim=2) + numbers.eps
    comb_TSS = comb_TSS / (comb_TSS.sum(dim=1, keepdim=True) + numbers.eps)
    for _ in range(numbers.num_iterations - 1):
        comb_TSS = comb_TSS / (comb_TSS.sum(dim=2, keepdim=True) + numbers.eps)
        comb_TSS = comb_TSS / (comb_TSS.sum(dim=1, keepdim=True) + numbers.eps)
    return torch.cat((pre_TS, post_TS, comb_TSS.flatten(1)), dim=1)


def combine_streams_triton(
    x_TSH: Tensor, y_TH: Tensor | None, shares_TM: Tensor | None, weight_MX: Tensor | None, parts: Tensor | None
) -> Tensor:
    """Launch one program for a split and some rows."""
    num_rows, num_streams, hidden_size = x_TSH.shape
    if y_TH is not None and shares_TM is not None:
        _check_streams(x_TSH, shares_TM, y_TH)
        assert shares_TM.shape[1] == num_shares(num_streams), f"{shares_TM.shape=} of {num_streams} streams"
    num_sums = 0
    if weight_MX is not None and parts is not None:
        num_sums = len(weight_MX)
        assert weight_MX.shape[1] == num_streams * hidden_size, f"{weight_MX.shape=} {x_TSH.shape=}"
        check_dense(weight_MX)
        parts = view_parts(x_TSH, num_sums, parts)
    check_dense(x_TSH)
    assert num_streams <= MAX_STREAMS, f"{num_streams} streams; kernels take up to {MAX_STREAMS}"
    if not num_rows:
        return x_TSH
    block_t = row_block(num_rows)
    launch = _combine_row_kernel if block_t == 1 else _combine_kernel
    launch[(num_splits(num_rows, hidden_size), -(-num_rows // block_t))](
        x_TSH, y_TH, shares_TM, x_TSH, weight_MX, parts, num_rows, chunks_of_split(num_rows, hidden_size),
        hidden_size, 0 if y_TH is None else y_TH.stride(0), 0 if shares_TM is None else shares_TM.stride(0),
        COMBINES=y_TH is not None, NUM_SUMS=num_sums, SUM_COLUMNS=sum_columns(num_sums), NUM_STREAMS=num_streams,
        BLOCK_S=next_power_of_two(num_streams), BLOCK_H=STREAM_COLUMNS, BLOCK_T=block_t,
        num_warps=8 if block_t == MANY_ROWS_BLOCK else 4, **pdl_flags(x_TSH),
    )  # fmt: skip
    return x_TSH


combine_streams = operation(reference=combine_streams_reference, triton=combine_streams_triton)


def enter_block_triton(
    x_TSH: Tensor,
    parts: Tensor,
    mix: StreamMix | HeadMix,
    numbers: MixNumbers,
    shares_TM: Tensor,
    norm_weight_H: Tensor,
    rms_eps: float,
    out_TH: Tensor,
) -> Tensor:
    return launch_enter(x_TSH, parts, mix, numbers, shares_TM, norm_weight_H, rms_eps, out_TH)


def launch_enter(
    x_TSH: Tensor,
    parts: Tensor,
    mix: StreamMix | HeadMix,
    numbers: MixNumbers,
    shares_TM: Tensor,
    norm_weight_H: Tensor,
    rms_eps: float,
    out_TH: Tensor,
    codes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Launch two programs per row: one for the block's input, one for all shares.

    `codes` receive the input as e4m3 too, with a scale per row or for every BLOCK_COLUMNS.
    """
    _check_streams(x_TSH, shares_TM, out_TH)
    assert norm_weight_H.shape == (x_TSH.shape[2],), f"{norm_weight_H.shape=} {x_TSH.shape=}"
    (num_rows, num_streams, hidden_size), is_head = x_TSH.shape, isinstance(mix, HeadMix)
    weight, bias, scale = mix
    num_sums, parts_CTP = len(weight), view_parts(x_TSH, len(weight), parts)
    assert num_sums == (num_streams if is_head else num_shares(num_streams)), (
        f"{num_sums} sums of {num_streams} streams"
    )
    assert bias.shape == (num_sums,), f"{bias.shape=} of {num_sums} sums"
    assert scale.shape == ((1,) if is_head else (3,)), f"{scale.shape=}"
    assert shares_TM.shape == (num_rows, num_sums), f"{shares_TM.shape=}, not {(num_rows, num_sums)}"
    assert shares_TM.stride(1) == 1, f"{shares_TM.stride()=}: columns lie apart"
    assert numbers.eps > 0.0, f"{numbers.eps=}: a divisor may be 0 without it"
    assert num_streams <= MAX_STREAMS, f"{num_streams} streams; kernels take up to {MAX_STREAMS}"
    if not num_rows:
        return out_TH
    block_h = next_power_of_two(hidden_size)
    codes_TH, scales_TB = (None, None) if codes is None else (as_bits(codes[0]), codes[1])
    _enter_kernel[(num_rows, 2)](
        x_TSH, parts_CTP, bias, scale, norm_weight_H, shares_TM, out_TH, codes_TH, scales_TB, num_rows, len(parts_CTP), hidden_size,
        shares_TM.stride(0), out_TH.stride(0),
        *(None if rows is None else rows.stride(0) for rows in (codes_TH, scales_TB)),
        None if scales_TB is None else scales_TB.stride(1), numbers.norm_eps, numbers.eps, rms_eps,
        IS_HEAD=is_head, NUM_ITERATIONS=numbers.num_iterations, NUM_SUMS=num_sums, SUM_COLUMNS=parts_CTP.shape[2],
        NUM_STREAMS=num_streams, BLOCK_S=next_power_of_two(num_streams), BLOCK_C=MAX_SPLITS, BLOCK_H=block_h,
        GROUP=BLOCK_COLUMNS if scales_TB is not None and scales_TB.shape[1] > 1 else block_h, PLAIN=is_interpreted(),
        num_warps=max(1, min(8, block_h // COLUMNS_PER_WARP)), **pdl_flags(x_TSH),
    )  # fmt: skip
    return out_TH


enter_block = operation(reference=enter_block_reference, triton=enter_block_triton)


def _check_streams(x_TSH: Tensor, shares_TX: Tensor, y_TH: Tensor) -> None:
    num_rows, num_streams, hidden_size = x_TSH.shape
    check_dense(x_TSH)
    assert y_TH.shape == (num_rows, hidden_size), f"{y_TH.shape=} beside {x_TSH.shape=}"
    assert shares_TX.shape[0] == num_rows, f"{shares_TX.shape=} beside {x_TSH.shape=}"
    assert shares_TX.shape[1] >= num_streams, f"{shares_TX.shape=} of {num_streams} streams"
    assert shares_TX.dtype == torch.float32, f"{shares_TX.dtype=}, not float32"
    assert y_TH.stride(1) == shares_TX.stride(1) == 1, f"{y_TH.stride()=} {shares_TX.stride()=}: columns lie apart"


@jit_counting("num_rows", "num_chunks")
def _combine_kernel(
    p_x, p_y, p_shares, p_out, p_weight, p_parts, num_rows, num_chunks, hidden_size, y_stride, shares_stride,
    COMBINES: constexpr, NUM_SUMS: constexpr, SUM_COLUMNS: constexpr, NUM_STREAMS: constexpr, BLOCK_S: constexpr,
    BLOCK_H: constexpr, BLOCK_T: constexpr, PDL: constexpr,
):  # fmt: skip
    # A thread holds all streams of its columns, so x may be updated in place.
    i_split = tl.program_id(0)
    o_t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_m = tl.arange(0, SUM_COLUMNS)
    o_h = i_split * num_chunks * BLOCK_H + tl.arange(0, BLOCK_H)
    m_t = o_t < num_rows
    m_m = (o_m < NUM_SUMS)[:, None]
    p_w = p_weight
    b_w = (0.0, 0.0, 0.0, 0.0)
    if NUM_SUMS:
        p_w = p_weight + o_m[:, None] * (NUM_STREAMS * hidden_size) + o_h[None, :]
        # Load the weight before the wait: it is a constant.
        b_w = _of_streams(p_w, m_m & (o_h < hidden_size)[None, :], hidden_size, NUM_STREAMS)
    wait_then_release(PDL)
    b_shares = (0.0, 0.0, 0.0, 0.0)
    b_post = (0.0, 0.0, 0.0, 0.0)
    if COMBINES:
        p_row_shares = p_shares + o_t * shares_stride
        b_post = _of_streams(p_row_shares + NUM_STREAMS, m_t, 1, NUM_STREAMS)
        p_comb = p_row_shares + 2 * NUM_STREAMS
        b_shares = (
            _of_streams(p_comb, m_t, NUM_STREAMS, NUM_STREAMS),
            _of_streams(p_comb + min(1, NUM_STREAMS - 1), m_t, NUM_STREAMS, NUM_STREAMS),
            _of_streams(p_comb + min(2, NUM_STREAMS - 1), m_t, NUM_STREAMS, NUM_STREAMS),
            _of_streams(p_comb + min(3, NUM_STREAMS - 1), m_t, NUM_STREAMS, NUM_STREAMS),
        )
    b_sums = tl.zeros((SUM_COLUMNS, BLOCK_T), dtype=tl.float32)
    b_squares = tl.zeros((BLOCK_T, BLOCK_H), dtype=tl.float32)
    for chunk in range(num_chunks):
        b_h = o_h + chunk * BLOCK_H
        m_x = m_t[:, None] & (b_h < hidden_size)[None, :]
        o_x = o_t[:, None] * (NUM_STREAMS * hidden_size) + b_h[None, :]
        b_x = _of_streams(p_x + o_x, m_x, hidden_size, NUM_STREAMS)
        b_y = 0.0
        if COMBINES:
            b_y = tl.load(p_y + o_t[:, None] * y_stride + b_h[None, :], mask=m_x, other=0.0).to(tl.float32)
        for k in tl.static_range(NUM_STREAMS):
            b_row = b_x[k].to(tl.float32)
            if COMBINES:
                b_row = b_y * b_post[k][:, None]
                for j in tl.static_range(NUM_STREAMS):
                    b_row += b_shares[k][j][:, None] * b_x[j].to(tl.float32)
                b_stored = b_row.to(p_out.dtype.element_ty)
                tl.store(p_out + o_x + k * hidden_size, b_stored, mask=m_x)
                b_row = b_stored.to(tl.float32)  # mix what the next block will read
            if NUM_SUMS:
                b_squares += b_row * b_row
                # A sum of one number each stops the compiler from converting the layout of all inputs of the row:
                # it converts the row.
                b_row = tl.sum(tl.reshape(b_row, (BLOCK_T, BLOCK_H, 1)), axis=2)
                b_sums = _dot_exactly(b_w[k], tl.trans(b_row), b_sums, p_x.dtype.element_ty == tl.float32)
        if NUM_SUMS:
            m_w = m_m & (b_h + BLOCK_H < hidden_size)[None, :] & (chunk + 1 < num_chunks)
            b_w = _of_streams(p_w + (chunk + 1) * BLOCK_H, m_w, hidden_size, NUM_STREAMS)
    if NUM_SUMS:
        p_sums = p_parts + (i_split * num_rows.to(tl.int64) + o_t) * SUM_COLUMNS
        tl.store(p_sums[None, :] + o_m[:, None], b_sums, mask=m_m & m_t[None, :])
        tl.store(p_sums + NUM_SUMS, tl.sum(b_squares, axis=1), mask=m_t)


@jit
def _of_streams(p, m, stride, NUM_STREAMS: constexpr):
    """Load each stream; the rest of the tuple repeats the first and is unused."""
    b_0 = tl.load(p, mask=m, other=0.0)
    b_1 = b_0
    b_2 = b_0
    b_3 = b_0
    if NUM_STREAMS > 1:
        b_1 = tl.load(p + stride, mask=m, other=0.0)
    if NUM_STREAMS > 2:
        b_2 = tl.load(p + 2 * stride, mask=m, other=0.0)
    if NUM_STREAMS > 3:
        b_3 = tl.load(p + 3 * stride, mask=m, other=0.0)
    return b_0, b_1, b_2, b_3


@jit
def _dot_exactly(b_w, b_x, b_sums, IS_WIDE: constexpr):
    """Multiply exactly on tensor cores that round operands to 11 bits: 16-bit numbers fit, a weight is split into two."""
    if IS_WIDE:
        b_sums = tl.dot(b_w, b_x, b_sums, input_precision="tf32x3")
    else:
        b_high = (b_w.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b_sums = tl.dot(b_w - b_high, b_x, b_sums, input_precision="tf32")
        b_sums = tl.dot(b_high, b_x, b_sums, input_precision="tf32")
    return b_sums


@jit_counting("num_rows", "num_chunks")
def _combine_row_kernel(
    p_x, p_y, p_shares, p_out, p_weight, p_parts, num_rows, num_chunks, hidden_size, y_stride, shares_stride,
    COMBINES: constexpr, NUM_SUMS: constexpr, SUM_COLUMNS: constexpr, NUM_STREAMS: constexpr, BLOCK_S: constexpr,
    BLOCK_H: constexpr, BLOCK_T: constexpr, PDL: constexpr,
):  # fmt: skip
    # Like `_combine_kernel`; a thread multiplies the columns of the weight that it loaded, without shared memory.
    i_split = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    o_m = tl.arange(0, SUM_COLUMNS)
    o_place = tl.arange(0, BLOCK_S * BLOCK_H)
    o_s = o_place // BLOCK_H
    o_h = i_split * num_chunks * BLOCK_H + o_place % BLOCK_H
    m_s = o_s < NUM_STREAMS
    p_w = p_weight
    b_w = 0.0
    b_sums = 0.0
    if NUM_SUMS:
        p_w = p_weight + o_m[:, None] * (NUM_STREAMS * hidden_size) + (o_s * hidden_size + o_h)[None, :]
        m_w = (o_m < NUM_SUMS)[:, None] & (m_s & (o_h < hidden_size))[None, :]
        b_w = tl.load(p_w, mask=m_w, other=0.0)
        b_sums = tl.zeros((SUM_COLUMNS, BLOCK_S * BLOCK_H), dtype=tl.float32)
    wait_then_release(PDL)
    b_squares = tl.zeros((BLOCK_S * BLOCK_H,), dtype=tl.float32)
    p_row_shares = p_shares
    if COMBINES:
        p_row_shares = p_shares + i_row * shares_stride + o_s
    p_row = p_x + i_row * NUM_STREAMS * hidden_size
    for chunk in range(num_chunks):
        b_h = o_h + chunk * BLOCK_H
        m_x = m_s & (b_h < hidden_size)
        if COMBINES:
            b_x = tl.load(p_y + i_row * y_stride + b_h, mask=m_x, other=0.0).to(tl.float32)
            b_x *= tl.load(p_row_shares + NUM_STREAMS, mask=m_x, other=0.0)
            for j in tl.static_range(NUM_STREAMS):
                b_comb = tl.load(p_row_shares + (2 + j) * NUM_STREAMS, mask=m_x, other=0.0)
                b_x += b_comb * tl.load(p_row + j * hidden_size + b_h, mask=m_x, other=0.0).to(tl.float32)
            b_stored = b_x.to(p_out.dtype.element_ty)
            tl.debug_barrier()  # other threads have read these columns
            p_stored = p_out + i_row * NUM_STREAMS * hidden_size + o_s * hidden_size + b_h
            tl.store(p_stored, b_stored, mask=m_x)
            b_x = b_stored.to(tl.float32)  # mix what the next block will read
        else:
            b_x = tl.load(p_row + o_s * hidden_size + b_h, mask=m_x, other=0.0).to(tl.float32)
        if NUM_SUMS:
            b_sums += b_w * b_x[None, :]
            b_squares += b_x * b_x
            m_next = (m_s & (b_h + BLOCK_H < hidden_size))[None, :] & (chunk + 1 < num_chunks)
            b_w = tl.load(p_w + (chunk + 1) * BLOCK_H, mask=(o_m < NUM_SUMS)[:, None] & m_next, other=0.0)
    if NUM_SUMS:
        p_sums = p_parts + (i_split * num_rows.to(tl.int64) + i_row) * SUM_COLUMNS
        tl.store(p_sums + o_m, tl.sum(b_sums, axis=1), mask=o_m < NUM_SUMS)
        tl.store(p_sums + NUM_SUMS, tl.sum(b_squares, axis=0))


@jit_counting("num_rows", "num_splits")
def _enter_kernel(
    p_x, p_parts, p_bias, p_scale, p_norm, p_shares, p_out, p_codes, p_code_scales,
    num_rows, num_splits, hidden_size, shares_stride, out_stride, code_stride, scale_stride, group_stride, norm_eps, eps,
    rms_eps,
    IS_HEAD: constexpr, NUM_ITERATIONS: constexpr, NUM_SUMS: constexpr, SUM_COLUMNS: constexpr, NUM_STREAMS: constexpr,
    BLOCK_S: constexpr, BLOCK_C: constexpr, BLOCK_H: constexpr, GROUP: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK_C)
    o_s = tl.arange(0, BLOCK_S)
    m_c = o_c < num_splits
    m_s = o_s < NUM_STREAMS
    b_bias = tl.load(p_bias + o_s, mask=m_s, other=0.0)
    scale = tl.load(p_scale)
    wait_then_release(PDL)
    p_sums = p_parts + i_row * SUM_COLUMNS + o_c * num_rows.to(tl.int64) * SUM_COLUMNS
    # Issue all loads of a program before any sum.
    b_squares = tl.load(p_sums + NUM_SUMS, mask=m_c, other=0.0)
    m_cs = m_c[:, None] & m_s[None, :]
    b_pre = tl.load(p_sums[:, None] + o_s[None, :], mask=m_cs, other=0.0)
    if tl.program_id(1) == 0:
        o_h = tl.arange(0, BLOCK_H)
        m_h = o_h < hidden_size
        # In one vector, so that a thread holds some columns of all streams.
        o_place = tl.arange(0, BLOCK_S * BLOCK_H)
        m_place = (o_place // BLOCK_H < NUM_STREAMS) & (o_place % BLOCK_H < hidden_size)
        o_x = o_place // BLOCK_H * hidden_size + o_place % BLOCK_H
        b_x = tl.load(p_x + i_row * NUM_STREAMS * hidden_size + o_x, mask=m_place, other=0.0)
        b_weight = tl.load(p_norm + o_h, mask=m_h, other=0.0).to(tl.float32)
        rms = tl.rsqrt(tl.sum(b_squares, axis=0) / (NUM_STREAMS * hidden_size) + norm_eps)
        b_share = tl.sigmoid(tl.sum(b_pre, axis=0) * rms * scale + b_bias) + eps
        b_x = tl.reshape(b_x, (BLOCK_S, BLOCK_H)).to(tl.float32)
        b_y = tl.sum(b_x * b_share[:, None], axis=0)
        b_y = b_y.to(p_x.dtype.element_ty).to(tl.float32)
        b_y = b_y * tl.rsqrt(tl.sum(b_y * b_y, axis=0) / hidden_size + rms_eps) * b_weight
        b_y = b_y.to(p_out.dtype.element_ty)
        tl.store(p_out + i_row * out_stride + o_h, b_y, mask=m_h)
        if p_codes is not None:
            p_row_codes = p_codes + i_row * code_stride + o_h
            p_row_scales = p_code_scales + i_row * scale_stride
            store_coded_groups(
                p_row_codes, p_row_scales, b_y.to(tl.float32), m_h, group_stride, hidden_size, GROUP, PLAIN
            )  # fmt: skip
        return
    p_row = p_shares + i_row * shares_stride
    if IS_HEAD:
        rms = tl.rsqrt(tl.sum(b_squares, axis=0) / (NUM_STREAMS * hidden_size) + norm_eps)
        tl.store(p_row + o_s, tl.sigmoid(tl.sum(b_pre, axis=0) * rms * scale + b_bias) + eps, mask=m_s)
    else:
        o_comb = 2 * NUM_STREAMS + o_s[:, None] * NUM_STREAMS + o_s[None, :]
        m_comb = m_s[:, None] & m_s[None, :]
        p_comb = p_sums[:, None, None] + o_comb[None, :, :]
        b_comb_parts = tl.load(p_comb, mask=m_c[:, None, None] & m_comb[None, :, :], other=0.0)
        b_post = tl.load(p_sums[:, None] + NUM_STREAMS + o_s[None, :], mask=m_cs, other=0.0)
        b_comb_bias = tl.load(p_bias + o_comb, mask=m_comb, other=0.0)
        b_post_bias = tl.load(p_bias + NUM_STREAMS + o_s, mask=m_s, other=0.0)
        post_scale = tl.load(p_scale + 1)
        comb_scale = tl.load(p_scale + 2)
        rms = tl.rsqrt(tl.sum(b_squares, axis=0) / (NUM_STREAMS * hidden_size) + norm_eps)
        tl.store(p_row + o_s, tl.sigmoid(tl.sum(b_pre, axis=0) * rms * scale + b_bias) + eps, mask=m_s)
        b_post_sum = tl.sum(b_post, axis=0) * rms * post_scale + b_post_bias
        tl.store(p_row + NUM_STREAMS + o_s, 2.0 * tl.sigmoid(b_post_sum), mask=m_s)
        b_comb = tl.sum(b_comb_parts, axis=0) * rms * comb_scale + b_comb_bias
        _store_doubly_stochastic(p_row + 2 * NUM_STREAMS, b_comb, m_comb, m_s, eps, NUM_ITERATIONS, NUM_STREAMS, PLAIN)


@jit
def _store_doubly_stochastic(
    p_comb, b_comb, m_comb, m_s, eps, NUM_ITERATIONS: constexpr, NUM_STREAMS: constexpr, PLAIN: constexpr
):  # fmt: skip
    """Take the softmax of rows, then divide columns and rows by their sums in turn (Sinkhorn-Knopp); store the result.

    Every thread has all numbers in registers: this chain of sums is the critical path. Those of missing streams are 0.
    """
    b_comb = tl.where(m_comb, b_comb, float("-inf"))
    b_comb = tl.where(m_comb, tl.exp(b_comb - tl.where(m_s, tl.max(b_comb, axis=1), 0.0)[:, None]), 0.0)
    b_comb = b_comb / tl.where(m_s, tl.sum(b_comb, axis=1), 1.0)[:, None] + eps
    b_comb = tl.where(m_comb, b_comb, 0.0)
    a_0, a_1, a_2, a_3 = _numbers_of_row(b_comb, 0)
    b_0, b_1, b_2, b_3 = _numbers_of_row(b_comb, 1)
    c_0, c_1, c_2, c_3 = _numbers_of_row(b_comb, 2)
    d_0, d_1, d_2, d_3 = _numbers_of_row(b_comb, 3)
    a_0, b_0, c_0, d_0 = _divided_by_sum(a_0, b_0, c_0, d_0, eps, PLAIN)
    a_1, b_1, c_1, d_1 = _divided_by_sum(a_1, b_1, c_1, d_1, eps, PLAIN)
    a_2, b_2, c_2, d_2 = _divided_by_sum(a_2, b_2, c_2, d_2, eps, PLAIN)
    a_3, b_3, c_3, d_3 = _divided_by_sum(a_3, b_3, c_3, d_3, eps, PLAIN)
    for _ in range(NUM_ITERATIONS - 1):
        a_0, a_1, a_2, a_3 = _divided_by_sum(a_0, a_1, a_2, a_3, eps, PLAIN)
        b_0, b_1, b_2, b_3 = _divided_by_sum(b_0, b_1, b_2, b_3, eps, PLAIN)
        c_0, c_1, c_2, c_3 = _divided_by_sum(c_0, c_1, c_2, c_3, eps, PLAIN)
        d_0, d_1, d_2, d_3 = _divided_by_sum(d_0, d_1, d_2, d_3, eps, PLAIN)
        a_0, b_0, c_0, d_0 = _divided_by_sum(a_0, b_0, c_0, d_0, eps, PLAIN)
        a_1, b_1, c_1, d_1 = _divided_by_sum(a_1, b_1, c_1, d_1, eps, PLAIN)
        a_2, b_2, c_2, d_2 = _divided_by_sum(a_2, b_2, c_2, d_2, eps, PLAIN)
        a_3, b_3, c_3, d_3 = _divided_by_sum(a_3, b_3, c_3, d_3, eps, PLAIN)
    _store_row(p_comb, a_0, a_1, a_2, a_3, 0, NUM_STREAMS)
    _store_row(p_comb, b_0, b_1, b_2, b_3, 1, NUM_STREAMS)
    _store_row(p_comb, c_0, c_1, c_2, c_3, 2, NUM_STREAMS)
    _store_row(p_comb, d_0, d_1, d_2, d_3, 3, NUM_STREAMS)


@jit
def _numbers_of_row(b_comb, i):
    """Return four numbers of a row, zeros after its last."""
    o_s = tl.arange(0, b_comb.shape[0])
    b_row = tl.sum(tl.where((o_s == i)[:, None], b_comb, 0.0), axis=0)
    n_0 = tl.sum(tl.where(o_s == 0, b_row, 0.0), axis=0)
    n_1 = tl.sum(tl.where(o_s == 1, b_row, 0.0), axis=0)
    n_2 = tl.sum(tl.where(o_s == 2, b_row, 0.0), axis=0)
    n_3 = tl.sum(tl.where(o_s == 3, b_row, 0.0), axis=0)
    return n_0, n_1, n_2, n_3


@jit
def _divided_by_sum(n_0, n_1, n_2, n_3, eps, PLAIN: constexpr):
    """Divide four numbers by their sum plus eps: one reciprocal and a product each."""
    total = (n_0 + n_1) + (n_2 + n_3) + eps
    if PLAIN:
        inverse = 1.0 / total
    else:
        inverse = tl.inline_asm_elementwise(INVERSE_ASM, "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)
    return n_0 * inverse, n_1 * inverse, n_2 * inverse, n_3 * inverse


@jit
def _store_row(p_comb, n_0, n_1, n_2, n_3, i: constexpr, NUM_STREAMS: constexpr):
    """Store the numbers of a row from those of four streams."""
    if i < NUM_STREAMS:
        p_row = p_comb + i * NUM_STREAMS
        tl.store(p_row, n_0)
        if NUM_STREAMS > 1:
            tl.store(p_row + 1, n_1)
        if NUM_STREAMS > 2:
            tl.store(p_row + 2, n_2)
        if NUM_STREAMS > 3:
            tl.store(p_row + 3, n_3)
