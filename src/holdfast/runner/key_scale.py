"""Key scales: measure on a short real text how keys and queries of each head share their size, and balance them.

K key/value heads, G query heads of each, D head dim, C = D / 2 pairs of dims, t rows of a step, N keys

Rotation spreads the error of a code evenly over a key. Queries do not weigh all pairs alike, so a pair with small keys and
large queries loses most. If keys are multiplied by s and queries divided by it, scores stay what they were, and the error of
a score is least for s = (E[q^2] / E[k^2])^(1/4). Both dims of a pair have one s, so it commutes with RoPE. Heads lie in pair
order (`in_pair_order`): dims that RoPE leaves alone are pairs too, for which any s is exact.

The text follows the measurement of means (key_means.py), in blocks of one length whatever a step of the engine may hold. Its
first half gives E[q^2] and E[k^2]. Its second half decides: a head takes the strength of s that lowers the error of its
softmax most, or s = 1. A head weighs its keys of the same block, and the first tokens if codes are read for those.

Numbers are computed on the host, from rows that the device wrote. So the device's memory holds s and nothing else.
"""

from collections.abc import Sequence

import torch

from holdfast.attention.backend import AttentionBackend
from holdfast.families.grouped.pages import GroupedBackend, QuantizedPages
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.kernels.attention.key_bias import KeyBias, key_bias_rows
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary, in_pair_order, turned_heads
from holdfast.quant.kv_quantize import dequantize_keys, quantize_keys, rotate_heads
from holdfast.runner.key_means import SKIPPED_TOKENS, STEP_TOKENS, read_in_steps
from holdfast.runner.runner import Runner

TEXT_TOKENS = 512
STRENGTHS = (1.0, 0.5)
"""Exponents of s to choose from, beside 0."""
LEAST_GAIN = 0.05
"""Share of the error that s must remove."""
MIXED = 1 / 16
"""Share of a head's mean square that each pair gets on top of its own."""
MOST_LOG2 = 3.0
"""s stays within 1/8 and 8."""
STEPS_PER_OCTAVE = 8
"""s is rounded in log2, so that the last bits of sums do not reach it."""


def make_scales(specs: Sequence[GroupedAttentionSpec], device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """Allocate s = 1 and its inverse for every layer with rotated keys: [2, K, D]."""
    layers = [layer for layer, spec in enumerate(specs) if spec.cache.format.rotates_keys]
    found: list[torch.Tensor | None] = [None] * len(specs)
    if layers:
        cache = specs[layers[0]].cache
        scales_N2KD = torch.ones(len(layers), 2, cache.num_kv_heads, cache.head_dim, device=device)
        for place, layer in enumerate(layers):
            found[layer] = scales_N2KD[place]
    return tuple(found)


@torch.inference_mode()
def scale_keys(runner: Runner, specs: Sequence[GroupedAttentionSpec], token_ids: Sequence[int]) -> tuple[int, int]:
    """Measure and store the scales. Return the number of tokens read, and of heads that have a scale.

    No token is read if a sequence or the pages hold too few. Each rank measures its own heads.
    """
    backend = runner.backend.paged
    num_tokens = _num_tokens(runner, len(token_ids))
    if not num_tokens or not isinstance(backend, GroupedBackend):
        return 0, 0
    balances = {
        layer: Balance(specs[layer], pages.planes, num_tokens // 2)
        for layer, pages in enumerate(backend.pages)
        if isinstance(pages, QuantizedPages) and pages.planes.pair_scale_2KD is not None
    }

    def measure(layer: int, qkv_tX: torch.Tensor, head_norm: HeadNorm | None, rotary: Rotary | None) -> None:
        if layer in balances:
            balances[layer].read(qkv_tX, head_norm, rotary)

    read_in_steps(runner, token_ids[:num_tokens], measure)
    with runner.on_runner_stream():
        for balance in balances.values():
            _store(balance.planes, balance.chosen())
        return num_tokens, num_scaled_heads(backend)


def num_scaled_heads(backend: AttentionBackend) -> int:
    """Return the number of heads whose keys are scaled."""
    if not isinstance(backend, GroupedBackend):
        return 0
    planes = [pages.planes for pages in backend.pages if isinstance(pages, QuantizedPages)]
    scales = [one.pair_scale_2KD[0] for one in planes if one.pair_scale_2KD is not None]
    return sum(int((scale_KD != 1).any(-1).sum()) for scale_KD in scales)


def _num_tokens(runner: Runner, num_ids: int) -> int:
    """Return the tokens of the text that fit, in pairs of steps."""
    pair = 2 * STEP_TOKENS
    num_tokens = min(TEXT_TOKENS, num_ids, runner.limits.max_model_len) // pair * pair
    while sum(group.most_pages(num_tokens, STEP_TOKENS) for group in runner.groups) > runner.num_pages:
        num_tokens -= pair
    return num_tokens


def _store(planes: QuantizedPlanes, scale_KD: torch.Tensor) -> None:
    """Give a layer its scales, and its mean and key bias those of scaled keys."""
    scales_2KD, mean_KD = planes.pair_scale_2KD, planes.k_mean_KD
    assert scales_2KD is not None, "this layer has no room for scales"
    heads_K = (scale_KD != 1).any(-1)
    scale_KD = scale_KD.to(scales_2KD.device)
    scales_2KD.copy_(torch.stack((scale_KD, 1 / scale_KD)))
    if mean_KD is not None:
        scaled_KD = rotate_heads(rotate_heads(mean_KD) * scale_KD)
        mean_KD.copy_(torch.where(heads_K.to(mean_KD.device).unsqueeze(-1), scaled_KD, mean_KD))
    if planes.key_bias is not None:
        planes.key_bias.bias_KD.mul_(scale_KD)


class Balance:
    """Sums over one layer's rows of the text, on the host."""

    def __init__(self, spec: GroupedAttentionSpec, planes: QuantizedPlanes, half: int) -> None:
        self.planes = planes
        self._spec = spec
        self._half = half
        self._start = 0
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        mean_KD, shape = planes.k_mean_KD, (planes.num_kv_heads, planes.head_dim // 2)
        self._mean_KD = None if mean_KD is None else rotate_heads(mean_KD.cpu())
        self._q_squares_KC, self._k_squares_KC = torch.zeros(2, *shape, dtype=torch.float64)
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None
        self._choices_SKD: torch.Tensor | None = None
        self.error_SK = torch.zeros(1 + len(STRENGTHS), shape[0], dtype=torch.float64)
        """By choice: no scale, then each strength."""

    def read(self, qkv_tX: torch.Tensor, head_norm: HeadNorm | None, rotary: Rotary | None) -> None:
        """Keep a step's rows until they fill a block."""
        num_kv_heads = self.planes.num_kv_heads
        how = head_norm, rotary, self._spec.query_step
        q_tHD, k_tKD, _ = turned_heads(qkv_tX, num_kv_heads, self.planes.head_dim, *how)
        if rotary is not None:
            q_tHD, k_tKD = in_pair_order(q_tHD, rotary.dim), in_pair_order(k_tKD, rotary.dim)
        self._rows.append((q_tHD.to("cpu", torch.float32, copy=True), k_tKD.to("cpu", torch.float32, copy=True)))
        if sum(len(k_tKD) for _, k_tKD in self._rows) == STEP_TOKENS:
            q_tHD, k_tKD = (torch.cat(rows) for rows in zip(*self._rows, strict=True))
            self._rows.clear()
            self._add(q_tHD.unflatten(1, (num_kv_heads, -1)), k_tKD)

    def _add(self, q_tKGD: torch.Tensor, k_tKD: torch.Tensor) -> None:
        """Add a block's rows: to the squares, or from the second half on to the errors."""
        num_rows, seen_tKD, coded_tKD = len(k_tKD), k_tKD, k_tKD
        if self._mean_KD is not None:
            coded_tKD = coded_tKD - self._mean_KD
        if self.planes.key_bias is not None:
            seen_tKD = seen_tKD + _bias_rows(self.planes.key_bias, self._start, num_rows)
        if self._start == 0:
            self._first = seen_tKD[:SKIPPED_TOKENS], coded_tKD[:SKIPPED_TOKENS]
        if self._start < self._half:
            skipped = SKIPPED_TOKENS if self._start == 0 else 0
            self._q_squares_KC += _pair_squares(q_tKGD[skipped:]).mean(2).sum(0)
            self._k_squares_KC += _pair_squares(coded_tKD[skipped:]).sum(0)
        else:
            self._add_errors(q_tKGD, seen_tKD, coded_tKD)
        self._start += num_rows

    def chosen(self) -> torch.Tensor:
        """Return the scale of each head: [K, D]."""
        assert self._choices_SKD is not None, "the second half of the text was not read"
        return self._choices_SKD[best_choices(self.error_SK), torch.arange(self.planes.num_kv_heads)]

    def _add_errors(self, q_tKGD: torch.Tensor, seen_tKD: torch.Tensor, coded_tKD: torch.Tensor) -> None:
        """Add the variance of each score's error under the softmax, twice its divergence to second order."""
        if self._choices_SKD is None:
            scale_KD = pair_scale(self._q_squares_KC, self._k_squares_KC).repeat(1, 2)
            self._choices_SKD = torch.stack([scale_KD**power for power in (0.0, *STRENGTHS)]).float()
        num_first = 0
        if self._first is not None and (self._spec.near is None or not self._spec.near.first_tokens):
            num_first = SKIPPED_TOKENS
            first_seen, first_coded = self._first
            seen_tKD, coded_tKD = torch.cat((first_seen, seen_tKD)), torch.cat((first_coded, coded_tKD))
        hidden_tN = torch.ones(len(q_tKGD), len(seen_tKD), dtype=torch.bool).triu(num_first + 1)
        scores_KGtN = _scores(q_tKGD, seen_tKD) * self._spec.scale
        if self._spec.softcap is not None:
            scores_KGtN = torch.tanh(scores_KGtN / self._spec.softcap) * self._spec.softcap
        weights_KGtN = scores_KGtN.masked_fill(hidden_tN, float("-inf")).softmax(-1)
        for choice, scale_KD in enumerate(self._choices_SKD):
            code = quantize_keys(rotate_heads(coded_tKD * scale_KD), self.planes.key_bits)
            read_tKD = rotate_heads(dequantize_keys(code, self.planes.key_bits, self.planes.head_dim)) / scale_KD
            error_KGtN = _scores(q_tKGD, read_tKD - coded_tKD) * self._spec.scale
            mean_KGt1 = (weights_KGtN * error_KGtN).sum(-1, keepdim=True)
            self.error_SK[choice] += (weights_KGtN * (error_KGtN - mean_KGt1).square()).sum((1, 2, 3))


def best_choices(error_SK: torch.Tensor) -> torch.Tensor:
    """Return the choice with the least error in each head; 0, which is no scale, unless another gains enough."""
    least_K, best_K = error_SK[1:].min(0)
    return torch.where(least_K <= (1 - LEAST_GAIN) * error_SK[0], 1 + best_K, 0)


def pair_scale(q_squares_KC: torch.Tensor, k_squares_KC: torch.Tensor) -> torch.Tensor:
    """Return s of each pair, float64 [K, C], with a geometric mean of about 1 in each head; 1 for a head without numbers."""
    logs_KC = (_mixed_log2(q_squares_KC) - _mixed_log2(k_squares_KC)) / 4
    logs_KC = (logs_KC - logs_KC.mean(-1, keepdim=True)).clamp(-MOST_LOG2, MOST_LOG2)
    logs_KC = torch.where(logs_KC.isfinite().all(-1, keepdim=True), logs_KC, 0.0)
    return (2.0 ** ((logs_KC * STEPS_PER_OCTAVE).round() / STEPS_PER_OCTAVE)).double()


def _mixed_log2(squares_KC: torch.Tensor) -> torch.Tensor:
    return (squares_KC + MIXED * squares_KC.mean(-1, keepdim=True)).log2()


def _pair_squares(x_XD: torch.Tensor) -> torch.Tensor:
    """Return the squared length of each pair, [X, C] in float64."""
    return x_XD.double().unflatten(-1, (2, -1)).square().sum(-2)


def _scores(q_tKGD: torch.Tensor, k_NKD: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tkgd,nkd->kgtn", q_tKGD, k_NKD)


def _bias_rows(key_bias: KeyBias, start: int, num_rows: int) -> torch.Tensor:
    """Return what keys at these positions are stored without: [t, K, D]."""
    position_t = torch.arange(start, start + num_rows, device=key_bias.bias_KD.device)
    return key_bias_rows(key_bias, position_t).transpose(0, 1).float().cpu()
