"""The manifest of saved weights: source, recipe, and a checksum per plane; read as hostile input; no torch.

A folder of saved weights holds this manifest, holdfast-weights.json, and model-00001.safetensors and so on, whose tensors are
the planes of the final weights: a tensor, or codes under the weight's name and scales beside them. The manifest is written
last, so a folder that has one is complete.

A source is identified by names, sizes, times and headers of its files, and by its settings; not by its path, so a model may
move. Different weights with the same size, header and nanosecond time are not detected.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from pathlib import Path

from holdfast import __version__
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError, ModelFormatError, UnsupportedModelError
from holdfast.loading.planning.moves import PlannedWeight
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.sources.files import CONFIG_FILE, QUANTIZATION_FILES, read_json_object, unreadable
from holdfast.loading.sources.safetensors import MAX_HEADER_BYTES, file_inside
from holdfast.loading.sources.source import WritingSource
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.weight_schemes import EMBEDDING_CHOICES, HEAD_SCHEME, ROW_SCHEMES, WEIGHT_SCHEMES, WeightRecipe

MAX_SETTINGS_BYTES = 32 * 2**20
DIGEST_BYTES = 16
"""Length of a digest of a header, settings or a plan: half of SHA-256. Planes have faster checksums instead."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of weights."""

    name: str
    num_bytes: int
    mtime_ns: int
    header_digest: str

    def change(self, then: "SourceFile") -> str | None:
        """Describe the difference from `then`; None if there is none."""
        if self.num_bytes != then.num_bytes:
            return f"{self.name} has {self.num_bytes} bytes and had {then.num_bytes}"
        if self.header_digest != then.header_digest:
            return f"{self.name} has another header"
        if self.mtime_ns != then.mtime_ns:
            return f"{self.name} was written at another time"
        return None


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """The files of a checkpoint in the order of their names, and a digest of its settings."""

    files: tuple[SourceFile, ...]
    settings_digest: str
    """Digest of config.json; for a GGUF file, whose header has the settings, digest of empty bytes."""

    def change(self, then: "SourceIdentity") -> str | None:
        """Describe the first difference from `then`; None if there is none."""
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
    paths = [file_inside(model.path, name) for name in (CONFIG_FILE, *QUANTIZATION_FILES)]
    settings = [_beginning(path, MAX_SETTINGS_BYTES)[0] for path in paths if path.name == CONFIG_FILE or path.is_file()]
    return SourceIdentity(files, digest(b"".join(settings)).hex())


def header_digest(path: Path) -> str:
    """Return the digest of a safetensors file's header."""
    return _identify(path, None).header_digest


def _identify(path: Path, header_bytes: int | None) -> SourceFile:
    """Identify a file. If `header_bytes` is None, read the length from the safetensors header."""
    if header_bytes is None:
        header_bytes = 8 + int.from_bytes(_beginning(path, 8)[0], "little")
        if header_bytes > 8 + MAX_HEADER_BYTES:
            problem = f"its header would have {header_bytes - 8} bytes, and at most {MAX_HEADER_BYTES} are read"
            raise ModelFormatError("weights.not_safetensors", file=path.name, problem=problem)
    header, status = _beginning(path, header_bytes)
    return SourceFile(path.name, status.st_size, status.st_mtime_ns, digest(header).hex())


def _beginning(path: Path, num_bytes: int) -> tuple[bytes, os.stat_result]:
    """Read the first `num_bytes` at most, and the status of the same file."""
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
"""Increment when the same source and recipe give different bytes, or the manifest changes."""
MODEL_DTYPES = ("float32", "float16", "bfloat16")
MAX_RANKS = 2**16
MESH_SIZES = ("tensor_rank", "tensor_size", "expert_rank", "expert_size", "stage", "num_stages")
MAX_TEXT = 512
_FILE_NAME = re.compile(r"model-[0-9]{5}\.safetensors")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class PlaneFile:
    """One safetensors file, and the checksum of every plane in it."""

    name: str
    num_bytes: int
    header_digest: str
    checksums: Mapping[str, int]
    """64-bit checksum of each plane, in the order of the data (kernels/load/checksum.py)."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything known about saved weights before one is read."""

    dtype: str
    recipe: WeightRecipe
    mesh: Mesh
    plan_digest: str
    """Digest of the plan; changes if any checkpoint row gets another target."""
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


def manifest_text(manifest: Manifest) -> str:
    """Return the manifest as JSON."""
    recipe, source = manifest.recipe, manifest.source
    values = {
        "format": FORMAT,
        "version": VERSION,
        "holdfast": __version__,
        "dtype": manifest.dtype,
        "recipe": {
            "scheme": None if recipe.scheme is None else recipe.scheme.name,
            "embeddings": recipe.embeddings,
            "ignore": list(recipe.ignore),
            "head": recipe.head_scheme.name,
        },
        "mesh": {"rank": manifest.mesh.rank, "num_ranks": manifest.mesh.num_ranks, **_mesh_values(manifest.mesh)},
        "plan": manifest.plan_digest,
        "source": {
            "settings": source.settings_digest,
            "files": [
                {"name": file.name, "bytes": file.num_bytes, "mtime_ns": file.mtime_ns, "header": file.header_digest}
                for file in source.files
            ],
        },
        "files": [
            {
                "name": file.name,
                "bytes": file.num_bytes,
                "header": file.header_digest,
                "planes": {name: f"{checksum:016x}" for name, checksum in file.checksums.items()},
            }
            for file in manifest.files
        ],
        "weights": [
            {
                "name": weight.name,
                "shape": list(weight.shape),
                "dtype": weight.dtype,
                "scheme": weight.scheme and {"name": weight.scheme.name, "block_rows": weight.scheme.block_rows},
            }
            for weight in manifest.weights
        ],
    }
    return json.dumps(values, indent=1)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and check every value of it, but not the files beside it."""
    fields = _Fields(read_json_object(path), path.name)
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", repr(FORMAT))
    if fields.values.get("version") != VERSION:
        version = fields.values.get("version")
        raise UnsupportedModelError(
            "weights.manifest_version", file=path.name, version=version, holdfast=__version__, expected=VERSION
        )
    return Manifest(
        dtype=fields.choice("dtype", MODEL_DTYPES),
        recipe=_read_recipe(fields.inner("recipe")),
        mesh=_read_mesh(fields.inner("mesh")),
        plan_digest=fields.digest("plan"),
        source=_read_source(fields.inner("source")),
        weights=tuple(_read_weight(inner) for inner in fields.inners("weights")),
        files=tuple(_read_file(inner) for inner in fields.inners("files")),
    )


def _mesh_values(mesh: Mesh) -> dict[str, object]:
    """Return the fields of a rank's place in the mesh; empty for a single rank."""
    if mesh.is_alone:
        return {}
    layers = None if mesh.layers is None else list(mesh.layers)
    return {name: getattr(mesh, name) for name in MESH_SIZES} | {"layers": layers, "is_exact": mesh.is_exact}


def _read_mesh(fields: "_Fields") -> Mesh:
    num_ranks = fields.count("num_ranks", 1, MAX_RANKS)
    rank = fields.count("rank", 0, num_ranks - 1)
    if num_ranks == 1:
        return ALONE
    layers, is_exact = fields.values.get("layers"), fields.values.get("is_exact")
    if not isinstance(is_exact, bool):
        raise fields.wrong("is_exact", "true or false")
    if layers is not None and (
        not isinstance(layers, list) or len(layers) != 2 or not all(type(one) is int for one in layers)
    ):
        raise fields.wrong("layers", "two integers")
    if layers is not None and not 0 <= layers[0] < layers[1]:
        raise fields.wrong("layers", "a first layer before the last")
    sizes = {name: fields.count(name, 0, MAX_RANKS) for name in MESH_SIZES}
    try:
        mesh = Mesh(**sizes, layers=None if layers is None else (layers[0], layers[1]), is_exact=is_exact)
    except ConfigError as error:
        raise fields.wrong("tensor_rank", "a rank below its size") from error
    if (mesh.rank, mesh.num_ranks) != (rank, num_ranks):
        raise fields.wrong("rank", f"rank {mesh.rank} of {mesh.num_ranks}")
    return mesh


def _read_recipe(fields: "_Fields") -> WeightRecipe:
    ignore = fields.values.get("ignore")
    if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
        raise fields.wrong("ignore", "a list of patterns")
    scheme = None
    if fields.values.get("scheme") is not None:
        scheme = WEIGHT_SCHEMES[fields.choice("scheme", tuple(WEIGHT_SCHEMES))]
    embeddings = fields.choice("embeddings", EMBEDDING_CHOICES)
    head = HEAD_SCHEME
    if "head" in fields.values:  # older manifests lack it
        head = WEIGHT_SCHEMES[fields.choice("head", tuple(scheme.name for scheme in ROW_SCHEMES))]
    try:
        return WeightRecipe(scheme, embeddings, tuple(ignore), head)  # type: ignore[arg-type] # one of the choices
    except ConfigError as error:
        raise fields.wrong("ignore", "readable patterns") from error


def _read_source(fields: "_Fields") -> SourceIdentity:
    files = tuple(
        SourceFile(inner.text("name"), inner.count("bytes"), inner.count("mtime_ns", -(2**63)), inner.digest("header"))
        for inner in fields.inners("files")
    )
    return SourceIdentity(files, fields.digest("settings"))


def _read_weight(fields: "_Fields") -> PlannedWeight:
    shape = fields.values.get("shape")
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= 8
        or not all(type(size) is int and 0 < size < 2**40 for size in shape)
        or prod(shape) >= 2**60
    ):
        raise fields.wrong("shape", "up to 8 integers")
    weight = PlannedWeight(fields.text("name"), tuple(shape), fields.choice("dtype", tuple(DTYPE_BYTES)))
    if fields.values.get("scheme") is None:
        return weight
    inner = fields.inner("scheme")
    known, block_rows = WEIGHT_SCHEMES[inner.choice("name", tuple(WEIGHT_SCHEMES))], inner.count("block_rows", 1)
    if known.block_rows % block_rows:
        raise inner.wrong("block_rows", f"a divisor of {known.block_rows}")
    scheme = replace(known, block_rows=block_rows)
    if len(shape) < 2 or scheme.unsupported(weight.shape) or (len(shape) > 2 and shape[-2] % block_rows):
        raise fields.wrong("shape", f"a shape of {known.name}")
    return replace(weight, scheme=scheme)


def _read_file(fields: "_Fields") -> PlaneFile:
    name = fields.text("name")
    if not _FILE_NAME.fullmatch(name):
        raise fields.wrong("name", "model-00001.safetensors or another number")
    planes = fields.inner("planes")
    checksums: dict[str, int] = {}
    for plane, text in planes.values.items():
        if not isinstance(text, str) or not _CHECKSUM.fullmatch(text):
            raise planes.wrong(plane, "16 hexadecimal digits")
        checksums[plane] = int(text, 16)
    return PlaneFile(name, fields.count("bytes"), fields.digest("header"), checksums)


class _Fields:
    """One JSON object of the manifest; errors name the place."""

    def __init__(self, values: Mapping[str, object], file: str, place: str = "") -> None:
        self.values = values
        self._file = file
        self._place = place

    def wrong(self, key: str, expected: str) -> ModelFormatError:
        value, key = self.values.get(key), f"{self._place}{key}"
        return ModelFormatError("weights.bad_manifest", file=self._file, key=key, value=value, expected=expected)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
            raise self.wrong(key, f"a string of up to {MAX_TEXT} characters")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(key, f"one of {', '.join(choices)}")
        return value

    def digest(self, key: str) -> str:
        value = self.text(key)
        if len(value) != 2 * DIGEST_BYTES or not _HEX.fullmatch(value):
            raise self.wrong(key, f"a digest of {2 * DIGEST_BYTES} hexadecimal digits")
        return value

    def count(self, key: str, low: int = 0, high: int = 2**63 - 1) -> int:
        value = self.values.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def inner(self, key: str) -> "_Fields":
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return _Fields(value, self._file, f"{self._place}{key}.")

    def inners(self, key: str) -> "list[_Fields]":
        values = self.values.get(key)
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise self.wrong(key, "a list of objects")
        return [_Fields(value, self._file, f"{self._place}{key}[{at}].") for at, value in enumerate(values)]
