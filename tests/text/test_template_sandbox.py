import builtins
import os
import subprocess
import time
from pathlib import Path

import pytest

from holdfast.errors import TemplateError
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.template_sandbox import TemplateEnvironment
from text.both_renderers import agree, ours
from text.template_attacks import ATTACKS, COSTLY_BUT_LAWFUL, ESCAPES

QUESTION = [{"role": "user", "content": "hi"}]
MAX_SECONDS = 4.0
"""Of processor time; about a tenth of it is usual, and machines differ."""
MAX_BYTES = 64 * 2**20


def resident_peak(reset: bool = False) -> int:
    """The most memory that the process has held since the last reset; 0 where the system does not say."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_a_template_that_burns_time_or_memory_is_refused_soon(source):
    template = ChatTemplate(source, "evil.gguf", {})
    before, started = resident_peak(reset=True), time.process_time()
    with pytest.raises(TemplateError, match=r"evil\.gguf") as caught:
        template.render(QUESTION)
    assert time.process_time() - started < MAX_SECONDS
    assert resident_peak() - before < MAX_BYTES
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("source", COSTLY_BUT_LAWFUL.values(), ids=COSTLY_BUT_LAWFUL)
def test_a_large_template_is_not_refused(source):
    assert isinstance(ours(source), str)


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_a_template_that_leaves_the_sandbox_is_refused_and_touches_nothing(source, monkeypatch, tmp_path):
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


def test_undefined_names_stay_harmless():
    assert agree("{{ config }}{{ request }}{{ messages[0].__x__ }}") == ""
    assert ours("{{ lipsum }}{{ (messages|map('upper')).gi_frame }}") == ""


def test_a_refused_template_leaves_the_next_rendering_alone():
    template = ChatTemplate(
        "{% for a in range(messages[0].content|int) %}{% for b in range(1000) %}{% endfor %}{% endfor %}ok", "x", {}
    )
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": "99999"}])
    assert template.render([{"role": "user", "content": "3"}]) == "ok"


def test_longer_conversations_may_spend_more():
    source = "{% for m in messages %}{% for n in messages %}{{ m.content|upper|length if n.content == m.content }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": f"{index} " * 200} for index in range(100)]
    assert ChatTemplate(source, "x", {}).render(messages)


def test_dates_are_written_as_in_transformers():
    assert agree("{{ strftime_now('%Y-%m-%d %B') }}") is not None
    assert agree("{{ strftime_now('%-d %b') }}") is not None


@pytest.mark.parametrize("form", ["%0999999999d", "%10000Y", "%" * 300, "x" * 300, "%"], ids=lambda form: form[:12])
def test_dates_of_unknown_forms_are_refused(form):
    with pytest.raises(TemplateError):
        ours("{{ strftime_now('" + form + "') }}")


def test_an_environment_knows_only_what_is_listed():
    environment = TemplateEnvironment()
    assert set(environment.globals) == {
        "range",
        "dict",
        "cycler",
        "joiner",
        "namespace",
        "raise_exception",
        "strftime_now",
    }
    assert environment.sandboxed
    assert environment.loader is None


def test_there_is_one_door_to_jinja_environments(root):
    makers = [
        path.name
        for path in (root / "src" / "holdfast").rglob("*.py")
        if "Environment(" in path.read_text(encoding="utf-8").replace("class TemplateEnvironment(", "")
    ]
    assert makers == ["chat_template.py"]
    texts = [path.read_text(encoding="utf-8") for path in (root / "src" / "holdfast").rglob("*.py")]
    assert sum("SandboxedEnvironment" in text for text in texts) == 1
    assert not any("jinja2.Environment" in text or "from_string(" in text for text in texts)
