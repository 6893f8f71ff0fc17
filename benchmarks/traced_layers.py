"""Fingerprints of what the parts of DeepSeek-V4's layers take and give, step by step: where ranks begin to differ from one.

T rows, X columns

Rank 0 has the first heads and groups. So of columns that ranks share only the first quarter counts: rank 0 has it among 1, 2
and 4 ranks. A fingerprint waits for the device, so a CUDA graph cannot capture one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from holdfast.models.compressed_decoder import CompressedDecoder

NUM_QUARTERS = 4
"""Most ranks that share columns."""
PRIME = 4093
"""Weights of a fingerprint repeat after so many elements."""
BITS = {2: torch.int16, 4: torch.int32}


class Print(NamedTuple):
    """A place in a step, its rows, and a number that changes with any bit there."""

    place: str
    num_rows: int
    number: int


class TracedPart:
    """A callable part of a layer that records what it takes and gives."""

    def __init__(
        self,
        inner: Any,  # noqa: ANN401
        place: str,
        prints: list[Print],
        num_ranks: int,
        takes_share: bool = False,
        gives_share: bool = False,
    ) -> None:
        self._inner, self._place, self._prints = inner, place, prints
        self._ranks_that_take = num_ranks if takes_share else NUM_QUARTERS
        self._ranks_that_give = num_ranks if gives_share else NUM_QUARTERS

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._inner, name)

    def __call__(self, x_TX: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401
        self._prints.append(print_of(f"{self._place} takes", x_TX, self._ranks_that_take))
        found = self._inner(x_TX, *others, **named)
        self._prints.append(print_of(f"{self._place} gives", found, self._ranks_that_give))
        return found


def print_of(place: str, x_TX: torch.Tensor, num_ranks: int = NUM_QUARTERS) -> Print:
    """Return the fingerprint of rows; if `num_ranks` share all columns, of the first quarter of those."""
    x_TX = x_TX[:, : x_TX.shape[1] * num_ranks // NUM_QUARTERS].contiguous()
    bits_X = x_TX.view(BITS[x_TX.element_size()]).flatten().to(torch.int64) & 0xFFFFFFFF
    weights_X = torch.arange(len(bits_X), device=bits_X.device) % PRIME + 1
    return Print(place, len(x_TX), int((bits_X * weights_X).sum()))


def trace(decoder: CompressedDecoder, num_ranks: int) -> list[Print]:
    """Make the decoder of rank 0 record; return the list that grows."""
    prints: list[Print] = []
    for index, layer in enumerate(decoder.layers):
        place, attention = f"layer {index}", layer.attention
        own: Any = {
            "q": TracedPart(attention.q, f"{place} queries", prints, num_ranks, gives_share=True),
            "b": TracedPart(attention.out.b, f"{place} output projection", prints, num_ranks, takes_share=True),
            "attention": TracedPart(attention, f"{place} attention", prints, num_ranks),
            "experts": TracedPart(layer.experts, f"{place} experts", prints, num_ranks),
        }
        attention.q, attention.out = own["q"], attention.out._replace(b=own["b"])
        decoder.layers[index] = layer._replace(attention=own["attention"], experts=own["experts"])
    return prints


def first_difference(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Count prints that differ, and name the first one."""
    pairs = list(zip(one, other, strict=False))
    different = [number for number, (a, b) in enumerate(pairs) if list(a) != list(b)]
    found: dict[str, Any] = {"compared": len(pairs), "different": len(different) + abs(len(one) - len(other))}
    if different:
        place, num_rows, _ = pairs[different[0]][0]
        found |= {"first": different[0], "place": place, "rows": num_rows}
    return found
