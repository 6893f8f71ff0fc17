"""ChatTemplate: messages and tools to a prompt, by the Jinja template of a model; no torch."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import ModelFormatError, PromptError, TemplateError, shown
from holdfast.loading.sources.files import read_json_object, read_small_file
from holdfast.text.chat_messages import PlainData, plain_messages
from holdfast.text.control_tokens import ControlTokens, Span, unmarked
from holdfast.text.tokenizer import CONFIG_FILE, special_tokens_of
from holdfast.text.tool_messages import as_plain_chat, has_tools, with_argument_objects, with_names_of_tools

if TYPE_CHECKING:
    import jinja2

    from holdfast.text.jinja_sandbox import ChatSandbox

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_CHARS = 128 * 2**10
MAX_REASON_CHARS = 300


CONTENT_VARIABLES = ("messages", "tools", "documents")
"""What others have written: control tokens in these are text."""


class RenderedChat(NamedTuple):
    """A chat as its template writes it."""

    text: str
    own: tuple[Span, ...]
    """Control tokens in it that the messages brought along, and that are text."""


class ChatTemplate:
    """The template of one model. It is compiled at its first use; a broken one fails chats, not the model.

    Whatever it does, rendering ends with a text or with TemplateError, soon and in bounded memory.
    """

    def __init__(
        self,
        source: str,
        origin: str,
        special_tokens: Mapping[str, str],
    ) -> None:
        self.source = source
        self.origin = origin
        """The file it came from."""
        self.special_tokens = dict(special_tokens)
        """bos_token, eos_token and the like, which templates may write."""
        self.control_texts: tuple[str, ...] = ()
        """Tokens that are control tokens in messages, whether or not the tokenizer flags them as special."""
        self._compiled: tuple[jinja2.Template, ChatSandbox] | TemplateError | None = None
        self._lock = Lock()

    def render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True, **extra: object
    ) -> str:
        """The prompt for these messages; `extra` are further variables that the template knows."""
        return self.render_chat(messages, None, add_generation_prompt, **extra).text  # type: ignore[arg-type]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        control: ControlTokens | None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools_in_words: bool = False,
        **extra: object,
    ) -> RenderedChat:
        """The same, and which control tokens in it are the messages' own; without `control` none is looked for.

        A template that knows no tools passes over them; with `tools_in_words` it is given them in the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise PromptError(
                "continue_final_message was asked beside add_generation_prompt",
                "the first goes on with the last message, the second begins a new one",
                "pass add_generation_prompt=False",
            )
        data = PlainData()
        variables: dict[str, object] = {
            "tools": None,
            "documents": None,
            **self.special_tokens,
            **{name: data.copy(value, name) for name, value in extra.items()},
            "messages": plain_messages(messages, data),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        # One rendering at a time: the budget belongs to the sandbox, and threads would not be faster.
        with self._lock:
            text, variables = self._first_rendered(self._ways(variables, data, tools_in_words), data)
            own = () if control is None else self._own_tokens(text, variables, control, data.num_chars)
        if continue_final_message:
            text = self._until_final(text, variables["messages"])
            own = tuple((start, end) for start, end in own if end <= len(text))
        return RenderedChat(text, own)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether it lists tools by itself."""
        return re.search(r"\btools\b", self.source) is not None

    def _ways(self, variables: dict[str, object], data: PlainData, in_words: bool) -> list[dict[str, object]]:
        """What the template is given, in the order to try: templates differ in what they take calls of tools to be."""
        messages, tools = variables["messages"], variables["tools"]
        assert isinstance(messages, list), f"{messages=} are no plain messages"
        if "developer" not in self.source:
            # Templates pass over roles that they do not know, without a word.
            messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        if not tools and not has_tools(messages):
            return [{**variables, "messages": messages}]
        messages = with_names_of_tools(messages)
        if in_words and not self.takes_tools:
            chats = [as_plain_chat(messages, tools, data, in_system) for in_system in (True, False)]
            return [{**variables, "messages": chat, "tools": None} for chat in chats]
        return [{**variables, "messages": chat} for chat in (with_argument_objects(messages, data), messages)]

    def _first_rendered(self, ways: list[dict[str, object]], data: PlainData) -> tuple[str, dict[str, object]]:
        """What comes of the first way that the template takes; the error of the first where it takes none."""
        failure: TemplateError | None = None
        for variables in ways:
            messages = variables["messages"]
            assert isinstance(messages, list), f"{messages=} are no plain messages"
            try:
                return self._rendered(variables, data.num_chars, len(messages)), variables
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
        """Control tokens of the text that messages, tools and documents brought along.

        Marks inside of them come first: a whole control token cannot lose its mark. A template that looks for one, or
        measures, makes another text of that; marks around them leave them whole, and both must be there.
        """
        num_whole = 0
        messages = variables["messages"]
        assert isinstance(messages, list), f"{messages=} are no plain messages"
        for around in (False, True):
            marked = {name: control.marked(variables.get(name), around) for name in CONTENT_VARIABLES}
            num_whole = sum(count for _, count in marked.values())
            copies = {name: copy for name, (copy, _) in marked.items()}
            if all(copies[name] == variables.get(name) for name in CONTENT_VARIABLES):
                return ()
            try:
                bare, marks = unmarked(self._rendered({**variables, **copies}, 2 * num_chars + 64, len(messages)))
            except TemplateError:
                continue
            if bare == text:
                return tuple(control.find(text, marks))
        if not num_whole:
            return ()
        raise self._error(
            "messages hold control tokens, and it looks into them, so that they cannot be told from its own",
            "remove them, or pass allow_special_tokens=True",
        )

    def _until_final(self, text: str, messages: object) -> str:
        """A rendered chat up to the end of its last message, which is to go on."""
        assert isinstance(messages, list), f"{messages=} are no plain messages"
        content = messages[-1].get("content")
        if isinstance(content, str) and content.strip():
            for final in (content, content.rstrip(), content.strip()):
                place = text.rfind(final)
                if place >= 0:
                    return text[: place + len(final)]
        raise PromptError(
            "continue_final_message was asked",
            "the last message has no text, or the template changes it",
            "give the beginning of the answer as the content of the last message",
        )

    def check(self) -> None:
        """Raise now if the template cannot even be compiled."""
        with self._lock:
            self._compile()

    def _compile(self) -> "tuple[jinja2.Template, ChatSandbox]":
        if self._compiled is None:
            self._compiled = self._try_to_compile()
        if isinstance(self._compiled, TemplateError):
            raise TemplateError(*self._compiled.args)
        return self._compiled

    def _try_to_compile(self) -> "tuple[jinja2.Template, ChatSandbox] | TemplateError":
        if len(self.source) > MAX_TEMPLATE_CHARS:
            return self._error(
                f"it has {len(self.source)} characters, and at most {MAX_TEMPLATE_CHARS} are read",
                "pass a shorter chat_template",
            )
        from holdfast.text.jinja_sandbox import ChatSandbox

        sandbox = ChatSandbox()
        try:
            return sandbox.compile_template(self.source), sandbox
        except Exception as error:
            return self._failure(error)

    def _failure(self, error: Exception) -> TemplateError:
        from jinja2.exceptions import SecurityError, TemplateSyntaxError

        from holdfast.text.jinja_sandbox import BudgetError, TemplateRefusalError

        reason = plain_reason(error)
        if isinstance(error, TemplateRefusalError):
            return self._error(f"it refuses these messages: {reason}", "change the messages")
        if isinstance(error, SecurityError):
            return self._error(f"it leaves its sandbox: {reason}", "do not trust this model; pass a chat_template")
        if isinstance(error, BudgetError):
            return self._error(reason, "pass a simpler chat_template")
        if isinstance(error, TemplateSyntaxError):
            return self._error(f"line {error.lineno} is no Jinja: {reason}", "pass a corrected chat_template")
        if isinstance(error, RecursionError | MemoryError):
            return self._error("it is nested too deeply or too large", "pass a simpler chat_template")
        return self._error(
            f"it fails with {type(error).__name__}: {reason}", "change the messages, or pass another chat_template"
        )

    def _error(self, has: str, do: str) -> TemplateError:
        return TemplateError(f"the chat template of {self.origin} was asked for a prompt", has, do)


def plain_reason(error: Exception) -> str:
    """An error's own words on one line, bounded; what a terminal would obey is shown as a code instead."""
    words = " ".join(str(error).split())[:MAX_REASON_CHARS]
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in words)


def chat_template_from_directory(path: Path) -> ChatTemplate | None:
    """The template of a folder: a file of its own, or an entry of tokenizer_config.json; None when it has none."""
    file = path / TEMPLATE_FILE
    tokens = special_tokens_of(path).texts()
    if file.exists():
        return ChatTemplate(_utf8_text(read_small_file(file, 4 * MAX_TEMPLATE_CHARS), file.name), file.name, tokens)
    config = path / CONFIG_FILE
    value = read_json_object(config).get("chat_template") if config.exists() else None
    source = _default_of(value, CONFIG_FILE)
    return None if source is None else ChatTemplate(source, CONFIG_FILE, tokens)


def chat_template_from_gguf(metadata: Mapping[str, object], file_name: str) -> ChatTemplate | None:
    """The template in a GGUF file's metadata; None when there is none."""
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
    """A template as it is, or the one called default of several."""
    if value is None or isinstance(value, str):
        return value
    named = {}
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
            raise ModelFormatError(
                f"{file_name} says chat_template = {shown(value)}",
                "a template or a list of named ones is needed there",
                "check it",
            )
        named[entry.get("name")] = entry["template"]
    return named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)


def _utf8_text(data: bytes, file_name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ModelFormatError(
            f"{file_name} is not UTF-8 at byte {error.start}", "templates are UTF-8", "download the model again"
        ) from error
