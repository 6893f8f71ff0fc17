"""QuantizedSource reads saved weights: planes are copied unchanged, checksums are computed on the device; no torch.

A plane is read once, in pieces in any order, and its checksum is compared at the end. On a GPU the copy hides that
cost; on the host it would limit the read speed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError, ModelFormatError, shown
from holdfast.loading.planning.moves import Move, PlannedWeight
from holdfast.loading.planning.plan import LoadPlan
from holdfast.loading.quantized.manifest import Manifest, PlaneFile, header_digest, read_manifest
from holdfast.loading.quantized.writer import locked
from holdfast.loading.sources.files import MANIFEST_FILE, unreadable
from holdfast.loading.sources.safetensors import TORCH_DTYPES, SafetensorsFile, file_inside, has_file
from holdfast.loading.sources.source import Columns, TensorEntry, check_read, table_shape
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.parameters import Parameter, Part
from holdfast.models.settings import listed
from holdfast.quant.weight_schemes import AS_STORED, HEAD_SCHEME, ROW_SCHEMES, WeightRecipe

QUANTIZED_KINDS = ("linear", "expert", "head", "embedding")


@dataclass(frozen=True, slots=True)
class _Plane:
    """File and checksum of a plane."""

    spec: TensorSpec
    file: SafetensorsFile
    checksum: int


class QuantizedSource:
    """Saved weights with a checked manifest and checked headers; tensors are planes under their final names.

    The folder is locked against removal until `close`.
    """

    ignorable: frozenset[str] = frozenset()
    scratch_bytes_per_reader = 0

    def __init__(self, folder: Path, manifest: Manifest, planes: Mapping[str, _Plane], lock: int | None) -> None:
        self.folder = folder
        self.manifest = manifest
        self._planes = planes
        self._unlock = None if lock is None else weakref.finalize(self, os.close, lock)
        self.entries = {
            name: TensorEntry(name, plane.spec.dtype, plane.spec.shape, plane.file.path.name, plane.spec.num_bytes)
            for name, plane in planes.items()
        }

    @property
    def checksums(self) -> Mapping[str, int]:
        return {name: plane.checksum for name, plane in self._planes.items()}

    def damaged(self, name: str) -> ModelFormatError:
        file = self._planes[name].file.path.name
        return ModelFormatError("weights.damaged", file=file, tensor=name, manifest=MANIFEST_FILE)

    def read_into(self, name: str, row_start: int, row_end: int, out: memoryview, columns: Columns = None) -> None:
        """Read whole rows of a plane. Parts of rows would bypass the checksum."""
        plane, out = self._planes[name], out.cast("B")
        num_rows, num_columns = table_shape(plane.spec.shape)
        found = check_read(self.entries[name], row_start, row_end, out, columns)
        assert found == (0, num_columns), f"{name}: {columns=} of {plane.spec}"
        plane.file.read_into(name, row_start * (plane.spec.num_bytes // num_rows), out)

    def close(self) -> None:
        for file in {id(plane.file): plane.file for plane in self._planes.values()}.values():
            file.close()
        if self._unlock is not None:
            self._unlock()

    def moves(self) -> tuple[Move, ...]:
        """Return the moves that copy every plane, in the order of the files."""
        specs = ((name, plane.spec) for name, plane in self._planes.items())
        return tuple(
            Move(name, spec.dtype, name, Part(name, 0, spec.shape), scheme=None, num_bytes=spec.num_bytes)
            for name, spec in specs
        )


def has_saved_weights(folder: Path) -> bool:
    """Return True if the folder holds weights that Holdfast saved quantized."""
    return has_file(folder, MANIFEST_FILE)


def open_quantized(folder: Path) -> QuantizedSource:
    """Open saved weights: check manifest, file sizes, headers and planes against each other; read no weight."""
    lock = None
    with suppress(OSError):  # the file system may lack locks; the next line reports an absent folder
        lock = locked(folder, is_shared=True)
    try:
        manifest = read_manifest(file_inside(folder, MANIFEST_FILE))
        return QuantizedSource(folder, manifest, _open_planes(folder, manifest), lock)
    except BaseException as error:
        if lock is not None:
            os.close(lock)
        if isinstance(error, OSError):
            raise unreadable(folder.name, error) from error
        raise


def plan_from_cache(plan: LoadPlan, source: QuantizedSource) -> LoadPlan:
    """Return a plan that copies the weights from saved ones; refuse saved weights that differ from the plan."""
    saved = {weight.name: weight for weight in source.manifest.weights}
    for weight in plan.weights:
        if saved.pop(weight.name, None) != weight:
            raise _broken(source.folder.name, f"{weight.name} is not saved as planned, {weight}")
    if saved:
        raise _broken(source.folder.name, f"it holds weights that are not planned: {listed(list(saved))}")
    return replace(plan, moves=source.moves(), tied=(), writer_specs=(), reader_bytes=0, is_checked=True)


def plan_quantized(
    parameters: Iterable[Parameter],
    source: QuantizedSource,
    dtype: str,
    recipe: WeightRecipe = AS_STORED,
    mesh: Mesh = ALONE,
) -> LoadPlan:
    """Plan the load of a model saved quantized; plain weights get `dtype`."""
    manifest, folder = source.manifest, source.folder.name
    scheme = manifest.recipe.scheme
    if recipe.scheme is not None and recipe.scheme != scheme:
        saved_as, wanted = scheme.name if scheme else "plain weights", recipe.scheme.name
        raise ConfigError(
            "weights.saved_otherwise", folder=folder, saved=saved_as, name="quantization", requested=wanted
        )
    if manifest.mesh != mesh:
        saved_by = {"saved_rank": manifest.mesh.rank, "saved_ranks": manifest.mesh.num_ranks}
        raise ConfigError("weights.other_rank", folder=folder, rank=mesh.rank, num_ranks=mesh.num_ranks, **saved_by)
    parameters = tuple(parameters)
    saved = {weight.name: weight for weight in manifest.weights}
    absent = [parameter.name for parameter in parameters if parameter.name not in saved]
    surplus = saved.keys() - {parameter.name for parameter in parameters}
    if absent or surplus:
        what, names = ("lacks", absent) if absent else ("has too many weights:", sorted(surplus))
        raise _broken(folder, f"it {what} {listed(names)}")
    weights = tuple(_settled(parameter, saved[parameter.name], manifest, dtype) for parameter in parameters)
    plain = (
        weight.name
        for weight, one in zip(weights, parameters, strict=True)
        if not weight.scheme and one.kind in QUANTIZED_KINDS
    )
    return LoadPlan(
        dtype=dtype,
        weights=weights,
        moves=source.moves(),
        tied=(),
        recipe=replace(manifest.recipe, ignore=tuple(plain)),  # names, because patterns of a file are never run
        writer_specs=(),
        reader_bytes=0,
        is_checked=True,
    )


def _settled(parameter: Parameter, saved: PlannedWeight, manifest: Manifest, dtype: str) -> PlannedWeight:
    """Return the planned weight of a parameter; refuse a saved weight that does not fit it."""
    if saved.shape != parameter.shape:
        shapes = f"the shape {list(saved.shape)}, and {list(parameter.shape)} is needed"
        raise _broken(MANIFEST_FILE, f"{saved.name} has {shapes}")
    scheme = saved.scheme
    if scheme is not None:
        by_row = {"head": scheme in ROW_SCHEMES, "embedding": scheme == HEAD_SCHEME}.get(parameter.kind, True)
        if parameter.kind not in QUANTIZED_KINDS or not by_row:
            raise _broken(MANIFEST_FILE, f"{saved.name} is {scheme.name}, which a {parameter.kind} never is")
    elif saved.dtype != (parameter.dtype or manifest.dtype):
        raise _broken(MANIFEST_FILE, f"{saved.name} is {saved.dtype}, not {parameter.dtype or manifest.dtype}")
    return replace(saved, dtype=parameter.dtype or dtype)


def _open_planes(folder: Path, manifest: Manifest) -> dict[str, _Plane]:
    specs = {spec.name: spec for weight in manifest.weights for spec in weight.specs}
    if len(specs) != sum(len(weight.specs) for weight in manifest.weights):
        raise _broken(MANIFEST_FILE, "it lists a weight twice")
    planes: dict[str, _Plane] = {}
    for file in manifest.files:
        opened = _open_file(folder, file)
        for name, stored in opened.tensors.items():
            if name in planes or name not in specs:
                other = "another file has it too" if name in planes else f"{MANIFEST_FILE} lists no such weight"
                raise _broken(file.name, f"it holds {shown(name)}, and {other}")
            spec = specs[name]
            if stored.shape != spec.shape or TORCH_DTYPES.get(stored.dtype) != spec.dtype:
                found, wanted = f"{stored.dtype} of shape {list(stored.shape)}", f"{spec.dtype} of {list(spec.shape)}"
                raise _broken(file.name, f"{shown(name)} is {found}, not {wanted}")
            planes[name] = _Plane(spec, opened, file.checksums[name])
    missing = [name for name in specs if name not in planes]
    if missing:
        raise _broken(folder.name, f"it lacks {listed(missing)}, which {MANIFEST_FILE} lists")
    return planes


def _open_file(folder: Path, file: PlaneFile) -> SafetensorsFile:
    path = file_inside(folder, file.name)
    if not has_file(folder, file.name):
        raise _broken(folder.name, f"it has no {file.name}, which {MANIFEST_FILE} names")
    num_bytes = path.stat().st_size
    if num_bytes != file.num_bytes:
        raise _broken(file.name, f"it has {num_bytes} bytes, and {file.num_bytes} were written")
    opened = SafetensorsFile(path)
    if header_digest(path) != file.header_digest or list(opened.tensors) != list(file.checksums):
        raise _broken(file.name, f"its header is not the one in {MANIFEST_FILE}")
    return opened


def _broken(where: str, problem: str) -> ModelFormatError:
    return ModelFormatError("weights.saved_broken", where=where, problem=problem)
