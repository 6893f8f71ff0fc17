"""The manifest of saved weights: their source, their recipe, and a checksum for every plane; hostile input; no torch.

A folder of saved weights holds this manifest, holdfast-weights.json, and model-00001.safetensors and so on, whose tensors are
the planes of the final weights: a tensor, or codes under the weight's name and scales beside them. The manifest is written
last, so a folder that has one is complete.

A source is identified by names, sizes, times and headers of its files, and by its settings; not by its path, so a model may
move. Other weights of the same size, header and time to the nanosecond are not noticed.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from math import gcd, prod
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from holdfast import __version__
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.planning.moves import PlannedWeight
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.sources.files import CONFIG_FILE, read_json_object, unreadable
from holdfast.loading.sources.safetensors import MAX_HEADER_BYTES, file_inside
from holdfast.loading.sources.source import WritingSource
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.weight_schemes import HEAD_SCHEME, ROW_SCHEMES, WEIGHT_SCHEMES, WeightRecipe, WeightScheme

MAX_SETTINGS_BYTES = 32 * 2**20
DIGEST_BYTES = 16
"""Length of the digest of a header, of settings, of a plan: half of SHA-256. Planes have checksums instead, which are fast."""


Text = Annotated[str, Meta(min_length=1, max_length=512)]
Digest = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * DIGEST_BYTES}}}\Z")]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Rank = Annotated[int, Meta(ge=0, le=2**16)]


class SourceFile(Struct, frozen=True):
    """One file of weights."""

    name: Text
    num_bytes: Size = field(name="bytes")
    mtime_ns: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    header_digest: Digest = field(name="header")

    def change(self, then: "SourceFile") -> str | None:
        """Describe the difference from the file at that time; None if there is none."""
        if self.num_bytes != then.num_bytes:
            return f"{self.name} has {self.num_bytes} bytes and had {then.num_bytes}"
        if self.header_digest != then.header_digest:
            return f"{self.name} has another header"
        if self.mtime_ns != then.mtime_ns:
            return f"{self.name} was written at another time"
        return None


class SourceIdentity(Struct, frozen=True):
    """The files of a checkpoint in the order of their names, and a digest of its settings."""

    files: tuple[SourceFile, ...]
    settings_digest: Digest = field(name="settings")
    """Digest of config.json; of nothing for a GGUF file, whose header has the settings."""

    def change(self, then: "SourceIdentity") -> str | None:
        """Describe the first difference from the source at that time; None if there is none."""
        now_files, then_files = ({file.name: file for file in one.files} for one in (self, then))
        for name in sorted(now_files.keys() | then_files.keys()):
            if name not in then_files:
                return f"{name} is new"
            if name not in now_files:
                return f"{name} is gone"
            change = now_files[name].change(then_files[name])
            if change is not None:
                return change
        return None if self.settings_digest == then.settings_digest else f"{CONFIG_FILE} was changed"

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def digest(data: bytes | memoryview) -> bytes:
    """Return the first half of SHA-256."""
    return hashlib.sha256(data, usedforsecurity=False).digest()[:DIGEST_BYTES]


def identify_source(model: OpenModel) -> SourceIdentity | None:
    """Identify the model's files as they are now; None for dummy weights."""
    if isinstance(model.source, WritingSource):
        return None
    names = sorted({entry.file for entry in model.source.entries.values()})
    if model.gguf is not None:
        files = tuple(_identify(file.path, file.data_start) for file in model.gguf.files)
        assert set(names) <= {file.name for file in files}, f"tensors of {model.path.name} are in {names}"
        return SourceIdentity(files, digest(b"").hex())
    files = tuple(_identify(file_inside(model.path, name), None) for name in names)
    settings = file_inside(model.path, CONFIG_FILE)
    return SourceIdentity(files, digest(_beginning(settings, MAX_SETTINGS_BYTES)[0]).hex())


def header_digest(path: Path) -> str:
    """Return the digest of a safetensors file's header."""
    return _identify(path, None).header_digest


def _identify(path: Path, header_bytes: int | None) -> SourceFile:
    """Identify a file; None as `header_bytes` takes the length from a safetensors header."""
    if header_bytes is None:
        header_bytes = 8 + int.from_bytes(_beginning(path, 8)[0], "little")
        if header_bytes > 8 + MAX_HEADER_BYTES:
            problem = f"its header would have {header_bytes - 8} bytes, and at most {MAX_HEADER_BYTES} are read"
            raise ModelFormatError("weights.not_safetensors", file=path.name, problem=problem)
    header, status = _beginning(path, header_bytes)
    return SourceFile(path.name, status.st_size, status.st_mtime_ns, digest(header).hex())


def _beginning(path: Path, num_bytes: int) -> tuple[bytes, os.stat_result]:
    """Read up to so many bytes, and the status of the same file."""
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            data = bytearray(min(num_bytes, status.st_size))
            view, num_read = memoryview(data), 0
            while num_read < len(data) and (count := file.readinto(view[num_read:])):
                num_read += count
    except OSError as error:
        raise unreadable(path.name, error) from error
    return bytes(data[:num_read]), status


FORMAT = "holdfast weights"
VERSION = 2
"""Incremented when the same source and recipe would give other bytes, or the manifest changes."""


class PlaneFile(Struct, frozen=True):
    """One safetensors file, and the checksum of every plane in it."""

    name: Annotated[str, Meta(pattern=r"^model-[0-9]{5}\.safetensors\Z")]
    num_bytes: Size = field(name="bytes")
    header_digest: Digest = field(name="header")
    planes: dict[str, Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]]
    """Checksums: 64 bits for each plane, in the order of the data (kernels/load/checksum.py)."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is known about saved weights before one of them is read."""

    dtype: str
    recipe: WeightRecipe
    mesh: Mesh
    plan_digest: str
    """Changes with every checkpoint row that goes to another place."""
    source: SourceIdentity
    weights: tuple[PlannedWeight, ...]
    files: tuple[PlaneFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def unsaved(weights: Iterable[PlannedWeight]) -> str | None:
    """Return the reason why a manifest cannot describe these weights; None if it can."""
    for weight in weights:
        scheme = weight.scheme
        if scheme is None:
            continue
        known = WEIGHT_SCHEMES.get(scheme.name)
        if known is None or scheme != replace(known, block_rows=gcd(known.block_rows, scheme.block_rows)):
            return f"{weight.name} is stored as {scheme.name} in blocks of its own"
    return None


class _Recipe(Struct):
    scheme: str | None
    embeddings: Literal["none", "head", "all"]
    ignore: list[str]
    head: str = HEAD_SCHEME.name
    """Older manifests have no other."""


class _Scheme(Struct):
    name: str
    block_rows: Annotated[int, Meta(ge=1, le=2**63 - 1)]


class _Weight(Struct):
    name: Text
    shape: Annotated[list[Annotated[int, Meta(gt=0, lt=2**40)]], Meta(min_length=1, max_length=8)]
    dtype: str
    scheme: _Scheme | None = None


class _Place(Struct, kw_only=True):
    """The place of one of several ranks; a single rank has only `rank` and `num_ranks`."""

    rank: Rank
    num_ranks: Rank
    tensor_rank: Rank
    tensor_size: Rank
    expert_rank: Rank
    expert_size: Rank
    stage: Rank
    num_stages: Rank
    layers: tuple[Size, Size] | None = None
    is_exact: bool


class _Stored(Struct):
    """The JSON object of a manifest, after its format and its version."""

    dtype: Literal["float32", "float16", "bfloat16"]
    recipe: _Recipe
    mesh: dict[str, Any]
    plan: Digest
    source: SourceIdentity
    files: tuple[PlaneFile, ...]
    weights: list[_Weight]


def manifest_text(manifest: Manifest) -> str:
    """Return the manifest as JSON."""
    recipe, mesh = manifest.recipe, manifest.mesh
    place = {"rank": mesh.rank, "num_ranks": mesh.num_ranks} | ({} if mesh.is_alone else asdict(mesh))
    weights = [
        _Weight(
            weight.name,
            list(weight.shape),
            weight.dtype,
            None if weight.scheme is None else _Scheme(weight.scheme.name, weight.scheme.block_rows),
        )
        for weight in manifest.weights
    ]
    scheme = None if recipe.scheme is None else recipe.scheme.name
    stored = _Stored(
        dtype=manifest.dtype,  # type: ignore[arg-type] # a type of models
        recipe=_Recipe(scheme, recipe.embeddings, list(recipe.ignore), recipe.head_scheme.name),
        mesh=place,
        plan=manifest.plan_digest,
        source=manifest.source,
        files=manifest.files,
        weights=weights,
    )
    head = {"format": FORMAT, "version": VERSION, "holdfast": __version__}
    return json.dumps(head | msgspec.to_builtins(stored), indent=1)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and check every value of it, but not the files beside it."""
    values = read_json_object(path)
    try:
        if values.get("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT!r}")
        if values.get("version") != VERSION:
            found = values.get("version")
            raise UnsupportedModelError(
                "weights.manifest_version", file=path.name, version=found, holdfast=__version__, expected=VERSION
            )
        stored = msgspec.convert(values, _Stored)
        recipe = stored.recipe
        return Manifest(
            dtype=stored.dtype,
            recipe=WeightRecipe(
                None if recipe.scheme is None else _scheme(recipe.scheme, WEIGHT_SCHEMES.values()),
                recipe.embeddings,
                tuple(recipe.ignore),
                _scheme(recipe.head, ROW_SCHEMES),
            ),
            mesh=_mesh(stored.mesh),
            plan_digest=stored.plan,
            source=stored.source,
            weights=tuple(map(_planned, stored.weights)),
            files=stored.files,
        )
    except ValueError as error:  # of msgspec, of a recipe's patterns, of a mesh, or of the checks below
        raise ModelFormatError("weights.bad_manifest", file=path.name, problem=str(error)) from error


def _mesh(place: dict[str, Any]) -> Mesh:
    """Make a mesh of its stored place."""
    if place.get("num_ranks") == 1 and place.get("rank") == 0:
        return ALONE
    values = msgspec.to_builtins(msgspec.convert(place, _Place))
    rank, layers = (values.pop("rank"), values.pop("num_ranks")), values["layers"]
    if layers is not None and layers[0] >= layers[1]:
        raise ValueError(f"mesh has the layers {layers}, and the first must be before the last")
    mesh = Mesh(**values)
    if (mesh.rank, mesh.num_ranks) != rank:
        raise ValueError(f"mesh is rank {rank[0]} of {rank[1]}, and the place of rank {mesh.rank} of {mesh.num_ranks}")
    return mesh


def _scheme(name: str, schemes: Iterable[WeightScheme]) -> WeightScheme:
    names = {scheme.name: scheme for scheme in schemes}
    if name not in names:
        raise ValueError(f"scheme is {shown(name)}, and one of {', '.join(names)} is needed")
    return names[name]


def _planned(weight: _Weight) -> PlannedWeight:
    """Return a weight, after checking its shape, type and blocks against each other."""
    name, shape = shown(weight.name), tuple(weight.shape)
    if weight.dtype not in DTYPE_BYTES or prod(shape) >= 2**60:
        raise ValueError(f"{name} has the type {shown(weight.dtype)} and the shape {shown(weight.shape)}")
    if weight.scheme is None:
        return PlannedWeight(weight.name, shape, weight.dtype)
    known, block_rows = _scheme(weight.scheme.name, WEIGHT_SCHEMES.values()), weight.scheme.block_rows
    if known.block_rows % block_rows:
        raise ValueError(f"{name} has block_rows = {block_rows}, and a divisor of {known.block_rows} is needed")
    scheme = replace(known, block_rows=block_rows)
    if len(shape) < 2 or scheme.unsupported(shape) or (len(shape) > 2 and shape[-2] % block_rows):
        raise ValueError(f"{name} has the shape {list(shape)}, which {known.name} does not have")
    return PlannedWeight(weight.name, shape, weight.dtype, scheme)
