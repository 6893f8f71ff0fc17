"""ReasoningParser separates a model's thoughts, between <think> and </think>, from its answer; no torch.

An answer begins with thoughts. Some templates end the prompt with <think>; the answer then has only </think>. White
space beside the markers belongs to them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import RequestError
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, HeldSpace, ReasoningDelta, partial_end
from holdfast.text.harmony import CHANNEL, MESSAGE, TOKENS, TURN
from holdfast.text.tool_calls import AnswerReader

AUTO, NONE = "auto", "none"
OPENING, CLOSING = "<think>", "</think>"

Thoughts = Literal["none", "may", "open", "channels"]
"""How an answer begins: without thoughts, maybe with <think>, inside thoughts that the prompt opened, or with messages
in channels."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Format of a model family's thoughts."""

    name: str
    is_open: bool
    """True if answers begin with thoughts, with or without <think>."""
    is_channel: bool = False
    """True if thoughts are messages in a channel, which HarmonyParser reads."""

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
        """Return how an answer begins: the end of the prompt shows if thoughts were begun or skipped."""
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
"""Families whose prompt shows if thoughts were begun, like Qwen3's; and vLLM's names."""


def choose_reasoning_parser(template: str | None, name: str = AUTO) -> ReasoningFormat | None:
    """Return the format of this name, or the chat template's; None if there is none."""
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


class ReasoningParser(AnswerReader):
    """Reads one answer: `feed` returns certain deltas, `finish` the rest."""

    def __init__(self, is_open: bool = False, also_ends: Sequence[str] = ()) -> None:
        super().__init__()
        self._is_open = is_open
        self._ends = (CLOSING, *also_ends)
        """Markers that end thoughts. A call's marker does too: some models omit </think> before it."""
        self._end = re.compile("|".join(map(re.escape, self._ends)))
        self._space = HeldSpace()
        self._state = self._start

    def finish(self) -> list[AnswerDelta]:
        """Return the deltas that were held back, at the end of the answer."""
        kept, self._kept = self._kept, ""
        if self._state == self._start:
            kind = ReasoningDelta if self._is_open else ContentDelta
            # An answer of only white space has no thoughts.
            text = kept.strip() if self._is_open else self._space.release() + kept
            self._out.add(kind, text)
        elif self._state == self._thought:
            self._out.add(ReasoningDelta, self._space.show(kept))
        self._state = self._content
        return self._out.take()

    def _start(self, text: str, place: int) -> int:
        """Look for <think>."""
        bare = text[place:].lstrip()
        begin = len(text) - len(bare)
        space = self._space.show(text[place:begin])
        if not self._is_open:
            self._out.add(ContentDelta, space)
        if bare.startswith(OPENING):
            self._space.drop()
            self._state = self._opened
            return begin + len(OPENING)
        if OPENING.startswith(bare):
            return self._keep(text, begin)
        if self._is_open:
            self._space.drop()
            self._state = self._thought
        else:
            self._out.add(ContentDelta, self._space.release())
            self._state = self._content
        return begin

    def _opened(self, text: str, place: int) -> int:
        return self._skip_space(text, place, self._thought)

    def _closed(self, text: str, place: int) -> int:
        return self._skip_space(text, place, self._content)

    def _skip_space(self, text: str, place: int, following: Callable[[str, int], int]) -> int:
        begin = len(text) - len(text[place:].lstrip())
        if begin < len(text):
            self._state = following
        return begin

    def _thought(self, text: str, place: int) -> int:
        found = self._end.search(text, place)
        if found is None:
            end = len(text) - partial_end(text[place:], *self._ends)
            self._out.add(ReasoningDelta, self._space.show(text[place:end]))
            return self._keep(text, end)
        self._out.add(ReasoningDelta, self._space.show(text[place : found.start()]))
        self._space.drop()
        self._state = self._closed
        return found.end() if found[0] == CLOSING else found.start()

    def _content(self, text: str, place: int) -> int:
        self._out.add(ContentDelta, text[place:])
        return len(text)
