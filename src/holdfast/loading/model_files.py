"""Opens whatever a person named: a model folder, a GGUF file, or nothing for the default model; no torch."""

import difflib
import re
from dataclasses import replace
from pathlib import Path

from holdfast.errors import ModelNotFoundError, UnsupportedModelError
from holdfast.loading.default_model import find_default_model
from holdfast.loading.directory import open_directory, open_directory_without_weights
from holdfast.loading.gguf_model import open_gguf
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.sources.dummy import DummySource
from holdfast.loading.sources.weight_files import PICKLE_ENDINGS

GGUF_MAGIC = b"GGUF"
MAX_PATH = 400
"""Characters of a path that a message repeats."""
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+")


def open_model(model: str | None, load_format: str) -> OpenModel:
    """The model at a path, known from its headers; None takes the default model.

    `load_format` is auto, safetensors or gguf (each refuses the other kind), or dummy for made-up weights.
    """
    path = find_default_model() if model is None else _find(model)
    try:
        if path.is_dir():
            if load_format == "gguf":
                raise _other_format(path, load_format, "a folder", "the path of a .gguf file")
            return open_directory_without_weights(path) if load_format == "dummy" else open_directory(path)
        _refuse_other_files(path)
        if load_format == "safetensors":
            raise _other_format(path, load_format, "a GGUF file", "a folder with safetensors files")
        opened = open_gguf(path)
    except OSError as error:
        raise ModelNotFoundError(
            f"{path} cannot be read", str(error.strerror or error), "check the path and its permissions"
        ) from error
    if load_format != "dummy":
        return opened
    opened.source.close()
    return replace(opened, source=DummySource(opened.parameters, opened.spec.checkpoint_dtype))


def _find(model: str) -> Path:
    """The path that was named, which exists, or an error that says what was probably meant."""
    try:
        path = Path(model).expanduser()
        if model.strip() and path.exists():
            return path
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    except PermissionError as error:
        raise ModelNotFoundError(
            f"model '{_escaped(model)}' was asked for", "its folder may not be read", "check the permissions"
        ) from error
    except (OSError, RuntimeError, ValueError):  # too long, of a user without a home, or no path at all
        path, siblings = Path(), []
    near = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.6)
    if near:
        do = f"did you mean {' or '.join(_escaped(str(path.parent / name)) for name in near)}?"
    elif _HUB_ID.fullmatch(model):
        do = f"run hf download {model} --local-dir {path.name}, then pass {path.name}"
    else:
        do = "pass a folder in Hugging Face layout or a .gguf file"
    has = "models are read from local paths only" if _HUB_ID.fullmatch(model) else "there is no such file or folder"
    raise ModelNotFoundError(f"model '{_escaped(model)}' was asked for", has, do)


def _escaped(path: str) -> str:
    return repr(path[:MAX_PATH])[1:-1]


def _refuse_other_files(path: Path) -> None:
    """Anything but a GGUF file; a name that promises a pickle is enough, such a file is not opened."""
    if path.name.endswith(PICKLE_ENDINGS):
        raise UnsupportedModelError(
            f"{path} is a pickle checkpoint",
            "such files run code when they are opened, so they are not",
            "convert the model to safetensors, or download it in that format",
        )
    if path.suffix in (".safetensors", ".json"):
        raise ModelNotFoundError(f"{path} is one file of a model", "the whole folder is needed", f"pass {path.parent}")
    if not path.is_file():
        raise ModelNotFoundError(
            f"{path} is no regular file", "a folder or a .gguf file is needed", "pass one of these"
        )
    if path.suffix == ".gguf":
        return
    with open(path, "rb", buffering=0) as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ModelNotFoundError(
                f"{path} is no GGUF file", "models are GGUF files or folders with safetensors", "pass one of these"
            )


def _other_format(path: Path, load_format: str, what: str, needed: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"load_format={load_format} was asked for", f"{path} is {what}", f"pass {needed}, or leave load_format out"
    )
