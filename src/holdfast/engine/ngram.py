"""NgramProposer: draft tokens copied from after an earlier occurrence of a sequence's last tokens; no torch.

    token_ids   ... the quick brown | fox jumps over ...... the quick brown ?
                    first follower -^                       last n tokens -^ proposals: fox jumps over

It looks up the longest run of last tokens that occurred before, from `longest` down to `shortest`, and takes its latest
occurrence: that has recent changes (an edited name, the last row of a table). A copy that reaches the end of the
sequence continues with itself, so a period of p < `num_proposals` tokens is proposed in full.

Each sequence has an index from n-gram to the place after its latest occurrence, by hash, verified by comparison. A
token costs one entry for each n. The index holds the n-grams of the last max_indexed to 2 * max_indexed tokens, in two
generations: the older one is dropped when the younger is full.

A rejected draft costs a row of a step, so a sequence backs off: after `misses` drafts in a row without an accepted
token it waits for 2^(misses - 1) - 1 tokens, at most MAX_WAIT. One accepted token ends that.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

LONGEST = 4
SHORTEST = 2
MAX_INDEXED = 2**15
"""An index takes about 350 bytes a token, less than a hundredth of its keys and values."""
MAX_WAIT = 31
"""Longest back-off in tokens."""


@dataclass(eq=False, slots=True)
class _Index:
    """N-grams of one sequence, by length and generation, and its back-off."""

    young: tuple[dict[int, int], ...]
    old: tuple[dict[int, int], ...]
    num_indexed: int = 0
    """Tokens whose n-grams are indexed."""
    num_young: int = 0
    misses: int = 0
    """Drafts in a row without an accepted token."""
    resumes_at: int = 0
    """Number of tokens at which it proposes again."""


@dataclass(eq=False, slots=True)
class NgramProposer:
    """Draft tokens for all sequences of an engine, by sequence id."""

    num_proposals: int
    """Most draft tokens."""
    longest: int = LONGEST
    shortest: int = SHORTEST
    max_indexed: int = MAX_INDEXED
    """Tokens in a generation of an index."""
    _indexes: dict[int, _Index] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        assert self.num_proposals >= 1, f"{self.num_proposals=} proposes nothing"
        assert 1 <= self.shortest <= self.longest, f"no n-gram has {self.shortest} to {self.longest} tokens"

    @property
    def num_sequences(self) -> int:
        """Sequences with an index."""
        return len(self._indexes)

    def propose(self, sequence_id: int, token_ids: Tokens[int]) -> tuple[int, ...]:
        """Return draft tokens, at most `num_proposals`; () if unknown or backing off."""
        index = self._indexes.get(sequence_id)
        if index is None or index.num_indexed > len(token_ids):
            index = self._indexes[sequence_id] = _Index(self._empty(), self._empty())
        if len(token_ids) < index.resumes_at:
            return ()
        self._extend(index, token_ids)
        place = self._find(index, token_ids)
        if place is None:
            return ()
        copied = list(token_ids[place : place + self.num_proposals])
        while len(copied) < self.num_proposals:
            # There are len(token_ids) - place tokens to copy; further proposals repeat them.
            copied.append(copied[len(copied) - (len(token_ids) - place)])
        return tuple(copied)

    def is_waiting(self, sequence_id: int, num_tokens: int) -> bool:
        """True if a sequence of `num_tokens` backs off."""
        index = self._indexes.get(sequence_id)
        return index is not None and num_tokens < index.resumes_at

    def book(self, sequence_id: int, num_accepted: int, num_tokens: int) -> None:
        """Record the accepted tokens of a draft; the sequence now has `num_tokens`."""
        index = self._indexes.get(sequence_id)
        if index is None:
            return
        index.misses = 0 if num_accepted else index.misses + 1
        wait = min(2 ** min(index.misses - 1, 16) - 1, MAX_WAIT) if index.misses else 0
        index.resumes_at = num_tokens + wait

    def forget(self, sequence_id: int) -> None:
        """Drop the index of a sequence. Idempotent."""
        self._indexes.pop(sequence_id, None)

    def _empty(self) -> tuple[dict[int, int], ...]:
        return tuple({} for _ in range(self.longest - self.shortest + 1))

    def _extend(self, index: _Index, token_ids: Tokens[int]) -> None:
        """Index every n-gram that ends before the last token, which excludes the last n-gram itself."""
        while index.num_indexed < len(token_ids) - 1:
            if index.num_young == self.max_indexed:
                index.old, index.young, index.num_young = index.young, self._empty(), 0
            end = min(len(token_ids) - 1, index.num_indexed + self.max_indexed - index.num_young)
            for n, entries in enumerate(index.young, self.shortest):
                first = max(index.num_indexed + 1 - n, 0)  # n-grams from here on end after token num_indexed or later
                part = token_ids[first:end]
                if len(part) == n:  # a decoding sequence has one new token
                    entries[hash(tuple(part))] = end
                    continue
                grams = zip(*(part[offset:] for offset in range(n)), strict=False)
                entries.update(zip(map(hash, grams), range(first + n, end + 1), strict=False))
            index.num_young += end - index.num_indexed
            index.num_indexed = end

    def _find(self, index: _Index, token_ids: Tokens[int]) -> int | None:
        """Return the place after the latest earlier occurrence of the longest last n-gram."""
        for n in range(min(self.longest, len(token_ids) - 1), self.shortest - 1, -1):
            last = token_ids[len(token_ids) - n :]
            key = hash(tuple(last))
            for entries in (index.young[n - self.shortest], index.old[n - self.shortest]):
                place = entries.get(key)
                if place is not None and token_ids[place - n : place] == last:
                    return place
        return None
