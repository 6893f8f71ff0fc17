"""Which of the ways to store a parameter a checkpoint has taken, and under which name it has tied embeddings; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.loading.source import TensorEntry
from holdfast.models.parameters import Parameter, Part

EMBEDDING = "embed.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Choice:
    """A parameter and the parts that fill it."""

    parameter: Parameter
    parts: tuple[Part, ...]
    whole_parts: tuple[Part, ...]
    """Those of the whole parameter. All ranks look at all of them, so that all find the same faults."""

    def renamed(self, tensor: str) -> "Choice":
        """The same from another tensor."""
        parts, whole_parts = (
            tuple(replace(part, tensor=tensor) for part in parts) for parts in (self.parts, self.whole_parts)
        )
        return Choice(self.parameter, parts, whole_parts)


@dataclass(frozen=True, slots=True)
class Choices:
    """For every parameter, and for tensors that must equal what another one has filled."""

    fills: tuple[Choice, ...]
    twins: tuple[Choice, ...]


def choose_all(parameters: Sequence[Parameter], entries: Mapping[str, TensorEntry]) -> Choices:
    """A model with tied embeddings may be stored with an embedding, with a head, or with both, which are then twins."""
    fills = [choose(parameter, entries) for parameter in parameters]
    twins: list[Choice] = []
    uses_head = any(part.tensor == HEAD for choice in fills for part in choice.whole_parts)
    for place, choice in enumerate(fills):
        if choice.parameter.name == EMBEDDING and HEAD in entries and not uses_head:
            if all(part.tensor in entries for part in choice.whole_parts):
                twins.append(choice.renamed(HEAD))
            else:
                fills[place] = choice.renamed(HEAD)
    return Choices(tuple(fills), tuple(twins))


def choose(parameter: Parameter, entries: Mapping[str, TensorEntry]) -> Choice:
    """The first layout that is there; where none is, the one that most is there of, for the sake of the error."""
    whole = parameter.whole or parameter
    layouts = (whole.parts, *whole.layouts)
    chosen = next((place for place, parts in enumerate(layouts) if _fits(parts, entries)), None)
    if chosen is None:
        present = [sum(part.tensor in entries for part in parts) / max(1, len(parts)) for parts in layouts]
        chosen = max(range(len(layouts)), key=lambda place: present[place])
    return Choice(parameter, (parameter.parts, *parameter.layouts)[chosen], layouts[chosen])


def _fits(parts: Sequence[Part], entries: Mapping[str, TensorEntry]) -> bool:
    for part in parts:
        entry = entries.get(part.tensor)
        if entry is None or entry.shape != part.shape:
            return False
    return True
