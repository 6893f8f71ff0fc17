"""KeyBias: what the bias of a key projection adds to the scores of keys that are stored without it; its tables, and plain torch over them.

K key/value heads, D head dim, C = D / 2 pairs of coordinates that rope turns, B blocks of tokens, J tokens on either side of
a block's middle, L positions, X any leading dimensions

A key is R_p (W x + b), with R_p the rotation of its position p. Where b is many times as long as W x, a code of few bits
holds b and little else, so pages hold R_p W x, and a score gets q . R_p b in full precision: all that stands behind a score
(masks, windows, the softmax, the merge of splits) sees the key whole. For a pair (q1, q2) of a query and (b1, b2) of the bias

    q . R_p b = A cos(w p) + B sin(w p),   A = q1 b1 + q2 b2,   B = q2 b1 - q1 b2

so the bias goes into two numbers a pair of each query, and the other factor is the same for all heads and layers. Tokens of
a block are counted from its middle m (half way between two of them), p = m + d: A and B are turned to the middle once a
block, and what is left are cos(w d) and sin(w d) of one small table. It has cos - 1, since pairs with a large bias are those
that turn slowly: half precision then rounds what changes from token to token, and what does not is summed in float32. The
cosine is the same on both sides of the middle and the sine but for its sign, so the table has one side.

A model without rope has the same b at every position: it adds q . b to all scores of a row alike, which a softmax does not
see, so such a model needs no KeyBias, only keys without their bias. Where heads are normed behind the projection (QK-norm),
keys are no sum of two parts, and this file is not for them.
"""

from typing import NamedTuple

import torch

from holdfast.kernels.geometry import BLOCK_TOKENS, key_turn_dtype


class KeyTurns(NamedTuple):
    """The rotations of all positions, for all layers with the same rope."""

    cos_BC: torch.Tensor
    """float32, of the middle of each block, times the factor that the rope table has on cos and sin."""
    sin_BC: torch.Tensor
    near_2JC: torch.Tensor
    """cos - 1 and sin of the way from the middle to the tokens behind it: float16 for kernels, float32 for float32 models."""

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self)


class KeyBias(NamedTuple):
    """The bias of one layer's keys."""

    bias_KD: torch.Tensor
    """float32, in the model's coordinates: not turned, and not rotated as codes are."""
    turns: KeyTurns

    @property
    def num_bytes(self) -> int:
        """Of what this layer has alone."""
        return self.bias_KD.nbytes


def make_key_turns(
    inverse_frequency_C: torch.Tensor,
    magnitude: float,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> KeyTurns:
    """Tables for positions below `max_model_len` of a model that computes in `dtype`; angles are taken in float64."""
    frequency_C = inverse_frequency_C.double().cpu()
    num_blocks = -(-max_model_len // BLOCK_TOKENS)
    middle_B = torch.arange(num_blocks, dtype=torch.float64) * BLOCK_TOKENS + (BLOCK_TOKENS - 1) / 2
    middle_BC = torch.outer(middle_B, frequency_C)
    near_JC = torch.outer(torch.arange(BLOCK_TOKENS // 2, dtype=torch.float64) + 0.5, frequency_C)
    half_sin_JC = (near_JC / 2).sin()
    near_2JC = torch.stack(
        (-2 * half_sin_JC.square(), near_JC.sin())
    )  # 1 - 2 sin^2 is the cosine, without its rounding
    near_dtype = getattr(torch, key_turn_dtype(str(dtype).removeprefix("torch.")))
    return KeyTurns(
        (middle_BC.cos() * magnitude).float().to(device),
        (middle_BC.sin() * magnitude).float().to(device),
        near_2JC.to(device, near_dtype),
    )


def key_bias_rows(key_bias: KeyBias, positions_L: torch.Tensor) -> torch.Tensor:
    """[K, L, D] in float32: what the bias adds to the keys at these positions, in the model's coordinates."""
    cos_LC, sin_LC = _turns_at(key_bias.turns, positions_L)
    first_KC, second_KC = key_bias.bias_KD.chunk(2, dim=-1)
    first_K1C, second_K1C = first_KC.unsqueeze(1), second_KC.unsqueeze(1)
    return torch.cat(
        (first_K1C * cos_LC - second_K1C * sin_LC, second_K1C * cos_LC + first_K1C * sin_LC),
        dim=-1,
    )


def _turns_at(turns: KeyTurns, positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of positions, [L, C] each, from the block's and the token's own, as kernels have them."""
    block_L, token_L = positions_L // BLOCK_TOKENS, positions_L % BLOCK_TOKENS
    half = BLOCK_TOKENS // 2
    is_behind_L1 = (token_L >= half).unsqueeze(-1)
    j_L = torch.where(token_L >= half, token_L - half, half - 1 - token_L)
    near_cos_LC, near_sin_LC = turns.near_2JC.float()[:, j_L].unbind()
    near_sin_LC = torch.where(is_behind_L1, near_sin_LC, -near_sin_LC)
    cos_LC, sin_LC = turns.cos_BC[block_L], turns.sin_BC[block_L]
    return (
        cos_LC + (cos_LC * near_cos_LC - sin_LC * near_sin_LC),
        sin_LC + (sin_LC * near_cos_LC + cos_LC * near_sin_LC),
    )
