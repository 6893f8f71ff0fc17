"""ChatTemplate renders messages and tools to a prompt with a model's Jinja template; no torch."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import ModelFormatError, PromptError, TemplateError
from holdfast.loading.sources.files import read_json_object, read_small_file
from holdfast.text.chat_messages import PlainData, plain_messages
from holdfast.text.control_tokens import ControlTokens, Span, unmarked
from holdfast.text.tokenizer import CONFIG_FILE, special_tokens_of
from holdfast.text.tool_messages import Message, as_plain_chat, has_tools, with_argument_objects, with_names_of_tools

if TYPE_CHECKING:
    import jinja2

    from holdfast.text.jinja_sandbox import ChatSandbox

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_CHARS = 128 * 2**10
MAX_REASON_CHARS = 300
CONTENT_VARIABLES = ("messages", "tools", "documents")
"""Variables from the request; control tokens in them are text."""


class RenderedChat(NamedTuple):
    """A rendered chat; `own` are control tokens from the messages, which are encoded as text."""

    text: str
    own: tuple[Span, ...]


def messages_in(variables: Mapping[str, object]) -> list[Message]:
    """Return the checked messages among the variables of a template."""
    messages = variables["messages"]
    assert isinstance(messages, list), f"{messages=} are no plain messages"
    return messages


class ChatTemplate:
    """The template of one model, compiled at first use; a broken one fails chats, not the model load.

    Rendering returns text or raises TemplateError, in bounded time and memory.
    """

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str]) -> None:
        """`origin` is the template's file; `special_tokens` are bos_token etc., which templates may write."""
        self.source = source
        self.origin = origin
        self.special_tokens = dict(special_tokens)
        self.control_texts: tuple[str, ...] = ()
        """Tokens to treat as control tokens in messages, even if the tokenizer does not flag them special."""
        self._compiled: tuple[jinja2.Template, ChatSandbox] | TemplateError | None = None
        self._lock = Lock()

    def render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True, **extra: object
    ) -> str:
        """Return the prompt for these messages; `extra` are further variables of the template."""
        return self.render_chat(messages, None, add_generation_prompt, **extra).text  # type: ignore[arg-type]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        control: ControlTokens | None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools_as_text: bool = False,
        **extra: object,
    ) -> RenderedChat:
        """Like `render`, and find the control tokens from the messages if `control` is given.

        A template without tool support skips tools; `tools_as_text` writes them into the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise PromptError("template.two_openings", name="continue_final_message")
        data = PlainData()
        variables: dict[str, object] = {
            "tools": None,
            "documents": None,
            **self.special_tokens,
            **{name: data.copy(value, name) for name, value in extra.items()},
            "messages": plain_messages(messages, data),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        # Render one at a time: the sandbox has one budget, and threads would not be faster.
        with self._lock:
            text, variables = self._first_rendered(self._ways(variables, data, tools_as_text), data)
            own = () if control is None else self._own_tokens(text, variables, control, data.num_chars)
        if continue_final_message:
            text = self._until_final(text, messages_in(variables))
            own = tuple((start, end) for start, end in own if end <= len(text))
        return RenderedChat(text, own)

    @cached_property
    def takes_tools(self) -> bool:
        """True if the template lists tools itself."""
        return re.search(r"\btools\b", self.source) is not None

    def _ways(self, variables: dict[str, object], data: PlainData, as_text: bool) -> list[dict[str, object]]:
        """Return the variables to try in order: templates expect different formats of tool calls."""
        messages, tools = messages_in(variables), variables["tools"]
        if "developer" not in self.source:
            # Templates silently skip unknown roles.
            messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        if not tools and not has_tools(messages):
            return [{**variables, "messages": messages}]
        messages = with_names_of_tools(messages)
        if as_text and not self.takes_tools:
            chats = [as_plain_chat(messages, tools, data, in_system) for in_system in (True, False)]
            return [{**variables, "messages": chat, "tools": None} for chat in chats]
        return [{**variables, "messages": chat} for chat in (with_argument_objects(messages, data), messages)]

    def _first_rendered(self, ways: list[dict[str, object]], data: PlainData) -> tuple[str, dict[str, object]]:
        """Render the first variables that the template accepts; if none, raise the first error."""
        failure: TemplateError | None = None
        for variables in ways:
            try:
                return self._rendered(variables, data.num_chars, len(messages_in(variables))), variables
            except TemplateError as error:
                failure = failure or error
        assert failure is not None, "no way was tried"
        raise failure

    def _rendered(self, variables: Mapping[str, object], num_chars: int, num_messages: int) -> str:
        template, sandbox = self._compile()
        try:
            return sandbox.render(template, variables, num_chars, num_messages)
        except Exception as error:
            raise self._failure(error) from error

    def _own_tokens(
        self, text: str, variables: Mapping[str, object], control: ControlTokens, num_chars: int
    ) -> tuple[Span, ...]:
        """Find the control tokens that come from messages, tools and documents.

        First put marks inside them: a whole control token cannot lose its mark. If that changes the text, because the
        template reads or measures them, put marks around them; then both marks must survive.
        """
        num_whole, num_messages = 0, len(messages_in(variables))
        for around in (False, True):
            marked = {name: control.marked(variables.get(name), around) for name in CONTENT_VARIABLES}
            num_whole = sum(count for _, count in marked.values())
            copies = {name: copy for name, (copy, _) in marked.items()}
            if all(copies[name] == variables.get(name) for name in CONTENT_VARIABLES):
                return ()
            try:
                bare, marks = unmarked(self._rendered({**variables, **copies}, 2 * num_chars + 64, num_messages))
            except TemplateError:
                continue
            if bare == text:
                return tuple(control.find(text, marks))
        if not num_whole:
            return ()
        raise TemplateError("template.control_tokens", origin=self.origin)

    def _until_final(self, text: str, messages: Sequence[Message]) -> str:
        """Cut a rendered chat after its last message, which the answer continues."""
        content = messages[-1].get("content")
        if isinstance(content, str) and content.strip():
            for final in (content, content.rstrip(), content.strip()):
                place = text.rfind(final)
                if place >= 0:
                    return text[: place + len(final)]
        expected = "a text that the template keeps"
        raise PromptError("template.cannot_continue", name="continue_final_message", expected=expected)

    def check(self) -> None:
        """Raise if the template cannot be compiled."""
        with self._lock:
            self._compile()

    def _compile(self) -> "tuple[jinja2.Template, ChatSandbox]":
        if self._compiled is None:
            self._compiled = self._try_to_compile()
        if isinstance(self._compiled, TemplateError):
            raise TemplateError(self._compiled.code, **self._compiled.values)
        return self._compiled

    def _try_to_compile(self) -> "tuple[jinja2.Template, ChatSandbox] | TemplateError":
        if len(self.source) > MAX_TEMPLATE_CHARS:
            reason = f"it has {len(self.source)} characters, and at most {MAX_TEMPLATE_CHARS} are read"
            return TemplateError("template.over_budget", origin=self.origin, reason=reason)
        from holdfast.text.jinja_sandbox import ChatSandbox

        sandbox = ChatSandbox()
        try:
            return sandbox.compile_template(self.source), sandbox
        except Exception as error:
            return self._failure(error)

    def _failure(self, error: Exception) -> TemplateError:
        from jinja2.exceptions import SecurityError, TemplateSyntaxError

        from holdfast.text.jinja_sandbox import BudgetError, TemplateRefusalError

        origin, reason = self.origin, plain_reason(error)
        if isinstance(error, TemplateRefusalError):
            return TemplateError("template.refused", origin=origin, reason=reason)
        if isinstance(error, SecurityError):
            return TemplateError("template.unsafe", origin=origin, reason=reason)
        if isinstance(error, BudgetError):
            return TemplateError("template.over_budget", origin=origin, reason=reason)
        if isinstance(error, TemplateSyntaxError):
            return TemplateError("template.syntax", origin=origin, line=error.lineno, reason=reason)
        if isinstance(error, RecursionError | MemoryError):
            reason = "it is nested too deeply or too large"
            return TemplateError("template.over_budget", origin=origin, reason=reason)
        return TemplateError("template.failed", origin=origin, reason=f"{type(error).__name__}: {reason}")


def plain_reason(error: Exception) -> str:
    """Return an error's message on one line, bounded and with control characters escaped."""
    text = " ".join(str(error).split())[:MAX_REASON_CHARS]
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def chat_template_from_directory(path: Path) -> ChatTemplate | None:
    """Read the template of a folder: its own file, or an entry of tokenizer_config.json; None if it has none."""
    file = path / TEMPLATE_FILE
    tokens = special_tokens_of(path).texts()
    if file.exists():
        return ChatTemplate(_utf8_text(read_small_file(file, 4 * MAX_TEMPLATE_CHARS), file.name), file.name, tokens)
    config = path / CONFIG_FILE
    value = read_json_object(config).get("chat_template") if config.exists() else None
    source = _default_of(value, CONFIG_FILE)
    return None if source is None else ChatTemplate(source, CONFIG_FILE, tokens)


def chat_template_from_gguf(metadata: Mapping[str, object], file_name: str) -> ChatTemplate | None:
    """Read the template in a GGUF file's metadata; None if it has none."""
    source = _default_of(metadata.get("tokenizer.chat_template"), file_name)
    if source is None:
        return None
    tokens = metadata.get("tokenizer.ggml.tokens")
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    texts: dict[str, str] = {}
    for name, key in ids.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and isinstance(tokens, Sequence) and 0 <= token_id < len(tokens):
            texts[name] = str(tokens[token_id])
    return ChatTemplate(source, file_name, texts)


def _default_of(value: object, file_name: str) -> str | None:
    """Return a template; among several, the one named default."""
    if value is None or isinstance(value, str):
        return value
    named = {}
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
            raise ModelFormatError("template.wrong_setting", file=file_name, value=value)
        named[entry.get("name")] = entry["template"]
    return named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)


def _utf8_text(data: bytes, file_name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ModelFormatError("template.not_utf8", file=file_name, byte=error.start) from error
