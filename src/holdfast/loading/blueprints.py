"""The blueprint of whatever a person named: a folder, a GGUF file, a model of the catalogue, or the default model; no torch.

What a name does not need is not imported: a plan from the catalogue answers before a reader of files is loaded.
"""

from dataclasses import replace
from pathlib import Path

from holdfast.errors import ModelError, ModelNotFoundError
from holdfast.models.blueprints.blueprint import Blueprint, read_blueprint, spec_blueprint

CONFIG_FILE = "config.json"
MANIFEST_FILE = "holdfast-weights.json"
QUANTIZATION = "quantization_config"


def open_blueprint(model: str | None) -> Blueprint:
    """From config.json or a header alone, without weights and without a network; a path goes before a name."""
    if model is None:
        from holdfast.loading.default_model import find_default_model

        return _read_file(find_default_model())
    path = _existing(model)
    if path is None:
        from holdfast.models.catalogue import find_model

        name, config = find_model(model)
        return read_blueprint(config, name)
    return _read_folder(path) if path.is_dir() else _read_file(path)


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if model.strip() and path.exists() else None
    except PermissionError as error:
        raise ModelNotFoundError(
            f"model {model[:400]!a} was asked for", "its folder may not be read", "check the permissions"
        ) from error
    except (OSError, RuntimeError, ValueError):  # too long, of a user without a home, or no path at all
        return None


def _read_folder(folder: Path) -> Blueprint:
    from holdfast.loading.sources.json_file import read_json_object
    from holdfast.loading.sources.weight_files import file_inside, has_file

    name = folder.resolve().name
    try:
        if not has_file(folder, CONFIG_FILE):
            gguf = sorted(path for path in folder.iterdir() if path.suffix == ".gguf")
            raise ModelNotFoundError(
                f"{folder} has no {CONFIG_FILE}",
                "a folder is planned from that",
                f"pass {gguf[0]}" if gguf else "pass the folder that holds a model's config.json",
            )
        config = read_json_object(file_inside(folder, CONFIG_FILE))
    except OSError as error:
        raise ModelNotFoundError(
            f"{folder} cannot be read", str(error.strerror or error), "check the path and its permissions"
        ) from error
    stored = _stored_in_headers(folder, name, has_file(folder, MANIFEST_FILE) or bool(config.get(QUANTIZATION)))
    if stored is not None:
        return stored
    blueprint = read_blueprint(config, name)
    if blueprint.spec is not None and config.get("dtype") is None and config.get("torch_dtype") is None:
        return _typed_by_weights(folder, blueprint)
    return blueprint


def _stored_in_headers(folder: Path, name: str, is_quantized: bool) -> Blueprint | None:
    """A quantized model whose weights are there is planned by what their headers say; None: by its settings alone."""
    if not is_quantized:
        return None
    from holdfast.loading.directory import open_directory
    from holdfast.loading.planning.plan import plan_load
    from holdfast.loading.quantized.quantized_source import QuantizedSource, plan_quantized

    try:
        opened = open_directory(folder)
    except (ModelError, OSError):
        return None
    try:
        dtype, source = opened.spec.checkpoint_dtype, opened.source
        if isinstance(source, QuantizedSource):
            plan = plan_quantized(opened.parameters, source, dtype)
        else:
            plan = plan_load(opened.parameters, source, dtype, stored=opened.stored)
    finally:
        opened.source.close()
    schemes = {weight.name: weight.scheme for weight in plan.weights if weight.scheme is not None}
    return replace(spec_blueprint(opened.spec, name), stored=schemes)


def _typed_by_weights(folder: Path, blueprint: Blueprint) -> Blueprint:
    """A config.json that names no type leaves it to the weights, if they are there."""
    from holdfast.loading.directory import open_directory

    try:
        opened = open_directory(folder)
    except (ModelError, OSError):
        return blueprint
    opened.source.close()
    return spec_blueprint(opened.spec, blueprint.name)


def _read_file(path: Path) -> Blueprint:
    if path.suffix == ".gguf":
        from holdfast.loading.gguf_model import open_gguf

        opened = open_gguf(path)
    else:
        from holdfast.loading.model_files import open_model  # knows what other files are, and says so

        opened = open_model(str(path), "auto")
    opened.source.close()
    return spec_blueprint(opened.spec, path.stem)
