"""vLLM's names: each is ours, has no effect, or raises with the alternative; docs/from_vllm.md lists the same."""

import dataclasses
import logging
import re
from pathlib import Path

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.vllm_names import (
    CALL_NAMES,
    ENGINE_ALIASES,
    ENGINE_NAMES,
    ENGINE_VALUES,
    METHOD_NAMES,
    MISSING_VALUES,
    SAME_ENGINE_NAMES,
    SAME_SAMPLING_NAMES,
    SAMPLING_NAMES,
    SERVER_NAMES,
    STORED_AS_IS,
    STRUCTURED_NAMES,
    Foreign,
)

PAGE = (Path(__file__).parents[2] / "docs" / "from_vllm.md").read_text(encoding="utf-8")
FIELDS = {field.name for field in dataclasses.fields(EngineConfig)}
PARAMS = {field.name for field in dataclasses.fields(SamplingParams)}


def section(title: str) -> set[str]:
    """Names in the section of the page with this heading."""
    (text,) = re.findall(rf"^### {re.escape(title)}$(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`(\w+)`", text))


def missing(table: dict[str, Foreign]) -> set[str]:
    return {name for name, foreign in table.items() if foreign.is_missing}


def test_tables_name_options_that_exist() -> None:
    assert set(SAME_ENGINE_NAMES) <= FIELDS
    assert set(ENGINE_ALIASES.values()) <= FIELDS
    assert set(SAME_SAMPLING_NAMES) == PARAMS - {"priority"}, "that is an argument of generate there"
    assert not ENGINE_NAMES.keys() & (FIELDS | ENGINE_ALIASES.keys())
    assert not SAMPLING_NAMES.keys() & PARAMS
    assert {*ENGINE_VALUES, *MISSING_VALUES} <= FIELDS


def test_page_for_users_of_vllm_has_every_name() -> None:
    assert section("Engine options: the same") == set(SAME_ENGINE_NAMES)
    assert section("Engine options: without effect") == set(ENGINE_NAMES) - missing(ENGINE_NAMES)
    assert section("Engine options: not in this version") == missing(ENGINE_NAMES)
    assert section("SamplingParams: the same") == set(SAME_SAMPLING_NAMES)
    assert section("SamplingParams: without effect") == set(SAMPLING_NAMES) - missing(SAMPLING_NAMES)
    assert section("SamplingParams: not in this version") == missing(SAMPLING_NAMES)
    assert section("generate and chat: not in this version") == missing(CALL_NAMES)
    assert section("Methods: not in this version") == set(METHOD_NAMES)
    assert section("Server options: without effect") == set(SERVER_NAMES) - missing(SERVER_NAMES)
    assert section("Server options: not in this version") == missing(SERVER_NAMES)
    assert section("StructuredOutputsParams: other fields") == set(STRUCTURED_NAMES)
    for alias, name in ENGINE_ALIASES.items():
        assert f"| `{alias}` | `{name}` |" in PAGE


def test_names_without_effect_log_one_line(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig.from_options(
        model="m", trust_remote_code=True, swap_space=4, data_parallel_size=1, disable_log_stats=True, max_num_seqs=3
    )
    assert config == EngineConfig(model="m", max_num_seqs=3)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for words in ("trust_remote_code=True (code out of a model folder is never run", "swap_space=4", "parallel_size=1"):
        assert words in record.getMessage()
    caplog.clear()
    EngineConfig.from_options(model="m")
    assert not caplog.records


@for_each(
    "given",
    [
        {"method": "ngram", "num_speculative_tokens": 3},
        {"method": "ngram", "model": "ngram", "num_speculative_tokens": 3},
        {"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
        {"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": None},
        '{"method": "ngram", "num_speculative_tokens": 3}',
    ],
)
def test_ngram_drafts_by_vllms_option(given: object) -> None:
    assert EngineConfig.from_options(speculative_config=given) == EngineConfig(speculative="ngram:3")
    assert EngineConfig.from_options(speculative=given) == EngineConfig(speculative="ngram:3")
    assert EngineConfig.from_options(speculative_config=None) == EngineConfig()


@for_each("name", sorted(ENGINE_NAMES))
def test_vllm_engine_name_is_accepted_or_refused(name: str) -> None:
    foreign = ENGINE_NAMES[name]
    for value in foreign.taken or ("anything",):
        assert EngineConfig.from_options(**{name: value}) == EngineConfig()
    if foreign.is_missing:
        with raises_code("value.unsupported_option", ConfigError, name=name, instead=foreign.words):
            EngineConfig.from_options(**{name: "something"})


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@for_each(
    "options, text",
    [
        ({"data_parallel_size": 2}, "put a router in front"),
        ({"enable_lora": True}, "merge the adapter"),
        ({"speculative_config": {"model": "x"}}, "come from n-grams alone"),
        ({"speculative_config": {"method": "eagle", "num_speculative_tokens": 3}}, "n-grams alone"),
        ({"speculative_config": {**NGRAM, "model": "x"}}, "'model' is not supported"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens must be an integer"),
        ({"speculative_config": {**NGRAM, "num_speculative_tokens": "4"}}, "must be an integer"),
        ({"speculative_config": {**NGRAM, "prompt_lookup_max": 0}}, "must be positive integers"),
        ({"speculative_config": {**NGRAM, "x\n": 0}}, "is not supported"),
        ({"speculative_config": "{nonsense"}, "It is not JSON"),
        ({"num_speculative_tokens": 4}, "use speculative: ngram:4"),
        ({"cpu_offload_gb": 4}, "memory_limit"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "use fp8, which is e4m3"),
        ({"quantization": "bitsandbytes"}, "quantization fp8, int8 or mxfp4"),
        ({"tensor_parallel_siz": 1}, "Did you mean tensor_parallel_size?"),
        ({"gpu_memory_utilisation": 0.5}, "Did you mean gpu_memory_utilization?"),
        ({"trust_remote_cod": True}, "Did you mean trust_remote_code?"),
        ({"xyzzy": 1}, "The options are "),
    ],
)
def test_wrong_option_names_the_alternative(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        EngineConfig.from_options(**options)
    assert "\n" not in str(caught.value)


def test_wrong_values_of_shared_options_are_refused() -> None:
    for options in (
        *({"nnodes": True}, {"tensor_parallel_size": True}, {"dtype": "fp8"}, {"dtype": "FP64"}),
        {"speculative_config": {**NGRAM, "num_speculative_tokens": 99}},
    ):
        with pytest.raises(ConfigError):
            EngineConfig.from_options(**options)


def test_values_of_vllm_are_understood(tmp_path: Path) -> None:
    import torch

    for given, own in (
        *((name, "float16") for name in ("half", "fp16", "f16", "FP16", "float16")),
        *((name, "bfloat16") for name in ("bf16", "BF16", "BFloat16")),
        *((name, "float32") for name in ("float", "fp32", "f32")),
        ("AUTO", "auto"),
        (torch.bfloat16, "bfloat16"),
        (torch.half, "float16"),
    ):
        assert EngineConfig.from_options(dtype=given).dtype == own
        assert EngineConfig.from_options(index_cache_dtype=given).index_cache_dtype == own
    assert {EngineConfig.from_options(index_cache_dtype=name).index_cache_dtype for name in ("fp8_e4m3", "FP8")} == {
        "fp8"
    }
    assert EngineConfig.from_options(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    assert EngineConfig.from_options(model=tmp_path, tokenizer=tmp_path).model == str(tmp_path)
    assert EngineConfig.from_options(seed=None, enforce_eager=None, max_model_len=-1) == EngineConfig()
    assert EngineConfig.from_options(quantization="fp8_per_block").quantization == "fp8_block"


@for_each("name", STORED_AS_IS)
def test_stored_quantization_is_accepted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert EngineConfig.from_options(quantization=name) == EngineConfig()
    assert f"quantization='{name}' (a checkpoint that is quantized loads as it is stored)" in caplog.text
