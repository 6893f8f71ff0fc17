"""GGUF models in several files: joins all parts as one GGUFFile, given any part; finds the model in a folder; no torch.

Parts are named model-00001-of-00003.gguf and so on, and their headers hold their number (split.no, from 0) and their count
(split.count). The first has the settings and the tokenizer; tensors are in any of them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.errors import ModelFormatError, ModelNotFoundError, shown
from holdfast.loading.gguf.file import GGUFFile, GGUFTensor, read_gguf
from holdfast.memory.on_disk import OnDisk, StoredType
from holdfast.models.settings import listed

NUMBER, COUNT, NUM_TENSORS = "split.no", "split.count", "split.tensors.count"
PROJECTOR = "mmproj"
"""Prefix of image projector files, which lie beside a model."""
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.ASCII | re.DOTALL)


def read_parts(path: Path) -> GGUFFile:
    """Read and check the header of a file, and those of all other parts if it is one of several."""
    named = read_gguf(path)
    count = _number(named, COUNT, 1)
    if count <= 1:
        return named
    names = _part_names(named, count)
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        raise ModelNotFoundError("gguf.missing_parts", file=path.name, count=count, missing=listed(missing))
    parts = [named if name == path.name else read_gguf(path.parent / name) for name in names]
    for index, part in enumerate(parts):
        number, says = _number(part, NUMBER, 0), _number(part, COUNT, 1)
        if (number, says) != (index, count):
            header = f"is part {number + 1} of {says}" if COUNT in part.metadata else "has no part number"
            raise _wrong(part, f"its name is part {index + 1} of {count}, and its header {header}")
    _check_family(parts)
    first, *others = parts
    return replace(first, parts=tuple(others), tensors=_all_tensors(parts))


def model_name(path: Path) -> str:
    """Return the file's name without its ending, and without the number of a part."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match[1]


def on_disk(file: GGUFFile) -> OnDisk:
    """Sum the bytes of all files, and of their tensors by stored type."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.type.name] += 1
        sizes[tensor.type.name] += tensor.num_bytes
    embedding = file.tensors.get("token_embd.weight")
    return OnDisk(
        num_files=len(file.files),
        num_bytes=file.disk_bytes,
        types=tuple(StoredType(name, count, sizes[name]) for name, count in counts.most_common()),
        has_blocks=any(tensor.type.block_elements > 1 for tensor in file.tensors.values()),
        embedding_type=embedding.type.name if embedding is not None and embedding.type.block_elements > 1 else None,
    )


def gguf_inside(folder: Path) -> Path | None:
    """Find the one GGUF model in a folder, by its first file; None if there is none. Several are refused."""
    files = sorted(path for path in folder.iterdir() if path.suffix == ".gguf" and not path.name.startswith(PROJECTOR))
    models: dict[str, Path] = {}
    for path in files:
        match = _PART.fullmatch(path.name)
        models.setdefault(path.name if match is None else f"{match[1]} in {int(match[3])} parts", path)
    if len(models) > 1:
        found, example = listed(list(models)), files[0]
        raise ModelNotFoundError("gguf.several_models", folder=folder, count=len(models), models=found, example=example)
    return next(iter(models.values()), None)


def _wrong(part: GGUFFile, problem: str) -> ModelFormatError:
    return ModelFormatError("gguf.wrong_part", file=part.path.name, problem=problem)


def _number(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(file, f"key {key!r} is {shown(value)}, not an integer of at least 0")
    return value


def _part_names(named: GGUFFile, count: int) -> list[str]:
    match = _PART.fullmatch(named.path.name)
    if match is None:
        number = _number(named, NUMBER, 0) + 1
        example = f"model-{number:05d}-of-{count:05d}.gguf"
        raise ModelNotFoundError("gguf.renamed_part", file=named.path.name, number=number, count=count, example=example)
    if int(match[3]) != count:
        raise _wrong(named, f"its name is one of {int(match[3])} parts, and its header one of {count}")
    return [f"{match[1]}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def _check_family(parts: list[GGUFFile]) -> None:
    """Check that all parts were cut from one model: the same settings, and as many tensors as announced."""
    first = parts[0]
    for part in parts[1:]:
        for key in ("general.architecture", "general.name", NUM_TENSORS):
            if key in part.metadata and part.metadata[key] != first.metadata.get(key):
                own, other = shown(part.metadata[key]), shown(first.metadata.get(key))
                raise _wrong(part, f"it has {key} = {own}, and {first.path.name} has {other}")
    num_tensors = sum(len(part.tensors) for part in parts)
    announced = _number(first, NUM_TENSORS, num_tensors)
    if announced != num_tensors:
        raise _wrong(first, f"it announces {announced} tensors in {len(parts)} parts, and they hold {num_tensors}")


def _all_tensors(parts: Iterable[GGUFFile]) -> Mapping[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    names: list[str] = []
    for index, part in enumerate(parts):
        names.append(part.path.name)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise _wrong(part, f"it holds the tensor {shown(name)}, and {names[tensors[name].part]} holds it too")
            tensors[name] = replace(tensor, part=index)
    return tensors
