"""AnswerWriter writes answers in one API's shape, whole or streamed; `respond` drives it."""

import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from holdfast.request.outputs import CompletionDelta
from holdfast.server.errors import ApiError, from_exception
from holdfast.server.fields import SamplingFields
from holdfast.server.logprobs import ChatLogprobWriter
from holdfast.server.streams import Answer, EventStream, gathered, merged, new_id, while_connected
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallDelta
from holdfast.text.answer_parser import AnswerParser


class AnswerText:
    """Splits the text of one completion into reasoning, content and tool calls; with `one_call`, drops later calls."""

    def __init__(self, parser: AnswerParser, *, one_call: bool) -> None:
        self._parser = parser
        self._one_call = one_call

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    def feed(self, text: str, *, is_last: bool) -> list[AnswerDelta]:
        """Add text and return the deltas that are certain; all if it is the last."""
        pieces = self._parser.feed(text) if text else []
        if is_last:
            pieces = [*pieces, *self._parser.finish()]
        if not self._one_call:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, ToolCallDelta) or piece.index == 0]


@dataclass(slots=True)
class WholeCall:
    """A complete tool call."""

    name: str
    id: str
    arguments: str = ""


@dataclass(slots=True)
class WholeAnswer:
    """A complete answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)


def whole_answer(pieces: Sequence[AnswerDelta]) -> WholeAnswer:
    """Join the pieces of an answer."""
    whole = WholeAnswer()
    for piece in pieces:
        if isinstance(piece, ReasoningDelta):
            whole.reasoning += piece.text
        elif isinstance(piece, ContentDelta):
            whole.content += piece.text
        else:
            if piece.name is not None:
                whole.calls.append(WholeCall(piece.name, piece.id or new_id("call")))
            whole.calls[-1].arguments += piece.arguments
    return whole


def arguments_of(text: str) -> dict[str, Any] | None:
    """Parse the arguments of a call; None if they are not a complete object."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def to_json(value: object) -> str:
    """Like json.dumps, but compact. ASCII only, because some readers split lines at other characters."""
    return json.dumps(value, separators=(",", ":"))


class AnswerWriter:
    """Writes the answers to one HTTP request in one API's shape; `answers` has one per prompt."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = answers

    def begin(self) -> None:
        """Start the stream, after the engine accepted the request."""

    def add(self, place: int, delta: CompletionDelta) -> None:
        """Add a delta of one prompt to the stream."""
        raise NotImplementedError

    def collect(self, place: int, delta: CompletionDelta) -> None:
        """Add a delta to an answer that is sent whole."""
        self.add(place, delta)

    def end(self) -> None:
        """End the stream, after its last delta."""

    def fail(self, error: ApiError) -> None:
        """Handle a failed stream, before the error is written."""

    def take(self) -> str:
        """Return the text written since the last call."""
        raise NotImplementedError

    def whole(self) -> tuple[dict[str, Any], str | None]:
        """Return the complete answer, and its text for the log."""
        raise NotImplementedError


class ChunkWriter(AnswerWriter):
    """Writes OpenAI's older streams: chunks with one choice each, then the usage and [DONE]."""

    def __init__(self, answers: Sequence[Answer], names: dict[str, Any], fields: SamplingFields) -> None:
        """`names` are the leading fields of every chunk."""
        super().__init__(answers)
        options = fields.stream_options
        self.includes_usage = options is not None and bool(options.include_usage)
        self._is_continuous = self.includes_usage and options is not None and bool(options.continuous_usage_stats)
        self._head = f'data: {to_json(names)[:-1]},"choices":['
        self._choices: list[str] = []
        """Choices not sent yet."""
        self._first = ""
        """Fields of the first chunk only."""
        self._last = ""

    def usage(self) -> dict[str, Any]:
        """Return the usage so far."""
        return self.answers[0].counted.usage()

    def take(self) -> str:
        choices, self._choices = self._choices, []
        last, self._last = self._last, ""
        tail = '],"usage":null}\n\n' if self.includes_usage else "]}\n\n"
        if choices and self._is_continuous:
            tail = f'],"usage":{json.dumps(self.usage())}}}\n\n'
        chunks = [f"{self._head}{choice}{tail}" for choice in choices]
        if chunks and self._first:
            chunks[0] = f"data: {{{self._first}{chunks[0].removeprefix('data: {')}"
            self._first = ""
        return "".join(chunks) + last

    def end(self) -> None:
        usage = f'{self._head}],"usage":{json.dumps(self.usage())}}}\n\n' if self.includes_usage else ""
        self._last = f"{usage}data: [DONE]\n\n"


class SplitWriter(AnswerWriter):
    """Writes one completion that a parser splits into content, reasoning and tool calls."""

    def __init__(self, answer: Answer, parser: AnswerText | None, logprobs: ChatLogprobWriter | None = None) -> None:
        """`parser` splits the text; None writes content only."""
        super().__init__([answer])
        self.answer = answer
        self._parser = parser
        self._logprob_writer = logprobs
        self._logprobs: list[dict[str, Any]] = []
        """Entries not sent yet."""
        self._written: list[str] = []

    def add(self, place: int, delta: CompletionDelta) -> None:
        if self._logprob_writer is not None and delta.logprobs:
            self._logprobs += self._logprob_writer.entries(delta.token_ids, delta.logprobs)
        is_last = delta.finish_reason is not None
        pieces: Sequence[AnswerDelta] = [ContentDelta(delta.text)] if delta.text else []
        for piece in pieces if self._parser is None else self._parser.feed(delta.text, is_last=is_last):
            self.add_piece(piece)
        if is_last:
            self.finish(delta)

    def add_piece(self, piece: AnswerDelta) -> None:
        """Add a piece of the completion."""
        if isinstance(piece, ToolCallDelta):
            self.add_call(piece)
        else:
            self.add_text(piece.text, is_reasoning=isinstance(piece, ReasoningDelta))

    def add_text(self, text: str, *, is_reasoning: bool) -> None:
        """Add a piece of the content or of the reasoning."""
        raise NotImplementedError

    def add_call(self, piece: ToolCallDelta) -> None:
        """Add a piece of a tool call; the first one has its name."""
        raise NotImplementedError

    def finish(self, delta: CompletionDelta) -> None:
        """End the answer after its last delta."""
        raise NotImplementedError

    def take(self) -> str:
        written, self._written = self._written, []
        return "".join(written)


async def respond(
    request: Request,
    opening: Coroutine[Any, Any, AnswerWriter],
    *,
    is_streamed: bool,
    stream_class: type[EventStream] = EventStream,
) -> Response:
    """Answer a request; `opening` validates it and makes its writer. Stops if the client disconnects."""
    if is_streamed:
        return stream_class(request, await while_connected(request, _accepted(opening)))
    return await while_connected(request, _whole(opening))


async def _accepted(opening: Coroutine[Any, Any, AnswerWriter]) -> AsyncGenerator[bytes, None]:
    """Return the stream after the engine accepts the request, so that a refusal has its own HTTP status."""
    pieces = _pieces(await opening)
    await anext(pieces)
    return pieces


async def _pieces(writer: AnswerWriter) -> AsyncGenerator[bytes, None]:
    has_begun = False
    try:
        async with aclosing(merged([answer.deltas() for answer in writer.answers])) as batches:
            async for place, deltas in batches:
                if not has_begun:
                    yield b""  # the engine has accepted the request
                    has_begun = True
                    writer.begin()
                for delta in deltas:
                    writer.add(place, delta)
                if written := writer.take():
                    yield written.encode("ascii")
        writer.end()
        yield writer.take().encode("ascii")
    except Exception as error:
        if has_begun:
            writer.fail(from_exception(error))
            yield writer.take().encode("ascii")
        raise


async def _whole(opening: Coroutine[Any, Any, AnswerWriter]) -> Response:
    writer = await opening

    async def collect(place: int, answer: Answer) -> None:
        async with aclosing(answer.deltas()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    writer.collect(place, delta)

    await gathered([collect(place, answer) for place, answer in enumerate(writer.answers)])
    value, text = writer.whole()
    if writer.answers[0].record.wants_text:
        writer.answers[0].record.answer = text
    return Response(to_json(value), media_type="application/json")
