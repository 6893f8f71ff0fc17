"""PageNeeds: how many pages a sequence needs for its tokens, claims to be admitted, and holds at its longest; no torch."""

from dataclasses import dataclass

from holdfast.config import Limits
from holdfast.errors import RequestError
from holdfast.request.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """The arithmetic of one engine: its limits and its number of pages."""

    limits: Limits
    num_pages: int

    def pages_for(self, num_tokens: int) -> int:
        """Pages that the first `num_tokens` of a sequence occupy."""
        return -(-num_tokens // self.limits.page_tokens)

    def claim(self, sequence: Sequence, max_pages: int) -> int:
        """Pages that it should still find: for every token known so far, and one more where it may ever need that."""
        wanted = min(self.pages_for(len(sequence.token_ids)) + 1, max_pages)
        return max(wanted - len(sequence.pages), 0)

    def max_pages(self, sequence: Sequence) -> int:
        """Pages that it holds at its longest (its last token is never computed); refuses one that can never run."""
        num_tokens, max_model_len = len(sequence.token_ids), self.limits.max_model_len
        if not 1 <= num_tokens <= max_model_len:
            raise RequestError(
                f"a sequence of {num_tokens} tokens was asked",
                f"1 to max_model_len={max_model_len} work",
                "change the prompt or max_model_len",
            )
        longest = max(sequence.num_prompt_tokens + sequence.max_tokens - 1, num_tokens)
        max_pages = self.pages_for(min(longest, max_model_len))
        if max_pages > self.num_pages:
            raise RequestError(
                f"{sequence.num_prompt_tokens} prompt and {sequence.max_tokens} output tokens were asked",
                f"the KV cache holds {self.num_pages * self.limits.page_tokens} tokens",
                "shorten the prompt, lower max_tokens or give the KV cache more memory",
            )
        return max_pages
