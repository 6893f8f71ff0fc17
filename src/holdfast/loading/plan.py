"""From headers to a plan: which checkpoint tensor fills which rows, with everything wrong found before a weight is read; no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.errors import ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.source import TensorEntry, WeightSource, WritingSource
from holdfast.memory.planner import Term
from holdfast.memory.sizes import format_bytes
from holdfast.memory.tensor_spec import TensorSpec, arena_bytes
from holdfast.models.parameters import Parameter, Part
from holdfast.models.settings import listed
from holdfast.quant.formats import bytes_for

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Types of checkpoint tensors that are converted on the way in."""
CHUNK_BYTES = 16 * 2**20
"""Most bytes of a source's rows that are read at once; a single row may have more."""
READ_CHUNKS = 3
"""Chunks that reading holds in host memory: as stored, in another order (GGUF heads), and as values or as compared."""
PINNED_CHUNKS = 2
"""Chunks of pinned host memory before a GPU: one is filled while the other is on its way."""
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
    chunk_bytes: int
    """Most bytes of rows that are read at once: less than CHUNK_BYTES where no tensor has as many."""
    writer_bytes: int | None
    """Device memory that a source needs to write rows itself; None for one that reads them."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The final tensors, in the order in which they lie in their arena."""
        return tuple(TensorSpec(parameter.name, parameter.shape, self.dtype) for parameter in self.parameters)

    @property
    def parameter_bytes(self) -> dict[str, int]:
        """Final bytes of every parameter."""
        return {spec.name: spec.num_bytes for spec in self.specs}

    @property
    def final_bytes(self) -> int:
        """Bytes of the one arena that holds every parameter."""
        return arena_bytes(self.specs)

    @property
    def read_bytes(self) -> int:
        return sum(move.num_bytes for move in (*self.moves, *self.twins))

    def staging_bytes(self, device_kind: str) -> int:
        """Most memory of the device ("cpu" or "cuda") that a load holds beside the final tensors.

        A GPU holds none of what is read: rows get their final type on the way into pinned memory, where the CPU has to
        touch them anyway, and then go straight to their place. So the bus carries no more than the final bytes, and the
        bits are those of a load on a CPU.
        """
        if self.writer_bytes is not None:
            return self.writer_bytes
        return READ_CHUNKS * self.chunk_bytes if device_kind == "cpu" else 0

    def pinned_bytes(self, device_kind: str) -> int:
        """Pinned host memory that a load holds."""
        return PINNED_CHUNKS * CHUNK_BYTES if device_kind == "cuda" and self.writer_bytes is None else 0

    def terms(self, device_kind: str) -> tuple[Term, ...]:
        """What the load takes of the device's memory: for good, and only while it lasts."""
        reason = "made-up rows" if self.writer_bytes is not None else "rows on their way to their place"
        if pinned_bytes := self.pinned_bytes(device_kind):
            reason += f", through {format_bytes(pinned_bytes)} of pinned host memory"
        return (
            Term("weights", self.final_bytes, f"{len(self.parameters)} tensors in {self.dtype}"),
            Term("staging", self.staging_bytes(device_kind), reason, phases=("load",)),
        )


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
    moves, twins = _moves(wanted, entries), _moves(twin_of, entries)
    return LoadPlan(
        dtype=dtype,
        parameters=parameters,
        moves=moves,
        twins=twins,
        chunk_bytes=max((_chunk_bytes(move, entries[move.tensor].dtype) for move in (*moves, *twins)), default=0),
        writer_bytes=arena_bytes(source.writer_specs) if isinstance(source, WritingSource) else None,
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


def _chunk_bytes(move: Move, dtype: str) -> int:
    tensor_bytes = bytes_for(dtype, move.shape)
    return min(tensor_bytes, max(CHUNK_BYTES, tensor_bytes // move.shape[0]))


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
