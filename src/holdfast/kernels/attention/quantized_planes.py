"""QuantizedPlanes: the pages of a layer as kernels see them; and where a kernel finds a tile's codes and puts its outputs.

P pages, K key/value heads, t tokens of a page, B bytes of a head's codes, S bytes of its sign bits, D head dim, N tokens of a
block, C columns of words, G columns of queries

A page is laid out head by head, so that the tokens of a head are neighbours and a tile of them is one run of memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.kernels.attention.key_bias import KeyBias
from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, tl
from holdfast.quant.kv_quantize import QuantizedHeads


@dataclass(frozen=True, slots=True)
class QuantizedPlanes:
    """Views of the page storage, and what the rotation needs."""

    key_bits: int
    value_bits: int
    head_dim: int
    k_codes_PKtB: torch.Tensor
    k_signs_PKtS: torch.Tensor | None
    k_scale_PKt: torch.Tensor
    v_codes_PKtB: torch.Tensor
    v_signs_PKtS: torch.Tensor | None
    v_scale_PKt: torch.Tensor
    rotation_DD: torch.Tensor
    """The table of quant/kv_quantize.py, [D + 1, D], in the type that is computed in; one for all layers of a head dim."""
    k_mean_KD: torch.Tensor | None = None
    """float32, rotated like the keys: subtracted from every key before it is quantized. Softmax does not see it."""
    key_bias: KeyBias | None = None
    """What attention adds to the scores, where keys are stored without the bias of their projection."""

    @classmethod
    def of(
        cls,
        plane: Callable[[str], torch.Tensor],
        key_bits: int,
        value_bits: int,
        head_dim: int,
        page_tokens: int,
        rotation_DD: torch.Tensor,
        k_mean_KD: torch.Tensor | None = None,
        key_bias: KeyBias | None = None,
    ) -> "QuantizedPlanes":
        """From planes by name as the storage has them, [slots, K, bytes] and [slots, K]: the same bytes, head by head."""

        def by_head(name: str) -> torch.Tensor:
            plane_SK = plane(name)
            num_pages, num_heads = plane_SK.shape[0] // page_tokens, plane_SK.shape[1]
            return plane_SK.view(num_pages, num_heads, page_tokens, *plane_SK.shape[2:])

        return cls(
            key_bits, value_bits, head_dim, by_head("k_codes"), by_head("k_signs") if key_bits == 3 else None,
            by_head("k_scale"), by_head("v_codes"), by_head("v_signs") if value_bits == 3 else None, by_head("v_scale"),
            rotation_DD, k_mean_KD, key_bias,
        )  # fmt: skip

    @property
    def num_kv_heads(self) -> int:
        return self.k_scale_PKt.shape[1]

    @property
    def page_tokens(self) -> int:
        return self.k_scale_PKt.shape[2]

    @property
    def rotates_keys(self) -> bool:
        """Whether keys, and so queries, are rotated."""
        return self.key_bits < 8

    @property
    def rotates_values(self) -> bool:
        """Whether values are rotated, so that outputs must be rotated back."""
        return self.value_bits < 8

    def keys_at(self, pages_X: torch.Tensor, tokens_X: torch.Tensor) -> QuantizedHeads:
        """The quantized keys of some tokens: [X, K, ...]."""
        signs = None if self.k_signs_PKtS is None else self.k_signs_PKtS[pages_X, :, tokens_X]
        return QuantizedHeads(self.k_codes_PKtB[pages_X, :, tokens_X], signs, self.k_scale_PKt[pages_X, :, tokens_X])

    def values_at(self, pages_X: torch.Tensor, tokens_X: torch.Tensor) -> QuantizedHeads:
        """The quantized values of some tokens: [X, K, ...]."""
        signs = None if self.v_signs_PKtS is None else self.v_signs_PKtS[pages_X, :, tokens_X]
        return QuantizedHeads(self.v_codes_PKtB[pages_X, :, tokens_X], signs, self.v_scale_PKt[pages_X, :, tokens_X])

    def store(
        self, pages_X: torch.Tensor, tokens_X: torch.Tensor, keys: QuantizedHeads, values: QuantizedHeads
    ) -> None:
        """Put the quantized keys and values of some tokens into their places."""
        for plane, quantized in (
            (self.k_codes_PKtB, keys.codes_XB),
            (self.k_signs_PKtS, keys.signs_XS),
            (self.k_scale_PKt, keys.scale_X),
            (self.v_codes_PKtB, values.codes_XB),
            (self.v_signs_PKtS, values.signs_XS),
            (self.v_scale_PKt, values.scale_X),
        ):
            if plane is not None and quantized is not None:
                plane[pages_X, :, tokens_X] = quantized


# A branch on a constant is taken when the kernel is compiled, so both must stand in an if and an else.
# ruff: noqa: ANN001, ANN201, RET505 the arguments of kernels have no types


P_ONE = kernel_constant(16384.0)
"""What p = 1 of the softmax becomes in half precision."""
LEAST_LOG2 = kernel_constant(-24.0)
"""Of a float16 scale that is not zero."""


@jit
def pages_of(p_row_pages, n, o_n, seen, high, HAS_WINDOW: constexpr, PAGE_TOKENS: constexpr, BLOCK_N: constexpr):
    """The page of a block, or of each token of it; read a block ahead, so that no load of keys waits for another load.

    Behind a window a block may begin before the first token that is seen, with entries that name no page of the sequence,
    or none at all; the page of a whole block always has one that is.
    """
    if PAGE_TOKENS >= BLOCK_N:
        return tl.load(p_row_pages + n // PAGE_TOKENS, mask=n < high, other=0)
    else:
        m_n = n + o_n < high
        if HAS_WINDOW:
            m_n = m_n & (n + o_n >= seen)
        return tl.load(p_row_pages + (n + o_n) // PAGE_TOKENS, mask=m_n, other=0)


@jit
def slots_of(page, i_head, n, o_n, NUM_KV_HEADS: constexpr, PAGE_TOKENS: constexpr, BLOCK_N: constexpr):
    """Where a head's tokens lie: pages hold one head after the other."""
    if PAGE_TOKENS >= BLOCK_N:
        return (page.to(tl.int64) * NUM_KV_HEADS + i_head) * PAGE_TOKENS + n % PAGE_TOKENS + o_n
    else:
        return (page.to(tl.int64) * NUM_KV_HEADS + i_head) * PAGE_TOKENS + (n + o_n) % PAGE_TOKENS


@jit
def part_dims(o_c, PART: constexpr, NUM_PARTS: constexpr, HEAD_DIM: constexpr):
    """The coordinates of a part (quant/kv_quantize.py)."""
    PER_HALF: constexpr = 1 if NUM_PARTS == 1 else NUM_PARTS // 2
    return (PART // PER_HALF) * (HEAD_DIM // 2) + PER_HALF * o_c + PART % PER_HALF


@jit
def bytes_at(p, o_slot, o_c, m_n, limit, ROW: constexpr, MASKED: constexpr):
    """[N, C] of a plane whose rows have ROW bytes."""
    if MASKED:
        return tl.load(p + o_slot[:, None] * ROW + o_c[None, :], mask=m_n[:, None] & (o_c < limit)[None, :], other=0)
    else:
        return tl.load(p + o_slot[:, None] * ROW + o_c[None, :])


@jit
def key_codes(p_k, o_slot, o_c, m_n, MASKED: constexpr, KEY_BITS: constexpr, HEAD_DIM: constexpr, PLAIN: constexpr):
    """[N, C] of the codes of keys, as dequantize.py takes them apart: bytes, or whole words where there is no assembler."""
    ROW: constexpr = HEAD_DIM if KEY_BITS == 8 else (HEAD_DIM // 2 if KEY_BITS == 4 else HEAD_DIM // 4)
    if PLAIN and KEY_BITS < 8:
        p_words = p_k.to(tl.pointer_type(tl.int32)) + o_slot[:, None] * (ROW // 4) + (o_c // 4)[None, :]
        return tl.load(p_words, mask=m_n[:, None] & (o_c < ROW)[None, :], other=0)
    else:
        return bytes_at(p_k, o_slot, o_c, m_n, ROW, ROW, MASKED or o_c.shape[0] > ROW)


@jit
def store_parts(
    b_acc, b_scale, p_partial, o_partial, m_g, VALUE_BITS: constexpr, HEAD_DIM: constexpr, VALUE_COLUMNS: constexpr
):
    """Partials in the order of coordinates, rotated as they are."""
    NUM_PARTS: constexpr = 2 if VALUE_BITS == 8 else (4 if VALUE_BITS == 4 else 8)
    o_c = tl.arange(0, VALUE_COLUMNS)
    m_out = m_g[None, :] & (o_c < HEAD_DIM // NUM_PARTS)[:, None]
    for part in tl.static_range(NUM_PARTS):
        o_d = part_dims(o_c, part, NUM_PARTS, HEAD_DIM)
        tl.store(p_partial + o_partial[None, :] + o_d[:, None], b_acc[part] * b_scale[None, :], mask=m_out)


@jit
def store_rotated(
    b_acc, b_scale, rotation_scale, p_rotation, p_out, o_q, m_g,
    VALUE_BITS: constexpr, HEAD_DIM: constexpr, VALUE_COLUMNS: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """Outputs rotated back, in their type."""
    NUM_PARTS: constexpr = 2 if VALUE_BITS == 8 else (4 if VALUE_BITS == 4 else 8)
    o_c = tl.arange(0, VALUE_COLUMNS)
    o_d = tl.arange(0, BLOCK_D)
    m_out = m_g[None, :] & (o_d < HEAD_DIM)[:, None]
    m_c = o_c < HEAD_DIM // NUM_PARTS
    if VALUE_BITS == 8:
        m_part = m_g[None, :] & m_c[:, None]
        for part in tl.static_range(NUM_PARTS):
            o_part = part_dims(o_c, part, NUM_PARTS, HEAD_DIM)
            b_out = (b_acc[part] * b_scale[None, :]).to(p_out.dtype.element_ty)
            tl.store(p_out + o_q[None, :] + o_part[:, None], b_out, mask=m_part)
    else:
        b_out = tl.zeros((BLOCK_D, m_g.shape[0]), dtype=tl.float32)
        for part in tl.static_range(NUM_PARTS):
            o_part = part_dims(o_c, part, NUM_PARTS, HEAD_DIM)
            m_table = (o_d < HEAD_DIM)[:, None] & m_c[None, :]
            b_table = tl.load(p_rotation + o_d[:, None] * HEAD_DIM + o_part[None, :], mask=m_table, other=0.0)
            b_out = tl.dot(b_table.to(tl.float16), (b_acc[part] * b_scale[None, :]).to(tl.float16), b_out)
        b_out = b_out * rotation_scale
        tl.store(p_out + o_q[None, :] + o_d[:, None], b_out.to(p_out.dtype.element_ty), mask=m_out)
