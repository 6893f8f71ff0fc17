"""Log-probabilities in OpenAI's two shapes, for chats and for completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.request.outputs import Logprob, PositionLogprobs
from holdfast.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


class ChatLogprobWriter:
    """Writes positions of a chat's answer as `logprobs.content`."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top

    def entries(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
        """Return one entry for each token."""
        return [self._entry(token, position) for token, position in zip(token_ids, positions, strict=True)]

    def _entry(self, token_id: int, position: PositionLogprobs) -> dict[str, Any]:
        top = _most_likely(position, self._num_top)
        entry = self._token(token_id, position[token_id])
        entry["top_logprobs"] = [self._token(token, logprob) for token, logprob in top]
        return entry

    def _token(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": logprob.decoded_token,
            "logprob": max(logprob.logprob, LEAST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token_id) or b""),
        }


class CompletionLogprobWriter:
    """Writes positions of a completion as `logprobs`; offsets continue from piece to piece.

    An offset counts characters of the answer's text. All tokens of one character have the offset of that character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_top: int,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = False,
    ) -> None:
        """`prompt_token_ids` precede the text, unless the text repeats the prompt."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._text = tokenizer.text_stream(skip_special_tokens)
        self._text.follow(prompt_token_ids)
        self._num_chars = 0

    def entries(self, token_ids: Iterable[int], positions: Sequence[PositionLogprobs | None]) -> dict[str, list[Any]]:
        """Return the lists of `logprobs`; a prompt's first token has none, so two lists begin with null."""
        written: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self._tokenizer.token_text(token_id)
            written["text_offset"].append(self._num_chars)
            written["tokens"].append(text)
            self._num_chars += len(self._text.push([token_id]))
            if position is None:
                written["token_logprobs"].append(None)
                written["top_logprobs"].append(None)
                continue
            own = position[token_id]
            top = [(token_id, own), *_most_likely(position, self._num_top)]
            written["token_logprobs"].append(max(own.logprob, LEAST_LOGPROB))
            # By text, as in OpenAI's API: the likelier of two tokens with the same text wins.
            by_text: dict[str, float] = {}
            for _, logprob in top:
                number = max(logprob.logprob, LEAST_LOGPROB)
                by_text[logprob.decoded_token] = max(by_text.get(logprob.decoded_token, number), number)
            written["top_logprobs"].append(by_text)
        return written


def _most_likely(position: PositionLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    ranked = sorted(position.items(), key=lambda item: item[1].rank)
    return ranked[:num_top]
