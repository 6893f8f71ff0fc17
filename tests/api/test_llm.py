"""LLM: generate, chat and stream; options shared with AsyncLLM; what the makers advise; progress on a terminal."""

import inspect
import io
import signal
import subprocess
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Unpack, get_type_hints

import pytest

from engine.fakes import answer_of, assert_at_rest, make_engine, solo, text_of, tokens_of
from error_codes import raises_code
from holdfast.api.async_llm import AsyncLLM
from holdfast.api.llm import LLM
from holdfast.api.options import EngineOptions, chat_values, sampling_params_from
from holdfast.api.progress import GenerationBar, LoadingBar, PreparingBar, is_watched
from holdfast.config import ALIASES, EngineConfig
from holdfast.engine.driver import Driver
from holdfast.errors import ConfigError, EngineDeadError, ModelFormatError, PromptError, RequestError
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.memory.report import MemoryReport
from holdfast.observability.preparing import Preparing
from holdfast.request.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
MESSAGES = [{"role": "user", "content": "Hi"}]


def make_llm(**options) -> LLM:
    return LLM.from_engine(make_engine(**options))


def test_generate_one_prompt_returns_a_list_of_one():
    (output,) = make_llm().generate("Hello", PARAMS)
    assert answer_of(output) == solo("Hello", PARAMS)
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("Hello", list(b"Hello"), True)
    assert (output.outputs[0].finish_reason, output.error) == ("length", None)
    assert output.metrics.total_seconds > 0


def test_generate_takes_each_form_of_prompt():
    ids = list(b"Hello")
    prompts = ["Hello", {"prompt": "Hello"}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "label"}]
    outputs = make_llm().generate(prompts, PARAMS)
    assert [output.prompt for output in outputs] == ["Hello", "Hello", None, "label"]
    assert {tuple(output.outputs[0].token_ids) for output in outputs} == {tuple(solo("Hello", PARAMS)[0])}
    assert make_llm().generate({"prompt_token_ids": ids}, PARAMS)[0].outputs[0].text == solo("Hello", PARAMS)[1]


def test_generate_without_prompts_is_empty():
    assert make_llm().generate([], PARAMS) == []


@pytest.mark.parametrize("max_queue", [3, 5, 400])
def test_generate_more_prompts_than_the_queue_keeps_order(max_queue):
    llm = make_llm(max_queue=max_queue, max_num_seqs=2)
    prompts = [f"number {number}" for number in range(30)]
    params = [SamplingParams(temperature=0.0, max_tokens=number % 5 + 1, n=number % 3 + 1) for number in range(30)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [answer_of(output) for output in outputs] == [solo(*pair) for pair in zip(prompts, params, strict=True)]
    assert [len(output.outputs) for output in outputs] == [one.n for one in params]
    assert_at_rest(llm.engine)


@pytest.mark.parametrize("progress", [True, False])
def test_generate_progress_shows_a_bar_on_a_terminal(monkeypatch, progress):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    make_llm().generate(["one", "two"], PARAMS, progress=progress)
    assert ("2/2" in terminal.getvalue()) is progress
    assert ("est. speed input" in terminal.getvalue()) is progress


def test_generate_without_max_tokens_fills_the_context():
    (output,) = make_llm(max_model_len=20).generate("Hello")
    assert len(output.outputs[0].token_ids) == 15


def test_generate_takes_sampling_params_and_use_tqdm():
    llm = make_llm()
    assert (
        llm.generate("Hello", sampling_params=PARAMS, use_tqdm=False)[0].outputs
        == llm.generate("Hello", PARAMS)[0].outputs
    )
    with raises_code("api.params_twice", RequestError):
        llm.generate("Hello", PARAMS, sampling_params=PARAMS)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "code", "values", "contexts"),
    [
        pytest.param(["ok", ""], PARAMS, PromptError, "request.prompt_empty", {}, ("prompt 1",), id="an empty one"),
        pytest.param(
            ["ok", "ok", {"prompt_token_ids": [999]}],
            PARAMS,
            PromptError,
            "request.token_outside_vocabulary",
            {"value": 999},
            ("prompt 2",),
            id="an unknown id",
        ),
        pytest.param(
            ["ok", "ok"],
            [PARAMS, SamplingParams(stop_token_ids=[9999])],
            RequestError,
            "request.token_outside_vocabulary",
            {"name": "stop_token_ids", "value": 9999},
            ("prompt 1",),
            id="a stop token that is none",
        ),
        pytest.param(
            ["ok", "ok"],
            [PARAMS],
            RequestError,
            "api.params_count",
            {"num_params": 1, "num_prompts": 2},
            (),
            id="too few params",
        ),
        pytest.param(
            ["ok"],
            [PARAMS] * 2,
            RequestError,
            "api.params_count",
            {"num_params": 2, "num_prompts": 1},
            (),
            id="too many params",
        ),
        pytest.param(
            ["ok", "ok"],
            [PARAMS, None],
            RequestError,
            "request.params_type",
            {"kind": "NoneType"},
            ("prompt 1",),
            id="no params",
        ),
        pytest.param(
            [1, 2, "3"], PARAMS, PromptError, "request.prompt_type", {"kind": "int"}, ("prompt 0",), id="ids and text"
        ),
        pytest.param(iter(["ok"]), PARAMS, PromptError, "api.not_prompts", {}, (), id="an iterator"),
        pytest.param(None, PARAMS, PromptError, "api.prompts_or_ids", {}, (), id="None"),
        pytest.param("", PARAMS, PromptError, "request.prompt_empty", {}, (), id="a single empty one"),
        pytest.param("ok", {"max_tokens": 3}, RequestError, "request.params_type", {"kind": "dict"}, (), id="a dict"),
    ],
)
def test_generate_wrong_argument_raises_before_anything_runs(prompts, params, error, code, values, contexts):
    llm = make_llm()
    with raises_code(code, error, **values) as caught:
        llm.generate(prompts, params)
    assert caught.value.contexts == contexts
    assert llm.engine.runner.steps == []
    assert llm.engine.stats().num_requests == 0
    assert_at_rest(llm.engine)


def test_chat_renders_the_template_and_answers():
    llm = make_llm()
    (output,) = llm.chat(MESSAGES, PARAMS)
    assert output.prompt == "user: Hi\nassistant: "
    assert answer_of(output) == solo(output.prompt, PARAMS)
    (bare,) = llm.chat(MESSAGES, PARAMS, chat_template_kwargs={"add_generation_prompt": False})
    assert bare.prompt == "user: Hi\n"
    other = [*MESSAGES, {"role": "assistant", "content": "Yes?"}]
    outputs = llm.chat([MESSAGES, other], [PARAMS, SamplingParams(max_tokens=2)])
    assert [output.prompt for output in outputs] == ["user: Hi\nassistant: ", "user: Hi\nassistant: Yes?\nassistant: "]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 2]


@pytest.mark.parametrize(
    "messages", [[], "Hi", None, [[]], [MESSAGES, []], [MESSAGES, "Hi"], {"role": "user"}], ids=repr
)
def test_chat_invalid_messages_are_refused(messages):
    llm = make_llm()
    with pytest.raises(PromptError):
        llm.chat(messages, PARAMS)
    assert llm.engine.runner.steps == []


def test_stream_deltas_add_up_to_the_answer():
    llm = make_llm()
    deltas = list(llm.stream("Hello", PARAMS))
    assert (tokens_of(deltas), text_of(deltas)) == solo("Hello", PARAMS)
    assert len(deltas) == 8
    assert deltas[-1].finish_reason == "length"
    chat = list(llm.stream_chat(MESSAGES, PARAMS, chat_template_kwargs={"add_generation_prompt": False}))
    assert (tokens_of(chat), text_of(chat)) == solo("user: Hi\n", PARAMS)
    assert_at_rest(llm.engine)


def test_stream_several_completions_match_generate():
    params = SamplingParams(n=3, seed=5, max_tokens=4)
    llm = make_llm()
    deltas = list(llm.stream("Hello", params))
    (output,) = llm.generate("Hello", params)
    for index in range(3):
        own = [delta for delta in deltas if delta.index == index]
        assert (tokens_of(own), text_of(own)) == answer_of(output, index)


def test_stream_invalid_request_raises_at_once():
    llm = make_llm()
    with pytest.raises(PromptError):
        llm.stream("", PARAMS)
    with pytest.raises(RequestError):
        llm.stream("ok", SamplingParams(stop_token_ids=[9999]))


@pytest.mark.parametrize("num_read", range(9))
def test_stream_closed_early_aborts_its_request(num_read):
    llm = make_llm()
    stream = llm.stream("Hello", PARAMS)
    for _ in range(num_read):
        next(stream)
    stream.close()
    assert_at_rest(llm.engine)
    for number, _ in enumerate(llm.stream("Hello", PARAMS)):
        if number == num_read:
            break
    assert_at_rest(llm.engine)


def test_stream_never_started_adds_no_request():
    llm = make_llm()
    stream = llm.stream("Hello", PARAMS)
    assert llm.engine.stats().num_requests == 0
    del stream
    assert_at_rest(llm.engine)


def test_stream_and_generate_may_alternate():
    llm = make_llm()
    one, two = llm.stream("one", PARAMS), llm.stream("two", PARAMS)
    heard = [[next(one)], [next(two)], [next(one)]]
    (output,) = llm.generate("three", PARAMS)
    assert answer_of(output) == solo("three", PARAMS)
    assert (tokens_of(heard[0] + heard[2] + [*one]), tokens_of(heard[1] + [*two])) == (
        solo("one", PARAMS)[0],
        solo("two", PARAMS)[0],
    )
    assert_at_rest(llm.engine)


def test_stream_waits_for_room_in_the_queue():
    llm = make_llm(max_queue=1, max_num_seqs=1)
    one, two, three = (llm.stream(prompt, PARAMS) for prompt in ("one", "two", "three"))
    first = [next(one)]
    second = [next(two)]
    assert text_of([*three]) == solo("three", PARAMS)[1]
    assert text_of([*first, *one]) == solo("one", PARAMS)[1]
    assert text_of([*second, *two]) == solo("two", PARAMS)[1]


@pytest.mark.parametrize("k", [0, 1, 7, 20])
def test_generate_ctrl_c_aborts_only_its_own_requests(k):
    llm = make_llm(max_queue=4, max_num_seqs=2)
    stream = llm.stream("stream", PARAMS)
    heard = [next(stream)]
    calls = iter(range(1000))
    llm.engine.runner.on_step = lambda step: signal.raise_signal(signal.SIGINT) if next(calls) == k else None
    with pytest.raises(KeyboardInterrupt):
        llm.generate([f"number {number}" for number in range(20)], PARAMS)
    assert llm.engine.stats().num_unfinished_requests <= 1, "the stream is not of that call"
    heard += stream
    assert (tokens_of(heard), text_of(heard)) == solo("stream", PARAMS)
    assert_at_rest(llm.engine)
    assert answer_of(llm.generate("after", PARAMS)[0]) == solo("after", PARAMS)


def test_generate_failed_request_is_an_output_with_error():
    llm = make_llm()
    token_text = llm.tokenizer.token_text
    try:
        llm.tokenizer.token_text = lambda token: 1 / 0
        good, bad = llm.generate(["good", "bad"], [PARAMS, SamplingParams(max_tokens=4, logprobs=1)])
    finally:
        llm.tokenizer.token_text = token_text
    assert answer_of(good) == solo("good", PARAMS)
    assert (bad.finished, bad.outputs[0].finish_reason) == (True, "error")
    assert "ZeroDivisionError" in bad.error


def test_llm_dead_engine_raises_in_each_call():
    llm = make_llm()
    stream = llm.stream("stream", PARAMS)
    next(stream)

    def fail(step):
        raise OSError("device lost")

    llm.engine.runner.on_step = fail
    with pytest.raises(EngineDeadError, match="device lost"):
        llm.generate(["a", "b"], PARAMS)
    for call in (lambda: llm.generate("c", PARAMS), lambda: next(stream), lambda: next(llm.stream("d", PARAMS))):
        with pytest.raises(EngineDeadError, match="device lost"):
            call()
    llm.shutdown()


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_llm_engine_death_in_another_thread_raises(how, monkeypatch):
    llm = make_llm()
    engine, pump = llm.engine, Driver.pump

    def fail(step):
        raise OSError("device lost")

    engine.runner.on_step = fail

    def pump_elsewhere(driver):
        """The turn of another thread: deltas arrive here, and the exception goes to a caller else."""
        with suppress(EngineDeadError):
            pump(driver)

    monkeypatch.setattr(Driver, "pump", pump_elsewhere)
    with pytest.raises(EngineDeadError, match="device lost"):
        llm.generate(["a", "b"], PARAMS) if how == "generate" else next(llm.stream("a", PARAMS))


def test_llm_shutdown_aborts_and_frees_the_engine():
    llm = make_llm()
    engine = llm.engine
    stream = llm.stream("stream", PARAMS)
    next(stream)
    with llm:
        pass
    assert_at_rest(engine)
    assert [delta.finish_reason for delta in stream] == ["abort"]
    llm.shutdown()
    for call in (lambda: llm.generate("x"), lambda: llm.tokenizer, lambda: llm.memory, llm.stats):
        with pytest.raises(EngineDeadError, match="was shut down"):
            call()


def test_llm_exposes_tokenizer_memory_and_stats():
    account = MemoryReport((), 0, "none", 1, 1, 1)
    llm = make_llm(generation=GenerationDefaults(temperature=0.6, top_k=20), memory=account)
    assert llm.memory is account
    assert llm.default_sampling_params() == SamplingParams(temperature=0.6, top_k=20)
    llm.generate("Hello, hello, hello", PARAMS)
    assert llm.stats().num_output_tokens == 8
    assert llm.tokenizer.decode(llm.generate("Hello", PARAMS)[0].outputs[0].token_ids) == solo("Hello", PARAMS)[1]
    llm.reset_prefix_cache()
    assert llm.generate("Hello, hello, hello", PARAMS)[0].num_cached_tokens == 0


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_llm_signature_is_model_and_engine_options(kind):
    parameters = inspect.signature(kind).parameters
    assert list(parameters) == ["model", "on_progress", "options"]
    assert (parameters["model"].kind, parameters["model"].default) == (inspect.Parameter.POSITIONAL_OR_KEYWORD, None)
    assert get_type_hints(kind.__init__)["options"] == Unpack[EngineOptions]


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"max_model_length": 5}, "config.unknown_option", "Did you mean max_model_len?"),
        ({"memory_utilization": 0.5, "gpu_memory_utilization": 0.6}, "config.same_option", "memory_utilization"),
        ({"seed": False}, "value.not_integer", "seed"),
    ],
)
def test_llm_wrong_options_are_refused_before_opening(kind, options, code, words, built):
    with raises_code(code, ConfigError) as caught:
        kind("some/model", **options)
    assert words in str(caught.value)
    assert built == []


@pytest.fixture
def built(monkeypatch):
    """Configs and progress callbacks that engines were built with."""
    calls = []

    def build_engine(config, on_progress, model, on_prepare):
        calls.append((config, on_progress))
        on_progress(1, 2)
        return make_engine()

    module = types.ModuleType("holdfast.engine.build")
    module.build_engine = build_engine
    monkeypatch.setitem(sys.modules, "holdfast.engine.build", module)
    monkeypatch.setattr("holdfast.api.opened.open_headers", lambda config: None)
    return calls


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_llm_options_reach_the_builder(kind, built):
    seen = []
    llm = kind(
        "some/model", max_model_len=64, gpu_memory_utilization=0.5, on_progress=lambda *counts: seen.append(counts)
    )
    expected = EngineConfig(model="some/model", max_model_len=64, memory_utilization=0.5)
    assert built[0][0] == (expected.paced() if kind is AsyncLLM else expected)
    assert seen == [(1, 2)]
    llm.shutdown()
    kind().shutdown()
    assert built[1][0] == (EngineConfig().paced() if kind is AsyncLLM else EngineConfig())
    with raises_code("config.unknown_option", ConfigError, name="max_num_seq"):
        kind(max_num_seq=4)
    with pytest.raises(ConfigError, match="dtype"):
        kind(dtype="float12")
    assert len(built) == 2


def test_llm_module_imports_no_torch():
    code = "import sys, holdfast.api.llm, holdfast.api.async_llm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_engine_options_are_config_fields_and_aliases():
    fields = get_type_hints(EngineConfig)
    others = {alias: fields[name] for alias, name in ALIASES.items()}
    others["speculative_config"] = Mapping[str, object] | None  # vLLM gives a dict where ours is a word
    assert get_type_hints(EngineOptions) == {name: kind for name, kind in fields.items() if name != "model"} | others


def test_sampling_params_from_generation_defaults():
    advice = GenerationDefaults(eos_token_ids=(1,), temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    assert sampling_params_from(advice) == expected
    assert sampling_params_from(GenerationDefaults()) == SamplingParams()
    assert sampling_params_from(GenerationDefaults(temperature=0.0)).is_greedy


def test_sampling_params_from_bad_defaults_is_a_model_error():
    with pytest.raises(ModelFormatError, match="temperature"):
        sampling_params_from(GenerationDefaults(temperature=float("nan")))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch(monkeypatch) -> Terminal:
    """Called in the test itself, since pytest puts its own stderr back before each test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return stream


def test_generation_bar_shows_prompts_and_speed(monkeypatch):
    terminal = watch(monkeypatch)
    with GenerationBar(3, wanted=True) as bar:
        for number in range(4):
            bar.count(number, number * 100, number * 10)
    shown = terminal.getvalue()
    assert "Processed prompts" in shown
    assert "3/3" in shown
    assert "est. speed input: " in shown
    assert "output: " in shown


def test_loading_bar_shows_bytes(monkeypatch):
    terminal = watch(monkeypatch)
    with LoadingBar() as bar:
        bar(0, 2**20)
        bar(2**19, 2**20)
    shown = terminal.getvalue()
    assert "Loading weights" in shown
    assert "left" in shown
    assert "0.5/1.0 MiB" in shown


def test_preparing_bar_shows_what_compiles_and_its_folder(monkeypatch):
    terminal = watch(monkeypatch)
    with LoadingBar() as loading, PreparingBar() as bar:
        assert terminal.getvalue() == "", "nothing was compiled yet"
        bar(Preparing("Compiling CPU kernels", 1, 4, "kept in [a folder]"))
        loading(2**20, 2**20)
        bar(Preparing("Capturing CUDA graphs", 3, 3))
    shown = terminal.getvalue()
    for words in ("Compiling CPU kernels", "1/4", "kept in [a folder]", "1.0/1.0 MiB", "Capturing CUDA graphs", "3/3"):
        assert words in shown


def test_generation_bar_unwanted_writes_nothing(monkeypatch):
    terminal = watch(monkeypatch)
    with GenerationBar(3, wanted=False) as bar:
        bar.count(3, 1, 1)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), None], ids=["a pipe", "no stderr"])
def test_bars_write_nothing_without_a_terminal(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    assert not is_watched()
    with GenerationBar(3, wanted=True) as bar, LoadingBar() as loading, PreparingBar() as preparing:
        loading(1, 2)
        preparing(Preparing("Compiling CPU kernels", 1, 4))
        bar.count(3, 1, 1)
    assert stream is None or stream.getvalue() == ""


def test_chat_keywords_win_over_template_kwargs() -> None:
    reported = {"add_generation_prompt": True, "thinking": True}
    values, options = chat_values({"add_generation_prompt": False, "chat_template_kwargs": reported, "tools": None})
    assert values == {"add_generation_prompt": False, "thinking": True}
    assert (options.chat_template, options.allow_special_tokens) == (None, False)
