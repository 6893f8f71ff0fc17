"""How a server is: /health, /ready, /version, /metrics, /memory and its stream; cheap, and never waiting for the engine; no torch.

/health   200 while the core gives signs of life and its step is not older than any step should be, else 503
/ready    200 while it is healthy and takes requests, else 503
/memory   who holds which bytes and pages, at most 0.2 s old or as old as the step in progress
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from holdfast import __version__
from holdfast.engine.memory_map import MemoryMap, RequestPages
from holdfast.errors import EngineDeadError
from holdfast.memory.planner import KV_OWNER
from holdfast.server.errors import RATE_LIMITED, UNAVAILABLE, ApiError
from holdfast.server.metrics import CONTENT_TYPE, resident_bytes
from holdfast.server.service import Service, service_of

router = APIRouter(tags=["status"])
STREAM_SECONDS: Final = 0.2
"""Between two events of /memory/stream, at the least ..."""
IDLE_SECONDS: Final = 1.0
"""... and while nothing happens, which shows that the line is whole."""
METRICS_WAIT_SECONDS: Final = 0.1
MAX_REQUESTS_SHOWN: Final = 256
_EVENTS: Final = {"text/event-stream": {"schema": {"type": "string"}}}


def trouble(service: Service) -> str | None:
    """What is wrong with the engine, in words; None where it is well. Never waits."""
    limits = service.limits
    try:
        health = service.llm.health()
    except EngineDeadError:
        return "the engine was shut down"
    if not health.is_alive or service.state == "dead":
        return "the engine has stopped"
    if health.core_silence_seconds >= limits.silence_seconds:
        return f"the core has given no sign of life for {health.core_silence_seconds:.1f} seconds"
    seconds = max(health.seconds_in_step, health.seconds_since_progress)
    if seconds >= limits.step_seconds:
        return f"the step in progress has run for {seconds:.0f} seconds; {limits.step_seconds:g} are allowed"
    return None


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Whether the engine lives."""
    words = trouble(service_of(request))
    if words is not None:
        raise ApiError(503, f"the server's health was asked; {words}", UNAVAILABLE, code="unhealthy")
    return JSONResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Whether requests are taken."""
    service = service_of(request)
    words = trouble(service)
    if words is None and service.state == "draining":
        words = "it is ending and takes no new requests"
    if words is not None:
        raise ApiError(503, f"it was asked whether the server is ready; {words}", UNAVAILABLE, code="not_ready")
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> JSONResponse:
    """Which release this is."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Everything that is counted, for Prometheus."""
    service = service_of(request)
    return Response(service.metrics.text(await _map(service, METRICS_WAIT_SECONDS)), media_type=CONTENT_TYPE)


@router.get("/memory")
async def memory(request: Request) -> JSONResponse:
    """Who holds which bytes and pages."""
    service = service_of(request)
    return JSONResponse(_facts(service) | _map_facts(service, await _map(service)))


@router.get("/memory/stream", response_class=StreamingResponse, responses={200: {"content": _EVENTS}})
async def memory_stream(request: Request) -> StreamingResponse:
    """The same again and again, as server-sent events; later ones leave out what does not change."""
    service = service_of(request)
    most = service.limits.max_listeners
    if service.num_listeners >= most:
        raise ApiError(
            429,
            f"the stream of the memory map was asked; {most} listen already; ask /memory from time to time",
            RATE_LIMITED,
            code="too_many_listeners",
            headers={"Retry-After": "5"},
        )
    return StreamingResponse(_events(service), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(service: Service) -> AsyncIterator[bytes]:
    """Until the listener has gone, or the server ends."""
    service.num_listeners += 1
    try:
        facts, told, told_at = _facts(service), None, 0.0
        while True:
            seen, now = await _map(service), time.monotonic()
            changes = _map_facts(service, seen)
            mark = (seen.num_steps, seen.num_free, len(seen.requests), service.state) if seen is not None else None
            is_moving = mark != told or bool(seen is not None and seen.requests)
            if is_moving or now - told_at >= IDLE_SECONDS:
                told, told_at = mark, now
                yield b"data: " + json.dumps(facts | changes, separators=(",", ":")).encode() + b"\n\n"
                facts = {}
            if service.state != "ready" or trouble(service) == "the engine has stopped":
                return
            await asyncio.sleep(STREAM_SECONDS)
    finally:
        service.num_listeners -= 1


async def _map(service: Service, wait_seconds: float | None = None) -> MemoryMap | None:
    """The newest look at the pages that can be had; None where there never was one."""
    try:
        if wait_seconds is None:
            return await service.llm.memory_map()
        return await service.llm.memory_map(wait_seconds)
    except EngineDeadError:
        return None


def _facts(service: Service) -> dict[str, object]:
    """What stays as it is."""
    report = service.llm.memory
    return {"model": service.name, "version": __version__, "memory": report.as_dict()}


def _map_facts(service: Service, seen: MemoryMap | None) -> dict[str, object]:
    """What changes all the time."""
    stats = service.llm.stats()
    facts: dict[str, object] = {
        "state": service.state,
        "trouble": trouble(service),
        "time": time.time(),
        "totals": {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "prompt_tokens": stats.num_prompt_tokens,
            "output_tokens": stats.num_output_tokens,
            "preemptions": stats.num_preemptions,
            "requests": stats.num_requests,
            "prefix_query_tokens": stats.num_prefix_query_tokens,
            "prefix_hit_tokens": stats.num_prefix_hit_tokens,
            "steps": stats.num_steps,
        },
        "processes": resident_bytes(service.llm),
        "responses": {
            "kept": len(service.responses),
            "bytes": service.responses.num_bytes,
            "limit_bytes": service.responses.limit_bytes,
        },
    }
    if seen is None:
        return facts | {"kv": None, "requests": [], "requests_left_out": 0}
    kv_bytes = next((row.planned_bytes for row in service.llm.memory.rows if row.owner == KV_OWNER), 0)
    facts["kv"] = {
        "num_pages": seen.num_pages,
        "page_bytes": kv_bytes // max(seen.num_pages, 1),
        "free": seen.num_free,
        "in_use": seen.num_in_use,
        "cached": seen.num_cached,
        "age_seconds": round(max(time.monotonic() - seen.taken_at, 0.0), 3),
        "groups": [
            {
                "name": group.name,
                "page_tokens": group.page_tokens,
                "in_use": group.num_in_use,
                "cached": group.num_cached,
            }
            for group in seen.groups
        ],
    }
    shown = seen.requests[:MAX_REQUESTS_SHOWN]
    num_listed = sum(one.phase == "waiting" for one in seen.requests)
    left_out = len(seen.requests) - len(shown) + max(seen.num_waiting - num_listed, 0)
    return facts | {"requests": [_request_facts(one) for one in shown], "requests_left_out": left_out}


def _request_facts(one: RequestPages) -> dict[str, object]:
    facts = asdict(one)
    state = "preempted" if one.phase == "waiting" and one.num_preemptions else one.phase
    return {
        "id": facts["request_id"],
        "index": one.index,
        "state": state,
        "prompt_tokens": one.num_prompt_tokens,
        "output_tokens": one.num_output_tokens,
        "computed_tokens": one.num_computed_tokens,
        "cached_tokens": one.num_cached_tokens,
        "preemptions": one.num_preemptions,
        "priority": one.priority,
        "pages": list(one.pages),
        "age_seconds": round(one.age_seconds, 3),
        "tokens_per_second": round(one.tokens_per_second, 2),
    }
