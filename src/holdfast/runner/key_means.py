"""Centred keys: measure the mean key of each quantized layer on a short warm-up prompt, and store it.

K key/value heads, D head dim, X width of the fused QKV projection, T rows of the warm-up prompt

The mean of a head's keys uses up code range and distinguishes no key from another. It is measured once, before the
first page of a request is written, after the norm and before RoPE. It never changes, so a page means the same in every
step. The prompt's token ids follow from the vocabulary size alone, and it is read in short steps whatever a step of the
engine may hold. So codes stay a function of weights and settings, and two starts give the same ones.

If scores have a key bias already, the mean is added to it: exact at every position, whatever follows the scores.
Otherwise one vector is subtracted from all keys: their mean, rotated to each position and averaged over the whole
context. Pairs that rotate fast average to zero. This shifts all scores of a row by the same number, which a plain
softmax ignores. Sinks and soft-capping would not, so nothing is subtracted from the keys of layers that have them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast.cache.chunks import ring_tables
from holdfast.families.grouped.pages import GroupedBackend, QuantizedPages
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.kernels.attention.key_bias import KeyBias
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary, in_pair_order
from holdfast.kernels.norm import rms_norm_reference
from holdfast.models.rope import rope_frequencies
from holdfast.models.spec import ModelSpec
from holdfast.quant.kv_quantize import rotate_heads
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence
from holdfast.request.sequence import Sequence as TokenSequence
from holdfast.runner.runner import Runner

WARM_TOKENS = 128
STEP_TOKENS = 32
"""Rows of a step that measures; fewer, by a power of two, if a step of the engine holds fewer."""
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
    """Measure and store the means. Return the number of tokens read, 0 if the pages or a sequence hold too few.

    Each rank measures its own heads, in common steps: `spec` is the rank's, token ids come from the whole vocabulary.
    """
    backend = runner.backend.paged
    num_tokens = min(WARM_TOKENS, runner.limits.max_model_len)
    while sum(group.most_pages(num_tokens, STEP_TOKENS) for group in runner.groups) > runner.num_pages:
        num_tokens -= 1
    if num_tokens < LEAST_TOKENS or not isinstance(backend, GroupedBackend):
        return 0
    keys: dict[int, list[torch.Tensor]] = {}

    def measure(layer: int, qkv_tX: torch.Tensor, head_norm: HeadNorm | None, rotary: Rotary | None) -> None:
        if isinstance(backend.pages[layer], QuantizedPages):
            keys.setdefault(layer, []).append(normed_keys(qkv_tX, spec, head_norm).to("cpu", copy=True))

    read_in_steps(runner, warm_token_ids(runner.vocab_size, num_tokens), measure)
    found = {layer: mean_key(torch.cat(steps)) for layer, steps in keys.items()}
    with runner.on_runner_stream():
        _store_means(runner, spec, rooms, found)
    return num_tokens


def read_in_steps(
    runner: Runner,
    token_ids: Sequence[int],
    measure: Callable[[int, torch.Tensor, HeadNorm | None, Rotary | None], None],
) -> None:
    """Run a text through the model in short steps of one sequence; `measure` gets the rows of each layer and step."""
    backend, ids, num_tokens = runner.backend.paged, list(token_ids), len(token_ids)
    assert isinstance(backend, GroupedBackend), f"{type(backend).__name__} has no keys by head"
    step_tokens = min(STEP_TOKENS, 1 << (runner.limits.max_num_batched_tokens.bit_length() - 1))
    tables = ring_tables(runner.groups, num_tokens, step_tokens)
    sequence = TokenSequence(0, ids, num_tokens, SamplingParams(), seed=0, max_tokens=1, tables=tables, slot=0)
    num_rows = 0

    def measure_rows(layer: int, qkv_tX: torch.Tensor, head_norm: HeadNorm | None, rotary: Rotary | None) -> None:
        measure(layer, qkv_tX[:num_rows], head_norm, rotary)

    backend.on_write = measure_rows
    try:
        for start in range(0, num_tokens, step_tokens):
            num_rows = min(step_tokens, num_tokens - start)
            runner.hidden_rows(LiveStep((ScheduledSequence.of(sequence, start, num_rows),)))
    finally:
        backend.on_write = None


def _store_means(runner: Runner, spec: ModelSpec, rooms: KeyRooms, found: Mapping[int, torch.Tensor]) -> None:
    """Give each layer its mean, found on the host: to the bias of its scores, or as the vector that its keys are short of."""
    limits, backend = runner.limits, runner.backend.paged
    assert isinstance(backend, GroupedBackend), f"{type(backend).__name__} has no means"
    shape = spec.rope_dim, spec.max_position, limits.max_model_len
    turns = {
        rope: average_turn(*rope_frequencies(rope, *shape), limits.max_model_len, spec.head_dim // 2)
        for rope in spec.ropes
        if rope is not None
    }
    for layer, mean_KD in found.items():
        if not bool(mean_KD.isfinite().all()):
            continue  # weights are not finite; steps report that
        bias, room_KD = rooms.biases[layer], rooms.means[layer]
        if bias is not None:
            qkv_X = rooms.qkv[layer]
            mean_KD = mean_KD.to(qkv_X)  # what keys are short of is what scores get, to the bit
            qkv_X[spec.key_part] -= mean_KD.flatten()
            bias.bias_KD.add_(in_pair_order(mean_KD, spec.rope_dim))
        elif room_KD is not None:
            rope = spec.layer_rope(layer)
            turned_KD = mean_KD if rope is None else in_pair_order(mean_KD, spec.rope_dim) @ turns[rope]
            pages = backend.pages[layer]
            assert isinstance(pages, QuantizedPages), f"layer {layer} has a mean and plain pages"
            room_KD.copy_(rotate_heads(turned_KD) if pages.planes.rotates_keys else turned_KD)


def normed_keys(qkv_TX: torch.Tensor, spec: ModelSpec, head_norm: HeadNorm | None) -> torch.Tensor:
    """Return the keys before RoPE: [T, K, D]."""
    k_TKD = qkv_TX[:, spec.key_part].unflatten(-1, (spec.num_kv_heads, spec.head_dim))
    if head_norm is None:
        return k_TKD
    return rms_norm_reference(k_TKD, head_norm.k_weight_D, head_norm.eps, offset=head_norm.offset)


def mean_key(k_TKD: torch.Tensor) -> torch.Tensor:
    """Return the mean key of a text, float32 [K, D]. It is rounded, so that the last bits of a step's sums do not reach it."""
    return k_TKD[SKIPPED_TOKENS:].mean(0, dtype=torch.float64).bfloat16().float()


def average_turn(frequency_P: torch.Tensor, magnitude: float, num_positions: int, num_pairs: int) -> torch.Tensor:
    """Return the average RoPE rotation over the first `num_positions`, float32 [D, D], to multiply key rows by.

    The mean of exp(i w p) over p < L is a geometric series: exp(i w (L - 1) / 2) sin(w L / 2) / (L sin(w / 2)). Rows lie in
    pair order, and of `num_pairs` RoPE turns the first.
    """
    half_P = frequency_P.double() / 2
    size_P = (half_P * num_positions).sin() / (half_P.sin() * num_positions) * magnitude
    middle_P = half_P * (num_positions - 1)
    cos_C, sin_C = torch.ones(num_pairs, dtype=torch.float64), torch.zeros(num_pairs, dtype=torch.float64)
    cos_C[: len(half_P)], sin_C[: len(half_P)] = size_P * middle_P.cos(), size_P * middle_P.sin()
    swapped_DD = torch.eye(2 * num_pairs, dtype=torch.float64).roll(num_pairs, dims=0)
    return (torch.cat((cos_C, cos_C)).diag() + swapped_DD * torch.cat((-sin_C, sin_C))).float()
