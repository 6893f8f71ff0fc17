"""Memory maps: pages by state and group, and which sequences hold them; a core numbers them, a front names them; no torch.

A map costs time in proportion to the running sequences, not to the pages: the pool counts pages of groups as they move.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.request.wire import Count

MAX_WAITING_SHOWN = 64
"""Most waiting sequences in a map, the next ones first: they hold no pages."""
SequencePhase = Literal["waiting", "prefill", "decode"]


class GroupPages(NamedTuple):
    """One cache group's part of the pool."""

    name: str
    page_tokens: Count
    """Tokens of one page; 0 for a state."""
    num_in_use: Count
    num_cached: Count
    """Pages without an owner that hold a cached prefix."""


def phase_of(is_running: bool, num_computed: int, num_prompt_tokens: int) -> SequencePhase:
    """Return the phase of a sequence."""
    if not is_running:
        return "waiting"
    return "decode" if num_computed >= num_prompt_tokens else "prefill"


@dataclass(frozen=True, slots=True)
class HeldPages:
    """The pages and the progress of one sequence."""

    phase: SequencePhase
    num_prompt_tokens: Count
    num_output_tokens: Count
    num_computed_tokens: Count
    """Prompt and output tokens on its pages."""
    num_cached_tokens: Count
    num_preemptions: Count
    priority: int
    pages: tuple[Count, ...]
    """Pages by group, shared ones included."""
    age_seconds: float
    """Time since it was submitted."""


@dataclass(frozen=True, slots=True)
class SequencePages(HeldPages):
    """Pages of a sequence in a core's map."""

    sequence_id: Count


@dataclass(frozen=True, slots=True)
class RequestPages(HeldPages):
    """Pages of a completion of a live request, in a front's map."""

    request_id: str
    index: int
    tokens_per_second: float
    """Output tokens a second since the first; 0 before the second."""


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Counts of all pages. Those in quarantine count as in use."""

    num_pages: Count
    num_free: Count
    groups: tuple[GroupPages, ...]
    num_waiting: Count
    num_steps: Count
    num_snapshots: Count
    """Places for states of prefixes; 0 if the model has no states outside the pages."""
    num_snapshots_held: Count

    @property
    def num_in_use(self) -> int:
        return sum(group.num_in_use for group in self.groups)

    @property
    def num_cached(self) -> int:
        return sum(group.num_cached for group in self.groups)


@dataclass(frozen=True, slots=True)
class CoreMap(PoolPages):
    """The pages of a core by sequence."""

    sequences: tuple[SequencePages, ...]
    """Running sequences in order, then the first waiting ones."""


@dataclass(frozen=True, slots=True)
class MemoryMap(PoolPages):
    """The pages of a core by request."""

    requests: tuple[RequestPages, ...]
    taken_at: float
    """Time of time.monotonic."""
