"""CacheGroup: geometry of layers that share a page table, for pool, prefix cache, scheduler and plan; no torch.

One pool of pages of equal bytes serves all groups. Each group has its own number of tokens per page.

    whole     [ page 0 | page 1 | ... | page k-1 ]     page i holds tokens [i * page_tokens, (i + 1) * page_tokens)
    window    [ HOLE   | HOLE   | ... | page k-1 ]     pages that no later token sees are given back
    entries   [ page 0 | page 1 | ... | page k-1 ]     a row of a page stands for `tokens_per_row` tokens
    near      [ page 0 | HOLE   | ... | page k-1 ]     the first tokens and the newest block stay
    state     [ page 0 .. state_pages - 1 ]            one state per sequence, whatever its length

A token at position p sees, in a group with a window of W tokens, positions [p - W + 1, p]. So a step over positions
[start, end) reads and writes [start - W + 1, end): W - 1 + n tokens, which lie on at most ceil((W - 1 + n) / page_tokens) + 1
pages wherever they begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

HOLE = -1
"""Marks a released page in a page list: no later token of the sequence sees what it held."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Geometry and lifetime of the pages of some layers."""

    name: str
    page_tokens: int
    """Tokens of a sequence that a page holds (rows times tokens per row); 0 for a state."""
    window: int | None = None
    """Number of newest tokens that a token sees, itself included; None: all."""
    state_pages: int = 0
    """Pages of a sequence's single state; 0: the group keeps rows of tokens."""
    state_period: int = 0
    """The state restarts at every multiple of so many tokens, so a hit there restores nothing; 0: only at the first."""
    tokens_per_row: int = 1
    """Tokens that a row stands for. If several, an unfinished row is in a state outside the pages, at the slot of the
    sequence. That state restarts with every row ..."""
    tokens_again: int = 0
    """... except for so many tokens before it, if rows overlap: a sequence recomputes them after a prefix hit."""
    is_blocked: bool = False
    """A token sees its own block of `window` tokens up to itself, not the newest `window` tokens."""
    kept_pages: int = 0
    """First pages that a sequence keeps as long as it lives, and that a prefix hit restores."""

    def __post_init__(self) -> None:
        is_rows = self.page_tokens >= 1 and self.state_pages == 0
        is_state = self.page_tokens == 0 and self.state_pages >= 1 and self.window is None
        assert is_rows or is_state, f"{self} keeps neither rows of tokens nor a state"
        assert self.window is None or self.window >= 1, f"{self.name} has a window of {self.window} tokens"
        assert self.state_period == 0 or is_state, f"{self.name} is no state and has a period"
        is_whole = self.tokens_per_row == 1 or (is_rows and self.page_tokens % self.tokens_per_row == 0)
        assert is_whole, f"{self.name} has {self.page_tokens} tokens a page, and rows of {self.tokens_per_row}"
        assert self.tokens_again in (0, self.tokens_per_row), f"{self.name} has {self.tokens_again=}"
        if not self.is_blocked:
            assert self.kept_pages == 0, f"{self.name} has {self.kept_pages=} and no blocks"
            return
        assert self.window is not None, f"{self.name} has blocks of no size"
        assert self.window % self.page_tokens == 0, (
            f"{self.name}: {self.window=} is not whole pages of {self.page_tokens}"
        )
        assert self.tokens_per_row == 1, f"{self.name} has blocks, and rows of {self.tokens_per_row} tokens"
        assert 0 <= self.kept_pages <= self.window // self.page_tokens, (
            f"{self.name} has {self.kept_pages=} and a block of {self.window // self.page_tokens}"
        )

    @property
    def is_state(self) -> bool:
        return self.state_pages > 0

    @property
    def has_state(self) -> bool:
        """True if a state, on pages or outside them, accumulates every written token."""
        return self.is_state or self.tokens_per_row > 1

    @property
    def can_be_open(self) -> bool:
        """True if a prefix may end inside a page: its rows stand for several tokens, so its pages are long."""
        return self.tokens_per_row > 1 and self.window is None

    def open_rows(self, num_tokens: int) -> int:
        """Return the filled rows of the page that a prefix of `num_tokens` ends inside; 0 if it ends with a page."""
        return num_tokens % self.page_tokens // self.tokens_per_row if self.can_be_open else 0

    def pages_for(self, num_tokens: int) -> int:
        """Return the length of the page list of a sequence of `num_tokens`, holes included."""
        if self.is_state:
            return self.state_pages if num_tokens else 0
        return -(-num_tokens // self.page_tokens)

    def first_page(self, start: int) -> int:
        """Return the first place whose page a step from `start` on uses, beside the kept ones; those before are passed."""
        if self.window is None:
            return 0
        if self.is_blocked:
            return start // self.window * (self.window // self.page_tokens)
        return max(0, start - self.window + 1) // self.page_tokens

    def passed(self, start: int) -> range:
        """Return the places whose pages no step from `start` on uses: holes, once they are released."""
        return range(self.kept_pages, max(self.first_page(start), self.kept_pages))

    def copied(self, num_shared: int, num_tokens: int) -> tuple[range, ...]:
        """Return the places that a fork fills with copies: what its last token, of `num_tokens`, sees and it does not share."""
        end = self.pages_for(num_tokens)
        if self.is_state:
            return (range(end),)
        first, passed = num_shared // self.page_tokens, self.passed(num_tokens - 1)
        return range(first, min(passed.start, end)), range(max(first, passed.stop), end)

    def num_held(self, num_places: int, start: int) -> int:
        """Count the pages among the first `num_places` that a step from `start` on uses."""
        passed = self.passed(start)
        return num_places - max(min(passed.stop, num_places) - passed.start, 0)

    def most_pages(self, num_tokens: int, max_step_tokens: int) -> int:
        """Return the most pages held at once while `num_tokens` are computed in steps of at most `max_step_tokens`."""
        every = self.pages_for(num_tokens)
        return every if self.window is None else min(every, self.most_held(min(max_step_tokens, num_tokens)))

    def most_held(self, step_tokens: int) -> int:
        """Return the most pages of a window that a step of `step_tokens` reads and writes, and of those it keeps."""
        assert self.window is not None, f"{self.name} keeps every token, and no step bounds that"
        # A block begins with a page, a window anywhere.
        return -(-(self.window - 1 + step_tokens) // self.page_tokens) + (self.kept_pages if self.is_blocked else 1)


def longest_sequence(groups: Sequence[CacheGroup], num_pages: int, most: int, max_step_tokens: int) -> int:
    """Return the longest length up to `most` that fits `num_pages` in steps of at most `max_step_tokens`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if sum(group.most_pages(middle, max_step_tokens) for group in groups) <= num_pages:
            low = middle
        else:
            high = middle - 1
    return low


def unrewindable(groups: Sequence[CacheGroup]) -> str | None:
    """Return why a sequence cannot be cut to a shorter one; None if it can."""
    for group in groups:
        if group.is_state:
            return (
                f"the cache group {group.name} keeps one state of a sequence, which holds every token that was written"
            )
        if group.has_state:
            return (
                f"the cache group {group.name} makes one row of {group.tokens_per_row} tokens, and a token that was added to "
                "one cannot be taken out"
            )
    return None


def tokens_again(groups: Sequence[CacheGroup]) -> int:
    """Return how many last tokens of a prefix hit a sequence recomputes without storing them."""
    return max(group.tokens_again for group in groups)


def block_tokens(groups: Sequence[CacheGroup], grid: int = 1) -> int:
    """Return the tokens of a prefix-cache block: whole pages of every group, but only whole rows if these are long.

    Each page holds whole blocks, or each block holds whole pages. It also is whole blocks of blocked groups, so a prefix
    ends where a new one begins, and a multiple of `grid`, if prompts are cut there (cache/states.py).
    """
    kept = [group for group in groups if not group.is_state]
    block = lcm(grid, *map(_least_block, kept))
    while uneven := [own.page_tokens for own in kept if own.page_tokens % block and block % own.page_tokens]:
        block = lcm(block, *uneven)
    return block


def _least_block(group: CacheGroup) -> int:
    if group.is_blocked and group.window is not None:
        return group.window
    return group.tokens_per_row if group.can_be_open else group.page_tokens


def by_position(groups: Sequence[CacheGroup], tables: Sequence[Sequence[int]]) -> list[int]:
    """Sort a sequence's pages by their last token; among equals states come first and whole contexts last."""
    if len(tables) == 1:
        return [page for page in tables[0] if page != HOLE]
    placed = [
        ((place + 1) * group.page_tokens, group.window is None, page)
        for group, table in zip(groups, tables, strict=True)
        for place, page in enumerate(table)
        if page != HOLE
    ]
    return [page for _, _, page in sorted(placed)]
