"""How hidden states of a model become embeddings, from sentence-transformers' files or GGUF metadata; no torch.

    modules.json              the steps in order: Transformer, Pooling, and Normalize if vectors have unit length
    1_Pooling/config.json     which rows are pooled: pooling_mode_lasttoken, pooling_mode_mean_tokens, ...

Only the last token of a causal decoder has seen the whole text, so only last-token pooling is computed. Any other mode becomes a
refusal for requests for embeddings; the model still answers prompts.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.errors import ModelFormatError, shown
from holdfast.loading.planning.open_model import PoolingSettings
from holdfast.loading.sources.files import MAX_JSON_BYTES, MODULES_FILE, parse_json, read_json_object, read_small_file
from holdfast.loading.sources.safetensors import file_inside, has_file

LAST, MEAN = "lasttoken", "mean"
GGUF_POOLING = {1: "mean pooling", 2: "cls pooling", 4: "rank pooling"}
"""Values of {architecture}.pooling_type except 0, none, and 3, the last token."""
GGUF_LAST = 3
_FOLDER = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_STEPS = ("Transformer", "Pooling", "Normalize")


def read_pooling(folder: Path, is_bare: bool = False) -> PoolingSettings:
    """Read the pooling of a folder. `is_bare` means that the checkpoint has no head, so it cannot generate."""
    if not has_file(folder, MODULES_FILE):
        return PoolingSettings(is_embedding=is_bare)
    modules = parse_json(read_small_file(file_inside(folder, MODULES_FILE), MAX_JSON_BYTES), MODULES_FILE)
    steps: dict[str, str] = {}
    for module in modules if isinstance(modules, list) else [modules]:
        kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise _wrong("a list of modules with type and path", module)
        steps[kind.rpartition(".")[2]] = path
    if not isinstance(modules, list):
        raise _wrong("a list of modules", modules)
    settings = PoolingSettings(is_embedding=True, normalizes="Normalize" in steps)
    other = next((step for step in steps if step not in _STEPS), None)
    if other is not None:
        return replace(
            settings, refusal=f"{MODULES_FILE} needs a {shown(other, 40)[1:-1]} layer, which is not supported"
        )
    mode = _mode(folder, steps["Pooling"]) if "Pooling" in steps else LAST
    if mode is None:
        return replace(settings, refusal=f"{MODULES_FILE} names a pooling whose config.json is not in the folder")
    if mode != LAST:
        return replace(settings, refusal=f"{MODULES_FILE} needs {mode} pooling, and only the last token is pooled here")
    return settings


def _wrong(expected: str, found: object) -> ModelFormatError:
    return ModelFormatError("file.wrong_content", file=MODULES_FILE, expected=expected, found=shown(found))


def _mode(folder: Path, path: str) -> str | None:
    """Return the pooling mode of a module's folder, by default mean; None if its file is missing."""
    if not _FOLDER.fullmatch(path) or set(path) == {"."}:
        raise _wrong("paths of folders beside it", path)
    name = f"{path}/config.json"
    if not has_file(folder, name):
        return None
    config = read_json_object(file_inside(folder, name))
    said = config.get("pooling_mode")
    if isinstance(said, str):
        return shown(said, 40)[1:-1]
    prefix = "pooling_mode_"
    modes = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    return " and ".join(modes[:4]).replace("_tokens", "").replace("_token", "") or MEAN


def gguf_pooling(metadata: Mapping[str, object]) -> PoolingSettings:
    """Like `read_pooling`, from the metadata of a GGUF file."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if not isinstance(kind, int) or isinstance(kind, bool):
        return PoolingSettings()
    settings = PoolingSettings(is_embedding=kind != 0)
    if kind in (0, GGUF_LAST):
        return settings
    named = GGUF_POOLING.get(kind, f"pooling {kind}")
    return replace(settings, refusal=f"its file needs {named}, and only the last token is pooled here")
