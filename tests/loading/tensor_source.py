"""A source in memory, for tests of what is done with sources."""

from collections.abc import Mapping

import torch

from holdfast.loading.sources.source import TensorEntry
from holdfast.models.parameters import Parameter, Part


class TensorSource:
    """Entries without data, or with tensors given beforehand, listed in the order in which they are given."""

    def __init__(self, entries=(), tensors=None, ignorable=frozenset(), on_read=None) -> None:
        self.tensors = tensors or {}
        self._entries = {entry.name: entry for entry in entries} | {
            name: TensorEntry(
                name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), "m.safetensors", tensor.nbytes
            )
            for name, tensor in self.tensors.items()
        }
        self._ignorable = frozenset(ignorable)
        self._on_read = on_read or (lambda name, row_start, row_end: None)
        self.reads: list[tuple[str, int, int, tuple[int, int] | None]] = []

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    @property
    def ignorable(self) -> frozenset[str]:
        return self._ignorable

    @property
    def scratch_bytes_per_reader(self) -> int:
        return 0

    def read_into(self, name, row_start, row_end, out, columns=None) -> None:
        self._on_read(name, row_start, row_end)
        self.reads.append((name, row_start, row_end, columns))
        tensor = self.tensors[name]
        rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
        rows = rows[row_start:row_end, slice(*columns) if columns else slice(None)].contiguous()
        assert rows.nbytes == len(out), f"{name}: {rows.shape} {rows.dtype} into {len(out)} bytes"
        torch.frombuffer(out, dtype=torch.uint8).copy_(rows.view(-1).view(torch.uint8))

    def close(self) -> None: ...


def entry(name, shape, dtype="float32", file="m.safetensors"):
    size = 1
    for extent in shape:
        size *= extent
    return TensorEntry(name, dtype, tuple(shape), file, 4 * size)


EMBED = Parameter("embed.weight", (10, 4), (Part("model.embed_tokens.weight", 0, (10, 4)),))
QKV = Parameter("layers.0.qkv.weight", (8, 4), (Part("q", 0, (4, 4)), Part("k", 4, (2, 4)), Part("v", 6, (2, 4))))
HEAD = Parameter("lm_head.weight", (10, 4), (Part("lm_head.weight", 0, (10, 4)),))
TIED = (EMBED, QKV)
UNTIED = (EMBED, QKV, HEAD)


def entries_for(parameters):
    return [entry(part.tensor, part.shape) for parameter in parameters for part in parameter.parts]
