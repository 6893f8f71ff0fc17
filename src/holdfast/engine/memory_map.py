"""Memory maps: pages by state and group, and which sequences hold them; a core numbers them, a front names them; no torch.

A map costs time in proportion to the running sequences, not to the pages: the pool counts pages of groups as they move.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.request.wire import Count

MAX_WAITING_SHOWN = 64
"""A map lists at most so many waiting sequences, the next ones first: they hold no pages."""
SequencePhase = Literal["waiting", "prefill", "decode"]


class GroupPages(NamedTuple):
    """One cache group's part of the pool."""

    name: str
    page_tokens: Count
    """Tokens of one page; 0 for a state."""
    num_in_use: Count
    num_cached: Count
    """Pages without an owner that hold a cached prefix."""


class SequencePages(NamedTuple):
    """The pages of one sequence."""

    sequence_id: Count
    is_running: bool
    num_prompt_tokens: Count
    num_output_tokens: Count
    num_computed_tokens: Count
    """Tokens of both that are on its pages."""
    num_cached_tokens: Count
    num_preemptions: Count
    priority: int
    pages: tuple[Count, ...]
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
    """The pages of a core. Pages in quarantine count as in use."""

    num_pages: Count
    num_free: Count
    groups: tuple[GroupPages, ...]
    sequences: tuple[SequencePages, ...]
    """Running ones in order, then the first that wait."""
    num_waiting: Count
    num_steps: Count


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
    """Output tokens a second since the first; 0 before the second."""


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Like CoreMap, with the names of requests."""

    taken_at: float
    """Time of time.monotonic."""
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
