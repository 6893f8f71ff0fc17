"""OnDisk: a model's files by stored type; DiskAccount: their bytes in memory, and why; no torch."""

import re
from textwrap import wrap
from typing import NamedTuple

from holdfast.memory.sizes import format_bytes

COLUMNS, INDENT = 80, 11
JOINT = "\N{NO-BREAK SPACE}"
_AFTER_NUMBER = re.compile(r"(?<=[0-9]) ")


class StoredType(NamedTuple):
    """Tensors of one stored type."""

    name: str
    num_tensors: int
    num_bytes: int


class OnDisk(NamedTuple):
    """Disk usage of a checkpoint."""

    num_files: int
    num_bytes: int
    """Includes headers."""
    types: tuple[StoredType, ...]
    """The most frequent type first."""
    has_blocks: bool
    """True if some tensors are blocks of codes and scales."""
    embedding_type: str | None
    """The type of the embedding if it is stored in blocks."""

    @property
    def summary(self) -> str:
        files = f" in {self.num_files} files" if self.num_files > 1 else ""
        types = ", ".join(f"{one.num_tensors} {one.name}" for one in self.types)
        return f"{format_bytes(self.num_bytes)}{files}: {types}"


class HeldGroup(NamedTuple):
    """Weights of one group (embed, layers, experts, lm_head) in memory."""

    name: str
    stored_as: tuple[str, ...]
    num_bytes: int


class DiskAccount(NamedTuple):
    """Memory usage of the files, and the effect of one option."""

    on_disk: OnDisk
    memory_bytes: int
    dtype: str
    scheme: str | None
    """None: weights are kept in `dtype`."""
    other_scheme: str | None = None
    """A scheme that would take less, if none is used."""
    other_bytes: int = 0
    kept: str = ""
    """What stays packed as it is stored, and what is expanded and why; empty if all is expanded."""
    groups: tuple[HeldGroup, ...] = ()
    """What each group holds, if some of it stays packed."""

    @property
    def reason(self) -> str:
        """Reason that memory and disk differ in bytes."""
        if self.kept:
            return self.kept
        what = "blocks" if self.on_disk.has_blocks else "tensors"
        if self.scheme is not None:
            return f"{what} are quantized again, to {self.scheme}, as they load"
        return f"{what} are {'expanded to' if self.on_disk.has_blocks else 'kept in'} {self.dtype} as they load"

    @property
    def advice(self) -> str | None:
        """The option that would take less memory, and how much."""
        if self.other_scheme is None:
            return None
        return f"--quantization {self.other_scheme} would hold {format_bytes(self.other_bytes)}"

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines on disk, memory, its groups, and the advice, wrapped at 80 columns."""
        memory = f"{format_bytes(self.memory_bytes)}: {self.reason}"
        held = (f"{one.name} {format_bytes(one.num_bytes)} in {', '.join(one.stored_as)}" for one in self.groups)
        rows = [
            ("on disk", self.on_disk.summary),
            ("in memory", memory),
            ("", "; ".join(held)),
            ("", self.advice or ""),
        ]
        # Keep a number and its unit on one line.
        joined = [f"{title:<{INDENT}}{_AFTER_NUMBER.sub(JOINT, text)}" for title, text in rows]
        lines = (line for text in joined for line in wrap(text, COLUMNS, subsequent_indent=" " * INDENT))
        return tuple(line.replace(JOINT, " ") for line in lines)

    @property
    def sentence(self) -> str:
        disk, memory = format_bytes(self.on_disk.num_bytes), format_bytes(self.memory_bytes)
        advice = "" if self.advice is None else f" ({self.advice})"
        return f"Its {disk} on disk are {memory} in memory, since {self.reason}{advice}."

    def as_dict(self) -> dict[str, object]:
        return {
            "disk_bytes": self.on_disk.num_bytes,
            "num_files": self.on_disk.num_files,
            "types": {one.name: {"tensors": one.num_tensors, "bytes": one.num_bytes} for one in self.on_disk.types},
            "memory_bytes": self.memory_bytes,
            "reason": self.reason,
            "groups": {one.name: {"stored_as": one.stored_as, "bytes": one.num_bytes} for one in self.groups},
            "less_with": {} if self.other_scheme is None else {self.other_scheme: self.other_bytes},
        }
