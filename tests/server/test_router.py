"""vllm-router in front of two servers, as docs/deploy/router.md says: one dies or drains, and only streams that had begun break."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from for_each import for_each
from server.test_server_process import Process, started

RECIPE = Path(__file__).parents[2] / "docs" / "deploy" / "router.md"
ROUTER = shutil.which(
    "vllm-router", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
)
needs_router = pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed here: pip install vllm-router")
ADDED = {"no_stop_trim": False, "return_hidden_states": False, "ignore_eos": False, "skip_special_tokens": True}
ADDED_TO_CHATS = {"separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True, "logprobs": False}
"""What the router of 0.1.16 writes into every request that it passes on."""


# --- the fields that it adds


def test_router_fields_added_to_requests_are_accepted(client: httpx.Client) -> None:
    given = {"prompt": "go on", "max_tokens": 2, **ADDED, "echo": False}
    assert client.post("/v1/completions", json=given).status_code == 200
    chat = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 2, **ADDED, **ADDED_TO_CHATS}
    assert client.post("/v1/chat/completions", json={**chat, "continue_final_message": False}).status_code == 200


@for_each("field, value", [("no_stop_trim", True), ("return_hidden_states", True), ("separate_reasoning", False)])
def test_router_field_with_an_effect_is_refused(client: httpx.Client, field: str, value: bool) -> None:
    chat = {"messages": [{"role": "user", "content": "go on"}], field: value}
    answer = client.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


# --- two servers behind it


class Answer(NamedTuple):
    """What a client of the router saw."""

    status: int
    num_events: int
    is_whole: bool


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def recipe_options() -> list[str]:
    """Arguments of the command in the recipe, without addresses and ports, which are the test's own."""
    text = RECIPE.read_text(encoding="utf-8")
    block = text[text.index("vllm-router --") :].partition("\n\n")[0].replace("\\\n", " ")
    words = shlex.split(block, comments=True)[1:]
    own = {"--host": 1, "--port": 1, "--worker-urls": 2, "--prometheus-port": 1}
    kept: list[str] = []
    skipped = 0
    for word in words:
        if skipped:
            skipped -= 1
        elif word in own:
            skipped = own[word]
        else:
            kept.append(word)
    return kept


@contextmanager
def routed(servers: list[Process]) -> Iterator[str]:
    """The address of a router in front of these."""
    assert ROUTER is not None
    port = free_port()
    urls = [f"http://127.0.0.1:{server.port}" for server in servers]
    places = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command = [ROUTER, *places, "--worker-urls", *urls, *recipe_options()]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not is_up(port):
            assert router.poll() is None, f"the router ended with {router.returncode}: {shlex.join(command)}"
            assert time.monotonic() < end, "the router did not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        router.kill()
        router.wait()


def is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def body(number: int, *, stream: bool) -> dict[str, Any]:
    """Two seconds or so of a fake's time."""
    return {"model": "fake", "prompt": f"go on {number}", "max_tokens": 60, "stream": stream, "ignore_eos": True}


def whole(url: str, number: int) -> Answer:
    answer = httpx.post(f"{url}/v1/completions", json=body(number, stream=False), timeout=60)
    return Answer(answer.status_code, 0, answer.status_code == 200 and bool(answer.json()["choices"][0]["text"]))


def stream(url: str, number: int, has_begun: threading.Event | None = None) -> Answer:
    num_events, is_whole, status = 0, False, 0
    with (
        suppress(httpx.RemoteProtocolError),  # cut off; return what came
        httpx.stream("POST", f"{url}/v1/completions", json=body(number, stream=True), timeout=60) as answer,
    ):
        status = answer.status_code
        for line in answer.iter_lines():
            num_events += line.startswith("data: {")
            is_whole = is_whole or line == "data: [DONE]"
            if has_begun is not None:
                has_begun.set()
    return Answer(status, num_events, is_whole)


class Load:
    """Whole requests and streams, half of them on each server, all under way; more follow them."""

    def __init__(self, pool: ThreadPoolExecutor, url: str) -> None:
        self._pool, self._url = pool, url
        self.wholes: list[Future[Answer]] = []
        for number in range(4):
            self.wholes.append(pool.submit(whole, url, number))
            time.sleep(0.05)  # so that every second one goes to the same server
        begun = [threading.Event() for _ in range(4)]
        self.streams = [pool.submit(stream, url, 4 + number, event) for number, event in enumerate(begun)]
        assert all(event.wait(30) for event in begun), "a stream did not begin"

    def more(self) -> list[Future[Answer]]:
        return [self._pool.submit(stream if number % 2 else whole, self._url, number) for number in range(8, 16)]


@pytest.mark.slow
@needs_router
def test_router_dying_server_fails_no_request_before_a_token() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(started("slow")) for _ in range(2)]
        url = stack.enter_context(routed(servers))
        pool = stack.enter_context(ThreadPoolExecutor(32))
        given = Load(pool, url)
        servers[0].process.kill()
        answers = [future.result() for future in (*given.wholes, *given.more())]
        assert all(answer.status == 200 and answer.is_whole for answer in answers), answers
        ended = [future.result() for future in given.streams]
        # Half of a stream cannot be sent again: it is cut off, never ended as if it were whole.
        assert all(answer.is_whole or (answer.status == 200 and answer.num_events > 0) for answer in ended), ended
        assert 0 < sum(answer.is_whole for answer in ended) < 4, "those of the other server go on"


@pytest.mark.slow
@needs_router
def test_router_draining_server_fails_no_request() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(started("slow", drain_seconds=20.0)) for _ in range(2)]
        url = stack.enter_context(routed(servers))
        pool = stack.enter_context(ThreadPoolExecutor(32))
        given = Load(pool, url)
        servers[0].process.send_signal(signal.SIGTERM)
        while httpx.get(f"http://127.0.0.1:{servers[0].port}/ready").status_code != 503:
            time.sleep(0.01)
        answers = [future.result() for future in (*given.wholes, *given.streams, *given.more())]
        assert all(answer.status == 200 and answer.is_whole for answer in answers), answers
        assert servers[0].process.wait(30) == 0


def test_router_recipe_body_is_json() -> None:
    shown = RECIPE.read_text(encoding="utf-8").partition("-d '")[2].partition("'")[0]
    assert json.loads(shown)["stream"] is True
