"""RankGroup and RankedRunner over ranks that the test plays itself: second messages, second deaths, and frames in order."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engine.fake_rank import LIMITS, NUM_PAGES
from engine.fakes import HashRunner, own_pulse
from holdfast.config import EngineConfig
from holdfast.engine import ranks
from holdfast.engine.channel import Channel, ChannelClosedError, channel_pair
from holdfast.engine.messages import Died, Heartbeat, Refused, Shutdown
from holdfast.engine.rank_messages import (
    RankConnect,
    RankFrame,
    RankLoaded,
    RankLook,
    RankLookRequest,
    RankMessage,
    RankPlanned,
    RankReported,
    RankStart,
    decode_rank_message,
    encode_rank_message,
)
from holdfast.engine.ranked_runner import RankedRunner
from holdfast.engine.ranks import RankGroup, StepThread
from holdfast.engine.vital_signs import SILENCE_SECONDS
from holdfast.errors import ConfigError, EngineDeadError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import SequenceResult, StepResult
from holdfast.request.step import Admitted, Step, StepItem

STEP = Step(1, items=())


class Peer:
    """One rank: what RankGroup sees of it, and the other end of its channel."""

    def __init__(self) -> None:
        ours, theirs = channel_pair()
        self.channel, self.other = Channel(ours), Channel(theirs)
        self.status: int | None = None
        self.num_kills = 0
        self.num_beats = 0
        self.process = SimpleNamespace(pid=0, poll=lambda: self.status, kill=self.kill, wait=self.wait)
        self.last_lines = SimpleNamespace(join=lambda timeout: None, last=lambda: "")
        self.life_line = SimpleNamespace(beat=self.beat)
        self.pulse = own_pulse()
        self.pulse.beat()
        self._number = 0

    def kill(self) -> None:
        self.num_kills += 1

    def wait(self, timeout: float | None = None) -> int:
        return self.status or 0

    def beat(self) -> None:
        self.num_beats += 1

    def say(self, *messages: RankMessage) -> None:
        """All in one piece."""
        frames = []
        for message in messages:
            self._number += 1
            frames.append(encode_rank_message(message, self._number))
        self.other.send(lambda: b"".join(frames))

    def heard(self, count: int) -> list[tuple[int, Any]]:
        """The next so many messages, with their numbers."""
        found = []
        while len(found) < count:
            frame = self.other.take()
            if frame is None:
                assert self.other.wait(10), f"only {found} came"
            else:
                found.append(decode_rank_message(frame))
        return found


@contextmanager
def group_of(count: int) -> Iterator[tuple[RankGroup, list[Peer]]]:
    peers = [Peer() for _ in range(count)]
    group = RankGroup(EngineConfig(tensor_parallel_size=count + 1), count + 1, rendezvous=lambda: peers)
    try:
        for rank, peer in enumerate(peers, 1):
            number, start = peer.heard(1)[0]
            assert (number, isinstance(start, RankStart) and start.rank) == (1, rank)
        yield group, peers
    finally:
        for peer in peers:
            peer.other.close()
        group.end()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_rank_group_takes_one_message_of_each_in_order_of_ranks():
    """The second message of a fast rank answers the second `expect`."""
    with group_of(3) as (group, peers):
        peers[2].say(RankReported({"rank": 3}), Heartbeat(0.0), RankLoaded())
        peers[0].say(RankReported({"rank": 1}))
        threading.Timer(0.05, lambda: peers[1].say(RankReported({"rank": 2}), RankLoaded())).start()
        assert group.expect(RankReported, 10) == [RankReported({"rank": rank}) for rank in (1, 2, 3)]
        threading.Timer(0.05, lambda: peers[0].say(RankLoaded())).start()
        assert group.expect(RankLoaded, 10) == [RankLoaded()] * 3
        group.send(2, RankConnect("there"))
        group.send_all(RankPlanned({}))
        assert [peer.heard(1)[0] for peer in (peers[0], peers[2])] == [(2, RankPlanned({}))] * 2
        assert peers[1].heard(2) == [(2, RankConnect("there")), (3, RankPlanned({}))]
        frame = encode_rank_message(RankPlanned({"a": 1}), 9)
        group.send_frame(frame)
        assert [peer.heard(1)[0] for peer in peers] == [(9, RankPlanned({"a": 1}))] * 3
        for rank, peer in enumerate(peers):
            peer.say(RankLook({"bytes": rank}))
        assert group.look() == [{"bytes": 0}, {"bytes": 1}, {"bytes": 2}]
        assert isinstance(peers[2].heard(1)[0][1], RankLookRequest)
        until(lambda: all(peer.num_beats for peer in peers))


def test_rank_link_reads_all_that_is_here():
    peer = Peer()
    link = ranks.Link(1, peer)  # type: ignore[arg-type]
    peer.say(RankReported({}), Heartbeat(0.0), RankLoaded())
    link.read()
    assert list(link.inbox) == [RankReported({}), RankLoaded()]
    peer.say(RankLoaded(), Died("no memory"), RankLoaded())
    link.read()
    assert (len(link.inbox), link.trouble) == (3, "it stopped at no memory"), "nothing is taken behind its last words"
    for end in (peer.channel, peer.other):
        end.close()


def test_rank_group_refuses_what_is_not_due_and_what_is_late():
    with group_of(2) as (group, peers):
        for peer in peers:
            peer.say(RankLoaded())
        with pytest.raises(EngineDeadError, match="rank 1 sent RankLoaded, expected RankReported"):
            group.expect(RankReported, 10)
        group.thread.join(10)
        assert [peer.num_kills for peer in peers] == [1, 1], "the watching thread has nothing to add"
        with pytest.raises(EngineDeadError, match="expected RankReported"):
            group.raise_if_dead()
    with group_of(2) as (group, peers):
        peers[0].say(RankReported({}))
        with pytest.raises(EngineDeadError, match="rank 2 has not sent RankReported within 0 seconds"):
            group.expect(RankReported, 0.3)


DEATHS = {
    "killed": (lambda peer: setattr(peer, "status", -9), r"rank {} was killed \(signal SIGKILL\)"),
    "refused": (
        lambda peer: peer.say(Refused((), ConfigError("value.empty", name="x"))),
        r"rank {}: x must not be empty",
    ),
    "died": (lambda peer: peer.say(Died("no memory")), r"rank {}: it stopped at no memory"),
    "ended": (lambda peer: peer.other.close(), r"rank {}: it ended"),
    "nonsense": (lambda peer: peer.other.send(lambda: b"GET / HTTP/1.1\r\n\r\n"), r"rank {}: .*Not a Holdfast message"),
}
"""How a rank goes, and what is said of it; each before those after it, if two go together."""


@pytest.mark.parametrize("first", DEATHS)
@pytest.mark.parametrize("second", DEATHS)
def test_rank_group_blames_the_cause_and_not_who_was_taken_along(first, second, monkeypatch):
    """Two go within the moment that is left to them; the later one's words are the cause if they say more."""
    monkeypatch.setattr(ranks, "BLAME_SECONDS", 0.02)
    kinds = list(DEATHS)
    rank_of = {"killed": 0, "refused": 1}
    place = [rank_of.get(kind, 2) for kind in (first, second)]
    blamed = (1, first) if place[0] <= place[1] else (2, second)
    with group_of(2) as (group, peers):
        with group.changed:  # it looks when both have happened
            for peer, kind in zip(peers, (first, second), strict=True):
                DEATHS[kind][0](peer)
            if {first, second} == {"killed"}:
                peers[0].other.close()
            if "killed" in (first, second):
                peers[(first, second).index("killed")].other.close()
        error = ConfigError if blamed[1] == "refused" else EngineDeadError
        with pytest.raises(error, match=DEATHS[blamed[1]][1].format(blamed[0])):
            group.expect(RankReported, 10)
        assert [peer.num_kills for peer in peers] == [1, 1], kinds
        for _ in range(2):
            with pytest.raises(error, match=DEATHS[blamed[1]][1].format(blamed[0])):
                group.send_all(RankPlanned({}))
        group.end()
        assert [peer.num_kills for peer in peers] == [1, 1], "they die once"


def test_rank_group_hears_the_cause_that_comes_a_moment_later():
    with group_of(2) as (group, peers):
        peers[1].other.close()
        threading.Timer(
            ranks.BLAME_SECONDS / 4, lambda: peers[0].say(Refused((), ConfigError("value.empty", name="x")))
        ).start()
        with pytest.raises(ConfigError, match="rank 1: x must not be empty"):
            group.expect(RankReported, 10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_rank_group_that_is_not_watched_any_more_is_dead():
    with group_of(2) as (group, peers):

        def fail() -> None:
            raise OSError("no more")

        peers[1].life_line.beat = fail
        with pytest.raises(EngineDeadError, match="its ranks are not watched any more: OSError"):
            group.expect(RankReported, 10)


def test_rank_group_counts_silence_of_ranks_that_serve(monkeypatch):
    """A heartbeat by the channel is a sign of life of that rank alone."""
    looks = [0.0]
    monkeypatch.setattr(ranks, "BLAME_SECONDS", 0.0)
    monkeypatch.setattr(ranks, "LOOK_SECONDS", 0.01)

    class Clock:
        monotonic = staticmethod(lambda: looks[0])

    monkeypatch.setattr("holdfast.engine.vital_signs.time", Clock)
    with group_of(2) as (group, peers):
        group.serve()
        for _ in range(int(4 * SILENCE_SECONDS / 0.25)):
            before = peers[1].num_beats
            if group.death is not None:
                break
            looks[0] += 0.25
            peers[0].say(Heartbeat(0.0))
            until(lambda before=before: group.death is not None or peers[1].num_beats > before + 1)
        with pytest.raises(EngineDeadError, match=r"rank 2 was silent for 1\.5 seconds"):
            group.raise_if_dead()


def test_rank_group_ends_once_and_asks_first():
    with group_of(2) as (group, peers):
        wanted: list[bool] = []
        for peer in peers:
            send: Any = peer.channel.try_send

            def ask(make: Callable[[], bytes], send: Any = send) -> bool:
                wanted.append(group.changed._is_owned())  # type: ignore[attr-defined]
                return send(make)

            peer.channel.try_send = ask  # type: ignore[method-assign]
        ending = threading.Thread(target=group.end)
        ending.start()
        for peer in peers:
            assert peer.heard(1) == [(2, Shutdown())]
            peer.other.close()
        ending.join(10)
        assert wanted == [True, True], "all get Shutdown before one ends"
        assert not ending.is_alive()
        with pytest.raises(EngineDeadError, match="it was shut down"):
            group.raise_if_dead()
        group.end()
        assert [peer.num_kills for peer in peers] == [1, 1]


def test_rank_group_ends_ranks_that_do_not_go(monkeypatch):
    """After Shutdown without effect, they are released on this device and killed."""
    monkeypatch.setattr(ranks, "END_SECONDS", 0.1)
    with group_of(2) as (group, peers):
        let_go: list[int] = []
        group.on_death = lambda: let_go.append(1)
        group.end()
        assert [peer.num_kills for peer in peers] == [1, 1]
        assert let_go
        with pytest.raises(EngineDeadError, match="it was shut down"):
            group.expect(RankReported, 1)


@pytest.mark.parametrize("verb", ["send_all", "send_frame"])
def test_rank_group_that_cannot_send_says_why_a_rank_is_gone(verb, monkeypatch):
    """The watching thread knows the cause, and comes a little later than the error of the channel."""
    with group_of(2) as (group, peers):

        def fail(*_: object, **__: object) -> None:
            peers[1].status = -9
            threading.Timer(0.05, peers[1].other.close).start()
            raise ChannelClosedError("gone")

        monkeypatch.setattr(peers[1].channel, "send", fail)
        monkeypatch.setattr(peers[1].channel, "send_frame", fail)
        reported = RankPlanned({}) if verb == "send_all" else encode_rank_message(RankPlanned({}), 2)
        with pytest.raises(EngineDeadError, match="rank 2 was killed"):
            getattr(group, verb)(reported)
        assert peers[0].heard(1) == [(2, RankPlanned({}))], "those before it have it"


class Frames:
    """In the place of a RankGroup: frames, and waits that are those of the future."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, RankFrame]] = []
        self.num_ends = 0

    def send_frame(self, frame: bytes) -> None:
        number, message = decode_rank_message(frame)
        assert isinstance(message, RankFrame)
        self.frames.append((number, message))

    def wait(self, future: Future) -> Any:
        return future.result(10)

    def end(self) -> None:
        self.num_ends += 1


class Numbered(HashRunner):
    """Answers with the number of the step, and keeps the order of calls."""

    def __init__(self) -> None:
        super().__init__(LIMITS, NUM_PAGES)
        self.calls: list[str] = []
        self._numbers: list[int] = []

    def launch(self, step: Step) -> None:
        self.calls.append(f"launch {step.number}")
        self._numbers.append(step.number)

    def collect(self) -> StepResult:
        number = self._numbers.pop(0)
        self.calls.append(f"collect {number}")
        return StepResult((SequenceResult((number,)),))


def steps(count: int) -> list[Step]:
    own = Admitted(0, 1, (5, 6), 2, SamplingParams(), 0)
    return [
        Step(number, (), (own,) if number == 1 else (), (StepItem(0, number, 1, True),))
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_ranked_runner_tells_each_result_once_with_a_frame(is_eager, run_ahead):
    group, runner, thread = Frames(), Numbered(), StepThread()
    ranked = RankedRunner(runner, group, thread, is_eager=is_eager)  # type: ignore[arg-type]
    collected: list[int] = []
    reported: list[tuple[int, ...]] = []
    for step in steps(6):
        reported.append(tuple(collected[sum(map(len, reported)) :]))
        ranked.launch(step)
        if step.number > run_ahead:
            collected.append(ranked.collect().results[0].token_ids[0])
            assert ranked.cancel() == (run_ahead == 0)
    assert collected == list(range(1, 7 - run_ahead))
    assert [number for number, _ in group.frames] == list(range(1, 7))
    assert [frame.step.number for _, frame in group.frames] == list(range(1, 7))
    assert [tuple(own[0] for (own,) in frame.results) for _, frame in group.frames] == reported
    if is_eager:
        assert runner.calls == [f"{verb} {number}" for number in range(1, 7) for verb in ("launch", "collect")]
    elif run_ahead == 1:
        assert runner.calls[:4] == ["launch 1", "launch 2", "collect 1", "launch 3"]
    while not ranked.cancel():
        collected.append(ranked.collect().results[0].token_ids[0])
    assert collected == list(range(1, 7))
    released: list[int] = []
    for _ in range(2):
        ranked.close(lambda: released.append(1))
    assert (released, group.num_ends) == ([1], 1)


def test_ranked_runner_tells_two_results_with_one_frame():
    group, runner = Frames(), Numbered()
    ranked = RankedRunner(runner, group, StepThread(), is_eager=False)  # type: ignore[arg-type]
    first, second, third = steps(3)
    ranked.launch(first)
    ranked.launch(second)
    assert [ranked.collect().results[0].token_ids for _ in range(2)] == [(1,), (2,)]
    ranked.launch(third)
    assert [frame.results for _, frame in group.frames] == [(), (), (((1,),), ((2,),))]
    ranked.close(lambda: None)


def test_ranked_runner_begins_no_step_that_others_were_not_sent():
    group, runner = Frames(), Numbered()
    ranked = RankedRunner(runner, group, StepThread())  # type: ignore[arg-type]

    def fail(frame: bytes) -> None:
        raise EngineDeadError("rank.dead", reason="rank 1 was killed")

    group.send_frame = fail  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="rank 1 was killed"):
        ranked.launch(steps(1)[0])
    released: list[int] = []
    ranked.close(lambda: released.append(1))
    assert (runner.calls, released) == ([], [1])


def test_ranked_runner_collects_again_after_an_interrupt():
    group, runner = Frames(), Numbered()
    ranked = RankedRunner(runner, group, StepThread(), is_eager=False)  # type: ignore[arg-type]
    ranked.launch(steps(1)[0])
    wait, interrupts = group.wait, [KeyboardInterrupt(), None, KeyboardInterrupt(), None]

    def interrupted(future: Future) -> Any:
        error = interrupts.pop(0) if interrupts else None
        if error is not None:
            raise error
        return wait(future)

    group.wait = interrupted  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            ranked.collect()
    assert ranked.collect().results[0].token_ids == (1,)
    assert runner.calls == ["launch 1", "collect 1"], "it was begun once"
    ranked.close(lambda: None)


def test_step_thread_does_jobs_in_order_and_tells_each_its_error():
    thread, done = StepThread(), []

    def fail() -> None:
        raise OSError("no")

    first, second, third = thread.submit(lambda: done.append(1)), thread.submit(fail), thread.submit(lambda: 3)
    assert third.result(10) == 3
    assert first.done()
    assert done == [1]
    with pytest.raises(OSError, match="no"):
        second.result(10)
    assert thread.close(10)
