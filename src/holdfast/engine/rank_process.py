"""Process of one rank: opens its share of a model with rank 0, then runs every step; no torch until it runs.

    main thread    RankServer (engine/rank_server.py): RankStart -> RankReported -> ... -> RankReady, then one frame a
    step watchdog       sends heartbeats, watches rank 0, and ends this process if rank 0 is gone or silent

It lives no longer than rank 0: the channel closes, the system kills it with its parent (PR_SET_PDEATHSIG), and a
stopped rank 0 is silent. It reports an error to rank 0 and ends.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

from holdfast.engine.channel import Channel, ChannelClosedError
from holdfast.engine.child_process import GRACE_SECONDS
from holdfast.engine.pulse import Pulse
from holdfast.engine.rank_messages import RankStart
from holdfast.engine.rank_server import OpenRank, Rank, RankServer
from holdfast.engine.vital_signs import LOOK_SECONDS, VitalSigns
from holdfast.observability.log import get_logger, log_to_stderr

_PR_SET_PDEATHSIG = 1
_log = get_logger(__name__)


def open_rank(start: RankStart, server: RankServer) -> Rank:
    """Open this rank's share of a model, in step with rank 0."""
    from holdfast.engine.rank_build import build_rank  # torch comes with it

    return build_rank(start, server)


def watch_rank_zero(server: RankServer, channel: Channel, parent: int, pulse: Pulse) -> NoReturn:
    """Watchdog thread: write heartbeats, and end this process if rank 0 is dead."""
    signs = VitalSigns(parent, pulse)
    with contextlib.suppress(ChannelClosedError):
        while os.getppid() == parent and not channel.is_other_side_gone():
            server.pulse.beat()
            signs.look()
            # Rank 0 may be a caller's program: waiting while holding the GIL is not death.
            if signs.is_dead(is_ready=False):
                _log.error(
                    "rank 0 (process %d) was silent for %.1f seconds: this rank ends", parent, signs.silent_seconds
                )
                if server.owns_parent:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(parent, signal.SIGKILL)
                os._exit(1)
            channel.wait_for_end(LOOK_SECONDS)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def die_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def main(open_rank: OpenRank = open_rank) -> None:
    """Entry point; COMMAND of engine/ranks.py documents its arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    number, parent, own_number, zero_number = map(int, sys.argv[1:])
    die_with_parent(parent)
    log_to_stderr()
    own, zero = Pulse(own_number), Pulse(zero_number)
    own.beat()
    os.close(own_number)
    os.close(zero_number)
    with socket.socket(fileno=number) as connection:
        channel = Channel(connection)
        server = RankServer(channel, own)
        watch = threading.Thread(
            target=watch_rank_zero, args=(server, channel, parent, zero), name="holdfast-pulse", daemon=True
        )
        watch.start()
        server.run(open_rank)


if __name__ == "__main__":
    main()
