"""TextStream detokenizes a streaming completion in constant time per token; no torch.

The tokenizer's decoder gives the bytes of each token. A text is its tokens' bytes joined and decoded as UTF-8, so it grows
token by token: written text never changes, and at most the three bytes of an unfinished character wait. Invalid bytes become
U+FFFD, each broken run as Unicode recommends.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.errors import UnsupportedModelError

KNOWN_DECODERS = ("none", "ByteLevel", "Metaspace", "sequences of Replace, ByteFallback, Fuse and Strip")
MIN_CONTEXT_BYTES = 8
"""Prompt bytes that affect the continuation: twice the longest character."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """Converts token strings to bytes; `first_piece` is for the first token of a text."""

    piece: Callable[[str], bytes]
    first_piece: Callable[[str], bytes]
    strip: str = ""
    max_strips: int = 0


class TokenPieces:
    """The bytes of every token id, cached."""

    def __init__(self, token_of: Callable[[int], str | None], rule: DecodeRule, skipped: frozenset[int]) -> None:
        self._token_of = token_of
        self.rule = rule
        self.skipped = skipped
        """Ids to leave out of a text without special tokens."""
        self._cache: dict[int, bytes | None] = {}

    def piece(self, token_id: int) -> bytes | None:
        """Return the bytes of a token within a text; None for ids without a token."""
        try:
            return self._cache[token_id]
        except KeyError:
            token = self._token_of(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                return None
            self._cache[token_id] = piece = self.rule.piece(token)
            return piece

    def first_piece(self, token_id: int) -> bytes:
        """Return the bytes of a token at the start of a text."""
        token = self._token_of(token_id)
        assert token is not None, f"{token_id=} has a piece but no token"
        return self.rule.first_piece(token)


class TextStream:
    """Turns token ids into text, in constant time per token; returned text never changes.

    After `follow`, all pushed texts and the last one together equal the text that decoding prompt and completion at once would
    add. At most the bytes of one unfinished character wait. A character that spans both belongs to the completion.
    """

    def __init__(
        self, pieces: TokenPieces, skip_special_tokens: bool, kept_token_ids: frozenset[int] = frozenset()
    ) -> None:
        """`kept_token_ids` are special tokens that count as text."""
        self._pieces = pieces
        self._skipped = pieces.skipped if skip_special_tokens else frozenset()
        if kept_token_ids:
            self._skipped -= kept_token_ids
        self._started = False
        self._strips_left = pieces.rule.max_strips
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def follow(self, token_ids: Sequence[int]) -> None:
        """Continue a text of these tokens; reads only the last ones that matter."""
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
        """Return the text that these tokens complete."""
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
        """Return incomplete trailing bytes as U+FFFD."""
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


def decode_rule(decoder_json: bytes | str | None, origin: str) -> DecodeRule:
    """Return the rule of a `tokenizers` decoder, given as JSON; None for a tokenizer without one."""
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
        fix, value = "Use a tokenizer with one of them", names or "Sequence"
        raise UnsupportedModelError(
            "tokenizer.unsupported", file=origin, what="decoder", value=value, accepted=KNOWN_DECODERS, fix=fix
        )
    return rule


def byte_alphabet() -> dict[str, int]:
    """Map the characters of byte-level vocabularies to bytes: printable Latin-1 unchanged, others from U+0100."""
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
    """Return the rule for replacements, then byte tokens, then a strip at the start; None for any other order."""
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
