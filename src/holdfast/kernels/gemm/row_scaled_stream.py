"""Small batches by row-scaled e4m3 weights on Hopper: one program per SM streams an equal share of the weight, in Gluon.

M rows, N outputs, K inputs

The weight is the first operand of wgmma and the rows are the second. All programs together walk over the weight, tile by
tile and 128 columns at a time, and each takes one stretch of this walk (stream-K). So every SM reads as many bytes. A tile
that several programs share is summed by the last of them to finish, in the order of K. The shape alone decides the
stretches, so results are batch invariant.

A weight does not depend on the kernel before. So a program fills its ring of TMA copies before it waits for that kernel,
and sends prefetches of the next bytes to the L2 cache. It takes less than half of the shared memory of an SM: while one
product runs, the programs of the next one are there already.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.activation import activated_numbers
from holdfast.kernels.fp8 import size_bits
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, RowAmaxBits, TileScratch
from holdfast.kernels.geometry import STREAM_BOX_N, STREAM_ROWS, STREAM_STEP_K, Stretches, stream_stretches
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import (
    TensorDescriptor,
    constexpr,
    gl,
    gluon_jit,
    gluon_jit_counting,
    hopper,
    jit,
    kernel_constant,
    next_power_of_two,
    tl,
)
from holdfast.quant.quantized_weight import QuantizedWeight

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

BOX, STEP = kernel_constant(STREAM_BOX_N), kernel_constant(STREAM_STEP_K)
"""Tensor cores add e4m3 products with few bits, so sums of a step are added to float32."""
PREFETCH_ASM = kernel_constant("""{
.reg .pred wanted;
setp.gt.s32 wanted, $2, 0;
@wanted cp.async.bulk.prefetch.L2.global [$1], $2;
mov.u32 $0, 0;
}""")


class StreamForm(NamedTuple):
    """Sizes that do not change results."""

    num_stages: int
    """Steps in the ring of copies."""
    steps_ahead: int
    """Steps after the ring that are prefetched into L2 before the wait."""
    release_steps: int
    """Steps before the end at which the next kernel may start; 0: at once."""


def row_form(num_rows: int) -> int:
    """Return the rows of a tile, or 0 for too many rows: the specialization for the number of rows."""
    return max(16, next_power_of_two(num_rows)) if num_rows <= STREAM_ROWS else 0


def stream_form(block_m: int) -> StreamForm:
    """Return the sizes that are expected to be fastest; not measured yet."""
    return StreamForm({16: 6, 32: 5, 64: 4}[block_m], 6, 12)


def takes(weight: Tensor | QuantizedWeight, num_rows: int, scratch: TileScratch | None) -> bool:
    """Return True if this kernel takes the product: e4m3 with a scale per row, on Hopper, with rows that TMA can copy."""
    return (
        isinstance(weight, QuantizedWeight) and takes_weight(weight) and scratch is not None and num_rows <= STREAM_ROWS
    )


def takes_weight(weight: QuantizedWeight) -> bool:
    """Return True for weights that this kernel takes."""
    return (
        len(weight.shape) == 2
        and weight.scheme.quantizes_activations
        and weight.scheme.block_columns == 0
        and weight.shape[1] % 16 == 0
        and is_hopper(weight.codes)
    )


def is_hopper(tensor: Tensor) -> bool:
    """Return True if Gluon kernels for Hopper run on this tensor's device."""
    return gl is not None and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] == 9


@lru_cache
def most_parts(stretches: Stretches) -> int:
    """Return the most programs that share a tile. Each launch needs it, and it takes a loop over tiles."""
    return stretches.most_parts()


def stream_linear(
    rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor, form: StreamForm | None = None
) -> Tensor:
    """Compute rows @ weight.T + bias into `out_MN`, in its type."""
    _launch(rows, weight, bias_N, out_MN, "", form)
    return out_MN


def stream_gate(
    rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, kind: str, out_MI: Tensor,
    form: StreamForm | None = None,
) -> RowAmaxBits:  # fmt: skip
    """Store activation(upper half) * lower half of rows @ weight.T + bias into `out_MI`; return its amax."""
    assert rows.scratch is not None, "a gated product needs amax"
    return RowAmaxBits(rows.scratch.amax, _launch(rows, weight, bias_N, out_MI, kind, form))


def _launch(
    rows: QuantizedRows, weight: QuantizedWeight, bias_N: Tensor | None, out_MN: Tensor, kind: str,
    form: StreamForm | None,
) -> int:  # fmt: skip
    """Launch the kernel, and return its blocks of outputs."""
    (num_rows, size_k), size_n, scratch = rows.codes_TK.shape, out_MN.shape[1], rows.scratch
    block_m = row_form(num_rows)
    assert block_m, f"{num_rows} rows, and this kernel takes {STREAM_ROWS}"
    assert weight.shape == (size_n * (2 if kind else 1), size_k), f"{weight.shape=} {out_MN.shape=} {size_k=}"
    assert scratch is not None, "parts of tiles need scratch"
    stretches = stream_stretches(size_n, size_k, bool(kind))
    assert block_m * stretches.num_partials <= scratch.partials.numel(), f"{scratch.partials.shape=}"
    assert stretches.num_tiles <= scratch.arrived.numel(), f"{scratch.arrived.shape=}"
    assert not kind or num_rows * stretches.num_tiles <= scratch.amax.numel(), f"{scratch.amax.shape=}"
    form = form or stream_form(block_m)
    layout = gl.NVMMASharedLayout(128, 8, rank=2)
    row_scaled_stream_kernel[(stretches.num_programs,)](
        TensorDescriptor.from_tensor(weight.codes, [STREAM_BOX_N, STREAM_STEP_K], layout),
        TensorDescriptor.from_tensor(rows.codes_TK, [block_m, STREAM_STEP_K], layout),
        weight.codes.view(torch.uint8), rows.scales_TB, weight.scales, weight.scales if bias_N is None else bias_N,
        out_MN, *scratch, num_rows, size_n, size_k, stretches.num_tiles, stretches.num_steps, form.steps_ahead,
        form.release_steps,
        KIND=kind, HAS_BIAS=bias_N is not None, MOST_PARTS=most_parts(stretches), BLOCK_M=block_m,
        STAGES=form.num_stages, num_warps=4, **pdl_flags(out_MN),
    )  # fmt: skip
    return stretches.num_tiles


@jit
def _synchronize():
    tl.debug_barrier()


@jit
def _wait_for_kernel_before():
    tl.extra.cuda.gdc_wait()


@jit
def _launch_dependents():
    tl.extra.cuda.gdc_launch_dependents()


@gluon_jit
def _begin_weight(weight, tile, step, size_n, slot, filled, s_w, is_wanted, GATED: constexpr):
    """Start the copies of two boxes of the weight: neighbours, or the gate and the up of the same outputs."""
    if GATED:
        first_row = tile * BOX
        second_row = size_n + tile * BOX
    else:
        first_row = 2 * tile * BOX
        second_row = first_row + BOX
    bar = filled.index(slot)
    hopper.tma.async_copy_global_to_shared(weight, [first_row, step * STEP], bar, s_w.index(2 * slot), pred=is_wanted)
    hopper.tma.async_copy_global_to_shared(
        weight, [second_row, step * STEP], bar, s_w.index(2 * slot + 1), pred=is_wanted
    )


@gluon_jit
def _prefetch(p_codes, tile, step, num_steps, size_n, size_k, GATED: constexpr):
    """Prefetch `num_steps` steps of a tile's rows into L2."""
    o_t = gl.arange(0, 2 * BOX, gl.BlockedLayout([1], [32], [4], [0]))
    if GATED:
        o_row = gl.minimum(tile * BOX + o_t % BOX, size_n - 1) + o_t // BOX * size_n
    else:
        o_row = gl.minimum(2 * tile * BOX + o_t, size_n - 1)
    num_bytes = gl.minimum(num_steps * STEP, size_k - step * STEP)
    p_begin = p_codes + o_row.to(gl.int64) * size_k + step * STEP
    b_bytes = gl.full_like(o_t, 0) + num_bytes
    gl.inline_asm_elementwise(PREFETCH_ASM, "=r,l,r", [p_begin.to(gl.int64), b_bytes], gl.int32, False, 1)


@gluon_jit
def _prefetch_stretch(p_codes, unit, end, num_steps, size_n, size_k, GATED: constexpr):
    """Prefetch a stretch of steps, of two tiles at most."""
    tile = unit // num_steps
    stop = gl.minimum(end, (tile + 1) * num_steps)
    _prefetch(p_codes, tile, unit - tile * num_steps, stop - unit, size_n, size_k, GATED)
    if stop < end:
        _prefetch(p_codes, tile + 1, 0, gl.minimum(end - stop, num_steps), size_n, size_k, GATED)


@gluon_jit
def _part_offsets(BLOCK_M: constexpr):
    """Return the places of a box's sums in memory: those of a thread lie side by side."""
    layout: constexpr = gl.BlockedLayout([1, BLOCK_M // 2], [32, 1], [4, 1], [1, 0])
    o_thread = gl.arange(0, 128, gl.SliceLayout(1, layout))
    o_sum = gl.arange(0, BLOCK_M // 2, gl.SliceLayout(0, layout))
    return o_thread[:, None] * (BLOCK_M // 2) + o_sum[None, :]


@gluon_jit
def _by_thread(b_y):
    """View sums [N, M] as [threads, sums of a thread]; no number moves."""
    BLOCK_M: constexpr = b_y.shape[1]
    layout: constexpr = gl.BlockedLayout([1, BLOCK_M // 2], [32, 1], [4, 1], [1, 0])
    b_y = b_y.reshape((4, 2, 8, BLOCK_M // 8, 4, 2)).permute((0, 2, 4, 3, 1, 5)).reshape((128, BLOCK_M // 2))
    return gl.convert_layout(b_y, layout, assert_trivial=True)


@gluon_jit
def _by_output(b_sums, layout: constexpr):
    """Undo `_by_thread`."""
    BLOCK_M: constexpr = 2 * b_sums.shape[1]
    b_y = b_sums.reshape((4, 8, 4, BLOCK_M // 8, 2, 2)).permute((0, 4, 1, 3, 2, 5)).reshape((64, BLOCK_M))
    return gl.convert_layout(b_y, layout, assert_trivial=True)


@gluon_jit
def _sum_parts(p_partials, first_program, num_parts, o_part, layout: constexpr, MOST_PARTS: constexpr):
    """Add the parts of a box in the order of K, as other programs stored them."""
    BLOCK_M: constexpr = 2 * o_part.shape[1]
    PART: constexpr = 2 * BOX * BLOCK_M
    b_sums = gl.load(p_partials + (2 * first_program + 1) * PART + o_part, cache_modifier=".cg")
    if BLOCK_M <= 32:
        for i in gl.static_range(1, MOST_PARTS):  # all loads at once
            m_part = gl.full_like(o_part, 0) + i < num_parts
            p_part = p_partials + 2 * (first_program + i) * PART + o_part
            b_sums += gl.load(p_part, mask=m_part, other=0.0, cache_modifier=".cg")
    else:
        for i in range(1, num_parts):
            b_sums += gl.load(p_partials + 2 * (first_program + i) * PART + o_part, cache_modifier=".cg")
    return _by_output(b_sums, layout)


@gluon_jit
def _load_scales(p_scales, p_bias, o_n, size_n, HAS_BIAS: constexpr):
    """Return the scales of outputs, and their biases."""
    b_scales = gl.load(p_scales + o_n, mask=o_n < size_n, other=0.0)
    b_bias = b_scales
    if HAS_BIAS:
        b_bias = gl.load(p_bias + o_n, mask=o_n < size_n, other=0.0).to(gl.float32)
    return b_scales, b_bias


@gluon_jit
def _scaled(b_y, numbers, b_x_scales, HAS_BIAS: constexpr):
    """Apply the scales of weight and rows, and the bias."""
    b_y *= numbers[0][:, None] * b_x_scales[None, :]
    if HAS_BIAS:
        b_y += numbers[1][:, None]
    return b_y


@gluon_jit
def _store(p_out, b_y, first, num_rows, size_n):
    """Store a box of outputs [N, M], neighbours by one thread."""
    BLOCK_M: constexpr = b_y.shape[1]
    layout: constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    b_out = gl.convert_layout(b_y.to(p_out.dtype.element_ty), layout)
    o_n = first + gl.arange(0, BOX, gl.SliceLayout(1, layout))
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    m_y = (o_n < size_n)[:, None] & (o_m < num_rows)[None, :]
    gl.store(p_out + o_m[None, :].to(gl.int64) * size_n + o_n[:, None], b_out, mask=m_y)


@gluon_jit
def _finish(
    p_out, p_amax, b_0, b_1, numbers_0, numbers_1, b_x_scales, tile, num_tiles, num_rows, size_n,
    KIND: constexpr, HAS_BIAS: constexpr,
):  # fmt: skip
    """Turn the sums of a tile into outputs."""
    layout: constexpr = b_0.type.layout
    b_0 = _scaled(b_0, numbers_0, b_x_scales, HAS_BIAS)
    b_1 = _scaled(b_1, numbers_1, b_x_scales, HAS_BIAS)
    if KIND != "":
        o_m = gl.arange(0, b_0.shape[1], gl.SliceLayout(0, layout))
        o_n = tile * BOX + gl.arange(0, BOX, gl.SliceLayout(1, layout))
        b_y = (activated_numbers(b_0, KIND) * b_1).to(p_out.dtype.element_ty)
        # Compare as integers: NaN is above all numbers, so it is not lost.
        b_sizes = gl.where((o_n < size_n)[:, None], size_bits(b_y.to(gl.float32)), 0)
        gl.store(p_amax + o_m * num_tiles + tile, gl.max(b_sizes, axis=0), mask=o_m < num_rows)
        _store(p_out, b_y, tile * BOX, num_rows, size_n)
    else:
        _store(p_out, b_0, 2 * tile * BOX, num_rows, size_n)
        _store(p_out, b_1, 2 * tile * BOX + BOX, num_rows, size_n)


@gluon_jit_counting("num_rows", "steps_ahead", "release_steps")
def row_scaled_stream_kernel(
    weight, rows, p_codes, p_x_scales, p_scales, p_bias, p_out, p_partials, p_arrived, p_amax,
    num_rows, size_n, size_k, num_tiles, num_steps, steps_ahead, release_steps,
    KIND: constexpr, HAS_BIAS: constexpr, MOST_PARTS: constexpr, BLOCK_M: constexpr, STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    GATED: constexpr = KIND != ""
    NUM_BYTES: constexpr = 2 * weight.block_type.nbytes + rows.block_type.nbytes
    layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    s_w = gl.allocate_shared_memory(weight.dtype, [2 * STAGES, BOX, STEP], weight.layout)
    s_x = gl.allocate_shared_memory(rows.dtype, [STAGES, BLOCK_M, STEP], rows.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(filled.index(i), count=1)
    i_program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    num_units = num_tiles * num_steps
    first = i_program * num_units // num_programs
    end = (i_program + 1) * num_units // num_programs
    next_tile = first // num_steps
    next_step = first - next_tile * num_steps
    tile_0 = next_tile
    step_0 = next_step
    for i in gl.static_range(STAGES):
        is_wanted = first + i < end
        hopper.mbarrier.expect(filled.index(i), NUM_BYTES, pred=is_wanted)
        _begin_weight(weight, next_tile, next_step, size_n, i, filled, s_w, is_wanted, GATED)
        is_last = next_step + 1 == num_steps
        next_tile += is_last.to(gl.int32)
        next_step = gl.where(is_last, 0, next_step + 1)
    stop = gl.minimum(first + STAGES + steps_ahead, end)
    if first + STAGES < stop:
        _prefetch_stretch(p_codes, first + STAGES, stop, num_steps, size_n, size_k, GATED)
    if PDL:
        _wait_for_kernel_before()
        if release_steps == 0:
            _launch_dependents()
    release = gl.where(release_steps == 0, -1, gl.maximum(end - release_steps, first))
    i_step = step_0
    for i in gl.static_range(STAGES):
        hopper.tma.async_copy_global_to_shared(
            rows, [0, i_step * STEP], filled.index(i), s_x.index(i), pred=first + i < end
        )
        i_step = gl.where(i_step + 1 == num_steps, 0, i_step + 1)
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    b_x_scales = gl.load(p_x_scales + o_m, mask=o_m < num_rows, other=0.0)
    slot = 0
    phase = 0
    b_zero = gl.zeros([BOX, BLOCK_M], gl.float32, layout)
    for tile in range(tile_0, (end + num_steps - 1) // num_steps):
        b_0 = gl.zeros([BOX, BLOCK_M], gl.float32, layout)
        b_1 = gl.zeros([BOX, BLOCK_M], gl.float32, layout)
        # Loaded here, they arrive while the loop runs.
        o_n = tile * (BOX if GATED else 2 * BOX) + gl.arange(0, BOX, gl.SliceLayout(1, layout))
        numbers_0 = _load_scales(p_scales, p_bias, o_n, size_n, HAS_BIAS)
        if GATED:
            numbers_1 = _load_scales(p_scales + size_n, p_bias + size_n, o_n, size_n, HAS_BIAS)
        else:
            numbers_1 = _load_scales(p_scales, p_bias, o_n + BOX, size_n, HAS_BIAS)
        for unit in range(gl.maximum(first, tile * num_steps), gl.minimum(end, (tile + 1) * num_steps)):
            if PDL and unit == release:
                _launch_dependents()
            hopper.mbarrier.wait(filled.index(slot), phase)
            s_rows = s_x.index(slot).permute((1, 0))
            sum_0 = hopper.warpgroup_mma(s_w.index(2 * slot), s_rows, b_zero, use_acc=False, is_async=True)
            sum_1 = hopper.warpgroup_mma(s_w.index(2 * slot + 1), s_rows, b_zero, use_acc=False, is_async=True)
            b_sum_0, b_sum_1 = hopper.warpgroup_mma_wait(0, deps=[sum_0, sum_1])
            _synchronize()  # all warps have read the slot
            is_wanted = unit + STAGES < end
            hopper.mbarrier.expect(filled.index(slot), NUM_BYTES, pred=is_wanted)
            _begin_weight(weight, next_tile, next_step, size_n, slot, filled, s_w, is_wanted, GATED)
            hopper.tma.async_copy_global_to_shared(
                rows, [0, next_step * STEP], filled.index(slot), s_x.index(slot), pred=is_wanted
            )
            is_last = next_step + 1 == num_steps
            next_tile += is_last.to(gl.int32)
            next_step = gl.where(is_last, 0, next_step + 1)
            is_round = slot == STAGES - 1
            slot = gl.where(is_round, 0, slot + 1)
            phase = gl.where(is_round, phase ^ 1, phase)
            b_0 += b_sum_0
            b_1 += b_sum_1
        begin = tile * num_steps
        first_program = ((begin + 1) * num_programs - 1) // num_units
        num_parts = ((begin + num_steps) * num_programs - 1) // num_units - first_program + 1
        is_whole = num_parts == 1
        if num_parts > 1:
            is_first = (i_program == first_program).to(gl.int32)
            o_part = _part_offsets(BLOCK_M)
            p_part = p_partials + (2 * i_program + is_first) * (2 * BOX * BLOCK_M)
            gl.store(p_part + o_part, _by_thread(b_0))
            gl.store(p_part + BOX * BLOCK_M + o_part, _by_thread(b_1))
            _synchronize()
            is_whole = gl.atomic_add(p_arrived + tile, 1, sem="acq_rel") == num_parts - 1
            if is_whole:
                gl.store(p_arrived + tile, 0)
                b_0 = _sum_parts(p_partials, first_program, num_parts, o_part, layout, MOST_PARTS)
                b_1 = _sum_parts(p_partials + BOX * BLOCK_M, first_program, num_parts, o_part, layout, MOST_PARTS)
        if is_whole:
            _finish(
                p_out, p_amax, b_0, b_1, numbers_0, numbers_1, b_x_scales, tile, num_tiles, num_rows, size_n,
                KIND, HAS_BIAS,
            )  # fmt: skip
    for i in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(filled.index(i))
