"""From the keyword arguments of LLM and AsyncLLM to an EngineConfig; no torch."""

import dataclasses

from holdfast.config import EngineConfig
from holdfast.errors import ModelFormatError, RequestError
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.request.sampling_params import SamplingParams


def config_from(arguments: dict[str, object], options: dict[str, object]) -> EngineConfig:
    """A config from named arguments and from other spellings of the same options.

    An argument that has its default counts as not given, so that another spelling of it is not a contradiction.
    """
    defaults = {setting.name: setting.default for setting in dataclasses.fields(EngineConfig)}
    given = {
        name: value
        for name, value in arguments.items()
        if type(value) is not type(defaults[name]) or value != defaults[name]
    }
    return EngineConfig.from_options(**given, **options)


def sampling_params_from(generation: GenerationDefaults) -> SamplingParams:
    """What the makers of the model advise; the usual defaults where they say nothing."""
    advised = {
        name: value
        for name in ("temperature", "top_p", "top_k", "repetition_penalty")
        if (value := getattr(generation, name)) is not None
    }
    try:
        return SamplingParams(**advised)
    except RequestError as error:
        raise ModelFormatError(
            "the model's own sampling defaults were asked", str(error), "pass SamplingParams instead"
        ) from error
