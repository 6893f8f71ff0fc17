"""Deltas of an answer as it streams: content, reasoning and calls of tools; no torch."""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_HELD_SPACE_CHARS = 2**14
"""Longest white space to hold back before a marker; a longer run is shown."""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one call: first the name alone, then the arguments, as pieces of JSON text."""

    index: int
    name: str | None
    """Only in the first delta of a call."""
    arguments: str = ""
    id: str | None = None
    """Sent with the name if the model numbers its calls; its template needs the same id in the next turn."""


AnswerDelta = ContentDelta | ReasoningDelta | ToolCallDelta


class DeltaList:
    """Deltas in order; adjacent ones of one kind are joined."""

    def __init__(self) -> None:
        self._done: list[AnswerDelta] = []
        self._parts: list[str] = []
        self._kind: type[ContentDelta] | type[ReasoningDelta] | int = ContentDelta
        """Kind of the parts: a number is the index of the call that has them as arguments."""
        self._call_ids: set[str] = set()

    def add(self, kind: type[ContentDelta] | type[ReasoningDelta] | int, text: str) -> None:
        """Append text of one kind."""
        if not text:
            return
        if kind != self._kind:
            self._close()
            self._kind = kind
        self._parts.append(text)

    def begin_call(self, index: int, name: str, call_id: str | None = None) -> None:
        """Begin a call. A repeated id is dropped: ids identify calls."""
        self._close()
        call_id = None if call_id in self._call_ids else call_id
        if call_id is not None:
            self._call_ids.add(call_id)
        self._done.append(ToolCallDelta(index, name, id=call_id))

    def append(self, delta: AnswerDelta) -> None:
        """Append a delta."""
        if not isinstance(delta, ToolCallDelta):
            self.add(type(delta), delta.text)
            return
        if delta.name is not None:
            self.begin_call(delta.index, delta.name, delta.id)
        self.add(delta.index, delta.arguments)

    def take(self) -> list[AnswerDelta]:
        """Return and clear all deltas."""
        self._close()
        done, self._done = self._done, []
        return done

    def _close(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        if not text:
            return
        kind = self._kind
        self._done.append(ToolCallDelta(kind, None, text) if isinstance(kind, int) else kind(text))


class HeldSpace:
    """Trailing white space, held back until the next text shows if it is content."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._num_chars = 0
        self._is_over = False

    def show(self, text: str) -> str:
        """Add a text; return the text to show now."""
        body = text.rstrip()
        shown = self.release() + body if body else ""
        if body:
            self._is_over = False
        space = text[len(body) :]
        if self._is_over:
            return shown + space
        self._held.append(space)
        self._num_chars += len(space)
        if self._num_chars > MAX_HELD_SPACE_CHARS:
            self._is_over = True
            return shown + self.release()
        return shown

    def release(self) -> str:
        """Return and clear the held space."""
        held = "".join(self._held)
        self._held.clear()
        self._num_chars = 0
        return held

    def drop(self) -> None:
        """Clear the held space, because a marker follows."""
        self.release()
        self._is_over = False


def partial_end(text: str, *markers: str) -> int:
    """Return the number of trailing characters that may begin a marker."""
    longest = 0
    for marker in filter(None, markers):
        first = text.find(marker[0], max(len(text) - len(marker) + 1, 0))
        while first >= 0 and not marker.startswith(text[first:]):
            first = text.find(marker[0], first + 1)
        longest = max(longest, len(text) - first) if first >= 0 else longest
    return longest


def joined(deltas: Iterable[AnswerDelta]) -> list[AnswerDelta]:
    """Join adjacent deltas of one kind."""
    whole = DeltaList()
    for delta in deltas:
        whole.append(delta)
    return whole.take()
