"""TileGeometry: how a kernel wants a step's work cut into tiles; no torch."""

from typing import NamedTuple


class TileGeometry(NamedTuple):
    """What makers of tile lists must know of a kernel. Small tiles are for decoding and short queries, large ones for prompts."""

    small_rows: int
    """Most rows of a small tile."""
    large_rows: int
    """Most rows of a large tile."""
    small_programs_per_sm: int
    large_programs_per_sm: int
    block_tokens: int
    """Tokens that a program takes at once: splits are whole blocks, but for the end of the last one."""
    few_rows: int = 0
    """Steps of at most so many rows run fewer programs for small tiles ..."""
    few_programs_per_sm: int = 0
    """... which are these; not looked at where few_rows is 0."""
    has_aligned_starts: bool = False
    """Token ranges begin at multiples of block_tokens, also behind a window: the kernel masks what comes too early."""
    takes_whole_turns: bool = False
    """Small tiles are cut so that the last turn of the programs is not for a few remainders; else to the nearest fair share."""

    def small_programs(self, num_rows: int) -> int:
        """Programs a multiprocessor for the small tiles of a step of so many rows, padding included."""
        return self.few_programs_per_sm if num_rows <= self.few_rows else self.small_programs_per_sm
