"""A text as windows of tokens of equal length, each read from an empty cache; no torch."""

from holdfast.errors import PromptError
from holdfast.text.tokenizer import Tokenizer

MIN_WINDOW = 2
"""The first token of a window has no prediction."""
PROBE = "a"


def cut_windows(
    tokenizer: Tokenizer, text: str, window: int, max_tokens: int | None, vocab_size: int
) -> list[list[int]]:
    """Cut a text into whole windows of token ids; drop the rest.

    If the tokenizer begins a text with a special token, every window begins with it: such models read badly without it.
    `max_tokens` bounds all windows together, rounded up to one window.
    """
    assert window >= MIN_WINDOW, f"{window=} has no token to predict"
    prefix = beginning(tokenizer)
    num_own = window - len(prefix)
    if num_own < 1:
        raise PromptError("eval.short_window", window=window, num_special=len(prefix), minimum=len(prefix) + 1)
    most = None if max_tokens is None else max(1, max_tokens // window)
    if most is not None:
        # Tokenize only what the windows need; one token more, because the cut may fall inside one.
        text = text[: (most * num_own + 1) * tokenizer.longest_token_chars]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    num_windows = len(token_ids) // num_own
    if num_windows == 0:
        num_tokens = len(token_ids) + len(prefix)
        error = PromptError("eval.short_text", window=window, num_tokens=num_tokens)
        raise error.hinting(f"Windows of {num_tokens} tokens fit." if num_tokens > MIN_WINDOW else "")
    if max(token_ids) >= vocab_size:
        raise PromptError("eval.wrong_tokenizer", token_id=max(token_ids), vocab_size=vocab_size)
    starts = range(0, num_windows * num_own, num_own)
    return [prefix + token_ids[start : start + num_own] for start in starts[:most]]


def beginning(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer puts before every text."""
    bare, whole = (tokenizer.encode(PROBE, add_special_tokens=adds) for adds in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []
