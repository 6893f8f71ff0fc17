"""Distinguishes control tokens written in messages from those of the template, and encodes them as text; no torch.

A message may hold "<|im_end|>". As a control token it would end the turn and let its author speak in another role, so in
content it is text: the same characters, cut into tokens like any others.

    marked    a copy of the messages with marks at their control tokens, for a second rendering
    find      the control tokens of the messages in the result, by their marks
    encode    all at once, with the template's control tokens as placeholders and every other as text

Text without such tokens skips these steps. Marks are noncharacters of Unicode, which no text has.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import PromptError

if TYPE_CHECKING:
    import tokenizers

START, END = "\ufdd0", "\ufdd1"
PLACEHOLDER = "\ufdd2"
MARKS = re.compile(f"[{START}{END}{PLACEHOLDER}]")
Span = tuple[int, int]
LARGE_TEXT_CHARS = 2**14
"""Fewest characters of a text to encode without the GIL."""


def encode_ids(backend: "tokenizers.Tokenizer", text: str, add_special_tokens: bool) -> list[int]:
    """Encode a text. Encode a large one as a batch, which releases the GIL; a single text holds it for seconds."""
    if len(text) < LARGE_TEXT_CHARS:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class Mark(NamedTuple):
    """A mark before position `place` of a text."""

    place: int
    sign: str


class ControlTokens:
    """Special tokens of a tokenizer by text, and other added tokens, which hide them."""

    def __init__(self, special: Mapping[str, int], kept_whole: Iterable[str] = ()) -> None:
        self.special = {text: token_id for text, token_id in special.items() if text}
        longest_first = sorted({*self.special, *filter(None, kept_whole)}, key=lambda text: (-len(text), text))
        self._any = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        texts = sorted(self.special, key=lambda text: (-len(text), text))
        self._special = re.compile("(?=({}))".format("|".join(map(re.escape, texts)))) if texts else None

    @cached_property
    def _heads(self) -> frozenset[str]:
        return frozenset(text[:length] for text in self.special for length in range(1, len(text)))

    @cached_property
    def _tails(self) -> frozenset[str]:
        return frozenset(text[length:] for text in self.special for length in range(1, len(text)))

    def spans(self, text: str) -> list[Span]:
        """Find the control tokens in a text, including those that overlap."""
        if self._special is None:
            return []
        return [(match.start(), match.start() + len(match[1])) for match in self._special.finditer(text)]

    def _marks(self, text: str, around: bool) -> tuple[set[Mark], int]:
        """Return the places of marks, and the number of whole control tokens.

        Partial control tokens at either end of the text count too, because adjacent text may complete them. Their
        inside then reaches to that end of the text.
        """
        whole, size = self.spans(text), len(text)
        longest = min(max(map(len, self.special), default=0) - 1, size)
        tails = [(0, length) for length in range(1, longest + 1) if text[:length] in self._tails]
        heads = [(size - length, size) for length in range(1, longest + 1) if text[size - length :] in self._heads]
        if around:
            both = ((Mark(start, START), Mark(end, END)) for start, end in (*whole, *tails, *heads))
            return {mark for pair in both for mark in pair}, len(whole)
        inside = [start + 1 for start, end in whole if end - start > 1]
        inside += [end - 1 for _, end in tails] + [start + 1 for start, _ in heads]
        lone = {mark for start, end in whole if end - start == 1 for mark in (Mark(start, START), Mark(end, END))}
        return {Mark(place, START) for place in inside} | lone, len(whole)

    def marked(self, value: object, around: bool) -> tuple[object, int]:
        """Copy plain data, marking inside or around whole and partial control tokens; also count the whole ones."""
        if isinstance(value, str):
            marks, num_whole = self._marks(value, around)
            return _with_marks(value, sorted(marks)), num_whole
        if isinstance(value, list):
            pairs = [self.marked(item, around) for item in value]
            return [copy for copy, _ in pairs], sum(count for _, count in pairs)
        if isinstance(value, dict):
            pairs = [(self.marked(key, around), self.marked(item, around)) for key, item in value.items()]
            return {k[0]: v[0] for k, v in pairs}, sum(k[1] + v[1] for k, v in pairs)
        return value, 0

    def find(self, text: str, marks: list[Mark]) -> list[Span]:
        """Find the control tokens of a rendered text that come from messages: marked inside, or on both sides."""
        starts = {place for place, sign in marks if sign == START}
        ends = {place for place, sign in marks if sign == END}
        own: list[Span] = []
        for start, end in self.spans(text):
            is_around = start in starts and end in ends
            if is_around or any(place in starts or place in ends for place in range(start + 1, end)):
                own.append((start, end))
        return own

    def in_template(self, text: str, own: list[Span]) -> Iterator[tuple[int, int, str]]:
        """Yield the template's control tokens, matched like the tokenizer: leftmost and longest."""
        taken, place = set(own), 0
        while self._any is not None and (match := self._any.search(text, place)) is not None:
            if match.span() in taken or any(s < match.end() and match.start() < e for s, e in own):
                place = match.start() + 1
                continue
            if match[0] in self.special:
                yield match.start(), match.end(), match[0]
            place = match.end()


def _with_marks(text: str, marks: list[Mark]) -> str:
    pieces, last = [], 0
    for place, sign in marks:
        pieces += (text[last:place], sign)
        last = place
    return "".join((*pieces, text[last:])) if marks else text


def unmarked(text: str) -> tuple[str, list[Mark]]:
    """Return a rendered text without its marks, and their places."""
    marks = [Mark(match.start() - before, match[0]) for before, match in enumerate(MARKS.finditer(text))]
    return MARKS.sub("", text), marks


def _with_special(state: str, texts: set[str]) -> str:
    """Flag these added tokens as special in a saved tokenizer: only special tokens can be encoded as text."""
    whole = json.loads(state)
    for token in whole["added_tokens"]:
        token["special"] = token["special"] or token["content"] in texts
    return json.dumps(whole)


class ContentEncoder:
    """A second tokenizer that reads control tokens as text, with placeholders for the template's own."""

    def __init__(self, backend: "tokenizers.Tokenizer", control: ControlTokens) -> None:
        import tokenizers

        added = backend.get_added_tokens_decoder()
        plain = {token.content for token in added.values() if not token.special} & control.special.keys()
        state = backend.to_str()
        self._backend = tokenizers.Tokenizer.from_str(_with_special(state, plain) if plain else state)
        self._backend.encode_special_tokens = True
        self._control = control
        self._placeholders = {
            text: f"{PLACEHOLDER}{number}{PLACEHOLDER}" for number, text in enumerate(control.special)
        }
        flags = {token.content: token for token in added.values()}
        self._backend.add_tokens(
            [
                tokenizers.AddedToken(
                    placeholder,
                    single_word=flags[text].single_word,
                    lstrip=flags[text].lstrip,
                    rstrip=flags[text].rstrip,
                    normalized=flags[text].normalized,
                    special=False,
                )
                for text, placeholder in self._placeholders.items()
            ]
        )
        self._meant = {
            self._backend.token_to_id(placeholder): control.special[text]
            for text, placeholder in self._placeholders.items()
        }

    def encode(self, text: str, own: list[Span], add_special_tokens: bool) -> list[int]:
        """Encode a text; the control tokens at `own` are text."""
        if MARKS.search(text):
            raise PromptError("tokenizer.reserved_characters")
        pieces, last = [], 0
        for start, end, token in self._control.in_template(text, own):
            pieces += (text[last:start], self._placeholders[token])
            last = end
        encoded = encode_ids(self._backend, "".join((*pieces, text[last:])), add_special_tokens)
        written = {self._control.special[text[start:end]] for start, end in own}
        # Check this: a vocabulary may hold the same text as an ordinary token.
        if not add_special_tokens and not written.isdisjoint(encoded):
            token_id = next(token_id for token_id in encoded if token_id in written)
            raise PromptError("tokenizer.unescapable_token", token_id=token_id)
        return [self._meant.get(token_id, token_id) for token_id in encoded]
