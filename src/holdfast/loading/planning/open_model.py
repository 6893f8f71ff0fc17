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
    """The model's own generation defaults; None if it sets none."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """How hidden states become embeddings: by default the last token, normalized to unit length."""

    is_embedding: bool = False
    """True for an embedding model: it has sentence-transformers files, or no head."""
    normalizes: bool = True
    refusal: str = ""
    """Why its embeddings cannot be computed here; empty if they can."""
    has_head: bool = True
    """False if no token can be chosen, because the checkpoint has no language-model head."""


@dataclass(frozen=True)
class OpenModel:
    """A model on disk, known from its headers alone: its spec, its parameters and their source."""

    path: Path
    kind: Literal["directory", "gguf"]
    spec: ModelSpec
    parameters: tuple[Parameter, ...]
    source: WeightSource
    generation: GenerationDefaults
    gguf: GGUFFile | None = None
    """The open file, which holds the tokenizer; None for a folder."""
    stored: StoredSchemes | None = None
    """How the checkpoint is quantized, from its settings; None if it is not."""
    pooling: PoolingSettings = PoolingSettings()
    label: str = ""
    """Name of a model of the Hub, whose folder in the cache is named after a commit; empty for a path."""

    @property
    def name(self) -> str:
        """Its name in tables and messages."""
        return self.label or self.path.name
