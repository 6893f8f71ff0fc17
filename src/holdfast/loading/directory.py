"""A model folder in Hugging Face layout, opened: config.json, generation_config.json and the headers of its weights; no torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.errors import ModelNotFoundError, UnsupportedModelError
from holdfast.loading.planning.made_up_planes import make_up_source
from holdfast.loading.planning.open_model import GenerationDefaults, OpenModel
from holdfast.loading.planning.quantization_config import read_stored_schemes
from holdfast.loading.planning.stored_schemes import StoredSchemes
from holdfast.loading.quantized.quantized_source import has_saved_weights, open_quantized
from holdfast.loading.sources.json_file import read_json_object
from holdfast.loading.sources.safetensors_source import SafetensorsSource
from holdfast.loading.sources.source import TensorEntry
from holdfast.loading.sources.weight_files import file_inside, has_file, open_weight_files
from holdfast.models.families import FAMILIES, Family, parameters, read_spec
from holdfast.models.settings import Settings, listed
from holdfast.models.spec import ModelSpec

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
QUANTIZATION = "quantization_config"


def open_directory(folder: Path) -> OpenModel:
    """The model in a folder; every header has been read and checked, no weight has."""
    spec, config = _read_config(folder)
    family = FAMILIES[spec.architecture]
    generation = _read_generation(folder, config, family)
    stored = _read_stored(config)
    if has_saved_weights(folder):
        return OpenModel(folder, "directory", spec, parameters(spec), open_quantized(folder), generation)
    source = SafetensorsSource(open_weight_files(folder), family.renames)
    has_dtype = any(config.values.get(key) is not None for key in ("dtype", "torch_dtype"))
    if stored is not None:
        stored = stored.used_by(source.entries)
    if not has_dtype and stored is None:
        spec = replace(spec, checkpoint_dtype=_commonest_dtype(source.entries, spec.checkpoint_dtype))
    return OpenModel(folder, "directory", spec, parameters(spec), source, generation, stored=stored)


def open_directory_without_weights(folder: Path) -> OpenModel:
    """The same from config.json alone, with made-up weights: quantized ones where it says that the model's are."""
    if has_saved_weights(folder):  # what those are, config.json does not say
        raise UnsupportedModelError(
            "load_format=dummy was asked for",
            f"{folder} holds weights that were saved quantized, which are not made up",
            "leave load_format out to load them, or pass the folder that they were made from",
        )
    spec, config = _read_config(folder)
    generation = _read_generation(folder, config, FAMILIES[spec.architecture])
    made_up, stored = parameters(spec), _read_stored(config)
    source = make_up_source(made_up, spec.checkpoint_dtype, stored)
    if stored is not None:
        stored = stored.used_by(source.entries)
    return OpenModel(folder, "directory", spec, made_up, source, generation, stored=stored)


def _read_config(folder: Path) -> tuple[ModelSpec, Settings]:
    if not has_file(folder, CONFIG_FILE):
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        gguf = [name for name in names if name.endswith(".gguf")]
        raise ModelNotFoundError(
            f"{folder} has no {CONFIG_FILE}",
            f"it holds {listed(names)}" if names else "it is empty",
            f"pass {folder / gguf[0]}" if gguf else "pass the folder that holds a model's config.json",
        )
    config = read_json_object(file_inside(folder, CONFIG_FILE))
    # How weights are stored is no matter of what is computed.
    return read_spec({**config, QUANTIZATION: None}, CONFIG_FILE), Settings(config, CONFIG_FILE)


def _read_stored(config: Settings) -> StoredSchemes | None:
    value = config.values.get(QUANTIZATION)
    if value is not None and not isinstance(value, dict):
        raise config.refuse(QUANTIZATION, value, "an object")
    return read_stored_schemes(value, CONFIG_FILE)


def _read_generation(folder: Path, config: Settings, family: Family) -> GenerationDefaults:
    """What generation_config.json says, and config.json where it is silent."""
    generation = Settings({}, GENERATION_FILE)
    if has_file(folder, GENERATION_FILE):
        generation = Settings(read_json_object(file_inside(folder, GENERATION_FILE)), GENERATION_FILE)
    bos_default = () if family.bos_token_id is None else (family.bos_token_id,)
    bos = generation.token_ids("bos_token_id", config.token_ids("bos_token_id", bos_default))
    top_k = generation.values.get("top_k")
    return GenerationDefaults(
        eos_token_ids=generation.token_ids("eos_token_id", config.token_ids("eos_token_id", family.eos_token_ids)),
        bos_token_id=bos[0] if bos else None,
        temperature=generation.optional_number("temperature", low=0.0),
        top_p=generation.optional_number("top_p"),
        top_k=None if top_k is None else generation.count("top_k", 0, 2**31 - 1, low=-1),
        repetition_penalty=generation.optional_number("repetition_penalty"),
    )


def _commonest_dtype(entries: Mapping[str, TensorEntry], default: str) -> str:
    """The type that most bytes have, for a config.json that does not name one."""
    num_bytes: dict[str, int] = {}
    for entry in entries.values():
        num_bytes[entry.dtype] = num_bytes.get(entry.dtype, 0) + entry.num_bytes
    return max(num_bytes, key=lambda dtype: num_bytes[dtype], default=default)
