"""SamplingParams: every field bounded, errors in one line, values normalised once."""

import dataclasses
import inspect
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import KeywordError, RequestError
from holdfast.request.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

WRONG = [
    ("n", 0),
    ("n", MAX_N + 1),
    ("n", 10**400),
    ("n", True),
    ("n", 1.0),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", 101),
    ("top_k", -2),
    ("top_k", 0.5),
    ("top_p", 0.0),
    ("top_p", 1.0001),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("frequency_penalty", math.inf),
    ("seed", -2),
    ("seed", 2**64),
    ("seed", True),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 10.5),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("prompt_logprobs", 10**9),
    ("ignore_eos", 1),
    ("skip_special_tokens", "no"),
    ("include_stop_str_in_output", None),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", 7),
    ("stop", {"a"}),
    ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
    ("stop", "x" * (MAX_STOP_STRING_CHARS + 1)),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", "55"),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", list(range(MAX_STOP_TOKEN_IDS + 1))),
    ("bad_words", [""]),
    ("bad_words", 7),
    ("bad_words", ["x"] * 300),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", "5"),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("detokenize", None),
    ("skip_reading_prefix_cache", 1),
    ("logit_bias", [1, 2]),
    ("logit_bias", {"1": 0.5}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: True}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)),
]


HUGE = [10**5000, -(10**5000), "x" * 10**6, [10**5000]]
HUGE_NAMES = ("n", "seed", "logprobs", "temperature", "stop_token_ids")


@for_each("name, value", [*WRONG, *((name, value) for name in HUGE_NAMES for value in HUGE)])
def test_wrong_value_raises_one_short_line(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    error = caught.value
    assert error.code.partition(".")[0] in ("value", "request")
    assert str(error.values["name"]).partition("[")[0] == name
    assert name in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 300, "a hostile value must not flood the log"


def test_messages_of_wrong_values_are_plain() -> None:
    for options, text in (
        ({"ignore_eos": 1}, "ignore_eos must be a bool, got 1."),
        ({"n": 0}, "n must be between 1 and 128, got 0."),
        ({"n": True}, "n must be an integer, got True."),
        ({"temperature": "hot"}, "temperature must be a finite number from 0 to 100, got 'hot'."),
        ({"stop": [""]}, "stop must be a string or a list of non-empty strings, got ['']."),
    ):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**options)  # type: ignore[arg-type]
        assert str(caught.value) == text


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with raises_code("request.min_above_max", RequestError, minimum=6, maximum=5):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_values_are_normalised_once() -> None:
    params = SamplingParams(stop="\n", stop_token_ids=[7, 7, 3], top_k=-1, temperature=1, logit_bias={5: 1})  # type: ignore[arg-type]
    assert params.stop == ("\n",)
    assert params.stop_token_ids == (7, 3)
    assert params.top_k == 0
    assert isinstance(params.temperature, float)
    assert params.logit_bias == {5: 1.0}
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]


def test_bias_changed_by_the_caller_has_no_effect() -> None:
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[5] = math.nan
    assert params.logit_bias == {5: 1.0}


def test_field_set_later_is_checked() -> None:
    params = SamplingParams(max_tokens=4)
    params.max_tokens = 9
    params.stop = "end"  # type: ignore[assignment]
    assert params == SamplingParams(max_tokens=9, stop=("end",))
    for name, value in (("max_tokens", 0), ("temperature", "hot"), ("min_tokens", 10)):
        with pytest.raises(RequestError) as caught:
            setattr(params, name, value)
        assert caught.value.values["name"] == name
    with raises_code("value.unknown_option", KeywordError, name="tempreture", hint="Did you mean temperature?"):
        params.tempreture = 0.5  # type: ignore[attr-defined]
    assert params == SamplingParams(max_tokens=9, stop=("end",)), "a refused value leaves no trace"
    own = params.clone()
    own.max_tokens = 2
    assert (own.max_tokens, params.max_tokens) == (2, 9)


def test_unknown_name_is_a_type_error_with_the_nearest() -> None:
    with raises_code("value.unknown_option", TypeError, name="max_token") as caught:
        SamplingParams(max_token=5)  # type: ignore[call-arg]
    assert isinstance(caught.value, KeywordError)
    assert str(caught.value) == "There is no option max_token=5. Did you mean max_tokens?"
    with raises_code("request.positional_field", KeywordError):
        SamplingParams(0.7)  # type: ignore[misc]


def test_names_of_vllm_without_effect_are_accepted() -> None:
    for options in (
        {"best_of": 1, "use_beam_search": False, "spaces_between_special_tokens": False, "stream_interval": 4},
        {"guided_decoding": None, "structured_outputs": None, "extra_args": {}, "logits_processors": None},
    ):
        assert SamplingParams(**options) == SamplingParams()  # type: ignore[arg-type]


def test_names_of_vllm_without_support_are_refused() -> None:
    for name, value in (("best_of", 4), ("use_beam_search", True), ("logits_processors", []), ("extra_args", {1: 2})):
        with raises_code("value.unsupported_option", KeywordError, name=name):
            SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_optional_fields_take_their_defaults() -> None:
    options = {"n": None, "temperature": None, "top_p": None, "stop": None, "max_tokens": None, "bad_words": None}
    assert SamplingParams.from_optional(**options) == SamplingParams()
    assert SamplingParams.from_optional(logit_bias={"5": 500, 6: -1}).logit_bias == {5: 100.0, 6: -1.0}
    with raises_code("request.not_mapping", RequestError):
        SamplingParams.from_optional(logit_bias={"five": 1.0})


def test_signature_shows_every_field() -> None:
    assert set(inspect.signature(SamplingParams).parameters) == {
        field.name for field in dataclasses.fields(SamplingParams)
    }


def test_greedy_and_penalties_differ() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams().has_penalties
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).has_penalties  # type: ignore[arg-type]


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = (
    scalars | st.lists(scalars, max_size=4) | st.dictionaries(st.integers() | st.text(max_size=2), scalars, max_size=3)
)


@given(
    st.dictionaries(st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)]), values, max_size=6)
)
def test_sampling_params_any_options_are_valid_or_refused(options: dict[str, object]) -> None:
    try:
        params = SamplingParams(**options)  # type: ignore[arg-type]
    except RequestError:
        return
    assert 1 <= params.n <= MAX_N
    assert 0 <= params.temperature <= 100
    assert 0 < params.top_p <= 1
    assert params.max_tokens is None or params.max_tokens >= 1
    assert all(isinstance(text, str) and text for text in params.stop)
    assert SamplingParams(**dataclasses.asdict(params)) == params


BOUNDS: dict[str, tuple[object, object, object, object]] = {
    "n": (0, 1, 128, 129),
    "temperature": (-1e-9, 0.0, 100.0, 100.001),
    "top_k": (-2, -1, 2**31 - 1, 2**31),
    "top_p": (0.0, 1e-9, 1.0, 1.001),
    "min_p": (-1e-9, 0.0, 1.0, 1.001),
    "repetition_penalty": (0.0, 1e-9, 100.0, 100.001),
    "presence_penalty": (-2.001, -2.0, 2.0, 2.001),
    "frequency_penalty": (-2.001, -2.0, 2.0, 2.001),
    "seed": (-2, -1, 2**64 - 1, 2**64),
    "max_tokens": (0, 1, 2**31 - 1, 2**31),
    "min_tokens": (-1, 0, 2**31 - 1, 2**31),
    "logprobs": (-1, 0, 20, 21),
    "prompt_logprobs": (-1, 0, 20, 21),
    "truncate_prompt_tokens": (-2, -1, 2**31 - 1, 2**31),
    "priority": (-(2**31), -(2**31) + 1, 2**31 - 1, 2**31),
    "stop": ([""], ["x"], ["x" * 1024] * 16, ["x"] * 17),
    "bad_words": ([""], ["x"], ["x" * 1024] * 256, ["x" * 1025]),
    "stop_token_ids": ([-1], [0], [*range(255), 2**31 - 1], range(257)),
    "allowed_token_ids": ([-1], [0], [2**31 - 1], [2**31]),
    "logit_bias": ({-1: 0.0}, {0: -100}, dict.fromkeys(range(1024), 100), dict.fromkeys(range(1025), 0.0)),
}


@for_each("name", BOUNDS)
def test_bounds_of_a_field_are_exact(name: str) -> None:
    below, lowest, highest, above = BOUNDS[name]
    for value in (lowest, highest):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    for value in (below, above):
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
