"""CoreProcess: the same answers from a core in a process of its own; whatever ends it is an error for everybody, and leaves nothing."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.cli_models import make_model
from engine.fake_core import CHANGE, TABLE
from engine.fakes import make_engine, own_pulse, run_all, shared_template, shared_tokenizer, solo, text_of, tokens_of
from error_codes import raises_code
from holdfast import LLM, AsyncLLM, SamplingParams
from holdfast.config import EngineConfig
from holdfast.engine import child_process, core_process
from holdfast.engine.channel import Channel, channel_pair
from holdfast.engine.core_process import CoreProcess, CoreServer
from holdfast.engine.engine import Engine
from holdfast.engine.messages import (
    Abort,
    CoreOutputs,
    CoreRequest,
    CoreStats,
    Heartbeat,
    Ready,
    Refused,
    SequenceOutput,
    Shutdown,
    Start,
    StatsRequest,
    Submit,
    decode_message,
    encode_message,
)
from holdfast.errors import (
    EngineDeadError,
    MemoryPlanError,
    MessageError,
    PromptError,
    QueueFullError,
    UnsupportedModelError,
)
from holdfast.memory.report import MemoryReport

TESTS = Path(__file__).parent.parent
FAKE = (sys.executable, "-P", "-m", "engine.fake_core")
BROKEN = (sys.executable, "-P", "-m", "engine.broken_core")
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=200)


@pytest.fixture(autouse=True)
def children_find_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    others = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), others))))


def is_gone(pid: int, seconds: float = 60.0) -> bool:
    """Whether a process has ended, and been reaped, within some time."""
    last = time.monotonic() + seconds
    while time.monotonic() < last:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z" and os.getpid() != _parent(pid):
            return True  # another process reaps it
        time.sleep(0.02)
    return False


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def open_fake(name: str = "", **options) -> CoreProcess:
    config = EngineConfig(model=name, core_process=True, **options)
    return CoreProcess(config, lambda done, total: None, command=FAKE)


@pytest.fixture
def make_remote() -> Iterator:
    """Engines whose core is a process of fakes, which is gone afterwards."""
    made = []

    def make(name: str = "", seed: int = 0, **options) -> Engine:
        core = open_fake(name, **options)
        made.append(core)
        return Engine(core, shared_tokenizer(), shared_template(), seed)

    yield make
    for core in made:
        core.close()
        assert is_gone(core.pid)


CASES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20),
    "seeds": SamplingParams(temperature=0.7, seed=5, max_tokens=20),
    "unseeded": SamplingParams(temperature=0.7, max_tokens=20),
    "several": SamplingParams(n=3, seed=5, max_tokens=9),
    "logprobs": SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=2, n=2),
    "stop token": SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[ord("e"), ord("t")]),
    "stop string": SamplingParams(temperature=0.0, max_tokens=60, stop=["e", "ta"], min_tokens=2),
}


@pytest.mark.parametrize("name", ["", "ahead"])
def test_answers_are_those_of_a_core_in_this_process(make_remote, name):
    remote, local = make_remote(name), make_engine(max_model_len=256, num_pages=400)
    for engine in (remote, local):
        for case, params in CASES.items():
            engine.add_request(case, f"a prompt for {case}", params)
        engine.add_request("scripted", "stop here", SamplingParams(max_tokens=30, stop="END"))
    local.runner.script["stop here"] = list(b"abcENDxyz")
    found, expected = ({}, run_all(local))
    while remote.has_unfinished():
        for delta in remote.step():
            found.setdefault((delta.request_id, delta.index), []).append(delta)
    assert found.keys() == expected.keys()
    for key, deltas in expected.items():
        own = found[key]
        assert (tokens_of(own), text_of(own)) == (tokens_of(deltas), text_of(deltas)), key
        assert [delta.logprobs for delta in own] == [delta.logprobs for delta in deltas]
        assert own[0].prompt_logprobs == deltas[0].prompt_logprobs
        assert (own[-1].finish_reason, own[-1].stop_reason) == (deltas[-1].finish_reason, deltas[-1].stop_reason)
        assert 0 <= own[-1].metrics.queue_seconds <= own[-1].metrics.first_token_seconds
    assert text_of(found["scripted", 0]) == "abc"
    remote.watch()
    ours, theirs = remote.stats(), local.stats()
    assert ours.num_output_tokens == theirs.num_output_tokens, "surplus is not counted"
    assert (ours.num_running, ours.num_waiting, ours.kv_usage) == (0, 0, 0.0)


def test_core_process_abort_leaves_other_requests_running(make_remote):
    engine = make_remote("slow")
    kept = engine.add_request("kept", "kept", LONG)
    gone = engine.add_request("gone", "gone", LONG)
    heard = []
    while len(tokens_of(heard)) < 10:
        heard += engine.step()
    assert [delta.finish_reason for delta in engine.abort(gone)] == ["abort"]
    later = engine.add_request(None, "later", PARAMS)
    found = {}
    while engine.has_unfinished() and len(tokens_of(found.get(later, []))) < 8:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    assert gone not in found, "surplus came out"
    assert tokens_of(found[later]) == solo("later", PARAMS, max_model_len=256, num_pages=400)[0]
    assert engine.abort_all()[-1].request_id == kept
    assert not engine.has_unfinished()
    assert engine.step() == []
    engine.watch()
    assert engine.stats().num_running == 0


def test_core_process_queue_limit_is_known_to_front(make_remote):
    """Eight run at once, four may wait."""
    engine = make_remote("slow", max_queue=4)
    assert engine.core.facts.max_queue == 4

    def add(*numbers: int) -> None:
        for number in numbers:
            engine.add_request(str(number), "x", LONG)

    for running in (4, 8):
        add(*range(running - 4, running))
        while engine.stats().num_running < running:
            engine.step()
    add(8, 9, 10, 11)
    with raises_code("request.queue_full", QueueFullError):
        engine.add_request("one more", "x", PARAMS)
    engine.abort_all()
    engine.add_request("after", "x", PARAMS)
    with pytest.raises(PromptError):
        engine.add_request("empty", "", PARAMS)
    deltas = []
    while engine.has_unfinished():
        deltas += engine.step()
    assert tokens_of(deltas) == solo("x", PARAMS, max_model_len=256)[0]


def test_repeated_watch_of_an_idle_core_leaves_no_messages(make_remote):
    core = make_remote().core
    for _ in range(50):
        core.ask_map()
        core.watch()
        taken = core.take_map()
        assert taken is not None, "the requested map arrives before the later answer"
        assert taken.num_free == taken.num_pages
    time.sleep(0.2)  # for whatever would come late
    rest = []
    while (message := core.take()) is not None:
        rest.append(message)
    assert [message for message in rest if not isinstance(message, Heartbeat)] == []


def test_core_process_reset_prefix_cache_forgets_prefixes(make_remote):
    engine = make_remote()

    def num_cached() -> int:
        engine.add_request("r", "a prompt of some length", PARAMS)
        deltas = []
        while engine.has_unfinished():
            deltas += engine.step()
        return deltas[-1].num_cached_tokens

    assert (num_cached(), num_cached()) == (0, 20)
    engine.reset_prefix_cache()
    assert num_cached() == 0


def test_core_process_reports_loading_progress():
    seen, prepared = [], []
    core = CoreProcess(EngineConfig(model=""), lambda *counts: seen.append(counts), prepared.append, command=FAKE)
    core.close()
    assert seen[-1] == (2, 2)
    assert [tuple(one) for one in prepared] == [("Compiling fakes", 1, 1, "kept nowhere")]


def test_core_process_open_failure_raises_model_error():
    with raises_code("value.empty", UnsupportedModelError, name="weights"):
        open_fake("refused")
    with pytest.raises(MemoryPlanError) as caught:
        open_fake("does not fit")
    assert (caught.value.table, caught.value.changes) == (TABLE, (CHANGE,))
    with pytest.raises(EngineDeadError, match="it stopped at OSError: no weights today"):
        open_fake("fails")
    with pytest.raises(EngineDeadError, match="it ended with exit status 3: what it said last"):
        open_fake("exits")


def test_core_process_interrupted_while_opening_ends_child(monkeypatch):
    monkeypatch.setattr(core_process, "LOADING_SECONDS", 0.5)
    begun = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **named: begun.append(popen(*args, **named)) or begun[-1])

    def interrupt() -> None:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        open_fake("never ready", core_timeout=60.0)
    assert begun[0].returncode is not None


def run_to_death(engine: Engine, act=lambda: None) -> tuple[str, float]:
    """Two long requests and one that waits: the error of each, and after how long."""
    for name in ("a", "b"):
        engine.add_request(name, name, LONG)
    ends = {}

    def step() -> None:
        ends.update({delta.request_id: delta for delta in engine.step() if delta.finish_reason is not None})

    step()
    act()
    began = time.monotonic()
    while not engine.is_dead:
        step()
    seconds = time.monotonic() - began
    assert {name: delta.finish_reason for name, delta in ends.items()} == {"a": "error", "b": "error"}
    assert not engine.has_unfinished()
    for call in (engine.step, engine.abort_all, lambda: engine.add_request("c", "c", PARAMS)):
        with pytest.raises(EngineDeadError):
            call()
    assert is_gone(engine.core.pid, 10.0), "it is reaped"
    engine.close()
    return ends["a"].error, seconds


def test_core_process_killed_core_fails_requests_at_once(make_remote):
    engine = make_remote("slow")
    error, seconds = run_to_death(engine, lambda: os.kill(engine.core.pid, signal.SIGKILL))
    assert "it ended with signal SIGKILL" in error
    with pytest.raises(EngineDeadError) as reported:
        engine.raise_if_dead()
    assert str(reported.value).count("Create a new engine") == 1
    assert seconds < 60


def test_core_process_silent_core_times_out(make_remote):
    engine = make_remote("slow", core_timeout=1.0)
    error, seconds = run_to_death(engine, lambda: os.kill(engine.core.pid, signal.SIGSTOP))
    assert "it was silent for 1.0 seconds" in error
    assert 0.9 < seconds < 60


@pytest.mark.slow
def test_core_that_hangs_while_its_channel_is_full(make_remote):
    engine = make_remote("slow", core_timeout=1.0)
    engine.add_request("a", "a", LONG)
    engine.step()
    os.kill(engine.core.pid, signal.SIGSTOP)

    def flood() -> None:
        for number in range(2000):
            engine.add_request(f"more {number}", "words " * 20, SamplingParams(max_tokens=1, bad_words=["x" * 1000]))

    with pytest.raises(EngineDeadError, match="read and sent nothing"):
        flood()
    assert {delta.finish_reason for delta in engine.step()} == {"error"}
    assert is_gone(engine.core.pid, 10.0), "it is reaped"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dies", "it stopped at OSError: device lost"),
        ("exits late", "it ended with exit status 7: no words for it"),
    ],
)
def test_core_process_self_ending_core_fails_requests(make_remote, name, words):
    error, seconds = run_to_death(make_remote(name))
    assert words in error
    assert seconds < 60


@pytest.mark.slow
def test_core_process_long_step_is_not_silence(make_remote):
    engine = make_remote("hangs", core_timeout=1.2)
    engine.add_request("a", "a", LONG)
    began, num_tokens = time.monotonic(), 0
    while num_tokens < 4:
        num_tokens += len(tokens_of(engine.step()))

    def interrupt() -> None:
        time.sleep(1.8)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert time.monotonic() - began >= 1.8
    assert not engine.is_dead
    assert engine.core.pulse().step_seconds > 1.0
    assert [delta.finish_reason for delta in engine.abort("a")] == ["abort"]


def test_hang_up_stops_a_step_and_counts_are_fresh(make_remote):
    engine = make_remote("layers")
    engine.add_request("a", "a long prompt", SamplingParams(temperature=0.0, max_tokens=12))
    seen = []

    def hang_up() -> None:
        while (stats := engine.stats()).num_running == 0 and len(seen) < 400:
            seen.append(stats.num_waiting)
            time.sleep(0.02)
        seen.append(stats.num_running)
        engine.hang_up("a")

    thread = threading.Thread(target=hang_up)
    thread.start()
    began = time.monotonic()
    assert engine.step() == []
    assert time.monotonic() - began < 8, "its layers take ten seconds together"
    thread.join()
    assert seen[-1] == 1, "while its step runs it counts as running"
    assert set(seen[:-1]) <= {1}, "before it is seen it counts as waiting"
    engine.abort("a")
    engine.watch()
    assert engine.stats().num_running == 0


def test_core_process_ctrl_c_loses_nothing(make_remote):
    engine = make_remote("slow")
    engine.add_request("a", "a", SamplingParams(temperature=0.0, max_tokens=30))
    deltas, num_interrupts = [], 0
    timer = [threading.Timer(0.05 * number, os.kill, (os.getpid(), signal.SIGINT)) for number in range(1, 6)]
    for one in timer:
        one.start()
    while engine.has_unfinished():
        try:
            deltas += engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    for one in timer:
        one.join()
    assert num_interrupts >= 1
    assert tokens_of(deltas) == solo("a", SamplingParams(temperature=0.0, max_tokens=30), max_model_len=256)[0]


def test_unreferenced_core_ends():
    core = open_fake("slow")
    pid = core.pid
    del core
    gc.collect()
    assert is_gone(pid, 10.0)


def test_core_process_ends_when_parent_raises_or_exits():
    code = """
import sys
from engine.test_core_process import open_fake
core = open_fake("slow")
print(core.pid, flush=True)
raise ValueError("the program fails")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "the program fails" in done.stderr
    assert is_gone(int(done.stdout))


@pytest.mark.parametrize("name", [pytest.param("slow", marks=pytest.mark.slow), "hangs"])
def test_core_process_ends_when_parent_is_killed(name):
    """In the middle of a step too."""
    code = f"""
import sys, time
from engine.fakes import shared_tokenizer
from engine.test_core_process import LONG, open_fake
from holdfast.engine.engine import Engine
engine = Engine(open_fake({name!r}), shared_tokenizer(), None, 0)
engine.add_request("a", "a", LONG)
for _ in range(4):
    engine.step()
print(engine.core.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert is_gone(pid)


def test_core_process_close_in_fork_spares_parents_core():
    core = open_fake("slow")
    code = os.fork()
    if code == 0:
        try:
            core.close()
        finally:
            os._exit(0)
    assert os.waitpid(code, 0)[1] == 0
    core.watch()
    core.close()
    assert is_gone(core.pid, 10.0)


def frames(*messages, first: int = 1) -> bytes:
    return b"".join(encode_message(message, first + place) for place, message in enumerate(messages))


READY = Ready(make_engine().core.facts)
ONE = CoreOutputs((SequenceOutput(0, (97,)),), CoreStats(num_submitted=1))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (frames(READY) + frames(ONE, ONE, first=3), "Message 3 arrived, but message 2 is next"),
        (frames(READY, ONE) + frames(ONE, first=2), "Message 2 arrived, but message 3 is next"),
        (frames(READY) + b"garbage that is no frame", "Not a Holdfast message"),
        (frames(READY) + frames(ONE, first=2)[:4] + b"\x09\x00" + frames(ONE, first=2)[6:], "version 9"),
        (frames(READY) + frames(ONE, first=2)[:-1] + b"\x55", "checksum"),
        (frames(READY, CoreOutputs((SequenceOutput(5, (97,)),))), "it sent sequence 5"),
        (frames(READY, CoreOutputs((SequenceOutput(0, (264,)),))), "it chose token 264 of a vocabulary of 264"),
        (frames(READY, READY), "it sent an unexpected Ready"),
        (frames(READY, Refused((), MessageError("wire.checksum"))), "it refused a message"),
    ],
    ids=[
        "out of order",
        "repeated",
        "garbage",
        "version",
        "altered",
        "unknown sequence",
        "unknown token",
        "unasked",
        "refused",
    ],
)
def test_core_process_malformed_reply_ends_core(said, words, monkeypatch):
    monkeypatch.setattr(
        child_process, "GRACE_SECONDS", 0.05
    )  # this one will not end by itself, however long it is given
    core = CoreProcess(EngineConfig(), lambda done, total: None, command=(*BROKEN, said.hex()))
    engine = Engine(core, shared_tokenizer(), None, 0)
    engine.add_request("a", "a", LONG)
    deltas = []
    while not engine.is_dead:
        deltas += engine.step()
    assert (deltas[-1].finish_reason, engine.is_dead) == ("error", True)
    assert words in deltas[-1].error
    assert is_gone(core.pid, 10.0)


def test_core_process_truncated_message_raises(monkeypatch):
    code = "import socket, sys; socket.socket(fileno=int(sys.argv[2])).sendall(bytes.fromhex(sys.argv[1]))"
    said = (frames(READY) + frames(ONE, first=2)[:-3]).hex()
    core = CoreProcess(EngineConfig(), lambda done, total: None, command=(sys.executable, "-c", code, said))
    with raises_code("engine.core_dead", EngineDeadError):
        core.watch()
    assert is_gone(core.pid, 10.0)


class Server:
    """A CoreServer over fakes in this process, and the frames that it answers with."""

    def __init__(self) -> None:
        ours, theirs = channel_pair()
        self.channel = Channel(ours)
        self.engine = make_engine()
        self._theirs: socket.socket = theirs
        self.server = CoreServer(Channel(theirs), own_pulse())
        self.thread = threading.Thread(target=self.server.serve, args=(self.engine.core,))
        self.thread.start()

    def ask(self, data: bytes) -> object:
        """The answer to these bytes, and then that to a question that is always answered."""
        self.channel.send(lambda: data)
        while True:
            while (frame := self.channel.take()) is None:
                assert self.channel.wait(10)
            _, message = decode_message(frame)
            if not isinstance(message, Heartbeat):
                return message

    def end(self, number: int) -> None:
        self.channel.send(lambda: encode_message(Shutdown(), number))
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.channel.close()
        self._theirs.close()


SUBMIT = Submit((CoreRequest(0, (1, 2), PARAMS, 0, 4),))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frames(SUBMIT, first=2), "wire.out_of_order"),
        (frames(Abort((0,))), "wire.wrong_sequences"),
        (frames(Heartbeat(1.0)), "wire.unexpected"),
        (frames(Start(EngineConfig())), "wire.unexpected"),
        (frames(SUBMIT)[:-1] + b"\xff", "wire.checksum"),
    ],
    ids=["out of order", "unknown sequence", "heartbeat", "a second start", "altered"],
)
def test_malformed_command_is_refused_without_effect(data, code):
    server = Server()
    refused = server.ask(data)
    assert isinstance(refused, Refused)
    assert refused.sequence_ids == ()
    assert refused.error.code == code
    number = 2 if code in ("wire.wrong_sequences", "wire.unexpected") else 1
    found = server.ask(frames(StatsRequest(), first=number))
    while not isinstance(found, CoreStats):
        found = server.ask(b"")
    assert found == CoreStats()
    server.end(number + 1)


def test_core_server_repeated_command_is_refused():
    server = Server()
    server.channel.send(lambda: frames(SUBMIT) + frames(SUBMIT))
    answers, tokens = [], []
    while len(tokens) < 4:
        answers.append(server.ask(b""))
        if isinstance(answers[-1], CoreOutputs):
            tokens += [token for output in answers[-1].outputs for token in output.token_ids]
    (refused,) = [answer for answer in answers if isinstance(answer, Refused)]
    assert (refused.error.code, refused.error.values["number"]) == ("wire.out_of_order", 1)
    assert server.engine.core.stats().num_submitted == 1
    server.end(2)


def test_core_server_refuses_request_by_sequence_ids():
    server = Server()
    refused = server.ask(frames(Submit((CoreRequest(0, tuple(range(200)), PARAMS, 0, 4),))))
    assert isinstance(refused, Refused)
    assert refused.sequence_ids == (0,)
    assert "max_model_len" in str(refused.error)
    server.end(2)


def test_request_refused_late_fails_alone():
    said = frames(READY, Refused((0, 1), QueueFullError("value.empty", name="a")), ONE)
    core = CoreProcess(EngineConfig(), lambda done, total: None, command=(*BROKEN, said.hex()))
    engine = Engine(core, shared_tokenizer(), None, 0)
    engine.add_request("a", "a", SamplingParams(n=2))
    deltas = engine.step()
    assert [(delta.finish_reason, delta.error) for delta in deltas] == [("error", "a must not be empty.")] * 2
    assert not engine.is_dead
    assert not engine.has_unfinished()
    engine.close()
    assert is_gone(core.pid, 10.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


REAL_CASES = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=11, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, max_tokens=16, n=3),
    SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=60, stop=["e", "a"], min_tokens=4),
    SamplingParams(temperature=0.8, seed=4, max_tokens=24, bad_words=["e"], logit_bias={7: 2.0}, top_k=9),
]


def answers(llm: LLM) -> list[tuple]:
    prompts = [f"prompt number {number}, of some length" for number in range(len(REAL_CASES))]
    found = []
    for output in llm.generate(prompts, REAL_CASES, progress=False):
        whole = [(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) for one in output.outputs]
        found.append((whole, output.prompt_logprobs, output.error))
    return found


def owners(memory: MemoryReport) -> dict[str, int | None]:
    """What each holds, but the process itself, which is another."""
    return {row.owner: row.held_bytes for row in memory.rows if row.owner != "python and torch"}


def test_core_process_answers_equal_local_bit_for_bit(model):
    with LLM(str(model)) as local:
        expected, memory = answers(local), local.memory
    with LLM(str(model), core_process=True) as remote:
        pid = remote.engine.core.pid
        assert answers(remote) == expected
        assert owners(remote.memory) == owners(memory)
        assert (remote.memory.kv_tokens, remote.memory.disk) == (memory.kv_tokens, memory.disk)
        stream = remote.stream("left", LONG)
        next(stream)
        stream.close()
        stats = remote.stats()
        assert (stats.num_unfinished_requests, stats.num_running, stats.kv_usage) == (0, 0, 0.0)
        assert remote.default_sampling_params() == SamplingParams()
        assert remote.chat([{"role": "user", "content": "Hi"}], PARAMS)[0].outputs[0].token_ids
    assert is_gone(pid, 10.0)


@pytest.mark.parametrize("fits", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fits", "does not fit"])
def test_front_runs_without_torch_and_raises_model_errors(model, fits):
    """That the error comes with its table and changes is held in every run by a core of fakes that does not fit."""
    code = f"""
import sys
from holdfast import LLM, SamplingParams
from holdfast.errors import MemoryPlanError
try:
    with LLM({str(model)!r}, core_process=True, memory_limit={None if fits else "1KiB"!r}) as llm:
        outputs = llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
        print(len(outputs[0].outputs[0].token_ids))
except MemoryPlanError as error:
    print(error.table.rows[0].owner, error.changes[0].change, error.code)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    reported, has_torch = done.stdout.splitlines()
    assert has_torch == "False", done.stderr
    if fits:
        assert reported == "2"
    else:
        assert reported.startswith("python and torch")
        assert "raise memory_limit" in reported


def run_async(engine: Engine, work) -> None:
    async def main() -> None:
        async with AsyncLLM.from_engine(engine) as llm:
            await asyncio.wait_for(work(llm), 30)

    asyncio.run(main())


async def until_dead(llm: AsyncLLM) -> None:
    while llm.health().is_alive:
        await asyncio.sleep(0.02)


def test_core_process_death_reaches_every_async_reader(make_remote):
    engine = make_remote("slow", core_timeout=5.0)

    async def work(llm: AsyncLLM) -> None:
        async def last(prompt: str, params: SamplingParams = PARAMS) -> list[int]:
            return [output async for output in llm.generate(prompt, params)][-1].outputs[0].token_ids

        prompts = [f"number {number}" for number in range(6)]
        found = await asyncio.gather(*map(last, prompts))
        assert found == [solo(prompt, PARAMS, max_model_len=256)[0] for prompt in prompts]
        left = llm.generate("left", LONG)
        await anext(left)
        await left.aclose()
        waiting = [asyncio.ensure_future(last("long", LONG)) for _ in range(3)]
        await asyncio.sleep(0.1)
        os.kill(engine.core.pid, signal.SIGKILL)
        for one in waiting:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await one
        await until_dead(llm)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await last("after")

    run_async(engine, work)
    assert is_gone(engine.core.pid, 10.0)


def test_idle_core_that_ends_is_noticed(make_remote):
    engine = make_remote()

    async def work(llm: AsyncLLM) -> None:
        assert llm.health().is_alive
        os.kill(engine.core.pid, signal.SIGKILL)
        await until_dead(llm)

    run_async(engine, work)
