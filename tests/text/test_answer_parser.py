"""AnswerFormat: reasoning, calls and hidden markers of each family, read alike whole and in pieces."""

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from for_each import for_each
from holdfast.text.answer_deltas import ContentDelta, ToolCallDelta, joined
from holdfast.text.answer_parser import AnswerFormat, MarkerFilter
from holdfast.text.reasoning import CLOSING, DEEPSEEK_R1, HARMONY, OPENING, QWEN3
from holdfast.text.tokenizer import Tokenizer
from holdfast.text.tool_formats import FORMATS, HERMES, KIMI_K2, LLAMA3_JSON
from text.answer_cases import TOOLS, calls_of, content_of, cut, in_short, read
from text.call_transcripts import KIMI_BEGIN, KIMI_CALL, KIMI_END, ROME
from text.test_tool_calls import ALL_GOLDEN, mutated


def form_of(calls) -> AnswerFormat:
    return AnswerFormat(HARMONY if calls.name == "harmony" else QWEN3, calls, TOOLS)


def check_mutations(calls, num_texts: int) -> None:
    chance, form = random.Random(11), form_of(calls)
    texts = [text for one, text in ALL_GOLDEN if one is calls]
    hidden = (*(HARMONY if calls.name == "harmony" else QWEN3).tokens, *calls.tokens)
    for _ in range(num_texts):
        head = chance.choice(["", "<think>hm", "<think>\nhm</think>\n\n", "hm</think>"])
        text = mutated(head + chance.choice(texts), chance)
        prompt = chance.choice([None, "<think>", "</think>", "<|start|>assistant"])
        places = [chance.randrange(1000) for _ in range(chance.choice([1, 5, 60]))]
        streamed, whole = form.parser(prompt, hidden), form.parser(prompt, hidden)
        deltas = read(whole, [text])
        assert read(streamed, cut(text, places)) == deltas, (calls.name, prompt, text)
        assert streamed.problems == whole.problems
        assert streamed.num_calls == whole.num_calls == len(calls_of(deltas))


@for_each("calls", FORMATS.values())
def test_answer_parser_mutated_answers_read_alike(calls):
    check_mutations(calls, 100)


@pytest.mark.slow
@pytest.mark.parametrize("calls", FORMATS.values(), ids=FORMATS)
def test_answer_parser_many_mutated_answers_read_alike(calls):
    check_mutations(calls, 2000)


@pytest.mark.parametrize("pieces", [1, 10**9])
def test_kimi_k2_thoughts_end_at_a_section(pieces):
    text = f"hm{KIMI_BEGIN}{KIMI_CALL}{KIMI_END}"
    parts = [text[i : i + pieces] for i in range(0, len(text), pieces)]
    form = AnswerFormat(DEEPSEEK_R1, KIMI_K2, TOOLS)
    assert in_short(read(form.parser(), parts)) == ["?hm", ROME]
    no_tools = AnswerFormat(DEEPSEEK_R1)
    assert in_short(read(no_tools.parser(), parts)) == [f"?{text}"]


def test_marker_filter_markers_go_and_arguments_stay():
    call = [ToolCallDelta(0, "f"), ToolCallDelta(0, None, "<|a|>")]
    text = "x<|a|>y<|a<|a|>|><|"
    for pieces in ([text], list(text)):
        markers = MarkerFilter(["<|a|>"])
        found = markers.filtered([*map(ContentDelta, pieces), *call, ContentDelta("<|a")]) + markers.finish()
        assert joined(found) == [ContentDelta("xy<|a|><|"), *joined(call), ContentDelta("<|a")]


def special_tokenizer(tokens: list[str], plain: list[str]) -> Tokenizer:
    """Letters, and markers that are special or only kept whole."""
    backend = Backend(BPE({letter: number for number, letter in enumerate("abc")}, []))
    backend.add_special_tokens(tokens)
    backend.add_tokens(plain)
    return Tokenizer(backend, "fake", {})


def test_answer_format_special_tokens_are_found_and_shown():
    markers = [*KIMI_K2.tokens, "<|im_end|>"]
    tokenizer = special_tokenizer(markers, [OPENING, CLOSING])
    special = AnswerFormat(QWEN3, KIMI_K2, TOOLS).special_tokens(tokenizer)
    assert set(special) == set(KIMI_K2.tokens)
    ids = [
        token_id
        for token in (KIMI_BEGIN, "<|im_end|>", OPENING)
        if (token_id := tokenizer.vocabulary_id(token)) is not None
    ]
    shown = tokenizer.text_stream(True, frozenset(special.values()))
    assert shown.push(ids).split() == [KIMI_BEGIN, OPENING]
    assert tokenizer.text_stream(True).push(ids).split() == [OPENING]
    assert AnswerFormat(QWEN3, HERMES, TOOLS).special_tokens(tokenizer) == {}
    assert AnswerFormat(QWEN3, HERMES, TOOLS).special_tokens(None) == {}


def test_answer_format_stop_token_ids_are_those_of_channels():
    tokenizer = special_tokenizer(["<|call|>", "<|return|>"], [])
    assert AnswerFormat(HARMONY).stop_token_ids(tokenizer) == (3, 4)
    assert AnswerFormat(None, FORMATS["harmony"], TOOLS).stop_token_ids(tokenizer) == (3, 4)
    assert AnswerFormat(QWEN3, HERMES, TOOLS).stop_token_ids(tokenizer) == ()


def test_answer_parser_hides_the_llama_python_tag():
    parser = AnswerFormat(None, LLAMA3_JSON, TOOLS).parser(None, LLAMA3_JSON.tokens)
    assert content_of(read(parser, ["<|python_tag|>now.call()"])) == "now.call()"
