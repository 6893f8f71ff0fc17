"""Which files of a folder hold its weights: the index read as hostile input, and no file outside the folder; no torch."""

import os
import re
from pathlib import Path

from holdfast.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError, shown
from holdfast.loading.sources.json_file import AGAIN, read_json_object
from holdfast.loading.sources.safetensors_file import SafetensorsFile
from holdfast.models.settings import listed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npz", ".joblib")
"""Checkpoints that run code when they are opened."""
MAX_FILES = 10_000
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,240}\.safetensors")


def file_inside(folder: Path, name: str) -> Path:
    """The path of a file in the folder; a link that leads out of it is refused.

    The download cache of Hugging Face keeps files in blobs/ beside snapshots/REVISION/ and links to them: that is allowed.
    """
    path = folder / name
    try:
        target, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise ModelFormatError(
            f"{name} is a link in a circle", "a file is needed", "put the file itself there"
        ) from error
    blobs = root.parent.parent / "blobs"
    if target.is_relative_to(root) or (root.parent.name == "snapshots" and target.is_relative_to(blobs)):
        return path
    raise ModelFormatError(
        f"{name} is a link that leads out of {folder.name}",
        "files are read from the model's own folder only",
        "put the file itself there",
    )


def has_file(folder: Path, name: str) -> bool:
    """Whether the folder has a file of this name; something else of this name is refused, not passed over."""
    path = folder / name
    if path.is_file():
        return True
    if not os.path.lexists(path):
        return False
    what = "a link to nowhere" if path.is_symlink() else "no regular file"
    raise ModelFormatError(f"{folder.name} has {name}", f"it is {what}", AGAIN)


def open_weight_files(folder: Path) -> list[SafetensorsFile]:
    """Every safetensors file of the model, its header checked, and against the index."""
    if has_file(folder, SINGLE_FILE):
        return [SafetensorsFile(file_inside(folder, SINGLE_FILE))]
    if not has_file(folder, INDEX_FILE):
        raise _no_weights(folder)
    file_names = _read_index(folder)
    paths = {file_name: file_inside(folder, file_name) for file_name in sorted(set(file_names.values()))}
    missing = [file_name for file_name, path in paths.items() if not path.is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{INDEX_FILE} names {len(paths)} files",
            f"{len(missing)} of them are not there: {listed(missing)}",
            "download the rest of the model",
        )
    files = [SafetensorsFile(path) for path in paths.values()]
    _check_index(file_names, files)
    return files


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, each a plain name of a safetensors file."""
    weight_map = read_json_object(file_inside(folder, INDEX_FILE)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{INDEX_FILE} has no weight_map", "tensor names with their files are needed", AGAIN)
    file_names: dict[str, str] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _PLAIN_NAME.fullmatch(file_name):
            raise ModelFormatError(
                f"{INDEX_FILE} places {shown(name)} in {shown(file_name)}",
                "the name of a safetensors file in the same folder is needed",
                AGAIN,
            )
        file_names[name] = file_name
    if len(set(file_names.values())) > MAX_FILES:
        raise ModelFormatError(f"{INDEX_FILE} names more than {MAX_FILES} files", "no model has as many", AGAIN)
    return file_names


def _check_index(file_names: dict[str, str], files: list[SafetensorsFile]) -> None:
    """The index and the files agree about where every tensor is."""
    held = {(name, file.path.name) for file in files for name in file.tensors}
    for name, file_name in file_names.items():
        if (name, file_name) not in held:
            raise ModelFormatError(
                f"{INDEX_FILE} places {shown(name)} in {file_name}", "it is missing from that file", AGAIN
            )
    for file in files:
        for name in file.tensors:
            if file_names.get(name) != file.path.name:
                has = f"it is placed in {file_names[name]}" if name in file_names else "it is not mentioned"
                raise ModelFormatError(
                    f"{file.path.name} holds the tensor {shown(name)}", f"{has} by {INDEX_FILE}", AGAIN
                )


def _no_weights(folder: Path) -> ModelNotFoundError | UnsupportedModelError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_ENDINGS)]
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if others:
        return ModelNotFoundError(
            f"{folder.name} has neither {SINGLE_FILE} nor {INDEX_FILE}",
            f"it has {listed(others)}",
            "pass a .gguf file by its own path" if others[0].endswith(".gguf") else "download the index too",
        )
    if pickles:
        return UnsupportedModelError(
            f"{folder.name} holds its weights as {listed(pickles)}",
            "such files run code when they are opened, so they are not",
            "convert the model to safetensors, or download it in that format",
        )
    return ModelNotFoundError(
        f"{folder.name} has neither {SINGLE_FILE} nor {INDEX_FILE}", "it holds no weights", "download them"
    )
