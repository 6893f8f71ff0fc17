"""Rows of logits for kernels that choose tokens, and the scratch they work in, between red zones.

Exponentials differ in the last place from one device to the next. So rows are made of distances whose weights come out the
same in the kernel and in torch, and then everything else has to be the same as well.
"""

from collections.abc import Callable

import torch

from holdfast.kernels.geometry import NUM_BUCKETS, LogitRow, num_chunks
from holdfast.kernels.sampling.argmax import LogitScratch
from holdfast.kernels.sampling.candidates import reference_weights, weights
from holdfast.kernels.triton_compat import constexpr, jit, tl

INF = float("inf")
NAN = float("nan")
LARGEST_UNIFORM = 1 - 2.0**-53


def make_scratch(
    guarded: Callable[..., torch.Tensor], num_rows: int, vocab_size: int, chunk_tokens: int, num_candidates: int
) -> LogitScratch:
    chunks = num_chunks(vocab_size, chunk_tokens)
    return LogitScratch(
        chunk_tokens,
        guarded(num_rows, chunks).fill_(NAN),
        guarded(num_rows, chunks, dtype=torch.int32).fill_(-7),
        guarded(num_rows, chunks, dtype=torch.int64).fill_(-7),
        guarded(num_rows, chunks, dtype=torch.int32).fill_(-7),
        guarded(num_rows, chunks, NUM_BUCKETS, dtype=torch.int32).fill_(-7),
        guarded(num_rows, dtype=torch.int32).fill_(-7),
        guarded(num_rows, num_candidates).fill_(NAN),
        guarded(num_rows, num_candidates, dtype=torch.int32).fill_(-7),
    )


def make_table(rows: list[LogitRow], device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64, device=device)


def agreed_distances(temperature: float, device: torch.device, count: int = 500, seed: int = 0) -> torch.Tensor:
    """Distances on which kernel and torch agree, from hardly any to beyond the last weight."""
    generator = torch.Generator().manual_seed(seed)
    distance = torch.rand(4 * count, generator=generator) ** 2 * 30
    distance[:8] = torch.tensor([0.0, 1e-30, 0.24999, 0.25, 2.0, 60.9, 61.1, INF])
    distance = distance.to(device)
    found = torch.zeros(len(distance), dtype=torch.int64, device=device)
    _weights_kernel[(1,)](distance, found, len(distance), -temperature, BLOCK=4096)
    agreed = distance[found == reference_weights(distance, -temperature, 0.0)]
    assert len(agreed) > count / 2, f"of {len(distance)} weights only {len(agreed)} are the same"
    return agreed[:count]


def agreed_logits(
    num_rows: int, vocab_size: int, temperature: float, device: torch.device, num_values: int = 500, seed: int = 0
) -> torch.Tensor:
    """Rows of such distances; fewer values give more ties."""
    values = agreed_distances(temperature, device, num_values, seed)
    places = torch.randint(len(values), (num_rows, vocab_size), generator=torch.Generator().manual_seed(seed + 1))
    logits = -values[places.to(device)]
    logits[
        torch.arange(num_rows), torch.randint(vocab_size, (num_rows,), generator=torch.Generator().manual_seed(2))
    ] = 0.0
    return logits


@jit
def _weights_kernel(p_distance, p_weight, count, negative_temperature, BLOCK: constexpr):
    o_place = tl.arange(0, BLOCK)
    b_distance = tl.load(p_distance + o_place, mask=o_place < count, other=0.0)
    b_weight = weights(b_distance, negative_temperature, 0.0)
    tl.store(p_weight + o_place, b_weight, mask=o_place < count)
