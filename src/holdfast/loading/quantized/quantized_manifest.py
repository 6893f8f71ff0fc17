"""The manifest of saved weights: what they were made from, how, and a checksum for every block of them; hostile input; no torch.

A folder of saved weights holds holdfast-weights.json, which this is, and model-00001.safetensors and so on, whose tensors are
the planes of the final weights: a tensor as it is, or codes under the weight's name and scales beside them. The manifest is
written last, so a folder that has one is whole.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from pathlib import Path
from typing import NamedTuple

from holdfast import __version__
from holdfast.errors import ConfigError, ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.planning.planned_weight import PlannedWeight
from holdfast.loading.quantized.source_identity import DIGEST_BYTES, SourceFile, SourceIdentity
from holdfast.loading.sources.json_file import read_json_object
from holdfast.memory.tensor_spec import TensorSpec
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.weight_recipe import EMBEDDING_CHOICES, WeightRecipe
from holdfast.quant.weight_schemes import HEAD_SCHEME, ROW_SCHEMES, WEIGHT_SCHEMES

MANIFEST_FILE = "holdfast-weights.json"
FORMAT = "holdfast weights"
VERSION = 1
"""Raised whenever the same source and recipe would give other bytes, or the manifest says something else."""
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 256 * 2**10, 16 * 2**20
MAX_BLOCKS = 2**17
"""Blocks are larger where there would be more: their checksums are a few MB at most."""
MODEL_DTYPES = ("float32", "float16", "bfloat16")
MAX_RANKS = 2**16
MAX_TEXT = 512
SAVE_AGAIN = "delete the folder and save the weights again"
_FILE_NAME = re.compile(r"model-[0-9]{5}\.safetensors")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")


class Mesh(NamedTuple):
    """Which of how many ranks the weights are for."""

    rank: int
    num_ranks: int


ALONE = Mesh(0, 1)


@dataclass(frozen=True, slots=True)
class PlaneFile:
    """One safetensors file, and the checksums of every plane in it, one after the other."""

    name: str
    num_bytes: int
    header_digest: str
    digests: Mapping[str, bytes]
    """By plane, in the order of the data."""


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
    block_bytes: int
    """A checksum covers so many bytes of a plane; the last of a plane may cover fewer."""
    files: tuple[PlaneFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def block_bytes_for(specs: Iterable[TensorSpec]) -> int:
    """The smallest blocks that are not too many."""
    specs, block_bytes = tuple(specs), MIN_BLOCK_BYTES
    while block_bytes < MAX_BLOCK_BYTES and sum(num_blocks(spec.num_bytes, block_bytes) for spec in specs) > MAX_BLOCKS:
        block_bytes *= 2
    return block_bytes


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    """Checksums of a plane."""
    return -(-num_bytes // block_bytes)


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
        "mesh": manifest.mesh._asdict(),
        "plan": manifest.plan_digest,
        "source": {
            "settings": source.settings_digest,
            "files": [
                {"name": file.name, "bytes": file.num_bytes, "mtime_ns": file.mtime_ns, "header": file.header_digest}
                for file in source.files
            ],
        },
        "block_bytes": manifest.block_bytes,
        "files": [
            {
                "name": file.name,
                "bytes": file.num_bytes,
                "header": file.header_digest,
                "planes": {name: digests.hex() for name, digests in file.digests.items()},
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
    mesh = fields.inner("mesh")
    num_ranks = mesh.count("num_ranks", 1, MAX_RANKS)
    block_bytes = fields.count("block_bytes", 1, MAX_BLOCK_BYTES)
    if block_bytes & (block_bytes - 1) or block_bytes < 4096:
        raise fields.wrong("block_bytes", "a power of two from 4096 on is needed")
    return Manifest(
        dtype=fields.choice("dtype", MODEL_DTYPES),
        recipe=_read_recipe(fields.inner("recipe")),
        mesh=Mesh(mesh.count("rank", 0, num_ranks - 1), num_ranks),
        plan_digest=fields.digest("plan"),
        source=_read_source(fields.inner("source")),
        weights=tuple(_read_weight(inner) for inner in fields.inners("weights")),
        block_bytes=block_bytes,
        files=tuple(_read_file(inner) for inner in fields.inners("files")),
    )


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
    digests: dict[str, bytes] = {}
    for plane in planes.values:
        text = planes.values[plane]
        if not isinstance(text, str) or len(text) % (2 * DIGEST_BYTES) or not _HEX.fullmatch(text):
            raise planes.wrong(plane, "checksums in hexadecimal digits are needed")
        digests[plane] = bytes.fromhex(text)
    return PlaneFile(name, fields.count("bytes"), fields.digest("header"), digests)


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
