"""Streams: answers as server-sent events; a client that disconnects aborts its request in the engine.

A reader slower than the model blocks `send`. Its deltas are merged on arrival (engine/engine_thread.py), so the backlog is
never larger than the answer itself.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.engine.admission import PreparedRequest
from holdfast.errors import EngineDeadError
from holdfast.observability.log import get_logger
from holdfast.request.outputs import CompletionDelta
from holdfast.request.sampling_params import SamplingParams
from holdfast.server.errors import ApiError, from_exception, is_our_fault
from holdfast.server.logs import RequestRecord, record_of
from holdfast.server.service import Service, service_of

PING_SECONDS = 10.0
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would buffer events
]
_Result = TypeVar("_Result")
_log = get_logger("holdfast.server")


def new_id(prefix: str) -> str:
    """Make an answer id; the engine uses it as the request id."""
    return f"{prefix}-{secrets.token_hex(12)}"


@dataclass(slots=True)
class Counted:
    """Token counts of one answer, summed over its prompts and completions."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int | None = None
    """Tokens of the thoughts' text, encoded again."""

    @property
    def reasoning_tokens(self) -> int | None:
        """At most the tokens of the answer: one broken character encodes to several."""
        own = self.num_reasoning_tokens
        return None if own is None else min(own, self.num_output_tokens)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage`."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.num_reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class Answer:
    """One request in the engine: yields its deltas, counts and logs them."""

    def __init__(self, request: Request, prepared: PreparedRequest, answer_id: str, counted: Counted) -> None:
        self._service: Service = service_of(request)
        self.record: RequestRecord = record_of(request)
        self.prepared = prepared
        self.id = answer_id
        self.counted = counted
        counted.num_prompt_tokens += len(prepared.prompt_token_ids)
        self.record.num_prompt_tokens = counted.num_prompt_tokens

    async def deltas(self) -> AsyncGenerator[list[CompletionDelta], None]:
        """Yield the new deltas of each step; first an empty list when the queue has accepted the request.

        Raises ApiError if a completion failed, because the rest of the answer is not reliable either.
        """
        counted, record, prepared = self.counted, self.record, self.prepared
        with self._service.metrics.request(prepared.params.n) as watch:
            watch.prompt(len(prepared.prompt_token_ids))
            async with aclosing(self._service.llm.answer(prepared, self.id)) as batches:
                async for deltas in batches:
                    for delta in deltas:
                        watch.take(delta)
                        counted.num_output_tokens += len(delta.token_ids)
                        if record.first_token_seconds is None:
                            record.first_token_seconds = time.monotonic() - record.started_at
                        if delta.finish_reason is not None:
                            self._finish(delta)
                    yield deltas

    def _finish(self, delta: CompletionDelta) -> None:
        if delta.index == 0:
            self.counted.num_cached_tokens += delta.num_cached_tokens
        self.record.num_cached_tokens = self.counted.num_cached_tokens
        self.record.num_output_tokens = self.counted.num_output_tokens
        self.record.finish_reason = delta.finish_reason
        if delta.finish_reason not in ("error", "abort"):
            return
        if delta.finish_reason == "abort" or not self._service.llm.health().is_alive:
            raise EngineDeadError("http.engine_dead")
        error = delta.error or ""
        # 400 tells clients not to retry.
        if _is_impossible(self.prepared.params, error):
            raise ApiError("http.answer_impossible", reason=error)
        raise ApiError("http.answer_failed", reason=error)


def _is_impossible(params: SamplingParams, error: str) -> bool:
    """Return True if the request itself leaves no valid token, so a retry fails again."""
    form, allowed = params.structured_outputs, params.allowed_token_ids
    if form is not None and "could not be followed" in error:
        return True
    return (
        allowed is not None or (form is not None and bool(params.bad_words))
    ) and "no token could be sampled" in error


async def merged(
    streams: Sequence[AsyncGenerator[_Result, None]],
) -> AsyncGenerator[tuple[int, _Result], None]:
    """Yield the pieces of several streams on arrival, each with its stream's index; close all streams at the end.

    Wait for the first piece of every stream before yielding any, so all requests are queued by then.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    reading: dict[asyncio.Future[_Result], int] = {}
    try:
        begun = [asyncio.ensure_future(anext(stream)) for stream in streams]
        reading = {task: place for place, task in enumerate(begun)}
        await asyncio.gather(*begun)
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=reading.__getitem__):
                place = reading.pop(task)
                try:
                    piece = task.result()
                except StopAsyncIteration:
                    continue
                reading[asyncio.ensure_future(anext(streams[place]))] = place
                yield place, piece
    finally:
        await _end(*reading)
        for stream in streams:
            await stream.aclose()


async def gathered(works: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Like asyncio.gather, but cancels the others when one fails."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(*tasks)


async def while_connected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await `work`; if the client disconnects first, cancel it and the engine request."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        record_of(request).is_cut = True
        raise ClientDisconnect
    except asyncio.CancelledError:
        if service_of(request).state == "ready":
            raise
        raise ApiError("http.cut_while_draining") from None
    finally:
        await _end(task, watcher)


async def _gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """An answer as server-sent events. It always closes its source of pieces."""

    media_type = "text/event-stream"
    ping = b""
    """Bytes sent after PING_SECONDS of silence, so that proxies and clients keep the connection."""

    def __init__(
        self, request: Request, pieces: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(None, 200, headers, self.media_type)
        self._pieces = pieces
        self._record = record_of(request)
        self._written_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send pieces until they end or the client disconnects."""
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((writer, watcher), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            else:
                self._record.is_cut = True
        except asyncio.CancelledError:
            await _end(writer)
            await self._write_last(send, ApiError("http.cut_while_draining"))
            raise
        finally:
            await _end(writer, watcher)
            await self._pieces.aclose()

    async def _write(self, send: Send) -> None:
        media_type = (b"content-type", f"{self.media_type}; charset=utf-8".encode())
        await send({"type": "http.response.start", "status": 200, "headers": [media_type, *_HEADERS]})
        try:
            await self._write_pieces(send)
        except OSError:
            self._record.is_cut = True  # the connection is gone
        except Exception as error:
            if is_our_fault(error):
                _log.error("request %s failed: %s", self._record.request_id, type(error).__name__, exc_info=error)
            await self._write_last(send, from_exception(error))
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_pieces(self, send: Send) -> None:
        self._written_at = time.monotonic()
        pings = [asyncio.ensure_future(self._write_pings(send))] if self.ping else []
        try:
            async for piece in self._pieces:
                if piece:
                    self._written_at = time.monotonic()
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            await _end(*pings)

    async def _write_pings(self, send: Send) -> None:
        while True:
            now = time.monotonic()
            if now >= self._written_at + PING_SECONDS:
                self._written_at = now
                await send({"type": "http.response.body", "body": self.ping, "more_body": True})
            await asyncio.sleep(self._written_at + PING_SECONDS - now)

    async def _write_last(self, send: Send, error: ApiError) -> None:
        """Send an error as the last event of a started answer."""
        self._record.error = error.public_code
        body = error.to_event(self._record.path, self._record.request_id)
        await send({"type": "http.response.body", "body": body, "more_body": False})
