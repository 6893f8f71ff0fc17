"""The manifest of saved weights: what they were made from, how, and a checksum for every plane of them; hostile input; no torch.

A folder of saved weights holds holdfast-weights.json, which this is, and model-00001.safetensors and so on, whose tensors are
the planes of the final weights: a tensor as it is, or codes under the weight's name and scales beside them. The manifest is
written last, so a folder that has one is whole.

A source is known by names, sizes, times and headers of its files, and by its settings; not by where they lie, so that a model
may be moved. Weights that were exchanged for others of the same size, at the same time to the nanosecond, under the same
header, are not noticed.
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
from holdfast.errors import ConfigError, ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.planning.moves import PlannedWeight
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.sources.files import CONFIG_FILE, read_json_object
from holdfast.loading.sources.safetensors import MAX_HEADER_BYTES, file_inside
from holdfast.loading.sources.source import WritingSource
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.weight_schemes import EMBEDDING_CHOICES, HEAD_SCHEME, ROW_SCHEMES, WEIGHT_SCHEMES, WeightRecipe

MAX_SETTINGS_BYTES = 32 * 2**20
DIGEST_BYTES = 16
"""Of the digest of a header, of settings, of a plan: the first half of SHA-256. Planes have checksums instead, which are fast."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of weights."""

    name: str
    num_bytes: int
    mtime_ns: int
    header_digest: str

    def change(self, then: "SourceFile") -> str | None:
        """None, or what is different from what it was then, in words."""
        if self.num_bytes != then.num_bytes:
            return f"{self.name} has {self.num_bytes} bytes and had {then.num_bytes}"
        if self.header_digest != then.header_digest:
            return f"{self.name} has another header"
        if self.mtime_ns != then.mtime_ns:
            return f"{self.name} was written at another time"
        return None


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """The files of a checkpoint in the order of their names, and the settings that give them meaning."""

    files: tuple[SourceFile, ...]
    settings_digest: str
    """Of config.json; of nothing for a GGUF file, whose header has the settings."""

    def change(self, then: "SourceIdentity") -> str | None:
        """None, or the first difference from what it was then, in words."""
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
    """By which few bytes are known again."""
    return hashlib.sha256(data, usedforsecurity=False).digest()[:DIGEST_BYTES]


def identify_source(model: OpenModel) -> SourceIdentity | None:
    """What the model's files are now; None for dummy weights, which are in none."""
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
    """The checksum of a safetensors file's header."""
    return _identify(path, None).header_digest


def _identify(path: Path, header_bytes: int | None) -> SourceFile:
    """With None the header is that of a safetensors file, which says itself how long it is."""
    if header_bytes is None:
        header_bytes = 8 + int.from_bytes(_beginning(path, 8)[0], "little")
        if header_bytes > 8 + MAX_HEADER_BYTES:
            raise ModelFormatError(
                f"{path.name} says its header has {header_bytes - 8} bytes",
                f"at most {MAX_HEADER_BYTES} are read",
                "check that it is a safetensors file",
            )
    header, status = _beginning(path, header_bytes)
    return SourceFile(path.name, status.st_size, status.st_mtime_ns, digest(header).hex())


def _beginning(path: Path, num_bytes: int) -> tuple[bytes, os.stat_result]:
    """Up to so many bytes, and what the system says of the file that they were read from."""
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            data = bytearray(min(num_bytes, status.st_size))
            view, num_read = memoryview(data), 0
            while num_read < len(data) and (count := file.readinto(view[num_read:])):
                num_read += count
    except OSError as error:
        raise ModelFormatError(f"{path.name} cannot be read", str(error.strerror or error), "check the file") from error
    return bytes(data[:num_read]), status


FORMAT = "holdfast weights"
VERSION = 2
"""Raised whenever the same source and recipe would give other bytes, or the manifest says something else."""
MODEL_DTYPES = ("float32", "float16", "bfloat16")
MAX_RANKS = 2**16
MESH_SIZES = ("tensor_rank", "tensor_size", "expert_rank", "expert_size", "stage", "num_stages")
MAX_TEXT = 512
SAVE_AGAIN = "delete the folder and save the weights again"
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
    """By plane, in the order of the data; 64 bits (kernels/load/checksum.py)."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is known of saved weights before one of them is read."""

    dtype: str
    recipe: WeightRecipe
    mesh: Mesh
    plan_digest: str
    """Of which checkpoint rows went where."""
    source: SourceIdentity
    weights: tuple[PlannedWeight, ...]
    files: tuple[PlaneFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def unsaved(weights: Iterable[PlannedWeight]) -> str | None:
    """None, or why a manifest cannot tell what these weights are, in words."""
    for weight in weights:
        scheme = weight.scheme
        if scheme is None:
            continue
        known = WEIGHT_SCHEMES.get(scheme.name)
        if known is None or scheme != replace(known, block_rows=gcd(known.block_rows, scheme.block_rows)):
            return f"{weight.name} is stored as {scheme.name} in blocks of its own"
    return None


def manifest_text(manifest: Manifest) -> str:
    """The manifest as JSON."""
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
    """The manifest in a file, every value of it checked; whether it fits the files beside it is not."""
    fields = _Fields(read_json_object(path), path.name)
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", f"{FORMAT!r} is needed")
    if fields.values.get("version") != VERSION:
        raise UnsupportedModelError(
            f"{path.name} has the version {shown(fields.values.get('version'))}",
            f"version {VERSION} is read by holdfast {__version__}",
            "save the weights again with this one",
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
    """Where a rank stands, beyond its number; nothing of one that is alone."""
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
        raise fields.wrong("is_exact", "true or false is needed")
    if layers is not None and (
        not isinstance(layers, list) or len(layers) != 2 or not all(type(one) is int for one in layers)
    ):
        raise fields.wrong("layers", "two whole numbers are needed")
    if layers is not None and not 0 <= layers[0] < layers[1]:
        raise fields.wrong("layers", "the first comes before the last")
    sizes = {name: fields.count(name, 0, MAX_RANKS) for name in MESH_SIZES}
    try:
        mesh = Mesh(**sizes, layers=None if layers is None else (layers[0], layers[1]), is_exact=is_exact)
    except ConfigError as error:
        raise fields.wrong("tensor_rank", "a rank below its size is needed") from error
    if (mesh.rank, mesh.num_ranks) != (rank, num_ranks):
        raise fields.wrong("rank", f"rank {mesh.rank} of {mesh.num_ranks} stands there by its sizes")
    return mesh


def _read_recipe(fields: "_Fields") -> WeightRecipe:
    ignore = fields.values.get("ignore")
    if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
        raise fields.wrong("ignore", "a list of patterns is needed")
    scheme = None
    if fields.values.get("scheme") is not None:
        scheme = WEIGHT_SCHEMES[fields.choice("scheme", tuple(WEIGHT_SCHEMES))]
    embeddings = fields.choice("embeddings", EMBEDDING_CHOICES)
    head = HEAD_SCHEME
    if "head" in fields.values:  # older ones have no other
        head = WEIGHT_SCHEMES[fields.choice("head", tuple(scheme.name for scheme in ROW_SCHEMES))]
    try:
        return WeightRecipe(scheme, embeddings, tuple(ignore), head)  # type: ignore[arg-type] # one of the choices
    except ConfigError as error:
        raise fields.wrong("ignore", "patterns that can be read are needed") from error


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
        raise fields.wrong("shape", "up to 8 whole numbers are needed")
    weight = PlannedWeight(fields.text("name"), tuple(shape), fields.choice("dtype", tuple(DTYPE_BYTES)))
    if fields.values.get("scheme") is None:
        return weight
    inner = fields.inner("scheme")
    known, block_rows = WEIGHT_SCHEMES[inner.choice("name", tuple(WEIGHT_SCHEMES))], inner.count("block_rows", 1)
    if known.block_rows % block_rows:
        raise inner.wrong("block_rows", f"a divisor of {known.block_rows} is needed")
    scheme = replace(known, block_rows=block_rows)
    if len(shape) < 2 or scheme.unsupported(weight.shape) or (len(shape) > 2 and shape[-2] % block_rows):
        raise fields.wrong("shape", f"no {known.name} has it")
    return replace(weight, scheme=scheme)


def _read_file(fields: "_Fields") -> PlaneFile:
    name = fields.text("name")
    if not _FILE_NAME.fullmatch(name):
        raise fields.wrong("name", "model-00001.safetensors or another number is needed")
    planes = fields.inner("planes")
    checksums: dict[str, int] = {}
    for plane in planes.values:
        text = planes.values[plane]
        if not isinstance(text, str) or not _CHECKSUM.fullmatch(text):
            raise planes.wrong(plane, "a checksum of 16 hexadecimal digits is needed")
        checksums[plane] = int(text, 16)
    return PlaneFile(name, fields.count("bytes"), fields.digest("header"), checksums)


class _Fields:
    """One JSON object of the manifest; whatever is wrong is told with the place."""

    def __init__(self, values: Mapping[str, object], file: str, place: str = "") -> None:
        self.values = values
        self._file = file
        self._place = place

    def wrong(self, key: str, needed: str) -> ModelFormatError:
        place = shown(f"{self._place}{key}", 120)
        return ModelFormatError(f"{self._file}: {place} is {shown(self.values.get(key))}", needed, SAVE_AGAIN)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
            raise self.wrong(key, f"a text of up to {MAX_TEXT} characters is needed")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(key, f"one of {', '.join(choices)} is needed")
        return value

    def digest(self, key: str) -> str:
        value = self.text(key)
        if len(value) != 2 * DIGEST_BYTES or not _HEX.fullmatch(value):
            raise self.wrong(key, f"{2 * DIGEST_BYTES} hexadecimal digits are needed")
        return value

    def count(self, key: str, low: int = 0, high: int = 2**63 - 1) -> int:
        value = self.values.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high} is needed")
        return value

    def inner(self, key: str) -> "_Fields":
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object is needed")
        return _Fields(value, self._file, f"{self._place}{key}.")

    def inners(self, key: str) -> "list[_Fields]":
        values = self.values.get(key)
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise self.wrong(key, "a list of objects is needed")
        return [_Fields(value, self._file, f"{self._place}{key}[{at}].") for at, value in enumerate(values)]
