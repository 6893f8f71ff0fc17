"""What a server tells of itself: health follows the core, the memory map follows requests, metrics have names that dashboards know."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.fakes import Gate, make_engine, shared_template, shared_tokenizer
from holdfast import AsyncLLM, SamplingParams
from holdfast.config import EngineConfig
from holdfast.engine.core_process import CoreProcess
from holdfast.engine.engine import Engine
from holdfast.errors import QueueFullError
from holdfast.memory.report import MemoryReport, MemoryRow
from holdfast.server.app import make_app
from holdfast.server.service import ServerLimits, Service
from server.served import MODEL, served

TESTS = Path(__file__).parent.parent
FAKE = (sys.executable, "-P", "-m", "engine.fake_core")
REPORT = MemoryReport(
    (
        MemoryRow("kv pages", 9600, 9600, "because"),
        MemoryRow("weights", 500, 490, "because", peak_bytes=495),
        MemoryRow("load buffers", 70, None, "because", ("load",)),
    ),
    20000,
    "a limit",
    25,
    384,
    128,
    measured_bytes=10100,
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=100)


def serve(work, *, engine: Engine | None = None, limits: ServerLimits | None = None, **options):
    """Run a test with a client of a server over an engine of fakes."""
    own = engine or make_engine(memory=REPORT, clock=time.monotonic, **options)

    async def main():
        async with AsyncLLM.from_engine(own) as llm:
            service = Service(llm, ("fake", "other"), limits or ServerLimits())
            transport = httpx.ASGITransport(make_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await asyncio.wait_for(work(client, service, own), 30)

    return asyncio.run(main())


@contextmanager
def remote_engine(monkeypatch: pytest.MonkeyPatch, name: str = "", **options) -> Iterator[Engine]:
    """An engine whose core is a process of fakes."""
    others = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), others))))
    core = CoreProcess(EngineConfig(model=name, core_process=True, **options), lambda done, total: None, command=FAKE)
    core.memory = REPORT
    try:
        yield Engine(core, shared_tokenizer(), shared_template(), 0)
    finally:
        core.close()


async def status_of(client: httpx.AsyncClient, path: str) -> int:
    return (await client.get(path)).status_code


async def until(condition, seconds: float = 10.0) -> float:
    """Wait for something; how long it took."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if await condition():
            return time.monotonic() - began
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen")


def samples(text: str) -> dict[str, float]:
    """Every sample of an answer, by its name and labels but the model's."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[sample.name + "".join(f" {key}={value}" for key, value in sorted(labels.items()))] = sample.value
    return found


def test_health_and_ready_follow_the_server_state():
    async def work(client, service, engine):
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).json() == {"status": "ready"}
        assert (await client.get("/version")).json()["version"]
        service.state = "draining"
        assert await status_of(client, "/health") == 200
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        service.state = "dead"
        assert await status_of(client, "/health") == 503

    serve(work)


def test_memory_follows_requests():
    async def work(client, service, engine):
        gate = Gate(engine)
        idle = (await client.get("/memory")).json()
        assert idle["kv"]["num_pages"] == idle["kv"]["free"] == 96
        assert (idle["kv"]["page_bytes"], idle["requests"]) == (100, [])
        assert idle["memory"]["rows"][1] == {
            "owner": "weights",
            "planned_bytes": 500,
            "held_bytes": 490,
            "reason": "because",
            "phases": ["load", "capture", "serve"],
            "peak_bytes": 495,
        }
        assert idle["memory"]["unaccounted_bytes"] == 10
        stream = service.llm.stream("abcdefgh", LONG, "mine")
        reading = asyncio.ensure_future(anext(stream))
        await until(lambda: _started(gate))
        gate.open(3)
        await reading
        # Between two steps alone can anybody look, so the next one is let go.
        gate.open(2)
        await asyncio.sleep(0.25)
        asking = asyncio.ensure_future(client.get("/memory"))
        await asyncio.sleep(0.05)
        gate.open(2)
        seen = (await asking).json()
        (one,) = seen["requests"]
        assert (one["id"], one["index"], one["state"], one["prompt_tokens"]) == ("mine", 0, "decode", 8)
        assert one["output_tokens"] >= 3
        assert one["pages"] == [-(-one["computed_tokens"] // 4)] or one["pages"] == [
            -(-one["computed_tokens"] // 4) + 1
        ]
        assert seen["kv"]["in_use"] == one["pages"][0]
        assert seen["kv"]["free"] + seen["kv"]["in_use"] + seen["kv"]["cached"] == 96
        assert one["tokens_per_second"] > 0
        gate.open()
        await stream.aclose()
        await until(lambda: _free(client))

    serve(work)


async def _started(gate: Gate) -> bool:
    return gate.started.acquire(blocking=False)


async def _free(client: httpx.AsyncClient) -> bool:
    kv = (await client.get("/memory")).json()["kv"]
    return kv["in_use"] == 0 and kv["free"] + kv["cached"] == kv["num_pages"]


def test_memory_stream_sends_changes_and_ends_with_the_server():
    async def work(client, service, engine):
        events = []
        async with client.stream("GET", "/memory/stream") as answer:
            # The transport of these tests gives an answer when it has ended.
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
        assert events[0]["model"] == "fake"
        assert "memory" in events[0]
        assert all("memory" not in event and event["kv"]["num_pages"] == 96 for event in events[1:])
        assert len(events) <= 7, "at most five a second"
        assert events[-1]["state"] == "draining"
        assert service.num_listeners == 0

    async def both(client, service, engine):
        async def end() -> None:
            await asyncio.sleep(1.2)
            service.state = "draining"

        ending = asyncio.ensure_future(end())
        await work(client, service, engine)
        await ending

    serve(both)


def test_memory_stream_listeners_are_bounded():
    async def work(client, service, engine):
        answer = await client.get("/memory/stream")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_listeners")

    serve(work, limits=ServerLimits(max_listeners=0))


def test_metrics_have_the_names_that_dashboards_know():
    async def work(client, service, engine):
        with service.metrics.request() as watch:
            watch.prompt(8)
            async for delta in service.llm.stream("abcdefgh", PARAMS):
                watch.take(delta)
        with service.metrics.request(2):
            pass
        found = samples((await client.get("/metrics")).text)
        assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
        assert found["vllm:kv_cache_usage_perc"] == 0
        assert (found["vllm:prompt_tokens_total"], found["vllm:generation_tokens_total"]) == (8, 8)
        assert found["vllm:request_success_total finished_reason=length"] == 1
        assert found["vllm:request_success_total finished_reason=abort"] == 2
        assert found["vllm:num_preemptions_total"] == 0
        assert found["vllm:prefix_cache_queries_total"] == 8
        for name, count in {
            "time_to_first_token_seconds": 1,
            "request_time_per_output_token_seconds": 1,
            "e2e_request_latency_seconds": 3,
            "request_queue_time_seconds": 1,
            "request_prefill_time_seconds": 1,
            "request_decode_time_seconds": 1,
            "request_prompt_tokens": 1,
            "request_generation_tokens": 3,
            "iteration_tokens_total": 8,
        }.items():
            assert found[f"vllm:{name}_count"] == found[f"vllm:{name}_bucket le=+Inf"] == count, name
        assert found["vllm:iteration_tokens_total_sum"] == 16
        assert found["vllm:request_prompt_tokens_bucket le=10"] == 1
        assert found["vllm:request_prompt_tokens_bucket le=5"] == 0
        assert found["holdfast:memory_bytes kind=held owner=weights"] == 490
        assert found["holdfast:memory_plan_error_bytes owner=weights"] == -10
        assert found["holdfast:memory_unaccounted_bytes"] == 10
        assert found["holdfast:kv_bytes_per_token"] == 25
        assert (
            found["holdfast:kv_pages group= state=free"] + found["holdfast:kv_pages group=whole context state=cached"]
        )
        assert found["holdfast:requests_open"] == 0
        assert found["holdfast:process_resident_bytes process=server"] > 2**20

    serve(work)


def test_metrics_inter_token_times_are_kept_per_completion():
    async def work(client, service, engine):
        with service.metrics.request(2) as watch:
            watch.token(1, index=0)
            watch.token(1, index=1)
            time.sleep(0.02)
            watch.token(4, index=0)
            watch.finish("stop", 0)
            watch.finish("stop", 0)
            assert not watch.is_finished
            watch.finish("length", 1)
        metrics = service.metrics
        assert watch.is_finished
        assert sum(metrics.histograms["first_token_seconds"].counts) == 2
        assert sum(metrics.histograms["inter_token_seconds"].counts) == 4
        assert 0.02 <= metrics.histograms["inter_token_seconds"].total < 2.0
        assert sum(metrics.histograms["output_token_seconds"].counts) == 1
        assert (metrics.histograms["generation_tokens"].total, metrics.num_open) == (6, 0)
        assert metrics.finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}

    serve(work)


def test_stream_full_queue_is_refused_before_tokenizing():
    async def work(client, service, engine):
        gate = Gate(engine)
        given = [asyncio.ensure_future(anext(service.llm.stream("abc", PARAMS)))]
        await until(lambda: _started(gate))
        given += [asyncio.ensure_future(anext(service.llm.stream("abc", PARAMS))) for _ in range(2)]
        await until(lambda: _full(service))
        prepared = []
        engine.prepare = lambda *values: prepared.append(values)
        with pytest.raises(QueueFullError) as caught:
            await anext(service.llm.stream("abc", PARAMS))
        assert not prepared
        assert caught.value.retry_after_seconds >= 1.0
        gate.open()
        await asyncio.gather(*given, return_exceptions=True)

    serve(work, max_queue=2, max_num_seqs=1)


async def _full(service: Service) -> bool:
    try:
        service.llm.check_room(1)
    except QueueFullError:
        return True
    return False


def test_health_fails_for_a_hung_step_not_a_long_one():
    async def work(client, service, engine):
        gate = Gate(engine)
        given = asyncio.ensure_future(anext(service.llm.stream("abc", PARAMS)))
        await until(lambda: _started(gate))
        await asyncio.sleep(0.3)
        assert await status_of(client, "/health") == 200
        await until(lambda: _is(client, "/health", 503), 3.0)
        words = (await client.get("/health")).json()["error"]["message"]
        assert "the current step has run for" in words
        gate.open()
        await given
        await until(lambda: _is(client, "/health", 200))

    serve(work, limits=ServerLimits(step_seconds=1.0))


async def _is(client: httpx.AsyncClient, path: str, status: int) -> bool:
    return await status_of(client, path) == status


@pytest.mark.slow  # test_server_process.py stops one of a whole server
def test_health_fails_for_a_stopped_core_and_recovers(monkeypatch):
    with remote_engine(monkeypatch, "slow") as engine:

        async def work(client, service, engine):
            pid = service.llm.core_pid
            deltas = service.llm.stream("abc", LONG)
            await anext(deltas)
            assert await status_of(client, "/health") == 200
            os.kill(pid, signal.SIGSTOP)
            took = await until(lambda: _is(client, "/health", 503))
            assert took <= 2.2
            assert "no heartbeat" in (await client.get("/ready")).json()["error"]["message"]
            os.kill(pid, signal.SIGCONT)
            assert await until(lambda: _is(client, "/health", 200)) < 2.0
            assert [delta async for delta in deltas][-1].finish_reason == "length"

        serve(work, engine=engine)


async def _is_dead(engine: Engine) -> bool:
    return engine.is_dead


def test_health_fails_for_a_killed_core_without_requests(monkeypatch):
    with remote_engine(monkeypatch) as engine:

        async def work(client, service, engine):
            assert (await client.get("/memory")).json()["kv"]["num_pages"] == 400
            os.kill(service.llm.core_pid, signal.SIGKILL)
            await until(lambda: _is_dead(engine), 2.0)
            assert await status_of(client, "/health") == 503
            assert await status_of(client, "/metrics") == 200
            assert (await client.get("/memory")).json()["trouble"] == "the engine has stopped"

        serve(work, engine=engine)


def test_completion_full_queue_is_answered_with_retry_after():
    with served(max_queue=1, max_num_seqs=1) as running:
        gate = Gate(running.engine)
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 4}

        async def main() -> None:
            async with httpx.AsyncClient(base_url=running.url, timeout=30) as client:
                given = [asyncio.ensure_future(client.post("/v1/completions", json=body))]
                await until(lambda: _started(gate))
                given.append(asyncio.ensure_future(client.post("/v1/completions", json=body)))
                await until(lambda: _full(running.service))
                for stream in (False, True):
                    refused = await client.post("/v1/completions", json={**body, "stream": stream})
                    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
                    assert 1 <= int(refused.headers["retry-after"]) <= 60
                gate.open()
                assert [answer.status_code for answer in await asyncio.gather(*given)] == [200, 200]
                found = samples((await client.get("/metrics")).text)
                assert found["holdfast:http_responses_total status=4xx"] == 2
                assert found["holdfast:http_requests_total endpoint=/v1/completions"] == 4
                assert found["vllm:request_success_total finished_reason=length"] == 2
                assert found["vllm:request_success_total finished_reason=error"] == 0

        asyncio.run(main())
