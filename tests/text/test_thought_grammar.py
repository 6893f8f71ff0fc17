"""grammar_after_thoughts: a form of an answer is held to behind its thoughts, and is the same form there."""

from for_each import for_each
from holdfast.request.structured import StructuredOutputs
from holdfast.text.answer_grammar import grammar_after_thoughts
from text.test_tool_grammar import takes

FORMS = {
    "schema": ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, '{"a": 1}', '{"a": "b"}'),
    "any object": ({"json_object": True}, '{"é": [1]}', "[1]"),
    "any JSON": ({"json": "true"}, "[1]", "x"),
    "choice": ({"choice": ["yes", 'n"o\n']}, 'n"o\n', "maybe"),
    "regex": ({"regex": r"a/b\/c\.d{2}"}, "a/b/c.dd", "a/b/c.d"),
    "regex with a line break": ({"regex": "a\nb"}, "a\nb", "anb"),
    "regex of one sign": ({"regex": "/"}, "/", "//"),
}


@for_each("fields, sound, wrong", FORMS.values())
def test_grammar_after_thoughts_holds_each_form(fields, sound, wrong):
    form = StructuredOutputs(**fields)
    may, is_open = grammar_after_thoughts(form, "may"), grammar_after_thoughts(form, "open")
    assert grammar_after_thoughts(form, "none") is form
    assert may is not None
    assert is_open is not None
    for grammar, head in ((may.grammar, ""), (may.grammar, "<think>\nhm</think>\n\n"), (is_open.grammar, "hm</think>")):
        assert takes(grammar, head + sound)
        assert not takes(grammar, head + wrong)
    assert not takes(is_open.grammar, sound)


def test_grammar_after_thoughts_keeps_a_custom_grammar():
    assert grammar_after_thoughts(StructuredOutputs(grammar='start: "a"'), "may") is None
