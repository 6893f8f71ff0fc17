"""From the runner's numbers to what callers read: log-probabilities with the texts of their tokens; no torch."""

from holdfast.request.outputs import Logprob, PositionLogprobs
from holdfast.runner.sampling.result import TokenLogprobs
from holdfast.text.tokenizer import Tokenizer


def position_logprobs(measured: TokenLogprobs, num_top: int, tokenizer: Tokenizer | None) -> PositionLogprobs:
    """The token at a place first, then the `num_top` likeliest ones; a token that is both is there once."""
    found = {measured.token_id: (measured.logprob, measured.rank)}
    for place, (token_id, logprob) in enumerate(measured.top[:num_top]):
        found.setdefault(token_id, (logprob, place + 1))
    return {
        token_id: Logprob(logprob, rank, "" if tokenizer is None else tokenizer.token_text(token_id))
        for token_id, (logprob, rank) in found.items()
    }


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, collected from the steps that computed them.

    A preempted sequence computes its prompt again; what is known already is kept.
    """

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self._num_top = num_top
        self._by_position: list[PositionLogprobs | None] = [None]
        self._num_prompt_tokens = num_prompt_tokens

    def collect(self, start: int, measured: tuple[TokenLogprobs, ...], tokenizer: Tokenizer | None) -> None:
        """Take in prompt positions start + 1, start + 2, ..."""
        num_known = len(self._by_position)
        assert start + 1 <= num_known, f"prompt positions {num_known} to {start} were computed without logprobs"
        for entry in measured[num_known - start - 1 :]:
            self._by_position.append(position_logprobs(entry, self._num_top, tokenizer))

    def whole(self) -> tuple[PositionLogprobs | None, ...]:
        """One entry a prompt token, the first None."""
        assert len(self._by_position) == self._num_prompt_tokens, (
            f"{len(self._by_position)} of {self._num_prompt_tokens} prompt positions have logprobs"
        )
        return tuple(self._by_position)
