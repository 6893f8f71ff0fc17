"""NgramProposer: what may follow a sequence's last tokens, copied from where the same tokens stood before; no torch.

    token_ids   ... the quick brown | fox jumps over ...... the quick brown ?
                    first follower -^                       last n tokens -^ proposals: fox jumps over

The longest run of last tokens that stood somewhere before is looked up, from `longest` down to `shortest`: the more tokens
agree, the better their followers do. Of its places the latest is taken: it may hold what was changed since (an edited name,
the row of a table before this one). A copy that reaches the end of the sequence goes on with itself, so that a period of p
tokens is proposed in full where p is less than `num_proposals`.

Each sequence has an index of its own, n-gram to the place behind its latest occurrence, by hash and believed by comparison.
A token costs one entry for each n, once. It holds the n-grams of the last max_indexed tokens at least and of twice as many at
most: entries are kept in two generations, and the older one is dropped when the younger is full.

A proposal that is rejected costs a row of a step, so a sequence backs off: after `misses` proposals in a row of which nothing
was accepted it waits for 2^(misses - 1) - 1 tokens, at most MAX_WAIT, before it proposes again. One accepted token ends that.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

LONGEST = 4
SHORTEST = 2
MAX_INDEXED = 2**15
"""An index takes about 350 bytes a token, less than a hundredth of its keys and values."""
MAX_WAIT = 31
"""Most tokens that a sequence goes without a proposal while there is something to propose."""


@dataclass(eq=False, slots=True)
class _Index:
    """N-grams of one sequence, by length and generation, and how its proposals have fared."""

    young: tuple[dict[int, int], ...]
    old: tuple[dict[int, int], ...]
    num_indexed: int = 0
    """Tokens of which every n-gram that has a follower is in here."""
    num_young: int = 0
    misses: int = 0
    """Proposals in a row of which nothing was accepted."""
    resumes_at: int = 0
    """Tokens that the sequence has when it proposes again."""


@dataclass(eq=False, slots=True)
class NgramProposer:
    """Proposals for all sequences of an engine, by sequence id."""

    num_proposals: int
    """Most tokens in a proposal."""
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
        """Sequences that have an index."""
        return len(self._indexes)

    def propose(self, sequence_id: int, token_ids: Tokens[int]) -> tuple[int, ...]:
        """What may follow all of these tokens, at most `num_proposals`; () where nothing is known or the sequence backs off."""
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
            # len(token_ids) - place tokens were there to copy; what follows them repeats them.
            copied.append(copied[len(copied) - (len(token_ids) - place)])
        return tuple(copied)

    def is_waiting(self, sequence_id: int, num_tokens: int) -> bool:
        """Whether a sequence that has come to so many tokens backs off, and will propose nothing."""
        index = self._indexes.get(sequence_id)
        return index is not None and num_tokens < index.resumes_at

    def book(self, sequence_id: int, num_accepted: int, num_tokens: int) -> None:
        """What became of a proposal of a sequence that has so many tokens now."""
        index = self._indexes.get(sequence_id)
        if index is None:
            return
        index.misses = 0 if num_accepted else index.misses + 1
        wait = min(2 ** min(index.misses - 1, 16) - 1, MAX_WAIT) if index.misses else 0
        index.resumes_at = num_tokens + wait

    def forget(self, sequence_id: int) -> None:
        """A sequence that has ended, or was preempted: should it propose again, it is read again. Unknown ones are nothing."""
        self._indexes.pop(sequence_id, None)

    def _empty(self) -> tuple[dict[int, int], ...]:
        return tuple({} for _ in range(self.longest - self.shortest + 1))

    def _extend(self, index: _Index, token_ids: Tokens[int]) -> None:
        """Enter every n-gram that ends before the last token, so that the sequence's own last n-gram is not among them."""
        while index.num_indexed < len(token_ids) - 1:
            if index.num_young == self.max_indexed:
                index.old, index.young, index.num_young = index.young, self._empty(), 0
            end = min(len(token_ids) - 1, index.num_indexed + self.max_indexed - index.num_young)
            for n, entries in enumerate(index.young, self.shortest):
                first = max(index.num_indexed + 1 - n, 0)  # n-grams from here on end behind token num_indexed or later
                part = token_ids[first:end]
                if len(part) == n:  # a decoding sequence has one new token
                    entries[hash(tuple(part))] = end
                    continue
                grams = zip(*(part[offset:] for offset in range(n)), strict=False)
                entries.update(zip(map(hash, grams), range(first + n, end + 1), strict=False))
            index.num_young += end - index.num_indexed
            index.num_indexed = end

    def _find(self, index: _Index, token_ids: Tokens[int]) -> int | None:
        """The place behind the latest occurrence of the longest n-gram at the end that stood somewhere before."""
        for n in range(min(self.longest, len(token_ids) - 1), self.shortest - 1, -1):
            last = token_ids[len(token_ids) - n :]
            key = hash(tuple(last))
            for entries in (index.young[n - self.shortest], index.old[n - self.shortest]):
                place = entries.get(key)
                if place is not None and token_ids[place - n : place] == last:
                    return place
        return None
