"""Conversations as the engine takes them: messages and tools for the template, how answers are split, what they are held to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from holdfast.engine.admission import PreparedRequest
from holdfast.errors import PromptError, TemplateError
from holdfast.server.chat_text import AnswerText, Parser
from holdfast.server.errors import ApiError
from holdfast.server.fields import SamplingFields
from holdfast.server.logs import record_of
from holdfast.server.sampling import prompt_error, sampling_params
from holdfast.server.schemas import AssistantMessage, Message, NamedToolChoice, TextPart, Tool
from holdfast.server.service import Service, service_of
from holdfast.text.tokenizer import Tokenizer

ToolChoice = str | NamedToolChoice | None


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that the engine can take, and how its answer is read."""

    prepared: PreparedRequest
    make_reasoning: Callable[[], Parser] | None
    make_tools: Callable[[], Parser] | None
    one_call: bool
    tokenizer: Tokenizer | None

    @property
    def splits(self) -> bool:
        """Whether an answer may hold more than content."""
        return self.splits_reasoning or self.make_tools is not None

    @property
    def splits_reasoning(self) -> bool:
        return self.make_reasoning is not None

    def parser(self) -> AnswerText:
        """For the text of one completion."""
        reasoning = self.make_reasoning() if self.make_reasoning else None
        return AnswerText(reasoning, self.make_tools() if self.make_tools else None, one_call=self.one_call)

    def num_tokens(self, text: str) -> int:
        """About how many tokens a text of the answer was."""
        return 0 if self.tokenizer is None else len(self.tokenizer.encode(text, add_special_tokens=False))


async def prepare_chat(
    request: Request,
    fields: SamplingFields,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    one_call: bool,
    effort: str | None,
    template_options: Mapping[str, object],
    flags: tuple[bool | None, bool | None],
    structure: Callable[[dict[str, Any] | None], dict[str, Any]],
    max_tokens: int | None,
    logprobs: int | None,
    param: str = "messages",
) -> Chat:
    """Everything that can be wrong with a conversation, found before it is queued. `flags`: add_generation_prompt,
    continue_final_message; `structure`: what the answer is held to, told what tool_choice forces."""
    service = service_of(request)
    template = service.llm.chat_template
    if template is None:
        raise ApiError(
            400, "a chat was asked; the model has no chat template; use /v1/completions, or start with --chat-template"
        )
    setting = ToolSetting(service, template.source, tools, tool_choice)
    params = sampling_params(
        service, fields, max_tokens=max_tokens, logprobs=logprobs, **structure(setting.forced_rule(one_call))
    )
    continues = bool(flags[1])
    values: dict[str, object] = {**effort_options(effort), **template_options}
    try:
        prepared = await service.llm.prepare_chat(
            [plain_message(message, template.source) for message in messages],
            params,
            cache_salt=cache_salt(request, fields),
            chat_template_kwargs=values,
            tools=setting.shown(),
            add_generation_prompt=not continues if flags[0] is None else flags[0],
            continue_final_message=continues,
        )
    except (PromptError, TemplateError) as error:
        raise prompt_error(error, param) from error
    record = record_of(request)
    if record.wants_text:
        record.prompt = prepared.prompt
    return Chat(
        prepared,
        reasoning_maker(service, template.source, prepared),
        setting.maker(),
        one_call,
        service.llm.tokenizer,
    )


def cache_salt(request: Request, fields: SamplingFields) -> str | None:
    """The key's own salt and the request's, so that neither can reach what another key has cached."""
    own, asked = record_of(request).cache_salt, fields.cache_salt
    return asked if own is None else own if asked is None else f"{own}:{asked}"[:256]


def effort_options(effort: str | None) -> dict[str, object]:
    """How much a model is to think, in the names that templates have for it; others do not read them."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": effort}


def plain_message(message: Message, template: str) -> dict[str, object]:
    """A message for the template, without what was not said."""
    role: str = message.role
    if role == "developer" and "developer" not in template:
        role = "system"  # the newer name of the same
    plain: dict[str, object] = {"role": role}
    content = message.content
    if content is not None:
        plain["content"] = content if isinstance(content, str) else [_plain_part(part) for part in content]
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, AssistantMessage):
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            plain["reasoning_content"] = reasoning
        if message.tool_calls:
            plain["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()}
                for call in message.tool_calls
            ]
        elif content is None:
            plain["content"] = message.refusal or ""
    elif message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _plain_part(part: TextPart) -> dict[str, object]:
    return {"type": "text", "text": part.text}


class ToolSetting:
    """Tools of one request: whether the model is told of them, how calls are read, and what is forced."""

    def __init__(self, service: Service, template: str, tools: Sequence[Tool], choice: ToolChoice) -> None:
        self._service = service
        self._template = template
        self._choice = "auto" if choice is None else choice
        self._tools = [tool.model_dump(exclude_none=True) for tool in tools]
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ApiError(400, f"two tools are called {twice}; a call could mean either; rename one", param="tools")
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise ApiError(
                400,
                f"tool_choice names {choice.function.name}; the tools are {', '.join(names[:8]) or 'none'}; name one of them",
                param="tool_choice",
            )
        if self._choice == "required" and not tools:
            raise ApiError(400, "tool_choice is required; no tools were given; add tools", param="tool_choice")

    @property
    def is_on(self) -> bool:
        return bool(self._tools) and self._choice != "none"

    def shown(self) -> list[dict[str, Any]] | None:
        """What the template is told."""
        return self._tools if self.is_on else None

    def maker(self) -> Callable[[], Parser] | None:
        """How calls are read from an answer."""
        return None

    def forced_rule(self, one_call: bool) -> dict[str, Any] | None:
        """What an answer is held to so that it calls a tool; None where it may do as it likes."""
        return None


def reasoning_maker(service: Service, template: str, prepared: PreparedRequest) -> Callable[[], Parser] | None:
    """How reasoning is split off an answer; None where the model has none."""
    return None
