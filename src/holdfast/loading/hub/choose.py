"""Chooses the files that a model needs: settings, tokenizer, weights, or the GGUF file of a quantization; no torch."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from holdfast.errors import ModelNotFoundError, UnsupportedModelError
from holdfast.loading.hub.names import HubName
from holdfast.loading.sources.files import MANIFEST_FILE, POOLING_FILES, QUANTIZATION_FILES, SETTINGS_FILES
from holdfast.loading.sources.safetensors import INDEX_FILE, PICKLE_ENDINGS, SINGLE_FILE
from holdfast.models.settings import listed

PREFERRED_TAGS = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q6_K", "Q8_0")
"""Default quantization: the first of these that a repository has."""
_PARTS = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})", re.IGNORECASE)
_TAG = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:[IT]?Q[0-9][A-Z0-9_]*|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))$", re.IGNORECASE
)
_NO_MODEL = re.compile(r"(?:mmproj|imatrix)", re.IGNORECASE)
MAX_TAGS = 12


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """One quantization of a repository: a file, or several parts of one."""

    stem: str
    """The path without its ending and the number of a part."""
    num_parts: int
    files: tuple[str, ...]

    @property
    def tag(self) -> str:
        """Q4_K_M and the like, from the name of the file or its folder; empty if neither has one."""
        *folders, name = self.stem.split("/")
        match = _TAG.search(name) or next((found for part in folders[::-1] if (found := _TAG.search(part))), None)
        return match[1].upper() if match else ""

    @property
    def is_whole(self) -> bool:
        return len(self.files) == self.num_parts

    def is_called(self, tag: str) -> bool:
        """Return True if a user's tag selects this model."""
        stem, wanted = self.stem.lower(), tag.lower()
        return self.tag.lower() == wanted or (stem.endswith(wanted) and stem[: -len(wanted)][-1:] in ("-", ".", "/"))


def gguf_models(names: Iterable[str]) -> tuple[GGUFModel, ...]:
    """Find every GGUF model among files, except image projectors and importance matrices."""
    found: dict[tuple[str, int], dict[int, str]] = {}
    for name in names:
        if not name.lower().endswith(".gguf") or _NO_MODEL.search(name.rpartition("/")[2]):
            continue
        parts = _PARTS.fullmatch(name[: -len(".gguf")])
        key, place = ((parts[1], int(parts[3])), int(parts[2])) if parts else ((name[: -len(".gguf")], 1), 1)
        found.setdefault(key, {})[place] = name
    return tuple(
        GGUFModel(stem, count, tuple(files[place] for place in sorted(files) if 1 <= place <= count))
        for (stem, count), files in sorted(found.items())
    )


@dataclass(frozen=True, slots=True)
class GGUFChoice:
    """The chosen GGUF model, and the tags of the others if the name has none."""

    model: GGUFModel
    others: tuple[str, ...] = ()


def choose_gguf(name: HubName, models: Collection[GGUFModel], where: str) -> GGUFChoice:
    """Choose the model that a name selects; an error lists the candidates."""
    if name.file is not None:
        wanted = [model for model in models if name.file in model.files]
    elif name.tag is not None:
        wanted = [model for model in models if model.is_called(name.tag)]
    elif len(models) == 1:
        wanted = list(models)
    else:
        wanted = next(
            ([model for model in models if model.tag == tag] for tag in PREFERRED_TAGS if _has(models, tag)), []
        )
    if wanted:
        best = min(wanted, key=lambda model: (len(model.stem), model.stem))
        others = [] if name.is_gguf else [model.tag or model.stem for model in models if model is not best]
        return GGUFChoice(best, tuple(dict.fromkeys(others)))
    tags = list(dict.fromkeys(model.tag or model.stem for model in models))
    more = f" and {len(tags) - MAX_TAGS} more" if len(tags) > MAX_TAGS else ""
    found = f"{', '.join(tags[:MAX_TAGS])}{more}" if tags else "no GGUF file"
    example = f"{name.repo}:{tags[0]}" if tags else f"{name.repo} for its safetensors"
    raise ModelNotFoundError("hub.no_quantization", model=name.text, where=where, found=found, example=example)


def preferred_tag(models: Sequence[GGUFModel]) -> str:
    """Return the quantization to suggest: a common one, else the first; empty without models."""
    usual = (tag for tag in PREFERRED_TAGS if _has(models, tag))
    return next(usual, models[0].tag if models else "")


def _has(models: Collection[GGUFModel], tag: str) -> bool:
    return any(model.tag == tag for model in models)


def has_folder_weights(names: Collection[str]) -> bool:
    """Return True if the files hold safetensors, or weights that were saved quantized."""
    return any(file in names for file in (SINGLE_FILE, INDEX_FILE, MANIFEST_FILE))


def takes_gguf(name: HubName, names: Collection[str], load_format: str = "auto") -> bool:
    """Return True if the name selects a GGUF file, not the repository's folder."""
    if name.is_gguf or load_format == "gguf":
        return True
    return load_format in ("auto", "dummy") and not has_folder_weights(names) and bool(gguf_models(names))


def settings_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the small files of a folder."""
    return tuple(file for file in (*SETTINGS_FILES, *POOLING_FILES, *QUANTIZATION_FILES) if file in names)


def weight_files(names: Collection[str], shards: Collection[str]) -> tuple[str, ...]:
    """Return the weight files of a folder; `shards` are the files in its index."""
    if MANIFEST_FILE in names:  # saved quantized: every file beside the manifest belongs to it
        kept = (MANIFEST_FILE, *(name for name in sorted(names) if name.endswith(".safetensors") and "/" not in name))
        return tuple(dict.fromkeys(kept))
    if SINGLE_FILE in names:
        return (SINGLE_FILE,)
    return (INDEX_FILE, *sorted(set(shards))) if INDEX_FILE in names else ()


def refuse_without_weights(name: HubName, names: Collection[str]) -> None:
    """Refuse a repository without loadable weights, before anything of it is downloaded."""
    if has_folder_weights(names):
        return
    pickles = sorted(file for file in names if file.endswith(PICKLE_ENDINGS))
    if pickles:
        raise UnsupportedModelError("weights.pickle", path=f"{name.text} ({listed(pickles)})")
    raise ModelNotFoundError("hub.no_weights", model=name.text, single=SINGLE_FILE, index=INDEX_FILE)
