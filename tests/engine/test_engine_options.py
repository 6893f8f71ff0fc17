import pytest

from holdfast.config import EngineConfig
from holdfast.engine.options import config_from, sampling_params_from
from holdfast.errors import ConfigError, ModelFormatError
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.request.sampling_params import SamplingParams


def test_arguments_become_a_config():
    assert config_from({"model": None, "seed": 0, "max_queue": 4096}, {}) == EngineConfig()
    assert config_from({"seed": 5, "page_tokens": 32}, {}) == EngineConfig(seed=5, page_tokens=32)


def test_another_spelling_of_an_argument_that_was_left_alone():
    arguments = {"memory_utilization": None, "page_tokens": None}
    config = config_from(arguments, {"gpu_memory_utilization": 0.5, "block_size": 32})
    assert (config.memory_utilization, config.page_tokens) == (0.5, 32)


def test_both_spellings_are_a_contradiction():
    with pytest.raises(ConfigError, match="is the same option"):
        config_from({"memory_utilization": 0.5}, {"gpu_memory_utilization": 0.6})


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        config_from({}, {"max_model_length": 5})


def test_wrong_types_that_equal_a_default_are_not_taken_for_it():
    with pytest.raises(ConfigError, match="seed"):
        config_from({"seed": False}, {})


def test_the_makers_advice():
    advice = GenerationDefaults(eos_token_ids=(1,), temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    assert sampling_params_from(advice) == expected
    assert sampling_params_from(GenerationDefaults()) == SamplingParams()
    assert sampling_params_from(GenerationDefaults(temperature=0.0)).is_greedy


def test_bad_advice_is_the_models_fault():
    with pytest.raises(ModelFormatError, match="temperature"):
        sampling_params_from(GenerationDefaults(temperature=float("nan")))
