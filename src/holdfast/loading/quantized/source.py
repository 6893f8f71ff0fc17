"""Saved weights as a source: every plane goes to its place as it is, and its checksum is summed where it arrives; no torch.

A plane is read once, front to back or in pieces in any order, and what its bytes add up to is compared when all are there. On a
GPU that costs nothing beside the copy; a host that computed it would read no faster than it computes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError, HoldfastError, ModelFormatError, shown
from holdfast.loading.planning.moves import Move, PlannedWeight
from holdfast.loading.planning.plan import LoadPlan
from holdfast.loading.quantized.manifest import (
    SAVE_AGAIN,
    Manifest,
    PlaneFile,
    header_digest,
    read_manifest,
)
from holdfast.loading.quantized.writer import locked
from holdfast.loading.sources.files import MANIFEST_FILE
from holdfast.loading.sources.safetensors import TORCH_DTYPES, SafetensorsFile, StoredTensor, file_inside, has_file
from holdfast.loading.sources.source import TensorEntry
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.parameters import Parameter, Part
from holdfast.models.settings import listed
from holdfast.quant.weight_schemes import AS_STORED, HEAD_SCHEME, ROW_SCHEMES, WeightRecipe

QUANTIZED_KINDS = ("linear", "expert", "head", "embedding")


@dataclass(frozen=True, slots=True)
class _Plane:
    """Where a plane lies, and what its bytes must add up to."""

    spec: TensorSpec
    file: SafetensorsFile
    checksum: int

    @property
    def row_bytes(self) -> int:
        return self.spec.num_bytes // self.num_rows

    @property
    def num_rows(self) -> int:
        return prod(self.spec.shape[:-1] or self.spec.shape)


class QuantizedSource:
    """Saved weights whose manifest and headers have been checked against each other; tensors are planes by their final names.

    The folder is locked against removal until `close`.
    """

    def __init__(self, folder: Path, manifest: Manifest, planes: Mapping[str, _Plane], lock: int | None) -> None:
        self.folder = folder
        self.manifest = manifest
        self._planes = planes
        self._unlock = None if lock is None else weakref.finalize(self, os.close, lock)
        self._entries = {
            name: TensorEntry(name, plane.spec.dtype, plane.spec.shape, plane.file.path.name, plane.spec.num_bytes)
            for name, plane in planes.items()
        }

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    @property
    def ignorable(self) -> frozenset[str]:
        return frozenset()

    @property
    def scratch_bytes_per_reader(self) -> int:
        return 0

    @property
    def checksums(self) -> Mapping[str, int]:
        return {name: plane.checksum for name, plane in self._planes.items()}

    def damaged(self, name: str) -> ModelFormatError:
        return ModelFormatError(
            f"{self._planes[name].file.path.name}: {shown(name)} is damaged",
            f"its bytes do not have the checksum in {MANIFEST_FILE}",
            SAVE_AGAIN,
        )

    def read_into(
        self, name: str, row_start: int, row_end: int, out: memoryview, columns: tuple[int, int] | None = None
    ) -> None:
        """Rows of a plane, whole ones: `moves` asks for no others, since parts of rows would go unchecked."""
        plane, out = self._planes[name], out.cast("B")
        assert 0 <= row_start <= row_end <= plane.num_rows, f"{name}: rows {row_start} to {row_end} of {plane.spec}"
        row_bytes = plane.row_bytes
        num_columns = plane.spec.shape[-1] if len(plane.spec.shape) > 1 else 1
        assert columns in (None, (0, num_columns)), f"{name}: {columns=} of {plane.spec}"
        assert len(out) == (row_end - row_start) * row_bytes, f"{name}: {len(out)} bytes for {row_end - row_start} rows"
        plane.file.read_into(name, row_start * row_bytes, out)

    def close(self) -> None:
        for file in {id(plane.file): plane.file for plane in self._planes.values()}.values():
            file.close()
        if self._unlock is not None:
            self._unlock()

    def moves(self) -> tuple[Move, ...]:
        """Every plane to its place, in the order of the files."""
        return tuple(
            Move(
                tensor=name,
                tensor_dtype=plane.spec.dtype,
                target=name,
                part=Part(name, 0, plane.spec.shape),
                scheme=None,
                num_bytes=plane.spec.num_bytes,
            )
            for name, plane in self._planes.items()
        )


def has_saved_weights(folder: Path) -> bool:
    """Whether a folder holds weights that were saved here."""
    return has_file(folder, MANIFEST_FILE)


def open_quantized(folder: Path) -> QuantizedSource:
    """Saved weights, with manifest, file sizes, headers and planes checked against each other; no weight is read."""
    lock = None
    with suppress(OSError):  # a file system without locks; a folder that is not there shows in the next line
        lock = locked(folder, is_shared=True)
    try:
        manifest = read_manifest(file_inside(folder, MANIFEST_FILE))
        return QuantizedSource(folder, manifest, _open_planes(folder, manifest), lock)
    except BaseException as error:
        if lock is not None:
            os.close(lock)
        if isinstance(error, OSError):
            raise _broken(f"{folder.name} cannot be read", str(error.strerror or error)) from error
        raise


def plan_from_cache(plan: LoadPlan, source: QuantizedSource) -> LoadPlan:
    """The same weights as the plan's, copied from saved ones; what is saved must be exactly them."""
    saved = {weight.name: weight for weight in source.manifest.weights}
    for weight in plan.weights:
        if saved.pop(weight.name, None) != weight:
            raise _broken(f"{source.folder.name} does not hold {weight.name} as the plan has it", str(weight))
    if saved:
        raise _broken(f"{source.folder.name} holds weights that the plan has not", listed(list(saved)))
    return replace(plan, moves=source.moves(), tied=(), writer_specs=(), reader_bytes=0, is_checked=True)


def plan_quantized(
    parameters: Iterable[Parameter],
    source: QuantizedSource,
    dtype: str,
    recipe: WeightRecipe = AS_STORED,
    mesh: Mesh = ALONE,
) -> LoadPlan:
    """The plan for a model that was saved quantized: its weights are as they were saved, in `dtype` where they are plain."""
    manifest = source.manifest
    _refuse_other_recipe(source, recipe)
    if manifest.mesh != mesh:
        raise ConfigError(
            f"rank {mesh.rank} of {mesh.num_ranks} was asked to load {source.folder.name}",
            f"it was saved by rank {manifest.mesh.rank} of {manifest.mesh.num_ranks}",
            "load the model that it was made from",
        )
    parameters = tuple(parameters)
    saved = {weight.name: weight for weight in manifest.weights}
    absent = [parameter.name for parameter in parameters if parameter.name not in saved]
    surplus = saved.keys() - {parameter.name for parameter in parameters}
    if absent or surplus:
        what, names = ("lacks", absent) if absent else ("has too many weights:", sorted(surplus))
        raise _broken(f"{source.folder.name} {what} {listed(names)}", "the model's settings need others")
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
        recipe=replace(manifest.recipe, ignore=tuple(plain)),  # by name: patterns out of a file are never run
        writer_specs=(),
        reader_bytes=0,
        is_checked=True,
    )


def _refuse_other_recipe(source: QuantizedSource, asked: WeightRecipe) -> None:
    saved = source.manifest.recipe.scheme
    if asked.scheme is not None and asked.scheme != saved:
        raise ConfigError(
            f"quantization={asked.scheme.name} was asked of {source.folder.name}",
            f"its weights were saved as {saved.name if saved else 'they are'}",
            "leave the option out, or load the model that it was made from",
        )


def _settled(parameter: Parameter, saved: PlannedWeight, manifest: Manifest, dtype: str) -> PlannedWeight:
    """A weight as it will be; whether it was saved as this parameter can be."""
    if saved.shape != parameter.shape:
        raise _broken(
            f"{MANIFEST_FILE}: {saved.name} has the shape {list(saved.shape)}",
            f"the model's settings need {list(parameter.shape)}",
        )
    scheme = saved.scheme
    if scheme is not None:
        by_row = {"head": scheme in ROW_SCHEMES, "embedding": scheme == HEAD_SCHEME}.get(parameter.kind, True)
        if parameter.kind not in QUANTIZED_KINDS or not by_row:
            raise _broken(f"{MANIFEST_FILE}: {saved.name} is {scheme.name}", f"a {parameter.kind} never is")
    elif saved.dtype != (parameter.dtype or manifest.dtype):
        raise _broken(
            f"{MANIFEST_FILE}: {saved.name} is {saved.dtype}", f"{parameter.dtype or manifest.dtype} is expected"
        )
    return replace(saved, dtype=parameter.dtype or dtype)


def _open_planes(folder: Path, manifest: Manifest) -> dict[str, _Plane]:
    specs = {spec.name: spec for weight in manifest.weights for spec in weight.specs}
    if len(specs) != sum(len(weight.specs) for weight in manifest.weights):
        raise _broken(f"{MANIFEST_FILE} lists a weight twice", f"{len(specs)} tensors have names of their own")
    planes: dict[str, _Plane] = {}
    for file in manifest.files:
        opened = _open_file(folder, file)
        for name, stored in opened.tensors.items():
            if name in planes or name not in specs:
                has = "another file has it too" if name in planes else f"{MANIFEST_FILE} lists no such weight"
                raise _broken(f"{file.name} holds {shown(name)}", has)
            _check_plane(file, stored, specs[name])
            planes[name] = _Plane(specs[name], opened, file.checksums[name])
    missing = [name for name in specs if name not in planes]
    if missing:
        raise _broken(f"{folder.name} lacks {listed(missing)}", f"{MANIFEST_FILE} lists {len(specs)} tensors")
    return planes


def _open_file(folder: Path, file: PlaneFile) -> SafetensorsFile:
    path = file_inside(folder, file.name)
    if not has_file(folder, file.name):
        raise _broken(f"{folder.name} has no {file.name}", f"{MANIFEST_FILE} names it")
    num_bytes = path.stat().st_size
    if num_bytes != file.num_bytes:
        raise _broken(f"{file.name} has {num_bytes} bytes", f"{file.num_bytes} were written")
    opened = SafetensorsFile(path)
    if header_digest(path) != file.header_digest or list(opened.tensors) != list(file.checksums):
        raise _broken(f"{file.name} has another header than was written", f"{MANIFEST_FILE} has its checksum")
    return opened


def _check_plane(file: PlaneFile, stored: StoredTensor, spec: TensorSpec) -> None:
    if stored.shape != spec.shape or TORCH_DTYPES.get(stored.dtype) != spec.dtype:
        raise _broken(
            f"{file.name}: {shown(spec.name)} is {stored.dtype} of shape {list(stored.shape)}",
            f"{spec.dtype} of shape {list(spec.shape)} is expected",
        )


def _broken(asked: str, has: str) -> HoldfastError:
    return ModelFormatError(asked, has, SAVE_AGAIN)
