"""Control tokens written out in messages: told from those of the template, and encoded as the text that they are; no torch.

A message may hold "<|im_end|>". Read as a control token it would end the turn and let whoever wrote it speak as
somebody else, so in content it is text: the same characters, cut into tokens like any others.

    marked    a copy of the messages with marks at their control tokens, for a second rendering
    find      marks and control tokens in what came out: which of them are the messages' own
    encode    all at once, with the template's control tokens as placeholders and every other as text

Text without such tokens takes none of these steps. Marks are noncharacters of Unicode, which no text has.
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
"""From which on a text is encoded without the interpreter's lock."""


def encode_ids(backend: "tokenizers.Tokenizer", text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. While a large one is cut, other threads go on: a batch of one lets go of the interpreter's lock,
    where a single text holds it for seconds."""
    if len(text) < LARGE_TEXT_CHARS:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class Mark(NamedTuple):
    """What stands before position `place` of a text in the marked copy of it."""

    place: int
    sign: str


class ControlTokens:
    """The special tokens of one tokenizer, by their texts; and tokens that are only kept whole, which hide them."""

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
        """Control tokens in a text, those that overlap included."""
        if self._special is None:
            return []
        return [(match.start(), match.start() + len(match[1])) for match in self._special.finditer(text)]

    def _marks(self, text: str, around: bool) -> tuple[set[Mark], int]:
        """Where marks go, and how many whole control tokens there are.

        Beginnings of control tokens at a text's end count too, and ends at its beginning: what stands beside may
        complete them, and their inside then reaches to the end of the text.
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
        """A copy of plain data with marks inside, or around, whatever is or may become a control token; and how many are."""
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
        """Control tokens of a rendered text that are the messages' own: marked inside, or on both sides."""
        starts = {place for place, sign in marks if sign == START}
        ends = {place for place, sign in marks if sign == END}
        own: list[Span] = []
        for start, end in self.spans(text):
            is_around = start in starts and end in ends
            if is_around or any(place in starts or place in ends for place in range(start + 1, end)):
                own.append((start, end))
        return own

    def in_template(self, text: str, own: list[Span]) -> Iterator[tuple[int, int, str]]:
        """Control tokens as the tokenizer would find them, leftmost and longest, without those of the messages."""
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
    """A rendered text without its marks, and where they were."""
    marks = [Mark(match.start() - before, match[0]) for before, match in enumerate(MARKS.finditer(text))]
    return MARKS.sub("", text), marks


def _with_special(state: str, texts: set[str]) -> str:
    """Flag these added tokens as special in a saved tokenizer: only such tokens can be read as text."""
    whole = json.loads(state)
    for token in whole["added_tokens"]:
        token["special"] = token["special"] or token["content"] in texts
    return json.dumps(whole)


class ContentEncoder:
    """A second tokenizer, in which control tokens are text and placeholders stand for them."""

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
        """Token ids of a text in which these control tokens are text."""
        if MARKS.search(text):
            raise PromptError(
                "messages with control tokens and the noncharacters U+FDD0 to U+FDD2 were given",
                "these mark control tokens here",
                "remove them",
            )
        pieces, last = [], 0
        for start, end, token in self._control.in_template(text, own):
            pieces += (text[last:start], self._placeholders[token])
            last = end
        encoded = encode_ids(self._backend, "".join((*pieces, text[last:])), add_special_tokens)
        written = {self._control.special[text[start:end]] for start, end in own}
        # Checked, not assumed: a vocabulary may hold the same text as a piece of its own.
        if not add_special_tokens and not written.isdisjoint(encoded):
            token_id = next(token_id for token_id in encoded if token_id in written)
            raise PromptError(
                f"a message with the control token {token_id} written out was given",
                "the tokenizer cannot read it as text",
                "remove it, or pass allow_special_tokens=True",
            )
        return [self._meant.get(token_id, token_id) for token_id in encoded]
