"""Which declaration a config.json gets: that of a model that runs, or the blueprint of one that can only be planned; no torch."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from holdfast.errors import UnsupportedModelError, shown
from holdfast.models.declared_model import DeclaredModel, declare_decoder, declare_named
from holdfast.models.families import FAMILIES, named_architecture, read_spec
from holdfast.models.settings import EXPERT_DTYPES, Settings, plain
from holdfast.models.spec import ModelSpec


def declare_config(config: Mapping[str, object], name: str, file: str = "config.json") -> DeclaredModel:
    """What is declared of the model that a config.json describes; settings that nobody could plan raise."""
    settings = Settings(config, file)
    native = _native_scheme(settings)
    reader = PLANNED_FAMILIES.get(named_architecture(settings, known_architectures()))
    if reader is not None:
        return reader(settings, name, native)
    if native is None:
        return declare_decoder(_read_known_spec(config, file), name)
    spec = _read_known_spec({**config, "quantization_config": None}, file)
    return declare_decoder(spec, name, native, _expert_scheme(settings))


def _read_known_spec(config: Mapping[str, object], file: str) -> ModelSpec:
    known = known_architectures()
    architecture = named_architecture(Settings(config, file), known)
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"{file} describes a {plain(architecture)}",
            f"plans are made for {', '.join(known)}",
            "use a model of one of these",
        )
    return read_spec(config, file)


def known_architectures() -> tuple[str, ...]:
    """All that can be planned; those that run come first."""
    return (*FAMILIES, *PLANNED_FAMILIES)


def refuse_planned_only(config: Mapping[str, object], file: str) -> None:
    """An error for a model that is to run and can only be planned; others are left to whoever reads the config."""
    architecture = named_architecture(Settings(config, file), known_architectures())
    if architecture in PLANNED_FAMILIES:
        raise UnsupportedModelError(
            f"{file} describes a {plain(architecture)}",
            f"it can be planned and does not run in this version, in any format; what runs is {', '.join(FAMILIES)}",
            "use a model of one of these, or see what it would take with holdfast plan",
        )


def _read_planned(settings: Settings, name: str, native: str | None) -> DeclaredModel:
    from holdfast.models.blueprints.planned import planned

    declaration = planned(settings, native)
    architecture = (settings.texts("architectures") or ("",))[0]
    declared = declare_named(name, declaration.grouped, f"{architecture} is not in this version")
    return replace(declared, declaration=declaration)


def _native_scheme(settings: Settings) -> str | None:
    """The scheme in which the checkpoint stores its matrices, from quantization_config."""
    part = settings.part("quantization_config")
    if part is None:
        return None
    method = part.text("quant_method", "")
    if method == "mxfp4" and settings.texts("architectures") == ("GptOssForCausalLM",):
        return method  # of its experts
    if method != "fp8":
        raise UnsupportedModelError(
            f"{settings.file} says {part.section}quant_method = {shown(method)}",
            "checkpoints in fp8, or not quantized, can be planned",
            "use the model's checkpoint before it was quantized, and choose a quantization",
        )
    block = part.values.get("weight_block_size")
    if block is None:
        return "fp8_tensor"
    if block != [128, 128]:
        raise part.refuse("weight_block_size", block, "[128, 128]")
    return "fp8_block"


def _expert_scheme(settings: Settings) -> str | None:
    """That of experts, where a checkpoint (DeepSeek-V4) stores them in fewer bits than its other matrices."""
    part = settings.part("quantization_config")
    if part is None:
        return None
    where = settings if settings.values.get("expert_dtype") is not None else part
    said = where.text("expert_dtype", "fp8")
    if said not in EXPERT_DTYPES:
        raise where.refuse("expert_dtype", said, " or ".join(map(shown, EXPERT_DTYPES)))
    return EXPERT_DTYPES[said]


PLANNED_FAMILIES: Mapping[str, Callable[[Settings, str, str | None], DeclaredModel]] = {
    **dict.fromkeys(
        (
            *("MixtralForCausalLM", "Phi3ForCausalLM", "Gemma2ForCausalLM", "Mistral3ForConditionalGeneration"),
            *("GlmForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM"),
        ),
        _read_planned,
    ),
}
"""Architectures that can be planned and not run, by the name in config.json."""
