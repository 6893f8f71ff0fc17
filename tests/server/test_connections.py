"""Raw connections: what is ambiguous is refused, what is slow is closed in time, and good clients never notice."""

import io
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from for_each import for_each
from holdfast.server.logs import RequestLog
from holdfast.server.service import ServerLimits
from server.raw_server import Running, connect, get, post, read_to_end, running, status_of, talk

BODY = b'{"a":1}'
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as started:
        yield started


def is_well(server: Running) -> bool:
    return status_of(talk(server.port, get("/health"))) == 200


def echo(head: bytes, body: bytes = b"") -> bytes:
    return b"POST /echo HTTP/1.1\r\n" + HOST + JSON + head + b"\r\n" + body


HOSTILE = {
    "length and chunks": echo(
        b"Content-Length: 7\r\nTransfer-Encoding: chunked\r\n", b"7\r\n" + BODY + b"\r\n0\r\n\r\n"
    ),
    "chunks and length": echo(
        b"Transfer-Encoding: chunked\r\nContent-Length: 7\r\n", b"7\r\n" + BODY + b"\r\n0\r\n\r\n"
    ),
    "two lengths": echo(b"Content-Length: 7\r\nContent-Length: 8\r\n", BODY),
    "two equal lengths": echo(b"Content-Length: 7\r\nContent-Length: 7\r\n", BODY),
    "lengths in a list": echo(b"Content-Length: 7, 7\r\n", BODY),
    "signed length": echo(b"Content-Length: +7\r\n", BODY),
    "negative length": echo(b"Content-Length: -7\r\n", BODY),
    "hex length": echo(b"Content-Length: 0x7\r\n", BODY),
    "length beyond 64 bits": echo(b"Content-Length: 99999999999999999999999\r\n", BODY),
    "empty length": echo(b"Content-Length: \r\n", BODY),
    "chunked twice": echo(b"Transfer-Encoding: chunked, chunked\r\n", b"7\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "two transfer encodings": echo(b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
    "unknown transfer encoding": echo(b"Transfer-Encoding: cow\r\n", BODY),
    "gzip, chunked": echo(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
    "chunked not last": echo(b"Transfer-Encoding: chunked, gzip\r\n", b"0\r\n\r\n"),
    "tab in encoding": echo(b"Transfer-Encoding:\x0bchunked\r\n", b"0\r\n\r\n"),
    "space before colon": echo(b"Content-Length : 7\r\n", BODY),
    "folded header": echo(b"X-A: b\r\n c\r\nContent-Length: 7\r\n", BODY),
    "header without colon": echo(b"Nonsense\r\nContent-Length: 7\r\n", BODY),
    "bad chunk size": echo(b"Transfer-Encoding: chunked\r\n", b"xyz\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "negative chunk size": echo(b"Transfer-Encoding: chunked\r\n", b"-7\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size beyond 64 bits": echo(b"Transfer-Encoding: chunked\r\n", b"FFFFFFFFFFFFFFFFF\r\n" + BODY),
    "chunk without its end": echo(b"Transfer-Encoding: chunked\r\n", b"7\r\n" + BODY + b"XX0\r\n\r\n"),
    "chunk lines end in LF": echo(b"Transfer-Encoding: chunked\r\n", b"7\n" + BODY + b"\n0\n\n"),
    "lines end in LF": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "lines end in CR": b"GET /health HTTP/1.1\rHost: localhost\r\r",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/3.0": b"GET /health HTTP/3.0\r\n" + HOST + b"\r\n",
    "HTTP/1.9": b"GET /health HTTP/1.9\r\n" + HOST + b"\r\n",
    "TLS": bytes.fromhex("16030100f8010000f40303") + bytes(200),
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "host with a path": b"GET /health HTTP/1.1\r\nHost: localhost/?\r\n\r\n",
    "host with a user": b"GET /health HTTP/1.1\r\nHost: a@localhost\r\n\r\n",
    "NUL in a header": b"GET /health HTTP/1.1\r\n" + HOST + b"X: a\x00b\r\n\r\n",
    "NUL in the path": b"GET /hea\x00lth HTTP/1.1\r\n" + HOST + b"\r\n",
    "raw bytes in the path": b"GET /hea\xfflth HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in the path": b"GET /hea lth HTTP/1.1\r\n" + HOST + b"\r\n",
    "no method": b"/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "strange method": b"G@T /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT": b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST + b"\r\n",
    "noise": bytes(range(256)) * 4,
    "long address": b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "large header": b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "header without end": b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 600_000,
    "many headers": b"GET /health HTTP/1.1\r\n" + HOST + b"X: a\r\n" * 10_000 + b"\r\n",
    "large name": b"GET /health HTTP/1.1\r\n" + HOST + b"X" * 70_000 + b": a\r\n\r\n",
    "endless chunk extension": echo(b"Transfer-Encoding: chunked\r\n", b"1;" + b"a" * 600_000),
    "endless trailers": echo(b"Transfer-Encoding: chunked\r\n", b"7\r\n" + BODY + b"\r\n0\r\n" + b"X: a\r\n" * 20_000),
    "chunks of a byte": echo(b"Transfer-Encoding: chunked\r\n", b"1\r\n1\r\n" * 400_000),
    "pipelined beyond": get("/stream", close=False) * 5000,
}


@for_each("name", HOSTILE)
def test_server_hostile_bytes_are_refused_or_cut(server: Running, name: str) -> None:
    """Refused with an error in the one shape, or cut; closed soon; no other client notices."""
    started = time.monotonic()
    answer = talk(server.port, HOSTILE[name])
    assert time.monotonic() - started < 5
    if name == "pipelined beyond":
        assert answer == b"" or status_of(answer) == 200
    else:
        assert 400 <= status_of(answer) < 500 or status_of(answer) == 505, (name, answer[:300])
        assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1, (name, answer[:600])
        assert b'{"error":{"message":' in answer
    assert is_well(server)


def test_server_ambiguous_framing_smuggles_no_request(server: Running) -> None:
    """A second request inside the body of a refused one is never answered."""
    inner = get("/health", close=False)
    for head in (
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 0\r\nContent-Length: 50\r\n",
        b"Transfer-Encoding : chunked\r\nContent-Length: 0\r\n",
    ):
        answer = talk(server.port, echo(head, b"0\r\n\r\n" + inner))
        assert status_of(answer) == 400
        assert b"200 OK" not in answer


def test_server_early_answer_announces_connection_close(server: Running) -> None:
    """A client that keeps the connection would send its next request to a closed one."""
    whole = post("/nothing", BODY, "Content-Length: 7", close=False)
    head = whole[: -len(BODY)]
    early = talk(server.port, head)
    assert status_of(early) == 404
    assert b"\r\nconnection: close\r\n" in early.lower()
    assert b"connection: close" not in talk(server.port, whole + get("/health")).lower().split(b"\r\n\r\n")[0]


def test_server_trailers_change_nothing(server: Running) -> None:
    body = b"7\r\n" + BODY + b"\r\n0\r\nHost: evil.example\r\nAuthorization: Bearer x\r\n\r\n"
    answer = talk(server.port, echo(b"Transfer-Encoding: chunked\r\nConnection: close\r\n", body))
    assert status_of(answer) == 200


def test_server_good_requests_in_any_pieces_are_answered(server: Running) -> None:
    """Split anywhere, by the byte, pipelined, kept alive, with Expect: the same answers."""
    whole = post("/echo", BODY, "Content-Length: 7")
    for place in range(0, len(whole), 17):
        assert status_of(talk(server.port, whole[:place], whole[place:])) == 200
    assert status_of(talk(server.port, *(whole[at : at + 1] for at in range(len(whole))))) == 200
    chunked = echo(
        b"Transfer-Encoding: chunked\r\nConnection: close\r\n",
        b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    )
    assert talk(server.port, chunked).endswith(b'{"a": 1}')
    pipelined = talk(server.port, post("/echo", BODY, "Content-Length: 7", close=False) * 5 + get("/health"))
    assert pipelined.count(b"HTTP/1.1 200") == 6
    expecting = talk(server.port, post("/echo", b"", "Content-Length: 7", "Expect: 100-continue"), BODY)
    assert expecting.startswith(b"HTTP/1.1 100 Continue")
    assert b"HTTP/1.1 200" in expecting
    upgrade = talk(server.port, get("/health", "Connection: Upgrade", "Upgrade: websocket", close=False))
    assert status_of(upgrade) == 200


@for_each(
    "pieces",
    [
        (b"\r\n\r\n",),
        (post("/echo", b'{"a"', "Content-Length: 7"),),
        (get("/health", close=False), b"\r\n\r\n"),
    ],
)
def test_server_closes_slow_clients(server: Running, pieces: tuple[bytes, ...]) -> None:
    """By the sweep; test_connection_times.py has every phase."""
    started = time.monotonic()
    answer = talk(server.port, *pieces, seconds=5)
    assert 0.3 < time.monotonic() - started < 3
    if pieces[0].startswith(b"POST"):
        assert status_of(answer) == 408


@pytest.mark.slow
def test_server_closes_dripping_clients(server: Running) -> None:
    """A byte now and then is not enough: of headers, of blank lines, of a body in all."""
    for begun in (b"GET /health HTTP/1.1\r\nX: ", b""):
        with connect(server.port) as connection:
            started = time.monotonic()
            connection.sendall(begun)
            while not is_over(connection):
                assert time.monotonic() - started < 3
                time.sleep(0.1)
                connection.sendall(b"\r\n" if not begun else b"a")


def is_over(connection: socket.socket) -> bool:
    """Whether the other side has closed, or said something."""
    connection.setblocking(False)
    try:
        connection.recv(1000)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_server_cuts_clients_that_do_not_read(server: Running) -> None:
    """The endpoint ends, and what it holds is let go."""
    ended = server.seen.num_ended
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(get("/stream?count=100000&size=65536&seconds=0"))
        wait_for(lambda: server.seen.num_ended > ended, 5)
    assert is_well(server)


def wait_for(is_so, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.01)


def test_server_client_disconnect_ends_its_stream(server: Running) -> None:
    """Also one whose next request waits behind the stream."""
    for more in (b"", get("/health")):
        ended = server.seen.num_ended
        with connect(server.port) as connection:
            connection.sendall(get("/stream?count=1000", close=False) + more)
            assert connection.recv(100)
        wait_for(lambda ended=ended: server.seen.num_ended > ended)


def test_server_answer_left_by_its_client_is_logged_as_cut() -> None:
    stream = io.StringIO()
    with running(log=RequestLog("json", stream=stream)) as server:
        assert status_of(talk(server.port, get("/stream?count=1"))) == 200
        with connect(server.port) as connection:
            connection.sendall(get("/stream?count=1000", close=False))
            assert connection.recv(100)
        wait_for(lambda: stream.getvalue().count("\n") == 2)
    assert [json.loads(line).get("cut") for line in stream.getvalue().splitlines()] == [None, True]


def test_server_large_bodies_are_not_held(server: Running) -> None:
    """100 MB, announced and not: 413 arrives although the client goes on sending; memory stays."""
    before = resident_bytes()
    announced = talk(server.port, post("/echo", b"x" * 100_000, "Content-Length: 100000000"))
    assert status_of(announced) == 413
    with connect(server.port) as connection:
        connection.sendall(echo(b"Transfer-Encoding: chunked\r\n"))
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        sent = 0
        try:
            while sent < 100_000_000:
                connection.sendall(piece)
                sent += len(piece)
        except OSError:
            pass
        answer = read_to_end(connection)
    assert sent < 20_000_000
    assert status_of(answer) in (0, 413)  # a reset may overtake the answer where a client never stops
    assert resident_bytes() - before < 16 * 2**20
    assert is_well(server)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_connections_are_counted() -> None:
    """Those above the limit are refused, until others have gone."""
    with running(ServerLimits(max_connections=8, header_seconds=5)) as server:
        held = [connect(server.port) for _ in range(8)]
        wait_for(lambda: len(server.server.guarded) == 8)
        refused = talk(server.port, get("/health"))
        assert status_of(refused) == 503
        assert b"Retry-After: 1" in refused
        for connection in held:
            connection.close()
        wait_for(lambda: is_well(server))


def test_server_answers_good_clients_during_an_attack() -> None:
    """Hundreds of half-open connections: others are answered as if there were none."""
    with running(ServerLimits(header_seconds=1)) as server:
        held = [connect(server.port) for _ in range(300)]
        for connection in held:
            connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        started = time.monotonic()
        for _ in range(50):
            assert is_well(server)
        assert (time.monotonic() - started) / 50 < 0.2
        for connection in held:
            assert status_of(read_to_end(connection, 6)) == 408
            connection.close()
        assert time.monotonic() - started < 12


@pytest.mark.slow
def test_random_bytes_and_mutants(server: Running) -> None:
    """5,000 broken requests from all the above: an answer or an end in time, never a 5xx, and a server that is well."""
    chance = random.Random(18)
    broken = [seed for seed in HOSTILE.values() if len(seed) < 2000]
    chunked = echo(
        b"Transfer-Encoding: chunked\r\nConnection: close\r\n",
        b"3\r\n" + BODY[:3] + b"\r\n4\r\n" + BODY[3:] + b"\r\n0\r\n\r\n",
    )
    sound = [
        post("/echo", BODY, "Content-Length: 7"),
        get("/health"),
        chunked,
        get("/stream", close=False) + get("/health"),
    ]

    def attack(number: int) -> None:
        own = random.Random(chance.random() + number)
        data = bytearray(own.choice(own.choice((broken, sound))))
        for _ in range(own.randrange(1, 6)):
            place = own.randrange(len(data))
            kind = own.randrange(4)
            if kind == 0:
                data[place] = own.randrange(256)
            elif kind == 1:
                del data[place : place + own.randrange(1, 9)]
            elif kind == 2:
                data[place:place] = own.choice((b"\r\n", b"\n", b"\x00", b" ", b":", b"0\r\n\r\n", b"\xff"))
            else:
                data[place:place] = data[place : place + own.randrange(1, 40)]
            if not data:
                data = bytearray(b"G")
        answer = talk(server.port, bytes(data), seconds=8)
        assert status_of(answer) < 500 or status_of(answer) == 505, (bytes(data), answer[:200])
        assert b"Traceback" not in answer

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(attack, range(5000)))
    assert is_well(server)
