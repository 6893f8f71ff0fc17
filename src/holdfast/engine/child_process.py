"""Child: a process of this program with a channel to it, a pulse that both sides see, and its last lines; and its end; no torch.

Knows nothing of what the child computes: a core (engine/core_process.py) or a rank (engine/ranks.py).
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
"""For a step that is about to end, once the other side is gone."""
END_SECONDS = (10.0, 2.0)
"""For a child that was asked to end, and then for one that was told to."""
NUM_LAST_LINES = 20


class LastLines:
    """What a child writes to its standard output and error: passed on to ours, the last lines kept."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._thread = threading.Thread(
            target=_pass_on, args=(pipe, self._lines), name="holdfast-core-log", daemon=True
        )
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait for the end of what it says."""
        self._thread.join(timeout)

    def words(self) -> str:
        """The last line that says something; nothing where there is none."""
        said = [line for line in self._lines if line]
        return f": {said[-1][-160:]}" if said else ""


def _pass_on(pipe: IO[bytes], lines: deque[str]) -> None:
    with pipe:
        for data in pipe:
            line = data.decode(errors="replace")
            lines.append(line.strip())
            # The stream of now: notebooks and tests put others there, and some programs none.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                sys.stderr.write(line)
                sys.stderr.flush()


class Child:
    """The process, the channel to it, and its end. Knows nothing of who uses it."""

    def __init__(
        self, command: SequenceABC[str], silence_seconds: float | None = None, others: SequenceABC[int] = ()
    ) -> None:
        """`others` are numbers of open files that it gets too; they are its last arguments."""
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
                    start_new_session=True,  # Ctrl-C on a terminal is for this process alone
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
        """Queue a message; waits only where the channel is full."""
        self.channel.send(lambda: encode_message(message, self._sent.next()))

    def kill(self) -> str:
        """End it at once; how it ended, in words."""
        was_running = self._wait(GRACE_SECONDS) is None
        self.process.kill()
        status = self.process.wait()
        self.last_lines.join(GRACE_SECONDS)
        self.channel.close()
        if was_running:
            return f"it was killed{self.last_lines.words()}"
        name = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return f"it ended with {name}{self.last_lines.words()}"

    def end(self) -> None:
        """Ask it to end, then tell it to, then end it."""
        if os.getpid() != self._home:  # a fork of ours has no say
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


def _environment() -> dict[str, str]:
    """Ours, and where this package is found, unless that is a place that every Python looks at."""
    environment, folder = dict(os.environ), str(Path(__file__).resolve().parents[2])
    if folder not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{folder}{os.pathsep}{others}" if others else folder
    return environment
