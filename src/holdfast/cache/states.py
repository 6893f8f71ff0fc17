"""StateRule: how prompts are cut and when states are kept; Snapshots: places that keep states of prefixes; no torch.

A state is what a layer has gathered of all tokens so far, one per sequence. It lies outside the pages, by place:

    places   [ 0 .. max_num_seqs - 1: slots of the runner ][ .. + num_snapshots - 1: snapshots ]

A snapshot is a copy of a slot's state at the end of a block of the prefix cache. A prefix can be a hit only there.
"""

from dataclasses import dataclass

GRID = 64
"""Tokens of a chunk of the state kernels: a prompt that is cut at multiples of it has the same bits as a whole one."""
SNAPSHOT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class StateRule:
    """How the prompts of a model with states are cut, and how many snapshots of states there are."""

    grid: int = GRID
    num_snapshots: int = 0
    """Places of snapshots; 0: no prefix can hit."""
    snapshot_tokens: int = SNAPSHOT_TOKENS
    """Tokens between two snapshots of a long prompt."""

    def __post_init__(self) -> None:
        assert self.grid >= 2, f"{self.grid=} leaves no piece to the chunk kernel"
        assert self.num_snapshots >= 0, f"{self.num_snapshots=}"
        assert self.snapshot_tokens >= 1, f"{self.snapshot_tokens=}"

    def piece(self, start: int, num_prompt_tokens: int, most: int) -> int:
        """Return the rows of the next piece of a sequence: at most `most`, or 0 if these are too few for a piece.

        Rows of a prompt begin and end at multiples of the grid, or end with the prompt. A piece of one row belongs to
        the recurrent kernel and a longer one to the chunk kernel. So a last row alone on its chunk is a piece of its
        own, and a row after the prompt too.
        """
        left = num_prompt_tokens - start
        if left <= 1:
            return min(most, 1)
        assert start % self.grid == 0, f"a prompt of {num_prompt_tokens} tokens goes on at {start}, {self.grid=}"
        whole = left - 1 if left % self.grid == 1 else left
        return whole if most >= whole else most // self.grid * self.grid

    def least(self, start: int, num_prompt_tokens: int) -> int:
        """Return the rows of the shortest piece that can come next."""
        return self.piece(start, num_prompt_tokens, max(min(num_prompt_tokens - start, self.grid), 1))
