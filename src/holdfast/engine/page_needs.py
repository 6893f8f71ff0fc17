"""PageNeeds: pages that a sequence lacks, may still take, and holds at most, per cache group; no torch."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.errors import RequestError
from holdfast.request.sequence import Sequence


def skipped(group: CacheGroup, num_places: int, num_kept: int) -> range:
    """Return the places after the first `num_places` that a sequence with `num_kept` tokens on pages never fills.

    Only a fork that shares no kept page skips places: it gets kept pages of its own, and begins in a later block.
    """
    return group.passed(num_kept) if num_places < group.kept_pages else range(0)


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """The arithmetic of one engine: its limits, its number of pages and its cache groups."""

    limits: Limits
    num_pages: int
    groups: tuple[CacheGroup, ...]

    def missing(self, tables: SequenceABC[SequenceABC[int]], num_tokens: int, num_kept: int = 0) -> list[int]:
        """Count the pages that each group lacks for the first `num_tokens` of a sequence with `num_kept` on pages."""
        pairs = zip(self.groups, tables, strict=True)
        return [
            group.pages_for(num_tokens) - len(table) - len(skipped(group, len(table), num_kept))
            for group, table in pairs
        ]

    def capacity(self, tables: SequenceABC[SequenceABC[int]]) -> int:
        """Return the number of tokens that the tables of all groups can hold."""
        most = self.limits.max_model_len
        pairs = zip(self.groups, tables, strict=True)
        return min(
            (most if table else 0) if group.is_state else len(table) * group.page_tokens for group, table in pairs
        )

    def claim(
        self,
        sequence: Sequence,
        tables: SequenceABC[SequenceABC[int]],
        num_kept: int,
        longest: int,
        is_shared: Callable[[int], bool],
    ) -> int:
        """Count pages that it may still take until its tokens, known and coming, and a further page are computed.

        `num_kept`: its tokens on pages. `is_shared`: the page has other owners, so releasing it frees nothing.
        """
        num_tokens, budget = sequence.num_tokens_coming, self.limits.max_num_batched_tokens
        total = 0
        for group, table in zip(self.groups, tables, strict=True):
            end = min(num_tokens + group.page_tokens, longest)
            claim = group.pages_for(end) - len(table)
            if group.window is not None and claim > 0:
                passed, later = group.passed(num_kept), group.passed(end - 1)
                num_stuck = sum(map(is_shared, table[passed.stop : later.stop]))
                most = group.most_pages(end, min(budget, max(num_tokens - num_kept, 1)))
                claim = min(claim, most - group.num_held(len(table), num_kept) + num_stuck)
            total += max(claim, 0)
        return total

    def longest(self, sequence: Sequence) -> int:
        """Return the most tokens computed for a sequence: its last one never is."""
        longest = max(sequence.num_prompt_tokens + sequence.max_tokens - 1, len(sequence.token_ids))
        return min(longest, self.limits.max_model_len)

    def max_pages(self, sequence: Sequence) -> int:
        """Return the most pages it holds in all groups; raise RequestError if it can never run."""
        num_tokens, max_model_len = len(sequence.token_ids), self.limits.max_model_len
        if not 1 <= num_tokens <= max_model_len:
            raise RequestError("request.sequence_length", count=num_tokens, maximum=max_model_len)
        longest, budget = self.longest(sequence), self.limits.max_num_batched_tokens
        max_pages = sum(group.most_pages(longest, budget) for group in self.groups)
        if max_pages > self.num_pages:
            raise RequestError(
                "request.never_fits",
                prompt=sequence.num_prompt_tokens,
                output=sequence.max_tokens,
                capacity=self._capacity(max_pages),
            )
        return max_pages

    def _capacity(self, max_pages: int) -> str:
        first = self.groups[0]
        if len(self.groups) == 1 and first.window is None and not first.is_state:
            return f"the KV cache holds {self.num_pages * first.page_tokens} tokens"
        return f"the KV cache holds {self.num_pages} pages, and such a sequence needs {max_pages}"
