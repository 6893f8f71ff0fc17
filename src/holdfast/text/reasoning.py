"""ReasoningParser: separates the thoughts of a model, between <think> and </think>, from its answer; no torch.

An answer begins with thoughts. Some templates write <think> at the end of the prompt, and then only </think> comes. White
space beside the markers belongs to them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from holdfast.errors import RequestError
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, DeltaList, HeldSpace, ReasoningDelta, partial_end
from holdfast.text.harmony import CHANNEL, MESSAGE, TOKENS, TURN

AUTO, NONE = "auto", "none"
OPENING, CLOSING = "<think>", "</think>"

Thoughts = Literal["none", "may", "open", "channels"]
"""The beginning of an answer: no thoughts, <think> may open them, the prompt has opened them, or they are messages in their
own channel."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models writes thoughts."""

    name: str
    is_open: bool
    """Answers begin with thoughts, with or without <think>."""
    is_channel: bool = False
    """Thoughts are messages in a channel, which HarmonyParser reads."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Markers that are tokens of the vocabulary."""
        return TOKENS if self.is_channel else (OPENING, CLOSING)

    @property
    def ending(self) -> str:
        """The marker before the content."""
        return MESSAGE if self.is_channel else CLOSING

    def parser(self, prompt: str | None = None, also_ends: Sequence[str] = ()) -> "ReasoningParser":
        """Make the parser of one answer to this prompt; thoughts end at </think>, or before any of `also_ends`."""
        return ReasoningParser(self.thoughts(prompt) == "open", also_ends)

    def thoughts(self, prompt: str | None) -> Thoughts:
        """Return the beginning of an answer: the end of the prompt shows whether thoughts were begun or skipped."""
        end = "" if prompt is None else prompt[-64:].rstrip()
        if self.is_channel:
            return "channels" if prompt is None or end.endswith(TURN) else "none"
        if end.endswith(CLOSING):
            return "none"
        return "open" if self.is_open or end.endswith(OPENING) else "may"


QWEN3 = ReasoningFormat("qwen3", is_open=False)
DEEPSEEK_R1 = ReasoningFormat("deepseek_r1", is_open=True)
HARMONY = ReasoningFormat("harmony", is_open=False, is_channel=True)
FORMATS = {form.name: form for form in (QWEN3, DEEPSEEK_R1, HARMONY)}
_OTHER_NAMES = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4"), QWEN3),
    **dict.fromkeys(("glm", "glm45", "glm47", "kimi_k2"), QWEN3),
    **dict.fromkeys(("openai_gptoss", "openai"), HARMONY),
}
"""Families whose prompt shows whether thoughts were begun, like Qwen3's; and vLLM's names."""


def choose_reasoning_parser(template: str | None, name: str = AUTO) -> ReasoningFormat | None:
    """Return the format with this name, or that of a chat template; None if there is none."""
    if name == NONE:
        return None
    if name != AUTO:
        form = FORMATS.get(name) or _OTHER_NAMES.get(name)
        if form is None:
            accepted = (*FORMATS, *_OTHER_NAMES, AUTO, NONE)
            raise RequestError("value.not_one_of", name="reasoning_parser", accepted=accepted, value=name)
        return form
    if template is not None and CHANNEL in template:
        return HARMONY
    return QWEN3 if template is not None and (OPENING in template or CLOSING in template) else None


class _State(Enum):
    START = auto()
    OPENED = auto()
    THOUGHT = auto()
    CLOSED = auto()
    CONTENT = auto()


class ReasoningParser:
    """Reads one answer: `feed` returns certain deltas, `finish` the rest."""

    def __init__(self, is_open: bool = False, also_ends: Sequence[str] = ()) -> None:
        self._is_open = is_open
        self._ends = (CLOSING, *also_ends)
        """A marker of calls ends thoughts too: some models leave </think> out before it."""
        self._end = re.compile("|".join(map(re.escape, self._ends)))
        self._state = _State.START
        self._out = DeltaList()
        self._space = HeldSpace()
        self._kept = ""

    @property
    def is_thinking(self) -> bool:
        """True between the beginning and the end of thoughts."""
        return self._state in (_State.OPENED, _State.THOUGHT) or (self._state is _State.START and self._is_open)

    def feed(self, text: str) -> list[AnswerDelta]:
        """Read a further piece of the answer; return the deltas that are certain."""
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
        """Return the deltas that were held back, at the end of the answer."""
        kept, self._kept = self._kept, ""
        if self._state is _State.START:
            kind = ReasoningDelta if self._is_open else ContentDelta
            # An answer of white space alone has no thoughts.
            text = kept.strip() if self._is_open else self._space.release() + kept
            self._out.add(kind, text)
        elif self._state is _State.THOUGHT:
            self._out.add(ReasoningDelta, self._space.show(kept))
        self._state = _State.CONTENT
        return self._out.take()

    def _start(self, text: str) -> str:
        """Look for <think>; return the text that is still unread."""
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
        found = self._end.search(text)
        if found is None:
            end = len(text) - max(partial_end(text, marker) for marker in self._ends)
            self._out.add(ReasoningDelta, self._space.show(text[:end]))
            self._kept = text[end:]
            return ""
        self._out.add(ReasoningDelta, self._space.show(text[: found.start()]))
        self._space.drop()
        self._state = _State.CLOSED
        return text[found.end() if found[0] == CLOSING else found.start() :]
