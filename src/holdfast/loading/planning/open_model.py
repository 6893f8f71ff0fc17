"""OpenModel: a model on disk, known from its headers alone; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast.loading.sources.source import WeightSource
from holdfast.models.parameters import Parameter
from holdfast.models.spec import ModelSpec

if TYPE_CHECKING:
    from holdfast.loading.gguf.file import GGUFFile
    from holdfast.loading.planning.stored_schemes import StoredSchemes


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the makers of the model advise for generation; None where they say nothing."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """How hidden states become embeddings: of the last token, to unit length, unless files of the model say otherwise."""

    is_embedding: bool = False
    """The model was made for embeddings: files of sentence-transformers are there, or it was saved without a head."""
    normalizes: bool = True
    refusal: str = ""
    """Why its embeddings cannot be computed here, in words."""
    has_head: bool = True
    """False if no token can be chosen, because the checkpoint has no language-model head."""


@dataclass(frozen=True)
class OpenModel:
    """A model on disk, known from its headers alone: what it is, what its parameters are, and where they come from."""

    path: Path
    """The folder or the GGUF file, of several the first."""
    kind: Literal["directory", "gguf"]
    spec: ModelSpec
    parameters: tuple[Parameter, ...]
    source: WeightSource
    generation: GenerationDefaults
    gguf: GGUFFile | None = None
    """The open file, whose tokenizer is in it; None for a folder."""
    stored: StoredSchemes | None = None
    """How the checkpoint has its matrices quantized already, as its settings say; None where it has not."""
    pooling: PoolingSettings = PoolingSettings()
    """How hidden states become embeddings, as its files say."""
    label: str = ""
    """What a model of the Hub is called, whose folder in the cache has the name of a commit; nothing for a path."""

    @property
    def name(self) -> str:
        """What tables and messages call it."""
        return self.label or self.path.name
