"""GGUF models in several files: all parts of a model as one GGUFFile, found by the name of any; one model in a folder; no torch.

Parts are named model-00001-of-00003.gguf and so on, and say in their headers which they are (split.no, from 0) and of how
many (split.count). The first has the settings and the tokenizer; tensors are in any of them.
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
AGAIN = "download the parts of one model again"
PROJECTOR = "mmproj"
"""How files begin that go beside a model and are none."""
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.ASCII | re.DOTALL)


def read_parts(path: Path) -> GGUFFile:
    """Read and check the header of a file, and those of all other parts where it is one of several."""
    asked = read_gguf(path)
    count = _number(asked, COUNT, 1)
    if count <= 1:
        return asked
    names = _part_names(asked, count)
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        raise ModelNotFoundError(
            f"{path.name} is one of {count} parts of a model",
            f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} not beside it",
            "download all parts into one folder",
        )
    parts = [asked if name == path.name else read_gguf(path.parent / name) for name in names]
    for index, part in enumerate(parts):
        _check_place(part, index, count)
    _check_family(parts)
    first, *others = parts
    return replace(first, parts=tuple(others), tensors=_all_tensors(parts))


def model_name(path: Path) -> str:
    """The file's name without its ending, and without the number of a part."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match[1]


def on_disk(file: GGUFFile) -> OnDisk:
    """Bytes of all files, and their tensors by stored type."""
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
    """The one GGUF model in a folder, by its first file; None where there is none. Several are refused."""
    files = sorted(path for path in folder.iterdir() if path.suffix == ".gguf" and not path.name.startswith(PROJECTOR))
    models: dict[str, Path] = {}
    for path in files:
        match = _PART.fullmatch(path.name)
        models.setdefault(path.name if match is None else f"{match[1]} in {int(match[3])} parts", path)
    if len(models) > 1:
        raise ModelNotFoundError(
            f"{folder} holds {len(models)} GGUF models",
            f"they are {listed(list(models))}",
            f"pass one, such as {files[0]}",
        )
    return next(iter(models.values()), None)


def _number(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelFormatError(
            f"{file.path.name}: key {key!r} is {shown(value)}", "a whole number from 0 on is needed", AGAIN
        )
    return value


def _part_names(asked: GGUFFile, count: int) -> list[str]:
    """What the parts are called, by the name of one of them."""
    match = _PART.fullmatch(asked.path.name)
    if match is None:
        number = _number(asked, NUMBER, 0) + 1
        raise ModelNotFoundError(
            f"{asked.path.name} is part {number} of {count}",
            "the other parts are found by its name, which was changed",
            f"give all parts names such as model-{number:05d}-of-{count:05d}.gguf",
        )
    if int(match[3]) != count:
        raise ModelFormatError(
            f"{asked.path.name} is called one of {int(match[3])} parts", f"its header says one of {count}", AGAIN
        )
    return [f"{match[1]}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def _check_place(part: GGUFFile, index: int, count: int) -> None:
    number, says = _number(part, NUMBER, 0), _number(part, COUNT, 1)
    if (number, says) != (index, count):
        has = (
            f"its header says part {number + 1} of {says}"
            if COUNT in part.metadata
            else "its header says nothing of parts"
        )
        raise ModelFormatError(f"{part.path.name} is called part {index + 1} of {count}", has, AGAIN)


def _check_family(parts: list[GGUFFile]) -> None:
    """All were cut from one model: what they say of it is the same, and so is the number of tensors that it has."""
    first = parts[0]
    for part in parts[1:]:
        for key in ("general.architecture", "general.name", NUM_TENSORS):
            if key in part.metadata and part.metadata[key] != first.metadata.get(key):
                raise ModelFormatError(
                    f"{part.path.name} is a part of another model",
                    f"it says {key} = {shown(part.metadata[key])}, and {first.path.name} {shown(first.metadata.get(key))}",
                    AGAIN,
                )
    num_tensors = sum(len(part.tensors) for part in parts)
    announced = _number(first, NUM_TENSORS, num_tensors)
    if announced != num_tensors:
        raise ModelFormatError(
            f"{first.path.name} announces {announced} tensors in {len(parts)} parts", f"they hold {num_tensors}", AGAIN
        )


def _all_tensors(parts: Iterable[GGUFFile]) -> Mapping[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    names: list[str] = []
    for index, part in enumerate(parts):
        names.append(part.path.name)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelFormatError(
                    f"{part.path.name} holds the tensor {shown(name)}",
                    f"{names[tensors[name].part]} holds it too",
                    AGAIN,
                )
            tensors[name] = replace(tensor, part=index)
    return tensors
