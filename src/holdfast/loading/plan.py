"""From headers to a plan: which checkpoint tensor fills which rows, with everything wrong found before a weight is read; no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.errors import ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.source import TensorEntry, WeightSource
from holdfast.models.parameters import Parameter, Part
from holdfast.models.settings import listed
from holdfast.quant.formats import bytes_for

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Types of checkpoint tensors that are converted on the way in."""
EMBEDDING = "embed.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Move:
    """One checkpoint tensor and the rows of a parameter that it fills."""

    tensor: str
    parameter: str
    row_start: int
    shape: tuple[int, ...]
    num_bytes: int
    """On disk."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Every row of every parameter is filled by exactly one move."""

    dtype: str
    parameters: tuple[Parameter, ...]
    moves: tuple[Move, ...]
    """In the order in which the source lists its tensors, so that files are read from front to back."""
    twins: tuple[Move, ...]
    """Tensors that must equal what has been loaded into their rows: the head of a model with tied embeddings."""
    parameter_bytes: Mapping[str, int]
    """Final bytes of every parameter."""

    @property
    def final_bytes(self) -> int:
        return sum(self.parameter_bytes.values())

    @property
    def read_bytes(self) -> int:
        return sum(move.num_bytes for move in (*self.moves, *self.twins))


def plan_load(parameters: Iterable[Parameter], source: WeightSource, dtype: str) -> LoadPlan:
    """The plan for a checkpoint and a final dtype, or an error that names the file and the tensor."""
    parameters = tuple(parameters)
    entries = source.entries
    head = _unused_head(parameters, entries)
    wanted: dict[str, tuple[Parameter, Part]] = {}
    for parameter in parameters:
        parameter.check()
        for part in parameter.parts:
            tensor = HEAD if head and part.tensor not in entries and parameter.name == EMBEDDING else part.tensor
            assert tensor not in wanted, f"{tensor} is a part of {wanted[tensor][0].name} and of {parameter.name}"
            wanted[tensor] = (parameter, part)
    twin_of: dict[str, tuple[Parameter, Part]] = {}
    if head and HEAD not in wanted:
        embedding = next(parameter for parameter in parameters if parameter.name == EMBEDDING)
        twin_of[HEAD] = (embedding, embedding.parts[0])
    _refuse_missing(wanted, entries)
    _refuse_unexpected(set(wanted) | set(twin_of) | source.ignorable, entries)
    return LoadPlan(
        dtype=dtype,
        parameters=parameters,
        moves=_moves(wanted, entries),
        twins=_moves(twin_of, entries),
        parameter_bytes={parameter.name: bytes_for(dtype, parameter.shape) for parameter in parameters},
    )


def _unused_head(parameters: tuple[Parameter, ...], entries: Mapping[str, TensorEntry]) -> bool:
    """Whether the checkpoint stores a head that the model takes from its embedding.

    Some store both, some only one of the two, under either name.
    """
    return HEAD in entries and not any(part.tensor == HEAD for parameter in parameters for part in parameter.parts)


def _moves(wanted: Mapping[str, tuple[Parameter, Part]], entries: Mapping[str, TensorEntry]) -> tuple[Move, ...]:
    moves: list[Move] = []
    for name, entry in entries.items():
        if name not in wanted:
            continue
        parameter, part = wanted[name]
        if entry.shape != part.shape:
            raise ModelFormatError(
                f"{entry.file}: {shown(name)} has the shape {list(entry.shape)}",
                f"the model's settings need {list(part.shape)}",
                "use weights and settings of the same model",
            )
        if entry.dtype not in FLOAT_DTYPES:
            raise UnsupportedModelError(
                f"{entry.file}: {shown(name)} is stored as {entry.dtype}",
                f"weights are read from {', '.join(FLOAT_DTYPES)}",
                "use a checkpoint of one of these types",
            )
        moves.append(Move(name, parameter.name, part.row_start, part.shape, entry.num_bytes))
    return tuple(moves)


def _refuse_missing(wanted: Mapping[str, tuple[Parameter, Part]], entries: Mapping[str, TensorEntry]) -> None:
    missing = [name for name in wanted if name not in entries]
    if missing:
        raise ModelFormatError(
            f"{_files(entry.file for entry in entries.values())} lacks {_count(missing)}: {listed(missing)}",
            f"the model's settings need {len(wanted)} tensors",
            "download the model again, or correct its settings",
        )


def _refuse_unexpected(known: set[str], entries: Mapping[str, TensorEntry]) -> None:
    unexpected = [entry for name, entry in entries.items() if name not in known]
    if unexpected:
        names = [entry.name for entry in unexpected]
        raise ModelFormatError(
            f"{_files(entry.file for entry in unexpected)} has {_count(names)} too many: {listed(names)}",
            "the model's settings have no place for them, so it would compute something else",
            "use weights and settings of the same model",
        )


def _files(names: Iterable[str]) -> str:
    files = list(dict.fromkeys(names))
    if not files:
        return "the checkpoint"
    return files[0] if len(files) == 1 else f"{files[0]} (with {len(files) - 1} more files)"


def _count(names: list[str]) -> str:
    return "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
