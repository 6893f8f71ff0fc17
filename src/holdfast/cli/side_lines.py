"""Lines beside the answer: whatever a command says that is not its result goes to stderr, if there is one; no torch."""

import sys

MAX_PATH = 4096
"""Characters of a path that a line repeats: all of them, as Linux has it."""


def write_line(text: str) -> None:
    """A line on stderr, if there is one."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
