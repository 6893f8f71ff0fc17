"""A `holdfast serve` process under load: clients that stay and clients that go, and what the server holds afterwards."""

import asyncio
import itertools
import json
import math
import random
import re
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cli.cli_models import make_model, start
from holdfast.cli.bench_client import Reply, Url, ask
from holdfast.cli.bench_load import CHAT, GREEDY, TO_THE_END, Fit, Sizes, Target, Work, drive, random_work

LEFT = "left"
"""The error of a client that went away."""
LEFT_TOKENS = 128
"""That such a client asks for."""
REST_SECONDS = 20.0
T_95 = 2.0
"""Student's t for 95 % and some forty values."""


class Loaded(NamedTuple):
    """A server in a process of its own, with its core in another."""

    url: Url
    target: Target

    def memory(self) -> dict[str, Any]:
        """What /memory says."""
        reply, body = asyncio.run(ask(self.url, "/memory", None, 30.0))
        assert reply.error is None, (reply.error, reply.message)
        return json.loads(body)

    def ledger(self) -> dict[str, Any]:
        """Who holds what, planned and held."""
        memory = self.memory()["memory"]
        return {row["owner"]: (row["planned_bytes"], row["held_bytes"]) for row in memory["rows"]}

    def resident_bytes(self) -> dict[str, int]:
        """Resident bytes of both processes."""
        return self.memory()["processes"]

    def at_rest(self) -> dict[str, Any]:
        """The map once nothing runs any more: no request, no page in use."""
        end = time.monotonic() + REST_SECONDS
        while True:
            seen = self.memory()
            kv = seen["kv"]
            if not seen["requests"] and kv["in_use"] == 0:
                assert kv["free"] + kv["cached"] == kv["num_pages"]
                return seen
            assert time.monotonic() < end, f"{len(seen['requests'])} requests and {kv['in_use']} pages are left"
            time.sleep(0.1)


@contextmanager
def loaded(folder: Path, *options: str) -> Iterator[Loaded]:
    """A tiny random model, served."""
    model = make_model(folder / "model")
    log = folder / "serve.log"
    words = ("serve", model, "--port", "0", "--device", "cpu", "--kv-cache-memory", "64MiB", "--max-queue", "4096")
    with log.open("wb") as out:
        process = start(*words, *options, stdout=out, stderr=out)
    try:
        url = Url.read(_address(process, log))
        yield Loaded(url, Target(url, "model", CHAT, 240.0, {**GREEDY, **TO_THE_END}))
        assert process.poll() is None, log.read_text()[-2000:]
    finally:
        process.terminate()
        process.wait(40)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + 90
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"is ready at (\S+) after", log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text()[-2000:]}")


def requests(number: int, num_output: tuple[int, int], seed: int) -> list[Work]:
    """Short ones; tokens of the tiny model are bytes, so words count five or so."""
    return random_work(CHAT, number, Sizes((10, 80), num_output), Fit(0, 5), random.Random(seed))


def run_load(server: Loaded, work: Sequence[Work], num_clients: int, abort_share: float = 0.0) -> list[Reply]:
    """All of it; a share of the clients go after a text or two."""
    choose = random.Random(len(work))

    async def send(item: Work, begin: float | None) -> Reply:
        if choose.random() >= abort_share:
            return await server.target.send(item, begin)
        # A short answer is often complete with its first bytes, so no client could leave in the middle.
        longer = replace(item, max_tokens=LEFT_TOKENS)
        return await server.target.send(longer, begin, abort_after=choose.randint(0, 2))

    return asyncio.run(drive(send, work, num_clients, None, lambda *counts: None))


class Slope(NamedTuple):
    """Mean growth from one look to the next, with the half of its interval of 95 %."""

    mean: float
    half: float

    @property
    def includes_zero(self) -> bool:
        return self.mean - self.half <= 0


def slope(values: Sequence[float]) -> Slope:
    """Growth of resident bytes between samples; its mean is compared with its own spread.

    A line through the values would be too sure of itself: memory that grew once stays, so looks are not independent.
    """
    steps = [later - sooner for sooner, later in itertools.pairwise(values)]
    return Slope(statistics.mean(steps), T_95 * statistics.stdev(steps) / math.sqrt(len(steps)))


def file_limit(num_clients: int) -> None:
    """Every client is an open file of this process."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard > num_clients + 64, f"{hard} open files at most: raise ulimit -n"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(num_clients + 256, hard)), hard))
