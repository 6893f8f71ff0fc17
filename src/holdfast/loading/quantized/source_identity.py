"""SourceIdentity: what tells one checkpoint from another without reading its weights, and what changed since; no torch.

Names, sizes, times and headers of the files, and the settings; not where they lie, so that a model may be moved. Weights that
were exchanged for others of the same size, at the same time to the nanosecond, under the same header, are not noticed.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ModelFormatError
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.sources.safetensors_file import MAX_HEADER_BYTES
from holdfast.loading.sources.source import WritingSource
from holdfast.loading.sources.weight_files import file_inside

SETTINGS_FILE = "config.json"
MAX_SETTINGS_BYTES = 32 * 2**20
DIGEST_BYTES = 16
"""Of every checksum: the first half of SHA-256, which processors have instructions for."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of weights."""

    name: str
    num_bytes: int
    mtime_ns: int
    header_digest: str

    def change(self, then: "SourceFile") -> str | None:
        """None, or what is different from what it was then, in words."""
        if self.num_bytes != then.num_bytes:
            return f"{self.name} has {self.num_bytes} bytes and had {then.num_bytes}"
        if self.header_digest != then.header_digest:
            return f"{self.name} has another header"
        if self.mtime_ns != then.mtime_ns:
            return f"{self.name} was written at another time"
        return None


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """The files of a checkpoint in the order of their names, and the settings that give them meaning."""

    files: tuple[SourceFile, ...]
    settings_digest: str
    """Of config.json; of nothing for a GGUF file, whose header has the settings."""

    def change(self, then: "SourceIdentity") -> str | None:
        """None, or the first difference from what it was then, in words."""
        now_files, then_files = ({file.name: file for file in one.files} for one in (self, then))
        for name in sorted(now_files.keys() | then_files.keys()):
            if name not in then_files:
                return f"{name} is new"
            if name not in now_files:
                return f"{name} is gone"
            change = now_files[name].change(then_files[name])
            if change is not None:
                return change
        return None if self.settings_digest == then.settings_digest else f"{SETTINGS_FILE} was changed"

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def digest(data: bytes | memoryview) -> bytes:
    """The checksum of some bytes; other threads run meanwhile."""
    return hashlib.sha256(data, usedforsecurity=False).digest()[:DIGEST_BYTES]


def identify_source(model: OpenModel) -> SourceIdentity | None:
    """What the model's files are now; None for made-up weights, which are in none."""
    if isinstance(model.source, WritingSource):
        return None
    names = sorted({entry.file for entry in model.source.entries.values()})
    if model.gguf is not None:
        assert names in ([], [model.path.name]), f"{model.path.name} is one file, and its tensors are in {names}"
        return SourceIdentity((_identify(model.path, model.gguf.data_start),), digest(b"").hex())
    files = tuple(_identify(file_inside(model.path, name), None) for name in names)
    settings = file_inside(model.path, SETTINGS_FILE)
    return SourceIdentity(files, digest(_beginning(settings, MAX_SETTINGS_BYTES)[0]).hex())


def header_digest(path: Path) -> str:
    """The checksum of a safetensors file's header."""
    return _identify(path, None).header_digest


def _identify(path: Path, header_bytes: int | None) -> SourceFile:
    """With None the header is that of a safetensors file, which says itself how long it is."""
    if header_bytes is None:
        header_bytes = 8 + int.from_bytes(_beginning(path, 8)[0], "little")
        if header_bytes > 8 + MAX_HEADER_BYTES:
            raise ModelFormatError(
                f"{path.name} says its header has {header_bytes - 8} bytes",
                f"at most {MAX_HEADER_BYTES} are read",
                "check that it is a safetensors file",
            )
    header, status = _beginning(path, header_bytes)
    return SourceFile(path.name, status.st_size, status.st_mtime_ns, digest(header).hex())


def _beginning(path: Path, num_bytes: int) -> tuple[bytes, os.stat_result]:
    """Up to so many bytes, and what the system says of the file that they were read from."""
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            data = bytearray(min(num_bytes, status.st_size))
            view, num_read = memoryview(data), 0
            while num_read < len(data) and (count := file.readinto(view[num_read:])):
                num_read += count
    except OSError as error:
        raise ModelFormatError(f"{path.name} cannot be read", str(error.strerror or error), "check the file") from error
    return bytes(data[:num_read]), status
