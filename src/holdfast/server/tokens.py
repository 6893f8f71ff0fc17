"""/tokenize and /detokenize: text to token ids and back, in vLLM's shapes."""

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from holdfast.errors import PromptError, RequestError, TemplateError
from holdfast.server.answers import to_json
from holdfast.server.conversations import plain_message
from holdfast.server.errors import ApiError
from holdfast.server.openapi import post
from holdfast.server.sampling import check_model, prompt_error
from holdfast.server.schemas import DetokenizeRequest, TokenizeRequest
from holdfast.server.service import Service, service_of
from holdfast.text.tools import parse_tools

router = APIRouter(tags=["tokens"])


@post(router, "/tokenize", TokenizeRequest, "Tokenized", queues=False)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Tokenize a text, or a conversation as the chat template renders it."""
    service = service_of(request)
    check_model(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("http.one_text", param="prompt")
    return await asyncio.get_running_loop().run_in_executor(None, _tokenized, service, body)


def _tokenized(service: Service, body: TokenizeRequest) -> Response:
    """Tokenize in a thread, because a text may have a million tokens."""
    tokenizer = service.llm.get_tokenizer()
    if body.prompt is not None:
        tokens = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        tokens = _conversation_tokens(service, body)
    value: dict[str, Any] = {"count": len(tokens), "max_model_len": service.llm.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        value["token_strs"] = tokenizer.convert_ids_to_tokens(tokens)
    return Response(to_json(value), media_type="application/json")


def _conversation_tokens(service: Service, body: TokenizeRequest) -> list[int]:
    template = service.llm.chat_template
    source = "" if template is None else template.source
    try:
        parsed = parse_tools([tool.model_dump(exclude_none=True) for tool in body.tools or ()])
    except RequestError as error:
        raise prompt_error(error, "tools") from error
    return chat_tokens(
        service,
        [plain_message(message, source) for message in body.messages or ()],
        [tool.listed() for tool in parsed] or None,
        body.chat_template_kwargs or {},
        continues=bool(body.continue_final_message),
        adds_prompt=body.add_generation_prompt,
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
    """Tokenize a conversation of any length as the chat template renders it."""
    if service.llm.chat_template is None:
        raise ApiError("http.no_template_for_messages", param="messages")
    try:
        tokens = service.llm.get_tokenizer().apply_chat_template(
            messages,  # type: ignore[arg-type]
            tools=tools,
            tools_as_text=True,
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=continues,
            **options,
        )
    except (PromptError, TemplateError) as error:
        raise prompt_error(error, "messages") from error
    assert isinstance(tokens, list), "apply_chat_template returned no tokens"
    return tokens


@post(router, "/detokenize", DetokenizeRequest, "Detokenized", queues=False)
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Convert token ids to text, special tokens included."""
    service = service_of(request)
    check_model(service, body.model)
    tokenizer = service.llm.get_tokenizer()
    largest = max(body.tokens, default=0)
    if largest >= tokenizer.vocab_size:
        raise ApiError("http.token_unknown", param="tokens", token=largest, vocab_size=tokenizer.vocab_size)
    text = await asyncio.get_running_loop().run_in_executor(None, tokenizer.decode, body.tokens)
    return JSONResponse({"prompt": text})
