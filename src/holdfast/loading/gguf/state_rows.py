"""Gated delta nets in GGUF files: value heads in turn, and decay rates as numbers below zero; no torch.

H value heads, G key heads, r = H / G

Key head g serves the value heads g * r to g * r + r - 1 in a checkpoint of Hugging Face. Files of qwen35 and qwen35moe
hold the first value head of each key head, then the second of each, and so on: row h of ours is head h % r * G + h // r
there. Inputs of the output projection have the file's order, too. A block may hold two heads of a row, so columns stay,
and the layer writes its output in that order (`StateSpec.is_tiled`). Files of qwen3next keep the order of checkpoints.

ssm_a holds -exp(A_log).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.families.state.spec import StateSpec

TILED_ARCHITECTURES = ("qwen35", "qwen35moe")
RATES = re.compile(r"blk\.[0-9]+\.ssm_a", re.ASCII)
VECTORS = re.compile(r"blk\.[0-9]+\.(?:ssm_a|ssm_dt\.bias)", re.ASCII)
"""Tensors with one number for each value head."""
_BY_HEAD = re.compile(
    r"blk\.[0-9]+\.(?:(attn_qkv|ssm_conv1d)\.weight|(attn_gate)\.weight|(ssm_alpha|ssm_beta)\.weight|ssm_dt\.bias|ssm_a)",
    re.ASCII,
)


class Run(NamedTuple):
    """Consecutive rows: the first one here, the first one in the file, and how many."""

    row: int
    file_row: int
    num_rows: int


class StateRows(NamedTuple):
    """The rows of a file's gated delta nets."""

    num_before: int
    """Rows of queries and keys, before those of values."""
    key_heads: int
    value_heads: int
    value_dim: int
    is_tiled: bool

    @classmethod
    def of(cls, spec: StateSpec) -> "StateRows":
        return cls(2 * spec.key_size, spec.key_heads, spec.value_heads, spec.value_dim, spec.is_tiled)

    def runs(self, tensor: str, start: int, end: int) -> Iterator[Run]:
        """Yield the runs of a tensor's rows [start, end)."""
        match = _BY_HEAD.fullmatch(tensor) if self.is_tiled else None
        if match is None:
            yield Run(start, start, end - start)
            return
        before = self.num_before if match[1] else 0
        head_rows = self.value_dim if match[1] or match[2] else 1
        if start < before:
            yield Run(start, start, min(end, before) - start)
        row = max(start, before)
        while row < end:
            head, within = divmod(row - before, head_rows)
            group, place = divmod(head, self.value_heads // self.key_heads)
            num_rows = min(head_rows - within, end - row)
            yield Run(row, before + (place * self.key_heads + group) * head_rows + within, num_rows)
            row += num_rows
