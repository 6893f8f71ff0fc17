"""Conversations as the engine takes them: messages and tools for the template, how answers are split, what they are held to."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from fastapi import Request

from holdfast.engine.admission import PreparedRequest, Prompt
from holdfast.errors import PromptError, QueueFullError, RequestError, TemplateError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.structured import StructuredOutputs
from holdfast.server.chat_text import AnswerText
from holdfast.server.errors import ApiError
from holdfast.server.fields import SamplingFields
from holdfast.server.logs import record_of
from holdfast.server.sampling import prompt_error, sampling_params
from holdfast.server.schemas import AssistantMessage, Message, NamedToolChoice, TextPart
from holdfast.server.schemas import Tool as ToolBody
from holdfast.server.service import Service, service_of
from holdfast.server.structured import Rule
from holdfast.text.answer_parser import AnswerForm
from holdfast.text.reasoning import ReasoningFormat, Thoughts, choose_reasoning_parser
from holdfast.text.thought_grammar import behind_thoughts
from holdfast.text.tokenizer import Tokenizer
from holdfast.text.tool_calls import ToolFormat
from holdfast.text.tool_formats import choose_tool_parser
from holdfast.text.tool_grammar import tool_call_grammar
from holdfast.text.tools import parse_tool_choice, parse_tools

ToolChoiceBody = str | NamedToolChoice | None
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that the engine can take, and how its answer is read."""

    prepared: PreparedRequest
    form: AnswerForm
    hidden: tuple[str, ...]
    """Markers that the text holds only because it must be read."""
    one_call: bool
    tokenizer: Tokenizer | None

    @property
    def splits(self) -> bool:
        """Whether an answer may hold more than content."""
        return self.form.splits

    @property
    def splits_reasoning(self) -> bool:
        return self.form.reasoning is not None

    def parser(self) -> AnswerText:
        """For the text of one completion."""
        return AnswerText(self.form.parser(self.prepared.prompt, self.hidden), one_call=self.one_call)

    def num_tokens(self, text: str) -> int:
        """About how many tokens a text of the answer was."""
        return 0 if self.tokenizer is None or not text else len(self.tokenizer.encode(text, add_special_tokens=False))


async def prepare_chat(
    request: Request,
    fields: SamplingFields,
    messages: Sequence[Message],
    *,
    tools: Sequence[ToolBody],
    tool_choice: ToolChoiceBody,
    one_call: bool,
    many_calls: bool = False,
    effort: str | None,
    template_options: Mapping[str, object],
    flags: tuple[bool | None, bool | None],
    rule: Rule | None,
    max_tokens: int | None,
    logprobs: int | None,
    param: str = "messages",
) -> Chat:
    """Everything that can be wrong with a conversation, found before it is queued. `flags`: add_generation_prompt,
    continue_final_message; `rule`: what the answer is held to; `many_calls`: a forced answer may make several."""
    service = service_of(request)
    template = service.llm.chat_template
    if template is None:
        raise ApiError(
            400, "a chat was asked; the model has no chat template; use /v1/completions, or start with --chat-template"
        )
    # Tools may be megabytes of schemas: read, and written down as a grammar, beside the event loop.
    beside = partial(_beside, bool(tools))
    setting = await beside(ToolSetting, service, template.source, tools, tool_choice)
    form = setting.form(choose_reasoning_parser(template.source, service.reasoning_parser))
    make_params = partial(
        sampling_params, service, fields, max_tokens=max_tokens, logprobs=logprobs, **_stops(service, form, fields)
    )
    salt, continues = cache_salt(request, fields), bool(flags[1])
    try:
        prepared = await service.llm.prepare_chat(
            [plain_message(message, template.source) for message in messages],
            make_params(),
            cache_salt=salt,
            chat_template_kwargs={**effort_options(effort), **template_options},
            tools=setting.shown(),
            add_generation_prompt=not continues if flags[0] is None else flags[0],
            continue_final_message=continues,
        )
    except (PromptError, TemplateError) as error:
        raise prompt_error(error, param) from error
    # Only the prompt says whether the answer begins with thoughts, which are free.
    thoughts, special = form.thoughts(prepared.prompt), form.special_tokens(service.llm.tokenizer)
    forced = await beside(setting.forced_rule, thoughts, special, (one_call, many_calls), rule)
    if forced is not None:
        prepared = await _held(service, prepared, forced, forced.made(), make_params, salt)
    elif rule is not None:
        made = rule.made()
        behind = behind_thoughts(made, thoughts, special)
        if behind is None:  # a grammar of the caller's own says all of the answer
            form, special = AnswerForm(None, form.calls, form.tools), {}
        prepared = await _held(service, prepared, rule, behind or made, make_params, salt)
    if (record := record_of(request)).wants_text:
        record.prompt = prepared.prompt
    prepared = replace(prepared, kept_token_ids=frozenset(special.values()))
    return Chat(prepared, form, _hidden(fields, special), one_call, service.llm.tokenizer)


def _hidden(fields: SamplingFields, special: Mapping[str, int]) -> tuple[str, ...]:
    """Markers that content does not show: none if the request wants special tokens."""
    return () if fields.skip_special_tokens is False else tuple(special)


def _stops(service: Service, form: AnswerForm, fields: SamplingFields) -> dict[str, list[int]]:
    """Tokens that end an answer of this form, beside those of the request."""
    stops = () if fields.ignore_eos else form.stop_token_ids(service.llm.tokenizer)
    return {"stop_token_ids": [*(fields.stop_token_ids or ()), *stops]} if stops else {}


async def _beside(is_large: bool, work: Callable[..., _Result], *given: object) -> _Result:
    """Some work, in a thread of its own where it may be large."""
    return await asyncio.get_running_loop().run_in_executor(None, work, *given) if is_large else work(*given)


async def _held(
    service: Service,
    prepared: PreparedRequest,
    rule: Rule,
    made: StructuredOutputs,
    make_params: Callable[..., SamplingParams],
    salt: str | None,
) -> PreparedRequest:
    """The same request, whose answer is held to a rule."""
    prompt: Prompt = {"prompt_token_ids": prepared.prompt_token_ids}
    if prepared.prompt is not None:
        prompt["prompt"] = prepared.prompt
    try:
        return await service.llm.prepare(prompt, make_params(structured_outputs=made), cache_salt=salt)
    except QueueFullError:
        raise
    except RequestError as error:
        raise rule.refused(error) from error


class Salted(Protocol):
    """A request that may say with whom it shares cached prefixes."""

    @property
    def cache_salt(self) -> str | None: ...


def cache_salt(request: Request, fields: Salted) -> str | None:
    """The key's own salt and the request's together, so that no request reaches what another key has cached."""
    own, asked = record_of(request).cache_salt, fields.cache_salt
    if own is None or asked is None:
        return asked if own is None else own
    # A digest: every character of both counts, and the result is as short as the engine wants it.
    return hashlib.sha256(f"{own}:{asked}".encode()).hexdigest()


def effort_options(effort: str | None) -> dict[str, object]:
    """How much a model is to think, in the names that templates have for it; others do not read them."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": effort}


def thinking_options(is_on: bool) -> dict[str, object]:
    """Whether a model is to think, in the two names that templates have for it."""
    return {"enable_thinking": is_on, "thinking": is_on}


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
    """Tools of one request: what the model is told of them, how calls are read, and what is forced."""

    def __init__(self, service: Service, template: str, tools: Sequence[ToolBody], choice: ToolChoiceBody) -> None:
        asked = choice.model_dump() if isinstance(choice, NamedToolChoice) else choice
        try:
            self._tools = parse_tools([tool.model_dump(exclude_none=True) for tool in tools])
        except RequestError as error:
            raise prompt_error(error, "tools") from error
        try:
            self._choice = parse_tool_choice(asked, self._tools)
        except RequestError as error:
            raise prompt_error(error, "tool_choice") from error
        self._form: ToolFormat | None = None
        if self._choice.mode != "none":
            self._form = choose_tool_parser(template, service.tool_parser)
            if self._form is None:
                raise ApiError(
                    400,
                    "tools were given; the chat template of this model does not take any; leave them out, "
                    "or start the server with --tool-parser",
                    param="tools",
                    code="tools_not_supported",
                )

    def shown(self) -> list[dict[str, object]] | None:
        """What the template is told."""
        return None if self._form is None else [tool.listed() for tool in self._tools]

    def form(self, reasoning: ReasoningFormat | None) -> AnswerForm:
        """How an answer is read."""
        return AnswerForm(reasoning, self._form, self._tools)

    def forced_rule(
        self, thoughts: Thoughts, special: Mapping[str, int], calls: tuple[bool, bool], asked: Rule | None
    ) -> Rule | None:
        """What an answer is held to so that it calls a tool; None if nothing forces it. `calls`: one_call, many_calls."""
        if self._form is None or self._choice.mode != "required":
            return None
        if asked is not None:
            raise ApiError(
                400,
                f"tool_choice and {asked.param} were asked; an answer is one or the other; leave one out",
                param=asked.param,
            )
        try:
            is_parallel = not calls[0] and (calls[1] or self._form.lists_calls)
            grammar = tool_call_grammar(self._form, self._tools, self._choice, is_parallel, thoughts, special)
        except RequestError as error:
            raise prompt_error(error, "tools") from error
        return Rule("tool_choice", {"grammar": grammar})
