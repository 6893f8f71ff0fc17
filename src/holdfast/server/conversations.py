"""Conversation and prepare_chat: validate chats of every API and apply template, tools and grammars."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from holdfast.engine.admission import PreparedRequest, Prompt
from holdfast.errors import PromptError, QueueFullError, RequestError, TemplateError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.structured import StructuredOutputs
from holdfast.server.answers import AnswerText
from holdfast.server.errors import ApiError
from holdfast.server.fields import SamplingFields
from holdfast.server.logprobs import ChatLogprobWriter
from holdfast.server.logs import record_of
from holdfast.server.sampling import Rule, prompt_error, sampling_params
from holdfast.server.schemas import AssistantMessage, FunctionDefinition, Message, NamedFunction, NamedToolChoice
from holdfast.server.schemas import Tool as ToolBody
from holdfast.server.service import Service, service_of
from holdfast.server.streams import Answer, Counted
from holdfast.text.answer_grammar import grammar_after_thoughts, tool_call_grammar
from holdfast.text.answer_parser import AnswerFormat
from holdfast.text.reasoning import ReasoningFormat, Thoughts, choose_reasoning_parser
from holdfast.text.tokenizer import Tokenizer
from holdfast.text.tool_calls import ToolFormat
from holdfast.text.tool_formats import choose_tool_parser
from holdfast.text.tools import parse_tool_choice, parse_tools

ToolChoiceBody = str | NamedToolChoice | None
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A chat request, converted from any API."""

    messages: Sequence[Message]
    tools: Sequence[ToolBody] = ()
    tool_choice: ToolChoiceBody = None
    one_call: bool = False
    """Keep only the first tool call of an answer."""
    many_calls: bool = False
    """Allow several calls in a forced answer."""
    effort: str | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)
    adds_prompt: bool | None = None
    """add_generation_prompt; None means `not continues`."""
    continues: bool = False
    """Continue the last message as the answer."""
    rule: Rule | None = None
    """The grammar of the answer."""
    max_tokens: int | None = None
    logprobs: int | None = None
    """Number of top log-probabilities; None for none."""
    param: str = "messages"
    """The request field that prompt errors name."""

    def options(self) -> dict[str, Any]:
        """Return the keywords of the chat template."""
        return {**effort_options(self.effort), **self.template_options}


@dataclass(frozen=True, slots=True)
class Chat:
    """A prepared conversation with the parser for its answer."""

    prepared: PreparedRequest
    form: AnswerFormat
    hidden: tuple[str, ...]
    """Markers that the text keeps only for the parser."""
    one_call: bool
    tokenizer: Tokenizer
    num_top: int | None

    def parser(self) -> AnswerText:
        """Make a parser for the text of one completion."""
        return AnswerText(self.form.parser(self.prepared.prompt, self.hidden), one_call=self.one_call)

    def num_tokens(self, text: str) -> int:
        """Count the tokens of a text; estimates the generated tokens."""
        return len(self.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    def logprobs(self) -> ChatLogprobWriter | None:
        """Make the log-probability writer, or None if not requested."""
        return None if self.num_top is None else ChatLogprobWriter(self.tokenizer, self.num_top)

    def answer(self, request: Request, answer_id: str, *, counts_reasoning: bool = True) -> Answer:
        """Make the answer; without `counts_reasoning` its usage has no reasoning tokens."""
        return Answer(request, self.prepared, answer_id, Counted(num_reasoning_tokens=0 if counts_reasoning else None))


async def prepare_chat(request: Request, fields: SamplingFields, said: Conversation) -> Chat:
    """Validate a conversation completely before it is queued."""
    service = service_of(request)
    template = service.llm.chat_template
    if template is None:
        raise ApiError("http.no_chat_template")
    # Tool schemas may be megabytes: parse and compile them in a thread.
    off_loop = partial(_off_loop, bool(said.tools))
    setting = await off_loop(ToolSetting, service, template.source, said.tools, said.tool_choice)
    form = setting.form(choose_reasoning_parser(template.source, service.reasoning_parser))
    make_params = partial(
        sampling_params,
        *(service, fields),
        max_tokens=said.max_tokens,
        logprobs=said.logprobs,
        **_stops(service, form, fields),
    )
    salt = cache_salt(request, fields.cache_salt)
    try:
        prepared = await service.llm.prepare_chat(
            [plain_message(message, template.source) for message in said.messages],
            make_params(),
            cache_salt=salt,
            chat_template_kwargs=said.options(),
            tools=setting.shown(),
            add_generation_prompt=not said.continues if said.adds_prompt is None else said.adds_prompt,
            continue_final_message=said.continues,
        )
    except (PromptError, TemplateError) as error:
        raise prompt_error(error, said.param) from error
    # Only the prompt shows if the answer begins with reasoning, which no grammar constrains.
    thoughts, special = form.thoughts(prepared.prompt), form.special_tokens(service.llm.tokenizer)
    forced = await off_loop(setting.forced_rule, thoughts, special, said)
    if forced is not None:
        prepared = await _constrained(service, prepared, forced, forced.made(), make_params, salt)
    elif said.rule is not None:
        made = said.rule.made()
        after_thoughts = grammar_after_thoughts(made, thoughts, special)
        if after_thoughts is None:  # a client's grammar covers the whole answer
            form, special = AnswerFormat(None, form.calls, form.tools), {}
        prepared = await _constrained(service, prepared, said.rule, after_thoughts or made, make_params, salt)
    if (record := record_of(request)).wants_text:
        record.prompt = prepared.prompt
    prepared = replace(prepared, kept_token_ids=frozenset(special.values()))
    hidden = () if fields.skip_special_tokens is False else tuple(special)
    tokenizer = service.llm.tokenizer
    assert tokenizer is not None, "a chat was rendered without a tokenizer"
    return Chat(prepared, form, hidden, said.one_call, tokenizer, said.logprobs)


def _stops(service: Service, form: AnswerFormat, fields: SamplingFields) -> dict[str, list[int]]:
    """Add the format's stop tokens to those of the request."""
    stops = () if fields.ignore_eos else form.stop_token_ids(service.llm.tokenizer)
    return {"stop_token_ids": [*(fields.stop_token_ids or ()), *stops]} if stops else {}


async def _off_loop(is_large: bool, work: Callable[..., _Result], *given: object) -> _Result:
    """Call `work`, in a thread if its input may be large."""
    return await asyncio.get_running_loop().run_in_executor(None, work, *given) if is_large else work(*given)


async def _constrained(
    service: Service,
    prepared: PreparedRequest,
    rule: Rule,
    made: StructuredOutputs,
    make_params: Callable[..., SamplingParams],
    salt: str | None,
) -> PreparedRequest:
    """Prepare the request again with a grammar."""
    prompt: Prompt = {"prompt_token_ids": prepared.prompt_token_ids}
    if prepared.prompt is not None:
        prompt["prompt"] = prepared.prompt
    try:
        return await service.llm.prepare(prompt, make_params(structured_outputs=made), cache_salt=salt)
    except QueueFullError:
        raise
    except RequestError as error:
        raise rule.refused(error) from error


def cache_salt(request: Request, given: str | None) -> str | None:
    """Combine the salts of API key and request, so that keys never share prefix hits."""
    own = record_of(request).cache_salt
    if own is None or given is None:
        return given if own is None else own
    # A digest: every character of both counts, and the result is short.
    return hashlib.sha256(f"{own}:{given}".encode()).hexdigest()


def effort_options(effort: str | None) -> dict[str, object]:
    """Return the reasoning effort under the names that templates use."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def thinking_options(is_on: bool) -> dict[str, object]:
    """Turn thinking on or off under both names that templates use."""
    return {"enable_thinking": is_on, "thinking": is_on}


def function_tool(function: Mapping[str, Any]) -> ToolBody:
    """Convert a function to OpenAI's tool."""
    return ToolBody(type="function", function=FunctionDefinition(**function))


def named_choice(name: str) -> NamedToolChoice:
    """Return OpenAI's tool_choice for a forced function."""
    return NamedToolChoice(type="function", function=NamedFunction(name=name))


def plain_message(message: Message, template: str) -> dict[str, object]:
    """Convert a message for the template, without empty fields."""
    role: str = message.role
    if role == "developer" and "developer" not in template:
        role = "system"  # the older name
    plain: dict[str, object] = {"role": role}
    content = message.content
    if content is not None:
        parts = content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]
        plain["content"] = parts
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


class ToolSetting:
    """Tools of one request: tools for the template, the parser of calls, and a forced call."""

    def __init__(self, service: Service, template: str, tools: Sequence[ToolBody], choice: ToolChoiceBody) -> None:
        wanted = choice.model_dump() if isinstance(choice, NamedToolChoice) else choice
        param = "tools"
        try:
            self._tools = parse_tools([tool.model_dump(exclude_none=True) for tool in tools])
            param = "tool_choice"
            self._choice = parse_tool_choice(wanted, self._tools)
        except RequestError as error:
            raise prompt_error(error, param) from error
        self._form: ToolFormat | None = None
        if self._choice.mode != "none":
            self._form = choose_tool_parser(template, service.tool_parser)
            if self._form is None:
                raise ApiError("http.tools_not_supported", param="tools")

    def shown(self) -> list[dict[str, object]] | None:
        """Return the tools for the template."""
        return None if self._form is None else [tool.listed() for tool in self._tools]

    def form(self, reasoning: ReasoningFormat | None) -> AnswerFormat:
        """Return the format for parsing an answer."""
        return AnswerFormat(reasoning, self._form, self._tools)

    def forced_rule(self, thoughts: Thoughts, special: Mapping[str, int], said: Conversation) -> Rule | None:
        """Return the grammar that forces a tool call; None if none is forced."""
        if self._form is None or self._choice.mode != "required":
            return None
        if said.rule is not None:
            raise ApiError("http.tool_or_rule", param=said.rule.param, name=said.rule.param)
        is_parallel = not said.one_call and (said.many_calls or self._form.lists_calls)
        try:
            grammar = tool_call_grammar(self._form, self._tools, self._choice, is_parallel, thoughts, special)
        except RequestError as error:
            raise prompt_error(error, "tools") from error
        return Rule("tool_choice", {"grammar": grammar})
