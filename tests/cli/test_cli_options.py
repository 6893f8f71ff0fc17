"""The options: a row for every field with the field's default, other spellings, and values as people type them."""

import dataclasses

import pytest

from error_codes import raises_code
from holdfast.cli.commands import COMMANDS, parser_of
from holdfast.cli.options import (
    ENGINE_SETTINGS,
    SAMPLING_SETTINGS,
    SEVERAL_SETTINGS,
    Given,
    given,
    read_biases,
    read_count,
    read_counts,
    read_grammar,
    read_integers,
    read_number,
    read_range,
    read_share,
)
from holdfast.config import ALIASES, EngineConfig
from holdfast.errors import ConfigError, RequestError
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.structured import StructuredOutputs


def names(owner: type) -> set[str]:
    return {field.name for field in dataclasses.fields(owner)}


def test_settings_have_one_row_per_field() -> None:
    engine = [setting.name for setting in ENGINE_SETTINGS]
    sampling = [setting.name for setting in (*SAMPLING_SETTINGS, *SEVERAL_SETTINGS)]
    assert sorted(engine) == sorted(names(EngineConfig) - {"model"})
    assert sorted(sampling) == sorted(names(SamplingParams) - {"seed", "detokenize", "priority", "output_kind"})


def parsed(*arguments: str) -> tuple[Given, Given]:
    """What a command gets that takes everything, as `run` does."""
    run = next(command for command in COMMANDS if command.path == ("run",))
    values = vars(parser_of(run).parse_args(arguments))
    return given(run.engine, values), given(run.sampling, values)


def test_parsed_without_arguments_is_empty() -> None:
    assert parsed() == ({}, {})


QUANTIZED = ("quantization", "quantization_ignore", "save_quantized", "quantized_embeddings")
"""Options whose values are no others', or that need a quantization beside them."""


def test_quantization_and_what_belongs_to_it_reach_their_fields() -> None:
    engine, _ = parsed(
        *("--quantization", "fp8", "--quantized-embeddings", "all", "--save-quantized", "folder"),
        *("--quantization-ignore", "*down_proj*, lm_head", "--quantization-ignore", "re:.*up.*"),
    )
    config = EngineConfig.from_options(**engine)
    assert (config.quantization, config.quantized_embeddings, config.save_quantized) == ("fp8", "all", "folder")
    assert config.quantization_ignore == ("*down_proj*", "lm_head", "re:.*up.*")
    with pytest.raises(ConfigError, match="pattern"):
        EngineConfig.from_options(**parsed("--quantization", "fp8", "--quantization-ignore", "a,,b")[0])


def test_quantization_help_names_every_scheme() -> None:
    (setting,) = (setting for setting in ENGINE_SETTINGS if setting.name == "quantization")
    assert all(f"{name} (" in setting.help for name in WEIGHT_SCHEMES)


@pytest.mark.parametrize(
    "setting",
    [setting for setting in ENGINE_SETTINGS if setting.name not in QUANTIZED],
    ids=lambda setting: setting.name,
)
def test_engine_option_reaches_its_field(setting) -> None:
    values = {"TOKENS": "64", "N": "3", "SHARE": "0.5", "SIZE": "1GiB", "PATH": "somewhere", "NAME": "auto"}
    values |= {
        "LAYERS": "0,1,30,31",
        "BLOCK": "64",
        "LEVEL": "high",
        "METHOD": "ngram:3",
        "SECONDS": "1.5",
        "WAY": "exact",
        "POLICY": "fcfs",
        "FORM": "as_stored",
    }
    flag = f"--{setting.name.replace('_', '-')}"
    arguments = [flag] if setting.is_switch else [flag, values[setting.metavar]]
    engine, sampling = parsed(*arguments)
    assert list(engine) == [setting.name]
    assert sampling == {}
    config = EngineConfig.from_options(**engine)
    assert getattr(config, setting.name) == engine[setting.name]


@pytest.mark.parametrize(
    ("arguments", "params"),
    [
        (("--temperature", "0.5"), {"temperature": 0.5}),
        (("--temp", "0.5"), {"temperature": 0.5}),
        (("--top-k", "-1"), {"top_k": 0}),
        (("--stop", "a", "--stop", "b"), {"stop": ("a", "b")}),
        (("--stop-token-ids", "1,2", "--stop-token-ids", "3"), {"stop_token_ids": (1, 2, 3)}),
        (("--logit-bias", "5=-100"), {"logit_bias": {5: -100.0}}),
        (("--ignore-eos",), {"ignore_eos": True}),
        (("--no-skip-special-tokens",), {"skip_special_tokens": False}),
        (("--n", "2", "--logprobs", "0"), {"n": 2, "logprobs": 0}),
        (("--max-tokens", "1K"), {"max_tokens": 1024}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_sampling_options_reach_their_fields(arguments: tuple[str, ...], params: dict) -> None:
    engine, sampling = parsed(*arguments)
    assert engine == {}
    assert SamplingParams(**sampling) == SamplingParams(**params)


@pytest.mark.parametrize("alias", ALIASES)
def test_spellings_of_vllm_are_understood(alias: str) -> None:
    values = {"gpu_memory_utilization": "0.5", "block_size": "32", "kv_cache_memory_bytes": "1GiB"}
    values["speculative_config"] = '{"method": "ngram", "num_speculative_tokens": 3}'
    engine, _ = parsed(f"--{alias.replace('_', '-')}", values[alias])
    assert getattr(EngineConfig.from_options(**engine), ALIASES[alias]) != getattr(EngineConfig(), ALIASES[alias])


def test_switches_go_both_ways() -> None:
    assert parsed("--no-enable-prefix-caching")[0] == {"enable_prefix_caching": False}
    assert parsed("--enable-prefix-caching")[0] == {"enable_prefix_caching": True}
    assert parsed("--enforce-eager")[0] == {"enforce_eager": True}
    assert parsed("--no-enforce-eager")[0] == {"enforce_eager": False}


def test_defaults_are_those_of_the_fields() -> None:
    defaults = {setting.name: setting.default for setting in ENGINE_SETTINGS}
    assert EngineConfig(**defaults) == EngineConfig()


@pytest.mark.parametrize("text", ["110%", "0", "-0.5", "1.5", "half", "nan"])
def test_memory_utilization_invalid_share_is_refused(text: str) -> None:
    engine, _ = parsed("--memory-utilization", text)
    with pytest.raises(ConfigError, match="memory_utilization"):
        EngineConfig.from_options(**engine)


def test_memory_utilization_accepts_percentage() -> None:
    assert parsed("--memory-utilization", "80%")[0] == {"memory_utilization": pytest.approx(0.8)}
    assert parsed("--gpu-memory-utilization", "80%")[0] == {"gpu_memory_utilization": pytest.approx(0.8)}


def test_empty_option_value_is_kept() -> None:
    assert parsed("--dtype", "", "--max-tokens", "") == ({"dtype": ""}, {"max_tokens": ""})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8192", 8192),
        ("8k", 8000),
        ("8K", 8192),
        ("1M", 2**20),
        ("1m", 10**6),
        ("2G", 2**31),
        ("25.6k", 25_600),
        ("0.5K", 512),
        (" 16 ", 16),
        ("-1", -1),
        ("auto", None),
        ("AUTO", None),
    ],
)
def test_read_count_reads_units(text: str, count: int | None) -> None:
    assert read_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "8q", "1.5", "8 k", "1e3", "0x10", "٣", "9" * 30, "1_000", "inf"])
def test_read_count_returns_non_count_unchanged(text: str) -> None:
    assert read_count(text) == text


def test_read_number_leaves_non_numbers_to_checks() -> None:
    assert read_number("0.7") == 0.7
    assert read_number("abc") == "abc"
    assert isinstance(read_number("nan"), float)


@pytest.mark.parametrize(
    ("text", "share"),
    [("0.8", 0.8), ("80%", 0.8), (" 80 % ", 0.8), ("100%", 1.0), ("1", 1.0), ("12.5%", 0.125), ("110", 110.0)],
)
def test_shares_are_numbers_or_percentages(text: str, share: float) -> None:
    assert read_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["110%", "0%", "-5%", "%", "x%", "nan%", "inf%", "half", "", "0.5%%"])
def test_read_share_returns_non_share_unchanged(text: str) -> None:
    assert read_share(text) == text


def test_read_integers_joins_lists() -> None:
    assert read_integers(["1,2", "3"]) == [1, 2, 3]
    assert read_integers(["x"]) == ["x"]


def test_read_biases_reads_pairs() -> None:
    assert read_biases(["42=-100", "7=1.5"]) == {42: -100.0, 7: 1.5}


@pytest.mark.parametrize("text", ["42", "=1", "a=1", "1=b", "-1=2"])
def test_read_biases_refuses_malformed_bias(text: str) -> None:
    with raises_code("cli.bad_logit_bias", RequestError, value=text):
        read_biases([text])


def test_read_grammar_reads_json_or_file(tmp_path) -> None:
    file = tmp_path / "form.json"
    file.write_text('{"json": {"type": "object"}}')
    assert read_grammar('{"regex": "[0-9]+"}') == StructuredOutputs(regex="[0-9]+")
    assert read_grammar(f"@{file}") == StructuredOutputs(json={"type": "object"})


@pytest.mark.parametrize("text", ["", "yes", "{", "@no-such-file", "@.", "[" * 10**5, "[" + "1," * 200_000 + "1]", "7"])
def test_broken_forms_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"structured.outputs"):
        read_grammar(text)


def test_read_counts_reads_lists() -> None:
    assert read_counts("1,8", "--batch") == (1, 8)
    assert read_counts("1K", "--batch") == (1024,)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "x", "auto", "3G"])
def test_broken_lists_of_counts_are_refused(text: str) -> None:
    with raises_code("cli.bad_counts", ConfigError, option="--batch", value=text):
        read_counts(text, "--batch")


def test_read_range_reads_ends_or_one_number() -> None:
    assert read_range("32-512", "--input-len") == (32, 512)
    assert read_range("64", "--input-len") == (64, 64)


@pytest.mark.parametrize("text", ["", "0-4", "9-3", "1-2-3", "a-b", "-5"])
def test_broken_ranges_are_refused(text: str) -> None:
    with raises_code("cli.bad_range", ConfigError, option="--input-len", value=text):
        read_range(text, "--input-len")
