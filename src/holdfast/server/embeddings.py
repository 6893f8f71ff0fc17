"""/v1/embeddings, /v1/rerank, /v1/score and Ollama's /api/embed: vectors of texts, and texts sorted or scored by them.

All texts of a request are checked before the first runs, and one that fails fails the request. A few of them are queued at a time.
"""

import asyncio
import base64
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.api.async_llm import MAX_AT_ONCE
from holdfast.engine.admission import PreparedRequest, Prompt
from holdfast.engine.outputs import OutputAssembler
from holdfast.engine.scoring import Scoring, paired, pooled_of
from holdfast.errors import PromptError, RequestError
from holdfast.request.outputs import RequestOutput
from holdfast.request.pooling import PoolingParams, Vector
from holdfast.server.bodies import read_model
from holdfast.server.completions import listed_prompts
from holdfast.server.conversations import cache_salt
from holdfast.server.embedding_schemas import (
    EmbeddingList,
    EmbeddingRequest,
    OllamaEmbeddingsReply,
    OllamaEmbeddingsRequest,
    OllamaEmbedReply,
    OllamaEmbedRequest,
    PooledFields,
    RerankReply,
    RerankRequest,
    ScoreList,
    ScoreRequest,
    TextDocument,
)
from holdfast.server.logs import record_of
from holdfast.server.ollama_models import check_tagged_model
from holdfast.server.ollama_schemas import OllamaErrorReply
from holdfast.server.openapi import body_of, responses
from holdfast.server.sampling import check_model, prompt_error
from holdfast.server.service import service_of
from holdfast.server.streams import Answer, Counted, gathered, new_id, while_connected

router = APIRouter(tags=["embeddings"])


@router.post(
    "/v1/embeddings",
    responses=responses(EmbeddingList, 429),
    openapi_extra=body_of(EmbeddingRequest),
    operation_id="create_embeddings",
)
async def create_embeddings(request: Request) -> Response:
    """Embed texts."""
    asked = await read_model(request, EmbeddingRequest, service_of(request).limits)
    return await while_connected(request, _embedded(request, asked))


@router.post(
    "/v1/rerank", responses=responses(RerankReply, 429), openapi_extra=body_of(RerankRequest), operation_id="rerank"
)
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(request: Request) -> Response:
    """Sort documents by how well they answer a query."""
    asked = await read_model(request, RerankRequest, service_of(request).limits)
    return await while_connected(request, _reranked(request, asked))


@router.post(
    "/v1/score", responses=responses(ScoreList, 429), openapi_extra=body_of(ScoreRequest), operation_id="score"
)
@router.post("/score", include_in_schema=False)
async def score(request: Request) -> Response:
    """Score pairs of texts."""
    asked = await read_model(request, ScoreRequest, service_of(request).limits)
    return await while_connected(request, _scored(request, asked))


@router.post(
    "/api/embed",
    responses=responses(OllamaEmbedReply, 429, error=OllamaErrorReply),
    openapi_extra=body_of(OllamaEmbedRequest),
    operation_id="ollama_embed",
)
async def ollama_embed(request: Request) -> Response:
    """Embed texts, for Ollama's clients."""
    asked = await read_model(request, OllamaEmbedRequest, service_of(request).limits)
    texts = [asked.input] if isinstance(asked.input, str) and asked.input else list(asked.input)
    params = PoolingParams(asked.dimensions or None, truncate_prompt_tokens=None if asked.truncate is False else -1)
    return await while_connected(request, _ollama_embedded(request, asked.model, texts, params))


@router.post(
    "/api/embeddings",
    responses=responses(OllamaEmbeddingsReply, 429, error=OllamaErrorReply),
    openapi_extra=body_of(OllamaEmbeddingsRequest),
    operation_id="ollama_embeddings",
)
async def ollama_embeddings(request: Request) -> Response:
    """Embed one text, in the older form."""
    asked = await read_model(request, OllamaEmbeddingsRequest, service_of(request).limits)
    texts = [asked.prompt] if asked.prompt else []
    params = PoolingParams(truncate_prompt_tokens=-1)
    return await while_connected(request, _ollama_embedded(request, asked.model, texts, params, is_old=True))


async def _embedded(request: Request, asked: EmbeddingRequest) -> Response:
    service = service_of(request)
    check_model(service, asked.model)
    params = PoolingParams(asked.dimensions, asked.normalize, asked.truncate_prompt_tokens)
    vectors, counted = await _vectors(request, asked, listed_prompts(asked.input), params, "input")
    is_coded = asked.encoding_format == "base64"
    written = await _beside(_vector_texts, vectors, is_coded)
    data = ",".join(
        f'{{"object":"embedding","index":{place},"embedding":{text}}}' for place, text in enumerate(written)
    )
    tail = json.dumps({"model": asked.model or service.name, "usage": _usage(counted)}, separators=(",", ":"))
    return Response(f'{{"object":"list","data":[{data}],{tail[1:]}', media_type="application/json")


async def _reranked(request: Request, asked: RerankRequest) -> Response:
    service = service_of(request)
    check_model(service, asked.model)
    documents = [document.text if isinstance(document, TextDocument) else document for document in asked.documents]
    scoring = _scoring(request, asked, [asked.query] * len(documents), documents, asked.instruction)
    places = {text: f"documents[{place}]" for place, text in reversed(list(enumerate(documents)))}
    scores, counted = await _scores(request, scoring, {**places, asked.query: "query"})
    best = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[: asked.top_n]
    # Cohere's second version gives no documents back, and Jina's API does.
    is_second = request.scope["path"].startswith("/v2/")
    shows = not is_second if asked.return_documents is None else asked.return_documents
    results: list[dict[str, Any]] = []
    for place in best:
        result: dict[str, Any] = {"index": place, "relevance_score": scores[place]}
        if shows:
            given = asked.documents[place]
            result["document"] = given.model_dump() if isinstance(given, TextDocument) else {"text": given}
        results.append(result)
    value = {
        "id": new_id("rerank"),
        "model": asked.model or service.name,
        "results": results,
        "usage": _usage(counted),
    }
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


async def _scored(request: Request, asked: ScoreRequest) -> Response:
    service = service_of(request)
    check_model(service, asked.model)
    try:
        first, second = paired(asked.text_1, asked.text_2)
    except RequestError as error:
        raise prompt_error(error, "text_2") from error
    scoring = _scoring(request, asked, first, second, asked.instruction)
    fields = {**dict.fromkeys(second, "text_2"), **dict.fromkeys(first, "text_1")}
    scores, counted = await _scores(request, scoring, fields)
    value = {
        "id": new_id("score"),
        "object": "list",
        "created": int(time.time()),
        "model": asked.model or service.name,
        "data": [{"index": place, "object": "score", "score": one} for place, one in enumerate(scores)],
        "usage": _usage(counted),
    }
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


async def _ollama_embedded(
    request: Request, model: str | None, texts: Sequence[str], params: PoolingParams, *, is_old: bool = False
) -> Response:
    service, started = service_of(request), time.monotonic_ns()
    check_tagged_model(service, model)
    fields, prompts = PooledFields(), list[Prompt](texts)
    vectors, counted = await _vectors(request, fields, prompts, params, "prompt" if is_old else "input")
    written = await _beside(_vector_texts, vectors, False)
    if is_old:
        body = f'{{"embedding":{written[0] if written else "[]"}}}'
        return Response(body, media_type="application/json")
    told = {
        "model": model or service.name,
        "total_duration": time.monotonic_ns() - started,
        "load_duration": 0,
        "prompt_eval_count": counted.num_prompt_tokens,
    }
    tail = json.dumps(told, separators=(",", ":"))
    return Response(f'{{"embeddings":[{",".join(written)}],{tail[1:]}', media_type="application/json")


async def _vectors(
    request: Request, asked: PooledFields, inputs: Sequence[Prompt], params: PoolingParams, field: str
) -> tuple[list[Vector], Counted]:
    """The embedding of every input; whatever is wrong with one is told before any runs."""
    llm = service_of(request).llm
    pooling = llm.pooling
    try:
        pooling.check(params)
    except RequestError as error:
        raise prompt_error(error, "dimensions" if error.asked.startswith("dimensions") else "model") from error
    salt, truncate = cache_salt(request, asked), params.truncate_prompt_tokens is not None
    prepared: list[PreparedRequest] = []
    for place, prompt in enumerate(inputs):
        name = f"{field}[{place}]" if len(inputs) > 1 else field
        try:
            prepared.append(
                await llm.prepare_pooled(prompt, cache_salt=salt, truncate=truncate, priority=asked.priority or 0)
            )
        except PromptError as error:
            raise prompt_error(error, name) from error
    outputs, counted = await _outputs(request, prepared)
    return [pooling.vector(pooled_of(output), params) for output in outputs], counted


def _scoring(
    request: Request, asked: PooledFields, first: Sequence[str], second: Sequence[str], instruction: str | None
) -> Scoring:
    try:
        return service_of(request).llm.scoring(
            first,
            second,
            instruction=instruction,
            cache_salt=cache_salt(request, asked),
            truncate=asked.truncate_prompt_tokens is not None,
            priority=asked.priority or 0,
        )
    except RequestError as error:
        raise prompt_error(error, "model") from error


async def _scores(request: Request, scoring: Scoring, fields: Mapping[str, str]) -> tuple[list[float], Counted]:
    """The score of every pair; `fields` names the field of each text."""
    llm, prepared = service_of(request).llm, list[PreparedRequest]()
    for place in range(len(scoring)):
        try:
            prepared.append(await llm.prepare_score(scoring, place))
        except PromptError as error:
            raise prompt_error(error, fields[scoring.text_of(place)]) from error
    outputs, counted = await _outputs(request, prepared)
    more = {place: again for place, one in enumerate(outputs) if (again := scoring.again(place, one)) is not None}
    later = (await _outputs(request, list(more.values())))[0] if more else []
    return scoring.scores(outputs, dict(zip(more, later, strict=True))), counted


async def _outputs(request: Request, prepared: Sequence[PreparedRequest]) -> tuple[list[RequestOutput], Counted]:
    """What all requests bring, a few of them queued at a time; when one fails, the others end."""
    service, counted, name = service_of(request), Counted(), new_id("embd")
    record = record_of(request)
    if record.wants_text and prepared:
        record.prompt = prepared[0].prompt
    room = asyncio.Semaphore(min(MAX_AT_ONCE, service.llm.max_queue))
    answers = [Answer(request, one, f"{name}-{place}", counted) for place, one in enumerate(prepared)]

    async def whole(answer: Answer) -> RequestOutput:
        assembler = OutputAssembler(answer.prepared.prompt, answer.prepared.prompt_token_ids, 1)
        async with room, aclosing(answer.deltas()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    assembler.add(delta)
        return assembler.output()

    return await gathered([whole(answer) for answer in answers]), counted


def _usage(counted: Counted) -> dict[str, int]:
    return {"prompt_tokens": counted.num_prompt_tokens, "total_tokens": counted.num_prompt_tokens}


async def _beside(write: Any, *args: object) -> list[str]:  # noqa: ANN401 a function of these
    """What a function makes of many vectors, beside the event loop: a million numbers take a while to write."""
    return await asyncio.get_running_loop().run_in_executor(None, write, *args)


def _vector_texts(vectors: Sequence[Vector], is_coded: bool) -> list[str]:
    """Each vector in JSON: nine digits bring every float32 back, or its bytes in base64."""
    if is_coded:
        return [f'"{base64.b64encode(vector_H.astype("<f4").tobytes()).decode()}"' for vector_H in vectors]
    return [f"[{','.join(['%.9g'] * len(vector_H)) % tuple(vector_H.tolist())}]" for vector_H in vectors]
