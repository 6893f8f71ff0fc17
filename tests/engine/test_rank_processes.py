"""Ranks as processes: one schedule on all of them, and whatever ends one is an error for everybody, and leaves nothing."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from cli.cli_models import make_model
from engine.broken_files_rank import HOW
from engine.fake_rank import BOTH_PLACES, LIMITS, NUM_PAGES
from engine.fakes import make_engine, run_all, tokens_of
from engine.rank_groups import FAKE, open_group, ranked_engine, start, with_tests
from engine.test_core_process import is_gone
from holdfast import SamplingParams
from holdfast.config import EngineConfig
from holdfast.engine import rank_build
from holdfast.engine.channel import Channel, ChannelClosedError, channel_pair
from holdfast.engine.messages import Refused, Shutdown, Start, encode_message
from holdfast.engine.pulse import Pulse, open_pulse_file
from holdfast.engine.rank_build import build_ranks
from holdfast.engine.rank_messages import (
    RankFrame,
    RankLoaded,
    RankPlanned,
    RankReported,
    RankStart,
    decode_rank_message,
    encode_frame,
    encode_rank_message,
)
from holdfast.engine.ranks import check_world
from holdfast.errors import ConfigError, EngineDeadError, MessageError, ModelFormatError, UnsupportedModelError
from holdfast.loading.model_files import open_model
from holdfast.request.sequence import SequenceResult, StepResult
from holdfast.request.step import Step, StepItem


@pytest.fixture(autouse=True)
def children_find_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", with_tests(dict(os.environ))["PYTHONPATH"])


CASES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20),
    "seeds": SamplingParams(temperature=0.7, seed=5, max_tokens=20),
    "several": SamplingParams(n=3, seed=5, max_tokens=9),
    "short": SamplingParams(temperature=0.0, max_tokens=1),
    "logprobs": SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=2, n=2),
}


@pytest.mark.parametrize(("is_eager", "run_ahead"), [(True, 0), (False, 1)])
def test_ranked_engine_of_four_ranks_equals_one_process(is_eager, run_ahead, monkeypatch, tmp_path):
    monkeypatch.setenv(BOTH_PLACES, str(tmp_path))
    shape = {"max_num_seqs": LIMITS.max_num_seqs, "num_pages": NUM_PAGES, "run_ahead": run_ahead}
    ranked, alone = ranked_engine(is_eager=is_eager, run_ahead=run_ahead), make_engine(**shape)
    try:
        for engine in (ranked, alone):
            for place, (case, params) in enumerate(CASES.items()):
                for nth in range(4):
                    engine.add_request(f"{case}-{nth}", "the same beginning and " * place + str(nth), params)
        found, expected = run_all(ranked), run_all(alone)
        assert {key: tokens_of(deltas) for key, deltas in found.items()} == {
            key: tokens_of(deltas) for key, deltas in expected.items()
        }
        assert {one["steps"] for one in ranked.group.look()} == {len(ranked.runner.steps)}
        until = time.monotonic() + 20
        files = [tmp_path / f"rank-{rank}" for rank in range(4)]
        while len({file.read_text() for file in files}) > 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert len({file.read_text() for file in files}) == 1, [file.read_text() for file in files]
    finally:
        ranked.close()
    assert all(map(is_gone, ranked.group.pids))


def test_ready_ranks_tell_what_they_hold():
    group = open_group(num_ranks=3)
    try:
        assert [ready.memory.rank for ready in start(group)] == [1, 2]
    finally:
        group.end()
    assert all(map(is_gone, group.pids))


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("refuses", UnsupportedModelError, "rank 2: weights must not be empty."),
        ("fails", EngineDeadError, "rank 2: it stopped at OSError: no weights today"),
        ("exits", EngineDeadError, "rank 2: it ended (exit status 3: what it said last)"),
    ],
)
def test_rank_load_failure_raises_its_own_error(name, error, words):
    group = open_group(name, num_ranks=3)
    try:
        group.expect(RankReported)
        began = time.monotonic()
        group.send_all(RankPlanned({}))
        with pytest.raises(error) as caught:
            start_behind_plan(group)
        assert time.monotonic() - began < 2.0
        assert words in str(caught.value)
    finally:
        group.end()
    assert all(map(is_gone, group.pids))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"), [("gone", "cannot be read: No such file"), ("short", "changed after"), ("folder", "changed")]
)
def test_broken_files_of_one_rank_name_the_rank(how, words, tmp_path, monkeypatch):
    """Between plan and load, on a disk that is not rank 0's; with the real ranks of a model."""
    monkeypatch.setenv(HOW, how)
    path = str(make_model(tmp_path / "tiny"))
    options = {"device": "cpu", "dtype": "float32", "memory_limit": "1GiB", "max_model_len": 64}
    config = EngineConfig.from_options(model=path, tensor_parallel_size=2, **options)
    broken = (sys.executable, "-P", "-m", "engine.broken_files_rank")
    with pytest.raises(ModelFormatError, match=rf"^rank 1: model\.safetensors.*{words}"):
        build_ranks(config, open_model(path, "auto"), lambda done, total: None, lambda preparing: None, command=broken)


@pytest.mark.parametrize("is_built", [True, False])
def test_build_of_rank_0_is_released_if_another_is_lost(tmp_path, monkeypatch, is_built):
    """Lost when all were ready, or so early that rank 0 never was."""
    released, ended = [], []

    class Zero:
        def __init__(self, *reported: object) -> None:
            pass

        def build(self) -> tuple[SimpleNamespace, tuple[()]]:
            if not is_built:
                raise EngineDeadError("rank.missing_ranks", missing="rank 1", num_ranks=2, seconds=1)
            return SimpleNamespace(release=lambda: released.append(len(ended))), ()

    class Lost:
        def __init__(self, *reported: object, **named: object) -> None:
            pass

        def wait(self, building: Future) -> None:
            raise EngineDeadError("rank.dead", reason="rank 1 was killed")

        def end(self) -> None:
            ended.append(1)

    monkeypatch.setattr(rank_build, "RankZero", Zero)
    monkeypatch.setattr(rank_build, "RankGroup", Lost)
    path = str(make_model(tmp_path / "tiny"))
    config = EngineConfig.from_options(model=path, tensor_parallel_size=2, device="cpu", dtype="float32")
    with pytest.raises(EngineDeadError, match="rank 1 was killed"):
        build_ranks(config, open_model(path, "auto"), lambda done, total: None, lambda preparing: None)
    assert released == ([1] if is_built else [])


def start_behind_plan(group) -> None:
    group.expect(RankLoaded)


def test_rank_group_expect_times_out_on_missing_rank():
    group = open_group("never comes", num_ranks=3)
    with pytest.raises(EngineDeadError, match=r"rank [12] has not sent RankReported within 1 seconds"):
        group.expect(RankReported, 1.0)
    assert all(map(is_gone, group.pids))


def test_rank_failure_in_a_step_fails_every_request():
    engine = ranked_engine("dies", num_ranks=3, run_ahead=1, is_eager=False)
    try:
        engine.add_request("one", "some text", SamplingParams(temperature=0.0, max_tokens=50))
        deltas = run_until_error(engine)
        assert "rank 2: it stopped at OSError: device lost" in str(deltas[-1].error)
        with pytest.raises(EngineDeadError, match="device lost"):
            engine.raise_if_dead()
    finally:
        engine.close()
    assert all(map(is_gone, engine.group.pids))


def run_until_error(engine, seconds: float = 20.0) -> list:
    """Deltas of the steps until one has an error."""
    found, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(EngineDeadError):
            if not engine.has_unfinished():
                engine.add_request(f"{time.monotonic()}", "more", SamplingParams(temperature=0.0, max_tokens=100))
            found += engine.step()
        if found and found[-1].error is not None:
            return found
    raise AssertionError("no error came")


def test_rank_group_killed_rank_is_named_at_once():
    engine = ranked_engine(num_ranks=3)
    try:
        engine.add_request("one", "some text", SamplingParams(temperature=0.0, max_tokens=100))
        engine.step()
        began = time.monotonic()
        os.kill(engine.group.pids[0], signal.SIGKILL)
        deltas = run_until_error(engine)
        assert "rank 1 was killed (signal SIGKILL" in str(deltas[-1].error)
        assert time.monotonic() - began < 2.5
    finally:
        engine.close()
    assert all(map(is_gone, engine.group.pids))


def test_waiting_kernels_are_released_repeatedly():
    """A kernel that a dead rank had begun may still say that it has come, and undo the first time."""
    group, times = open_group(num_ranks=2), []
    group.on_death = lambda: times.append(time.monotonic())
    try:
        os.kill(group.pids[0], signal.SIGKILL)
        until = time.monotonic() + 20
        while len(times) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(times) >= 2
    finally:
        group.end()


def test_rank_group_wait_discards_step_after_rank_death():
    """Its sums lack what the dead rank had; later callers get the same."""
    group, step = open_group(num_ranks=2), Future()
    group.on_death = lambda: step.done() or step.set_result("what lay in the rooms")
    try:
        os.kill(group.pids[0], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="rank 1 was killed"):
                group.wait(step)
        assert step.done()
    finally:
        group.end()


@pytest.mark.slow
def test_rank_holding_gil_raises_no_alarm():
    group = open_group("locked", num_ranks=2)
    try:
        start(group)
    finally:
        group.end()
    assert all(map(is_gone, group.pids))


# Messages

STEP = Step(7, (1,), (), (StepItem(0, 3, 1, True), StepItem(2, 8, 1, True)))
RESULTS = (StepResult((SequenceResult((5,)), SequenceResult(()), SequenceResult((1, 2)))), StepResult(()))


def test_frames_say_what_was_put_in():
    number, message = decode_rank_message(encode_frame(RESULTS, STEP, 9))
    assert (number, message) == (9, RankFrame((((5,), (), (1, 2)), ()), STEP))
    config = EngineConfig(model="x", tensor_parallel_size=2, quantization="fp8", quantization_ignore=("a*",))
    started = RankStart(config, 1, True)
    assert decode_rank_message(encode_rank_message(started, 1)) == (1, started)


def test_altered_frames_are_refused():
    frame = encode_frame(RESULTS, STEP, 9)
    for place in range(len(frame)):
        with pytest.raises(MessageError):
            decode_rank_message(frame[:place])
        altered = bytearray(frame)
        altered[place] ^= 0x41
        with pytest.raises(MessageError):
            decode_rank_message(bytes(altered))


def _foreign() -> dict[str, tuple[bytes, ...]]:
    frame = encode_frame((), STEP, 1)
    oversized = bytearray(frame)
    oversized[8:12] = (2**30 + 1).to_bytes(4, "little")
    return {
        "a stranger's": (b"GET / HTTP/1.1\r\nHost: me\r\n\r\n",),
        "cut short": (frame[: len(frame) // 2],),
        "oversized": (bytes(oversized),),
        "repeated": (encode_rank_message(RankPlanned({}), 1), encode_rank_message(RankPlanned({}), 1)),
        "not due": (encode_message(Start(EngineConfig()), 1),),
        "a frame first": (frame,),
    }


def heard(channel: Channel) -> list:
    """Everything that comes until the other side ends."""
    found = []
    with contextlib.suppress(ChannelClosedError):
        while channel.wait(20.0):
            frame = channel.take()
            if frame is not None:
                found.append(decode_rank_message(frame)[1])
    return found


@pytest.mark.parametrize("name", _foreign())
def test_rank_ends_with_sentence_on_foreign_bytes(name):
    """Bytes in the place of rank 0's: the rank says what is wrong, in one sentence, and ends."""
    ours, theirs = channel_pair()
    files = [open_pulse_file() for _ in range(2)]
    Pulse(files[1]).beat()
    process = subprocess.Popen(
        [*FAKE, *map(str, (theirs.fileno(), os.getpid(), *files))], pass_fds=(theirs.fileno(), *files)
    )
    theirs.close()
    for data in _foreign()[name]:
        ours.sendall(data)
    ours.shutdown(socket.SHUT_WR)
    channel = Channel(ours)
    said = heard(channel)
    assert process.wait(20.0) == 1
    assert len(said) == 1, said
    assert str(said[0].error if isinstance(said[0], Refused) else said[0].cause).endswith(".")
    channel.close()
    for file in files:
        os.close(file)


def test_shutdown_is_no_error():
    assert decode_rank_message(encode_rank_message(Shutdown(), 3)) == (3, Shutdown())


@pytest.mark.parametrize("reported", ["3", "x", "1"])
def test_check_world_refuses_wrong_world_size(reported):
    config = EngineConfig(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=f"WORLD_SIZE={reported}"):
        check_world(config, {"WORLD_SIZE": reported, "RANK": "0"})
    assert check_world(config, {"WORLD_SIZE": "2", "RANK": "0"}) == 2
    assert check_world(config, {"WORLD_SIZE": reported}) == 2
