"""How hidden states of a model become embeddings, from sentence-transformers' files or GGUF metadata; no torch.

    modules.json              the steps in order: Transformer, Pooling, and Normalize if vectors have unit length
    1_Pooling/config.json     which rows are pooled: pooling_mode_lasttoken, pooling_mode_mean_tokens, ...

A causal decoder has seen the whole text at its last token alone, so that is the pooling that is computed here. Any other mode is a
refusal, which requests for embeddings are answered with; the model answers prompts all the same.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.errors import ModelFormatError, shown
from holdfast.loading.planning.open_model import PoolingSettings
from holdfast.loading.sources.files import (
    AGAIN,
    MAX_JSON_BYTES,
    MODULES_FILE,
    parse_json,
    read_json_object,
    read_small_file,
)
from holdfast.loading.sources.safetensors import file_inside, has_file

LAST, MEAN = "lasttoken", "mean"
GGUF_POOLING = {1: "mean pooling", 2: "cls pooling", 4: "rank pooling"}
"""Values of {architecture}.pooling_type but 0, none, and 3, the last token."""
GGUF_LAST = 3
_FOLDER = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_STEPS = ("Transformer", "Pooling", "Normalize")


def read_pooling(folder: Path, is_bare: bool = False) -> PoolingSettings:
    """What the files of a folder say; `is_bare`: its checkpoint is a decoder without a head, which answers nothing well."""
    if not has_file(folder, MODULES_FILE):
        return PoolingSettings(is_embedding=is_bare)
    steps: dict[str, str] = {}
    for module in _modules(folder):
        kind, path = module.get("type"), module.get("path")
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ModelFormatError(f"{MODULES_FILE} lists {shown(module)}", "type and path are texts there", AGAIN)
        steps[kind.rpartition(".")[2]] = path
    settings = PoolingSettings(is_embedding=True, normalizes="Normalize" in steps)
    other = next((step for step in steps if step not in _STEPS), None)
    if other is not None:
        return replace(settings, refusal=f"{MODULES_FILE} asks for a {shown(other, 40)[1:-1]} layer, which is not here")
    mode = _mode(folder, steps["Pooling"]) if "Pooling" in steps else LAST
    if mode is None:
        return replace(settings, refusal=f"{MODULES_FILE} names a pooling whose config.json is not in the folder")
    if mode != LAST:
        return replace(settings, refusal=f"{MODULES_FILE} asks for {mode} pooling, and the last token is pooled here")
    return settings


def _modules(folder: Path) -> list[dict[str, object]]:
    path = file_inside(folder, MODULES_FILE)
    modules = parse_json(read_small_file(path, MAX_JSON_BYTES), MODULES_FILE)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelFormatError(f"{MODULES_FILE} holds no list of modules", "sentence-transformers writes one", AGAIN)
    return modules


def _mode(folder: Path, path: str) -> str | None:
    """The name of the mode in a module's folder; None if its file is not there. Left out, it is sentence-transformers' mean."""
    if not _FOLDER.fullmatch(path) or set(path) == {"."}:
        raise ModelFormatError(f"{MODULES_FILE} names the folder {shown(path)}", "a folder beside it is needed", AGAIN)
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
    """The same of a GGUF file."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if not isinstance(kind, int) or isinstance(kind, bool):
        return PoolingSettings()
    settings = PoolingSettings(is_embedding=kind != 0)
    if kind in (0, GGUF_LAST):
        return settings
    return replace(
        settings, refusal=f"its file asks for {GGUF_POOLING.get(kind, f'pooling {kind}')}, and not the last token"
    )
