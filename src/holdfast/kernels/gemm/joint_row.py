"""One row by two weights in one launch: a block-scaled e4m3 one, and a plain one with a float32 result, as of a router.

N, P outputs, K inputs

Neither product fills a GPU for long, and neither needs the other. So the smaller one costs only its bytes.
"""

import torch
from torch import Tensor

from holdfast.kernels.fp8 import as_kernels_read
from holdfast.kernels.gemm import block_scaled_gemv
from holdfast.kernels.gemm.block_scaled_gemv import block_row_program, gemv_constants
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import check_dense, constexpr, jit, next_power_of_two, tl
from holdfast.quant.quantized_weight import QuantizedWeight

PLAIN_COLUMNS = 1024
"""Most columns of the plain weight per load of a program."""
PLAIN_ELEMENTS = 1024
"""Elements of the plain weight per load of a warp: a thread has 64 bytes in flight."""
MOST_OUTPUTS = 8192
"""Most outputs of the plain weight. A head has more, and cuBLAS reads it at full speed."""


def takes(x_TK: Tensor, weight: QuantizedWeight, plain_PK: Tensor) -> bool:
    """Return True if the kernel takes this many rows and these weights."""
    return len(x_TK) == 1 and len(plain_PK) <= MOST_OUTPUTS and block_scaled_gemv.takes(weight, 1)


def joint_row(
    x_1K: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, out_1N: Tensor, plain_PK: Tensor, out_1P: Tensor
) -> Tensor:
    """Compute x @ weight.T + bias into `out_1N`, in its type, and x @ plain.T into `out_1P`. `takes` must accept them."""
    (size_n, size_k), size_p = weight.shape, len(plain_PK)
    assert x_1K.shape == (1, size_k), f"{x_1K.shape=} {weight.shape=}"
    assert out_1N.shape == (1, size_n), f"{out_1N.shape=} {weight.shape=}"
    assert plain_PK.shape == (size_p, size_k), f"{plain_PK.shape=} {weight.shape=}"
    assert out_1P.shape == (1, size_p), f"{out_1P.shape=} {plain_PK.shape=}"
    check_dense(x_1K, plain_PK)
    constants = gemv_constants(weight, bias_N is not None)
    columns = min(PLAIN_COLUMNS, next_power_of_two(size_k))
    rows = max(1, constants["num_warps"] * PLAIN_ELEMENTS // columns)
    num_plain = -(-size_p // rows)
    joint_row_kernel[(num_plain + -(-size_n // constants["BLOCK_N"]),)](
        x_1K, as_kernels_read(x_1K), weight.codes.view(torch.int32), weight.scales,
        bias_N if bias_N is not None else weight.scales, out_1N, plain_PK, out_1P, size_n, weight.scales.shape[1],
        size_p, num_plain, PLAIN_N=rows, PLAIN_K=columns, **constants, **pdl_flags(x_1K),
    )  # fmt: skip
    return out_1N


@jit
def joint_row_kernel(
    p_x, p_bits, p_codes, p_scales, p_bias, p_out, p_weight, p_plain_out, size_n, scale_columns, size_p, num_plain,
    PLAIN_N: constexpr, PLAIN_K: constexpr, SIZE_K: constexpr, BLOCK_ROWS: constexpr, EVEN_N: constexpr,
    HAS_BIAS: constexpr, EVEN_K: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, AHEAD: constexpr, PLAIN: constexpr,
    PDL: constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    if i_program < num_plain:
        _plain_row_program(p_x, p_weight, p_plain_out, i_program, size_p, SIZE_K, PLAIN_N, PLAIN_K, PDL)
    else:
        block_row_program(
            p_bits, p_codes, p_scales, p_bias, p_out, i_program - num_plain, size_n, scale_columns, SIZE_K, BLOCK_ROWS,
            EVEN_N, HAS_BIAS, EVEN_K, BLOCK_N, BLOCK_K, AHEAD, PLAIN, PDL,
        )  # fmt: skip


@jit
def _plain_row_program(
    p_x, p_weight, p_out, i_n, size_n, SIZE_K: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, PDL: constexpr
):
    """Compute a block of a row's outputs."""
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < size_n
    p_w = p_weight + o_n[:, None].to(tl.int64) * SIZE_K + o_k[None, :]
    # Load the first block of the weight before the wait: it is a constant.
    b_w = tl.load(p_w, mask=m_n[:, None] & (o_k < SIZE_K)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in range(0, SIZE_K, BLOCK_K):
        m_next = m_n[:, None] & (k + BLOCK_K + o_k < SIZE_K)[None, :]
        b_next = tl.load(p_w + k + BLOCK_K, mask=m_next, other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_x + k + o_k, mask=k + o_k < SIZE_K, other=0.0).to(tl.float32)
        b_sum += b_w.to(tl.float32) * b_x[None, :]
        b_w = b_next
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(p_out + o_n, tl.sum(b_sum, axis=1).to(p_out.dtype.element_ty), mask=m_n)
