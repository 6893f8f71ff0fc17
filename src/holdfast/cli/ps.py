"""`holdfast ps`: list servers on this machine's ports with model, memory and sequences (/memory); no torch."""

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.cli.bench_client import Url, ask
from holdfast.cli.layout import Table, table_lines
from holdfast.cli.options import Given, read_counts
from holdfast.cli.tables import show
from holdfast.cli.terminal import FAILED, for_terminal, write_line
from holdfast.errors import ConfigError
from holdfast.memory.sizes import format_bytes

KEY_VARIABLE = "HOLDFAST_API_KEY"
TIMEOUT_SECONDS = 5.0
HEADING = ("port", "model", "memory", "KV pages in use", "sequences", "state")


class PsOptions(NamedTuple):
    """Options of this command."""

    port: str


def ps(options: PsOptions, engine: Given) -> int:
    """Print a row for each server and a line for each port without one; return the exit code."""
    numbers = read_counts(options.port, "--port")
    if max(numbers) > 65535:
        raise ConfigError("value.out_of_range", name="--port", minimum=1, maximum=65535, value=options.port)
    key = os.environ.get(KEY_VARIABLE) or None
    urls = [Url("127.0.0.1", port, "", is_secure=False, api_key=key) for port in dict.fromkeys(numbers)]
    found = asyncio.run(_ask_all(urls))
    rows = [_row(port, facts) for port, facts in found.items() if isinstance(facts, Mapping)]
    if rows:
        show(table_lines(Table((HEADING, *rows), right=(0, 2, 3, 4))))
    for port, problem in found.items():
        if isinstance(problem, str):
            write_line(f"port {port}: {problem}")
    return 0 if rows else FAILED


async def _ask_all(urls: list[Url]) -> dict[int, Mapping[str, Any] | str]:
    replies = await asyncio.gather(*(ask(url, "/memory", None, TIMEOUT_SECONDS) for url in urls))
    return {
        url.port: _facts(reply.error, reply.message, body) for url, (reply, body) in zip(urls, replies, strict=True)
    }


def _facts(error: str | None, message: str, body: bytes) -> Mapping[str, Any] | str:
    """Return a server's facts, or why there are none."""
    if error is not None and error.startswith("no connection"):
        return "no server answers; start one with holdfast serve [MODEL]"
    if error in ("HTTP 401", "HTTP 403"):
        return f"the server needs a key; set {KEY_VARIABLE}"
    try:
        facts = json.loads(body)
        if error is None and isinstance(facts["totals"], dict) and isinstance(facts["memory"], dict):
            return facts
    except (ValueError, KeyError, TypeError):
        pass
    return f"not a Holdfast server, or not ready ({error or 'another answer'}{': ' if message else ''}{for_terminal(message)})"


def _row(port: int, facts: Mapping[str, Any]) -> tuple[str, ...]:
    totals, memory, pages = facts["totals"], facts["memory"], facts.get("kv") or {}
    held = memory.get("held_bytes") or memory.get("planned_bytes") or 0
    return (
        str(port),
        for_terminal(str(facts.get("model"))),
        format_bytes(held),
        f"{pages.get('in_use', 0):,} of {pages.get('num_pages', 0):,}",
        f"{totals.get('running', 0)} running, {totals.get('waiting', 0)} waiting",
        for_terminal(str(facts.get("trouble") or facts.get("state"))),
    )
