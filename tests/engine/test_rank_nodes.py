"""Ranks that a launcher has started on several nodes, which are processes of this machine: answers, refusals, and a node that is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cli.cli_models import make_model
from error_codes import raises_code
from holdfast import LLM, SamplingParams
from holdfast.config import EngineConfig
from holdfast.engine import rank_build
from holdfast.errors import ConfigError
from holdfast.planning.ranks import RankReport
from holdfast.planning.target import cpu_target

OPTIONS = {"device": "cpu", "dtype": "float32", "memory_limit": "1GiB", "max_model_len": 64}
EXACT = OPTIONS | {"tensor_parallel_sums": "exact"}
PROMPT = [1, 5, 9, 12]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_model(tmp_path_factory.mktemp("nodes") / "tiny"))


SCRIPT = """
    import json, os, sys, time
    from holdfast import LLM, SamplingParams
    from holdfast.errors import HoldfastError
    options = json.loads(sys.argv[1])
    try:
        llm = LLM(**options)
    except HoldfastError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        sys.exit(3)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    output = llm.generate({"prompt_token_ids": %s}, params, progress=False)[0]
    print(json.dumps({"tokens": output.outputs[0].token_ids}), flush=True)
    if len(sys.argv) > 2:
        try:
            while True:
                output = llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=50), progress=False)[0]
                if output.error is not None:
                    raise output.error
        except HoldfastError as error:
            print(json.dumps({"error": str(error), "at": time.monotonic()}), flush=True)
    llm.shutdown()
"""


@contextmanager
def launched(nodes: list[int], options: dict, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Run one program per rank, as a launcher does; no process outlives this."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = [sys.executable, "-c", textwrap.dedent(SCRIPT % PROMPT), json.dumps(options), *words]
    shared = {"WORLD_SIZE": str(sum(nodes)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = [(node, local) for node, count in enumerate(nodes) for local in range(count)]
    children = []
    try:
        for rank, (node, local) in enumerate(places):
            own = {"RANK": rank, "GROUP_RANK": node, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": nodes[node]}
            environment = os.environ | shared | {key: str(value) for key, value in own.items()}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            children.append(subprocess.Popen(program, env=environment, **pipes))
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def line_of(child: subprocess.Popen[str]) -> dict:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, child.communicate()[1][-2000:]
    return json.loads(line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [([1, 1], {"tensor_parallel_size": 2}), ([3, 1], {"tensor_parallel_size": 2, "pipeline_parallel_size": 2})],
    ids=["one-each", "three-and-one"],
)
def test_ranks_of_several_nodes_answer_as_one_does(model: str, nodes: list[int], sizes: dict) -> None:
    with LLM(model, **OPTIONS) as llm:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0.0, max_tokens=12)
        wanted = llm.generate({"prompt_token_ids": PROMPT}, params, progress=False)[0].outputs[0].token_ids
    with launched(nodes, EXACT | sizes | {"model": model, "nnodes": 2}) as children:
        assert line_of(children[0]) == {"tokens": list(wanted)}
        assert [child.wait(20) for child in children] == [0] * len(children)


@pytest.mark.slow
def test_wrong_number_of_nodes_is_refused(model: str) -> None:
    with launched([1, 1], EXACT | {"model": model, "tensor_parallel_size": 2, "nnodes": 1}) as children:
        words = "nnodes=1"
        assert line_of(children[0])["refused"].startswith(words)
        assert children[0].wait(20) == 3
        children[1].wait(20)


@pytest.mark.slow
def test_rank_killed_on_another_node_raises_at_once(model: str) -> None:
    with launched([1, 1, 1], EXACT | {"model": model, "tensor_parallel_size": 2}, "again") as children:
        assert line_of(children[0])["refused"], "three processes are not two ranks"
    with launched([1, 1], EXACT | {"model": model, "tensor_parallel_size": 2}, "again") as children:
        assert "tokens" in line_of(children[0])
        time.sleep(0.3)
        killed = time.monotonic()
        children[1].send_signal(signal.SIGKILL)
        found = line_of(children[0])
        assert found["at"] - killed < 2.5
        assert "rank 1" in found["error"]
        children[0].wait(10)


@pytest.mark.slow
def test_rank_exits_after_rank_0_is_killed(model: str) -> None:
    with launched([1, 1], EXACT | {"model": model, "tensor_parallel_size": 2}, "again") as children:
        assert "tokens" in line_of(children[0])
        children[0].send_signal(signal.SIGKILL)
        began = time.monotonic()
        assert children[1].wait(10) == 1, "its launcher would take it for one that has done its work"
        assert time.monotonic() - began < 5


def test_nodes_without_a_launcher_are_refused_at_once(model: str) -> None:
    with pytest.raises(ConfigError, match=r"nnodes=2"):
        LLM(model, tensor_parallel_size=2, nnodes=2, **OPTIONS)  # type: ignore[arg-type]


def reports(*places: tuple[str, str], kind: str = "cuda") -> list[RankReport]:
    target = cpu_target()._replace(kind=kind)  # type: ignore[arg-type]
    return [RankReport(rank, target, device, {}, "m", node) for rank, (device, node) in enumerate(places)]


def test_check_places_refuses_two_ranks_on_one_gpu(monkeypatch) -> None:
    config = EngineConfig(tensor_parallel_size=2)
    monkeypatch.delenv(rank_build.OVERLAPPING, raising=False)
    with raises_code("rank.same_device", ConfigError):
        rank_build.check_places(config, reports(("GPU x", "a"), ("GPU x", "b")))
    rank_build.check_places(config, reports(("cpu of h", "a"), ("cpu of h", "a"), kind="cpu"))
    monkeypatch.setenv(rank_build.OVERLAPPING, "1")
    rank_build.check_places(config, reports(("GPU x", "a"), ("GPU x", "b")))


@pytest.mark.parametrize(("nodes", "is_set"), [("aabb", False), ("abab", True), ("aaab", True), ("aaaa", False)])
def test_stage_on_several_nodes_logs_a_warning(nodes: str, is_set: bool, monkeypatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(rank_build.log, "warning", lambda words, *rest: reported.append(words))
    config = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    rank_build.check_places(config, reports(*((f"GPU {rank}", node) for rank, node in enumerate(nodes))))
    assert bool(reported) == is_set
