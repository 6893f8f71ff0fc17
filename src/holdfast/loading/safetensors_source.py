"""The weights of a folder: one or many safetensors files as one source, read through one reused buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from holdfast.errors import ModelFormatError, shown
from holdfast.loading.json_file import AGAIN
from holdfast.loading.safetensors_file import SafetensorsFile
from holdfast.loading.source import TensorEntry
from holdfast.quant.formats import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

IGNORABLE_ENDINGS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", "decoder.version")
"""Buffers that older checkpoints saved; what they hold follows from the config."""


class SafetensorsSource:
    """Checked headers of all files; entries are in the order of the files and of the data in them.

    One file is open at a time, so that a model of a thousand files needs no more descriptors than one of a single file.
    """

    def __init__(self, files: Sequence[SafetensorsFile], renames: Sequence[tuple[str, str]] = ()) -> None:
        """`renames` are prefixes of names in the files, and what they stand for."""
        self._places: dict[str, tuple[SafetensorsFile, str]] = {}
        self._entries: dict[str, TensorEntry] = {}
        self._buffer: torch.Tensor | None = None
        self._open_file: SafetensorsFile | None = None
        for file in files:
            for tensor in file.tensors.values():
                name = _renamed(tensor.name, renames)
                if name in self._places:
                    first = self._places[name][0].path.name
                    raise ModelFormatError(
                        f"the tensor {shown(name)} is in {file.path.name}", f"it is in {first} too", AGAIN
                    )
                self._places[name] = (file, tensor.name)
                self._entries[name] = TensorEntry(
                    name, tensor.torch_dtype, tensor.shape, file.path.name, tensor.num_bytes
                )

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    @property
    def ignorable(self) -> frozenset[str]:
        return frozenset(name for name in self._entries if name.endswith(IGNORABLE_ENDINGS))

    def read_rows(self, name: str, row_start: int, row_end: int) -> torch.Tensor:
        """Rows of a tensor, in a buffer that the next call fills anew."""
        import torch

        entry = self._entries[name]
        file, stored_name = self._places[name]
        row_bytes = prod(entry.shape[1:]) * DTYPE_BYTES[entry.dtype]
        num_bytes = (row_end - row_start) * row_bytes
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if self._open_file is not None and self._open_file is not file:
            self._open_file.close()
        self._open_file = file
        rows = self._buffer[:num_bytes]
        file.read_into(stored_name, row_start * row_bytes, rows.numpy().data)
        return rows.view(getattr(torch, entry.dtype)).view(row_end - row_start, *entry.shape[1:])

    def close(self) -> None:
        self._buffer = None
        if self._open_file is not None:
            self._open_file.close()
            self._open_file = None


def _renamed(name: str, renames: Sequence[tuple[str, str]]) -> str:
    for prefix, replacement in renames:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
