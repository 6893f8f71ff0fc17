"""`holdfast bench serve`: answers read however they are cut, loads and figures, every kind of error, what is refused."""

import asyncio
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.cli_models import Ended, Here
from cli.fake_openai import KEY, FakeServer, fake_server
from error_codes import raises_code
from holdfast.cli.bench_client import AnswerReader, BadAnswerError, Exchange, Reply, Url, ask
from holdfast.cli.bench_load import (
    CHAT,
    Figures,
    Fit,
    Sizes,
    Spread,
    Target,
    Work,
    as_work,
    drive,
    percentile,
    random_work,
    settle,
)
from holdfast.cli.bench_serve import without_key
from holdfast.errors import ConfigError

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n5;x=y\r\nhello\r\n1\r\n \r\nA\r\n"
    b"0123456789\r\n0\r\n\r\n"
)


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


@pytest.fixture
def bench(fake: FakeServer, here: Here, monkeypatch: pytest.MonkeyPatch) -> "Bench":
    monkeypatch.delenv("HOLDFAST_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    fake.bodies.clear()
    return Bench(fake, here)


class Bench:
    """Runs the command against the fake."""

    def __init__(self, fake: FakeServer, here: Here) -> None:
        self.fake, self._here = fake, here

    def __call__(self, *words: object) -> Ended:
        return self._here("bench", "serve", "--url", self.fake.url, *words)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 1000])
def test_answer_reader_joins_any_chunking(size: int) -> None:
    reader = AnswerReader()
    pieces = [reader.feed(CHUNKED[begin : begin + size]) for begin in range(0, len(CHUNKED), size)]
    assert b"".join(pieces) == b"hello 0123456789"
    assert (reader.status, reader.is_complete) == (200, True)


@pytest.mark.parametrize("size", [1, 2, 5, 17, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    """Two texts, one of them after an empty one, usage and the end; the time of each is that of its last byte."""
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a\nb"}}]},
        {"choices": [{"delta": {"reasoning_content": "c"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
    ]
    body = (
        b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b": note\n\ndata: [DONE]\n\n"
    )
    sent = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body

    async def read() -> Reply:
        exchange = Exchange(b"", Reply(0.0), lambda: float(place))
        for place in range(0, len(sent), size):
            exchange.data_received(sent[place : place + size])
        await exchange.done
        return exchange.reply

    reply = asyncio.run(read())
    assert (reply.error, reply.finish_reason, reply.num_input_tokens, reply.num_output_tokens) == (None, "stop", 3, 2)
    assert len(reply.texts) == 2
    if size == 1:
        ends = [sent.index(mark) + len(mark) for mark in (b'"a\\nb"}}]}', b'"stop"}]}')]
        assert reply.texts == ends


def test_without_key_masks_api_key() -> None:
    words = ["bench", "serve", "--api-key", "one", "--api-key=two", "--model", "a b"]
    assert without_key(words) == ["bench", "serve", "--api-key", "***", "--api-key=***", "--model", "a b"]


def test_answer_reader_reads_with_or_without_length() -> None:
    sized, endless = AnswerReader(), AnswerReader()
    assert sized.feed(b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nabcd") == b"abc"
    assert (sized.status, sized.is_complete) == (404, True)
    assert endless.feed(b"HTTP/1.0 200 OK\r\n\r\nab") == b"ab"
    assert not endless.is_complete
    endless.end()
    assert endless.is_complete


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 70_000,
    ],
)
def test_answer_reader_refuses_malformed_response(data: bytes) -> None:
    with pytest.raises(BadAnswerError):
        AnswerReader().feed(data)


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200", CHUNKED[:-5], b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab"]
)
def test_answer_reader_reports_truncated_response(sent: bytes) -> None:
    reader = AnswerReader()
    reader.feed(sent)
    with pytest.raises(BadAnswerError, match="closed"):
        reader.end()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://a.b:81", "http://a.b:81"),
        ("http://a.b/v1/", "http://a.b:80"),
        ("https://a.b/x/v1", "https://a.b:443/x"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_url_read_gives_address_and_hides_key(text: str, address: str) -> None:
    url = Url.read(text, "k")
    assert url.address == address
    assert b"Authorization: Bearer k\r\n" in url.request("GET", "/v1/models")
    assert "k" not in repr(url).partition("is_secure")[2].replace("is_secure", "")


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1:8000", "ftp://x", "http://x:99999", "http://u:p@x", "http://x y", "http://x\r\n"]
)
def test_url_read_refuses_wrong_urls(text: str) -> None:
    if text == "http://x\r\n":  # a line break at the end is no caller's fault, and goes
        assert Url.read(text).address == "http://x:80"
        return
    with raises_code("bench.bad_url", ConfigError):
        Url.read(text)


def test_url_refuses_api_key_with_line_break() -> None:
    with raises_code("bench.bad_api_key", ConfigError):
        Url.read("http://x", "abc\r\nX: y")


def test_figures_follow_from_reply_times() -> None:
    first = Reply(10.0, 13.0, [11.0, 12.0, 13.0], 5, 5, "length")
    second = Reply(10.0, 14.0, [12.0, 14.0], 7, None, "stop")
    failed = Reply(10.0, 20.0, error="HTTP 429", message="full")
    figures = Figures.of([first, second, failed], 0.25)
    assert (figures.num_finished, figures.errors, figures.examples) == (2, {"HTTP 429": 1}, {"HTTP 429": "full"})
    assert figures.seconds == 10.0
    assert (figures.num_input_tokens, figures.num_output_tokens) == (12, 7)
    assert not figures.is_counted_by_server
    assert figures.ttft.percentiles[0] == 1.5
    assert figures.tpot.mean == pytest.approx((2 / 4 + 2 / 1) / 2)
    assert figures.itl == Spread.of([1.0, 1.0, 2.0])
    assert figures.per_second(figures.num_output_tokens) == 0.7
    assert figures.as_dict()["client_cpu_seconds"] == 0.25


def test_record_has_every_figure_of_requests_that_ended_well() -> None:
    """Different starts and ends, two errors of one kind and one of another; a request without text has no first token."""
    replies = [
        Reply(12.0, 14.0, [13.0, 13.5, 14.0], 10, 5, "stop"),
        Reply(10.0, 15.0, [11.0, 15.0], 20, 3, "length"),
        Reply(11.0, 12.5, [], 7, 0, "stop"),
        Reply(10.5, 18.0, [11.0], 9, 1, error="HTTP 429", message="first"),
        Reply(10.5, 11.0, error="HTTP 429", message="second"),
        Reply(10.5, 11.0, error="left", message="gone"),
    ]

    def spread(*values: float) -> dict[str, object]:
        ordered = sorted(values)
        places = {f"p{percent}": round(1e3 * percentile(ordered, percent), 3) for percent in (50, 90, 99)}
        return {"mean": round(1e3 * sum(values) / len(values), 3), **places, "num_values": len(values)}

    figures = Figures.of(replies, 1.5)
    assert figures.as_dict() == {
        "requests": 6,
        "finished": 3,
        "errors": {"HTTP 429": 2, "left": 1},
        "seconds": 8.0,
        "error_examples": {"HTTP 429": "first", "left": "gone"},
        "requests_per_second": 0.375,
        "input_tokens": 37,
        "output_tokens": 8,
        "tokens_counted_by": "server",
        "client_cpu_seconds": 1.5,
        "input_tokens_per_second": 4.625,
        "output_tokens_per_second": 1.0,
        "total_tokens_per_second": 5.625,
        "ttft_ms": spread(1.0, 1.0),
        "tpot_ms": spread(0.25, 2.0),
        "itl_ms": spread(0.5, 0.5, 4.0),
        "e2e_ms": spread(2.0, 5.0, 1.5),
    }


def test_arrivals_follow_from_seed() -> None:
    """Each counts from when it was due, in the order of the work, whatever becomes of the others."""
    starts: dict[str, float] = {}

    async def send(item: Work, start: float | None) -> Reply:
        assert start is not None
        starts[str(item.messages)] = start
        await asyncio.sleep(0.005)
        return Reply(start, start + 1, [], 2, 3)

    reported: list[tuple[int, int, int]] = []
    work = [Work(f"{place}", 1) for place in range(12)]
    asyncio.run(drive(send, work, None, 1000.0, lambda *counts: reported.append(counts), seed=5))
    choose, due = random.Random(5), 0.0
    for place in range(12):
        assert starts[str(place)] - starts["0"] == pytest.approx(due, abs=1e-6)
        due += choose.expovariate(1000.0)
    assert reported[-1] == (12, 24, 36)


def test_percentile_interpolates_and_is_nan_without_values() -> None:
    assert [percentile(range(101), percent) for percent in (0, 50, 99, 100)] == [0, 50, 99, 100]
    assert percentile([1.0, 2.0], 50) == 1.5
    assert math.isnan(percentile([], 50))


def test_prompts_have_the_servers_tokens(fake: FakeServer) -> None:
    target = Target(Url.read(fake.url), "good", CHAT, 10.0, {})
    settled, fit = asyncio.run(settle(target, wants_all=True))
    assert (fit, settled.extra) == (Fit(7.0, 2.0), {"ignore_eos": True})
    work = random_work(CHAT, 20, Sizes((27, 107), (3, 5)), fit, random.Random(0))
    replies = asyncio.run(drive(settled.send, work, 4, None, lambda *counts: None))
    assert all(27 <= (reply.num_input_tokens or 0) <= 107 for reply in replies)
    assert all(3 <= (reply.num_output_tokens or 0) <= 5 for reply in replies)


def test_clients_wait_but_arrivals_do_not() -> None:
    now, most = 0, 0

    async def send(item: object, start: float | None) -> Reply:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.02)
        now -= 1
        return Reply(start or 0.0, 1.0)

    work = [as_work(CHAT, "x", 1)] * 40
    replies = asyncio.run(drive(send, work, 3, None, lambda *counts: None))
    assert (len(replies), most) == (40, 3)
    now, most = 0, 0
    replies = asyncio.run(drive(send, work, None, 5000.0, lambda *counts: None))
    assert len(replies) == 40
    assert most > 3


def test_bench_serve_prints_table_and_writes_record(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    ended = bench("--clients", "3", "--requests", "9", "--output-len", "4", "--json", file, "--api-key", "secret")
    assert ended.code == 0, ended
    for words in ("good at", "3 clients", "time to first token (TTFT)", "p99", "output tokens", "36"):
        assert words in ended.out
    text = file.read_text()
    record = json.loads(text)
    result = record["results"][0]
    assert (result["finished"], result["output_tokens"], result["errors"]) == (9, 36, {})
    assert (record["clients"], record["rate"], record["model"]) == (3, None, "good")
    assert "secret" not in text
    assert len(bench.fake.bodies) == 9 + 2
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in bench.fake.bodies)


def test_bench_serve_holds_hundreds_of_streams(bench: Bench) -> None:
    ended = bench("--clients", "300", "--requests", "300", "--output-len", "3", "--json", "-")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["results"][0]["output_tokens"] == 900
    assert bench.fake.most_at_once > 100


def test_bench_serve_rate_sends_poisson_requests(bench: Bench) -> None:
    ended = bench("--rate", "500", "--requests", "20", "--endpoint", "completions", "--output-len", "2-3")
    assert (ended.code, "500 requests/s (Poisson)" in ended.out) == (0, True), ended
    assert all("prompt" in body for body in bench.fake.bodies)


def test_bench_serve_dataset_sets_prompts_and_lengths(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"messages": [{"role": "user", "content": "two"}], "max_tokens": 5}\n')
    ended = bench("--dataset", file, "--requests", "3", "--output-len", "2")
    assert ended.code == 0, ended
    requested = [(body["messages"][-1]["content"], body["max_tokens"]) for body in bench.fake.bodies[2:]]
    assert sorted(requested) == [("one", 2), ("one", 2), ("two", 5)]
    assert "ignore_eos" not in bench.fake.bodies[-1]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("uncounted", "by events: the server sends no usage"),
        ("plain", "has no ignore_eos"),
        ("doneless", "output tokens"),
    ],
)
def test_bench_serve_reports_what_server_leaves_out(bench: Bench, model: str, words: str) -> None:
    ended = bench("--model", model, "--requests", "4", "--output-len", "3")
    assert ended.code == 0, ended
    assert words in ended.out + ended.err


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("busy", "4 x HTTP 429: the queue is full"),
        ("failing", "4 x an error in the stream: it broke"),
        ("cut", "4 x closed before the end"),
    ],
)
def test_errors_are_counted_by_kind(bench: Bench, model: str, kind: str) -> None:
    ended = bench("--model", model, "--requests", "4", "--output-len", "6")
    assert ended.code == 1
    assert "4 of 4 requests failed" in ended.out
    assert kind in ended.out


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--model", "keyed"), "HTTP 401: wrong key. Pass --api-key, or set HOLDFAST_API_KEY."),
        (("--model", "garbage"), "not an HTTP answer"),
        (("--model", "silent"), "closed without an answer"),
        (("--model", "whole"), "no stream"),
        (("--url", "http://127.0.0.1:1"), "no connection"),
        (("--clients", "2", "--rate", "2"), "cli.exclusive"),
        (("--clients", "0"), "--clients"),
        (("--rate", "nan"), "--rate"),
        (("--requests", "x"), "--requests"),
        (("--timeout", "-1"), "--timeout"),
        (("--endpoint", "edits"), "value.not_one_of"),
        (("--input-len", "9-3"), "--input-len"),
        (("--dataset", "nowhere.jsonl"), "No such file"),
        (("--json", "no/such/folder.json"), "bench.record_folder"),
        (("--clients", "65000"), "files"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bench_serve_reports_invalid_settings(bench: Bench, words: tuple[str, ...], reported: str) -> None:
    import resource

    if words == ("--clients", "65000") and resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 65000:
        pytest.skip("so many files may be open here")
    ended = bench(*words)
    assert ended.code in (1, 2)
    assert ended.refuses(reported), ended
    assert "Traceback" not in ended.err


def test_bench_serve_sends_api_key(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench("--model", "keyed", "--requests", "2", "--api-key", KEY).code == 0
    monkeypatch.setenv("HOLDFAST_API_KEY", KEY)
    assert bench("--model", "keyed", "--requests", "2").code == 0


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"prompt": 3}', '{"prompt": "x", "max_tokens": 0}', ""])
def test_bench_serve_wrong_dataset_is_refused(bench: Bench, tmp_path: Path, line: str) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text(f"{line}\n")
    ended = bench("--dataset", file)
    assert ended.code == 2, ended
    assert "--dataset" in ended.err


def test_ask_abort_after_closes_stream_early(fake: FakeServer) -> None:
    body = as_work(CHAT, "x", 50).body(CHAT, "good", {})
    reply, _ = asyncio.run(ask(Url.read(fake.url), "/v1/chat/completions", body, 10.0, abort_after=1))
    assert reply.error == "left"
    assert 1 <= len(reply.texts) < 50
