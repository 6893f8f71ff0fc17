"""The text on which key scales are measured (runner/key_scale.py), as token ids; no torch."""

from importlib import resources

from holdfast.text.tokenizer import Tokenizer


def key_text_ids(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of prose, code and data in turns, with what the tokenizer puts before a text.

    Ids that the model does not know are left out.
    """
    text = resources.files("holdfast").joinpath("data", "key_scale.txt").read_text("utf-8")
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    return tuple(token_id for token_id in token_ids if token_id < vocab_size)
