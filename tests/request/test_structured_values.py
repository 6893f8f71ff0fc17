"""StructuredOutputs: exactly one form, bounded by its size alone; vLLM's names; the way over the wire."""

import time

import pytest

from holdfast.errors import KeywordError, RequestError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.step import Admitted, Step, decode_step, encode_step
from holdfast.request.structured import MAX_CHOICES, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, StructuredOutputs

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["é", None, 1.5, True]}}}


def test_a_schema_is_kept_as_text_in_its_order():
    form = StructuredOutputs(json=SCHEMA)
    text = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"enum":["é",null,1.5,true]}}}'
    assert form.json == text
    assert StructuredOutputs(json=text) == form
    assert hash(form) == hash(StructuredOutputs(json=text))
    assert form.kind == "json"
    assert form.as_dict() == {"json": text}


@pytest.mark.parametrize(
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
def test_every_form_survives_the_wire(given):
    params = SamplingParams(structured_outputs=given, temperature=0.5)
    step = Step(1, (), (Admitted(0, 1, (2,), 1, params, 0),))
    assert decode_step(encode_step(step)) == step
    assert SamplingParams(structured_outputs=params.structured_outputs) == SamplingParams(structured_outputs=given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "structured_outputs with none of them was asked; an answer has one form: json, regex, choice"),
        ({"json": {}, "regex": "a"}, "with json and regex was asked"),
        ({"json_object": False}, "none of them"),
        ({"json_object": 1}, "json_object=1 was asked; it is a switch"),
        ({"json": "{"}, "it is no JSON"),
        ({"json": "[1]"}, "a schema is an object"),
        ({"json": 7}, "a schema is an object"),
        ({"json": '{"minimum": NaN}'}, "NaN is no number of JSON"),
        ({"json": {"minimum": float("inf")}}, "numbers in JSON are finite"),
        ({"json": {"minimum": 10**200}}, "more than 150 digits"),
        ({"json": '{"minimum": 1' + "0" * 5000 + "}"}, "it is no JSON"),
        ({"json": {"x": {1, 2}}}, "JSON has objects, lists"),
        ({"json": {1: {}}}, "names in JSON are texts"),
        ({"json": {"title": "\ud800"}}, "bytes of valid Unicode"),
        ({"json": {"title": "x" * MAX_SCHEMA_BYTES}}, "at most 65536 work"),
        ({"json": '"' + "x" * MAX_SCHEMA_BYTES}, "at most 65536 bytes work"),
        ({"json": {"enum": list(range(5000))}}, "5000 entries of lists was asked; at most 4096"),
        (
            {"json": {"properties": {str(n): {} for n in range(513)}}},
            "513 entries of one object was asked; at most 512",
        ),
        (
            {"json": {"anyOf": [{str(n): {} for n in range(500)}] * 9}},
            "4501 entries of objects was asked; at most 4096",
        ),
        ({"json": "false"}, "a schema is an object"),
        ({"json": True}, "a schema is an object"),
        ({"regex": ""}, "a text that is not empty works"),
        ({"regex": 5}, "regex=5 was asked"),
        ({"regex": "a" * 5000}, "at most 4096 bytes works, it has 5000 characters"),
        ({"regex": "\ud800"}, "valid Unicode"),
        ({"regex": "a\0"}, "NUL"),
        ({"grammar": "x" * 70000}, "at most 65536 bytes"),
        ({"choice": []}, f"a list of 1 to {MAX_CHOICES} texts works"),
        ({"choice": "ab"}, "a list of 1"),
        ({"choice": ["a", ""]}, "texts that are not empty work"),
        ({"choice": ["a", 1]}, "texts that are not empty work"),
        ({"choice": ["a"] * 2000}, "a list of 1"),
        ({"choice": ["a" * 3000, "b" * 3000]}, "they have 6000 characters"),
        ({"jsn": {}}, "structured_outputs with 'jsn' was asked; its fields are json, regex"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_told_with_its_field(given, words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs=given)
    assert words in str(caught.value)
    assert "structured_outputs" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [5, "json", [1], object()])
def test_what_is_no_form(value):
    with pytest.raises(RequestError, match="StructuredOutputs works, or a dict of its fields"):
        SamplingParams(structured_outputs=value)


def test_depth_ends_before_anything_is_made_of_it():
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
        with pytest.raises(
            RequestError, match=f"levels was asked; at most {MAX_SCHEMA_DEPTH}|nested too deeply|no JSON"
        ):
            StructuredOutputs(json=schema)
    with pytest.raises(RequestError, match="entries of lists"):
        StructuredOutputs(json=wide)
    assert time.monotonic() - began < 2.0
    while deep:
        deep = deep.pop("a")  # by hand: dropping it at once recurses


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "start: x"}, {"grammar": "start: x"}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_decoding": {"regex": "a+", "json": None}}, {"regex": "a+"}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_older_names_of_vllm(given, own):
    assert SamplingParams(**given).structured_outputs == StructuredOutputs(**own)
    params = SamplingParams()
    params.structured_outputs = StructuredOutputs(**own)
    assert params == SamplingParams(structured_outputs=own)


def test_older_names_that_ask_for_nothing_or_for_two():
    assert SamplingParams(guided_json=None, guided_regex=None).structured_outputs is None
    with pytest.raises(KeywordError, match="structured_outputs and guided_regex were asked"):
        SamplingParams(guided_regex="a", structured_outputs={"json": {}})
    with pytest.raises(RequestError, match="with json and regex"):
        SamplingParams(guided_regex="a", guided_json={})
