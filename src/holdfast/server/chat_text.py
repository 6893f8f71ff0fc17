"""AnswerText: the text of an answer split as it streams into reasoning, content and calls of tools."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallDelta


class Parser(Protocol):
    """Splits a text as it comes."""

    def feed(self, text: str) -> Sequence[AnswerDelta]:
        """What is certain now."""
        ...

    def finish(self) -> Sequence[AnswerDelta]:
        """What was held back."""
        ...


class AnswerText:
    """Reasoning is split off first; what is left may hold calls of tools."""

    def __init__(self, reasoning: Parser | None, tools: Parser | None, *, one_call: bool = False) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call
        self.is_reasoning = False
        """Whether the last piece was reasoning."""
        self.num_calls = 0

    def feed(self, text: str) -> list[AnswerDelta]:
        """What is certain now."""
        return self._kept(self._content(self._reasoning.feed(text) if self._reasoning else [ContentDelta(text)]))

    def finish(self) -> list[AnswerDelta]:
        """What was held back, when the text is over."""
        deltas = self._content(self._reasoning.finish() if self._reasoning else ())
        if self._tools is not None:
            deltas += self._tools.finish()
        return self._kept(deltas)

    def _content(self, deltas: Sequence[AnswerDelta]) -> list[AnswerDelta]:
        if self._tools is None:
            return list(deltas)
        found: list[AnswerDelta] = []
        for delta in deltas:
            found += self._tools.feed(delta.text) if isinstance(delta, ContentDelta) else (delta,)
        return found

    def _kept(self, deltas: list[AnswerDelta]) -> list[AnswerDelta]:
        kept: list[AnswerDelta] = []
        for delta in deltas:
            self.is_reasoning = isinstance(delta, ReasoningDelta)
            if isinstance(delta, ToolCallDelta):
                if self._one_call and delta.index > 0:
                    continue
                self.num_calls = max(self.num_calls, delta.index + 1)
            kept.append(delta)
        return kept


@dataclass(slots=True)
class WholeCall:
    """A call of a tool, complete."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeAnswer:
    """An answer when it is over."""

    content: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)


def whole_answer(text: str, parser: AnswerText) -> WholeAnswer:
    """All of a text at once."""
    whole = WholeAnswer()
    for delta in [*parser.feed(text), *parser.finish()]:
        if isinstance(delta, ReasoningDelta):
            whole.reasoning += delta.text
        elif isinstance(delta, ContentDelta):
            whole.content += delta.text
        else:
            if delta.name is not None:
                whole.calls.append(WholeCall(delta.name))
            whole.calls[-1].arguments += delta.arguments
    return whole
