"""/health, /ready, /version, /metrics, /memory and its stream; cheap, and never blocks on the engine; no torch.

/health   200 while the core sends heartbeats and its step is not overdue, else 503
/ready    200 while healthy and not draining, else 503
/memory   bytes and pages by owner, at most 0.2 s old or as old as the step in progress
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from holdfast import __version__
from holdfast.engine.memory_map import MemoryMap, RequestPages
from holdfast.errors import EngineDeadError
from holdfast.memory.planner import KV_OWNER
from holdfast.server.errors import ApiError
from holdfast.server.metrics import CONTENT_TYPE, resident_bytes
from holdfast.server.service import Service, service_of

router = APIRouter(tags=["status"])
STREAM_SECONDS: Final = 0.2
"""Minimum time between two events of /memory/stream ..."""
IDLE_SECONDS: Final = 1.0
"""... and maximum, while nothing changes."""
METRICS_WAIT_SECONDS: Final = 0.1
MAX_REQUESTS_SHOWN: Final = 256
TOTALS: Final = (
    *("running", "waiting", "prompt_tokens", "output_tokens", "preemptions", "requests"),
    *("prefix_query_tokens", "prefix_hit_tokens", "steps"),
)
REQUEST_COUNTS: Final = ("prompt_tokens", "output_tokens", "computed_tokens", "cached_tokens", "preemptions")
_EVENTS: Final = {"text/event-stream": {"schema": {"type": "string"}}}


def trouble(service: Service) -> str | None:
    """Describe the engine's fault, or return None if it is healthy. Never blocks."""
    limits = service.limits
    try:
        health = service.llm.health()
    except EngineDeadError:
        return "the engine was shut down"
    if not health.is_alive or service.state == "dead":
        return "the engine has stopped"
    if health.core_silence_seconds >= limits.silence_seconds:
        return f"the core has sent no heartbeat for {health.core_silence_seconds:.1f} seconds"
    seconds = max(health.seconds_in_step, health.seconds_since_progress)
    if seconds >= limits.step_seconds:
        return f"the current step has run for {seconds:.0f} seconds; the limit is {limits.step_seconds:g}"
    return None


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Report whether the engine is healthy."""
    reason = trouble(service_of(request))
    if reason is not None:
        raise ApiError("http.unhealthy", reason=reason)
    return JSONResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Report whether the server takes requests."""
    service = service_of(request)
    reason = trouble(service)
    if reason is None and service.state == "draining":
        reason = "it is shutting down and takes no new requests"
    if reason is not None:
        raise ApiError("http.not_ready", reason=reason)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> JSONResponse:
    """Return the version of this server."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return all metrics for Prometheus."""
    service = service_of(request)
    return Response(service.metrics.text(await _map(service, METRICS_WAIT_SECONDS)), media_type=CONTENT_TYPE)


@router.get("/memory")
async def memory(request: Request) -> JSONResponse:
    """Return bytes and pages by owner."""
    service = service_of(request)
    return JSONResponse(_facts(service) | map_facts(service, await _map(service)))


@router.get("/memory/stream", response_class=StreamingResponse, responses={200: {"content": _EVENTS}})
async def memory_stream(request: Request) -> StreamingResponse:
    """Stream /memory as server-sent events; later events leave out what does not change."""
    service = service_of(request)
    limit = service.limits.max_listeners
    if service.num_listeners >= limit:
        raise ApiError("http.too_many_listeners", headers={"Retry-After": "5"}, maximum=limit)
    return StreamingResponse(_events(service), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(service: Service) -> AsyncIterator[bytes]:
    """Yield events until the listener disconnects or the server ends."""
    service.num_listeners += 1
    try:
        facts, sent, sent_at = _facts(service), None, 0.0
        while True:
            seen, now = await _map(service), time.monotonic()
            changes = map_facts(service, seen)
            mark = (seen.num_steps, seen.num_free, len(seen.requests), service.state) if seen is not None else None
            is_moving = mark != sent or bool(seen is not None and seen.requests)
            if is_moving or now - sent_at >= IDLE_SECONDS:
                sent, sent_at = mark, now
                yield b"data: " + json.dumps(facts | changes, separators=(",", ":")).encode() + b"\n\n"
                facts = {}
            if service.state != "ready" or trouble(service) == "the engine has stopped":
                return
            await asyncio.sleep(STREAM_SECONDS)
    finally:
        service.num_listeners -= 1


async def _map(service: Service, wait_seconds: float | None = None) -> MemoryMap | None:
    """Return the newest memory map; None before the first."""
    try:
        if wait_seconds is None:
            return await service.llm.memory_map()
        return await service.llm.memory_map(wait_seconds)
    except EngineDeadError:
        return None


def _facts(service: Service) -> dict[str, object]:
    """Return the constant facts."""
    report = service.llm.memory
    return {"model": service.name, "version": __version__, "memory": report.as_dict()}


def map_facts(service: Service, seen: MemoryMap | None) -> dict[str, object]:
    """Return the facts that change every step."""
    stats = service.llm.stats()
    facts: dict[str, object] = {
        "state": service.state,
        "trouble": trouble(service),
        "time": time.time(),
        "totals": {name: getattr(stats, f"num_{name}") for name in TOTALS},
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
        "snapshots": seen.num_snapshots,
        "snapshots_held": seen.num_snapshots_held,
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
    state = "preempted" if one.phase == "waiting" and one.num_preemptions else one.phase
    return {
        "id": one.request_id,
        "index": one.index,
        "state": state,
        **{name: getattr(one, f"num_{name}") for name in REQUEST_COUNTS},
        "priority": one.priority,
        "pages": list(one.pages),
        "age_seconds": round(one.age_seconds, 3),
        "tokens_per_second": round(one.tokens_per_second, 2),
    }
