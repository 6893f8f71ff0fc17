"""AnswerFormat, AnswerParser: split a streaming answer into reasoning, content and tool calls; no torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, DeltaList, ReasoningDelta, ToolCallDelta, partial_end
from holdfast.text.harmony import HARMONY, HarmonyParser
from holdfast.text.reasoning import CLOSING, ReasoningFormat, ReasoningParser, Thoughts
from holdfast.text.tool_calls import AnswerReader, ToolFormat
from holdfast.text.tools import Tool

if TYPE_CHECKING:
    from holdfast.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format of the answers to one request."""

    reasoning: ReasoningFormat | None = None
    calls: ToolFormat | None = None
    """None if the request has no tools, or if calls stay in the text."""
    tools: tuple[Tool, ...] = ()

    @property
    def splits(self) -> bool:
        """True if an answer may hold reasoning or calls."""
        return self.reasoning is not None or self.calls is not None

    @property
    def thoughts_end(self) -> str:
        """The marker before the content."""
        return CLOSING if self.reasoning is None else self.reasoning.ending

    def thoughts(self, prompt: str | None) -> Thoughts:
        """Return how an answer to this prompt may begin."""
        return "none" if self.reasoning is None else self.reasoning.thoughts(prompt)

    def special_tokens(self, tokenizer: "Tokenizer | None") -> dict[str, int]:
        """Find markers that are special tokens; text includes them only if it is parsed."""
        if tokenizer is None:
            return {}
        names = (*(self.reasoning.tokens if self.reasoning else ()), *(self.calls.tokens if self.calls else ()))
        return _ids(tokenizer, names, tokenizer.special_token_ids)

    def stop_token_ids(self, tokenizer: "Tokenizer | None") -> tuple[int, ...]:
        """Find the tokens that end an answer of this format."""
        is_channel = self.reasoning is not None and self.reasoning.is_channel
        names = HARMONY.stops if is_channel else self.calls.stops if self.calls else ()
        return () if tokenizer is None else tuple(_ids(tokenizer, names, None).values())

    def parser(self, prompt: str | None = None, hidden: Sequence[str] = ()) -> "AnswerParser":
        """Make the parser of one answer to this prompt. Stray markers in `hidden` are removed."""
        tools = None if self.calls is None else self.tools
        if self.calls is HARMONY or (self.reasoning is not None and self.reasoning.is_channel):
            reads_reasoning = self.reasoning is not None
            return AnswerParser(
                None, HarmonyParser(tools, reads_reasoning=reads_reasoning, prompt=prompt), MarkerFilter(hidden)
            )
        calls = None if self.calls is None else self.calls.parser(tools)
        ends = [] if self.calls is None else self.calls.ends_thoughts(self.tools)
        reasoning = None if self.reasoning is None else self.reasoning.parser(prompt, ends)
        return AnswerParser(reasoning, calls, MarkerFilter(hidden))


def _ids(tokenizer: "Tokenizer", names: Sequence[str], among: frozenset[int] | None) -> dict[str, int]:
    ids: Mapping[str, int | None] = {name: tokenizer.vocabulary_id(name) for name in names}
    return {name: one for name, one in ids.items() if one is not None and (among is None or one in among)}


class MarkerFilter:
    """Removes markers from content and reasoning, even if split between deltas. Arguments stay unchanged."""

    def __init__(self, hidden: Sequence[str] = ()) -> None:
        self._hidden = tuple(hidden)
        self._marker = re.compile("|".join(map(re.escape, hidden)))
        self._kept = ""
        self._kind: type[ContentDelta] | type[ReasoningDelta] = ContentDelta
        """Kind of the held text, which may begin a marker."""

    def filtered(self, deltas: list[AnswerDelta]) -> list[AnswerDelta]:
        """Return the deltas without markers."""
        if not self._hidden:
            return deltas
        out = DeltaList()
        for delta in deltas:
            if isinstance(delta, ToolCallDelta) or not isinstance(delta, self._kind):
                out.add(self._kind, self.rest())
            if isinstance(delta, ToolCallDelta):
                out.append(delta)
                continue
            self._kind = type(delta)
            out.add(self._kind, self._without_markers(self._kept + delta.text))
        return out.take()

    def _without_markers(self, text: str) -> str:
        pieces = self._marker.split(text)
        end = len(pieces[-1]) - partial_end(pieces[-1], *self._hidden)
        pieces[-1], self._kept = pieces[-1][:end], pieces[-1][end:]
        return "".join(pieces)

    def finish(self) -> list[AnswerDelta]:
        """Return the held text, at the end of the answer."""
        rest = self.rest()
        return [self._kind(rest)] if rest else []

    def rest(self) -> str:
        kept, self._kept = self._kept, ""
        return kept


class AnswerParser:
    """Parses one completion: splits off thoughts first; only the rest may call tools."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: AnswerReader | None,
        markers: MarkerFilter | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._markers = markers or MarkerFilter()

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return 0 if self._tools is None else self._tools.num_calls

    @property
    def problems(self) -> tuple[str, ...]:
        """Descriptions of texts that looked like calls, and of broken calls."""
        return () if self._tools is None else tuple(self._tools.problems)

    def feed(self, text: str) -> list[AnswerDelta]:
        """Read a further piece of the answer; return the deltas that are certain."""
        deltas: list[AnswerDelta] = [ContentDelta(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._markers.filtered(self._called(deltas))

    def finish(self) -> list[AnswerDelta]:
        """Return the deltas that were held back, at the end of the answer."""
        deltas = self._called([] if self._reasoning is None else self._reasoning.finish())
        deltas += [] if self._tools is None else self._tools.finish()
        return self._markers.filtered(deltas) + self._markers.finish()

    def _called(self, deltas: list[AnswerDelta]) -> list[AnswerDelta]:
        if self._tools is None:
            return [delta for delta in deltas if not isinstance(delta, ContentDelta) or delta.text]
        found: list[AnswerDelta] = []
        for delta in deltas:
            found += self._tools.feed(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return found
