"""StructuredOutputs: one grammar, bounded, kept as text; wrong ones raise by code."""

import time

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import KeywordError, RequestError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.step import Admitted, Step
from holdfast.request.structured import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, StructuredOutputs
from request.frames import decode_step, encode_step

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["é", None, 1.5, True]}}}


def test_schema_is_kept_as_text_in_its_order():
    grammar = StructuredOutputs(json=SCHEMA)
    text = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"enum":["é",null,1.5,true]}}}'
    assert grammar.json == text
    assert StructuredOutputs(json=text) == grammar
    assert hash(grammar) == hash(StructuredOutputs(json=text))
    assert grammar.kind == "json"


@for_each(
    "given",
    [
        {"json": {}},
        {"json": "true"},
        {"regex": "a+"},
        {"choice": ["a", "b", "a"]},
        {"grammar": 'start: "a"'},
        {"json_object": True},
    ],
)
def test_structured_outputs_round_trip_in_step(given):
    params = SamplingParams(structured_outputs=given, temperature=0.5)
    step = Step(1, (), (Admitted(0, 1, (2,), 1, params, 0),))
    assert decode_step(encode_step(step)) == step
    assert SamplingParams(structured_outputs=params.structured_outputs) == SamplingParams(structured_outputs=given)


@for_each(
    "given, code, text",
    [
        ({}, "no_grammar", "one of json, regex, choice, grammar, json_object, got none of them"),
        ({"json": {}, "regex": "a"}, "no_grammar", "got json and regex"),
        ({"json_object": False}, "no_grammar", "none of them"),
        ({"json": "{"}, "schema_not_json", ""),
        ({"json": "[1]"}, "schema_not_object", ""),
        ({"json": 7}, "schema_not_object", ""),
        ({"json": '{"minimum": NaN}'}, "schema_not_json", "NaN is not a JSON number"),
        ({"json": {"minimum": float("inf")}}, "schema_value", "finite"),
        ({"json": {"minimum": 10**200}}, "schema_value", "more than 150 digits"),
        ({"json": '{"minimum": 1' + "0" * 5000 + "}"}, "schema_not_json", ""),
        ({"json": {"x": {1, 2}}}, "schema_value", "JSON has objects, lists"),
        ({"json": {1: {}}}, "schema_value", "Names in JSON are strings"),
        ({"json": {"title": "\ud800"}}, "schema_too_large", "bytes of valid Unicode"),
        ({"json": {"title": "x" * MAX_SCHEMA_BYTES}}, "schema_too_large", "At most 65536"),
        ({"json": '"' + "x" * MAX_SCHEMA_BYTES}, "schema_too_large", "At most 65536 bytes"),
        ({"json": {"enum": list(range(5000))}}, "schema_too_large", "5000 entries of lists. At most 4096"),
        ({"json": {"properties": {str(n): {} for n in range(513)}}}, "schema_too_large", "513 entries of one object"),
        ({"json": {"anyOf": [{str(n): {} for n in range(500)}] * 9}}, "schema_too_large", "4501 entries of objects"),
        ({"json": "false"}, "schema_not_object", ""),
        ({"json": True}, "schema_not_object", ""),
        ({"regex": ""}, "grammar_text", ""),
        ({"regex": 5}, "grammar_text", "regex"),
        ({"regex": "a" * 5000}, "grammar_too_long", "has 5000 characters. At most 4096 bytes"),
        ({"regex": "\ud800"}, "grammar_too_long", "valid Unicode"),
        ({"regex": "a\0"}, "grammar_nul", ""),
        ({"grammar": "x" * 70000}, "grammar_too_long", "At most 65536 bytes"),
        ({"choice": []}, "choices", "1 to 1024"),
        ({"choice": "ab"}, "choices", ""),
        ({"choice": ["a", ""]}, "choices", ""),
        ({"choice": ["a", 1]}, "choices", ""),
        ({"choice": ["a"] * 2000}, "choices", ""),
        ({"choice": ["a" * 3000, "b" * 3000]}, "too_long", "has 6000 characters"),
        ({"jsn": {}}, "grammar_field", "'jsn'. Accepted: json, regex"),
        *((value, "not_grammar", "") for value in (5, "json", [1], object())),
    ],
)
def test_wrong_grammar_raises_its_code(given, code, text):
    with raises_code(f"request.{code}", RequestError) as caught:
        SamplingParams(structured_outputs=given)
    assert text in str(caught.value)
    assert "structured_outputs" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_json_object_must_be_a_bool():
    with raises_code("value.not_bool", RequestError, name="structured_outputs.json_object", value=1):
        SamplingParams(structured_outputs={"json_object": 1})


def test_depth_is_checked_before_memory_is_used():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    itself: dict = {}
    itself["a"] = itself
    wide = {"a": [{}] * 4000}
    for _ in range(10):
        wide = {"a": wide, "b": wide}
    began = time.monotonic()
    for schema in (deep, itself, '{"a":' * 10_000 + "1" + "}" * 10_000, "[" * 60_000):
        with pytest.raises(RequestError) as caught:
            StructuredOutputs(json=schema)
        assert caught.value.code in ("request.schema_too_large", "request.schema_not_json")
    with raises_code("request.schema_too_large", RequestError, maximum=f"{MAX_SCHEMA_DEPTH} levels"):
        StructuredOutputs(json=itself)
    with raises_code("request.schema_too_large", RequestError) as caught:
        StructuredOutputs(json=wide)
    assert "entries of lists" in str(caught.value)
    assert time.monotonic() - began < 2.0
    while deep:
        deep = deep.pop("a")  # by hand: dropping it at once recurses


@for_each(
    "given, own",
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "start: x"}, {"grammar": "start: x"}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_decoding": {"regex": "a+", "json": None}}, {"regex": "a+"}),
    ],
)
def test_older_names_of_vllm(given, own):
    assert SamplingParams(**given).structured_outputs == StructuredOutputs(**own)
    params = SamplingParams()
    params.structured_outputs = StructuredOutputs(**own)
    assert params == SamplingParams(structured_outputs=own)


def test_older_names_exclude_each_other():
    assert SamplingParams(guided_json=None, guided_regex=None).structured_outputs is None
    assert SamplingParams(guided_json=None, structured_outputs={"regex": "a"}).structured_outputs is not None
    for given in (
        {"guided_regex": "a", "structured_outputs": {"json": {}}},
        {"guided_regex": "a", "guided_decoding": {"json": {}}},
        {"guided_decoding": {"json": {}}, "structured_outputs": {"json": {}}},
    ):
        with raises_code("request.two_grammars", KeywordError):
            SamplingParams(**given)
    with raises_code("request.no_grammar", RequestError, given="json and regex"):
        SamplingParams(guided_regex="a", guided_json={})
