"""A text as windows of tokens of one length, each read as if nothing stood before it; no torch."""

from holdfast.errors import PromptError
from holdfast.text.tokenizer import Tokenizer

MIN_WINDOW = 2
"""The first token of a window is predicted by nothing."""
PROBE = "a"


def cut_windows(
    tokenizer: Tokenizer, text: str, window: int, max_tokens: int | None, vocab_size: int
) -> list[list[int]]:
    """Token ids of whole windows one behind the other; what is left at the end is left out.

    Where the tokenizer begins a text with a token of its own, every window begins with it: models that know such a token
    read badly without it. `max_tokens` bounds the tokens of all windows together, rounded up to one window.
    """
    assert window >= MIN_WINDOW, f"{window=} has no token to predict"
    prefix = beginning(tokenizer)
    num_own = window - len(prefix)
    if num_own < 1:
        raise PromptError(
            f"windows of {window} tokens were asked",
            f"the tokenizer begins each with {len(prefix)} of its own",
            f"ask for {len(prefix) + 1} or more",
        )
    most = None if max_tokens is None else max(1, max_tokens // window)
    if most is not None:
        # What is beyond the last window need not be tokenized; a token more, because the cut may fall inside one.
        text = text[: (most * num_own + 1) * tokenizer.longest_token_chars]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    num_windows = len(token_ids) // num_own
    if num_windows == 0:
        has = len(token_ids) + len(prefix)
        raise PromptError(
            f"windows of {window} tokens were asked",
            f"the whole text has {has}",
            "give a longer text" + (f", or ask for windows of {has}" if has > MIN_WINDOW else ""),
        )
    if max(token_ids) >= vocab_size:
        raise PromptError(
            f"the text holds token id {max(token_ids)}",
            f"the vocabulary has {vocab_size} tokens",
            "take the model's own tokenizer",
        )
    starts = range(0, num_windows * num_own, num_own)
    return [prefix + token_ids[start : start + num_own] for start in starts[:most]]


def beginning(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before every text."""
    bare, whole = (tokenizer.encode(PROBE, add_special_tokens=adds) for adds in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []
