"""Memory maps: pages by state and group, and who holds them; by number as a core sees it, by name as a front does; no torch.

A look costs in proportion to the sequences that run, never to the pages: groups are counted as pages change hands.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

MAX_WAITING_SHOWN = 64
"""Sequences that wait are many, and hold nothing: so many of them are listed, the next ones first."""
SequencePhase = Literal["waiting", "prefill", "decode"]


class GroupPages(NamedTuple):
    """One cache group's part of the pool."""

    name: str
    page_tokens: int
    """Tokens that one of its pages holds; 0 of a state."""
    num_in_use: int
    num_cached: int
    """Held by nobody, and kept because they begin a prompt that may come again."""


class SequencePages(NamedTuple):
    """What one sequence holds."""

    sequence_id: int
    is_running: bool
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    """Of both, those that are on its pages."""
    num_cached_tokens: int
    num_preemptions: int
    priority: int
    pages: tuple[int, ...]
    """By group, shared ones included."""
    age_seconds: float
    """Since it was submitted."""

    @property
    def phase(self) -> SequencePhase:
        if not self.is_running:
            return "waiting"
        return "decode" if self.num_computed_tokens >= self.num_prompt_tokens else "prefill"


@dataclass(frozen=True, slots=True)
class CoreMap:
    """A look at the pages of a core. Pages in quarantine count as in use."""

    num_pages: int
    num_free: int
    groups: tuple[GroupPages, ...]
    sequences: tuple[SequencePages, ...]
    """Those that run, the most important first, then the first of those that wait."""
    num_waiting: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class RequestPages:
    """One completion of a live request."""

    request_id: str
    index: int
    phase: SequencePhase
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    priority: int
    pages: tuple[int, ...]
    age_seconds: float
    tokens_per_second: float
    """Of output, since the first one; 0 before the second."""


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """The same with the names of requests."""

    taken_at: float
    """By the clock of time.monotonic."""
    num_pages: int
    num_free: int
    groups: tuple[GroupPages, ...]
    requests: tuple[RequestPages, ...]
    num_waiting: int
    num_steps: int

    @property
    def num_in_use(self) -> int:
        return sum(group.num_in_use for group in self.groups)

    @property
    def num_cached(self) -> int:
        return sum(group.num_cached for group in self.groups)
