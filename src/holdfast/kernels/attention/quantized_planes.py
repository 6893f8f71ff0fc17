"""QuantizedPlanes: kernel views of a layer's quantized pages; loads of a tile's codes and stores of its outputs.

P pages, K key/value heads, t tokens of a page, B bytes of a head's codes, S bytes of its sign bits, D head dim, N tokens of a
block, C columns of words, G columns of queries

A page is laid out head by head, so the tokens of a head are contiguous.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from holdfast.kernels.attention.key_bias import KeyBias
from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, tl
from holdfast.quant.formats import BITS_WITH_SIGNS
from holdfast.quant.kv_quantize import QuantizedHeads


@dataclass(frozen=True, slots=True)
class QuantizedPlanes:
    """Views of a layer's quantized pages, and tables."""

    key_bits: int
    value_bits: int
    head_dim: int
    k_codes_PKtB: Tensor
    k_signs_PKtS: Tensor | None
    k_scale_PKt: Tensor
    v_codes_PKtB: Tensor
    v_signs_PKtS: Tensor | None
    v_scale_PKt: Tensor
    rotation_DD: Tensor
    """The table of quant/kv_quantize.py, [D + 1, D], in the compute type; one for all layers of a head dim."""
    k_mean_KD: Tensor | None = None
    """float32, rotated like the keys: subtracted from every key before quantization, which softmax ignores."""
    key_bias: KeyBias | None = None
    """Added to the scores if keys are stored without the bias of their projection."""
    pair_scale_2KD: Tensor | None = None
    """float32: what keys are multiplied by before rotation, then its inverse, for the queries; equal in both dims of a pair
    of RoPE. The mean and the key bias are those of scaled keys."""

    @classmethod
    def of(
        cls,
        plane: Callable[[str], Tensor],
        key_bits: int,
        value_bits: int,
        head_dim: int,
        page_tokens: int,
        rotation_DD: Tensor,
        k_mean_KD: Tensor | None = None,
        key_bias: KeyBias | None = None,
        pair_scale_2KD: Tensor | None = None,
    ) -> "QuantizedPlanes":
        """View the storage's planes, [slots, K, bytes] and [slots, K] by name, head by head."""

        def by_head(name: str) -> Tensor:
            plane_SK = plane(name)
            num_pages, num_heads = plane_SK.shape[0] // page_tokens, plane_SK.shape[1]
            return plane_SK.view(num_pages, num_heads, page_tokens, *plane_SK.shape[2:])

        return cls(
            key_bits, value_bits, head_dim,
            by_head("k_codes"), by_head("k_signs") if key_bits in BITS_WITH_SIGNS else None, by_head("k_scale"),
            by_head("v_codes"), by_head("v_signs") if value_bits in BITS_WITH_SIGNS else None, by_head("v_scale"),
            rotation_DD, k_mean_KD, key_bias, pair_scale_2KD,
        )  # fmt: skip

    @property
    def num_kv_heads(self) -> int:
        return self.k_scale_PKt.shape[1]

    @property
    def page_tokens(self) -> int:
        return self.k_scale_PKt.shape[2]

    @property
    def rotates_keys(self) -> bool:
        """True if keys, and so queries, are rotated."""
        return self.key_bits < 8

    @property
    def rotates_values(self) -> bool:
        """True if values are rotated, so outputs are rotated back."""
        return self.value_bits < 8

    def keys_at(self, pages_X: Tensor, tokens_X: Tensor) -> QuantizedHeads:
        """Return the quantized keys of some tokens: [X, K, ...]."""
        signs = None if self.k_signs_PKtS is None else self.k_signs_PKtS[pages_X, :, tokens_X]
        return QuantizedHeads(self.k_codes_PKtB[pages_X, :, tokens_X], signs, self.k_scale_PKt[pages_X, :, tokens_X])

    def values_at(self, pages_X: Tensor, tokens_X: Tensor) -> QuantizedHeads:
        """Return the quantized values of some tokens: [X, K, ...]."""
        signs = None if self.v_signs_PKtS is None else self.v_signs_PKtS[pages_X, :, tokens_X]
        return QuantizedHeads(self.v_codes_PKtB[pages_X, :, tokens_X], signs, self.v_scale_PKt[pages_X, :, tokens_X])

    def store(self, pages_X: Tensor, tokens_X: Tensor, keys: QuantizedHeads, values: QuantizedHeads) -> None:
        """Store the quantized keys and values of some tokens."""
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


# Triton resolves branches on constants at compile time, so both sides must stand in an if and an else.


P_ONE = kernel_constant(16384.0)
"""Number that stands for p = 1 of the softmax in half precision."""
LEAST_LOG2 = kernel_constant(-24.0)
"""Least base-2 logarithm of a nonzero float16 scale."""


@jit
def pages_of(p_row_pages, n, o_n, seen, high, HAS_WINDOW: constexpr, PAGE_TOKENS: constexpr, BLOCK_N: constexpr):
    """Load the page of a block, or of each of its tokens; called a block ahead, so no load of keys waits for another load.

    With a window a block may begin before the first visible token, where the table holds no page of the sequence. A page that
    holds a whole block has a visible token.
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
    """Return the slots of a head's tokens: pages hold one head after the other."""
    if PAGE_TOKENS >= BLOCK_N:
        return (page.to(tl.int64) * NUM_KV_HEADS + i_head) * PAGE_TOKENS + n % PAGE_TOKENS + o_n
    else:
        return (page.to(tl.int64) * NUM_KV_HEADS + i_head) * PAGE_TOKENS + (n + o_n) % PAGE_TOKENS


@jit
def part_dims(o_c, PART: constexpr, NUM_PARTS: constexpr, HEAD_DIM: constexpr):
    """Return the coordinates of a part (quant/kv_quantize.py)."""
    PER_HALF: constexpr = 1 if NUM_PARTS == 1 else NUM_PARTS // 2
    return (PART // PER_HALF) * (HEAD_DIM // 2) + PER_HALF * o_c + PART % PER_HALF


@jit
def bytes_at(p, o_slot, o_c, m_n, limit, ROW: constexpr, MASKED: constexpr):
    """Load [N, C] bytes of a plane whose rows have ROW bytes."""
    if MASKED:
        return tl.load(p + o_slot[:, None] * ROW + o_c[None, :], mask=m_n[:, None] & (o_c < limit)[None, :], other=0)
    else:
        return tl.load(p + o_slot[:, None] * ROW + o_c[None, :])


@jit
def key_codes(p_k, o_slot, o_c, m_n, MASKED: constexpr, KEY_BITS: constexpr, HEAD_DIM: constexpr, PLAIN: constexpr):
    """Load key codes [N, C] for dequantize.py: bytes, or whole words if there is no assembler.

    Of 5 bits these are the codes of two parts; those of the other two lie HEAD_DIM // 4 bytes behind.
    """
    ROW: constexpr = HEAD_DIM if KEY_BITS == 8 else (HEAD_DIM // 4 if KEY_BITS == 3 else HEAD_DIM // 2)
    COLUMNS: constexpr = HEAD_DIM // 4 if KEY_BITS == 5 else ROW
    if PLAIN and KEY_BITS < 8:
        p_words = p_k.to(tl.pointer_type(tl.int32)) + o_slot[:, None] * (ROW // 4) + (o_c // 4)[None, :]
        return tl.load(p_words, mask=m_n[:, None] & (o_c < COLUMNS)[None, :], other=0)
    else:
        return bytes_at(p_k, o_slot, o_c, m_n, COLUMNS, ROW, MASKED or o_c.shape[0] > COLUMNS)


@jit
def store_parts(
    b_acc, b_scale, p_partial, o_partial, m_g, VALUE_BITS: constexpr, HEAD_DIM: constexpr, VALUE_COLUMNS: constexpr
):
    """Store partials in the order of coordinates, still rotated."""
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
    """Rotate outputs back and store them in their type."""
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
