"""The parameters of a decoder and which checkpoint tensors make up each of them; no torch.

A parameter is one final tensor, such as the fused layers.3.qkv.weight. A part is one checkpoint tensor that fills some of
its rows. Checkpoint tensors are named as Hugging Face names them; a source with other names (GGUF) translates.
"""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Part:
    """One whole checkpoint tensor that fills rows [row_start, row_start + shape[0]) of a parameter."""

    tensor: str
    row_start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One final tensor; its parts cover every row exactly once."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def check(self) -> None:
        """Every row is filled once, in order, by parts of the right width."""
        row = 0
        for part in self.parts:
            assert part.row_start == row, f"{self.name}: {part.tensor} starts at row {part.row_start}, not {row}"
            assert part.shape[1:] == self.shape[1:], (
                f"{self.name}: {part.tensor} has {part.shape=} beside {self.shape=}"
            )
            row += part.shape[0]
        assert row == self.shape[0], f"{self.name}: parts fill {row} rows of {self.shape[0]}"
