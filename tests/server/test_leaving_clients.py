"""Clients that close their connection at every token: pages free at most two steps after it was noticed, neighbours unchanged."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from engine.fakes import Gate, assert_at_rest
from engine.leaving import (
    CASES,
    MOST_STEPS,
    MOST_STEPS_LATER,
    SAMPLE,
    SIZES,
    Case,
    advance,
    neighbours_answer,
    num_held,
    started,
    until,
)
from server.served import MODEL, Served, served

NEIGHBOUR = {"model": MODEL, "prompt": "neighbour", "temperature": 0, "max_tokens": 100}


@contextmanager
def held_server(case: Case) -> Iterator[tuple[Served, Gate]]:
    """A server whose model runs one step at a time, when the test says so."""
    options = {**SIZES, "max_num_seqs": 1 if case.kind == "queued" else 8, "run_ahead": case.run_ahead}
    with served(**options) as running:
        yield running, Gate(running.engine)


async def post(running: Served, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = running.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


async def leave(case: Case, running: Served, gate: Gate) -> int:
    """Run a case; how many steps later the pages were free."""
    engine, health = running.engine, running.service.llm.health
    pool, first = engine.scheduler.pool, engine.front._num_sequences
    reader, writer = await post(running, NEIGHBOUR)
    await started(gate)
    # A prompt that begins in its own way, so that all of it is computed.
    prompt = f"{case} ".ljust(200, "p") if case.kind == "prefill" else "victim"
    body = {"model": MODEL, "prompt": prompt, "temperature": 0}
    body |= {"max_tokens": 8 if case.kind == "prefill" else 80, "n": 4 if case.kind == "four" else 1}
    _, victim = await post(running, {**body, "stream": case.streams})
    await until(lambda: health().num_commands >= 1, f"{case}: it did not come")
    await advance(gate, 1 + case.num_steps)
    victim.close()
    await until(lambda: health().num_commands >= 1, f"{case}: the engine got no command")
    num_later = 0
    while engine.scheduler.num_waiting or pool.num_owned_by_group[0] != num_held(engine, first):
        num_later += 1
        assert num_later <= MOST_STEPS_LATER, f"{case}: {pool.num_owned_by_group[0]} pages are held"
        await advance(gate, 1)
    gate.open()
    answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
    writer.close()
    assert answer["choices"][0]["text"] == neighbours_answer()[1], case
    await until(lambda: not engine.has_unfinished() and not health().num_commands)
    gate.close()
    return num_later


def leave_all(cases: list[Case]) -> list[int]:
    """Cases by the kind of server that they need."""
    found = []
    by_server: dict[tuple[bool, int], list[Case]] = {}
    for case in cases:
        by_server.setdefault((case.kind == "queued", case.run_ahead), []).append(case)
    with ExitStack() as stack:
        for own in by_server.values():
            running, gate = stack.enter_context(held_server(own[0]))

            async def run(own=own, running=running, gate=gate) -> list[int]:
                return [await asyncio.wait_for(leave(case, running, gate), 30) for case in own]

            found += asyncio.run(run())
            assert_at_rest(running.engine)
            metrics = running.service.metrics
            assert (metrics.finished["length"], metrics.finished["error"], metrics.num_open) == (len(own), 0, 0)
            gate.open()
    return found


def test_client_disconnects_at_sampled_tokens_free_pages_in_time() -> None:
    assert max(leave_all(SAMPLE)) <= MOST_STEPS_LATER


@pytest.mark.slow
@pytest.mark.parametrize("kind", MOST_STEPS)
def test_client_disconnects_at_each_token_free_pages_in_time(kind: str) -> None:
    assert max(leave_all([case for case in CASES if case.kind == kind])) <= MOST_STEPS_LATER
