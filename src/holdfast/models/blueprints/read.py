"""declare_config: the declaration of a model that runs, or the blueprint of one that can only be planned; no torch."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from holdfast.errors import UnsupportedModelError, shown
from holdfast.models.blueprints import hybrids, planned
from holdfast.models.blueprints.layered import Blueprint
from holdfast.models.declared_model import DeclaredModel, declare_decoder, declare_named, draft_notes
from holdfast.models.grouped_readers import FAMILIES, named_architecture, read_spec
from holdfast.models.settings import EXPERT_DTYPES, MAX_LAYERS, Settings, plain
from holdfast.models.spec import ModelSpec
from holdfast.quant.weight_schemes import WeightScheme

READERS: Mapping[str, Callable[[Settings, str | None], Blueprint]] = {**planned.READERS, **hybrids.READERS}
KIMI = "KimiK25ForConditionalGeneration"
PLANNED_FAMILIES = (*READERS, KIMI)
"""Architectures that can be planned and not run, by the name in config.json."""


def declare_config(config: Mapping[str, object], name: str, file: str = "config.json") -> DeclaredModel:
    """Declare the model of a config.json. Settings that cannot be planned raise."""
    settings = Settings(config, file)
    architecture = named_architecture(settings, known_architectures())
    if architecture in PLANNED_FAMILIES:
        return (_read_kimi if architecture == KIMI else _read_planned)(settings, name, architecture)
    native = _native_scheme(settings)
    if native is None:
        return declare_decoder(_read_known_spec(config, file), name)
    spec = _read_known_spec({**config, "quantization_config": None}, file)
    return declare_decoder(spec, name, native, _expert_scheme(settings))


def _read_known_spec(config: Mapping[str, object], file: str) -> ModelSpec:
    known = known_architectures()
    architecture = named_architecture(Settings(config, file), known)
    if architecture not in FAMILIES:
        values = {"file": file, "architecture": plain(architecture), "accepted": known}
        raise UnsupportedModelError("architecture.not_planned", **values)
    return read_spec(config, file)


def known_architectures() -> tuple[str, ...]:
    """List the architectures that can be planned; those that run come first."""
    return (*FAMILIES, *PLANNED_FAMILIES)


def refuse_planned_only(config: Mapping[str, object], file: str) -> None:
    """Refuse to run a model that can only be planned."""
    architecture = named_architecture(Settings(config, file), known_architectures())
    if architecture in PLANNED_FAMILIES:
        values = {"file": file, "architecture": plain(architecture), "accepted": tuple(FAMILIES)}
        raise UnsupportedModelError("architecture.only_planned", **values)


def _read_planned(settings: Settings, name: str, architecture: str) -> DeclaredModel:
    declaration = READERS[architecture](settings, _native_scheme(settings))
    declared = declare_named(name, declaration.grouped, _not_runnable(architecture))
    return replace(declared, declaration=declaration, notes=_notes(settings, architecture))


def _read_kimi(settings: Settings, name: str, architecture: str) -> DeclaredModel:
    """Read Kimi-K2.5, whose text model is a DeepSeek-V3 with experts in int4."""
    text = settings.part("text_config")
    if text is None:
        raise settings.missing("text_config", "a plan would be a guess without it")
    config = {**text.values, "architectures": ["DeepseekV3ForCausalLM"], "quantization_config": None}
    config["tie_word_embeddings"] = settings.flag("tie_word_embeddings", False)
    declared = declare_decoder(read_spec(config, settings.file), name)
    reason, notes = _not_runnable(architecture), _notes(settings, architecture)
    declared = replace(declared, spec=None, not_runnable=reason, notes=notes)
    if settings.part("quantization_config") is None:
        return declared
    _check_int4(settings)
    stored = {weight.name: INT4 for weight in declared.parameters() if weight.kind == "expert"}
    return replace(declared, stored=stored)


INT4 = WeightScheme("int4", "uint8", "bfloat16", block_columns=32, codes_per_byte=2)
"""Planned and not run: codes of four bits, with a bfloat16 scale for 32 of them."""


def _check_int4(settings: Settings) -> None:
    """Refuse experts that are not stored as in Kimi-K2.5, the only quantized part."""
    part = settings.part("quantization_config") or settings
    for key in ("config_groups", "group_0", "weights"):
        part = part.part(key) or Settings({}, part.file, f"{part.section}{key}.")
    said = tuple(part.values.get(key) for key in ("num_bits", "type", "group_size"))
    if said != (4, "int", 32):
        reason = "plans have experts in int4 with a scale for 32 codes, or not quantized"
        values = {"file": settings.file, "key": f"{part.section}num_bits, type, group_size", "value": said}
        raise UnsupportedModelError("architecture.unsupported_setting", **values, reason=reason)


def _not_runnable(architecture: str) -> str:
    return f"{plain(architecture)} is not in this version"


DRAFT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def _notes(settings: Settings, architecture: str) -> tuple[str, ...]:
    """List what a plan leaves out. The tower of Mistral 3 is part of its plan."""
    notes = []
    if settings.part("text_config") is not None and not architecture.startswith("Mistral3"):
        notes.append("the text model alone is planned: weights for images, video and sound are left out")
    text = settings.part("text_config") or settings
    counts = [text.count(key, 0, MAX_LAYERS, low=0) for key in DRAFT_KEYS if text.values.get(key) is not None]
    return (*notes, *draft_notes(max(counts, default=0)))


def _native_scheme(settings: Settings) -> str | None:
    """Read the scheme of the checkpoint's matrices from quantization_config."""
    part = settings.part("quantization_config")
    if part is None:
        return None
    method = part.text("quant_method", "")
    if method == "mxfp4" and settings.texts("architectures") == ("GptOssForCausalLM",):
        return method  # of its experts
    if method != "fp8":
        raise part.unsupported("quant_method", "plans are for checkpoints in fp8, or not quantized")
    block = part.values.get("weight_block_size")
    if block is None:
        return "fp8_tensor"
    if block != [128, 128]:
        raise part.refuse("weight_block_size", block, "[128, 128]")
    return "fp8_block"


def _expert_scheme(settings: Settings) -> str | None:
    """Read the scheme of experts that are stored in fewer bits than other matrices (DeepSeek-V4)."""
    part = settings.part("quantization_config")
    if part is None:
        return None
    where = settings if settings.values.get("expert_dtype") is not None else part
    said = where.text("expert_dtype", "fp8")
    if said not in EXPERT_DTYPES:
        raise where.refuse("expert_dtype", said, " or ".join(map(shown, EXPERT_DTYPES)))
    return EXPERT_DTYPES[said]
