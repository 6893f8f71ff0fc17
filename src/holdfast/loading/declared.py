"""Declares the model that a user names: a folder, a GGUF file, a model of the Hub or the catalogue, or the default one; no torch.

Imports are lazy: a plan from the catalogue answers before a reader of weights is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from holdfast.loading.hub.names import parse_hub_name
from holdfast.loading.locate import fetch_hub_config, locate_config
from holdfast.loading.release_names import bare_name, find_release
from holdfast.loading.sources.files import CONFIG_FILE, MANIFEST_FILE, QUANTIZATION_KEY, read_json_object
from holdfast.models.blueprints.read import declare_config, known_architectures
from holdfast.models.declared_model import DeclaredModel, declare_decoder

if TYPE_CHECKING:
    from holdfast.loading.planning.open_model import OpenModel


SideSettings = tuple[Mapping[str, object] | None, str]
"""Settings of quantization in a file beside config.json, and the file; None: config.json has them, if any."""
NO_SIDE: SideSettings = (None, CONFIG_FILE)


def open_declared(model: str | None, revision: str | None = None) -> DeclaredModel:
    """Declare a model from config.json or a header alone, without weights; a path comes before a name.

    For a model on the Hub, the cache's config.json comes first, then the catalogue, then config.json from the Hub.
    """
    if model is None:
        from holdfast.loading.model_files import find_default_model

        return _read_file(find_default_model())
    located = locate_config(model, revision)
    if located is not None:
        path, label = located.path, located.label
        if path.suffix == ".json" and path.is_file():
            return declare_file(model)
        return _read_folder(path, label) if path.is_dir() else _read_file(path, label)
    from holdfast.models.catalogue import find_model

    try:
        name, _ = find_model(bare_name(model))
    except ModelNotFoundError as error:
        if parse_hub_name(model) is None:
            raise
        try:
            located = fetch_hub_config(model, revision)
        except ModelNotFoundError as on_hub:
            # A mistyped name of the catalogue looks like any other name on the Hub.
            raise on_hub.hinting(str(error)) from error
        if located is None:
            error.hinting("It is not in the Hugging Face cache either.")
            raise
        return _read_folder(located.path, located.label)
    declared = _declare_known(name)
    if find_release(model) is None:
        return declared
    from holdfast.loading.release import as_named

    return as_named(declared, model)


def declare_file(file: str, name: str | None = None) -> DeclaredModel:
    """Declare a model from a config.json alone; its name is `name`, or that of its folder."""
    path = Path(file).expanduser()
    path = path / CONFIG_FILE if path.is_dir() else path
    config = read_json_object(path)
    label = name or (path.resolve().parent.name if path.name == CONFIG_FILE else path.stem)
    stored = _stored_in_settings(config, label) if config.get(QUANTIZATION_KEY) else None
    declared = declare_config(config, label, path.name) if stored is None else stored
    return replace(declared, typed=(*(() if name is None else (name,)), "--config", file))


@lru_cache(maxsize=8)
def _declare_known(name: str) -> DeclaredModel:
    """Declare a model of the catalogue; cached across plans with other options."""
    from holdfast.models.catalogue import find_model

    return declare_config(find_model(name)[1], name)


def _read_folder(folder: Path, label: str = "") -> DeclaredModel:
    from holdfast.loading.model_files import gguf_of
    from holdfast.loading.packed.settings import read_side_settings
    from holdfast.loading.sources.safetensors import file_inside, has_file

    name = label or folder.resolve().name
    try:
        if (file := gguf_of(folder, "auto")) is not None:
            return _read_file(file, label)
        if not has_file(folder, CONFIG_FILE):
            example = "the folder that holds a model's config.json"
            raise ModelNotFoundError("model.no_config", folder=folder, found="no GGUF model either", example=example)
        config = read_json_object(file_inside(folder, CONFIG_FILE))
    except OSError as error:
        raise ModelNotFoundError("file.unreadable", file=folder, reason=error.strerror or error) from error
    stored, side = None, read_side_settings(folder, config)
    if has_file(folder, MANIFEST_FILE) or config.get(QUANTIZATION_KEY) or side[0] is not None:
        if (opened := _open_weights(folder)) is not None:
            with closing(opened.source):
                return declare_opened(opened, name)
        stored = _stored_in_settings(config, name, side)
    if stored is not None:
        return stored
    declared = declare_config(config, name)
    if declared.spec is not None and not _names_type(config) and (opened := _open_weights(folder)) is not None:
        # The weights have the type that config.json does not name.
        opened.source.close()
        return declare_decoder(opened.spec, declared.name)
    return declared


def _names_type(config: dict[str, object]) -> bool:
    from holdfast.models.grouped_readers import model_settings
    from holdfast.models.settings import Settings

    values = model_settings(Settings(config, CONFIG_FILE)).values
    return values.get("dtype") is not None or values.get("torch_dtype") is not None


ABSENT = ("weights.none", "weights.missing_files", "weights.truncated", "file.lfs_pointer")
"""Codes of weights that are not there, or not whole yet."""


def _open_weights(folder: Path) -> OpenModel | None:
    """Open the headers of a folder's weights; None if they are not there. Raise if they do not fit the settings."""
    from holdfast.loading.model_files import open_directory

    try:
        return open_directory(folder)
    except OSError:
        return None
    except ModelError as error:
        is_misfit = error.code == "model.mismatch" or error.code.startswith("weights.")
        if not is_misfit or error.code in ABSENT:
            return None  # the settings alone can be declared, or have an error of their own
        raise


def declare_opened(opened: OpenModel, name: str) -> DeclaredModel:
    """Declare a model from its headers, with its stored schemes and the weights that stay unquantized."""
    from holdfast.loading.gguf.parts import on_disk
    from holdfast.loading.packed.source import PackedSource
    from holdfast.loading.planning.moves import choose_all
    from holdfast.loading.planning.packed_planes import packed_weights
    from holdfast.loading.planning.plan import plan_load
    from holdfast.loading.quantized.source import QuantizedSource, plan_quantized

    declared, source = declare_decoder(opened.spec, name), opened.source
    tensors: dict[str, list[str]] = {}
    if isinstance(source, PackedSource):
        plan_load(opened.parameters, source, opened.spec.checkpoint_dtype)  # refuses what loading would
        packed = packed_weights(opened.parameters, source.entries)
        return replace(declared, on_disk=source.on_disk, packed=packed, notes=(*declared.notes, *source.notes))
    if isinstance(source, QuantizedSource):  # every weight has its final scheme
        plan = plan_quantized(opened.parameters, source, opened.spec.checkpoint_dtype)
    elif opened.stored is not None:
        plan = plan_load(opened.parameters, source, opened.spec.checkpoint_dtype, stored=opened.stored)
        fills = choose_all(opened.parameters, source.entries).fills
        tensors = {fill.parameter.name: [part.tensor for part in fill.whole_parts] for fill in fills}
    else:
        packed = packed_weights(opened.parameters, source.entries)
        return replace(declared, on_disk=None if opened.gguf is None else on_disk(opened.gguf), packed=packed)
    schemes = {weight.name: weight.scheme for weight in plan.weights if weight.scheme is not None}
    open_weights = frozenset(one for one in tensors if opened.stored and not opened.stored.leaves_alone(tensors[one]))
    unread = None if opened.stored is None else opened.stored.unread_pattern
    return replace(declared, stored=schemes, open_weights=open_weights, unread_pattern=unread)


def _stored_in_settings(config: dict[str, object], name: str, side: SideSettings = NO_SIDE) -> DeclaredModel | None:
    """Declare a quantized model by its settings alone, or those of a file beside; None if they do not describe one."""
    from holdfast.loading.packed.settings import read_packed
    from holdfast.loading.planning.stored_schemes import quantization_of, read_stored_schemes
    from holdfast.models.grouped_readers import FAMILIES, named_architecture
    from holdfast.models.settings import Settings

    architecture = named_architecture(Settings(config, CONFIG_FILE), known_architectures())
    quantization, file = (config.get(QUANTIZATION_KEY), CONFIG_FILE) if side[0] is None else side
    if architecture not in FAMILIES or not isinstance(quantization, Mapping):
        return None
    declared = declare_config({**config, QUANTIZATION_KEY: None}, name)
    if (packed := read_packed(quantization, file)) is not None:
        from holdfast.loading.release import as_declared

        found = as_declared(declared, packed, quantization) or declared
        return replace(found, notes=(*declared.notes, *packed.notes))
    stored = read_stored_schemes(quantization_of(Settings({**config, QUANTIZATION_KEY: quantization}, file)), file)
    if stored is None:
        return declared
    stored.refuse_unread()
    weights = declared.parameters()
    declared_stored = [weight for weight in weights if stored.is_declared(weight.kind, weight.tensors)]
    for weight in declared_stored:
        scheme = stored.of(weight.kind).scheme
        if (reason := scheme.unsupported(weight.shape)) is not None:
            raise UnsupportedModelError(
                "model.mismatch", file=CONFIG_FILE, problem=f"{weight.name} is stored as {scheme.name}, but {reason}"
            )
    schemes = {weight.name: stored.of(weight.kind).scheme for weight in declared_stored}
    open_weights = frozenset(weight.name for weight in weights if not stored.leaves_alone(weight.tensors))
    return replace(declared, stored=schemes, open_weights=open_weights)


def _read_file(path: Path, label: str = "") -> DeclaredModel:
    from holdfast.loading.gguf.parts import model_name
    from holdfast.loading.model_files import open_gguf, open_model
    from holdfast.loading.planning.plan import plan_load

    # `open_model` has the errors about other files.
    opened = open_gguf(path) if path.suffix == ".gguf" else open_model(str(path), "auto")
    opened.source.close()
    # Refuses the tensors that loading would: missing, too many, of another shape.
    plan_load(opened.parameters, opened.source, opened.spec.checkpoint_dtype)
    return declare_opened(opened, label or model_name(opened.path))
