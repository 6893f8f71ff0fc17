"""Centred keys: measure the mean key of each quantized layer on a short warm-up prompt, and store it.

K key/value heads, D head dim, X width of the fused QKV projection, T rows of the warm-up prompt

The mean of a head's keys uses up code range and distinguishes no key from another. It is measured once, before the
first page of a request is written, after the norm and before RoPE. It never changes, so a page means the same in every
step. The prompt's token ids follow from the vocabulary size alone. So codes stay a function of weights and settings,
and two starts give the same ones.

If scores have a key bias already, the mean is added to it: exact at every position, whatever follows the scores.
Otherwise one vector is subtracted from all keys: their mean, rotated to each position and averaged over the whole
context. Pairs that rotate fast average to zero. This shifts all scores of a row by the same number, which a plain
softmax ignores. Sinks and soft-capping would not, so nothing is subtracted from the keys of layers that have them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast.cache.chunks import ring_tables
from holdfast.cache.groups import CacheGroup
from holdfast.families.grouped.pages import GroupedBackend, QuantizedPages
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.kernels.attention.key_bias import KeyBias
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary
from holdfast.kernels.norm import rms_norm_reference
from holdfast.models.rope import rope_frequencies
from holdfast.models.spec import ModelSpec
from holdfast.quant.kv_quantize import rotate_heads
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence
from holdfast.request.sequence import Sequence as TokenSequence
from holdfast.runner.runner import Runner

WARM_TOKENS = 128
SKIPPED_TOKENS = 4
"""Left out of the mean: the first tokens attract attention and have unusual keys."""
LEAST_TOKENS = 32
"""Fewer tokens give no useful mean."""
LEAST_ID = 16
"""Vocabularies hold tokens below it that occur in no text."""
GOLDEN = 0.6180339887498949


def warm_token_ids(vocab_size: int, num_tokens: int) -> list[int]:
    """Return ids from the whole vocabulary, denser at low ids: tokenizers give those to frequent tokens."""
    least = min(LEAST_ID, vocab_size - 1)
    places = (number * GOLDEN % 1 for number in range(num_tokens))
    return [int(least * (vocab_size / least) ** place) if least else 0 for place in places]


def make_means(specs: Sequence[GroupedAttentionSpec], device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """Allocate a zero mean for every quantized layer without a key bias, sinks or a cap."""
    layers = [
        layer
        for layer, spec in enumerate(specs)
        if spec.cache.format.is_quantized and not spec.has_key_bias and spec.is_plain_softmax
    ]
    found: list[torch.Tensor | None] = [None] * len(specs)
    if layers:
        cache = specs[layers[0]].cache
        means_NKD = torch.zeros(len(layers), cache.num_kv_heads, cache.head_dim, device=device)
        for place, layer in enumerate(layers):
            found[layer] = means_NKD[place]
    return tuple(found)


class KeyRooms(NamedTuple):
    """Tensors that receive the mean of each layer."""

    biases: Sequence[KeyBias | None]
    """Key biases of scores; a layer that has one is also in `qkv`."""
    qkv: dict[int, torch.Tensor]
    """By layer: the runner's copy of the projection's bias."""
    means: Sequence[torch.Tensor | None]
    """Vectors subtracted from keys, in the space of their codes."""


@torch.inference_mode()
def centre_keys(runner: Runner, spec: ModelSpec, rooms: KeyRooms) -> int:
    """Measure and store the means. Return the number of tokens read, 0 if a step fits too few.

    Each rank measures its own heads, in one common step: `spec` is the rank's, token ids come from the whole
    vocabulary.
    """
    limits, backend = runner.limits, runner.backend
    num_tokens = min(WARM_TOKENS, limits.max_model_len, limits.max_num_batched_tokens)
    while sum(group.pages_for(num_tokens) for group in runner.groups) > runner.num_pages:
        num_tokens -= 1
    if num_tokens < LEAST_TOKENS or not isinstance(backend, GroupedBackend):
        return 0
    found: dict[int, torch.Tensor] = {}

    def measure(layer: int, qkv_TX: torch.Tensor, head_norm: HeadNorm | None, rotary: Rotary | None) -> None:
        if isinstance(backend.pages[layer], QuantizedPages):
            found[layer] = mean_key(qkv_TX[SKIPPED_TOKENS:num_tokens], spec, head_norm)

    backend.on_write = measure
    try:
        runner.hidden_rows(_step(warm_token_ids(runner.vocab_size, num_tokens), runner.groups))
    finally:
        backend.on_write = None
    with runner.on_runner_stream():  # cuBLAS takes a workspace for each stream with a product
        _store_means(runner, spec, rooms, found)
    return num_tokens


def _store_means(runner: Runner, spec: ModelSpec, rooms: KeyRooms, found: Mapping[int, torch.Tensor]) -> None:
    """Give each layer its mean: to the bias of its scores, or as the vector that its keys are short of."""
    limits, backend = runner.limits, runner.backend
    assert isinstance(backend, GroupedBackend), f"{type(backend).__name__} has no means"
    shape = spec.head_dim, spec.max_position, limits.max_model_len
    turns = {
        rope: average_turn(*rope_frequencies(rope, *shape), limits.max_model_len)
        for rope in spec.ropes
        if rope is not None
    }
    for layer, mean_KD in found.items():
        if not bool(mean_KD.isfinite().all()):
            continue  # weights are not finite; steps report that
        bias, room_KD = rooms.biases[layer], rooms.means[layer]
        if bias is not None:
            qkv_X = rooms.qkv[layer]
            mean_KD = mean_KD.to(qkv_X.dtype)  # what keys are short of is what scores get, to the bit
            qkv_X[spec.key_part] -= mean_KD.flatten()
            bias.bias_KD.add_(mean_KD)
        elif room_KD is not None:
            rope = spec.layer_rope(layer)
            turned_KD = mean_KD if rope is None else mean_KD @ turns[rope].to(mean_KD.device)
            pages = backend.pages[layer]
            assert isinstance(pages, QuantizedPages), f"layer {layer} has a mean and plain pages"
            room_KD.copy_(rotate_heads(turned_KD) if pages.planes.rotates_keys else turned_KD)


def mean_key(qkv_TX: torch.Tensor, spec: ModelSpec, head_norm: HeadNorm | None) -> torch.Tensor:
    """Return the mean key before RoPE, float32 [K, D]."""
    k_TKD = qkv_TX[:, spec.key_part].unflatten(-1, (spec.num_kv_heads, spec.head_dim))
    if head_norm is not None:
        k_TKD = rms_norm_reference(k_TKD, head_norm.k_weight_D, head_norm.eps, offset=head_norm.offset)
    return k_TKD.mean(0, dtype=torch.float32)


def average_turn(frequency_P: torch.Tensor, magnitude: float, num_positions: int) -> torch.Tensor:
    """Return the average RoPE rotation over the first `num_positions`, float32 [D, D], to multiply key rows by.

    The mean of exp(i w p) over p < L is a geometric series: exp(i w (L - 1) / 2) sin(w L / 2) / (L sin(w / 2)).
    """
    half_P = frequency_P.double() / 2
    size_P = (half_P * num_positions).sin() / (half_P.sin() * num_positions) * magnitude
    middle_P = half_P * (num_positions - 1)
    cos_P, sin_P = size_P * middle_P.cos(), size_P * middle_P.sin()
    swapped_DD = torch.eye(2 * len(half_P), dtype=torch.float64).roll(len(half_P), dims=0)
    return (torch.cat((cos_P, cos_P)).diag() + swapped_DD * torch.cat((-sin_P, sin_P))).float()


def _step(token_ids: list[int], groups: Sequence[CacheGroup]) -> LiveStep:
    """Make a step of one sequence on the first pages, which are free."""
    num_tokens = len(token_ids)
    tables = ring_tables(groups, num_tokens, num_tokens)
    sequence = TokenSequence(0, token_ids, num_tokens, SamplingParams(), seed=0, max_tokens=1, tables=tables)
    return LiveStep((ScheduledSequence.of(sequence, 0, num_tokens),))
