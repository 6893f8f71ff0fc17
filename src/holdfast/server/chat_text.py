"""AnswerText: the text of one completion as it streams, split into reasoning, content and calls of tools; whole answers."""

import json
from dataclasses import dataclass, field
from typing import Any

from holdfast.server.streams import new_id
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallDelta
from holdfast.text.answer_parser import AnswerParser


class AnswerText:
    """Reads one completion; only its first call counts where one was asked."""

    def __init__(self, parser: AnswerParser, *, one_call: bool) -> None:
        self._parser = parser
        self._one_call = one_call

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    @property
    def problems(self) -> tuple[str, ...]:
        """What looked like a call and was none, or was one and broke."""
        return self._parser.problems

    def feed(self, text: str) -> list[AnswerDelta]:
        """What is certain now."""
        return self._kept(self._parser.feed(text))

    def finish(self) -> list[AnswerDelta]:
        """What was held back, when the text is over."""
        return self._kept(self._parser.finish())

    def _kept(self, deltas: list[AnswerDelta]) -> list[AnswerDelta]:
        if not self._one_call:
            return deltas
        return [delta for delta in deltas if not isinstance(delta, ToolCallDelta) or delta.index == 0]


@dataclass(slots=True)
class WholeCall:
    """A call of a tool, complete."""

    name: str
    id: str
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
                whole.calls.append(WholeCall(delta.name, delta.id or new_id("call")))
            whole.calls[-1].arguments += delta.arguments
    return whole


def arguments_of(text: str) -> dict[str, Any] | None:
    """The object that the arguments of a call are; None if they are not whole."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
