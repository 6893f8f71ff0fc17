"""Numbers that clients read: usage whole and streamed, cached tokens, the log, metrics and the memory map."""

import dataclasses
import io
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from for_each import for_each
from holdfast.api.async_llm import AsyncLLM
from holdfast.engine.engine import EngineStats
from holdfast.engine.engine_thread import Health
from holdfast.engine.memory_map import GroupPages, MemoryMap, RequestPages
from holdfast.errors import QueueFullError
from holdfast.request.outputs import CompletionDelta, RequestMetrics
from holdfast.server import metrics as metrics_module
from holdfast.server.app import make_app
from holdfast.server.errors import MAX_MESSAGE_CHARS, cleaned, from_exception
from holdfast.server.logs import RequestLog, RequestRecord
from holdfast.server.metrics import Histogram
from holdfast.server.ollama_answers import times_of
from holdfast.server.service import Service
from holdfast.server.status import map_facts
from server.families import ALL, Chat, Completions, Family, Ollama, ask, events
from server.served import NAMES, make_served_engine, said
from server.test_server_status import samples

PAGE_TOKENS = 16
family_cases = for_each("family", ALL)
ways = for_each("stream", [False, True])


class Logged:
    """A client whose server logs."""

    def __init__(self, client: httpx.Client, stream: io.StringIO, service: Service) -> None:
        self.client = client
        self.service = service
        self._stream = stream

    def lines(self) -> list[dict[str, Any]]:
        """Those since the last time."""
        text = self._stream.getvalue()
        self._stream.seek(0)
        self._stream.truncate()
        return [json.loads(line) for line in text.splitlines()]

    def samples(self) -> dict[str, float]:
        return samples(self.client.get("/metrics").text)


@pytest.fixture(scope="module")
def logged() -> Iterator[Logged]:
    service = Service(AsyncLLM.from_engine(make_served_engine()), NAMES)
    stream = io.StringIO()
    app = make_app(service, log=RequestLog("json", stream=stream, wants_text=True))
    try:
        with TestClient(app, base_url="http://localhost") as client:
            yield Logged(client, stream, service)
    finally:
        service.llm.shutdown()


def cached(num_prompt_tokens: int) -> int:
    """Whole pages of a prompt, whose last token is always computed."""
    return (num_prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


@family_cases
@ways
def test_usage_of_a_prompt_that_was_cached_says_so(logged, family: Family, stream):
    """In the answer and in the log; the second time and the third."""
    text = f"{stream!s:.1}{type(family).__name__}: a question of more than one page"
    logged.lines()
    for place in range(3):
        reported = ask(logged.client, family, family.body([("user", f"{text}{said('é.')}")]), stream=stream)
        num_prompt, num_cached, num_output = reported.usage
        [line] = logged.lines()
        assert (line["prompt_tokens"], line["output_tokens"]) == (num_prompt, num_output)
        assert (line["cached_tokens"], num_output) == (cached(num_prompt) if place else 0, 4)
        assert isinstance(family, Ollama) or num_cached == line["cached_tokens"]
        assert (line["finish_reason"], "cut" in line, "error" in line) == ("stop", False, False)
        assert said("é.") in line["prompt"]
        assert line.get("answer", "é.") == "é."
        assert 0 < line["first_token_seconds"] <= line["seconds"]


@for_each("family", [Chat(), Completions()])
@ways
def test_usage_of_several_choices_counts_the_prompt_once(logged, family: Chat, stream):
    body = {**family.body([("user", f"{stream} several answers to one question {said('abc')}")]), "n": 3}
    for place in range(2):
        num_prompt, num_cached, num_output = ask(logged.client, family, body, stream=stream).usage
        assert num_cached == (cached(num_prompt) if place else 0)
        assert num_output == 3 * len("abc\n")


@ways
def test_usage_of_several_prompts_is_their_sum(logged, stream):
    prompts = [f"{stream} {place} one of several prompts {said('x' * place)}" for place in (1, 2, 3)]
    for place in range(2):
        usage = ask(logged.client, Completions(), {"prompt": prompts, "n": 2}, stream=stream).usage
        sums = sum(map(len, prompts)), sum(cached(len(prompt)) for prompt in prompts) if place else 0
        assert usage == (*sums, 2 * (2 + 3 + 4))


@for_each("family", [Chat(), Completions()])
def test_stream_usage_follows_its_options(logged, family: Chat):
    body = {**family.body([("user", said("abcdef"))]), "n": 2, "stream": True}

    def usages(**options: bool) -> list[Any]:
        answer = logged.client.post(family.path, json={**body, "stream_options": options} if options else body)
        return [chunk.get("usage", "none") for chunk in events(answer.text)]

    assert set(usages()) == set(usages(include_usage=False)) == {"none"}
    once = usages(include_usage=True)
    assert once[:-1] == [None] * (len(once) - 1)
    assert once[-1]["completion_tokens"] == 14
    continuous = usages(include_usage=True, continuous_usage_stats=True)
    counts = [usage["completion_tokens"] for usage in continuous]
    assert counts == sorted(counts)
    assert (counts[0] > 0, counts[-1]) == (True, 14)
    for usage in continuous:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] == continuous[-1]["prompt_tokens"]


@ways
def test_usage_of_a_scored_prompt_has_no_answer(logged, stream):
    body = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    reported = ask(logged.client, Completions(), body, stream=stream)
    assert (reported.usage, reported.only.content, reported.only.reason) == ((3, 0, 0), "abc", "length")
    answer = logged.client.post(Completions.path, json={**body, "stream": stream})
    [choice] = (events(answer.text) if stream else [answer.json()])[0]["choices"]
    assert (choice["logprobs"]["tokens"], choice["token_ids"]) == (["a", "b", "c"], [])
    assert "stop_reason" not in choice


def test_usage_counts_the_thoughts_of_every_choice(logged):
    body = {**Chat().body([("user", said("<think>Well</think>Yes"))]), "n": 2}
    whole = logged.client.post(Chat.path, json=body).json()["usage"]
    given = {**body, "stream": True, "stream_options": {"include_usage": True}}
    streamed = events(logged.client.post(Chat.path, json=given).text)[-1]["usage"]
    for usage in (whole, streamed):
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * len("Well")


@for_each("num_texts", [1, 3])
def test_usage_of_embeddings_is_that_of_every_text(logged, num_texts):
    texts = ["one", "three", "seven"][:num_texts]
    total = sum(map(len, texts))
    made = logged.client.post("/v1/embeddings", json={"input": texts}).json()
    assert made["usage"] == {"prompt_tokens": total, "total_tokens": total}
    made = logged.client.post("/api/embed", json={"input": texts}).json()
    assert made["prompt_eval_count"] == total
    made = logged.client.post("/v1/score", json={"text_1": "query", "text_2": texts}).json()
    assert made["usage"]["prompt_tokens"] == total + len("query")


def test_metrics_of_answers_count_each_choice(logged):
    before = logged.samples()
    ask(logged.client, Completions(), {"prompt": [said("ab"), said("cde")], "n": 2}, stream=True)
    chat = ask(logged.client, Chat(), Chat().body([("user", "x")], max_tokens=1), stream=False)
    assert logged.client.post(Chat.path, json={}).status_code == 400
    assert logged.client.get("/nothing").status_code == 404
    after = logged.samples()

    def added(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert added("vllm:request_success_total finished_reason=stop") == 4
    assert added("vllm:request_success_total finished_reason=length") == 1
    assert added("vllm:request_success_total finished_reason=abort") == 0
    assert added("vllm:request_success_total finished_reason=error") == 0
    assert added("vllm:generation_tokens_total") == 2 * (3 + 4) + 1
    assert added("vllm:request_generation_tokens_sum") == 2 * (3 + 4) + 1
    num_prompt = 4 + 5 + chat.usage[0]
    assert added("vllm:prompt_tokens_total") == added("vllm:request_prompt_tokens_sum") == num_prompt
    assert added("vllm:request_prompt_tokens_count") == 3
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert added(f"vllm:{name}_seconds_count") == 5, name
    assert added("vllm:request_time_per_output_token_seconds_count") == 4
    assert added("vllm:inter_token_latency_seconds_count") <= 2 * (2 + 3)  # tokens that come first together have none
    assert added("holdfast:http_responses_total status=2xx") == 3  # with the first look at the metrics
    assert added("holdfast:http_responses_total status=4xx") == 2
    assert added("holdfast:http_requests_total endpoint=/v1/completions") == 1
    assert added("holdfast:http_requests_total endpoint=unknown") == 1
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "holdfast:requests_open"):
        assert after[name] == 0


STATS = EngineStats(*range(101, 101 + len(dataclasses.fields(EngineStats))))
STAT_NAMES = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "num_preemptions",
    "vllm:prefix_cache_queries_total": "num_prefix_query_tokens",
    "vllm:prefix_cache_hits_total": "num_prefix_hit_tokens",
    "vllm:generation_tokens_total": "num_output_tokens",
    "holdfast:snapshot_hits_total": "num_snapshot_hits",
    "holdfast:steps_total": "num_steps",
    "holdfast:proposed_tokens_total": "num_proposed_tokens",
    "holdfast:accepted_tokens_total": "num_accepted_tokens",
}
TOTALS = {
    "running": "num_running",
    "waiting": "num_waiting",
    "prompt_tokens": "num_prompt_tokens",
    "output_tokens": "num_output_tokens",
    "preemptions": "num_preemptions",
    "requests": "num_requests",
    "prefix_query_tokens": "num_prefix_query_tokens",
    "prefix_hit_tokens": "num_prefix_hit_tokens",
    "steps": "num_steps",
}


def test_metrics_tell_each_number_under_its_own_name(logged, monkeypatch):
    llm = logged.service.llm
    monkeypatch.setattr(llm, "stats", lambda: STATS)
    monkeypatch.setattr(llm, "health", lambda: Health(True, 1, 2.0, 3, 4.0, 5.0))
    monkeypatch.setattr(llm, "step_sizes", lambda: ([1, 2, 4, 8], 77))
    found = logged.samples()
    assert {name: found[name] for name in STAT_NAMES} == {name: getattr(STATS, own) for name, own in STAT_NAMES.items()}
    assert (found["holdfast:core_silence_seconds"], found["holdfast:step_seconds"]) == (4.0, 5.0)
    sizes = {bound: found[f"vllm:iteration_tokens_total_bucket le={bound}"] for bound in ("1", "2", "4", "+Inf")}
    assert sizes == {"1": 1, "2": 3, "4": 7, "+Inf": 15}
    assert found["vllm:iteration_tokens_total_sum"] == 77
    totals = logged.client.get("/memory").json()["totals"]
    assert totals == {name: getattr(STATS, own) for name, own in TOTALS.items()}


def pages(number: int, phase: str, num_preemptions: int) -> RequestPages:
    counts = range(number * 100, number * 100 + 4)
    return RequestPages(phase, *counts, num_preemptions, 7 + number, (number,), 1.5, f"r{number}", number, 2.25)  # type: ignore[arg-type]


def test_memory_map_tells_of_every_request_and_group(logged, monkeypatch):
    """The second as the first; those that wait in the core and were not listed count as left out."""
    requests = (pages(1, "decode", 0), pages(2, "waiting", 3), pages(3, "waiting", 0))
    groups = (GroupPages("whole", 16, 5, 6), GroupPages("window", 8, 7, 9))
    seen = MemoryMap(100, 73, groups, 6, 42, 5, 3, requests, 0.0)
    facts: Any = map_facts(logged.service, seen)
    reported = ("name", "page_tokens", "in_use", "cached")
    assert [tuple(group[name] for name in reported) for group in facts["kv"]["groups"]] == [
        ("whole", 16, 5, 6),
        ("window", 8, 7, 9),
    ]
    kv = facts["kv"]
    assert (kv["num_pages"], kv["free"], kv["in_use"], kv["cached"]) == (100, 73, 12, 15)
    assert (kv["snapshots"], kv["snapshots_held"]) == (5, 3)
    assert [one["state"] for one in facts["requests"]] == ["decode", "preempted", "waiting"]
    assert facts["requests"][1] | {"state": ""} == {
        "id": "r2",
        "index": 2,
        "state": "",
        "prompt_tokens": 200,
        "output_tokens": 201,
        "computed_tokens": 202,
        "cached_tokens": 203,
        "preemptions": 3,
        "priority": 9,
        "pages": [2],
        "age_seconds": 1.5,
        "tokens_per_second": 2.25,
    }
    assert facts["requests_left_out"] == 6 - 2
    found = metrics_module.Metrics("fake", logged.service.llm, logged.service.responses)
    rows = samples(found.text(seen).decode())
    places = {name: value for name, value in rows.items() if name.startswith("holdfast:state_snapshots")}
    assert places == {"holdfast:state_snapshots state=held": 3, "holdfast:state_snapshots state=free": 2}
    kept = {name: value for name, value in rows.items() if name.startswith("holdfast:kv_pages")}
    assert kept == {
        "holdfast:kv_pages group= state=free": 73,
        "holdfast:kv_pages group=whole state=in_use": 5,
        "holdfast:kv_pages group=whole state=cached": 6,
        "holdfast:kv_pages group=window state=in_use": 7,
        "holdfast:kv_pages group=window state=cached": 9,
    }


def test_histogram_counts_a_value_at_its_bound():
    histogram = Histogram((1.0, 2.0, 4.0))
    for value, times in ((1.0, 1), (1.5, 2), (4.0, 1), (4.5, 3)):
        histogram.observe(value, times)
    assert (histogram.counts, histogram.total) == ([1, 2, 1, 3], 1.0 + 3.0 + 4.0 + 13.5)


def test_metrics_split_a_delta_into_wait_prefill_and_decode(logged, monkeypatch):
    """Waiting, reading and writing; between tokens that come together the time is shared."""
    now = [0.0]
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    metrics = metrics_module.Metrics("fake", logged.service.llm, logged.service.responses)

    def delta(index: int, num_tokens: int, times: RequestMetrics | None = None) -> CompletionDelta:
        reason = None if times is None else "stop"
        return CompletionDelta("r", index, "", tuple(range(num_tokens)), None, reason, None, metrics=times)

    with metrics.request(2) as watch:
        assert metrics.num_open == 1
        for seconds, index, num_tokens in ((2.0, 0, 1), (3.0, 1, 2), (6.0, 0, 4)):
            now[0] = seconds
            watch.take(delta(index, num_tokens))
        watch.take(delta(0, 0, RequestMetrics(1.0, 3.0, 8.0, 0, 0)))
        assert metrics.num_open == 1
        now[0] = 10.0
        watch.take(delta(1, 1, RequestMetrics(1.0, 3.0, 8.0, 0, 0)))
        assert metrics.num_open == 0
    assert metrics.histograms["first_token_seconds"].total == 2.0 + 3.0
    assert metrics.histograms["inter_token_seconds"].total == 4.0 + 7.0
    assert sum(metrics.histograms["inter_token_seconds"].counts) == 4 + 1
    assert metrics.histograms["output_token_seconds"].total == 4.0 / 4 + 7.0 / 2
    assert metrics.histograms["total_seconds"].total == 6.0 + 10.0
    sums = (
        metrics.histograms["queue_seconds"].total,
        metrics.histograms["prefill_seconds"].total,
        metrics.histograms["decode_seconds"].total,
    )
    assert sums == (2.0, 4.0, 10.0)
    assert metrics.histograms["generation_tokens"].total == 5 + 3


def test_log_cuts_long_texts_and_paths():
    record = RequestRecord("id", "GET", "/" + "p" * 300, None, wants_text=True, prompt="x" * 5000, answer="y" * 5000)
    values = record.values(1.0)
    assert [len(str(values[name])) for name in ("path", "prompt", "answer")] == [200, 4096, 4096]
    quiet = RequestRecord("id", "GET", "/", None, prompt="x", answer="y").values(1.0)
    assert not {"prompt", "answer", "client", "cut"} & set(quiet)


@for_each("seconds, reported", [(None, "1"), (0.2, "1"), (1.0, "1"), (1.2, "2"), (float("inf"), "1")])
def test_queue_full_error_sends_retry_after(seconds, reported):
    error = QueueFullError("request.queue_full", count=1, waiting=1, maximum=1)
    if seconds is not None:
        error.retry_after_seconds = seconds
    assert from_exception(error).headers["Retry-After"] == reported


def test_message_of_an_error_is_cut_to_its_bound():
    assert cleaned("x" * MAX_MESSAGE_CHARS) == "x" * MAX_MESSAGE_CHARS
    cut = cleaned("x" * (MAX_MESSAGE_CHARS + 1))
    assert (len(cut), cut[-4:]) == (MAX_MESSAGE_CHARS, "x...")


def test_ollama_times_split_prefill_from_decode():
    delta = CompletionDelta("r", 0, "", (1,), None, "length", None, metrics=RequestMetrics(1.0, 3.0, 8.0, 0, 0))
    reported = times_of(delta, SimpleNamespace(prompt_token_ids=[1, 2, 3]), 5, 9.0)  # type: ignore[arg-type]
    assert reported == {
        "done": True,
        "done_reason": "length",
        "total_duration": 9 * 10**9,
        "load_duration": 0,
        "prompt_eval_count": 3,
        "prompt_eval_duration": 2 * 10**9,
        "eval_count": 5,
        "eval_duration": 5 * 10**9,
    }
