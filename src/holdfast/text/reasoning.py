"""ReasoningParser: the thoughts of a model, between <think> and </think>, told from its answer as it streams; no torch.

Thoughts stand at the beginning of an answer. Some templates write <think> themselves, at the end of the prompt, and then
only </think> comes. White space beside the markers belongs to them.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from holdfast.errors import RequestError, shown
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, DeltaList, HeldSpace, ReasoningDelta, partial_end

AUTO, NONE = "auto", "none"
OPENING, CLOSING = "<think>", "</think>"

Thoughts = Literal["none", "may", "open"]
"""At the beginning of an answer: there are none, <think> may open them, or the prompt has opened them."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models writes thoughts."""

    name: str
    is_open: bool
    """Its answers begin with thoughts, whether or not <think> is written."""

    def parser(self, prompt: str | None = None) -> "ReasoningParser":
        """For one answer to this prompt."""
        return ReasoningParser(is_open=self.thoughts(prompt) == "open")

    def thoughts(self, prompt: str | None) -> Thoughts:
        """What an answer to this prompt begins with: its end says whether thoughts were begun or skipped there."""
        end = "" if prompt is None else prompt[-64:].rstrip()
        if end.endswith(CLOSING):
            return "none"
        return "open" if self.is_open or end.endswith(OPENING) else "may"


QWEN3 = ReasoningFormat("qwen3", is_open=False)
DEEPSEEK_R1 = ReasoningFormat("deepseek_r1", is_open=True)
FORMATS = {form.name: form for form in (QWEN3, DEEPSEEK_R1)}


def choose_reasoning_parser(template: str | None, name: str = AUTO) -> ReasoningFormat | None:
    """The format with this name, or the one that a chat template knows; None where there is none."""
    if name == NONE:
        return None
    if name != AUTO:
        if name not in FORMATS:
            raise RequestError(
                f"the reasoning parser {shown(name)} was asked",
                f"{', '.join(FORMATS)} are there",
                f"use one, {AUTO} or {NONE}",
            )
        return FORMATS[name]
    return QWEN3 if template is not None and (OPENING in template or CLOSING in template) else None


class _State(Enum):
    START = auto()
    OPENED = auto()
    THOUGHT = auto()
    CLOSED = auto()
    CONTENT = auto()


class ReasoningParser:
    """Reads one answer: `feed` gives what is certain, `finish` what was still held back."""

    def __init__(self, is_open: bool = False) -> None:
        self._is_open = is_open
        self._state = _State.START
        self._out = DeltaList()
        self._space = HeldSpace()
        self._kept = ""

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts have begun and not ended."""
        return self._state in (_State.OPENED, _State.THOUGHT) or (self._state is _State.START and self._is_open)

    def feed(self, text: str) -> list[AnswerDelta]:
        """What a further piece of the answer makes certain."""
        text, self._kept = self._kept + text, ""
        if text and self._state is _State.START:
            text = self._start(text)
        if text and self._state is _State.OPENED:
            text = text.lstrip()
            self._state = _State.THOUGHT if text else _State.OPENED
        if text and self._state is _State.THOUGHT:
            text = self._thought(text)
        if text and self._state is _State.CLOSED:
            text = text.lstrip()
            self._state = _State.CONTENT if text else _State.CLOSED
        if self._state is _State.CONTENT:
            self._out.add(ContentDelta, text)
        return self._out.take()

    def finish(self) -> list[AnswerDelta]:
        """What was held back; the answer has ended."""
        kept, self._kept = self._kept, ""
        if self._state is _State.START:
            kind = ReasoningDelta if self._is_open else ContentDelta
            # An answer of white space alone is none of thoughts.
            text = kept.strip() if self._is_open else self._space.release() + kept
            self._out.add(kind, text)
        elif self._state is _State.THOUGHT:
            self._out.add(ReasoningDelta, self._space.show(kept))
        self._state = _State.CONTENT
        return self._out.take()

    def _start(self, text: str) -> str:
        """Look for <think>; what of the text is still to be read."""
        bare = text.lstrip()
        space = self._space.show(text[: len(text) - len(bare)])
        if not self._is_open:
            self._out.add(ContentDelta, space)
        if bare.startswith(OPENING):
            self._space.drop()
            self._state = _State.OPENED
            return bare[len(OPENING) :]
        if OPENING.startswith(bare):
            self._kept = bare
            return ""
        if self._is_open:
            self._space.drop()
            self._state = _State.THOUGHT
            return bare
        self._state = _State.CONTENT
        return self._space.release() + bare

    def _thought(self, text: str) -> str:
        found = text.find(CLOSING)
        if found < 0:
            end = len(text) - partial_end(text, CLOSING)
            self._out.add(ReasoningDelta, self._space.show(text[:end]))
            self._kept = text[end:]
            return ""
        self._out.add(ReasoningDelta, self._space.show(text[:found]))
        self._space.drop()
        self._state = _State.CLOSED
        return text[found + len(CLOSING) :]
