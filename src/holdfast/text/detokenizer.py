"""IncrementalDetokenizer: the text of a completion as its tokens come, in constant time a token; no torch."""

from collections.abc import Sequence

from holdfast.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """What the tokens of a completion add to the text of its prompt.

    All deltas and the flush together are exactly what decoding prompt and completion at once would add. At most the
    bytes of one unfinished character are held back. A character that the prompt begins and the completion ends belongs
    to the completion.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._stream = tokenizer.text_stream(skip_special_tokens)
        self._stream.follow(prompt_token_ids)

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; it never changes later."""
        return self._stream.push(token_ids)

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        return self._stream.finish()
