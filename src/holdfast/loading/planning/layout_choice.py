"""Which of the ways to store a parameter a checkpoint has taken, and under which name it has tied embeddings; no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.loading.sources.source import TensorEntry
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
    fills = [choose(parameter, entries) for parameter in turn_squares(parameters, entries)]
    twins: list[Choice] = []
    uses_head = any(part.tensor == HEAD for choice in fills for part in choice.whole_parts)
    for place, choice in enumerate(fills):
        if choice.parameter.name == EMBEDDING and HEAD in entries and not uses_head:
            if all(part.tensor in entries for part in choice.whole_parts):
                twins.append(choice.renamed(HEAD))
            else:
                fills[place] = choice.renamed(HEAD)
    return Choices(tuple(fills), tuple(twins))


def turn_squares(parameters: Iterable[Parameter], entries: Mapping[str, TensorEntry]) -> tuple[Parameter, ...]:
    """The same parameters, with one layout for a stacked tensor of square matrices, which fits as it is and transposed.

    What the other tensor of the same experts has been stored as tells which it is: both cannot be square.
    """
    parameters = tuple(parameters)
    fits = {parameter.name: _fitting(parameter, entries) for parameter in parameters if parameter.layouts}
    is_turned = {_module(name): found[0][1] for name, found in fits.items() if len({way for _, way in found}) == 1}
    turned: list[Parameter] = []
    for parameter in parameters:
        found = fits.get(parameter.name, [])
        wanted = is_turned.get(_module(parameter.name))
        if len({way for _, way in found}) > 1 and wanted is not None:
            place = next(place for place, way in found if way == wanted)
            whole = parameter.whole and _only(parameter.whole, place)
            parameter = replace(_only(parameter, place), whole=whole)
        turned.append(parameter)
    return tuple(turned)


def _fitting(parameter: Parameter, entries: Mapping[str, TensorEntry]) -> list[tuple[int, bool]]:
    """The layouts that are there, by their place, and whether each is transposed."""
    whole = parameter.whole or parameter
    layouts = (whole.parts, *whole.layouts)
    return [(place, parts[0].is_transposed) for place, parts in enumerate(layouts) if _fits(parts, entries)]


def _only(parameter: Parameter, place: int) -> Parameter:
    return replace(parameter, parts=(parameter.parts, *parameter.layouts)[place], layouts=())


def _module(name: str) -> str:
    """layers.0.experts of layers.0.experts.down.weight."""
    return name.removesuffix(".weight").rpartition(".")[0]


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
