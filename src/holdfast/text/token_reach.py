"""How much text one token can stand for, so that a text too long for a context is known before it is tokenized; no torch."""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

NO_BOUND = 2**31
"""More characters than any text has."""
_COMPOSING = {"NFC", "NFD", "NFKC", "NFKD"}
MAX_COMPOSED_CHARS = 4
"""Most characters that Unicode composes into one."""


def longest_token_chars(backend: "tokenizers.Tokenizer") -> int:
    """Characters of the longest token, times what a normalizer may have made one of; NO_BOUND where words of any
    length become one unknown token, or where a normalizer takes text away."""
    from tokenizers import models

    model = backend.model
    if not isinstance(model, models.BPE):
        return NO_BOUND
    has_bytes = model.byte_fallback and all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    if model.unk_token is not None and not has_bytes:
        return NO_BOUND
    state = backend.normalizer.__getstate__() if backend.normalizer is not None else None
    shrinking = 1 if state is None else _shrinking(json.loads(state))
    if shrinking is None:
        return NO_BOUND
    return shrinking * max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)


def _shrinking(normalizer: dict[str, object]) -> int | None:
    """How many characters a normalizer may make one of; None when there is no saying."""
    kind = normalizer.get("type")
    if kind == "Sequence":
        inner = normalizer.get("normalizers")
        product = 1
        for step in inner if isinstance(inner, list) else ():
            factor = _shrinking(step)
            if factor is None:
                return None
            product *= factor
        return product
    if kind in _COMPOSING:
        return MAX_COMPOSED_CHARS
    if kind == "Replace":
        pattern = normalizer.get("pattern")
        old = pattern.get("String") if isinstance(pattern, dict) else None
        new = normalizer.get("content")
        return 1 if isinstance(old, str) and isinstance(new, str) and len(new) >= len(old) else None
    return 1 if kind in ("Prepend", "Lowercase") else None
