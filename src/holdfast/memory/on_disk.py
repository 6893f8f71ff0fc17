"""OnDisk: a model's files by stored type; DiskAccount: what becomes of them in memory and why, in words; no torch."""

import re
from textwrap import wrap
from typing import NamedTuple

from holdfast.memory.sizes import format_bytes

COLUMNS, INDENT = 80, 11
JOINT = "\N{NO-BREAK SPACE}"
_BEHIND_NUMBER = re.compile(r"(?<=[0-9]) ")


class StoredType(NamedTuple):
    """Tensors that are stored alike."""

    name: str
    num_tensors: int
    num_bytes: int


class OnDisk(NamedTuple):
    """What a checkpoint of stored types takes on disk."""

    num_files: int
    num_bytes: int
    """Of the files whole, headers included."""
    types: tuple[StoredType, ...]
    """What most tensors have comes first."""
    has_blocks: bool
    """Some tensors are blocks of codes and scales, which are expanded as they load."""
    embedding_type: str | None
    """The type of the embedding where that is such blocks."""

    @property
    def words(self) -> str:
        files = f" in {self.num_files} files" if self.num_files > 1 else ""
        return (
            f"{format_bytes(self.num_bytes)}{files}: {', '.join(f'{one.num_tensors} {one.name}' for one in self.types)}"
        )


class DiskAccount(NamedTuple):
    """The same in memory, and what one option would make of it."""

    on_disk: OnDisk
    memory_bytes: int
    dtype: str
    scheme: str | None
    """None: weights are kept in `dtype`."""
    other_scheme: str | None = None
    """A scheme that would hold less, where none is taken."""
    other_bytes: int = 0

    @property
    def reason(self) -> str:
        """Why memory holds other bytes than the disk."""
        kept = (
            f"blocks are expanded to {self.dtype}" if self.on_disk.has_blocks else f"tensors are kept in {self.dtype}"
        )
        if self.scheme is None:
            return f"{kept} as they load"
        return (
            f"{'blocks' if self.on_disk.has_blocks else 'tensors'} are quantized again, to {self.scheme}, as they load"
        )

    @property
    def advice(self) -> str | None:
        """The option that would hold less, and how much."""
        if self.other_scheme is None:
            return None
        return f"--quantization {self.other_scheme} would hold {format_bytes(self.other_bytes)}"

    @property
    def lines(self) -> tuple[str, ...]:
        """Two lines, or three with the advice; longer ones go on below, since a terminal has 80 columns."""
        memory = f"{format_bytes(self.memory_bytes)}: {self.reason}"
        told = [("on disk", self.on_disk.words), ("in memory", memory), ("", self.advice or "")]
        # A number stays beside what it counts.
        joined = [f"{title:<{INDENT}}{_BEHIND_NUMBER.sub(JOINT, words)}" for title, words in told]
        lines = (line for words in joined for line in wrap(words, COLUMNS, subsequent_indent=" " * INDENT))
        return tuple(line.replace(JOINT, " ") for line in lines)

    @property
    def clause(self) -> str:
        """All of it in the middle of a sentence."""
        disk, memory = format_bytes(self.on_disk.num_bytes), format_bytes(self.memory_bytes)
        advice = "" if self.advice is None else f" ({self.advice})"
        return f"its {disk} on disk are {memory} in memory, since {self.reason}{advice}"

    def as_dict(self) -> dict[str, object]:
        """For a program."""
        return {
            "disk_bytes": self.on_disk.num_bytes,
            "num_files": self.on_disk.num_files,
            "types": {one.name: {"tensors": one.num_tensors, "bytes": one.num_bytes} for one in self.on_disk.types},
            "memory_bytes": self.memory_bytes,
            "reason": self.reason,
            "less_with": {} if self.other_scheme is None else {self.other_scheme: self.other_bytes},
        }
