"""Grammars: what forms allow token by token, over the bytes of our own tokenizer; checks that are remembered; failures."""

import json
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest

from engine.fakes import BOS, EOS, OTHER_EOS, VOCAB_SIZE, byte_tokenizer, shared_tokenizer
from error_codes import raises_code
from for_each import for_each
from holdfast.errors import RequestError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence
from holdfast.request.structured import StructuredOutputs
from holdfast.text import grammar
from holdfast.text.grammar import GrammarCheck, Grammars, Vocabulary, compile_grammar
from holdfast.text.grammar_guard import GrammarGuard

pytest.importorskip("llguidance")
ENDS = (EOS, OTHER_EOS)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(shared_tokenizer, VOCAB_SIZE, ENDS)


@pytest.fixture(scope="module")
def check(vocabulary):
    check = GrammarCheck(vocabulary, GrammarGuard(cpu_seconds=1))
    yield check
    check.close()


class Writer:
    """A sequence that follows a form, token by token."""

    def __init__(self, vocabulary: Vocabulary, number: int = 0, **form) -> None:
        self.form = StructuredOutputs(**form)
        self.grammars = Grammars(vocabulary)
        self.sequence = Sequence(
            number, [1, 2, 3], 3, SamplingParams(structured_outputs=self.form), seed=0, max_tokens=999
        )
        self.grammars.begin([number], self.form)
        self.grammars.wait(20.0)
        (self.prepared,) = self.grammars.ready()
        self.num_words = -(-vocabulary.vocab_size // 32)

    def allowed(self) -> list[int]:
        masks = np.full((1, self.num_words), -1, dtype=np.int32)
        self.grammars.fill([self.sequence], masks)
        return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()

    def takes(self, text: str) -> bool:
        """Whether an answer may be this text, whole; the sequence is left where that ends."""
        for byte in text.encode():
            if byte not in self.allowed():
                return False
            self.sequence.token_ids.append(byte)
        return EOS in self.allowed()


def takes(vocabulary: Vocabulary, text: str, **form) -> bool:
    return Writer(vocabulary, **form).takes(text)


@for_each("text", ['a"b', "x\ny", "\\d", "é/ü", "{}", "a|b", "tab\t", "a"])
def test_grammar_choice_matches_its_texts_exactly(vocabulary, text):
    choices = ['a"b', "x\ny", "\\d", "é/ü", "{}", "a|b", "tab\t", "a"]
    writer = Writer(vocabulary, choice=choices)
    assert writer.takes(text)
    assert not takes(vocabulary, text + "!", choice=choices)
    assert set(writer.allowed()) & set(ENDS) == set(ENDS)


def test_special_tokens_are_no_text(vocabulary):
    """A control token inside a string would end up in the text, or end the answer in its middle."""
    writer = Writer(vocabulary, json_object=True)
    assert not writer.takes('{"a')
    allowed = writer.allowed()
    assert set(allowed) < set(range(256))
    assert BOS not in allowed
    assert not writer.takes('": "é😀')
    assert writer.takes('"}')
    assert writer.allowed() == list(ENDS)


def test_grammar_forbids_ids_beyond_the_tokenizer(vocabulary):
    writer = Writer(vocabulary, regex="(.|\n)*")
    assert not [token for token in writer.allowed() if token > OTHER_EOS]


@for_each("text, is_fine", [
        ('{"a":1}', True),
        ('{"a": 1, "b": [1, {"c": null}]}', True),
        ('{\n  "a": 1\n}', True),
        ('{ "a" : 1 }', True),
        ('{"a":\n' + " " * 40 + "1}", True),
        ('{"a":\n' + " " * 41 + "1}", False),
        ('{"a":  1}', False),
        ('{"a":\n\n1}', False),
        ('{"a":\t1}', False),
        (' {"a":1}', False),
        ('{"a":1} ', False),
        ('{"a":1}\n', False),
        ("[1]", False),
        ('{"a":01}', False),
        ('{"a":1,}', False),
        ("{'a':1}", False),
        ('{"a":"\\ud83d\\ude00"}', False),
        ('{"a":"\\n\\"\\u0001"}', True),
        ('{"a":"\n"}', False),
    ])  # fmt: skip
def test_grammar_json_object_bounds_whitespace(vocabulary, text, is_fine):
    assert takes(vocabulary, text, json_object=True) is is_fine
    if is_fine:
        assert isinstance(json.loads(text), dict)


def test_grammar_schema_cannot_change_json_separators(vocabulary):
    loose = {"type": "object", "x-guidance": {"whitespace_pattern": " *", "item_separator": ";", "key_separator": "="}}
    assert not takes(vocabulary, '{"a":     1}', json=loose)
    assert not takes(vocabulary, '{"a":1;"b":2}', json=loose)
    assert takes(vocabulary, '{"a":1,"b":2}', json=loose)


def test_grammar_regex_matches_the_whole_answer_in_ascii(vocabulary):
    assert takes(vocabulary, "123-ab_", regex=r"\d{3}-\w+")
    assert not takes(vocabulary, "١٢٣-a", regex=r"\d{3}-\w+")
    assert takes(vocabulary, "a/b", regex="^a/b$")
    assert not takes(vocabulary, "xab", regex="ab")
    writer = Writer(vocabulary, regex="ab")
    assert writer.takes("ab")
    assert writer.allowed() == list(ENDS)


def test_grammar_takes_lark_and_gbnf(vocabulary):
    assert takes(vocabulary, "1+(2*3)", grammar='start: t (("+"|"*") t)*\nt: /[0-9]+/ | "(" start ")"')
    assert takes(vocabulary, "bba", grammar='root ::= "a" | "b" root')


def test_grammar_without_end_token_is_complete_at_its_end(vocabulary):
    """Nothing is left to choose where its form is complete; the core ends it then."""
    endless = Vocabulary(shared_tokenizer, 256)
    assert (endless.num_words, vocabulary.num_words) == (9, 9)
    writer = Writer(endless, regex="ab?")
    assert not writer.takes("a")
    assert writer.allowed() == [ord("b")]
    assert not writer.grammars.is_complete(0)
    writer.sequence.token_ids.append(ord("b"))
    assert writer.allowed() == []
    assert writer.grammars.is_complete(0)
    assert writer.grammars.failure(0) is None
    done = Writer(vocabulary, regex="ab?")
    assert done.takes("ab")
    assert not done.grammars.is_complete(0)


def test_grammars_fill_depends_only_on_the_tokens(vocabulary):
    """Masks computed twice, several tokens at once, and a list of tokens that was made anew after a preemption."""
    writer = Writer(vocabulary, regex="abc+d")
    assert writer.allowed() == writer.allowed() == [ord("a")]
    writer.sequence.token_ids += b"abcc"
    assert writer.allowed() == [ord("c"), ord("d")]
    other = Sequence(0, [*writer.sequence.token_ids, ord("c")], 3, writer.sequence.params, 0, 9)
    masks = np.zeros((1, writer.num_words), dtype=np.int32)
    writer.grammars.fill([other], masks)
    assert masks.any()
    other.token_ids.append(ord("d"))
    writer.grammars.fill([other], masks)
    assert np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist() == list(ENDS)


@pytest.mark.parametrize("shared_rows", [2, 99], ids=["in threads", "one by one"])
def test_grammars_fill_in_threads_matches_fill_one_by_one(vocabulary, monkeypatch, shared_rows):
    monkeypatch.setattr(grammar, "SHARED_ROWS", shared_rows)
    grammars, form = Grammars(vocabulary), StructuredOutputs(json_object=True)
    texts = ["", "{", '{"a', '{"a"', '{"a":', '{"a":1', '{"a":1}']
    grammars.begin(range(len(texts)), form)
    grammars.wait(20.0)
    grammars.ready()
    sequences: list[Sequence | None] = [
        Sequence(number, [1, *text.encode()], 1, SamplingParams(structured_outputs=form), 0, 9)
        for number, text in enumerate(texts)
    ]
    sequences[3:3] = [None]
    together = np.full((len(sequences), vocabulary.num_words), 77, dtype=np.int32)
    grammars.fill(sequences, together)
    assert (together[3] == 77).all()
    for row, sequence in enumerate(sequences):
        alone = np.full((1, vocabulary.num_words), 77, dtype=np.int32)
        grammars.fill([sequence], alone)
        assert (alone[0] == together[row]).all()
    apart = np.zeros((2 * len(sequences), vocabulary.num_words), dtype=np.int32)[::2]
    grammars.fill(sequences, apart)
    assert (np.delete(apart, 3, axis=0) == np.delete(together, 3, axis=0)).all()


def test_grammars_forbidden_token_fails_only_its_sequence(vocabulary):
    writer = Writer(vocabulary, regex="ab")
    writer.sequence.token_ids.append(ord("x"))
    assert writer.allowed() == []
    assert writer.grammars.failure(0)
    assert writer.allowed() == []
    assert not writer.grammars.is_complete(0)


def test_grammars_forgotten_sequence_has_no_allowed_tokens(vocabulary):
    writer = Writer(vocabulary, regex="ab")
    writer.grammars.forget(0)
    assert writer.allowed() == []
    assert (len(writer.grammars), writer.grammars.failure(0)) == (0, None)


def test_grammars_matcher_limit_fails_only_its_request(vocabulary):
    """Bounds of one matcher are not used up by another of the same form."""
    form = {"json": {"type": "string", "pattern": "(.*a.{20}){20}"}}
    text = '"' + "ab" * 400
    failures = []
    for number in range(2):
        writer = Writer(vocabulary, number, **form)
        while writer.grammars.failure(number) is None and len(writer.sequence.token_ids) < 700:
            writer.sequence.token_ids += text[len(writer.sequence.token_ids) - 3 :].encode()[:1]
            writer.allowed()
        failures.append((writer.grammars.failure(number), len(writer.sequence.token_ids)))
    assert failures[0] == failures[1]


def test_completions_of_one_request(vocabulary):
    grammars, form = Grammars(vocabulary), StructuredOutputs(choice=["ab", "cd"])
    grammars.begin([4, 5], form)
    grammars.wait(20.0)
    assert grammars.ready() == [((4, 5), None)]
    assert (len(grammars), grammars.ready()) == (2, [])
    params = SamplingParams(structured_outputs=form)
    masks = np.zeros((2, vocabulary.num_words), dtype=np.int32)
    grammars.fill([Sequence(4, [1, ord("a")], 1, params, 0, 9), Sequence(5, [1, ord("c")], 1, params, 0, 9)], masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [[ord("b")], [ord("d")]]


def test_grammars_forget_cancels_an_unused_compilation(monkeypatch, vocabulary):
    begun, opened, compiled = threading.Event(), threading.Event(), []

    def compile_slowly(form, vocabulary):
        compiled.append(form.choice)
        begun.set()
        assert opened.wait(20.0)
        return compile_grammar(form, vocabulary)

    monkeypatch.setattr(grammar, "compile_grammar", compile_slowly)
    grammars = Grammars(vocabulary)
    for number, text in enumerate("abc"):
        grammars.begin([2 * number, 2 * number + 1], StructuredOutputs(choice=[text]))
    assert begun.wait(20.0)
    for sequence_id in (0, 1, 2, 3, 4):
        grammars.forget(sequence_id)
    opened.set()
    grammars.wait(20.0)
    assert grammars.ready() == [((5,), None)]
    assert compiled == [("a",), ("c",)]
    assert len(grammars) == 1
    grammars.forget(5)
    grammars.forget(5)
    assert len(grammars) == 0


def test_grammars_ready_returns_a_compilation_error(vocabulary):
    writer = Writer(vocabulary, regex="(a")
    assert writer.prepared.sequence_ids == (0,)
    assert "unclosed group" in (writer.prepared.error or "")


def test_grammars_unopenable_tokenizer_fails_the_request(monkeypatch):
    def broken():
        raise OSError("the file is gone")

    writer = Writer(Vocabulary(broken, 10, (1,)), regex="a")
    assert writer.prepared.error == "the file is gone"


def test_vocabulary_opens_its_tokenizer_once_and_lazily():
    opened = []

    def open_slowly():
        opened.append(threading.current_thread().name)
        time.sleep(0.05)
        return byte_tokenizer()

    vocabulary = Vocabulary(open_slowly, VOCAB_SIZE, ENDS)
    assert not opened
    threads = [threading.Thread(target=vocabulary.get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1


# Checks


@for_each(
    "form, words",
    [
        ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, "Unsatisfiable"),
        ({"json": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}}, "structured_outputs.json"),
        ({"json": {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b"} for n in range(1, 40)]}}, "than 1 seconds"),
        ({"grammar": "A: /.*a.{20}b/ & /.*b.{25}a/ & ~/.*c.{9}d/\nstart: A"}, "fuel exhausted"),
        ({"regex": "(a"}, "structured_outputs.regex"),
        ({"regex": "(?<=a)b"}, "structured_outputs.regex"),
        ({"grammar": "start: start"}, "structured_outputs.grammar"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar"),
    ],
)
def test_grammar_check_impossible_form_is_refused_in_time(check, form, words):
    began = time.monotonic()
    with raises_code("grammar.refused", RequestError) as caught:
        check.check(StructuredOutputs(**form))
    assert words in str(caught.value)
    first = time.monotonic() - began
    assert first < 12.0
    with raises_code("grammar.refused", RequestError) as again:
        check.check(StructuredOutputs(**form))
    assert str(again.value) == str(caught.value)
    assert time.monotonic() - began - first < 0.5


@for_each(
    "regex",
    [
        "(a+)+b",
        "(a{1,1000}){1,1000}",
        "((a{1,100}){1,100}){1,100}",
        ".*a.{500}",
        "(.*a){200}b",
        "(a|a|a)*c",
        "a|b" * 1300,
    ],
)
def test_grammar_check_explosive_regex_is_followed_in_time(vocabulary, check, regex):
    began = time.monotonic()
    check.check(StructuredOutputs(regex=regex))
    matcher = compile_grammar(StructuredOutputs(regex=regex), vocabulary)
    for _ in range(30):
        matcher.compute_bitmask()
        if not matcher.consume_token(ord("a")):
            break
    assert time.monotonic() - began < 5.0


def test_grammar_check_object_of_512_properties_is_followed(vocabulary, check):
    properties = {f"p{number}": {"type": "integer"} for number in range(512)}
    form = {"json": {"type": "object", "properties": properties, "additionalProperties": False}}
    check.check(StructuredOutputs(**form))
    assert takes(vocabulary, '{"p0": 1, "p300": 2, "p511": 3}', **form)
    assert not takes(vocabulary, '{"p300": 2, "p0": 1}', **form)


def test_grammar_check_verdict_is_kept_per_kind_of_form(check):
    """One text as an expression and as a grammar, in either order."""
    for text in ("ab", "ba"):
        for _ in range(2):
            kinds = [("regex", True), ("grammar", False)]
            for kind, is_fine in kinds if text == "ab" else reversed(kinds):
                with nullcontext() if is_fine else raises_code("grammar.refused", RequestError):
                    check.check(StructuredOutputs(**{kind: text}))


def test_grammar_check_bounds_its_verdicts(monkeypatch, vocabulary):
    check = GrammarCheck(vocabulary)
    monkeypatch.setattr(grammar, "MAX_VERDICTS", 30)
    for number in range(60):
        check.check(StructuredOutputs(choice=[f"number {number}"]))
        with raises_code("grammar.refused", RequestError):
            check.check(StructuredOutputs(json={"type": f"kind{number}"}))
        assert check.num_verdicts <= 30
    assert check.num_verdicts == 30


def test_grammar_check_easy_form_skips_the_guard_process(vocabulary):
    class NoGuard(GrammarGuard):
        def error(self, kind, text):
            raise AssertionError(f"{kind} {text} went to the guard")

    check = GrammarCheck(vocabulary, NoGuard())
    check.check(StructuredOutputs(json_object=True))
    check.check(StructuredOutputs(choice=["a", "b"]))
    check.check(StructuredOutputs(json={"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}]}}}))
    for form in ({"regex": "a"}, {"grammar": 'start: "a"'}, {"json": {"type": "string", "pattern": "a"}}):
        with pytest.raises(AssertionError, match="went to the guard"):
            check.check(StructuredOutputs(**form))


def test_grammar_without_llguidance_is_refused(monkeypatch, vocabulary):
    monkeypatch.setattr(grammar.importlib.util, "find_spec", lambda name: None)
    with raises_code("grammar.not_installed", RequestError):
        GrammarCheck(vocabulary).check(StructuredOutputs(json={}))
    with raises_code("grammar.not_installed", RequestError):
        Grammars(vocabulary).begin([0], StructuredOutputs(json={}))
