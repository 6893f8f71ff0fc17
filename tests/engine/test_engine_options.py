"""The options that LLM and AsyncLLM share are those of the config; what the makers of a model advise."""

from typing import get_type_hints

import pytest

from holdfast.api.options import EngineOptions, sampling_params_from
from holdfast.config import ALIASES, EngineConfig
from holdfast.errors import ModelFormatError
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.request.sampling_params import SamplingParams


def test_the_options_are_the_fields_of_the_config_and_other_names_of_them():
    fields = get_type_hints(EngineConfig)
    others = {alias: fields[name] for alias, name in ALIASES.items()}
    assert get_type_hints(EngineOptions) == {name: kind for name, kind in fields.items() if name != "model"} | others


def test_the_makers_advice():
    advice = GenerationDefaults(eos_token_ids=(1,), temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    assert sampling_params_from(advice) == expected
    assert sampling_params_from(GenerationDefaults()) == SamplingParams()
    assert sampling_params_from(GenerationDefaults(temperature=0.0)).is_greedy


def test_bad_advice_is_the_models_fault():
    with pytest.raises(ModelFormatError, match="temperature"):
        sampling_params_from(GenerationDefaults(temperature=float("nan")))
