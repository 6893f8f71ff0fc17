"""Defaults of sampling, room in the context, text for terminals, and speed."""

import io
import sys

import pytest

from engine.fakes import assert_at_rest, make_engine, solo
from holdfast.cli.answers import for_terminal, prepare, sampling_params, speed_of, stream, write_answer
from holdfast.engine.llm import LLM
from holdfast.errors import HoldfastError, RequestError
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.request.outputs import CompletionOutput, RequestMetrics, RequestOutput
from holdfast.request.sampling_params import SamplingParams

SILENT = GenerationDefaults()
ADVICE = GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20)


@pytest.mark.parametrize(
    ("given", "advice", "temperature"),
    [
        ({}, SILENT, 0.0),
        ({}, ADVICE, 0.6),
        ({"temperature": 0.0}, ADVICE, 0.0),
        ({"top_p": 0.9}, SILENT, 1.0),
        ({"top_k": 5}, SILENT, 1.0),
        ({"min_p": 0.1}, SILENT, 1.0),
        ({"n": 2}, SILENT, 1.0),
        ({"n": 2}, ADVICE, 0.6),
        ({"top_p": 0.9, "temperature": 0.3}, SILENT, 0.3),
        ({"max_tokens": 5}, SILENT, 0.0),
    ],
)
def test_what_was_asked_goes_before_advice_and_advice_before_greedy(given, advice, temperature) -> None:
    params = sampling_params(given, advice)
    assert params.temperature == temperature
    assert all(getattr(params, name) == value for name, value in given.items())


@pytest.mark.parametrize(
    ("params", "max_tokens"),
    [
        (SamplingParams(), 50),
        (SamplingParams(max_tokens=7), 7),
        (SamplingParams(max_tokens=100), 100),
        (SamplingParams(min_tokens=60), 60),
    ],
    ids=["default", "less", "more", "at least"],
)
def test_an_answer_has_a_bound_unless_one_is_asked(params: SamplingParams, max_tokens: int) -> None:
    prepared = prepare(make_engine(max_model_len=128), "Hello", params, 50)
    assert (prepared.max_tokens, prepared.params.max_tokens) == (max_tokens, max_tokens)


def test_the_bound_stays_inside_the_context() -> None:
    assert prepare(make_engine(max_model_len=16), "Hello", SamplingParams(), 50).max_tokens == 11
    with pytest.raises(RequestError, match="max_tokens=50"):
        prepare(make_engine(max_model_len=16), "Hello", SamplingParams(max_tokens=50), 50)


def test_messages_go_through_the_template() -> None:
    prepared = prepare(make_engine(), [{"role": "user", "content": "Hi"}], SamplingParams(), 50)
    assert prepared.prompt == "user: Hi\nassistant: "


def test_a_stream_that_is_closed_ends_its_request() -> None:
    engine = make_engine()
    deltas = stream(LLM.from_engine(engine), prepare(engine, "Hello", SamplingParams(temperature=0.0), 20))
    first = next(deltas)
    assert solo("Hello", SamplingParams(temperature=0.0, max_tokens=20))[1].startswith(first.text)
    deltas.close()
    assert_at_rest(engine)


def test_an_answer_that_fails_raises() -> None:
    engine = make_engine()
    engine.runner.script["Hello"] = [ord("a"), -1]  # type: ignore[attr-defined]
    with pytest.raises(HoldfastError, match="not finite"):
        list(stream(LLM.from_engine(engine), prepare(engine, "Hello", SamplingParams(), 20)))


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert for_terminal("a\x1b[31m\nb\tc\x07\x9b\x7f") == "a␛[31m\nb\tc␇\ufffd␡"

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stdout, shown in ((Terminal(), "␛é"), (io.StringIO(), "\x1bé")):
        monkeypatch.setattr(sys, "stdout", stdout)
        write_answer("\x1bé")
        assert stdout.getvalue() == shown


def output(num_prompt: int, num_output: int, metrics: RequestMetrics | None) -> RequestOutput:
    completions = [CompletionOutput(0, token_ids=[1] * num_output)]
    return RequestOutput("0", None, [1] * num_prompt, completions, True, metrics=metrics)


def test_speed_is_tokens_by_the_seconds_they_took() -> None:
    speed = speed_of(output(100, 11, RequestMetrics(0.5, 2.5, 7.5, 20, 0)))
    assert (speed.prefill_rate, speed.decode_rate) == (40.0, 2.0)
    assert speed.line == (
        "prompt 100 tokens (20 cached), generated 11 tokens, first token 2.500 s, "
        "prefill 40.0 tokens/s, decode 2.0 tokens/s"
    )


@pytest.mark.parametrize(
    ("num_output", "metrics"),
    [(0, None), (1, RequestMetrics(0.0, 0.0, 0.0, 0, 0)), (1, RequestMetrics(0.0, 1.0, 1.0, 3, 0))],
)
def test_what_was_not_measured_is_not_told(num_output: int, metrics: RequestMetrics | None) -> None:
    speed = speed_of(output(3, num_output, metrics))
    assert speed.decode_rate is None
    assert "decode" not in speed.line
