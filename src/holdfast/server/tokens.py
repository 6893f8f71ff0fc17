"""/tokenize and /detokenize: text to token ids and back, in vLLM's shapes."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.errors import PromptError, RequestError, TemplateError
from holdfast.server.bodies import read_model
from holdfast.server.conversations import plain_message
from holdfast.server.errors import ApiError
from holdfast.server.openapi import body_of, responses
from holdfast.server.sampling import check_model, prompt_error
from holdfast.server.schemas import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from holdfast.server.service import Service, service_of
from holdfast.text.tools import parse_tools

router = APIRouter(tags=["tokens"])


@router.post(
    "/tokenize",
    responses=responses(Tokenized),
    openapi_extra=body_of(TokenizeRequest),
    operation_id="tokenize",
)
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    service = service_of(request)
    asked = await read_model(request, TokenizeRequest, service.limits)
    check_model(service, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(
            400, "a text was expected; both or neither of prompt and messages came; send one", param="prompt"
        )
    return await asyncio.get_running_loop().run_in_executor(None, _tokenized, service, asked)


def _tokenized(service: Service, asked: TokenizeRequest) -> Response:
    """The answer as bytes, made beside the event loop: a text may have a million tokens."""
    tokenizer = service.llm.get_tokenizer()
    if asked.prompt is not None:
        adds = asked.add_special_tokens is not False
        tokens = tokenizer.encode(asked.prompt, add_special_tokens=adds)
    else:
        tokens = _asked_chat(service, asked)
    strings = tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
    value: dict[str, Any] = {"count": len(tokens), "max_model_len": service.llm.max_model_len, "tokens": tokens}
    if strings is not None:
        value["token_strs"] = strings
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


def _asked_chat(service: Service, asked: TokenizeRequest) -> list[int]:
    template = service.llm.chat_template
    source = "" if template is None else template.source
    try:
        parsed = parse_tools([tool.model_dump(exclude_none=True) for tool in asked.tools or ()])
    except RequestError as error:
        raise prompt_error(error, "tools") from error
    return chat_tokens(
        service,
        [plain_message(message, source) for message in asked.messages or ()],
        [tool.listed() for tool in parsed] or None,
        asked.chat_template_kwargs or {},
        continues=bool(asked.continue_final_message),
        adds_prompt=asked.add_generation_prompt,
    )


def chat_tokens(
    service: Service,
    messages: list[dict[str, object]],
    tools: list[dict[str, object]] | None,
    options: Mapping[str, Any],
    *,
    continues: bool,
    adds_prompt: bool | None = None,
) -> list[int]:
    """Token ids of a conversation as the chat template writes it, of any length."""
    if service.llm.chat_template is None:
        raise ApiError(400, "messages were given; the model has no chat template; send prompt", param="messages")
    try:
        tokens = service.llm.get_tokenizer().apply_chat_template(
            messages,  # type: ignore[arg-type]
            tools=tools,
            tools_in_words=True,
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=continues,
            **options,
        )
    except (PromptError, TemplateError) as error:
        raise prompt_error(error, "messages") from error
    assert isinstance(tokens, list), "tokens were asked of a template"
    return tokens


@router.post(
    "/detokenize",
    responses=responses(Detokenized),
    openapi_extra=body_of(DetokenizeRequest),
    operation_id="detokenize",
)
async def detokenize(request: Request) -> Detokenized:
    """The text of token ids, special tokens included."""
    service = service_of(request)
    asked = await read_model(request, DetokenizeRequest, service.limits)
    check_model(service, asked.model)
    tokenizer = service.llm.get_tokenizer()
    largest = max(asked.tokens, default=0)
    if largest >= tokenizer.vocab_size:
        fault = PromptError(
            f"token id {largest} was given", f"the tokenizer has {tokenizer.vocab_size} tokens", "use smaller ids"
        )
        raise prompt_error(fault, "tokens")
    decode = asyncio.get_running_loop().run_in_executor(None, tokenizer.decode, asked.tokens)
    return Detokenized(prompt=await decode)
