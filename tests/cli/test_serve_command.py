"""`holdfast serve`: mistakes are one line before a weight is read; the real command serves and ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.cli_models import MAIN, Here
from holdfast.cli import serve as module

WRONG = {
    "no such path": (("./missing/model", "--port", "0"), "missing/model"),
    "bad port": (("--port", "x"), "--port"),
    "large port": (("--port", "65536"), "value.out_of_range"),
    "public without a key": (("--host", "0.0.0.0"), "cli.public_without_key"),
    "public v6 without a key": (("--host", "::"), "cli.public_without_key"),
    "unknown host": (("--host", "nowhere.invalid", "--allow-public"), "nowhere.invalid"),
    "bad key": (("--api-key", "a b"), "key"),
    "missing key file": (("--api-key-file", "missing"), "missing"),
    "bad name": (("--served-model-name", ""), "--served-model-name"),
    "bad origin": (("--allow-origin", "example.com"), "--allow-origin"),
    "bad connections": (("--max-connections", "0"), "--max-connections"),
    "bad drain": (("--drain-seconds", "-1"), "--drain-seconds"),
    "nan drain": (("--drain-seconds", "nan"), "--drain-seconds"),
    "bad response memory": (("--response-memory", "lots"), "--response-memory"),
    "bad format": (("--log-format", "xml"), "--log-format"),
    "bad tool parser": (("--tool-parser", "x"), "--tool-parser"),
    "bad reasoning parser": (("--reasoning-parser", "x"), "--reasoning-parser"),
    "no tokenizer": (("--tokenizer", "none"), "--tokenizer none"),
    "unknown option": (("--prot", "1"), "Did you mean --port?"),
    "bad engine option": (("--max-num-seqs", "0"), "max_num_seqs"),
    "bad policy": (("--scheduling-policy", "lifo"), "fcfs"),
    "missing config": (("--config", "missing"), "--config"),
}


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_API_KEY", "HOLDFAST_API_KEYS", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", WRONG)
def test_serve_mistake_prints_one_error_line(here: Here, tiny: Path, name: str) -> None:
    typed, words = WRONG[name]
    model = () if name == "no such path" else (str(tiny),)
    started = time.monotonic()
    ended = here("serve", *model, *typed)
    assert ended.code in (1, 2)
    assert ended.out == ""
    assert ended.refuses(words), ended
    assert ended.err.count("\n") == 1
    assert time.monotonic() - started < 10


def test_serve_port_in_use_is_refused(here: Here, tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = here("serve", str(tiny), "--port", str(port))
    assert ended.code == 1
    assert ended.refuses("http.cannot_listen", address=f"http://127.0.0.1:{port}"), ended
    assert ended.err.count("\n") == 1


def test_serve_missing_library_is_named(here: Here, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "uvicorn" else object())
    ended = here("serve", str(tiny))
    assert ended.code == 2
    assert "needs uvicorn. Run pip install '.[server]'" in ended.err


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("nowhere.invalid", False),
    ],
)
def test_is_loopback_classifies_hosts(host: str, is_loopback: bool) -> None:
    assert module.is_loopback(host) == is_loopback


def test_host_that_is_public_too_is_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name stands for several addresses: one that others reach is enough, whichever comes first."""
    for addresses in (("127.0.0.1", "10.0.0.7"), ("10.0.0.7", "::1"), ("::1", "127.0.0.1", "fe80::1%eth0")):
        found = [(None, None, 0, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *requested, found=found, **more: found)
        assert not module.is_loopback("several")


@pytest.fixture
def served(here: Here, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """served("--port", "1") -> what each part of a server was made with; no model is opened and nothing listens."""
    seen: dict[str, Any] = {}

    def open_visibly(config: Any, report: Any, start: Any) -> SimpleNamespace:
        seen.update(engine=config, report=report)
        return SimpleNamespace(name="m.gguf", engine=None)

    def make_service(llm: Any, names: Any, limits: Any, *, tool_parser: str, reasoning_parser: str, advice: Any) -> Any:
        seen.update(names=names, tools=tool_parser, reasoning=reasoning_parser, advice=bool(advice))
        seen.update(connections=limits.max_connections, drain=limits.drain_seconds, kept=limits.max_response_bytes)
        return SimpleNamespace(name=names[0])

    def make_app(service: Any, keys: Any, *, allowed_hosts: Any, allowed_origins: Any, log: Any, traces: Any) -> None:
        seen.update(keys=len(keys), hosts=tuple(allowed_hosts), origins=tuple(allowed_origins))
        seen.update(log=(log._format, log.wants_text))

    def bind(host: str, port: int) -> Any:
        seen.update(host=host, port=port)
        return nullcontext()

    monkeypatch.setattr(module, "open_visibly", open_visibly)
    monkeypatch.setattr("holdfast.server.service.Service", make_service)
    monkeypatch.setattr("holdfast.api.async_llm.AsyncLLM.from_engine", lambda engine: None)
    monkeypatch.setattr("holdfast.server.app.make_app", make_app)
    for name, stand_in in {
        "bind_socket": bind,
        "address_of": str,
        "raise_file_limit": lambda most: None,
        "run_server": lambda *given, **more: None,
        "WaitingDoor": lambda listener: nullcontext(),
    }.items():
        monkeypatch.setattr(f"holdfast.server.run.{name}", stand_in)

    def run(*typed: object) -> dict[str, Any]:
        seen.clear()
        ended = here("serve", tiny, *typed)
        assert ended.code == 0, ended
        return dict(seen)

    return run


OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "host": (("--host", "localhost"), {"host": "localhost", "hosts": ("localhost",)}),
    "port": (("--port", "8123"), {"port": 8123}),
    "free port": (("--port", "0"), {"port": 0}),
    "two keys": (("--api-key", "key-1", "--api-key", "key-2"), {"keys": 2}),
    "keys of a file": (("--api-key-file", "KEYS"), {"keys": 3}),
    "public": (("--host", "0.0.0.0", "--allow-public"), {"host": "0.0.0.0", "hosts": ("0.0.0.0",)}),
    "names": (("--served-model-name", "a, b", "--served-model-name", "c,a"), {"names": ("a", "b", "c")}),
    "hosts": (("--allowed-host", "x", "--allowed-host", "y"), {"hosts": ("x", "y", "127.0.0.1")}),
    "origins": (
        ("--allow-origin", "https://a,http://b/", "--allow-origin", "*"),
        {"origins": ("https://a", "http://b", "*")},
    ),
    "connections": (("--max-connections", "7"), {"connections": 7}),
    "drain": (("--drain-seconds", "2.5"), {"drain": 2.5}),
    "no drain": (("--drain-seconds", "0"), {"drain": 0}),
    "responses": (("--response-memory", "1MiB"), {"kept": 2**20}),
    "no responses": (("--response-memory", "0"), {"kept": 0}),
    "tools": (("--tool-parser", "none"), {"tools": "none"}),
    "reasoning": (("--reasoning-parser", "none"), {"reasoning": "none"}),
    "texts": (("--log-requests",), {"log": ("text", True)}),
    "log format": (("--log-format", "json"), {"log": ("json", False)}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_option_of_serve_reaches_its_part_alone(served: Callable[..., dict], tmp_path: Path, case: str) -> None:
    typed, expected = OPTIONS[case]
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("key-a\nkey-b\n\nkey-c\n")
    plain, found = served(), served(*(str(keys) if word == "KEYS" else word for word in typed))
    assert {name: value for name, value in found.items() if value != plain[name]} == expected


def test_serve_without_options_takes_its_defaults(served: Callable[..., dict], tmp_path: Path) -> None:
    found = served()
    engine, report = found.pop("engine"), found.pop("report")
    assert (engine.core_process, engine.max_step_stretch, report) == (True, "auto", None)
    assert found == {
        "host": "127.0.0.1",
        "port": 8000,
        "hosts": ("127.0.0.1",),
        "origins": (),
        "keys": 0,
        "names": ("m",),
        "connections": 4096,
        "drain": 30,
        "kept": 64 * 2**20,
        "tools": "auto",
        "reasoning": "auto",
        "log": ("text", False),
        "advice": False,
    }
    page = tmp_path / "memory.html"
    other = served("--no-core-process", "--max-model-len", "64", "--max-step-stretch", "2", "--memory-report", page)
    assert other["report"] == page
    assert other["engine"] == replace(engine, core_process=False, max_model_len=64, max_step_stretch=2)


def test_serve_with_config_file_answers_and_ends_on_sigterm(tiny: Path, tmp_path: Path) -> None:
    """From the command line and a config file to an answer, and out again with SIGTERM."""
    config = tmp_path / "serve.toml"
    config.touch(0o600)
    config.write_text(
        f'model = "{tiny}"\nport = 0\napi-key = "key-1"\nserved-model-name = ["mine", "alias"]\nlog-format = "json"\n'
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MAIN, "serve", "--config", str(config), "--drain-seconds", "5"]
    command += ["--scheduling-policy", "fcfs"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if " is ready at http://" in line:
                    break
            assert lines[-1].startswith("mine is ready at http://127.0.0.1:"), lines
            assert lines[-1].endswith("(with a key)\n")
            port = int(lines[-1].split("http://127.0.0.1:")[1].split()[0])
            assert answered(port, "GET", "/v1/models")[0] == 401
            status, body = answered(port, "GET", "/v1/models", "key-1")
            assert (status, [model["id"] for model in body["data"]]) == (200, ["mine", "alias"])
            requested = {"model": "alias", "prompt": "Hello", "max_tokens": 4}
            status, body = answered(port, "POST", "/v1/completions", "key-1", requested)
            assert (status, body["usage"]["completion_tokens"] <= 4) == (200, True)
            status, refused = answered(port, "POST", "/v1/completions", "key-1", requested | {"priority": -1})
            assert (status, "scheduling_policy=priority" in refused["error"]["message"]) == (400, True)
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(10) == 0
            assert "Traceback" not in rest
            logged = [json.loads(line) for line in rest.splitlines()]
            assert [line["status"] for line in logged] == [401, 200, 200, 400]
            assert logged[-2]["output_tokens"] == body["usage"]["completion_tokens"]
            assert "Hello" not in rest
        finally:
            process.kill()


def answered(port: int, method: str, path: str, key: str = "", value: object = None) -> tuple[int, dict]:
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request(method, path, None if value is None else json.dumps(value), headers)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body
