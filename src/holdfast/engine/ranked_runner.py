"""RankedRunner: runs steps on all ranks: one frame to each, and rank 0's share in a thread; no torch.

    launch(step)   frame = results of the steps collected since the last one, and this step -> every rank
    collect()      waits for rank 0's results, which need every rank's; raises if one is gone

Only rank 0 samples. Others get the tokens with the next frame, so the sequences of all ranks are equal when a step
begins (runner/slots.py). A step that has begun cannot be cancelled: other ranks are inside it.
"""

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from holdfast.engine.core import StepRunner
from holdfast.engine.messages import Numbering
from holdfast.engine.rank_messages import encode_frame, for_followers
from holdfast.engine.ranks import RankGroup, StepThread
from holdfast.request.sequence import StepResult
from holdfast.request.step import Step

CLOSE_SECONDS = 3.0
"""Time for a step of this rank to end after the others are gone."""


class _Flight:
    """A step that was launched and not collected."""

    def __init__(self, launched: "Future[None]", result: "Future[StepResult] | None") -> None:
        self.launched = launched
        self.result = result


class RankedRunner:
    """The StepRunner of several ranks. One thread at a time."""

    def __init__(self, runner: StepRunner, group: RankGroup, thread: StepThread, *, is_eager: bool = True) -> None:
        """`is_eager`: compute a step when it is launched; otherwise finish it when it is collected."""
        self.limits = runner.limits
        self.num_pages = runner.num_pages
        self.vocab_size = runner.vocab_size
        self.eos_token_ids = runner.eos_token_ids
        self._runner: StepRunner | None = runner
        self._group = group
        self._thread = thread
        self._is_eager = is_eager
        self._frames = Numbering()
        self._unsent: list[StepResult] = []
        """Results that other ranks do not have."""
        self._flights: deque[_Flight] = deque()
        self._collected: StepResult | None = None
        """Result of the oldest flight, if it was returned."""
        # Also runs when the engine is garbage collected, and before the interpreter ends.
        self._end = weakref.finalize(self, _end, group, thread)

    @property
    def inner(self) -> StepRunner:
        """Rank 0's own runner."""
        assert self._runner is not None, "the runner is closed"
        return self._runner

    @property
    def pids(self) -> list[int]:
        """Pids of ranks 1, 2, ..."""
        return self._group.pids

    def look(self) -> list[dict[str, int]]:
        """Return memory counters of ranks 1, 2, ...; no step may be in flight."""
        return self._group.look()

    def launch(self, step: Step) -> None:
        """Send a step to all ranks and begin it here."""
        self._advance()
        runner = self._runner
        assert runner is not None, "the runner is closed"
        self._group.send_frame(encode_frame(self._unsent, for_followers(step), self._frames.next()))
        self._unsent = []
        launched = self._thread.submit(partial(runner.launch, step))
        self._flights.append(_Flight(launched, self._begin(runner) if self._is_eager else None))

    def collect(self) -> StepResult:
        """Wait for the oldest step. Call it again after an interrupt."""
        self._advance()
        flight, runner = self._flights[0], self._runner
        assert runner is not None, "the runner is closed"
        if flight.result is None:
            flight.result = self._begin(runner)
        self._group.wait(flight.launched)
        result = self._group.wait(flight.result)
        # Like a runner: the next call completes this one.
        self._collected = result
        return result

    def cancel(self) -> bool:
        """True if nothing is in flight: steps on several ranks cannot be cancelled."""
        self._advance()
        return not self._flights

    def close(self, release: Callable[[], None]) -> None:
        """End the other ranks, and release this one's memory in its thread. Idempotent."""
        if self._runner is None:
            return
        self._runner = None
        self._flights.clear()
        self._thread.submit(release)  # after a step that the end of others will end
        self._end()
        self._thread.close(CLOSE_SECONDS)

    def _begin(self, runner: StepRunner) -> "Future[StepResult]":
        return self._thread.submit(runner.collect)

    def _advance(self) -> None:
        if self._collected is not None:
            self._unsent.append(self._collected)
            self._collected = None
            self._flights.popleft()


def _end(group: RankGroup, thread: StepThread) -> None:
    group.end()
    thread.close(0.0)
