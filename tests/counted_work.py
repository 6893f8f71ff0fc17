"""Work counted in lines of Python, which is the same on a busy machine; tests do not read clocks."""

import subprocess
import sys
from collections.abc import Callable
from types import FrameType

_COUNTER = """
import atexit, sys
num_lines = 0
def count(frame, event, argument):
    global num_lines
    num_lines += 1
    return count
atexit.register(lambda: (sys.settrace(None), print(num_lines, file=sys.stderr)))
sys.settrace(count)
"""


def num_lines(work: Callable[[], object]) -> int:
    """Lines that `work` runs in Python, each turn of a loop or comprehension again; what C does is not seen."""
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> object:
        nonlocal counted
        counted += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        work()
    finally:
        sys.settrace(before)
    return counted


def num_lines_of_a_process(code: str) -> int:
    """Lines that a fresh interpreter runs for `code`, imports among them."""
    run = [sys.executable, "-c", _COUNTER + code]
    # Twice, because the first may have to compile what it imports.
    done = [subprocess.run(run, capture_output=True, text=True, timeout=300, check=True) for _ in range(2)]
    return int(done[-1].stderr.splitlines()[-1])
