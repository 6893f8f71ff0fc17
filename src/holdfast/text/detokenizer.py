"""IncrementalDetokenizer: the text of a completion as its tokens come, in constant time a token; no torch.

What each token adds to a text, as bytes, is read from the decoder of its tokenizer. A text is its tokens' bytes joined
and read as UTF-8, so it can be built token by token: nothing that was written changes later, and at most the three
bytes of an unfinished character wait. Bytes that are no character become U+FFFD, each broken run in the way that
Unicode recommends, wherever they stand.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.errors import UnsupportedModelError

if TYPE_CHECKING:
    from holdfast.text.tokenizer import Tokenizer

KNOWN_DECODERS = "none, ByteLevel, Metaspace, and sequences of Replace, ByteFallback, Fuse and Strip"
MIN_CONTEXT_BYTES = 8
"""Bytes of a prompt that decide how the text goes on: twice the longest character."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """How token strings become bytes."""

    piece: Callable[[str], bytes]
    first_piece: Callable[[str], bytes]
    """The same for the first token of a text."""
    strip: str = ""
    """A character that is taken off the start of a text."""
    max_strips: int = 0


class TokenPieces:
    """The bytes of every token id, looked up once each."""

    def __init__(self, token_of: Callable[[int], str | None], rule: DecodeRule, skipped: frozenset[int]) -> None:
        self._token_of = token_of
        self.rule = rule
        self.skipped = skipped
        """Ids that a text without special tokens leaves out."""
        self._cache: dict[int, bytes | None] = {}

    def piece(self, token_id: int) -> bytes | None:
        """What the token adds inside a text; None for ids that no token has."""
        try:
            return self._cache[token_id]
        except KeyError:
            token = self._token_of(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                return None
            self._cache[token_id] = piece = self.rule.piece(token)
            return piece

    def first_piece(self, token_id: int) -> bytes:
        """What the token adds at the start of a text."""
        token = self._token_of(token_id)
        assert token is not None, f"{token_id=} has a piece but no token"
        return self.rule.first_piece(token)


class TextStream:
    """Token ids in, text out, in constant time a token; what was given out never changes."""

    def __init__(
        self, pieces: TokenPieces, skip_special_tokens: bool, kept_token_ids: frozenset[int] = frozenset()
    ) -> None:
        """`kept_token_ids`: special tokens that are text all the same."""
        self._pieces = pieces
        self._skipped = pieces.skipped if skip_special_tokens else frozenset()
        if kept_token_ids:
            self._skipped -= kept_token_ids
        self._started = False
        self._strips_left = pieces.rule.max_strips
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def follow(self, token_ids: Sequence[int]) -> None:
        """Stand where a text of these tokens ends; reads only as many of them as matter."""
        needed = MIN_CONTEXT_BYTES + 4 * self._strips_left
        tail: list[int] = []
        for token_id in reversed(token_ids):
            if needed <= 0:
                break
            tail.append(token_id)
            if token_id not in self._skipped:
                needed -= len(self._pieces.piece(token_id) or b"")
        self.push(reversed(tail))

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        found: list[bytes] = []
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            piece = self._pieces.piece(token_id)
            if piece is None:
                continue
            if not self._started:
                self._started = True
                piece = self._pieces.first_piece(token_id)
            found.append(piece)
        return self._stripped(self._characters.decode(b"".join(found)))

    def finish(self) -> str:
        """What was waiting for more bytes, as U+FFFD."""
        return self._stripped(self._characters.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if not self._strips_left or not text:
            return text
        start = 0
        while start < len(text) and self._strips_left and text[start] == self._pieces.rule.strip:
            start += 1
            self._strips_left -= 1
        if start < len(text):
            self._strips_left = 0
        return text[start:]


class IncrementalDetokenizer:
    """What the tokens of a completion add to the text of its prompt.

    All deltas and the flush together are exactly what decoding prompt and completion at once would add. At most the
    bytes of one unfinished character are held back. A character that the prompt begins and the completion ends belongs
    to the completion.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        kept_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._stream = tokenizer.text_stream(skip_special_tokens, kept_token_ids)
        self._stream.follow(prompt_token_ids)

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; it never changes later."""
        return self._stream.push(token_ids)

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        return self._stream.finish()


def decode_rule(decoder_json: bytes | str | None, origin: str) -> DecodeRule:
    """The rule of a `tokenizers` decoder in its JSON form; None is a tokenizer without one."""
    if decoder_json is None:
        return DecodeRule(lambda token: b" " + token.encode(), str.encode)
    steps = _flattened(json.loads(decoder_json))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodeRule(_byte_level_piece, _byte_level_piece)
    if kinds == ["Metaspace"]:
        return _metaspace_rule(steps[0])
    rule = _sequence_rule(steps)
    if rule is None:
        names = " + ".join(str(kind) for kind in kinds)
        raise UnsupportedModelError(
            f"{origin} joins tokens with the decoder {names or 'Sequence'}",
            f"those known here are {KNOWN_DECODERS}",
            "use a tokenizer with one of them",
        )
    return rule


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: printable Latin-1 for itself, others from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


_BYTE_OF = byte_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _metaspace_rule(step: dict[str, object]) -> DecodeRule:
    mark = str(step.get("replacement", "▁"))
    inside = lambda token: token.replace(mark, " ").encode()  # noqa: E731
    if step.get("prepend_scheme") == "never":
        return DecodeRule(inside, inside)
    return DecodeRule(inside, lambda token: token.replace(mark, "").encode())


def _sequence_rule(steps: list[dict[str, object]]) -> DecodeRule | None:
    """Replacements in each token, then byte tokens, then a strip at the start of the whole; None for any other order."""
    replacements: list[tuple[str, str]] = []
    has_byte_tokens = fused = False
    strip, max_strips = "", 0
    for step in steps:
        kind = step.get("type")
        if kind == "Replace" and not has_byte_tokens and not fused:
            pattern = step.get("pattern")
            if not isinstance(pattern, dict) or not pattern.get("String"):
                return None
            replacements.append((str(pattern["String"]), str(step.get("content", ""))))
        elif kind == "ByteFallback" and not has_byte_tokens and not fused:
            has_byte_tokens = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and not max_strips and step.get("stop") == 0:
            strip, max_strips = str(step.get("content")), int(str(step.get("start")))
        else:
            return None

    def piece(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte else token.encode()

    return DecodeRule(piece, piece, strip, max_strips)


def _flattened(decoder: dict[str, object]) -> list[dict[str, object]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    inner = decoder.get("decoders")
    assert isinstance(inner, list), f"{decoder=} has no list of decoders"
    return [step for part in inner for step in _flattened(part)]
