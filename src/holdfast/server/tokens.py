"""/tokenize and /detokenize: text to token ids and back, in vLLM's shapes."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from holdfast.errors import PromptError
from holdfast.server.bodies import parse, read_json
from holdfast.server.conversations import plain_message
from holdfast.server.errors import ApiError
from holdfast.server.openapi import body_of, responses
from holdfast.server.sampling import check_model
from holdfast.server.schemas import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from holdfast.server.service import Service, service_of
from holdfast.text.tools import parse_tools

router = APIRouter(tags=["tokens"])


@router.post(
    "/tokenize",
    responses=responses(Tokenized),
    openapi_extra=body_of(TokenizeRequest),
    operation_id="tokenize",
    response_model_exclude_none=True,
)
async def tokenize(request: Request) -> Tokenized:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    service = service_of(request)
    asked = parse(TokenizeRequest, await read_json(request, service.limits))
    check_model(service, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(
            400, "a text was expected; both or neither of prompt and messages came; send one", param="prompt"
        )
    return await asyncio.get_running_loop().run_in_executor(None, _tokenized, service, asked)


def _tokenized(service: Service, asked: TokenizeRequest) -> Tokenized:
    tokenizer = service.llm.get_tokenizer()
    if asked.prompt is not None:
        adds = asked.add_special_tokens is not False
        tokens = tokenizer.encode(asked.prompt, add_special_tokens=adds)
    else:
        tokens = _chat_tokens(service, asked)
    strings = tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
    return Tokenized(count=len(tokens), max_model_len=service.llm.max_model_len, tokens=tokens, token_strs=strings)


def _chat_tokens(service: Service, asked: TokenizeRequest) -> list[int]:
    template = service.llm.chat_template
    if template is None:
        raise ApiError(400, "messages were given; the model has no chat template; send prompt", param="messages")
    continues = bool(asked.continue_final_message)
    adds = not continues if asked.add_generation_prompt is None else asked.add_generation_prompt
    tools = [tool.listed() for tool in parse_tools([tool.model_dump(exclude_none=True) for tool in asked.tools or ()])]
    options: dict[str, Any] = dict(asked.chat_template_kwargs or {})
    messages = [plain_message(message, template.source) for message in asked.messages or ()]
    tokens = service.llm.get_tokenizer().apply_chat_template(
        messages,  # type: ignore[arg-type]
        tools=tools or None,
        tools_in_words=True,
        add_generation_prompt=adds,
        continue_final_message=continues,
        **options,
    )
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
    asked = parse(DetokenizeRequest, await read_json(request, service.limits))
    check_model(service, asked.model)
    tokenizer = service.llm.get_tokenizer()
    unknown = next((token for token in asked.tokens if token >= tokenizer.vocab_size), None)
    if unknown is not None:
        raise PromptError(
            f"token id {unknown} was given", f"the tokenizer has {tokenizer.vocab_size} tokens", "use smaller ids"
        )
    decode = asyncio.get_running_loop().run_in_executor(None, tokenizer.decode, asked.tokens)
    return Detokenized(prompt=await decode)
