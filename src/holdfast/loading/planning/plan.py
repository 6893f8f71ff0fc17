"""LoadPlan, from headers alone: maps checkpoint rows to rows of weights and states the memory of the load; no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from holdfast.loading.planning.coverage import (
    check_coverage,
    check_sources,
    refuse_missing,
    refuse_scheme,
    refuse_unexpected,
    refuse_wrong_tensors,
)
from holdfast.loading.planning.moves import BYTES, SIGNED_BYTES, Choice, Move, PlannedWeight, choose_all
from holdfast.loading.planning.packed_planes import form_of, packed_moves
from holdfast.loading.planning.stored_schemes import StoredPlanes, StoredSchemes
from holdfast.loading.sources.source import SharingSource, TensorEntry, WeightSource, WritingSource
from holdfast.memory.planner import Term
from holdfast.memory.sizes import format_bytes
from holdfast.memory.workspace_plan import TensorSpec, aligned, arena_bytes
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.packed_schemes import PackedRows
from holdfast.quant.weight_schemes import AS_STORED, WeightRecipe, WeightScheme

CHUNK_BYTES = 16 * 2**20
"""Bytes of one staging chunk: rows as read. A single row, or block of rows, may need more."""
DEVICE_CHUNKS = 2
"""Chunks of staging on a GPU: 32 MiB beside the findings; a third would make it 48.

Copies and kernels run in order on one stream, so one is enough. A source that writes rows itself keeps its tables in
the second.
"""
PINNED_CHUNKS = 12
CPU_CHUNK_BYTES, CPU_CHUNKS = 4 * 2**20, 3
MAX_READERS, CPU_READERS = 12, 2
"""Reader threads; on a CPU, beside the thread that places."""
MAX_READER_BYTES = 32 * 2**20
"""Host memory limit of all readers together, beside the chunks; exceeded only if one reader alone needs more."""


@dataclass(frozen=True)
class LoadPlan:
    """The moves of a load: exactly one fills each row of each weight."""

    dtype: str
    weights: tuple[PlannedWeight, ...]
    moves: tuple[Move, ...]
    """Ordered like the source's tensors, so files are read front to back."""
    tied: tuple[Move, ...]
    """Moves compared, not written, after all others: the stored head of a model with tied weights."""
    recipe: WeightRecipe
    writer_specs: tuple[TensorSpec, ...]
    """Tensors of a source that writes rows on the device; empty for a source that reads them."""
    reader_bytes: int
    """Host memory of one reader beside its chunk."""
    shared_bytes: int = 0
    """Host memory that all readers share."""
    is_checked: bool = False
    """True if the source has checksums, which are computed on the device."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The final tensors, in the order of their arena."""
        return tuple(spec for weight in self.weights for spec in weight.specs)

    @property
    def final_bytes(self) -> int:
        """Bytes of the one arena that holds every weight."""
        return arena_bytes(self.specs)

    @property
    def read_bytes(self) -> int:
        return sum(move.num_bytes for move in (*self.moves, *self.tied))

    @property
    def num_quantized(self) -> int:
        """Number of weights stored as codes and scales."""
        return sum(weight.scheme is not None for weight in self.weights)

    def chunk_bytes(self, device_kind: str) -> int:
        """Return the bytes of a chunk: fewer for a small checkpoint, more for a large row or block of rows."""
        most_bytes = CPU_CHUNK_BYTES if device_kind == "cpu" else CHUNK_BYTES
        all_bytes, least_bytes = self._row_bytes
        return aligned(max(least_bytes, min(most_bytes, all_bytes)))

    @cached_property
    def _row_bytes(self) -> tuple[int, int]:
        """Bytes of all rows as read, and of the largest row or block of rows; cached: there are thousands of moves."""
        moves = (*self.moves, *self.tied)
        all_bytes = sum(aligned(move.chunk_bytes) for move in moves)
        return all_bytes, max((move.least_bytes for move in moves), default=0)

    def staging_specs(self, device_kind: str) -> tuple[TensorSpec, ...]:
        """Return the staging tensors of a load on the device ("cpu" or "cuda").

        Tensors of a source that writes rows itself replace the last chunk, so dummy weights peak like real ones.
        """
        num_chunks = CPU_CHUNKS if device_kind == "cpu" else DEVICE_CHUNKS
        chunk_bytes = self.chunk_bytes(device_kind)
        specs = [TensorSpec(f"chunk.{index}", (chunk_bytes,), "uint8") for index in range(num_chunks)]
        if self.writer_specs:
            spare_bytes = chunk_bytes - arena_bytes(self.writer_specs)
            specs[-1:] = self.writer_specs
            if spare_bytes > 0:
                specs.append(TensorSpec("spare", (spare_bytes,), "uint8"))
        num_moves = len(self.moves)
        findings = TensorSpec("findings", (num_moves + len(self.tied), 2), "int32")
        sums = (TensorSpec("checksums", (num_moves,), "int64"),) if self.is_checked else ()
        return (*specs, findings, TensorSpec("amax", (num_moves,), "float32"), *sums)

    def staging_bytes(self, device_kind: str) -> int:
        """Return the peak device memory of a load beside the final tensors."""
        return arena_bytes(self.staging_specs(device_kind))

    def pinned_bytes(self, device_kind: str) -> int:
        """Return the pinned host memory of a load."""
        return PINNED_CHUNKS * self.chunk_bytes(device_kind) if device_kind == "cuda" and not self.writer_specs else 0

    @property
    def num_readers(self) -> int:
        """Number of reader threads: fewer if each needs much memory."""
        return max(1, min(MAX_READERS, MAX_READER_BYTES // max(1, self.reader_bytes)))

    def host_bytes(self, device_kind: str) -> int:
        """Return the host memory of a load: staging for a GPU, or everything but the weights on a CPU."""
        num_readers = min(self.num_readers, CPU_READERS) if device_kind == "cpu" else self.num_readers
        reading = 0 if self.writer_specs else num_readers * self.reader_bytes + self.shared_bytes
        return reading + (self.staging_bytes("cpu") if device_kind == "cpu" else self.pinned_bytes(device_kind))

    def terms(self, device_kind: str) -> tuple[Term, ...]:
        """Return the device memory terms of the load: permanent, and temporary."""
        counts = Counter(weight.stored_as for weight in self.weights)
        (first, num_first), *others = counts.most_common() or [(self.dtype, 0)]
        noun = "tensor" if num_first == 1 else "tensors"
        stored = ", ".join([f"{num_first} {noun} in {first}", *(f"{count} in {name}" for name, count in others)])
        reason = "dummy rows" if self.writer_specs else "rows on their way to their place"
        if pinned_bytes := self.pinned_bytes(device_kind):
            reason += f", through {format_bytes(pinned_bytes)} of pinned host memory"
        return (
            Term("weights", self.final_bytes, stored),
            Term("staging", self.staging_bytes(device_kind), reason, phases=("load",)),
        )


def plan_load(
    parameters: Iterable[Parameter],
    source: WeightSource,
    dtype: str,
    recipe: WeightRecipe = AS_STORED,
    stored: StoredSchemes | None = None,
    whole: Iterable[Parameter] | None = None,
) -> LoadPlan:
    """Plan the load of a checkpoint with a final dtype and a recipe; errors name the file and the tensor.

    `stored` describes a checkpoint that is already quantized. If `parameters` are those of a pipeline stage, `whole`
    are those of the whole model: tensors of other stages are then not unexpected.
    """
    entries = source.entries
    parameters = tuple(parameters)
    planes = StoredPlanes(parameters, {}) if stored is None else stored.planes(parameters, entries, recipe)
    whole = None if whole is None else tuple(whole)
    choices = choose_all(planes.parameters, entries, whole or ())
    ignorable = source.ignorable if stored is None else source.ignorable | stored.ignorable(entries)
    every = (*choices.fills, *choices.tied)
    refuse_missing(every, entries)
    refuse_unexpected(every if whole is None else _choices(whole, entries, recipe, stored), ignorable, entries)
    scale_names = planes.scale_names
    refuse_wrong_tensors(every, dtype, entries, scale_names)
    schemes: dict[str, WeightScheme | None] = {}
    weights: list[PlannedWeight] = []
    for choice in choices.fills:
        name = choice.parameter.name
        is_plane = name in planes.weights or name in scale_names
        schemes[name] = None if is_plane else _scheme(choice, recipe, stored)
        if name not in scale_names:
            form = None if is_plane else form_of(choice, entries, dtype, recipe)
            weights.append(_weight(choice.parameter, dtype, schemes, planes, () if form is None else form.rows))
    packed = {weight.name: weight for weight in weights if weight.packed}
    moves = _moves(choices.fills, schemes, entries, packed)
    check_coverage(weights, moves)
    check_sources(moves, scale_names)
    writer_specs = source.writer_specs if isinstance(source, WritingSource) else ()
    writer_bytes = arena_bytes(writer_specs)
    assert writer_bytes <= CHUNK_BYTES, f"the source writes with {writer_bytes} bytes, more than {CHUNK_BYTES=}"
    return LoadPlan(
        dtype=dtype,
        weights=tuple(weights),
        moves=moves,
        tied=_moves(choices.tied, schemes, entries, packed),
        recipe=recipe,
        writer_specs=writer_specs,
        reader_bytes=source.scratch_bytes_per_reader,
        shared_bytes=source.shared_bytes if isinstance(source, SharingSource) else 0,
    )


def _choices(
    parameters: Iterable[Parameter],
    entries: Mapping[str, TensorEntry],
    recipe: WeightRecipe,
    stored: StoredSchemes | None,
) -> tuple[Choice, ...]:
    parameters = tuple(parameters)
    choices = choose_all(
        parameters if stored is None else stored.planes(parameters, entries, recipe).parameters, entries
    )
    return (*choices.fills, *choices.tied)


def _scheme(choice: Choice, recipe: WeightRecipe, stored: StoredSchemes | None) -> WeightScheme | None:
    """Return the scheme to quantize a weight on load; None if a quantized checkpoint left it plain."""
    parameter, tensors = choice.parameter, [part.tensor for part in choice.whole_parts]
    if stored is not None and stored.leaves_alone(tensors):
        return None
    scheme = recipe.scheme_for(parameter.kind, (parameter.name, *tensors))
    if scheme is None:
        return None
    scheme = scheme.with_parts((parameter.seam_rows,))
    refuse_scheme(parameter, choice.parts, scheme)
    return scheme


def _weight(
    parameter: Parameter,
    dtype: str,
    schemes: Mapping[str, WeightScheme | None],
    planes: StoredPlanes,
    packed: tuple[PackedRows, ...],
) -> PlannedWeight:
    if parameter.name in planes.weights:
        shape, scheme = planes.weights[parameter.name]
        return PlannedWeight(parameter.name, shape, dtype, scheme)
    stored_as, scheme = parameter.dtype or dtype, schemes[parameter.name]
    return PlannedWeight(parameter.name, parameter.shape, stored_as, scheme, parameter.limit, packed)


def _moves(
    choices: Iterable[Choice],
    schemes: Mapping[str, WeightScheme | None],
    entries: Mapping[str, TensorEntry],
    packed: Mapping[str, PlannedWeight],
) -> tuple[Move, ...]:
    wanted: dict[str, list[tuple[str, Part]]] = {}
    dtypes: dict[str, str | None] = {}
    kept: dict[str, list[Move]] = {}
    for choice in choices:
        if (weight := packed.get(choice.parameter.name)) is not None:
            for move in packed_moves(weight, choice, entries):
                kept.setdefault(move.tensor, []).append(move)
            continue
        dtypes[choice.parameter.name] = choice.parameter.dtype
        for part in choice.parts:
            wanted.setdefault(part.tensor, []).append((choice.parameter.name, part))
    moves: list[Move] = []
    for name, entry in entries.items():
        moves += sorted(kept.get(name, ()), key=lambda move: move.part.row_range)
        own = wanted.get(name, [])
        if len(own) > 1:
            own.sort(key=lambda item: item[1].row_range)
        moves += (_move(target, part, schemes[target], _as_read(entry, dtypes[target])) for target, part in own)
    return tuple(moves)


def _as_read(entry: TensorEntry, dtype: str | None) -> TensorEntry:
    return replace(entry, dtype=BYTES) if dtype == BYTES and entry.dtype == SIGNED_BYTES else entry


def _move(target: str, part: Part, scheme: WeightScheme | None, entry: TensorEntry) -> Move:
    whole = Move(part.tensor, entry.dtype, target, part, scheme, entry.num_bytes)
    if part.rows is None and part.columns is None:
        return whole
    part.check()
    num_read, num_stored = whole.num_source_rows * whole.num_read_columns, part.source_rows * part.source_columns
    return replace(whole, num_bytes=entry.num_bytes * num_read // num_stored)
