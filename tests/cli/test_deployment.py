"""The Dockerfile, the systemd unit and the page about serving: their commands and options exist, and their limits fit together."""

import json
import re
import shlex
from pathlib import Path

import pytest

import docs_rules
from holdfast.cli.commands import COMMANDS
from holdfast.server.run import SPARE_FILES
from holdfast.server.service import ServerLimits

DEPLOY = Path("docs") / "deploy"


def known_flags(*path: str) -> set[str]:
    command = next(command for command in COMMANDS if command.path == path)
    return {flag for row in command.rows for flag in row.all_flags}


def values(words: list[str]) -> dict[str, str]:
    """Options of a command line, with what follows each."""
    return {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("--")}


@pytest.fixture(scope="module")
def dockerfile(root: Path) -> str:
    return (root / DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")


@pytest.fixture(scope="module")
def unit(root: Path) -> dict[str, str]:
    lines = (root / DEPLOY / "holdfast.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"[A-Za-z]+=", line))


def check_serve(words: list[str]) -> dict[str, str]:
    assert [Path(words[0]).name, words[1]] == ["holdfast", "serve"]
    found = values(words)
    assert set(found) <= known_flags("serve")
    assert float(found["--drain-seconds"]) == ServerLimits().drain_seconds
    return found


def test_dockerfile_serves_on_exposed_port(dockerfile: str, root: Path) -> None:
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)[1])  # type: ignore[index]
    port = check_serve(entry)["--port"]
    assert f"EXPOSE {port}" in dockerfile
    health = json.loads(re.search(r"^HEALTHCHECK .*?CMD (\[.*\])$", dockerfile, re.MULTILINE)[1])  # type: ignore[index]
    compile(health[2], "health", "exec")
    assert f"127.0.0.1:{port}/health" in health[2]
    # Root opens no model, and a server that is requested to end gets the signal itself: no shell in between.
    assert re.search(r"^USER (?!root)", dockerfile, re.MULTILINE)
    assert "STOPSIGNAL SIGTERM" in dockerfile
    copied = re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE)
    assert all((root / name).exists() for names in copied for name in names.split())
    stop = int(re.search(r"--stop-timeout (\d+)", dockerfile)[1])  # type: ignore[index]
    assert stop > ServerLimits().drain_seconds + 2


def test_extras_of_the_container_exist(dockerfile: str, root: Path) -> None:
    project = (root / "pyproject.toml").read_text()
    extras = re.search(r'pip install [^"]*"\.\[([a-z,]+)\]"', dockerfile)[1].split(",")  # type: ignore[index]
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)


def test_systemd_unit_serves_with_matching_limits(unit: dict[str, str]) -> None:
    found = check_serve(shlex.split(unit["ExecStart"]))
    limits = ServerLimits()
    assert int(found["--max-connections"]) == limits.max_connections
    assert int(unit["LimitNOFILE"]) >= limits.max_connections + SPARE_FILES
    assert int(unit["TimeoutStopSec"]) > limits.drain_seconds + 2
    credential = unit["LoadCredential"].partition(":")[0]
    assert found["--api-key-file"] == f"${{CREDENTIALS_DIRECTORY}}/{credential}"
    # A signal to the core as well would end requests that were to finish.
    assert unit["KillMode"] == "mixed"


def test_variables_of_both_are_documented(dockerfile: str, unit: dict[str, str], root: Path) -> None:
    known = (root / "docs" / "env_vars.md").read_text()
    words = f"{dockerfile} {unit['Environment']}"
    assert all(f"`{name}`" in known for name in re.findall(r"\b((?:HOLDFAST|HF)_[A-Z_]+)\b", words))


def test_commands_of_the_page_exist(root: Path) -> None:
    text = (root / "docs" / "serving.md").read_text()
    lines = [line for line in docs_rules.commands(text) if line.startswith("holdfast ")]
    assert len(lines) > 4
    for line in lines:
        words = shlex.split(line)[1:]
        path = tuple(words[:2]) if words[0] == "bench" else tuple(words[:1])
        assert {word for word in words if word.startswith("--")} <= known_flags(*path), line
    named = set(re.findall(r"`(--[a-z-]+)`", text)) - {"--help"}
    assert named <= known_flags("serve") | known_flags("bench", "serve")


def test_limits_of_the_page_are_those_of_the_server(root: Path) -> None:
    text, limits = (root / "docs" / "serving.md").read_text(), ServerLimits()
    assert f"{limits.max_body_bytes >> 20} MiB, depth {limits.max_json_depth}, {limits.body_seconds:.0f} s" in text
    assert f"{limits.max_header_bytes >> 10} KiB, {limits.header_seconds:.0f} s" in text
    assert f"does not read | {limits.write_seconds:.0f} s" in text
    assert f"after {limits.silence_seconds:.0f} s without" in text
    assert f"longer than {limits.step_seconds:.0f} s" in text


def test_paths_of_the_page_exist(root: Path) -> None:
    from holdfast.server.app import endpoint_routers

    text = (root / "docs" / "serving.md").read_text()
    table = text.partition("| path | what |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    named = {path for cell in cells for path in re.findall(r"`(/[a-z0-9/]*)`", cell)}
    served = {getattr(route, "path", "") for router in endpoint_routers() for route in router.routes}
    assert len(named) > 10
    assert named <= served, named - served
