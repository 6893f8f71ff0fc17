"""Structured outputs through whole engines: answers of random schemas, however steps are run, beside others, and failures."""

import asyncio
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from api.random_schemas import make_schema
from api.schedules import Planned, run_schedule
from api.test_schedules import FromBytes
from cli.cli_models import write_tokenizer
from error_codes import raises_code
from holdfast import StructuredOutputs
from holdfast.api.async_llm import AsyncLLM
from holdfast.api.llm import LLM
from holdfast.engine.core import EngineCore
from holdfast.engine.engine import Engine
from holdfast.errors import QueueFullError, RequestError
from holdfast.request.outputs import RequestOutput
from holdfast.request.sampling_params import SamplingParams
from holdfast.text import grammar
from loading.tiny_models import VOCAB, save_tiny

pytest.importorskip("llguidance")
SHAPE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "page_tokens": 4, "seed": 7}
QUICK, ALL, AT_ONCE = 10, 200, 8
YES = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder, max_position_embeddings=1024)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder) -> Iterator[LLM]:
    llm = LLM(str(folder), max_model_len=1000, max_num_seqs=AT_ONCE, **SHAPE)
    yield llm
    llm.shutdown()


def ask(llm: LLM, prompt: str = "Hello", **params) -> RequestOutput:
    (output,) = llm.generate(prompt, SamplingParams(**{"max_tokens": 200, **params}), use_tqdm=False)
    return output


def is_valid(text: str, schema: object) -> bool:
    checker = jsonschema.FormatChecker(("date", "uuid", "ipv4"))  # of a time it wants no zone, which RFC 3339 does
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(text))


def check_schemas(llm: LLM, numbers: range, **params) -> int:
    """All at once, of a random model; every answer that came to its end holds. How many did."""
    schemas = [make_schema(number) for number in numbers]
    requested = [SamplingParams(structured_outputs={"json": schema}, max_tokens=700, **params) for schema in schemas]
    outputs = llm.generate([f"Object {number}:" for number in numbers], requested, use_tqdm=False)
    num_finished = 0
    for schema, output in zip(schemas, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.finish_reason in ("stop", "length"), f"{schema}: {output.error}"
        if completion.finish_reason == "stop":
            num_finished += 1
            assert is_valid(completion.text, schema), f"{completion.text!r} is not of {json.dumps(schema)}"
    return num_finished


def test_structured_outputs_of_random_schemas_are_valid(llm):
    assert check_schemas(llm, range(QUICK), temperature=1.0, seed=3) >= QUICK - 1


@pytest.mark.slow
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}])
def test_structured_outputs_of_many_random_schemas_are_valid(llm, params):
    assert check_schemas(llm, range(ALL), **params) >= ALL - 10


@pytest.mark.slow
def test_structured_outputs_of_the_default_model_are_valid():
    llm = LLM(max_model_len=768, max_num_seqs=AT_ONCE, device="cpu")
    schemas = [make_schema(number) for number in range(12)]
    params = [SamplingParams(structured_outputs={"json": one}, max_tokens=240, temperature=0.7) for one in schemas]
    chats = [[{"role": "user", "content": f"Fill in: {json.dumps(one)}"}] for one in schemas]
    outputs = [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]
    llm.shutdown()
    finished = [(one.text, schema) for one, schema in zip(outputs, schemas, strict=True) if one.finish_reason == "stop"]
    assert all(is_valid(text, schema) for text, schema in finished)
    assert len(finished) >= 8


def test_structured_outputs_each_form_holds_the_answer(llm):
    assert ask(llm, structured_outputs={"choice": ["yes", "no"]}).outputs[0].text in ("yes", "no")
    answer = ask(llm, structured_outputs=StructuredOutputs(regex=r"\d{3}-[a-c]{2}"), seed=1).outputs[0]
    assert re.fullmatch(r"[0-9]{3}-[a-c]{2}", answer.text)
    assert answer.finish_reason == "stop"
    assert answer.stop_reason is None
    gbnf = ask(llm, structured_outputs={"grammar": "root ::= [ab] [cd]"}).outputs[0]
    assert re.fullmatch("[ab][cd]", gbnf.text)
    lark = ask(llm, guided_grammar='start: "x" /[0-9]{2}/').outputs[0]
    assert re.fullmatch("x[0-9]{2}", lark.text)
    cut = ask(llm, structured_outputs={"json_object": True}, max_tokens=12).outputs[0]
    assert (cut.text[0], cut.finish_reason) == ("{", "length")


def test_completions_and_seeds(llm):
    params = {"structured_outputs": {"regex": "[a-z]{12}"}, "n": 3, "seed": 5}
    first, again = ask(llm, **params), ask(llm, **params)
    texts = [completion.text for completion in first.outputs]
    assert texts == [completion.text for completion in again.outputs]
    assert len(set(texts)) == 3
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)
    assert ask(llm, **{**params, "n": 1}).outputs[0].text == texts[0]


def test_log_probabilities_and_penalties(llm):
    completion = ask(
        llm, structured_outputs={"regex": "[ab]{6}"}, logprobs=2, repetition_penalty=1.2, temperature=0.0
    ).outputs[0]
    assert re.fullmatch("[ab]{6}", completion.text)
    assert completion.logprobs is not None
    assert all(token in place for token, place in zip(completion.token_ids, completion.logprobs, strict=True))


# However steps are run


def make_requested() -> list[Planned]:
    """Requests with and without forms, which come and go while others run."""
    prompts = [list(range(3 + place, 23 + place)) for place in range(4)]
    forms: list[dict[str, Any] | None] = [
        {"regex": "[a-z]{20}"},
        None,
        {"json": make_schema(4)},
        None,
        {"choice": ["first", "second", "third"]},
        {"json_object": True},
        None,
        {"regex": "(ab|cd){3,9}"},
    ]
    requested = []
    for place, form in enumerate(forms):
        params: dict[str, Any] = {"max_tokens": 24, "temperature": (0.0, 0.9)[place % 2], "n": 1 + place % 2}
        params |= {"logprobs": 1} if place % 3 == 0 else {}
        requested.append(
            Planned(
                f"r{place}",
                place // 2,
                prompts[place % 4],
                SamplingParams(structured_outputs=form, seed=place, **params),
            )
        )
    return requested


def answers_of(engine: Engine, requested: list[Planned]) -> dict[tuple[str, int], tuple[object, ...]]:
    answers = run_schedule(engine, requested)
    return {
        key: (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.error, repr(one.logprobs))
        for key, one in answers.items()
    }


@pytest.fixture(scope="module")
def expected(folder):
    llm = LLM(str(folder), max_model_len=72, max_num_seqs=16, enable_prefix_caching=False, **SHAPE)
    answers = answers_of(llm.engine, make_requested())
    llm.shutdown()
    return answers


FEW_PAGES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory": "44KiB"}


@pytest.mark.parametrize(
    ("run_ahead", "options"),
    [
        pytest.param(0, FEW_PAGES, id="few pages", marks=pytest.mark.slow),
        pytest.param(1, {}, id="ahead", marks=pytest.mark.slow),
        pytest.param(1, FEW_PAGES, id="ahead, few pages"),
        pytest.param(0, {"speculative": "ngram:3", **FEW_PAGES}, id="proposals"),
        pytest.param(None, {"core_process": True, "max_num_seqs": 4}, id="in a child"),
    ],
)
def test_structured_outputs_match_however_steps_are_run(folder, expected, run_ahead, options):
    llm = LLM(str(folder), max_model_len=72, **SHAPE, **options)
    engine = llm.engine
    if run_ahead is not None:
        core = engine.core
        assert isinstance(core, EngineCore)
        remade = EngineCore(
            FromBytes(core.runner),
            core.scheduler,
            run_ahead=run_ahead,
            proposer=core.proposer,
            grammars=core.grammars,
        )
        engine = Engine(remade, engine.tokenizer, engine.chat_template, seed=7, generation=engine.generation)
    assert answers_of(engine, make_requested()) == expected
    engine.settle()
    if run_ahead is not None:
        assert isinstance(engine.core, EngineCore)
        assert engine.core.grammars is not None
        assert len(engine.core.grammars) == 0, "no caller is followed any more"
        engine.scheduler.check()
        assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_pages
        if options is FEW_PAGES:
            assert engine.stats().num_preemptions > 0
    llm.shutdown()


def test_structured_outputs_do_not_change_other_requests(llm, expected, folder):
    plain = [one for one in make_requested() if one.params.structured_outputs is None]
    alone = answers_of(llm.engine, plain)
    names = {one.name for one in plain}
    assert alone == {key: answer for key, answer in expected.items() if key[0] in names}


# Ends


def test_structured_outputs_complete_form_ends_the_answer(llm):
    for params in ({"min_tokens": 50}, {"ignore_eos": True}):
        completion = ask(llm, structured_outputs={"choice": ["yes"]}, **params).outputs[0]
        assert (completion.text, completion.finish_reason) == ("yes", "stop")
    longer = ask(llm, structured_outputs={"regex": "a*"}, min_tokens=9, temperature=0.0).outputs[0]
    assert len(longer.token_ids) >= 9


def test_structured_outputs_stop_string_cuts_the_answer(llm):
    completion = ask(llm, structured_outputs={"choice": ["abcdef"]}, stop=["cd"]).outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", "cd")


def test_structured_outputs_with_no_token_left_end_in_an_error(llm):
    for params in ({"bad_words": ["yes"[2]]}, {"allowed_token_ids": [5, 6]}):
        output = ask(llm, structured_outputs={"choice": ["yes"]}, **params)
        assert output.outputs[0].finish_reason == "error"
        assert "no token could be sampled" in (output.error or "")
        assert "structured_outputs.choice" in (output.error or "")
    assert ask(llm, structured_outputs={"choice": ["yes"]}, logit_bias={5: 100.0}).outputs[0].text == "yes"


def test_structured_outputs_work_without_an_end_token(tmp_path):
    save_tiny("llama", tmp_path, eos_token_id=None)
    write_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), max_model_len=64, **SHAPE)
    assert llm.engine.core.facts.eos_token_ids == ()
    completion = ask(llm, structured_outputs={"choice": ["yes", "no"]}, max_tokens=20, logprobs=0).outputs[0]
    assert completion.text in ("yes", "no")
    assert completion.finish_reason == "stop"
    assert len(completion.logprobs or ()) == len(completion.text)
    plain = ask(llm, max_tokens=20).outputs[0]
    assert plain.finish_reason == "length"
    llm.shutdown()


# What goes wrong


@pytest.mark.parametrize(
    "grammar",
    [{"json": {"type": "integer", "minimum": 3, "maximum": 1}}, {"regex": "(a"}, {"grammar": "nonsense"}],
)
def test_structured_outputs_impossible_grammar_is_refused(llm, grammar):
    before = llm.stats().num_requests
    (kind,) = grammar
    with raises_code("grammar.refused", RequestError, kind=kind):
        ask(llm, structured_outputs=grammar)
    assert llm.stats().num_requests == before
    assert ask(llm, structured_outputs={"choice": ["fine"]}).outputs[0].text == "fine"


def test_structured_outputs_without_tokenizer_are_refused(folder):
    llm = LLM(str(folder), max_model_len=32, tokenizer="none", **SHAPE)
    with raises_code("request.no_tokenizer", RequestError, what="structured_outputs.choice"):
        llm.generate({"prompt_token_ids": [5]}, YES)
    llm.shutdown()


class Gate:
    """Compiling, which waits until it is let through; or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: str | None = None) -> None:
        self.opened, self.error = threading.Event(), error
        self._compile = grammar.compile_grammar
        monkeypatch.setattr(grammar, "compile_grammar", self.compile)

    def compile(self, form, vocabulary):
        if threading.current_thread().name.startswith("holdfast-grammars"):
            assert self.opened.wait(30.0), "no caller opened the gate"
            if self.error is not None:
                raise ValueError(self.error)
        return self._compile(form, vocabulary)


def test_structured_outputs_compiling_does_not_block_others(llm, monkeypatch):
    gate, engine = Gate(monkeypatch), llm.engine
    engine.add_request("held", "Hello", YES)
    engine.add_request("plain", "Hello", SamplingParams(max_tokens=5, ignore_eos=True))
    seen: dict[str, int] = {"held": 0, "plain": 0}
    while engine.stats().num_unfinished_requests > 1:
        for delta in engine.step():
            seen[delta.request_id] += len(delta.token_ids)
    assert seen == {"held": 0, "plain": 5}
    assert engine.stats().num_waiting == 1
    assert [engine.step() for _ in range(2)] == [[], []], "a step with no caller to run waits a moment"
    gate.opened.set()
    text = ""
    while engine.has_unfinished():
        text += "".join(delta.text for delta in engine.step())
    assert text in ("yes", "no")


def test_structured_outputs_compile_error_fails_one_request(llm, monkeypatch):
    gate, engine = Gate(monkeypatch, error="it is too large"), llm.engine
    engine.add_request("bad", "Hello", YES)
    engine.add_request("plain", "Hello", SamplingParams(max_tokens=5, ignore_eos=True))
    gate.opened.set()
    last = {}
    while engine.has_unfinished():
        last |= {delta.request_id: delta for delta in engine.step()}
    assert (last["bad"].finish_reason, last["plain"].finish_reason) == ("error", "length")
    assert last["bad"].error == "structured_outputs.choice could not be followed: it is too large"
    assert engine.core.grammars is not None and len(engine.core.grammars) == 0  # type: ignore[attr-defined]  # noqa: PT018


def test_structured_outputs_abort_while_compiling_frees_all(llm, monkeypatch):
    gate, engine = Gate(monkeypatch), llm.engine
    engine.add_request("gone", "Hello", YES)
    assert engine.step() == []
    (delta,) = engine.abort("gone")
    assert delta.finish_reason == "abort"
    assert not engine.has_unfinished()
    gate.opened.set()
    assert ask(llm, structured_outputs={"choice": ["fine"]}).outputs[0].text == "fine"
    assert len(engine.core.grammars) == 0  # type: ignore[attr-defined]


def test_structured_outputs_compiling_count_in_the_queue(folder, monkeypatch):
    gate = Gate(monkeypatch)
    llm = LLM(str(folder), max_model_len=64, max_queue=3, **SHAPE)
    for number in range(3):
        llm.engine.add_request(str(number), "Hello", YES)
    with pytest.raises(QueueFullError):
        llm.engine.add_request("more", "Hello", YES)
    assert llm.engine.stats().num_waiting == 3
    gate.opened.set()
    texts: dict[str, str] = {}
    while llm.engine.has_unfinished():
        for delta in llm.engine.step():
            texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
    assert set(texts.values()) <= {"yes", "no"}
    assert len(texts) == 3
    llm.shutdown()


def test_structured_outputs_matcher_error_fails_one_request(llm, monkeypatch):
    """Bounds of a step are reached in the middle of an answer: this request ends, others and cached prefixes do not."""
    failing = grammar.Grammars._advanced

    def fail_later(self, sequence):
        one = failing(self, sequence)
        if one is not None and one.num_consumed == 4 and sequence.params.min_tokens == 7:
            one.failure = "lexer error: too many states"
        return one

    monkeypatch.setattr(grammar.Grammars, "_advanced", fail_later)
    forgotten = []
    monkeypatch.setattr(llm.engine.scheduler, "reset_prefix_cache", lambda: forgotten.append(1))
    params = SamplingParams(structured_outputs={"regex": "[a-z]{9}"}, max_tokens=50)
    bad, fine = llm.generate(
        ["Hello"] * 2, [SamplingParams(structured_outputs={"regex": "[a-z]{9}"}, min_tokens=7), params]
    )
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error == "after 4 tokens structured_outputs.regex could not be followed: lexer error: too many states"
    assert re.fullmatch("[a-z]{9}", fine.outputs[0].text)
    assert not forgotten


def test_async_llm_structured_outputs_of_concurrent_callers(folder):
    """Forms of several callers at once, one that is wrong, and one that leaves; a hostile form does not hold up prompts."""

    async def run() -> None:
        llm = AsyncLLM(str(folder), max_model_len=128, core_process=False, **SHAPE)

        async def text(form: object, **params: Any) -> str:
            last = None
            async for output in llm.generate("Hello", SamplingParams(structured_outputs=form, max_tokens=60, **params)):
                last = output
            assert last is not None
            return last.outputs[0].text

        texts = await asyncio.gather(
            text({"choice": ["one"]}), text({"regex": "[0-9]{5}"}), text({"regex": "(a"}), text({"choice": ["two"]}),
            return_exceptions=True,
        )  # fmt: skip
        assert (texts[0], texts[3]) == ("one", "two")
        assert re.fullmatch("[0-9]{5}", str(texts[1]))
        assert isinstance(texts[2], RequestError)
        stream = llm.stream("Hello", SamplingParams(structured_outputs={"json_object": True}))
        async for _ in stream:
            break
        await stream.aclose()
        bomb = {"json": {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b"} for n in range(1, 40)]}}
        hostile = asyncio.create_task(text(bomb))
        await asyncio.sleep(0.05)
        assert await text({"choice": ["three"]}) == "three"
        assert not hostile.done()
        hostile.cancel()
        await llm.drain()

    asyncio.run(run())


def test_structured_outputs_guard_processes_end():
    """Guards end with their engines."""
    mine = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if "grammar_guard" in _read(path) and _parent(path.parent) == os.getpid()
    ]
    assert len(mine) <= 1, "the engine that this module shares has one"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _parent(folder: Path) -> int:
    found = re.search(r"^PPid:\s+(\d+)", _read(folder / "status"), re.MULTILINE)
    return int(found[1]) if found else -1


def test_llm_vocab_size_is_that_of_the_model(llm):
    assert llm.engine.core.facts.vocab_size == VOCAB
