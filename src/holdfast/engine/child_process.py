"""Child: a supervised process with a channel, a shared pulse and its last log lines; no torch.

The child runs a core (engine/core_process.py) or a rank (engine/ranks.py).
"""

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import IO

from holdfast.engine.channel import Channel, ChannelClosedError, channel_pair
from holdfast.engine.messages import Message, Numbering, Shutdown, encode_message
from holdfast.engine.pulse import Pulse, open_pulse_file

GRACE_SECONDS = 0.5
"""Time for a step to end after the other side is gone."""
END_SECONDS = (10.0, 2.0)
"""Time to end after Shutdown, and then after SIGTERM."""
NUM_LAST_LINES = 20


class LastLines:
    """Forwards standard output and error of a child to our stderr, and keeps the last lines."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._thread = threading.Thread(
            target=_forward, args=(pipe, self._lines), name="holdfast-core-log", daemon=True
        )
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait for the end of its output."""
        self._thread.join(timeout)

    def last(self) -> str:
        """Return the last line with text, after a colon; empty if there is none."""
        lines = [line for line in self._lines if line]
        return f": {lines[-1][-160:]}" if lines else ""


def _forward(pipe: IO[bytes], lines: deque[str]) -> None:
    with pipe:
        for data in pipe:
            line = data.decode(errors="replace")
            lines.append(line.strip())
            # The current stream: notebooks and tests replace it, and some programs have none.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                sys.stderr.write(line)
                sys.stderr.flush()


class Child:
    """A process, its channel, and its end."""

    def __init__(
        self, command: SequenceABC[str], silence_seconds: float | None = None, others: SequenceABC[int] = ()
    ) -> None:
        """`others`: descriptors that it inherits too; they are its last arguments."""
        ours, theirs = channel_pair()
        number = open_pulse_file()
        self.pulse = Pulse(number)
        self.pulse.beat()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*command, *map(str, (theirs.fileno(), os.getpid(), number, *others))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(), number, *others),
                    start_new_session=True,  # Ctrl-C on a terminal goes to this process alone
                    env=_environment(),
                )
        finally:
            os.close(number)
        self.channel = Channel(ours, silence_seconds=silence_seconds)
        self._patience = min(END_SECONDS[0], silence_seconds or END_SECONDS[0])
        self._sent = Numbering()
        assert self.process.stdout is not None, "it was opened with a pipe"
        self.last_lines = LastLines(self.process.stdout)
        self._home = os.getpid()

    def send(self, message: Message) -> None:
        """Send a message; waits only if the channel is full."""
        self.channel.send(lambda: encode_message(message, self._sent.next()))

    def kill(self) -> str:
        """Kill it; return how it ended."""
        was_running = self._wait(GRACE_SECONDS) is None
        self.process.kill()
        status = self.process.wait()
        self.last_lines.join(GRACE_SECONDS)
        self.channel.close()
        if was_running:
            return f"it was killed{self.last_lines.last()}"
        return f"it ended with {ending_of(status)}{self.last_lines.last()}"

    def end(self) -> None:
        """End it: Shutdown, then SIGTERM, then SIGKILL."""
        if os.getpid() != self._home:  # a fork does not own it
            return
        with contextlib.suppress(ChannelClosedError):
            self.channel.try_send(lambda: encode_message(Shutdown(), self._sent.next()))
        self.channel.close()
        if self._wait(self._patience) is None:
            self.process.terminate()
            if self._wait(min(END_SECONDS[1], self._patience)) is None:
                self.process.kill()
                self.process.wait()
        self.last_lines.join(GRACE_SECONDS)

    def _wait(self, seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None


def ending_of(status: int) -> str:
    """Describe the status of a process that ended."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _environment() -> dict[str, str]:
    """Return our environment with this package on PYTHONPATH, unless it is installed."""
    environment, folder = dict(os.environ), str(Path(__file__).resolve().parents[2])
    if folder not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{folder}{os.pathsep}{others}" if others else folder
    return environment
