"""DeepSeekEncoder: chats of DeepSeek V3.2 and V4, which ship an encoder instead of a Jinja template; no torch.

Every string that it writes is in deepseek_encodings.json. The two versions differ in these rules:

              V3.2                                       V4
    results   a block of their own, one for each call    user turns; user texts beside them join the turn
    opening   after every user turn and result block     only before an answer
    thoughts  those after the last user turn             all of them, if the chat declares tools
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from holdfast.errors import PromptError
from holdfast.text.chat_messages import PlainData, bad_message
from holdfast.text.chat_template import ChatTemplate, messages_in
from holdfast.text.tool_messages import Message, calls_of, function_of, with_argument_objects

DATA_FILE = "deepseek_encodings.json"
V32, V4 = "deepseek_v32", "deepseek_v4"
ARCHITECTURES = {"DeepseekV32ForCausalLM": V32, "DeepseekV4ForCausalLM": V4}
EFFORT_NAMES = {"minimal": "low", "low": "low", "medium": "low", "high": "high", "xhigh": "high", "max": "max"}
"""OpenAI's effort names, mapped to the encoder's."""
NO_EFFORT = "none"
DEFAULT_EFFORT = "high"
ACTION = "action"
"""The one task whose token follows the opening of an answer instead of replacing it."""
_NO_JINJA = "{{ raise_exception('this text lists the strings of an encoder; leave chat_template out') }}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The strings of one version, with placeholders in braces."""

    title: str
    roles: Sequence[str]
    control_tokens: Sequence[str]
    begin: str
    end: str
    thinking: str
    answering: str
    efforts: Mapping[str, str]
    user: str
    developer: str
    tools: str
    response_format: str
    calls: str
    call: str
    argument: str
    result: str
    between_blocks: str
    openings: Mapping[str, str]
    tasks: Mapping[str, str]
    results: str = ""
    latest_reminder: str = ""

    def texts(self) -> list[str]:
        """Return every string, to detect the format of calls and thoughts."""
        values = (getattr(self, name) for name in self.__slots__)
        return [text for value in values for text in _leaves(value)]


def _leaves(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    assert isinstance(value, Mapping | list), f"{value=} is no part of an encoding"
    return [str(text) for text in (value.values() if isinstance(value, Mapping) else value)]


@cache
def encodings() -> dict[str, Encoding]:
    """Read both versions by name."""
    data = json.loads((files("holdfast.text") / DATA_FILE).read_text(encoding="utf-8"))
    return {name: Encoding(**strings) for name, strings in data["versions"].items()}


@dataclass(frozen=True, slots=True)
class Mode:
    """Options of one rendering."""

    thinks: bool
    effort: str
    """The text before the first message."""
    drops: bool
    """True to drop old thoughts if the chat declares no tools."""
    opens: bool
    """True if the prompt ends with the opening of an answer."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Messages that are rendered as one turn."""

    role: str
    place: int
    messages: list[Message]

    @property
    def task(self) -> object:
        return self.messages[0].get("task")


class DeepSeekEncoder(ChatTemplate):
    """Like ChatTemplate, without Jinja: same methods, control-token handling and errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.encoding = encodings()[name]
        super().__init__("\n".join((_NO_JINJA, *self.encoding.texts())), f"the encoder of {self.encoding.title}", {})
        self.control_texts = tuple(self.encoding.control_tokens)

    def check(self) -> None:
        """Do nothing: there is no Jinja to compile."""

    def _ways(self, variables: dict[str, object], data: PlainData, as_text: bool) -> list[dict[str, object]]:
        messages = messages_in(variables)
        self._check_roles(messages)
        return [{**variables, "messages": with_argument_objects(messages, data)}]

    def _rendered(self, variables: Mapping[str, object], num_chars: int, num_messages: int) -> str:
        messages = messages_in(variables)
        if variables.get("documents"):
            raise PromptError("template.no_documents", name="documents", origin=self.origin)
        tools = functions(variables.get("tools"), "tools")
        return ChatWriter(self, self._mode(variables), self._turns(messages), tools).text()

    def _until_final(self, text: str, messages: Sequence[Message]) -> str:
        final = messages[-1]
        if final["role"] != "assistant" or not final.get("content") or calls_of(final):
            expected = "an assistant message with text and without tool_calls"
            raise PromptError("template.cannot_continue", name="continue_final_message", expected=expected)
        return text.removesuffix(self.encoding.end)

    def _check_roles(self, messages: Sequence[Message]) -> None:
        for place, message in enumerate(messages):
            if message["role"] not in self.encoding.roles:
                raise _not_one_of(f"messages[{place}]['role']", message["role"], self.encoding.roles)

    def _turns(self, messages: Sequence[Message]) -> list[Turn]:
        """Join tool results into one turn; V4 also joins user texts to it."""
        joined = {"tool": "tool"} if self.name == V32 else {"tool": "user", "user": "user"}
        turns: list[Turn] = []
        for place, message in enumerate(messages):
            role = str(message["role"])
            last = turns[-1] if turns else None
            if last is None or joined.get(role) != last.role or (role == "user" and last.task is not None):
                turns.append(Turn(joined.get(role, role), place, [message]))
                continue
            if message.get("task") is not None:
                raise PromptError("template.late_task", name=f"messages[{place}]")
            last.messages.append(message)
        return turns

    def _mode(self, variables: Mapping[str, object]) -> Mode:
        given = {name: flag for name in ("thinking", "enable_thinking") if (flag := _flag(variables, name)) is not None}
        mode = variables.get("thinking_mode")
        if mode not in (None, "chat", "thinking"):
            raise _not_one_of("thinking_mode", mode, ("chat", "thinking"))
        if mode is not None:
            given["thinking_mode"] = mode == "thinking"
        if len(set(given.values())) > 1:
            options = " and ".join(f"{name}={variables[name]!r}" for name in given)
            raise PromptError("template.mixed_thinking", options=options)
        thinks = next(iter(given.values()), self.name == V4)
        effort = variables.get("reasoning_effort")
        if effort is None:
            effort = DEFAULT_EFFORT
        if not isinstance(effort, str) or effort not in (NO_EFFORT, *EFFORT_NAMES):
            raise _not_one_of("reasoning_effort", effort, (NO_EFFORT, *EFFORT_NAMES))
        text = self.encoding.efforts[EFFORT_NAMES.get(effort, DEFAULT_EFFORT)]
        drops = _flag(variables, "drop_thinking") is not False
        return Mode(thinks and effort != NO_EFFORT, text, drops, bool(variables["add_generation_prompt"]))


class ChatWriter:
    """Writes one chat."""

    def __init__(self, encoder: DeepSeekEncoder, mode: Mode, turns: list[Turn], tools: list[Message]) -> None:
        self._is_v4 = encoder.name == V4
        self._strings = encoder.encoding
        self._origin = encoder.origin
        self._mode = mode
        self._turns = turns
        self._tools = tools
        self._order: dict[str, int] = {}
        """Order of the ids of the last written calls."""
        users = [index for index, turn in enumerate(turns) if turn.role in ("user", "developer")]
        self._last_user = users[-1] if users else -1
        declares = bool(tools) or any(message.get("tools") for turn in turns for message in turn.messages)
        self._keeps_thoughts = self._is_v4 and (declares or not mode.drops)

    def text(self) -> str:
        """Return the whole prompt."""
        pieces = [self._strings.begin, self._mode.effort if self._mode.thinks else ""]
        if self._turns[0].role != "system":
            pieces.append(self._declared(self._tools))
        for index, turn in enumerate(self._turns):
            pieces += (self._turn(index, turn), self._opening(index, turn))
        return "".join(pieces)

    def _turn(self, index: int, turn: Turn) -> str:
        message = turn.messages[0]
        if turn.role == "system":
            extra = self._tools if index == 0 else []
            return f"{message.get('content') or ''}{self._declared(extra, message, turn.place)}{self._form(message)}"
        if turn.role == "developer":
            return self._developer(message, turn.place)
        if turn.role == "assistant":
            return self._answer(index, message, turn.place)
        if turn.role == "latest_reminder":
            return self._strings.latest_reminder.format(content=message["content"])
        are_known = all(str(one.get("tool_call_id")) in self._order for one in turn.messages)
        order = self._order if self._is_v4 or are_known else {}
        blocks = [self._block(one) for one in _in_call_order(turn.messages, order)]
        whole = self._strings.between_blocks.join(blocks)
        if turn.role == "user":
            return self._strings.user.format(content=whole)
        self._check_results(index, turn)
        return self._strings.results.format(results=whole)

    def _block(self, message: Message) -> str:
        content = message.get("content") or ""
        return self._strings.result.format(content=content) if message["role"] == "tool" else str(content)

    def _developer(self, message: Message, place: int) -> str:
        if not message["content"]:
            raise PromptError("value.empty", name=f"messages[{place}]['content']")
        tools, form = self._declared([], message, place), self._form(message)
        return self._strings.developer.format(content=message["content"], tools=tools, response_format=form)

    def _answer(self, index: int, message: Message, place: int) -> str:
        reasoning = message.get("reasoning_content") or ""
        if not isinstance(reasoning, str):
            raise PromptError("value.not_string", name=f"messages[{place}]['reasoning_content']", value=reasoning)
        made = calls_of(message)
        calls = [self._call(call, f"messages[{place}]['tool_calls'][{n}]") for n, call in enumerate(made)]
        if made:
            ids = [call.get("id") or function_of(call).get("id") for call in made]
            self._order = {call_id: n for n, call_id in enumerate(ids) if isinstance(call_id, str)}
        thoughts = ""
        follows_task = self._is_v4 and index > 0 and self._turns[index - 1].task is not None
        is_recent = self._keeps_thoughts or index > self._last_user
        if self._mode.thinks and is_recent and not follows_task:
            if not (reasoning or calls or self._is_v4):
                raise PromptError("template.no_reasoning", name=f"messages[{place}]", origin=self._origin)
            thoughts = f"{reasoning}{self._strings.answering}"
        written = self._strings.calls.format(calls="\n".join(calls)) if calls else ""
        return f"{thoughts}{message.get('content') or ''}{written}{self._strings.end}"

    def _call(self, call: Message, name: str) -> str:
        function = function_of(call)
        arguments = function.get("arguments", {})
        if not isinstance(arguments, dict):
            raise bad_message(f"{name}['function']['arguments']", "a JSON object, or its text", arguments)
        written = [
            self._strings.argument.format(
                name=key,
                is_string="true" if isinstance(value, str) else "false",
                value=value if isinstance(value, str) else _json(value),
            )
            for key, value in arguments.items()
        ]
        return self._strings.call.format(name=function["name"], arguments="\n".join(written))

    def _declared(self, extra: list[Message], message: Message | None = None, place: int = 0) -> str:
        """List the tools of a message and of the request; empty without any."""
        own = functions(message.get("tools"), f"messages[{place}]['tools']") if message else []
        schemas = "\n".join(map(_json, [*own, *extra]))
        return self._strings.tools.format(schemas=schemas) if schemas else ""

    def _form(self, message: Message) -> str:
        form = message.get("response_format")
        return self._strings.response_format.format(schema=_json(form)) if form else ""

    def _opening(self, index: int, turn: Turn) -> str:
        is_last = index + 1 == len(self._turns)
        if is_last and not self._mode.opens:
            return ""
        if not is_last and self._is_v4 and self._turns[index + 1].role not in ("assistant", "latest_reminder"):
            return ""
        if self._is_v4 and turn.task is not None:
            return self._task_opening(turn)
        if not is_last and turn.role not in ("user", "developer", "tool"):
            return ""
        start = self._strings.openings.get(turn.role, self._strings.openings["assistant"])
        return start + self._mark(self._keeps_thoughts or index >= self._last_user)

    def _task_opening(self, turn: Turn) -> str:
        if not isinstance(turn.task, str) or turn.task not in self._strings.tasks:
            raise _not_one_of(f"messages[{turn.place}]['task']", turn.task, tuple(self._strings.tasks))
        token = self._strings.tasks[turn.task]
        return f"{self._strings.openings['assistant']}{self._mark(True)}{token}" if turn.task == ACTION else token

    def _mark(self, is_recent: bool) -> str:
        return self._strings.thinking if self._mode.thinks and is_recent else self._strings.answering

    def _check_results(self, index: int, turn: Turn) -> None:
        before = self._turns[index - 1] if index else None
        calls = calls_of(before.messages[0]) if before is not None and before.role == "assistant" else []
        if len(calls) != len(turn.messages):
            name, count = f"messages[{turn.place}]", len(turn.messages)
            raise PromptError("template.results_mismatch", name=name, count=count, calls=len(calls))


def encoder_of(architecture: str) -> DeepSeekEncoder | None:
    """Return the encoder of an architecture, for a model without a template; None if it has none."""
    name = ARCHITECTURES.get(architecture)
    return None if name is None else DeepSeekEncoder(name)


def functions(tools: object, name: str) -> list[Message]:
    """Return the function of each tool in OpenAI's format."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad_message(name, "a list of tools", tools)
    found: list[Message] = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_message(f"{name}[{place}]", "a tool that has a function with a name", tool)
        found.append(function)
    return found


def _in_call_order(messages: list[Message], order: Mapping[str, int]) -> list[Message]:
    """Sort tool results, within their positions, by call; an id without a call counts as the first."""
    results = [message for message in messages if message["role"] == "tool"]
    results.sort(key=lambda result: order.get(str(result.get("tool_call_id")), 0))
    waiting = iter(results)
    return [next(waiting) if message["role"] == "tool" else message for message in messages]


def _flag(variables: Mapping[str, object], name: str) -> bool | None:
    value = variables.get(name)
    if value is not None and not isinstance(value, bool):
        raise PromptError("value.not_bool", name=name, value=value)
    return value


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _not_one_of(name: str, value: object, accepted: Sequence[str]) -> PromptError:
    return PromptError("value.not_one_of", name=name, accepted=accepted, value=value)
