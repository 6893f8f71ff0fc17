"""Hyper-connections (mHC): the streams of a residual mixed around a block, by shares that follow from the streams themselves.

T rows, S streams, H hidden, X = S H, M = (2 + S) S shares of a row, C splits, P columns of a split's sums

A row's shares are `pre` S | `post` S | `comb` S S, row by row: a block gets sum_j pre_j X_j, and of what it gives, y, streams
become post_k y + sum_j comb_jk X_j. All are one product of the streams with a float32 weight, divided by their rms; comb is
made doubly stochastic by Sinkhorn-Knopp. Around a block there are two launches: `combine_add_up` takes what the block before
gave, and leaves sums of the next mix by splits of its inputs; `enter_block` makes shares of them, and the block's input with
its RMSNorm. Sums have an order that no launch can change: there are no atomics.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.operation import operation
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
    can_run,
    constexpr,
    jit,
    jit_counting,
    next_power_of_two,
    pdl_launch,
    release_then_wait,
    supports_pdl,
    tl,
    wait_then_release,
)

# Constants of a kernel bind a name and read it under the same condition.
# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types
# ruff: noqa: SIM102 a branch on a constant is taken when a kernel is compiled

COLLAPSED_COLUMNS = 1024
"""Of a program that collapses streams by shares that are there."""
COLUMNS_PER_WARP = 2048
"""Of the row of a block's input: a thread has 64 of every stream. More warps would all repeat what a row's shares are made by: for
4096 columns on an H200 a launch takes 4.0 us of one row, 41 of 2048 rows; with 1024 columns a warp 4.3 and 55, with 256 6.1 and 73."""


class StreamMix(NamedTuple):
    """What the shares of a row are made by, all in float32."""

    weight_MX: Tensor
    bias_M: Tensor
    scale_3: Tensor
    """What the products of pre, post and comb are multiplied by."""


class HeadMix(NamedTuple):
    """The same behind the last layer, where there is only pre."""

    weight_SX: Tensor
    bias_S: Tensor
    scale_1: Tensor


class MixNumbers(NamedTuple):
    """What all mixes of a model have in common."""

    norm_eps: float
    """Of the rms that products are divided by."""
    eps: float
    """Added to pre and comb, and to the sums of comb before it is divided by them."""
    num_iterations: int
    """Of Sinkhorn-Knopp."""


def row_form(num_rows: int) -> int:
    """What the number of rows decides of the launches here."""
    return row_block(num_rows)


def mix_streams(
    x_TSH: Tensor,
    mix: StreamMix,
    norm_eps: float,
    eps: float,
    num_iterations: int,
    shares_TM: Tensor,
    parts: Tensor | None = None,
) -> Tensor:
    """All shares of each row into `shares_TM`, float32; `parts` is room as `stream_parts_spec` has it, which a GPU needs."""
    return _mixed(x_TSH, mix, MixNumbers(norm_eps, eps, num_iterations), shares_TM, parts)


def mix_head(
    x_TSH: Tensor,
    weight_SX: Tensor,
    bias_S: Tensor,
    scale_1: Tensor,
    norm_eps: float,
    eps: float,
    shares_TS: Tensor,
    parts: Tensor | None = None,
) -> Tensor:
    """The shares by which streams are collapsed behind the last layer."""
    return _mixed(x_TSH, HeadMix(weight_SX, bias_S, scale_1), MixNumbers(norm_eps, eps, 0), shares_TS, parts)


def _mixed(
    x_TSH: Tensor, mix: StreamMix | HeadMix, numbers: MixNumbers, shares_TM: Tensor, parts: Tensor | None
) -> Tensor:
    if not can_run(x_TSH):
        sums_TP = _sums_reference(x_TSH, mix[0])
        return shares_TM.copy_(_shares_reference(sums_TP, x_TSH, mix, numbers))
    assert parts is not None, "no room for the sums of splits; pass a vector of stream_parts_spec"
    add_up_triton(x_TSH, mix[0], parts)
    return finish_mix_triton(x_TSH, parts, mix, numbers, shares_TM)


def collapse_streams_reference(x_TSH: Tensor, shares_TX: Tensor, out_TH: Tensor) -> Tensor:
    """sum_j pre_j X_j, of which pre are the first S columns; rows of shares and of the result may lie apart."""
    pre_TS1 = shares_TX[:, : x_TSH.shape[1], None]
    return out_TH.copy_((pre_TS1 * x_TSH.float()).sum(dim=1))


def combine_streams_reference(x_TSH: Tensor, y_TH: Tensor, shares_TM: Tensor, out_TSH: Tensor) -> Tensor:
    """post_k y + sum_j comb_jk X_j as stream k of `out_TSH`, which may be x itself; rows of y and shares may lie apart."""
    num_streams = x_TSH.shape[1]
    post_TS1 = shares_TM[:, num_streams : 2 * num_streams, None]
    comb_TSS = shares_TM[:, 2 * num_streams :].unflatten(1, (num_streams, num_streams))
    # Stream by stream, because a batched product's rounding depends on the number of rows.
    mixed_TSH = post_TS1 * y_TH.float()[:, None]
    for j in range(num_streams):
        mixed_TSH = mixed_TSH + comb_TSS[:, j, :, None] * x_TSH[:, j, None].float()
    return out_TSH.copy_(mixed_TSH)


def add_up_streams(x_TSH: Tensor, weight_MX: Tensor, parts: Tensor) -> Tensor:
    """Sums of a mix of the streams as they are, and of their squares, split by split into `parts`: what `enter_block` takes."""
    launch = add_up_triton if can_run(x_TSH) else add_up_reference
    return launch(x_TSH, weight_MX, parts)


def add_up_reference(x_TSH: Tensor, weight_MX: Tensor, parts: Tensor) -> Tensor:
    """The same in plain torch: the first split has all."""
    parts_CTP = view_parts(x_TSH, len(weight_MX), parts).zero_()
    parts_CTP[0, :, : len(weight_MX) + 1] = _sums_reference(x_TSH, weight_MX)
    return parts


def combine_add_up_reference(
    x_TSH: Tensor, y_TH: Tensor, shares_TM: Tensor, weight_MX: Tensor, parts: Tensor
) -> Tensor:
    """`combine_streams` in place, and `add_up_streams` of what it gives by the weight of the next mix."""
    combine_streams_reference(x_TSH, y_TH, shares_TM, x_TSH)
    return add_up_reference(x_TSH, weight_MX, parts)


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
    """Shares from the sums that lie in `parts`, and the RMSNorm of the collapsed streams, which are rounded before it."""
    sums_TP = view_parts(x_TSH, len(mix[0]), parts).sum(dim=0)[:, : len(mix[0]) + 1]
    shares_TM.copy_(_shares_reference(sums_TP, x_TSH, mix, numbers))
    block_TH = collapse_streams_reference(x_TSH, shares_TM, torch.empty_like(x_TSH[:, 0])).float()
    rms_T1 = torch.rsqrt(block_TH.square().mean(-1, keepdim=True) + rms_eps)
    return out_TH.copy_(block_TH * rms_T1 * norm_weight_H.float())


def view_parts(x_TSH: Tensor, num_sums: int, parts: Tensor) -> Tensor:
    """[C, T, P] of the room: sums by split and row, that of squares in column `num_sums`."""
    num_rows, _, hidden_size = x_TSH.shape
    shape = (num_splits(num_rows, hidden_size), num_rows, sum_columns(num_sums))
    assert parts.dtype == torch.float32, f"{parts.dtype=}, not float32"
    assert parts.dim() == 1, f"{parts.shape=} is no vector"
    assert parts.numel() >= shape[0] * shape[1] * shape[2], f"room for {parts.numel()} sums, not {shape}"
    return parts[: shape[0] * shape[1] * shape[2]].view(shape)


def _sums_reference(x_TSH: Tensor, weight_MX: Tensor) -> Tensor:
    """[T, M + 1]: a product with each row of the weight, and the sum of squares."""
    x_TX = x_TSH.flatten(1).float()
    # Row by row, because a product's rounding depends on the number of rows.
    sums = [torch.cat((weight_MX @ x_X, x_X.square().sum(dim=0, keepdim=True))) for x_X in x_TX]
    return torch.stack(sums) if sums else x_TX.new_empty(0, len(weight_MX) + 1)


def _shares_reference(sums_TP: Tensor, x_TSH: Tensor, mix: StreamMix | HeadMix, numbers: MixNumbers) -> Tensor:
    (_, num_streams, hidden_size), bias, scale = x_TSH.shape, mix[1], mix[2]
    rms_T1 = torch.rsqrt(sums_TP[:, -1:] / (num_streams * hidden_size) + numbers.norm_eps)
    mixed_TM = sums_TP[:, :-1] * rms_T1
    pre_TS = torch.sigmoid(mixed_TM[:, :num_streams] * scale[0] + bias[:num_streams]) + numbers.eps
    if isinstance(mix, HeadMix):
        return pre_TS
    behind = slice(num_streams, 2 * num_streams)
    post_TS = 2.0 * torch.sigmoid(mixed_TM[:, behind] * scale[1] + bias[behind])
    comb_TY = mixed_TM[:, 2 * num_streams :] * scale[2] + bias[2 * num_streams :]
    comb_TSS = comb_TY.unflatten(1, (num_streams, num_streams)).softmax(dim=2) + numbers.eps
    comb_TSS = comb_TSS / (comb_TSS.sum(dim=1, keepdim=True) + numbers.eps)
    for _ in range(numbers.num_iterations - 1):
        comb_TSS = comb_TSS / (comb_TSS.sum(dim=2, keepdim=True) + numbers.eps)
        comb_TSS = comb_TSS / (comb_TSS.sum(dim=1, keepdim=True) + numbers.eps)
    return torch.cat((pre_TS, post_TS, comb_TSS.flatten(1)), dim=1)


def collapse_streams_triton(x_TSH: Tensor, shares_TX: Tensor, out_TH: Tensor) -> Tensor:
    """Launch a program for some columns of a row."""
    num_rows, num_streams, hidden_size = x_TSH.shape
    _check_streams(x_TSH, shares_TX, out_TH)
    if num_rows:
        pdl = supports_pdl(x_TSH)
        _collapse_kernel[(num_rows, -(-hidden_size // COLLAPSED_COLUMNS))](
            x_TSH, shares_TX, out_TH, hidden_size, shares_TX.stride(0), out_TH.stride(0),
            NUM_STREAMS=num_streams, BLOCK_H=COLLAPSED_COLUMNS, PDL=pdl, num_warps=4, **pdl_launch(pdl),
        )  # fmt: skip
    return out_TH


collapse_streams = operation(reference=collapse_streams_reference, triton=collapse_streams_triton)


def combine_streams_triton(x_TSH: Tensor, y_TH: Tensor, shares_TM: Tensor, out_TSH: Tensor) -> Tensor:
    return _combine_launch(x_TSH, y_TH, shares_TM, out_TSH, None, None)


combine_streams = operation(reference=combine_streams_reference, triton=combine_streams_triton)


def add_up_triton(x_TSH: Tensor, weight_MX: Tensor, parts: Tensor) -> Tensor:
    """The same as a Triton kernel, a program for a split and some rows."""
    _combine_launch(x_TSH, None, None, x_TSH, weight_MX, parts)
    return parts


def combine_add_up_triton(x_TSH: Tensor, y_TH: Tensor, shares_TM: Tensor, weight_MX: Tensor, parts: Tensor) -> Tensor:
    """Launch a program for a split and some rows."""
    _combine_launch(x_TSH, y_TH, shares_TM, x_TSH, weight_MX, parts)
    return parts


combine_add_up = operation(reference=combine_add_up_reference, triton=combine_add_up_triton)


def _combine_launch(
    x_TSH: Tensor,
    y_TH: Tensor | None,
    shares_TM: Tensor | None,
    out_TSH: Tensor,
    weight_MX: Tensor | None,
    parts: Tensor | None,
) -> Tensor:
    num_rows, num_streams, hidden_size = x_TSH.shape
    if y_TH is not None and shares_TM is not None:
        _check_streams(x_TSH, shares_TM, y_TH)
        assert shares_TM.shape[1] == num_shares(num_streams), f"{shares_TM.shape=} of {num_streams} streams"
        assert out_TSH.is_contiguous(), f"{out_TSH.shape} with strides {out_TSH.stride()}"
        assert out_TSH.shape == x_TSH.shape, f"{out_TSH.shape=} {x_TSH.shape=}"
    num_sums = 0
    if weight_MX is not None and parts is not None:
        num_sums = len(weight_MX)
        assert weight_MX.shape[1] == num_streams * hidden_size, f"{weight_MX.shape=} {x_TSH.shape=}"
        assert weight_MX.is_contiguous(), f"{weight_MX.shape} with strides {weight_MX.stride()}"
        parts = view_parts(x_TSH, num_sums, parts)
    assert x_TSH.is_contiguous(), f"{x_TSH.shape} with strides {x_TSH.stride()}"
    assert num_streams <= MAX_STREAMS, f"{num_streams} streams; kernels take up to {MAX_STREAMS}"
    if not num_rows:
        return out_TSH
    block_t, pdl = row_block(num_rows), supports_pdl(x_TSH)
    launch = _combine_row_kernel if block_t == 1 else _combine_kernel
    launch[(num_splits(num_rows, hidden_size), -(-num_rows // block_t))](
        x_TSH, y_TH, shares_TM, out_TSH, weight_MX, parts, num_rows, chunks_of_split(num_rows, hidden_size),
        hidden_size, 0 if y_TH is None else y_TH.stride(0), 0 if shares_TM is None else shares_TM.stride(0),
        COMBINES=y_TH is not None, NUM_SUMS=num_sums, SUM_COLUMNS=sum_columns(num_sums), NUM_STREAMS=num_streams,
        BLOCK_S=next_power_of_two(num_streams), BLOCK_H=STREAM_COLUMNS, BLOCK_T=block_t, PDL=pdl,
        num_warps=8 if block_t == MANY_ROWS_BLOCK else 4, **pdl_launch(pdl),
    )  # fmt: skip
    return out_TSH


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
    """Launch of each row a program has the block's input, and another all shares."""
    _check_streams(x_TSH, shares_TM, out_TH)
    assert norm_weight_H.shape == (x_TSH.shape[2],), f"{norm_weight_H.shape=} {x_TSH.shape=}"
    _enter_launch(x_TSH, parts, mix, numbers, shares_TM, norm_weight_H, rms_eps, out_TH)
    return out_TH


enter_block = operation(reference=enter_block_reference, triton=enter_block_triton)


def finish_mix_triton(
    x_TSH: Tensor, parts: Tensor, mix: StreamMix | HeadMix, numbers: MixNumbers, shares_TM: Tensor
) -> Tensor:
    """The shares alone, from sums that lie in `parts`."""
    _enter_launch(x_TSH, parts, mix, numbers, shares_TM, None, 0.0, None)
    return shares_TM


def _enter_launch(
    x_TSH: Tensor,
    parts: Tensor,
    mix: StreamMix | HeadMix,
    numbers: MixNumbers,
    shares_TM: Tensor,
    norm_weight_H: Tensor | None,
    rms_eps: float,
    out_TH: Tensor | None,
) -> None:
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
    assert numbers.eps > 0.0, f"{numbers.eps=}: sums of nothing are divided by it"
    if not num_rows:
        return
    block_h, pdl = next_power_of_two(hidden_size), supports_pdl(x_TSH)
    _enter_kernel[(num_rows, 1 if out_TH is None else 2)](
        x_TSH, parts_CTP, bias, scale, norm_weight_H, shares_TM, out_TH, num_rows, len(parts_CTP), hidden_size,
        shares_TM.stride(0), 0 if out_TH is None else out_TH.stride(0), numbers.norm_eps, numbers.eps, rms_eps,
        ENTERS=out_TH is not None, IS_HEAD=is_head, NUM_ITERATIONS=numbers.num_iterations, NUM_SUMS=num_sums,
        SUM_COLUMNS=parts_CTP.shape[2], NUM_STREAMS=num_streams, BLOCK_S=next_power_of_two(num_streams),
        BLOCK_C=MAX_SPLITS, BLOCK_H=block_h, PDL=pdl, num_warps=max(1, min(8, block_h // COLUMNS_PER_WARP)),
        **pdl_launch(pdl),
    )  # fmt: skip


def _check_streams(x_TSH: Tensor, shares_TX: Tensor, y_TH: Tensor) -> None:
    num_rows, num_streams, hidden_size = x_TSH.shape
    assert x_TSH.is_contiguous(), f"{x_TSH.shape} with strides {x_TSH.stride()}"
    assert y_TH.shape == (num_rows, hidden_size), f"{y_TH.shape=} beside {x_TSH.shape=}"
    assert shares_TX.shape[0] == num_rows, f"{shares_TX.shape=} beside {x_TSH.shape=}"
    assert shares_TX.shape[1] >= num_streams, f"{shares_TX.shape=} of {num_streams} streams"
    assert shares_TX.dtype == torch.float32, f"{shares_TX.dtype=}, not float32"
    assert y_TH.stride(1) == shares_TX.stride(1) == 1, f"{y_TH.stride()=} {shares_TX.stride()=}: columns lie apart"


@jit
def _collapse_kernel(
    p_x, p_shares, p_out, hidden_size, shares_stride, out_stride,
    NUM_STREAMS: constexpr, BLOCK_H: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < hidden_size
    release_then_wait(PDL)
    b_y = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for j in tl.static_range(NUM_STREAMS):
        b_x = tl.load(p_x + (i_row * NUM_STREAMS + j) * hidden_size + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_y += b_x * tl.load(p_shares + i_row * shares_stride + j)
    tl.store(p_out + i_row * out_stride + o_h, b_y.to(p_out.dtype.element_ty), mask=m_h)


@jit_counting("num_rows", "num_chunks")
def _combine_kernel(
    p_x, p_y, p_shares, p_out, p_weight, p_parts, num_rows, num_chunks, hidden_size, y_stride, shares_stride,
    COMBINES: constexpr, NUM_SUMS: constexpr, SUM_COLUMNS: constexpr, NUM_STREAMS: constexpr, BLOCK_S: constexpr,
    BLOCK_H: constexpr, BLOCK_T: constexpr, PDL: constexpr,
):  # fmt: skip
    # Of its columns a thread has all streams, so that x may be written where it is read.
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
        # The weight waits for nobody: it is on the way before the block has ended.
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
                b_row = b_stored.to(tl.float32)  # what the next block will read is what is mixed
            if NUM_SUMS:
                b_squares += b_row * b_row
                # A sum of one number each: the compiler does not look through it, and so brings the row itself into the
                # layout of an operand, instead of all that it is computed from.
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
    """One load for each stream; what is beyond is the first one again, and unused."""
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
    """A float32 product by tensor cores that round operands to 11 bits: numbers of 16 bits are those of fewer, weights are two of them."""
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
    # As for many rows; a thread multiplies the columns of the weight that it has loaded, and nothing goes through shared memory.
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
            b_x = b_stored.to(tl.float32)  # what the next block will read is what is mixed
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
    p_x, p_parts, p_bias, p_scale, p_norm, p_shares, p_out,
    num_rows, num_splits, hidden_size, shares_stride, out_stride, norm_eps, eps, rms_eps,
    ENTERS: constexpr, IS_HEAD: constexpr, NUM_ITERATIONS: constexpr, NUM_SUMS: constexpr, SUM_COLUMNS: constexpr,
    NUM_STREAMS: constexpr, BLOCK_S: constexpr, BLOCK_C: constexpr, BLOCK_H: constexpr, PDL: constexpr,
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
    # All loads of a program are on their way before it adds anything up.
    b_squares = tl.load(p_sums + NUM_SUMS, mask=m_c, other=0.0)
    m_cs = m_c[:, None] & m_s[None, :]
    b_pre = tl.load(p_sums[:, None] + o_s[None, :], mask=m_cs, other=0.0)
    if ENTERS:
        if tl.program_id(1) == 0:
            o_h = tl.arange(0, BLOCK_H)
            m_h = o_h < hidden_size
            # In one vector, so that a thread has some columns of all streams.
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
            tl.store(p_out + i_row * out_stride + o_h, b_y.to(p_out.dtype.element_ty), mask=m_h)
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
        tl.store(p_row + o_comb, _doubly_stochastic(b_comb, m_comb, m_s, eps, NUM_ITERATIONS), mask=m_comb)


@jit
def _doubly_stochastic(b_comb, m_comb, m_s, eps, NUM_ITERATIONS: constexpr):
    """Softmax of rows, and then rows and columns divided by their sums in turns (Sinkhorn-Knopp)."""
    b_comb = tl.where(m_comb, b_comb, float("-inf"))
    b_comb = tl.where(m_comb, tl.exp(b_comb - tl.where(m_s, tl.max(b_comb, axis=1), 0.0)[:, None]), 0.0)
    b_comb = b_comb / tl.where(m_s, tl.sum(b_comb, axis=1), 1.0)[:, None] + eps
    b_comb = tl.where(m_comb, b_comb, 0.0)
    # A reciprocal a row, and not a division an element: this chain is what a program waits for.
    b_comb = b_comb * (1.0 / (tl.sum(b_comb, axis=0) + eps))[None, :]
    for _ in range(NUM_ITERATIONS - 1):
        b_comb = b_comb * (1.0 / (tl.sum(b_comb, axis=1) + eps))[:, None]
        b_comb = b_comb * (1.0 / (tl.sum(b_comb, axis=0) + eps))[None, :]
    return b_comb
