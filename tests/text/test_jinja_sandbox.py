"""The Jinja sandbox: templates write what transformers writes; those that burn time or memory or escape are refused."""

import builtins
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import TemplateError
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.jinja_sandbox import FILTERS_ALLOWED, METHODS, ChatSandbox
from text.template_attacks import ATTACKS, COSTLY_BUT_LAWFUL, ESCAPES
from text.template_cases import (
    CORNERS,
    FILTER_SNIPPETS,
    METHOD_SNIPPETS,
    REFUSED_BY_BOTH,
    SNIPPETS,
    STRING_SNIPPETS,
    TEST_SNIPPETS,
    agree,
    ours,
)

QUESTION = [{"role": "user", "content": "hi"}]
MAX_SECONDS = 60.0
"""CPU seconds; less than one is usual. Only to detect an endless run: machines differ, and are shared."""
MAX_BYTES = 64 * 2**20
AGREEING = SNIPPETS | CORNERS | METHOD_SNIPPETS
WRITING = FILTER_SNIPPETS | {f"is {name}": text for name, text in TEST_SNIPPETS.items()}
WRITING |= {f".{name}()": text for name, text in STRING_SNIPPETS.items()}


@for_each("source", WRITING.values())
def test_sandbox_filters_tests_and_methods_match_transformers(source):
    assert agree(source) is not None


def test_sandbox_snippets_cover_each_allowed_name():
    assert FILTER_SNIPPETS.keys() == FILTERS_ALLOWED
    assert TEST_SNIPPETS.keys() == TESTS.keys()
    assert STRING_SNIPPETS.keys() == METHODS[str]


@for_each("name", AGREEING)
def test_templates_equal_transformers_or_both_refuse(name):
    assert (agree(AGREEING[name]) is None) == (name in REFUSED_BY_BOTH)


@for_each("name", sorted(FILTERS.keys() - FILTERS_ALLOWED))
def test_sandbox_unknown_filter_is_refused(name):
    with raises_code("template.syntax", TemplateError):
        ours("{{ text|" + name + " }}")


@for_each(
    "source",
    [
        "{{ 'a'.encode() }}",
        "{{ 'a'.center(5) }}",
        "{{ 'a'.translate({}) }}",
        "{{ '{a}'.format_map({'a': 1}) }}",
        "{{ {}.fromkeys([1]) }}",
        "{{ (5).to_bytes(9, 'big') }}",
        "{{ (2.5).hex() }}",
        "{{ ('a'|safe).striptags() }}",
    ],
)
def test_sandbox_unsafe_method_is_refused(source):
    with raises_code("template.unsafe", TemplateError):
        ours(source)


def test_sandbox_globals_are_only_those_allowed():
    assert ChatSandbox().globals.keys() == {"range", "dict", "namespace", "raise_exception", "strftime_now"}
    assert ours("{{ cycler }}{{ joiner }}{{ lipsum }}{{ config }}{{ request }}{{ open }}") == ""
    assert agree("{{ messages[0].__x__ }}") == ""


def test_sandbox_autoescape_is_refused():
    with raises_code("template.syntax", TemplateError):
        ours("{% autoescape true %}{{ '<' }}{% endautoescape %}")


def resident_peak(reset: bool = False) -> int:
    """The most memory that the process has held since the last reset; 0 where the system does not say."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


MANY_SECONDS = {
    *("long list undefined kept", "long default", "long list 2", "long body 3", "long expression 2", "slices kept 2"),
    *("sort", "undefined methods", "for bomb 100", "macros kept", "filter args splat"),
    *(f"nested tuple {how}" for how in ("in", "getitem", "dict call")),
    *(f"nested list {how}" for how in ("eq test", "unique", "changed", "sort", "json")),
}
"""Attacks that take longest to be refused, each of a kind of which others are tried at once."""


def test_sandbox_slow_attacks_are_among_the_attacks() -> None:
    assert set(ATTACKS) > MANY_SECONDS


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, marks=[pytest.mark.slow] * (name in MANY_SECONDS), id=name)
        for name, source in ATTACKS.items()
    ],
)
def test_template_that_burns_time_or_memory_is_refused(source):
    template = ChatTemplate(source, "evil.gguf", {})
    before, started = resident_peak(reset=True), time.process_time()
    with pytest.raises(TemplateError, match=r"evil\.gguf") as caught:
        template.render(QUESTION)
    assert time.process_time() - started < MAX_SECONDS
    assert resident_peak() - before < MAX_BYTES
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@for_each("source", COSTLY_BUT_LAWFUL.values())
def test_sandbox_large_lawful_template_renders(source):
    assert isinstance(ours(source), str)


@for_each("source", ESCAPES.values())
def test_template_that_leaves_the_sandbox_is_refused(source, monkeypatch, tmp_path):
    import jinja2.ext  # noqa: F401 - imported before the door is shut

    ChatTemplate("warm", "x", {}).render(QUESTION)
    monkeypatch.chdir(tmp_path)
    touched: list[str] = []
    for module, name in ((os, "system"), (os, "popen"), (subprocess, "Popen"), (builtins, "open"), (builtins, "eval")):
        monkeypatch.setattr(module, name, lambda *args, name=name, **kwargs: touched.append(name))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    try:
        with pytest.raises(TemplateError) as caught:
            ChatTemplate(source, "evil.gguf", {}).render(messages)
    finally:
        monkeypatch.undo()
    assert touched == []
    assert list(tmp_path.iterdir()) == []
    assert messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert "0x" not in str(caught.value)


def test_sandbox_budget_cannot_be_refilled():
    refill = "{% for i in range(99999) %}{% set x = [-10**9]|map('|spend')|list %}{% endfor %}"
    with raises_code("template.over_budget", TemplateError):
        ours(refill)


def test_sandbox_refused_render_leaves_the_next_unaffected():
    template = ChatTemplate(
        "{% for a in range(messages[0].content|int) %}{% for b in range(1000) %}{% endfor %}{% endfor %}ok", "x", {}
    )
    with raises_code("template.over_budget", TemplateError):
        template.render([{"role": "user", "content": "99999"}])
    assert template.render([{"role": "user", "content": "3"}]) == "ok"


def test_sandbox_budget_grows_with_the_messages():
    template = ChatTemplate("{% for a in range(90000) %}{% if a == 5 %}five{% endif %}{% endfor %}", "x", {})
    with raises_code("template.over_budget", TemplateError):
        template.render(QUESTION)
    assert template.render(QUESTION * 1000) == "five"


def test_sandbox_output_bound_grows_with_the_messages():
    template = ChatTemplate("{% for a in range(3) %}{{ 'x' * 900000 }}{% endfor %}{{ messages|length }}", "x", {})
    with raises_code("template.over_budget", TemplateError):
        template.render(QUESTION)
    assert template.render([{"role": "user", "content": "y" * 200_000}]) == "x" * 2_700_000 + "1"


def test_sandbox_long_loop_body_costs_more():
    loop = "{{% for a in range(2000) %}}{}{{% endfor %}}"
    assert ours(loop.format("{% if yes %}{% endif %}" * 10)) == ""
    with raises_code("template.over_budget", TemplateError):
        ours(loop.format("{% if yes %}{% endif %}" * 1000))


def test_sandbox_time_limit_stops_a_template(monkeypatch):
    clock = iter(range(0, 10**9, 2))
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    with raises_code("template.over_budget", TemplateError):
        ours("{% for a in range(2000) %}{{ a }}{% endfor %}")


def test_sandbox_strftime_now_matches_transformers():
    assert agree("{{ strftime_now('%Y-%m-%d %B') }}") is not None
    assert agree("{{ strftime_now('%-d %b') }}") is not None


@for_each("form", ["%0999999999d", "%10000Y", "%" * 300, "x" * 300, "%"])
def test_sandbox_strftime_unknown_format_is_refused(form):
    with raises_code("template.over_budget", TemplateError):
        ours("{{ strftime_now('" + form + "') }}")


def test_jinja_environments_are_made_only_by_the_sandbox(root):
    texts = {path.name: path.read_text(encoding="utf-8") for path in (root / "src" / "holdfast").rglob("*.py")}
    assert [name for name, text in texts.items() if "SandboxedEnvironment" in text] == ["jinja_sandbox.py"]
    assert [name for name, text in texts.items() if "ChatSandbox()" in text] == ["chat_template.py"]
    plain = [name for name, text in texts.items() if "from_string(" in text or re.search(r"(?<!d)Environment\(", text)]
    own = {path.name for path in (root / "src" / "holdfast" / "cli").glob("*.py")}
    assert set(plain) <= own, "only commands render without the sandbox, and only templates of the package"
