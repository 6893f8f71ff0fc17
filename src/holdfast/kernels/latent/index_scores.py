"""Index scores (DSA) of each row for each stored token, over paged index keys.

T rows, I index heads, D elements of a head, C tokens of the longest context, S slots

    score[t, s] = sum over heads of weight[t, h] * relu(q[t, h] . k[s])      in float32, for s below num_tokens_T[t]
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.fp8 import as_kernels_read, e4m3_value, float32_of
from holdfast.kernels.latent.latent_planes import IndexPlanes, SparseRows
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, jit_counting, next_power_of_two, tl

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

MAX_HEADS, MAX_DIM = 64, 128
"""Most heads and elements of the kernel: all heads of a row are one operand of a product."""
TOKENS_AT_ONCE = 4096
"""Tokens per block of the reference: blocks begin at multiples, so a row's scores do not depend on other rows."""
TOKENS_PER_PROGRAM = 4096
"""Most tokens per program at the longest context, so that one long row does not keep a few programs busy at the end."""
MAX_PAGES = 8
"""Most pages of a block whose ids are scalars; smaller pages are looked up token by token."""
NUM_WARPS = 4
Operands = Literal["e4m3", "bytes", "half", "float32"]
"""Operands of a product: e4m3 codes, codes as half precision if the GPU has no e4m3, 16 bits, float32."""
OPERAND_BYTES: dict[Operands, int] = {"e4m3": 1, "bytes": 2, "half": 2, "float32": 4}


class IndexBlocks(NamedTuple):
    """Blocks of tokens and rows that a program loads."""

    tokens: int
    has_pairs: bool
    """True if two adjacent rows of a sequence share the keys that a program loads."""
    num_stages: int
    programs_per_sm: int
    """Occupancy on Hopper, limited by shared memory."""


def index_blocks(operands: Operands, block_d: int) -> IndexBlocks:
    """Return blocks of 16 KiB of keys, three in flight, beside the queries: at most 97 KiB."""
    size = OPERAND_BYTES[operands]
    return IndexBlocks(min(128, 16384 // (size * block_d)), size < 4, 3, 3 if size == 1 else 2)


def num_splits(num_rows: int, num_columns: int, blocks: IndexBlocks, num_sms: int) -> int:
    """Return the programs per row. Only the rows and the longest context decide, so a graph serves any lengths.

    They fill the GPU once. If they would run long there are more, so that the last wave is short.
    """
    at_once = num_sms * blocks.programs_per_sm
    splits = at_once // num_rows
    if splits * TOKENS_PER_PROGRAM < num_columns:
        splits = max(-(-4 * at_once // num_rows), -(-num_columns // TOKENS_PER_PROGRAM))
    return max(1, min(splits, -(-num_columns // blocks.tokens)))


def pages_of_block(page_tokens: int, block_tokens: int) -> int:
    """Return 1 if a block lies in one page, the number of pages if whole pages make a block, else 0."""
    if page_tokens % block_tokens == 0:
        return 1
    num_pages, rest = divmod(block_tokens, page_tokens)
    return num_pages if rest == 0 and num_pages <= MAX_PAGES else 0


def choose_operands(q_TID: Tensor, planes: IndexPlanes) -> Operands:
    """Choose operands by the types of queries and keys, and by what the device can multiply."""
    if planes.is_quantized:
        is_known = not q_TID.is_cuda or torch.cuda.get_device_capability(q_TID.device) >= (8, 9)
        return "e4m3" if is_known and not is_interpreted() else "bytes"
    dtype = planes.rows_SD.dtype
    is_half = dtype == torch.float16 or (dtype == torch.bfloat16 and not is_interpreted())
    return "half" if is_half and q_TID.dtype == dtype else "float32"


def index_scores_reference(
    q_TID: Tensor, weights_TI: Tensor, planes: IndexPlanes, page_table_NP: Tensor, rows: SparseRows, out_TC: Tensor
) -> Tensor:
    """Write float32 scores of every token that a row sees; the rest of `out_TC`, and rows that select none, stay.

    `weights_TI`: float32, with all factors (head_dim ** -0.5 * heads ** -0.5, and the scale of quantized queries). The launch
    does not depend on lengths: programs read them on the device, so a graph serves any step.
    """
    num_rows = len(q_TID)
    table_rows, num_tokens = (tensor[:num_rows].tolist() for tensor in rows)
    first = 0
    while first < num_rows:
        end = first + 1
        while end < num_rows and table_rows[end] == table_rows[first]:
            end += 1
        for low in range(0, max(num_tokens[first:end]), TOKENS_AT_ONCE):
            high = min(low + TOKENS_AT_ONCE, max(num_tokens[first:end]))
            keys_SD = read_index(planes, page_table_NP[table_rows[first]], low, high)
            for row in range(first, end):
                count = min(num_tokens[row], high) - low
                if count > 0:
                    products_IS = (q_TID[row].float() @ keys_SD[:count].T).relu()
                    out_TC[row, low : low + count] = weights_TI[row].float() @ products_IS
        first = end
    return out_TC


def read_index(planes: IndexPlanes, pages_P: Tensor, low: int, high: int) -> Tensor:
    """Read the index keys of a range of a sequence's tokens as float32 [high - low, D], in plain torch."""
    token_S = torch.arange(low, high, device=pages_P.device)
    slot_S = pages_P[token_S // planes.page_tokens].long() * planes.page_tokens + token_S % planes.page_tokens
    if planes.scales_S1 is None:
        return planes.rows_SD[slot_S].float()
    codes_SD = planes.rows_SD.view(torch.uint8)[slot_S].view(torch.float8_e4m3fn)
    return codes_SD.float() * planes.scales_S1[slot_S]


def index_scores_triton(
    q_TID: Tensor, weights_TI: Tensor, planes: IndexPlanes, page_table_NP: Tensor, rows: SparseRows, out_TC: Tensor
) -> Tensor:
    """Launch one Triton kernel. Tokens are rows of a product and heads its columns, so a thread sums over heads alone.

    A program strides over the blocks of a row's tokens, together with the next row if that is of the same sequence.
    """
    num_rows, num_heads, dim = q_TID.shape
    _check_layout(q_TID, weights_TI, planes, page_table_NP, out_TC)
    if num_rows == 0:
        return out_TC
    operands = choose_operands(q_TID, planes)
    least_d = 32 if operands == "e4m3" else 16  # fewest inputs of a tensor-core product
    block_d, num_columns = max(least_d, next_power_of_two(dim)), out_TC.shape[1]
    blocks, num_sms = index_blocks(operands, block_d), _num_sms(q_TID)
    _score_kernel[(num_rows, num_splits(num_rows, num_columns, blocks, num_sms))](
        q_TID if operands in ("e4m3", "half") else as_kernels_read(q_TID), weights_TI,
        planes.rows_SD if operands in ("e4m3", "half") else as_kernels_read(planes.rows_SD), planes.scales_S1,
        page_table_NP, rows.table_rows_T, rows.num_tokens_T, out_TC, q_TID.stride(0), q_TID.stride(1),
        weights_TI.stride(0), page_table_NP.stride(0), out_TC.stride(0), num_rows,
        OPERANDS=operands, PAIRS=blocks.has_pairs, NUM_HEADS=num_heads, DIM=dim, PAGE_TOKENS=planes.page_tokens,
        PAGES=pages_of_block(planes.page_tokens, blocks.tokens), BLOCK_N=blocks.tokens,
        BLOCK_I=max(16, next_power_of_two(num_heads)), BLOCK_D=block_d, NUM_STAGES=blocks.num_stages,
        num_warps=NUM_WARPS, **pdl_flags(q_TID),
    )  # fmt: skip
    return out_TC


index_scores = operation(reference=index_scores_reference, triton=index_scores_triton)


def _num_sms(tensor: Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def _check_layout(
    q_TID: Tensor, weights_TI: Tensor, planes: IndexPlanes, page_table_NP: Tensor, out_TC: Tensor
) -> None:
    num_heads, dim = q_TID.shape[1:]
    assert num_heads <= MAX_HEADS, f"{num_heads=}: a product takes up to {MAX_HEADS} index heads"
    assert dim <= MAX_DIM, f"{dim=}: a product takes up to {MAX_DIM} elements of a head"
    assert planes.rows_SD.shape[1] == dim, f"{planes.rows_SD.shape=} for {q_TID.shape=}"
    if planes.is_quantized:
        assert q_TID.dtype == torch.float8_e4m3fn, f"{q_TID.dtype=}: quantize_index_queries gives what these keys take"
    for plane in (planes.rows_SD, planes.scales_S1):
        assert plane is None or plane.is_contiguous(), f"{plane.stride()=}: the slots of a plane must lie side by side"
    for rows in (q_TID, weights_TI, page_table_NP, out_TC):
        assert rows.stride(-1) == 1, f"{rows.stride()=}: what belongs to a row must lie side by side"


@jit_counting("out_stride", "num_rows")
def _score_kernel(
    p_q, p_weights, p_keys, p_scales, p_pages, p_table_rows, p_num_tokens, p_out, q_stride, head_stride, weights_stride,
    table_stride, out_stride, num_rows,
    OPERANDS: constexpr, PAIRS: constexpr, NUM_HEADS: constexpr, DIM: constexpr, PAGE_TOKENS: constexpr,
    PAGES: constexpr, BLOCK_N: constexpr, BLOCK_I: constexpr, BLOCK_D: constexpr, NUM_STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    table_row = tl.load(p_table_rows + i_row)
    num_tokens = tl.load(p_num_tokens + i_row)
    # The host wrote lengths before the step; earlier kernels write queries and new keys.
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_row_q = p_q + i_row.to(tl.int64) * q_stride
    p_row_weights = p_weights + i_row.to(tl.int64) * weights_stride
    p_row_out = p_out + i_row.to(tl.int64) * out_stride
    p_row_pages = p_pages + table_row.to(tl.int64) * table_stride
    is_pair = False
    if PAIRS:
        i_other = i_row ^ 1
        m_other = i_other < num_rows
        other_tokens = tl.load(p_num_tokens + i_other, mask=m_other, other=0)
        other_table_row = tl.load(p_table_rows + i_other, mask=m_other, other=-1)
        is_pair = (other_table_row == table_row) & (num_tokens > 0) & (other_tokens > 0)
        if is_pair & (i_row % 2 == 0):
            _score_tokens(
                p_row_q, p_row_weights, p_keys, p_scales, p_row_pages, p_row_out, num_tokens, other_tokens, q_stride,
                head_stride, weights_stride, out_stride, 2, OPERANDS, NUM_HEADS, DIM, PAGE_TOKENS, PAGES, BLOCK_N,
                BLOCK_I, BLOCK_D, NUM_STAGES,
            )  # fmt: skip
    if not is_pair:
        _score_tokens(
            p_row_q, p_row_weights, p_keys, p_scales, p_row_pages, p_row_out, num_tokens, num_tokens, q_stride,
            head_stride, weights_stride, out_stride, 1, OPERANDS, NUM_HEADS, DIM, PAGE_TOKENS, PAGES, BLOCK_N, BLOCK_I,
            BLOCK_D, NUM_STAGES,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def _score_tokens(
    p_q, p_weights, p_keys, p_scales, p_pages, p_out, num_tokens, other_tokens, q_stride, head_stride, weights_stride,
    out_stride,
    ROWS: constexpr, OPERANDS: constexpr, NUM_HEADS: constexpr, DIM: constexpr, PAGE_TOKENS: constexpr,
    PAGES: constexpr, BLOCK_N: constexpr, BLOCK_I: constexpr, BLOCK_D: constexpr, NUM_STAGES: constexpr,
):  # fmt: skip
    """Score a program's blocks of tokens for one row or two. A row's products have one shape either way, so its bits agree."""
    o_n, o_d, o_head = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_I)
    first, step = tl.program_id(1) * BLOCK_N, tl.num_programs(1) * BLOCK_N
    end = tl.maximum(num_tokens, other_tokens)
    if first < end:
        b_q, b_weight = (), ()
        m_head = o_head < NUM_HEADS
        for i in tl.static_range(ROWS):
            p_heads = p_q + i * q_stride + o_head[:, None] * head_stride + o_d[None, :]
            b_x = tl.load(p_heads, mask=m_head[:, None] & (o_d < DIM)[None, :], other=0.0)
            b_q = b_q + (tl.trans(_operand(b_x, OPERANDS)),)
            b_w = tl.load(p_weights + i * weights_stride + o_head, mask=m_head, other=0.0)
            b_weight = b_weight + (b_w.to(tl.float32)[None, :],)
        # Page ids are loaded one block ahead, so no load of keys waits for another load.
        b_next_pages = _pages(p_pages, first, o_n, end, PAGE_TOKENS, PAGES)
        for n in tl.range(first, end, step, num_stages=NUM_STAGES):
            o_slot = _slots(b_next_pages, n, o_n, PAGE_TOKENS, PAGES)
            b_next_pages = _pages(p_pages, n + step, o_n, end, PAGE_TOKENS, PAGES)
            # Slots after a row's tokens may hold anything: a token is one row of the product and affects only its own score.
            p_n = p_keys + (o_slot * DIM)[:, None] + o_d[None, :]
            b_k = tl.load(p_n) if DIM == BLOCK_D else tl.load(p_n, mask=(o_d < DIM)[None, :], other=0.0)
            b_key = _operand(b_k, OPERANDS)
            if p_scales is not None:
                b_scale = tl.load(p_scales + o_slot)
            for i in tl.static_range(ROWS):
                # tf32x3: with float32 products a thread would hold whole keys.
                b_product = tl.dot(b_key, b_q[i], input_precision="tf32x3")
                # Keep NaN: the selection handles it.
                b_product = tl.maximum(b_product, 0.0, propagate_nan=tl.PropagateNan.ALL)
                b_score = tl.sum(b_product * b_weight[i], axis=1)
                if p_scales is not None:
                    b_score = b_score * b_scale
                count = num_tokens if i == 0 else other_tokens
                tl.store(p_out + i * out_stride + n + o_n, b_score, mask=n + o_n < count)


@jit
def _operand(b_x, OPERANDS: constexpr):
    if OPERANDS == "bytes":
        return e4m3_value(b_x.to(tl.int32)).to(tl.float16)
    elif OPERANDS == "float32":
        return float32_of(b_x)
    else:
        return b_x


@jit
def _pages(p_pages, n, o_n, end, PAGE_TOKENS: constexpr, PAGES: constexpr):
    """Load the pages of a block as scalars, or of each token if PAGES is 0; page 0 past the last token."""
    b_pages = ()
    if PAGES > 0:
        for i in tl.static_range(PAGES):
            n_page = n + i * PAGE_TOKENS
            b_pages = b_pages + (tl.load(p_pages + n_page // PAGE_TOKENS, mask=n_page < end, other=0),)
    else:
        b_pages = b_pages + (tl.load(p_pages + (n + o_n) // PAGE_TOKENS, mask=n + o_n < end, other=0),)
    return b_pages


@jit
def _slots(b_pages, n, o_n, PAGE_TOKENS: constexpr, PAGES: constexpr):
    if PAGES == 1:
        return b_pages[0].to(tl.int64) * PAGE_TOKENS + n % PAGE_TOKENS + o_n
    elif PAGES > 1:
        # Scalars, not a tensor of page ids: no layout conversion.
        o_slot = b_pages[0].to(tl.int64) * PAGE_TOKENS + o_n
        for i in tl.static_range(1, PAGES):
            o_page = (b_pages[i].to(tl.int64) - i) * PAGE_TOKENS
            o_slot = tl.where(o_n >= i * PAGE_TOKENS, o_page + o_n, o_slot)
        return o_slot
    else:
        return b_pages[0].to(tl.int64) * PAGE_TOKENS + (n + o_n) % PAGE_TOKENS
