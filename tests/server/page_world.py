"""A server for the page only: a pool of pages and scripted answers at the endpoints that the page uses.

`python tests/server/page_world.py` shows it at http://127.0.0.1:8017 without a model.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from holdfast.server.page import router

PAGE_TOKENS = 16
PAGE_BYTES = 737_280
ANSWER = """Paged attention keeps the **keys and values** of a conversation in small pages of equal size.

1. A request takes a page when it needs one
2. and gives it back when it ends:
   - nothing is moved,
   - nothing is left over.

```python
def pages_for(tokens: int) -> int:
    return -(-tokens // 16)
```

So `pages_for(100)` is 7, and <b>no markup</b> gets through.
"""


@dataclass
class Running:
    """One request of the pool."""

    id: str
    prompt_tokens: int
    output_tokens: int = 0
    state: str = "decode"
    started_at: float = field(default_factory=time.monotonic)

    @property
    def pages(self) -> int:
        return -(-(self.prompt_tokens + self.output_tokens) // PAGE_TOKENS)

    def as_dict(self) -> dict[str, object]:
        age = time.monotonic() - self.started_at
        return {
            "id": self.id,
            "state": self.state,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "pages": [self.pages],
            "age_seconds": age,
            "tokens_per_second": self.output_tokens / max(age, 0.1),
            "priority": 0,
        }


@dataclass
class World:
    """What the endpoints tell of, and how fast they answer."""

    num_pages: int = 1456
    seconds_per_token: float = 0.01
    key: str | None = None
    answer: str = ANSWER
    reasoning: str = ""
    break_after: int | None = None
    """Tokens after which a stream ends with an error."""
    running: dict[str, Running] = field(default_factory=dict)
    cached: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_requests: int = 0
    preemptions: int = 0
    aborted: int = 0
    bodies: list[dict] = field(default_factory=list)
    ids: Iterator[int] = field(default_factory=lambda: count(1))

    def begin(self, prompt_tokens: int) -> Running:
        request = Running(f"chatcmpl-{next(self.ids):08x}c0ffee", prompt_tokens)
        self.running[request.id] = request
        self.prompt_tokens += prompt_tokens
        self.num_requests += 1
        return request

    def step(self, request: Running) -> None:
        request.output_tokens += 1
        self.output_tokens += 1

    def end(self, request: Running) -> None:
        self.running.pop(request.id)
        self.cached = min(self.cached + request.pages - 1, self.num_pages // 4)

    def memory(self) -> dict[str, object]:
        held = {
            "kv pages": (self.num_pages * PAGE_BYTES, f"{self.num_pages} pages of 16 tokens"),
            "weights": (538_060_032, "180 tensors in float32"),
            "python and torch": (335_544_320, "the process itself: libraries, code, vocabulary"),
            "workspace": (51_904_512, "mlp needs most: wide float32 (2048, 3072)"),
            "rope": (4_194_304, "cos and sin of a step's tokens"),
            "inputs": (65_536, "one a row of a step"),
        }
        rows = [
            {"owner": owner, "planned_bytes": size, "held_bytes": size, "peak_bytes": size, "reason": reason}
            | {"phases": ["load", "capture", "serve"]}
            for owner, (size, reason) in held.items()
        ]
        bound = {"owner": "sampling", "planned_bytes": 80_985_088, "held_bytes": None, "peak_bytes": None}
        rows.append(bound | {"reason": "temporaries of 64 rows at a time", "phases": ["serve"]})
        gone = {"owner": "staging", "planned_bytes": 12_586_496, "held_bytes": None, "peak_bytes": 12_586_496}
        rows.append(gone | {"reason": "rows on their way to their place", "phases": ["load"]})
        total = sum(size for size, _ in held.values())
        return {
            "rows": rows,
            "budget_bytes": 21_573_789_696,
            "budget_reason": "90% of 22.32 GiB available",
            "planned_bytes": total + 80_985_088,
            "held_bytes": total,
            "measured_bytes": total + 41_000_000,
            "unaccounted_bytes": 41_000_000,
            "max_model_len": 8192,
        }

    def facts(self) -> dict[str, object]:
        in_use = sum(request.pages for request in self.running.values())
        cached = min(self.cached, self.num_pages - in_use)
        pool = {"free": self.num_pages - in_use - cached, "in_use": in_use, "cached": cached}
        group = {"name": "all layers", "page_tokens": PAGE_TOKENS, "window": None, "in_use": in_use, "cached": cached}
        totals = {
            "running": len(self.running),
            "waiting": 0,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "preemptions": self.preemptions,
            "requests": self.num_requests,
            "prefix_query_tokens": 400,
            "prefix_hit_tokens": 96,
        }
        return {
            "model": "tiny-model",
            "device": "cpu",
            "state": "ready",
            "time": time.time(),
            "kv": {"num_pages": self.num_pages, "page_bytes": PAGE_BYTES, **pool, "groups": [group]},
            "requests": [request.as_dict() for request in self.running.values()],
            "requests_left_out": 0,
            "totals": totals,
        }


def make_world_app(world: World) -> FastAPI:
    """The page and what it asks."""
    app = FastAPI(openapi_url=None)
    app.include_router(router)

    @app.middleware("http")
    async def guard(request: Request, call_next) -> Response:
        is_open = request.url.path == "/" or request.url.path.startswith("/page/")
        if world.key is None or is_open or request.headers.get("authorization") == f"Bearer {world.key}":
            return await call_next(request)
        return JSONResponse({"error": {"message": "the API key is wrong", "type": "authentication_error"}}, 401)

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [{"id": "tiny-model", "object": "model", "max_model_len": 8192}]}

    @app.get("/memory/stream")
    async def stream() -> Response:
        async def lines() -> AsyncIterator[str]:
            yield f"data: {json.dumps(world.facts() | {'memory': world.memory()})}\n\n"
            while True:
                await asyncio.sleep(0.1)
                yield f"data: {json.dumps(world.facts())}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        world.bodies.append(body)
        return StreamingResponse(_answer(world, body), media_type="text/event-stream")

    return app


async def _answer(world: World, body: dict) -> AsyncIterator[str]:
    def event(delta: dict, finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return f"data: {json.dumps({'id': running.id, 'choices': [choice]})}\n\n"

    running = world.begin(sum(len(message["content"]) for message in body["messages"]))
    thoughts, words = world.reasoning.split(" "), world.answer.split(" ")
    pieces = [("reasoning_content", thoughts), ("content", words)] if world.reasoning else [("content", words)]
    is_whole = False
    try:
        yield event({"role": "assistant", "content": ""})
        for name, parts in pieces:
            for part in parts[: body.get("max_tokens")]:
                await asyncio.sleep(world.seconds_per_token)
                world.step(running)
                if world.break_after is not None and running.output_tokens > world.break_after:
                    is_whole = True
                    yield f"data: {json.dumps({'error': {'message': 'the engine has stopped', 'type': 'x'}})}\n\n"
                    return
                yield event({name: part + " "})
        yield event({}, "stop")
        usage = {"prompt_tokens": running.prompt_tokens, "completion_tokens": running.output_tokens}
        yield f"data: {json.dumps({'id': running.id, 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
        is_whole = True
    finally:
        world.aborted += not is_whole
        world.end(running)


@contextmanager
def serve(app: object, port: int = 0) -> Iterator[str]:
    """Its address, while it is served from a thread."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended before it listened"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    uvicorn.run(make_world_app(World(seconds_per_token=0.05)), host="127.0.0.1", port=8017)
