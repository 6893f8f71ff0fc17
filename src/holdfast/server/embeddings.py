"""/v1/embeddings, /v1/rerank, /v1/score and Ollama's /api/embed: vectors of texts, and texts ranked or scored.

All texts of a request are validated before the first runs. If one fails, the request fails. A few are queued at a time.
"""

import asyncio
import base64
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
from holdfast.server import embedding_schemas as schemas
from holdfast.server.answers import to_json
from holdfast.server.completions import listed_prompts
from holdfast.server.conversations import cache_salt
from holdfast.server.logs import record_of
from holdfast.server.models import check_tagged_model
from holdfast.server.openapi import post
from holdfast.server.sampling import check_model, prompt_error
from holdfast.server.service import service_of
from holdfast.server.streams import Answer, Counted, gathered, new_id

router = APIRouter(tags=["embeddings"])


@post(router, "/v1/embeddings", schemas.EmbeddingRequest, "EmbeddingList", is_whole=True)
async def create_embeddings(request: Request, body: schemas.EmbeddingRequest) -> Response:
    """Embed texts."""
    service = service_of(request)
    check_model(service, body.model)
    params = PoolingParams(body.dimensions, body.normalize, body.truncate_prompt_tokens)
    vectors, counted = await _vectors(request, body, listed_prompts(body.input), params, "input")
    written = await _vector_texts(vectors, body.encoding_format == "base64")
    data = ",".join(
        f'{{"object":"embedding","index":{place},"embedding":{text}}}' for place, text in enumerate(written)
    )
    tail = to_json({"model": body.model or service.name, "usage": _usage(counted)})
    return _json(f'{{"object":"list","data":[{data}],{tail[1:]}')


@post(router, "/v1/rerank", schemas.RerankRequest, "RerankReply", is_whole=True)
async def rerank(request: Request, body: schemas.RerankRequest) -> Response:
    """Sort documents by how well they answer a query."""
    service = service_of(request)
    check_model(service, body.model)
    documents = [
        document.text if isinstance(document, schemas.TextDocument) else document for document in body.documents
    ]
    scoring = _scoring(request, body, [body.query] * len(documents), documents, body.instruction)
    places = {text: f"documents[{place}]" for place, text in reversed(list(enumerate(documents)))}
    scores, counted = await _scores(request, scoring, {**places, body.query: "query"})
    best = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[: body.top_n]
    # The second version of Cohere's API returns no documents by default, Jina's API does.
    is_second = request.scope["path"].startswith("/v2/")
    shows = not is_second if body.return_documents is None else body.return_documents
    results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores[place]} for place in best]
    for result in results if shows else ():
        given = body.documents[result["index"]]
        result["document"] = given.model_dump() if isinstance(given, schemas.TextDocument) else {"text": given}
    names = {"id": new_id("rerank"), "model": body.model or service.name}
    return _json(to_json({**names, "results": results, "usage": _usage(counted)}))


@post(router, "/v1/score", schemas.ScoreRequest, "ScoreList", is_whole=True)
async def score(request: Request, body: schemas.ScoreRequest) -> Response:
    """Score pairs of texts."""
    service = service_of(request)
    check_model(service, body.model)
    try:
        first, second = paired(body.text_1, body.text_2)
    except RequestError as error:
        raise prompt_error(error, "text_2") from error
    scoring = _scoring(request, body, first, second, body.instruction)
    fields = {**dict.fromkeys(second, "text_2"), **dict.fromkeys(first, "text_1")}
    scores, counted = await _scores(request, scoring, fields)
    value = {
        "id": new_id("score"),
        "object": "list",
        "created": int(time.time()),
        "model": body.model or service.name,
        "data": [{"index": place, "object": "score", "score": one} for place, one in enumerate(scores)],
        "usage": _usage(counted),
    }
    return _json(to_json(value))


for _path, _endpoint in {"/rerank": rerank, "/v2/rerank": rerank, "/score": score}.items():
    router.add_api_route(_path, _endpoint, methods=["POST"], include_in_schema=False)


@post(router, "/api/embed", schemas.OllamaEmbedRequest, "OllamaEmbedReply", is_whole=True)
async def ollama_embed(request: Request, body: schemas.OllamaEmbedRequest) -> Response:
    """Embed texts, for Ollama's clients."""
    texts = [body.input] if isinstance(body.input, str) and body.input else list(body.input)
    params = PoolingParams(body.dimensions or None, truncate_prompt_tokens=None if body.truncate is False else -1)
    return await _ollama_embedded(request, body.model, texts, params)


@post(router, "/api/embeddings", schemas.OllamaEmbeddingsRequest, "OllamaEmbeddingsReply", is_whole=True)
async def ollama_embeddings(request: Request, body: schemas.OllamaEmbeddingsRequest) -> Response:
    """Embed one text; the older endpoint."""
    texts = [body.prompt] if body.prompt else []
    params = PoolingParams(truncate_prompt_tokens=-1)
    return await _ollama_embedded(request, body.model, texts, params, is_old=True)


async def _ollama_embedded(
    request: Request, model: str | None, texts: Sequence[str], params: PoolingParams, *, is_old: bool = False
) -> Response:
    service, started = service_of(request), time.monotonic_ns()
    check_tagged_model(service, model)
    fields, prompts = schemas.PooledFields(), list[Prompt](texts)
    vectors, counted = await _vectors(request, fields, prompts, params, "prompt" if is_old else "input")
    written = await _vector_texts(vectors, False)
    if is_old:
        return _json(f'{{"embedding":{written[0] if written else "[]"}}}')
    facts = {
        "model": model or service.name,
        "total_duration": time.monotonic_ns() - started,
        "load_duration": 0,
        "prompt_eval_count": counted.num_prompt_tokens,
    }
    return _json(f'{{"embeddings":[{",".join(written)}],{to_json(facts)[1:]}')


async def _vectors(
    request: Request, body: schemas.PooledFields, inputs: Sequence[Prompt], params: PoolingParams, field: str
) -> tuple[list[Vector], Counted]:
    """Embed every input; all are validated before any runs."""
    llm = service_of(request).llm
    pooling = llm.pooling
    try:
        pooling.check(params)
    except RequestError as error:
        is_too_large = error.code == "request.dimensions_too_large"
        raise prompt_error(error, "dimensions" if is_too_large else "model") from error
    salt, truncate = cache_salt(request, body.cache_salt), params.truncate_prompt_tokens is not None
    prepared: list[PreparedRequest] = []
    for place, prompt in enumerate(inputs):
        name = f"{field}[{place}]" if len(inputs) > 1 else field
        try:
            prepared.append(
                await llm.prepare_pooled(prompt, cache_salt=salt, truncate=truncate, priority=body.priority or 0)
            )
        except PromptError as error:
            raise prompt_error(error, name) from error
    outputs, counted = await _outputs(request, prepared)
    return [pooling.vector(pooled_of(output), params) for output in outputs], counted


def _scoring(
    request: Request, body: schemas.PooledFields, first: Sequence[str], second: Sequence[str], instruction: str | None
) -> Scoring:
    try:
        return service_of(request).llm.scoring(
            first,
            second,
            instruction=instruction,
            cache_salt=cache_salt(request, body.cache_salt),
            truncate=body.truncate_prompt_tokens is not None,
            priority=body.priority or 0,
        )
    except RequestError as error:
        raise prompt_error(error, "model") from error


async def _scores(request: Request, scoring: Scoring, fields: Mapping[str, str]) -> tuple[list[float], Counted]:
    """Score every pair; `fields` maps each text to its request field."""
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
    """Run all requests with a bounded queue; if one fails, cancel the others."""
    service, counted, name = service_of(request), Counted(), new_id("embd")
    record = record_of(request)
    if record.wants_text and prepared:
        record.prompt = prepared[0].prompt
    slots = asyncio.Semaphore(min(MAX_AT_ONCE, service.llm.max_queue))
    answers = [Answer(request, one, f"{name}-{place}", counted) for place, one in enumerate(prepared)]

    async def whole(answer: Answer) -> RequestOutput:
        assembler = OutputAssembler(answer.prepared.prompt, answer.prepared.prompt_token_ids, 1)
        async with slots, aclosing(answer.deltas()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    assembler.add(delta)
        return assembler.output()

    return await gathered([whole(answer) for answer in answers]), counted


def _usage(counted: Counted) -> dict[str, int]:
    return {"prompt_tokens": counted.num_prompt_tokens, "total_tokens": counted.num_prompt_tokens}


def _json(body: str) -> Response:
    return Response(body, media_type="application/json")


async def _vector_texts(vectors: Sequence[Vector], is_base64: bool) -> list[str]:
    """Write each vector in a thread: as JSON with nine digits, which restore every float32, or as base64 bytes."""

    def write() -> list[str]:
        if is_base64:
            return [f'"{base64.b64encode(vector_H.astype("<f4").tobytes()).decode()}"' for vector_H in vectors]
        return [f"[{','.join(['%.9g'] * len(vector_H)) % tuple(vector_H.tolist())}]" for vector_H in vectors]

    return await asyncio.get_running_loop().run_in_executor(None, write)
