"""What every checkpoint looks like to the rest: tensors under Hugging Face names, read in row chunks; no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from holdfast.memory.tensor_spec import TensorSpec
from holdfast.models.parameters import Parameter
from holdfast.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from holdfast.loading.gguf_file import GGUFFile

RowWriter: TypeAlias = "Callable[[str, int, torch.Tensor], None]"
"""write(name, row_start, out_rows): rows of a checkpoint tensor from row_start on, into their final place and type."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One checkpoint tensor, as its header describes it."""

    name: str
    """The Hugging Face name, whatever the file calls it."""
    dtype: str
    """torch's name of the type that `read_rows` returns."""
    shape: tuple[int, ...]
    file: str
    """Name of the file that holds it, for messages."""
    num_bytes: int
    """Bytes on disk."""


class WeightSource(Protocol):
    """A checkpoint whose headers have been read and checked; no weight is read before `read_rows`."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor, by its Hugging Face name."""
        ...

    @property
    def ignorable(self) -> frozenset[str]:
        """Names among the entries that may stay unused, such as rotary tables; any other unused tensor is an error."""
        ...

    def read_rows(self, name: str, row_start: int, row_end: int) -> torch.Tensor:
        """Rows [row_start, row_end) on the CPU; of a one-dimensional tensor, elements.

        The tensor may view a buffer of the source: it holds until the next `read_rows`.
        """
        ...

    def close(self) -> None:
        """Let go of files and buffers; may be called twice."""
        ...


@runtime_checkable
class WritingSource(Protocol):
    """What a source has besides, if it can make rows where they are wanted and so needs no way through the host."""

    @property
    def writer_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors that a writer works with."""
        ...

    def writer(self, tensors: Mapping[str, torch.Tensor]) -> RowWriter:
        """Writes, on the device of these tensors, the bits that `read_rows` and a cast would give; allocates nothing there."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the makers of the model advise for generation; None where they say nothing."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class OpenModel:
    """A model on disk, known from its headers alone: what it is, what its parameters are, and where they come from."""

    path: Path
    """The folder or the GGUF file."""
    kind: Literal["directory", "gguf"]
    spec: ModelSpec
    parameters: tuple[Parameter, ...]
    source: WeightSource
    generation: GenerationDefaults
    gguf: GGUFFile | None = None
    """The open file, whose tokenizer is in it; None for a folder."""
