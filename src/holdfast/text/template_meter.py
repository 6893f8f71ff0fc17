"""Meter: what one rendering of a chat template may still spend: steps, bytes made, text written, time; no torch.

A template is somebody else's program. Whatever it does is charged before it is done: a step for each operation and more
for long operands, the bytes of every string and list it makes, the characters it writes. So neither loops nor
doublings nor one huge operation get far, and what is refused does not depend on how busy the machine is.
"""

import time
from dataclasses import dataclass
from typing import Protocol

from holdfast.memory.sizes import format_bytes

MAX_CALL_DEPTH = 64
MAX_NESTING = 64
"""Of lists and dicts in one another."""
MAX_INTEGER_BITS = 8192
CHARS_A_STEP = 32
"""Characters that are searched, compared or copied in the time of about one operation."""
CHECK_STEPS = 4096
"""The clock is looked at this often."""


class BudgetError(Exception):
    """A template wanted more than it may have; the text says of what."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may spend. Longer conversations may spend more, in proportion."""

    max_steps: int = 200_000
    max_made_bytes: int = 24 * 2**20
    max_output_chars: int = 2 * 2**20
    max_seconds: float = 5.0
    """Only a backstop: the steps are meant to run out long before."""

    def for_input(self, num_chars: int, num_messages: int) -> "TemplateLimits":
        """Limits for messages of so many characters: each may be read and copied about sixty times."""
        return TemplateLimits(
            self.max_steps + 2 * num_chars + 1000 * num_messages,
            self.max_made_bytes + 64 * num_chars,
            self.max_output_chars + 8 * num_chars,
            self.max_seconds,
        )


class Meter:
    """Counts down. Every method raises BudgetError when there is nothing left."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self._steps_left = limits.max_steps
        self._bytes_left = limits.max_made_bytes
        self._chars_left = limits.max_output_chars
        self._next_check = max(limits.max_steps - CHECK_STEPS, 0)
        self._deadline = time.monotonic() + limits.max_seconds
        self._depth = 0

    @property
    def steps_left(self) -> int:
        return self._steps_left

    def step(self, count: int = 1) -> None:
        """Time for so many operations."""
        if count < 0:
            raise BudgetError("it asks for less than nothing")
        self._steps_left -= count
        if self._steps_left < self._next_check:
            self._check_clock()

    def scan(self, num_chars: int) -> None:
        """Time to look through so many characters."""
        self.step(1 + num_chars // CHARS_A_STEP)

    def make(self, num_bytes: int) -> None:
        """Memory for a new value, and the time to fill it."""
        self.step(1 + num_bytes // (4 * CHARS_A_STEP))
        self.expect(num_bytes)
        self._bytes_left -= num_bytes

    def expect(self, num_bytes: int) -> None:
        """Refuse what is about to be made when it may not fit; what it comes to is charged afterwards."""
        if num_bytes > self._bytes_left:
            raise BudgetError(f"it builds more than {format_bytes(self.limits.max_made_bytes)} of text and lists")

    def make_text(self, num_chars: int, is_ascii: bool) -> None:
        """Memory for a new string."""
        self.make(64 + num_chars * (1 if is_ascii else 4))

    def write(self, text: str) -> None:
        """Room in the output."""
        self.scan(len(text))
        self._chars_left -= len(text)
        if self._chars_left < 0:
            raise BudgetError(f"it writes more than {self.limits.max_output_chars} characters")

    def enter(self) -> None:
        """One call deeper."""
        self._depth += 1
        if self._depth > MAX_CALL_DEPTH:
            raise BudgetError(f"its macros call each other more than {MAX_CALL_DEPTH} deep")

    def leave(self) -> None:
        self._depth -= 1

    def _check_clock(self) -> None:
        if self._steps_left < 0:
            raise BudgetError(f"it takes more than {self.limits.max_steps} steps")
        self._next_check = max(self._steps_left - CHECK_STEPS, 0)
        if time.monotonic() > self._deadline:
            raise BudgetError(f"it takes longer than {self.limits.max_seconds:g} s")


class Metered(Protocol):
    """Whoever has the meter of a rendering: it is another one for each, so it is asked for every time."""

    meter: Meter
