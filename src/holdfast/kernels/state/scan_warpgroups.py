"""The scan of `delta_chunks` for 16-bit inputs on Hopper: one warpgroup carries 64 columns of a state, in Gluon.

H value heads, K elements of a key, V elements of a value, C rows of a chunk; S the state, T the inverse of a system

All products are transposed. So S, what rows read and what they write are left operands, which stay in registers, and right
operands are inputs as they lie in memory: keys, queries, T, scores. Float32 operands are sums of two of 16 bits.

copies      of the next chunk are under way while this one is multiplied, in two stages of shared memory.
products    of a chunk run in three groups, each of which waits for the one before it: S k^T, then (v - S k^T) T^T, then the
            new S. Products for outputs run beside them.

Sums are those of `chunk_scan_kernel`, in the same order, so results differ in rounding alone.
"""

import torch
from torch import Tensor

from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.state.delta_inputs import DeltaInputs
from holdfast.kernels.state.state_geometry import CHUNK_ROWS, COEFFICIENTS
from holdfast.kernels.state.state_rows import StateRows
from holdfast.kernels.triton_compat import constexpr, gl, gluon_jit, hopper, kernel_constant

VALUES = 64
"""Columns of a state per program: rows of a product of one warpgroup."""
KEY_DIMS = (64, 128)
"""Elements of a key that leave registers for two halves of a state."""
WAIT = kernel_constant("griddepcontrol.wait; // $0")
LAUNCH_DEPENDENTS = kernel_constant("griddepcontrol.launch_dependents; // $0")
MEET = kernel_constant("bar.sync 0; // $0")


def takes_warpgroups(inputs: DeltaInputs, state_PHKV: Tensor) -> bool:
    """Return True if `scan_in_warpgroups` computes these inputs on this device."""
    q_TGK, k_TGK, v_THV = inputs.q_TGK, inputs.k_TGK, inputs.v_THV
    return (
        gl is not None
        and state_PHKV.is_cuda
        and torch.cuda.get_device_capability(state_PHKV.device)[0] == 9
        and has_wide_rows(q_TGK, k_TGK, v_THV)
        and not inputs.by_channel
    )


def has_wide_rows(q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor) -> bool:
    """Return True if sizes, types and places of rows allow copies of 16 bytes."""
    return (
        v_THV.dtype in (torch.bfloat16, torch.float16)
        and k_TGK.shape[2] in KEY_DIMS
        and v_THV.shape[2] % VALUES == 0
        and all(x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in (q_TGK, k_TGK, v_THV))
    )


def scan_in_warpgroups(
    inputs: DeltaInputs,
    rows: StateRows,
    inverses: Tensor,
    scores: Tensor,
    coefficients: Tensor,
    state_PHKV: Tensor,
    out_THV: Tensor,
) -> None:
    """Launch one program per sequence, value head and 64 values."""
    q_TGK, k_TGK, v_THV = inputs.q_TGK, inputs.k_TGK, inputs.v_THV
    num_heads, value_dim = out_THV.shape[1:]
    key_heads, key_dim = k_TGK.shape[1:]
    assert rows.sequences_N4 is not None, "a step with chunks lists its sequences"
    warpgroup_scan_kernel[(value_dim // VALUES * num_heads, len(rows.sequences_N4))](
        q_TGK, k_TGK, v_THV, rows.sequences_N4, inverses, scores, coefficients, state_PHKV, out_THV,
        q_TGK.stride(0), k_TGK.stride(0), v_THV.stride(0), out_THV.stride(0), state_PHKV.stride(0),
        NUM_HEADS=num_heads, GROUP=num_heads // key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, CHUNK=CHUNK_ROWS,
        NUM_COEFFICIENTS=COEFFICIENTS, BLOCK_V=VALUES, num_warps=4, **pdl_flags(state_PHKV),
    )  # fmt: skip


@gluon_jit
def warpgroup_scan_kernel(
    p_q, p_k, p_v, p_sequences, p_inverses, p_scores, p_coefficients, p_state, p_out,
    q_stride, k_stride, v_stride, out_stride, state_stride,
    NUM_HEADS: constexpr, GROUP: constexpr, KEY_DIM: constexpr, VALUE_DIM: constexpr, CHUNK: constexpr,
    NUM_COEFFICIENTS: constexpr, BLOCK_V: constexpr, PDL: constexpr,
):  # fmt: skip
    TYPE: constexpr = p_v.dtype.element_ty
    NUM_BLOCKS: constexpr = VALUE_DIM // BLOCK_V
    square: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    wide: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_DIM, 16])
    left: constexpr = gl.DotOperandLayout(0, square, 2)
    left_wide: constexpr = gl.DotOperandLayout(0, wide, 2)
    shared: constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat: constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if PDL:
        gl.inline_asm_elementwise(LAUNCH_DEPENDENTS, "=r", [], gl.int32, False, 1)
        gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, False, 1)
    i_head = gl.program_id(0) // NUM_BLOCKS
    first_v = gl.program_id(0) % NUM_BLOCKS * BLOCK_V
    i_seq = gl.program_id(1)
    first = gl.load(p_sequences + i_seq * 4).to(gl.int64)
    num_rows = gl.load(p_sequences + i_seq * 4 + 1)
    if num_rows > 1:
        i_place = gl.load(p_sequences + i_seq * 4 + 2).to(gl.int64)
        has_state = gl.load(p_sequences + i_seq * 4 + 3) > 0
        o_k = gl.arange(0, KEY_DIM, gl.SliceLayout(0, wide))
        o_v = gl.arange(0, BLOCK_V, gl.SliceLayout(1, wide))
        p_tile = p_state + i_place * state_stride + (i_head * KEY_DIM * VALUE_DIM + first_v)
        p_tile = p_tile + o_k[None, :] * VALUE_DIM + o_v[:, None]
        b_state = gl.load(p_tile, mask=(o_k >= 0)[None, :] & (o_v >= 0)[:, None] & has_state, other=0.0)
        s_k = gl.allocate_shared_memory(TYPE, [2, CHUNK, KEY_DIM], shared)
        s_q = gl.allocate_shared_memory(TYPE, [2, CHUNK, KEY_DIM], shared)
        s_v = gl.allocate_shared_memory(TYPE, [2, CHUNK, BLOCK_V], shared)
        s_high = gl.allocate_shared_memory(TYPE, [2, CHUNK, CHUNK], shared)
        s_low = gl.allocate_shared_memory(TYPE, [2, CHUNK, CHUNK], shared)
        s_score = gl.allocate_shared_memory(TYPE, [2, CHUNK, CHUNK], shared)
        s_numbers = gl.allocate_shared_memory(gl.float32, [2, NUM_COEFFICIENTS, CHUNK], flat)
        p_keys = p_k + first * k_stride + i_head // GROUP * KEY_DIM
        p_queries = p_q + first * q_stride + i_head // GROUP * KEY_DIM
        p_values = p_v + first * v_stride + (i_head * VALUE_DIM + first_v)
        p_outs = p_out + first * out_stride + (i_head * VALUE_DIM + first_v)
        # Chunks of a piece lie in adjacent slots.
        i_tile = (first // CHUNK + i_seq) * NUM_HEADS + i_head
        begin_rows(p_keys, k_stride, s_k.index(0), num_rows)
        begin_rows(p_queries, q_stride, s_q.index(0), num_rows)
        begin_rows(p_values, v_stride, s_v.index(0), num_rows)
        begin_squares(
            p_inverses, p_scores, p_coefficients, s_high.index(0), s_low.index(0), s_score.index(0),
            s_numbers.index(0), i_tile,
        )  # fmt: skip
        hopper.async_copy.commit_group()
        slot = 0
        for start in range(0, num_rows, CHUNK):
            hopper.async_copy.wait_group(0)
            hopper.fence_async_shared()
            # Copies of all threads have landed, and no thread still reads the other stage.
            gl.inline_asm_elementwise(MEET, "=r", [], gl.int32, False, 1)
            s_keys, s_values, s_inverse = s_k.index(slot), s_v.index(slot), s_high.index(slot).permute((1, 0))
            s_factors = s_numbers.index(slot)
            b_zeros = gl.zeros([BLOCK_V, CHUNK], gl.float32, square)
            b_high, b_low = both_halves(b_state, left, TYPE)
            read = hopper.warpgroup_mma(b_low, s_keys.permute((1, 0)), b_zeros, use_acc=False, is_async=True)
            read = hopper.warpgroup_mma(b_high, s_keys.permute((1, 0)), read, is_async=True)
            s_queries = s_q.index(slot).permute((1, 0))
            # Outputs read the state in half precision: they are rounded to it themselves. Its other half took 40 % more time.
            out = hopper.warpgroup_mma(b_high, s_queries, b_zeros, use_acc=False, is_async=True)
            # Copies begin after products, which they would delay.
            left_rows = num_rows - start
            if left_rows > CHUNK:
                following = first * 0 + (start + CHUNK)
                begin_rows(p_keys + following * k_stride, k_stride, s_k.index(1 - slot), left_rows - CHUNK)
                begin_rows(p_queries + following * q_stride, q_stride, s_q.index(1 - slot), left_rows - CHUNK)
                begin_rows(p_values + following * v_stride, v_stride, s_v.index(1 - slot), left_rows - CHUNK)
                begin_squares(
                    p_inverses, p_scores, p_coefficients, s_high.index(1 - slot), s_low.index(1 - slot),
                    s_score.index(1 - slot), s_numbers.index(1 - slot), i_tile + (start // CHUNK + 1) * NUM_HEADS,
                )  # fmt: skip
            hopper.async_copy.commit_group()
            b_value = s_values.permute((1, 0)).load(square).to(gl.float32)
            b_factor = factors(s_factors, 0, square)
            b_read = hopper.warpgroup_mma_wait(1, deps=[read])
            b_high, b_low = both_halves(b_value - b_read * b_factor, left, TYPE)
            s_inverse_low = s_low.index(slot).permute((1, 0))
            write = hopper.warpgroup_mma(b_high, s_inverse_low, b_zeros, use_acc=False, is_async=True)
            write = hopper.warpgroup_mma(b_low, s_inverse, write, is_async=True)
            write = hopper.warpgroup_mma(b_high, s_inverse, write, is_async=True)
            b_factor = factors(s_factors, 2, square)
            b_out_factor = factors(s_factors, 1, square)
            last = s_factors.slice(3, 1, dim=0).slice(0, 1, dim=1).load(wide)
            b_write, b_out = hopper.warpgroup_mma_wait(0, deps=[write, out])
            b_high, b_low = both_halves(b_write * b_factor, left_wide, TYPE)
            b_state = b_state * last
            state = hopper.warpgroup_mma(b_low, s_keys, b_state, is_async=True)
            state = hopper.warpgroup_mma(b_high, s_keys, state, is_async=True)
            b_written = gl.convert_layout(b_write.to(TYPE), left)
            s_scores = s_score.index(slot).permute((1, 0))
            out = hopper.warpgroup_mma(b_written, s_scores, b_out * b_out_factor, is_async=True)
            b_state, b_out = hopper.warpgroup_mma_wait(0, deps=[state, out])
            s_values.permute((1, 0)).store(b_out.to(TYPE))
            store_rows(s_values, p_outs + (first * 0 + start) * out_stride, out_stride, left_rows)
            slot = 1 - slot
        hopper.async_copy.wait_group(0)
        gl.store(p_tile, b_state)


@gluon_jit
def both_halves(b_x, layout: constexpr, TYPE: constexpr):
    """Return float32 numbers as left operands of a product: a sum of two of an input's type."""
    b_high = b_x.to(TYPE)
    b_low = (b_x - b_high.to(gl.float32)).to(TYPE)
    return gl.convert_layout(b_high, layout), gl.convert_layout(b_low, layout)


@gluon_jit
def factors(s_factors, PLANE: constexpr, layout: constexpr):
    """Return coefficients of the rows of a chunk, as a row of its transposed tile."""
    return s_factors.slice(PLANE, 1, dim=0).load(layout)


@gluon_jit
def begin_rows(p_x, stride, s_x, num_rows):
    """Begin to copy rows of one head; those from `num_rows` on become zeros."""
    ROWS: constexpr = s_x.shape[0]
    DIM: constexpr = s_x.shape[1]
    layout: constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    o_c = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    # A chunk's rows span less than 2^31 elements.
    p_rows = p_x + (o_c * stride)[:, None] + o_d[None, :]
    hopper.async_copy.async_copy_global_to_shared(s_x, p_rows, mask=(o_c < num_rows)[:, None])


@gluon_jit
def begin_squares(p_inverses, p_scores, p_coefficients, s_high, s_low, s_score, s_factors, i_tile):
    """Begin to copy what `chunk_systems_kernel` and `chunk_inverse_kernel` wrote of a chunk."""
    CHUNK: constexpr = s_score.shape[0]
    PLANES: constexpr = s_factors.shape[0]
    layout: constexpr = gl.BlockedLayout([1, 8], [256 // CHUNK, CHUNK // 8], [4, 1], [1, 0])
    o_i, o_j = gl.arange(0, CHUNK, gl.SliceLayout(1, layout)), gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    o_square = o_i[:, None] * CHUNK + o_j[None, :]
    p_inverse = p_inverses + i_tile * (2 * CHUNK * CHUNK)
    hopper.async_copy.async_copy_global_to_shared(s_high, p_inverse + o_square)
    hopper.async_copy.async_copy_global_to_shared(s_low, p_inverse + CHUNK * CHUNK + o_square)
    hopper.async_copy.async_copy_global_to_shared(s_score, p_scores + i_tile * (CHUNK * CHUNK) + o_square)
    lines: constexpr = gl.BlockedLayout([1, 4], [128 // CHUNK, CHUNK // 4], [4, 1], [1, 0])
    o_i, o_j = gl.arange(0, PLANES, gl.SliceLayout(1, lines)), gl.arange(0, CHUNK, gl.SliceLayout(0, lines))
    p_factors = p_coefficients + i_tile * (PLANES * CHUNK) + (o_i[:, None] * CHUNK + o_j[None, :])
    hopper.async_copy.async_copy_global_to_shared(s_factors, p_factors)


@gluon_jit
def store_rows(s_x, p_out, stride, num_rows):
    """Store rows of one head."""
    ROWS: constexpr = s_x.shape[0]
    DIM: constexpr = s_x.shape[1]
    layout: constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    o_c = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    p_rows = p_out + (o_c * stride)[:, None] + o_d[None, :]
    gl.store(p_rows, s_x.load(layout), mask=(o_c < num_rows)[:, None] & (o_d >= 0)[None, :])
