"""AnswerParser: an answer as it streams, as reasoning, content and calls of tools, by what its model can do; no torch."""

from holdfast.text.answer_deltas import AnswerDelta, ContentDelta
from holdfast.text.reasoning import ReasoningParser
from holdfast.text.tool_calls import ToolParser


class AnswerParser:
    """One completion: thoughts are split off first, and only what is left may call tools."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return 0 if self._tools is None else self._tools.num_calls

    @property
    def problems(self) -> tuple[str, ...]:
        """What looked like a call and was none, or was one and broke."""
        return () if self._tools is None else tuple(self._tools.problems)

    def feed(self, text: str) -> list[AnswerDelta]:
        """What a further piece of the answer makes certain."""
        return self._called([ContentDelta(text)] if self._reasoning is None else self._reasoning.feed(text))

    def finish(self) -> list[AnswerDelta]:
        """What was held back; the answer has ended."""
        deltas = self._called([] if self._reasoning is None else self._reasoning.finish())
        return deltas + ([] if self._tools is None else self._tools.finish())

    def _called(self, deltas: list[AnswerDelta]) -> list[AnswerDelta]:
        if self._tools is None:
            return [delta for delta in deltas if not isinstance(delta, ContentDelta) or delta.text]
        found: list[AnswerDelta] = []
        for delta in deltas:
            found += self._tools.feed(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return found
