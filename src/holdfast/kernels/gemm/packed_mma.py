"""Products by packed weights of few to some hundred rows: tensor-core tiles over planes as stored, in Gluon.

M rows of a block, N outputs, K inputs, C columns of a chunk, G groups of a chunk that share a scale

The weight is the first operand of mma.sync. Its bytes go to shared memory as they are, each once, several chunks ahead.
Codes become exact integers in half precision (kernels/gemm/packed_codes.py). Columns of a product share a scale, so
scales multiply float32 sums, and minima multiply the sums of inputs, which another product adds. So nothing is rounded
but the sums. The scales of the next chunk are computed by one thread a row while tensor cores work.

The shape of a weight decides how K is split, and every part is summed alike at any number of rows: up to MOST_SPLIT_ROWS
rows programs share the parts, and the last one adds them in order; with more rows each program adds all parts. So
results are batch invariant.

On the fused decode path (`Fusion`) sums are scaled by the 1 / rms of a deferred RMSNorm, or added to the residual stream
with the next norm deferred, as kernels/gemm/small_batch.py does it. The experts of a single token share their sum like parts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.activation import SILU_HALVES, GateForm, gated_numbers
from holdfast.kernels.fp8 import e4m3_value
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, ResidualStream
from holdfast.kernels.gemm.packed_codes import (
    CHUNK_COLUMNS,
    CODE_ROWS,
    EVEN_ODD_ASM,
    code_base,
    decode_registers,
    decode_texts,
)
from holdfast.kernels.gemm.packed_dequantize import named_planes
from holdfast.kernels.gemm.packed_tiles import _block_pairs
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.packed_kernels import (
    ARRIVED_BYTES,
    MMA_ROWS,
    MOST_SPLIT_ROWS,
    PARTIAL_BYTES,
    code_key,
    has_tiles,
    packed_splits,
)
from holdfast.kernels.triton_compat import (
    constexpr,
    gl,
    gluon_jit,
    gluon_jit_counting,
    hopper,
    kernel_constant,
    next_power_of_two,
)
from holdfast.quant.packed_schemes import PackedScheme
from holdfast.quant.packed_weight import PackedPart

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

MOST_ROWS = 96
"""Above, a dequantized piece and cuBLAS take less time: on an H200 at 128 rows, 30 to 55 % less in three of four products."""
SHARED_BYTES, PROGRAM_BYTES = 228 * 1024, 1024
"""Shared memory of a multiprocessor of Hopper, and what CUDA keeps of it for each program."""
CHUNK = kernel_constant(CHUNK_COLUMNS)
EVEN_ODD = kernel_constant(EVEN_ODD_ASM)
WAIT = kernel_constant("griddepcontrol.wait; // $0")
MEET = kernel_constant("bar.sync 0; // $0")
LAUNCH_DEPENDENTS = kernel_constant("griddepcontrol.launch_dependents; // $0")


class RowBlocks(NamedTuple):
    """Rows of experts' products: blocks of pairs of token and expert (kernels/moe/routing.py)."""

    order: int
    """One of ORDERS."""
    pairs: Tensor
    experts: Tensor
    num_blocks: int
    block_m: int
    sub_blocks: int
    """Blocks of a launch in a block of pairs."""
    num_tokens: int
    top_k: int
    num_pairs: int


class Fusion(NamedTuple):
    """What the fused decode path adds to a product."""

    rows: NormedRows | None = None
    """The rows of the product, if their RMSNorm is deferred. `squares` has those of x."""
    squares: Tensor | None = None
    stream: ResidualStream | None = None
    """The product is added to this stream, whose next RMSNorm is deferred."""
    shares_1S: Tensor | None = None
    """Shares of the experts of a single token: their outputs are summed before they are added to the stream."""

    def arguments(self, unused: Tensor) -> tuple[Tensor, ...]:
        """Return squares, norm weight, scaled rows and shares; `unused` for those that are not there."""
        norm_weight, scaled, squares = unused, unused, self.squares
        if self.stream is not None:
            norm_weight, scaled, squares = self.stream.norm_weight_N, self.stream.scaled_MN, self.stream.scratch.squares
        shares = unused if self.shares_1S is None else self.shares_1S
        return unused if squares is None else squares, norm_weight, scaled, shares


NO_FUSION = Fusion()
ORDERS = ("pairs", "searched", "sorted")
"""Rows of a block of experts: one pair, an expert's pairs among all, or those that are sorted."""
SEARCHED, SORTED = (kernel_constant(ORDERS.index(name)) for name in ("searched", "sorted"))
MOST_BLOCK_ROWS = 64


def block_rows(num_rows: int) -> int:
    """Return the rows of a block."""
    return next((rows for rows in (8, 16, 32) if num_rows <= rows), MOST_BLOCK_ROWS)


def row_form(num_rows: int) -> tuple[int, bool, bool]:
    """Return the rows of a block, if programs can share parts, and if tiles take the rows: what specializes a kernel."""
    return block_rows(num_rows), num_rows <= MOST_SPLIT_ROWS, num_rows <= MOST_ROWS


def num_stages(block_m: int, chunk_bytes: int, scale_bytes: int) -> int:
    """Return the chunks in shared memory: at least three, if three programs or else two can share a multiprocessor."""
    stage = MMA_ROWS * chunk_bytes + 2 * CHUNK_COLUMNS * block_m
    found = [(SHARED_BYTES // programs - PROGRAM_BYTES - scale_bytes) // stage for programs in (3, 2)]
    return max(2, min(4, next((stages for stages in found if stages >= 3), found[-1])))


def takes_rows(x_TK: Tensor) -> bool:
    """Return True for rows on a GPU with mma.sync of bfloat16 and cp.async."""
    return (
        gl is not None
        and x_TK.is_cuda
        and x_TK.dtype in (torch.bfloat16, torch.float16)
        and x_TK.stride(0) % 16 == 0
        and torch.cuda.get_device_capability(x_TK.device)[0] >= 8
    )


def takes(x_TK: Tensor, scheme: PackedScheme, is_invariant: bool = False) -> bool:
    """Return True if these tiles take the rows; if `is_invariant`, any number of them."""
    is_few = is_invariant or x_TK.shape[0] <= MOST_ROWS
    return is_few and takes_rows(x_TK) and has_tiles(scheme, x_TK.shape[1])


def packed_mma(
    x_TK: Tensor,
    part: PackedPart,
    bias_N: Tensor | None,
    out_TN: Tensor,
    room_X: Tensor,
    matrix: int = 0,
    gated: bool = False,
    form: GateForm = SILU_HALVES,
    fusion: Fusion = NO_FUSION,
) -> Tensor:
    """Multiply rows by one matrix of a part, plus a bias, into `out_TN`, in its type. `room_X` begins with zeroed counters.

    If `gated`, the rows of the matrix are gates and ups, as `form` says. With a stream in `fusion`, `out_TN` is the stream.
    """
    num_rows, size_n = x_TK.shape[0], out_TN.shape[1]
    assert part.num_rows == size_n * (2 if gated else 1), f"{part.shape=} {out_TN.shape=} {gated=}"
    splits, block_m = packed_splits(part.num_rows, x_TK.shape[1]), block_rows(num_rows)
    width = -(-part.num_rows // MMA_ROWS) * MMA_ROWS
    is_shared = splits > 1 and num_rows <= MOST_SPLIT_ROWS and 4 * splits * block_m * width <= PARTIAL_BYTES
    needed = ARRIVED_BYTES + (4 * splits * num_rows * width if is_shared else 0)
    assert needed <= room_X.numel(), f"{room_X.numel()} bytes of scratch for {needed}"
    assert 4 * (width // MMA_ROWS) <= ARRIVED_BYTES or not is_shared, f"{width} rows have more blocks than counters"
    arrived, partials = room_X[:ARRIVED_BYTES].view(torch.int32), room_X[ARRIVED_BYTES:].view(torch.float32)
    grid = -(-num_rows // block_m), width // MMA_ROWS, splits if is_shared else 1
    numbers = num_rows, x_TK.stride(0), out_TN.stride(0), size_n, matrix * part.num_rows, 1 if is_shared else splits
    flags = {
        "IS_DENSE": True, "ORDER": 0, "TOP_K": 1, "PAIRS_PER_ROW": 1, "SUB_BLOCKS": 1, "NUM_SPLITS": splits,
        "IS_SHARED": is_shared, "WAITS_LATE": True, "SUMS_PAIRS": False,
    }  # fmt: skip
    tensors = partials, arrived, arrived, arrived
    _launch(grid, x_TK, part, bias_N, out_TN, tensors, numbers, block_m, flags, gated, form, fusion)
    return out_TN


def num_squares(size_n: int) -> int:
    """Return the sums of squares of a row that a product with so many outputs leaves beside the residual stream."""
    return -(-size_n // MMA_ROWS)


def packed_experts(
    x_XK: Tensor,
    part: PackedPart,
    bias_EN: Tensor | None,
    out_PN: Tensor,
    blocks: RowBlocks,
    gated: bool,
    form: GateForm,
) -> Tensor:
    """Multiply each pair's row by the matrix of its expert, plus its bias, into its row of `out_PN`; others stay."""
    assert part.num_rows == out_PN.shape[1] * (2 if gated else 1), f"{part.shape=} {out_PN.shape=} {gated=}"
    grid = blocks.num_blocks * blocks.sub_blocks, -(-part.num_rows // MMA_ROWS), 1
    numbers = blocks.num_tokens, x_XK.stride(0), out_PN.stride(0), out_PN.shape[1], 0, 1
    flags = {
        "IS_DENSE": False, "ORDER": blocks.order, "TOP_K": blocks.top_k, "PAIRS_PER_ROW": blocks.num_pairs // len(x_XK),
        "SUB_BLOCKS": blocks.sub_blocks, "NUM_SPLITS": 1, "IS_SHARED": False, "WAITS_LATE": False, "SUMS_PAIRS": False,
    }  # fmt: skip
    tensors = out_PN, blocks.experts, blocks.pairs, blocks.experts
    _launch(grid, x_XK, part, bias_EN, out_PN, tensors, numbers, blocks.block_m, flags, gated, form, NO_FUSION)
    return out_PN


def packed_experts_add(
    x_SK: Tensor, part: PackedPart, bias_EN: Tensor | None, ids_1S: Tensor, room_X: Tensor, fusion: Fusion
) -> NormedRows:
    """Add the sum of a single token's experts, weighted by shares, to the stream, with the next RMSNorm deferred.

    A program reads ids before its wait. So the kernel before it must wait for them before it triggers this one, as the
    tiles of gate and up do. The token has no experts of other ranks.
    """
    stream, (top_k, size_k) = fusion.stream, x_SK.shape
    assert stream is not None, "the sum of experts is added to a stream"
    assert fusion.shares_1S is not None, "the sum of experts takes shares"
    size_n = stream.x_MN.shape[1]
    assert part.shape[1:] == (size_n, size_k), f"{part.shape=} {x_SK.shape=} {stream.x_MN.shape=}"
    assert ids_1S.shape == fusion.shares_1S.shape == (1, top_k), f"{ids_1S.shape=} {fusion.shares_1S.shape=}"
    num_blocks = num_squares(size_n)
    needed = ARRIVED_BYTES + 4 * top_k * num_blocks * MMA_ROWS
    assert needed <= room_X.numel(), f"{room_X.numel()} bytes of scratch for {needed}"
    assert 4 * num_blocks <= ARRIVED_BYTES, f"{size_n} rows have more blocks than counters"
    arrived, partials = room_X[:ARRIVED_BYTES].view(torch.int32), room_X[ARRIVED_BYTES:].view(torch.float32)
    numbers = 1, x_SK.stride(0), stream.x_MN.stride(0), size_n, 0, 1
    flags = {
        "IS_DENSE": False, "ORDER": 0, "TOP_K": top_k, "PAIRS_PER_ROW": 1, "SUB_BLOCKS": 1, "NUM_SPLITS": 1,
        "IS_SHARED": True, "WAITS_LATE": True, "SUMS_PAIRS": True,
    }  # fmt: skip
    tensors = partials, arrived, ids_1S, ids_1S
    out, grid = stream.x_MN, (top_k, num_blocks, 1)
    _launch(grid, x_SK, part, bias_EN, out, tensors, numbers, block_rows(1), flags, False, SILU_HALVES, fusion)
    return NormedRows(stream.scaled_MN, num_blocks, stream.eps)


def _launch(
    grid: tuple[int, int, int],
    x_XK: Tensor,
    part: PackedPart,
    bias: Tensor | None,
    out_XN: Tensor,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    block_m: int,
    flags: dict[str, Any],
    gated: bool,
    form: GateForm,
    fusion: Fusion,
) -> None:
    """Launch the kernel with the planes of a part."""
    scheme, planes, size_k = part.scheme, named_planes(part), x_XK.shape[1]
    rows, stream = fusion.rows, fusion.stream
    normed = (1, 0.0) if rows is None else (rows.num_squares, rows.eps)
    assert has_tiles(scheme, size_k), f"{scheme.title} with {size_k} columns"
    key = code_key(scheme) or ""
    row, is_bfloat16 = CODE_ROWS[key], x_XK.dtype == torch.bfloat16
    codes, scales, per_byte = planes["codes"], planes["scales"], scheme.plane("codes").columns
    group = min(scheme.group_columns or CHUNK_COLUMNS, CHUNK_COLUMNS)
    scale_bytes = 4 * MMA_ROWS * (CHUNK_COLUMNS // group) * (2 if row.has_offset else 1)
    packed_mma_kernel[grid](
        x_XK, codes.view(torch.uint8), (planes[row.extra] if row.extra else codes).view(torch.int32),
        scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales,
        *(planes.get(name, scales) for name in ("mins", "zeros", "d", "dmin", "second")),
        out_XN if bias is None else bias, out_XN, *tensors, *fusion.arguments(out_XN), *numbers, *normed,
        KEY=key, KIND=row.kind, ASM=decode_texts(key, is_bfloat16), REGISTERS=decode_registers(row.kind),
        BASE=code_base(key, is_bfloat16), HAS_OFFSET=row.has_offset, EXTRA=row.extra_bytes,
        CODE_BYTES=CHUNK_COLUMNS // per_byte, SIZE_K=size_k,
        GROUP=scheme.group_columns or size_k, HALF=scheme.half_bytes if per_byte > 1 else 0, SECOND=scheme.second,
        HAS_BIAS=bias is not None, DEFERRED_NORM=rows is not None, RESIDUAL=stream is not None,
        OFFSET=0.0 if stream is None else stream.offset, BLOCK_J=next_power_of_two(normed[0]), BLOCK_M=block_m, BLOCK_N=MMA_ROWS,
        NUM_STAGES=num_stages(block_m, CHUNK_COLUMNS // per_byte + row.extra_bytes, scale_bytes), num_warps=4,
        **flags, **form.flags(gated), **pdl_flags(x_XK),
    )  # fmt: skip


@gluon_jit
def _raw_scales(
    p_scales, p_mins, p_zeros, p_d, p_dmin, p_second, b_rows, i_chunk, layout: constexpr, NUM_SCALES: constexpr,
    KEY: constexpr, SIZE_K: constexpr, GROUP: constexpr,
):  # fmt: skip
    """Load what the scales of a chunk are made of, [G, N] each; zeros after the last column."""
    STEP: constexpr = CHUNK // NUM_SCALES
    NUM_GROUPS: constexpr = (SIZE_K + GROUP - 1) // GROUP
    NUM_BLOCKS: constexpr = SIZE_K // CHUNK
    o_k = i_chunk * CHUNK + gl.arange(0, NUM_SCALES, gl.SliceLayout(1, layout))[:, None] * STEP
    m_g = o_k < SIZE_K
    b_rows = b_rows[None, :]
    o_g = b_rows * NUM_GROUPS + o_k // GROUP
    b_scales = gl.load(p_scales + o_g, mask=m_g, other=0)
    b_mins = b_scales
    b_d = b_scales
    b_dmin = b_scales
    if KEY == "q4_1" or KEY == "q5_1" or KEY == "q4_k" or KEY == "q5_k":
        b_mins = gl.load(p_mins + o_g, mask=m_g, other=0)
    if KEY == "int4_zeros":
        b_mins = gl.load(p_zeros + o_g, mask=m_g, other=0)
    if KEY == "q4_k" or KEY == "q5_k" or KEY == "q6_k" or KEY == "iq4_xs":
        b_d = gl.load(p_d + b_rows * NUM_BLOCKS + i_chunk, mask=i_chunk < NUM_BLOCKS, other=0.0)
    if KEY == "q4_k" or KEY == "q5_k":
        b_dmin = gl.load(p_dmin + b_rows * NUM_BLOCKS + i_chunk, mask=i_chunk < NUM_BLOCKS, other=0.0)
    if KEY == "nvfp4":
        b_d = gl.load(p_second + b_rows)
    return b_scales, b_mins, b_d, b_dmin


@gluon_jit
def _keep_scales(
    b_scales, b_mins, b_d, b_dmin, s_scales, s_offsets, KEY: constexpr, SECOND: constexpr, BASE: constexpr,
    HAS_OFFSET: constexpr,
):  # fmt: skip
    """Store to shared memory, by group, the float32 factors of sums of codes, and of sums of inputs."""
    if KEY == "block_mxfp4":
        b_byte = b_scales.to(gl.int32)
        # Half of a power of two, for doubled numbers: two of them are subnormal.
        b_small = gl.where(b_byte == 0, 0x200000, 0x400000)
        b_s = gl.where(b_byte < 2, b_small, (b_byte - 1) << 23).to(gl.float32, bitcast=True)
    elif KEY == "nvfp4":
        b_s = e4m3_value(b_scales.to(gl.int32))
        if SECOND == "scales_over":
            b_s = b_s / b_d * 0.5
        else:
            b_s = b_s * b_d * 0.5
    else:
        b_s = b_scales.to(gl.float32)
        if KEY == "q4_k" or KEY == "q5_k" or KEY == "q6_k" or KEY == "iq4_xs":
            b_s *= b_d.to(gl.float32)
    s_scales.store(b_s)
    if HAS_OFFSET:
        if KEY == "q4_1" or KEY == "q5_1":
            b_c = b_mins.to(gl.float32) - BASE * b_s
        elif KEY == "q4_k" or KEY == "q5_k":
            b_c = -(b_mins.to(gl.float32) * b_dmin.to(gl.float32)) - BASE * b_s
        else:
            b_c = -(b_mins.to(gl.float32) + BASE) * b_s
        s_offsets.store(b_c)


@gluon_jit
def _begin_chunk(
    p_codes, p_extra, b_codes_rows, b_extra_rows, s_codes, s_extra, i_chunk, end, SIZE_K: constexpr,
    CODE_BYTES: constexpr, EXTRA: constexpr,
):  # fmt: skip
    """Start to copy a chunk's codes to shared memory: zeros from column `end` on."""
    codes: constexpr = gl.BlockedLayout([1, 16], [4 * 128 // CODE_BYTES, CODE_BYTES // 16], [gl.num_warps(), 1], [1, 0])
    PER_BYTE: constexpr = CHUNK // CODE_BYTES
    o_b = i_chunk * CODE_BYTES + gl.arange(0, CODE_BYTES, gl.SliceLayout(0, codes))[None, :]
    p_c = p_codes + b_codes_rows[:, None] * (SIZE_K // PER_BYTE) + o_b
    hopper.async_copy.async_copy_global_to_shared(s_codes, p_c, mask=o_b < end // PER_BYTE)
    if EXTRA > 0:
        # Words: a row of fifth bits may begin at any of them.
        extra: constexpr = gl.BlockedLayout([1, 4], [32 * 16 // EXTRA, EXTRA // 16], [gl.num_warps(), 1], [1, 0])
        WORDS: constexpr = SIZE_K * EXTRA // (4 * CHUNK)
        o_w = i_chunk * (EXTRA // 4) + gl.arange(0, EXTRA // 4, gl.SliceLayout(0, extra))[None, :]
        p_e = p_extra + b_extra_rows[:, None] * WORDS + o_w
        hopper.async_copy.async_copy_global_to_shared(s_extra, p_e, mask=o_w < end * EXTRA // (4 * CHUNK))


@gluon_jit
def _begin_rows(p_x, b_rows, m_rows, s_x, i_chunk, end):
    """Start to copy a chunk of a block's inputs: zeros for padding and from column `end` on."""
    rows: constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    o_k = i_chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, rows))[None, :]
    m_x = m_rows[:, None] & (o_k < end)
    hopper.async_copy.async_copy_global_to_shared(s_x, p_x + b_rows[:, None] + o_k, mask=m_x)


@gluon_jit
def _decode(
    b_w, s_extra, o_offset, v: constexpr, KIND: constexpr, TYPE: constexpr, ASM: constexpr, REGISTERS: constexpr
):
    """Decode sixteen bytes of each row: two operands of exact integers."""
    asm: constexpr = ASM[v]
    weight: constexpr = b_w.type.layout
    if KIND == "fifth":
        b_f = s_extra.slice(v, 1, dim=1).load(weight)
        b_f, _ = gl.broadcast(b_f, o_offset)
        b_low, b_high = gl.inline_asm_elementwise(
            asm,
            REGISTERS,
            [b_w, b_f, o_offset],
            (gl.bfloat16, gl.bfloat16) if gl.bfloat16 == TYPE else (gl.float16, gl.float16),
            True,
            4,
        )
    elif KIND == "fifth_k":
        b_f = s_extra.slice(v % 2 * 16, 16, dim=1).load(weight)
        b_low, b_high = gl.inline_asm_elementwise(
            asm,
            REGISTERS,
            [b_w, b_f],
            (gl.bfloat16, gl.bfloat16) if gl.bfloat16 == TYPE else (gl.float16, gl.float16),
            True,
            4,
        )
    elif KIND == "six":
        b_f = s_extra.slice(v // 4 * 32 + v % 2 * 16, 16, dim=1).load(weight)
        b_low, b_high = gl.inline_asm_elementwise(
            asm,
            REGISTERS,
            [b_w, b_f],
            (gl.bfloat16, gl.bfloat16) if gl.bfloat16 == TYPE else (gl.float16, gl.float16),
            True,
            4,
        )
    else:
        b_low, b_high = gl.inline_asm_elementwise(
            asm,
            REGISTERS,
            [b_w],
            (gl.bfloat16, gl.bfloat16) if gl.bfloat16 == TYPE else (gl.float16, gl.float16),
            True,
            4,
        )
    return b_low, b_high


@gluon_jit
def _inputs(s_x, first: constexpr, layout: constexpr):
    """Load sixteen neighbouring inputs of all rows: [16, M]."""
    return s_x.slice(first, 16, dim=1).permute((1, 0)).load(layout)


@gluon_jit
def _even_odd(b_words, TYPE: constexpr):
    """Return the first and the second inputs of words."""
    return gl.inline_asm_elementwise(
        EVEN_ODD,
        "=r,=r,=r,=r,r,r,r,r",
        [b_words],
        (gl.bfloat16, gl.bfloat16) if gl.bfloat16 == TYPE else (gl.float16, gl.float16),
        True,
        4,
    )


@gluon_jit
def _scaled(b_y, b_sum, b_inputs, s_scales, s_offsets, group: constexpr, HAS_OFFSET: constexpr):
    """Add the sums of a group, times its factors."""
    b_y += b_sum * s_scales.slice(group, 1, dim=0).permute((1, 0)).load(b_y.type.layout)
    if HAS_OFFSET:
        b_y += b_inputs * s_offsets.slice(group, 1, dim=0).permute((1, 0)).load(b_y.type.layout)
    return b_y


@gluon_jit
def _multiply_chunk(
    b_y, s_codes, s_extra, s_x, s_scales, s_offsets, o_offset, b_ones, KIND: constexpr, HALF: constexpr,
    GROUP: constexpr, HAS_OFFSET: constexpr, TYPE: constexpr, ASM: constexpr, REGISTERS: constexpr,
):  # fmt: skip
    """Add the products of a chunk. Each group of columns has sums of its own, which meet its factors once."""
    mma: constexpr = b_y.type.layout
    weight: constexpr = gl.DotOperandLayout(0, mma, 4)
    rows: constexpr = gl.DotOperandLayout(1, mma, 4)
    zeros = gl.zeros_like(b_y)
    if KIND == "bytes":
        for v in gl.static_range(8):
            b_sum = zeros
            for part in gl.static_range(2):
                b_w = s_codes.slice(32 * v + 16 * part, 16, dim=1).load(weight)
                b_w = gl.inline_asm_elementwise(
                    ASM[0], REGISTERS, [b_w], gl.bfloat16 if gl.bfloat16 == TYPE else gl.float16, True, 4
                )
                b_sum = hopper.mma_v2(b_w, _inputs(s_x, 32 * v + 16 * part, rows), b_sum)
            b_y = _scaled(b_y, b_sum, b_sum, s_scales, s_offsets, v, HAS_OFFSET)
    elif HALF == 1 and GROUP == 16:
        # A product has the columns of two groups: inputs of one are zeros.
        o_k = gl.arange(0, 16, gl.SliceLayout(1, rows))[:, None]
        for v in gl.static_range(8):
            b_w = s_codes.slice(16 * v, 16, dim=1).load(weight)
            b_low, b_high = _decode(b_w, s_extra, o_offset, v, KIND, TYPE, ASM, REGISTERS)
            b_words = s_x.slice(16 * v, 16, dim=1).permute((1, 0)).load(rows)
            for part in gl.static_range(2):
                b_even, b_odd = _even_odd(gl.where(o_k // 8 == part, b_words, 0), TYPE)
                b_sum = hopper.mma_v2(b_low, b_even, zeros)
                b_sum = hopper.mma_v2(b_high, b_odd, b_sum)
                b_y = _scaled(b_y, b_sum, b_sum, s_scales, s_offsets, 2 * v + part, HAS_OFFSET)
    elif HALF == 1 or HALF == 16:
        SLICES: constexpr = GROUP // 32 if GROUP < CHUNK else 8
        b_sum = zeros
        b_inputs = zeros
        for v in gl.static_range(8):
            if v % SLICES == 0:
                b_sum = zeros
                b_inputs = zeros
            b_w = s_codes.slice(16 * v, 16, dim=1).load(weight)
            b_low, b_high = _decode(b_w, s_extra, o_offset, v, KIND, TYPE, ASM, REGISTERS)
            if HALF == 1:
                b_words = s_x.slice(16 * v, 16, dim=1).permute((1, 0)).load(rows)
                b_first, b_second = _even_odd(b_words, TYPE)
            else:
                b_first = _inputs(s_x, 32 * v, rows)
                b_second = _inputs(s_x, 32 * v + 16, rows)
            b_sum = hopper.mma_v2(b_low, b_first, b_sum)
            b_sum = hopper.mma_v2(b_high, b_second, b_sum)
            if HAS_OFFSET:
                b_inputs = hopper.mma_v2(b_ones, b_first, b_inputs)
                b_inputs = hopper.mma_v2(b_ones, b_second, b_inputs)
            if v % SLICES == SLICES - 1:
                b_y = _scaled(b_y, b_sum, b_inputs, s_scales, s_offsets, v // SLICES, HAS_OFFSET)
    elif HALF == 32:
        for i in gl.static_range(4):
            b_low_sum = zeros
            b_high_sum = zeros
            b_low_inputs = zeros
            b_high_inputs = zeros
            for part in gl.static_range(2):
                b_w = s_codes.slice(32 * i + 16 * part, 16, dim=1).load(weight)
                b_low, b_high = _decode(b_w, s_extra, o_offset, 2 * i + part, KIND, TYPE, ASM, REGISTERS)
                b_first = _inputs(s_x, 64 * i + 16 * part, rows)
                b_second = _inputs(s_x, 64 * i + 32 + 16 * part, rows)
                b_low_sum = hopper.mma_v2(b_low, b_first, b_low_sum)
                b_high_sum = hopper.mma_v2(b_high, b_second, b_high_sum)
                if HAS_OFFSET:
                    b_low_inputs = hopper.mma_v2(b_ones, b_first, b_low_inputs)
                    b_high_inputs = hopper.mma_v2(b_ones, b_second, b_high_inputs)
            b_y = _scaled(b_y, b_low_sum, b_low_inputs, s_scales, s_offsets, 2 * i, HAS_OFFSET)
            b_y = _scaled(b_y, b_high_sum, b_high_inputs, s_scales, s_offsets, 2 * i + 1, HAS_OFFSET)
    else:
        gl.static_assert(HALF == 64 and GROUP == 16)
        for v in gl.static_range(8):
            b_w = s_codes.slice(16 * v, 16, dim=1).load(weight)
            b_low, b_high = _decode(b_w, s_extra, o_offset, v, KIND, TYPE, ASM, REGISTERS)
            b_sum = hopper.mma_v2(b_low, _inputs(s_x, v // 4 * 128 + v % 4 * 16, rows), zeros)
            b_y = _scaled(b_y, b_sum, b_sum, s_scales, s_offsets, v // 4 * 8 + v % 4, HAS_OFFSET)
            b_sum = hopper.mma_v2(b_high, _inputs(s_x, v // 4 * 128 + 64 + v % 4 * 16, rows), zeros)
            b_y = _scaled(b_y, b_sum, b_sum, s_scales, s_offsets, v // 4 * 8 + 4 + v % 4, HAS_OFFSET)
    return b_y


@gluon_jit
def _weight_rows(o_t, i_n, size_n, GATED: constexpr, INTERLEAVED: constexpr):
    """Return rows of the weight of a tile's rows, at most the last. If gated, of 16 rows eight are gates and eight their ups."""
    if GATED:
        o_n = gl.minimum(i_n // 2 + o_t // 16 * 8 + o_t % 8, size_n - 1)
        if INTERLEAVED:
            b_rows = 2 * o_n + o_t // 8 % 2
        else:
            b_rows = o_n + o_t // 8 % 2 * size_n
    else:
        b_rows = gl.minimum(i_n + o_t, size_n - 1)
    return b_rows


@gluon_jit
def _expert_block(
    p_pairs, p_experts, num_tokens, ORDER: constexpr, TOP_K: constexpr, SUB_BLOCKS: constexpr, BLOCK_M: constexpr
):
    """Return the expert of a block, -1 for none, and its pairs, -1 for padding."""
    i_block = gl.program_id(0)
    o_m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    if ORDER == SEARCHED:
        expert, b_pairs = _block_pairs(p_pairs, p_experts, i_block, num_tokens, o_m, False, TOP_K, BLOCK_M)
    else:
        expert = gl.load(p_experts + i_block // SUB_BLOCKS)
        if ORDER == SORTED:
            b_pairs = gl.load(p_pairs + i_block * BLOCK_M + o_m)
        else:
            b_pairs = gl.where(o_m == 0, i_block, -1)
    return expert, b_pairs


@gluon_jit_counting("num_rows", "first_row", "num_parts", "num_squares")
def packed_mma_kernel(
    p_x, p_codes, p_extra, p_scales, p_mins, p_zeros, p_d, p_dmin, p_second, p_bias, p_out, p_partials, p_arrived,
    p_pairs, p_experts, p_squares, p_norm_weight, p_scaled, p_shares,
    num_rows, x_stride, out_stride, size_n, first_row, num_parts, num_squares, eps,
    KEY: constexpr, KIND: constexpr, ASM: constexpr, REGISTERS: constexpr, SIZE_K: constexpr,
    GROUP: constexpr, HALF: constexpr, SECOND: constexpr, BASE: constexpr, HAS_OFFSET: constexpr, EXTRA: constexpr,
    CODE_BYTES: constexpr, HAS_BIAS: constexpr, IS_DENSE: constexpr, ORDER: constexpr, TOP_K: constexpr, PAIRS_PER_ROW: constexpr,
    SUB_BLOCKS: constexpr, GATED: constexpr, INTERLEAVED: constexpr, LIMIT: constexpr, IS_SCALED: constexpr,
    NUM_SPLITS: constexpr, IS_SHARED: constexpr, WAITS_LATE: constexpr, SUMS_PAIRS: constexpr,
    DEFERRED_NORM: constexpr, RESIDUAL: constexpr, OFFSET: constexpr, BLOCK_J: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
    NUM_STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    TYPE: constexpr = p_x.dtype.element_ty
    NUM_WARPS: constexpr = gl.num_warps()
    mma: constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1], [16, 8])
    weight: constexpr = gl.DotOperandLayout(0, mma, 4)
    copied: constexpr = gl.BlockedLayout([1, 16], [4 * 128 // CODE_BYTES, CODE_BYTES // 16], [NUM_WARPS, 1], [1, 0])
    copied_rows: constexpr = gl.BlockedLayout([1, 8], [1, 32], [NUM_WARPS, 1], [1, 0])
    STEP: constexpr = GROUP if GROUP < CHUNK else CHUNK
    NUM_SCALES: constexpr = CHUNK // STEP
    scaled: constexpr = gl.BlockedLayout([NUM_SCALES, 1], [1, 32], [1, NUM_WARPS], [0, 1])
    lines: constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    NUM_CHUNKS: constexpr = (SIZE_K + CHUNK - 1) // CHUNK
    PART_CHUNKS: constexpr = (NUM_CHUNKS + NUM_SPLITS - 1) // NUM_SPLITS
    weight_rows = size_n * (2 if GATED else 1)
    i_n = gl.program_id(1) * BLOCK_N
    if not WAITS_LATE:  # noqa: SIM102 a flag of its own, which tests follow
        if PDL:
            gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, False, 1)
    if IS_DENSE:
        base_row = first_row.to(gl.int64)
        o_m = gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, copied_rows))
        m_rows = o_m < num_rows
        b_rows = gl.minimum(o_m, num_rows - 1).to(gl.int64) * x_stride
    else:
        expert, b_pairs = _expert_block(p_pairs, p_experts, num_rows, ORDER, TOP_K, SUB_BLOCKS, BLOCK_M)
        if not WAITS_LATE:  # noqa: SIM102
            if expert < 0:
                return
        base_row = expert.to(gl.int64) * weight_rows
        b_taken = gl.convert_layout(b_pairs, gl.SliceLayout(1, copied_rows))
        m_rows = b_taken >= 0
        b_rows = (gl.maximum(b_taken, 0) // PAIRS_PER_ROW).to(gl.int64) * x_stride
    # Rows after the last output read the last again.
    o_t = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied))
    b_copied = base_row + _weight_rows(o_t, i_n, size_n, GATED, INTERLEAVED)
    o_t = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scaled))
    b_scaled = base_row + _weight_rows(o_t, i_n, size_n, GATED, INTERLEAVED)
    b_extra = b_copied
    if EXTRA > 0:
        extra: constexpr = gl.BlockedLayout([1, 4], [32 * 16 // EXTRA, EXTRA // 16], [NUM_WARPS, 1], [1, 0])
        o_t = gl.arange(0, BLOCK_N, gl.SliceLayout(1, extra))
        b_extra = base_row + _weight_rows(o_t, i_n, size_n, GATED, INTERLEAVED)
    s_codes = gl.allocate_shared_memory(
        gl.uint8, [NUM_STAGES, BLOCK_N, CODE_BYTES], gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    )
    # Neighbours are read as words, by 64 bytes of a row.
    s_x = gl.allocate_shared_memory(
        TYPE, [NUM_STAGES, BLOCK_M, CHUNK], gl.SwizzledSharedLayout(32 if HALF == 1 else 16, 1, 8, [1, 0])
    )
    s_scales = gl.allocate_shared_memory(gl.float32, [NUM_SCALES, BLOCK_N], lines)
    s_offsets = s_scales
    if HAS_OFFSET:
        s_offsets = gl.allocate_shared_memory(gl.float32, [NUM_SCALES, BLOCK_N], lines)
    s_extra = s_codes
    if EXTRA > 0:
        s_extra = gl.allocate_shared_memory(
            gl.int32, [NUM_STAGES, BLOCK_N, EXTRA // 4], gl.SwizzledSharedLayout(4, 128 // EXTRA, EXTRA // 16, [1, 0])
        )
    o_offset = gl.arange(0, 16, gl.SliceLayout(0, weight)) // 4 * 4
    b_ones = gl.full([BLOCK_N, 16], 1.0, TYPE, weight)
    b_all = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma)
    # Weights are constants, so their first chunks may come before the wait.
    first = gl.program_id(2) * PART_CHUNKS
    last = gl.minimum(first + PART_CHUNKS, NUM_CHUNKS)
    end = gl.minimum(last * CHUNK, SIZE_K)
    for i in gl.static_range(NUM_STAGES - 1):
        _begin_chunk(
            p_codes, p_extra, b_copied, b_extra, s_codes.index(i), s_extra.index(i), first + i, end,
            SIZE_K, CODE_BYTES, EXTRA,
        )  # fmt: skip
    b_s, b_c, b_d, b_dmin = _raw_scales(
        p_scales, p_mins, p_zeros, p_d, p_dmin, p_second, b_scaled, first, scaled, NUM_SCALES, KEY, SIZE_K, GROUP
    )
    if WAITS_LATE:  # noqa: SIM102
        if PDL:
            gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, False, 1)
    for i_part in range(num_parts):
        if i_part > 0:
            first += PART_CHUNKS
            last = gl.minimum(first + PART_CHUNKS, NUM_CHUNKS)
            end = gl.minimum(last * CHUNK, SIZE_K)
            for i in gl.static_range(NUM_STAGES - 1):
                _begin_chunk(
                    p_codes, p_extra, b_copied, b_extra, s_codes.index(i), s_extra.index(i), first + i, end,
                    SIZE_K, CODE_BYTES, EXTRA,
                )  # fmt: skip
            b_s, b_c, b_d, b_dmin = _raw_scales(
                p_scales, p_mins, p_zeros, p_d, p_dmin, p_second, b_scaled, first, scaled, NUM_SCALES, KEY, SIZE_K,
                GROUP,
            )  # fmt: skip
        for i in gl.static_range(NUM_STAGES - 1):
            _begin_rows(p_x, b_rows, m_rows, s_x.index(i), first + i, end)
            hopper.async_copy.commit_group()
        _keep_scales(b_s, b_c, b_d, b_dmin, s_scales, s_offsets, KEY, SECOND, BASE, HAS_OFFSET)
        b_y = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma)
        slot = 0
        free_slot = NUM_STAGES - 1
        for i_chunk in range(first, last):
            hopper.async_copy.wait_group(NUM_STAGES - 2)
            i_next = i_chunk + NUM_STAGES - 1
            _begin_chunk(
                p_codes, p_extra, b_copied, b_extra, s_codes.index(free_slot), s_extra.index(free_slot), i_next, end,
                SIZE_K, CODE_BYTES, EXTRA,
            )  # fmt: skip
            _begin_rows(p_x, b_rows, m_rows, s_x.index(free_slot), i_next, end)
            hopper.async_copy.commit_group()
            b_s, b_c, b_d, b_dmin = _raw_scales(
                p_scales, p_mins, p_zeros, p_d, p_dmin, p_second, b_scaled, i_chunk + 1, scaled, NUM_SCALES, KEY,
                SIZE_K, GROUP,
            )  # fmt: skip
            s_rows = s_x.index(slot)
            if HALF == 1:
                s_rows = s_rows._reinterpret(gl.int32, [BLOCK_M, CHUNK // 2], gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
            s_bits = s_extra.index(slot)
            if KIND == "fifth_k" or KIND == "six":
                s_bits = s_bits._reinterpret(
                    gl.uint8, [BLOCK_N, EXTRA], gl.SwizzledSharedLayout(16, 128 // EXTRA, EXTRA // 16, [1, 0])
                )
            b_y = _multiply_chunk(
                b_y, s_codes.index(slot), s_bits, s_rows, s_scales, s_offsets, o_offset[None, :], b_ones,
                KIND, HALF, GROUP, HAS_OFFSET, TYPE, ASM, REGISTERS,
            )  # fmt: skip
            _keep_scales(b_s, b_c, b_d, b_dmin, s_scales, s_offsets, KEY, SECOND, BASE, HAS_OFFSET)
            slot = gl.where(slot == NUM_STAGES - 1, 0, slot + 1)
            free_slot = gl.where(free_slot == NUM_STAGES - 1, 0, free_slot + 1)
        hopper.async_copy.wait_group(0)
        b_all += b_y
    if DEFERRED_NORM:
        # Loaded here and summed later: programs exchange partial sums meanwhile.
        squared: constexpr = gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0])
        o_m = gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, squared))
        o_j = gl.arange(0, BLOCK_J, gl.SliceLayout(0, squared))
        m_j = (o_m < num_rows)[:, None] & (o_j < num_squares)[None, :]
        b_squares = gl.load(p_squares + o_m[:, None] * num_squares + o_j[None, :], mask=m_j, other=0.0)
    if PDL:
        # Release late: programs of the next kernel would take occupancy from this one.
        gl.inline_asm_elementwise(LAUNCH_DEPENDENTS, "=r", [], gl.int32, False, 1)
    o_t = gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))
    i_m = gl.program_id(0) * BLOCK_M
    i_partial = gl.program_id(2)
    NUM_PARTIALS: constexpr = TOP_K if SUMS_PAIRS else NUM_SPLITS
    if SUMS_PAIRS:
        if HAS_BIAS:
            b_bias = gl.load(p_bias + (base_row + _weight_rows(o_t, i_n, size_n, False, False)))
            b_all += b_bias.to(gl.float32)[:, None]
        b_all *= gl.load(p_shares + gl.program_id(0))
        i_m = 0
        i_partial = gl.program_id(0)
    if IS_SHARED:
        o_m = i_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, mma))
        m_partial = (o_t < BLOCK_N)[:, None] & (o_m < num_rows)[None, :]
        width = (weight_rows + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        size = num_rows.to(gl.int64) * width
        o_partial = o_m.to(gl.int64)[None, :] * width + (i_n + o_t)[:, None]
        gl.store(p_partials + i_partial * size + o_partial, b_all, mask=m_partial)
        gl.inline_asm_elementwise(MEET, "=r", [], gl.int32, False, 1)  # Triton 3.6 has no name for it
        arrived = gl.atomic_add(p_arrived + gl.program_id(1), 1, sem="acq_rel")
        if arrived != NUM_PARTIALS - 1:
            return
        gl.store(p_arrived + gl.program_id(1), 0)
    NUM_OUTPUTS: constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    stored: constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, NUM_WARPS], [0, 1])
    o_n = gl.program_id(1) * NUM_OUTPUTS + gl.arange(0, NUM_OUTPUTS, gl.SliceLayout(1, stored))
    if IS_DENSE or SUMS_PAIRS:
        o_row = i_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, stored))
        m_row = o_row < num_rows
    else:
        o_row = gl.convert_layout(b_pairs, gl.SliceLayout(0, stored))
        m_row = o_row >= 0
    o_y = o_row.to(gl.int64)[None, :] * out_stride + o_n[:, None]
    m_y = (o_n < size_n)[:, None] & m_row[None, :]
    if RESIDUAL:
        b_old = gl.load(p_out + o_y, mask=m_y, other=0.0)
        b_norm = gl.load(p_norm_weight + o_n, mask=o_n < size_n, other=0.0).to(gl.float32) + OFFSET
    if IS_SHARED:
        b_all = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma)
        for i in gl.static_range(NUM_PARTIALS):
            b_all += gl.load(p_partials + i * size + o_partial, mask=m_partial, other=0.0, cache_modifier=".cg")
    if DEFERRED_NORM:
        b_rms = gl.rsqrt(gl.sum(b_squares, axis=1) / SIZE_K + eps)
        b_all *= gl.convert_layout(b_rms, gl.SliceLayout(0, mma))[None, :]
    if HAS_BIAS and not SUMS_PAIRS:
        o_bias = base_row - first_row + _weight_rows(o_t, i_n, size_n, GATED, INTERLEAVED)
        b_bias = gl.load(p_bias + o_bias)
        b_all += b_bias.to(gl.float32)[:, None]
    if GATED:
        b_gate, b_up = gl.split(b_all.reshape((BLOCK_N // 16, 2, 8, BLOCK_M)).permute((0, 2, 3, 1)))
        b_all = gated_numbers(b_gate, b_up, LIMIT, IS_SCALED).reshape((BLOCK_N // 2, BLOCK_M))
    b_all = gl.convert_layout(b_all.to(p_out.dtype.element_ty), stored)
    if RESIDUAL:
        b_all = (b_old.to(gl.float32) + b_all.to(gl.float32)).to(p_out.dtype.element_ty)
        b_x = b_all.to(gl.float32)
        b_scaled = (b_x * b_norm[:, None]).to(p_scaled.dtype.element_ty)
        gl.store(p_scaled + o_y, b_scaled, mask=m_y)
        b_sum = gl.sum(gl.where(m_y, b_x * b_x, 0.0), axis=0)
        num_blocks = (size_n + BLOCK_N - 1) // BLOCK_N
        gl.store(p_squares + o_row * num_blocks + gl.program_id(1), b_sum, mask=m_row)
    gl.store(p_out + o_y, b_all, mask=m_y)
