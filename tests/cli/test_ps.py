"""`holdfast ps`: a row for each server that answers, and one line for a port without one."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cli.cli_models import Here

FACTS = {
    "model": "my-model\x1b[2J",
    "state": "ready",
    "trouble": None,
    "totals": {"running": 3, "waiting": 1},
    "memory": {"held_bytes": 3 * 2**30, "planned_bytes": 5 * 2**30},
    "kv": {"num_pages": 1200, "in_use": 48},
}


class Answers(BaseHTTPRequestHandler):
    """What a server says, by its port."""

    def do_GET(self) -> None:
        status, body = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Keep stderr for the command."""


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Answers) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield made
        made.shutdown()


def test_ps_of_a_running_server_prints_its_row(here: Here, server: HTTPServer) -> None:
    server.answer = (200, json.dumps(FACTS).encode())  # type: ignore[attr-defined]
    ended = here("ps", "--port", f"{server.server_port},1")
    assert ended.code == 0
    heading, row = ended.out.splitlines()
    assert heading.split()[:3] == ["port", "model", "memory"]
    assert row.split()[0] == str(server.server_port)
    for words in ("my-model", "3.00 GiB", "48 of 1,200", "3 running, 1 waiting", "ready"):
        assert words in row
    assert "\x1b" not in row, "a name cannot move the cursor"
    assert ended.err == "port 1: no server answers; start one with holdfast serve [MODEL]\n"


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"[]", "not a Holdfast server, or not ready (another answer)"),
        (200, b"{", "not a Holdfast server, or not ready"),
        (404, b"", "not a Holdfast server, or not ready (HTTP 404"),
        (401, b'{"error": {"message": "no key"}}', "the server needs a key; set HOLDFAST_API_KEY"),
    ],
)
def test_ps_of_another_server_says_so(here: Here, server: HTTPServer, status: int, body: bytes, words: str) -> None:
    server.answer = (status, body)  # type: ignore[attr-defined]
    ended = here("ps", "--port", server.server_port)
    assert (ended.code, ended.out) == (1, "")
    assert ended.refuses(words), ended
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("port", ["x", "0", "70000", "8000,"])
def test_ps_of_a_wrong_port_is_refused(here: Here, port: str) -> None:
    ended = here("ps", "--port", port)
    assert ended.code == 2
    assert "--port" in ended.err
