"""The application: errors in one shape, ids, hosts, origins, keys; every route is closed without a key."""

import io
import json
import re
from collections.abc import Iterator

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from for_each import for_each
from holdfast.errors import EngineDeadError, MemoryPlanError, PromptError, QueueFullError
from holdfast.request.sampling_params import SamplingParams
from holdfast.server.app import endpoint_routers, make_app
from holdfast.server.errors import ApiError, cleaned, from_exception
from holdfast.server.guards import PUBLIC_PATHS
from holdfast.server.keys import Keys
from holdfast.server.logs import RequestLog, record_of
from holdfast.server.service import ServerLimits, Service
from server.raw_server import Seen, StubLLM, make_router

KEY = {"Authorization": "Bearer key-1"}
LEAK = re.compile(r"0x[0-9a-f]{6,}|/home|/usr|/app|/root|/tmp|\.py\", line|Traceback")


def make_client(*keys: str, routers: list[APIRouter] | None = None, **options: object) -> TestClient:
    service = Service(StubLLM(), ("tiny",), ServerLimits())  # type: ignore[arg-type]
    app = make_app(service, Keys(keys), routers=routers or [make_router(Seen())], **options)  # type: ignore[arg-type]
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with make_client("key-1", "key-2") as made:
        yield made


def routes() -> list[tuple[str, str]]:
    """Every route of the real application."""
    app = make_app(Service(StubLLM(), ("tiny",)))  # type: ignore[arg-type]
    paths = {(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item}
    for router in endpoint_routers():
        paths |= {
            (method, route.path) for route in router.routes if isinstance(route, APIRoute) for method in route.methods
        }
    return sorted(paths)


def test_routes_without_a_key_are_unauthorized() -> None:
    """Whatever the application answers, and whatever it does not, but for a short list."""
    assert len(routes()) >= 12
    client = make_client("key-1", routers=list(endpoint_routers()))
    for method, path in [
        *routes(),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/nothing"),
        ("PUT", "/v1/models"),
    ]:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "key-1"}, {"Authorization": "Bearer"}):
            answer = client.request(method, path.replace("{model_id}", "x"), headers=headers)
            assert (answer.status_code == 401) != (path in PUBLIC_PATHS), (method, path, answer.status_code)


def test_public_paths_are_root_health_and_ready() -> None:
    """A change of this list is a decision."""
    assert {path for path in PUBLIC_PATHS if not path.startswith("/page/")} == {"/", "/health", "/ready"}


@for_each(
    "path",
    [
        "//echo",
        "/%65cho",
        "/echo/",
        "/ECHO",
        "/health/../echo",
        "/health/%2e%2e/echo",
        "/health//echo",
        "/echo;/health",
        "/echo?/health",
        "/health%3f/echo",
        "/health%00/echo",
        "/./echo",
    ],
)
def test_path_variants_do_not_bypass_the_key(client: TestClient, path: str) -> None:
    assert client.post(f"http://localhost{path}", json={}).status_code == 401


@for_each("key", ["key-1", "key-2"])
def test_each_api_key_is_accepted(client: TestClient, key: str) -> None:
    answer = client.post("/echo", json={"a": 1}, headers={"Authorization": f"bearer {key}"})
    assert answer.json() == {"a": 1}


@for_each(
    "pairs, status",
    [
        ([("x-api-key", "key-2")], 200),
        ([("x-api-key", " key-2 ")], 200),
        ([("x-api-key", "key-2"), ("authorization", "Bearer wrong")], 200),
        ([("x-api-key", "wrong"), ("authorization", "Bearer key-1")], 200),
        ([("x-api-key", "wrong")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", "Bearer key-1")], 401),
        ([("x-api-key", "key-1"), ("x-api-key", "key-1")], 401),
    ],
)
def test_x_api_key_header_is_accepted_as_bearer(client: TestClient, pairs: list[tuple[str, str]], status: int) -> None:
    assert client.post("/echo", json={}, headers=pairs).status_code == status


@for_each(
    "path, kind", [("/v1/messages", "authentication_error"), ("/api/chat", None), ("/echo", "authentication_error")]
)
def test_missing_key_is_answered_in_the_shape_of_the_path(client: TestClient, path: str, kind: str | None) -> None:
    answer = client.post(path, json={})
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert isinstance(error, str) if kind is None else error["type"] == kind
    assert ("request-id" in answer.headers) == (path == "/v1/messages")


def test_two_authorization_headers_are_unauthorized(client: TestClient) -> None:
    pairs = [("authorization", "Bearer key-1"), ("authorization", "Bearer key-1")]
    answer = client.post("/echo", json={}, headers=pairs)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_cache_salt_is_unset_for_a_single_key() -> None:
    """With one key there is no other client to hide them from."""
    seen: list[str | None] = []
    router = APIRouter()

    @router.get("/salt")
    async def salt(request: Request) -> Response:
        seen.append(record_of(request).cache_salt)
        return Response()

    several, single = make_client("a", "b", routers=[router]), make_client("a", routers=[router])
    for client, key in (
        (several, "a"),
        (several, "b"),
        (several, "a"),
        (single, "a"),
        (make_client(routers=[router]), ""),
    ):
        client.get("/salt", headers={"Authorization": f"Bearer {key}"})
    assert seen[0] == seen[2] != seen[1]
    assert seen[3:] == [None, None]
    assert "a" != seen[0] != "b"


@for_each(
    "host, status",
    [
        *(
            (host, 200)
            for host in (
                "localhost",
                "LOCALHOST:80",
                "127.0.0.1:8000",
                "[::1]:8000",
                "10.0.0.7",
                "app.localhost",
                "my.host",
            )
        ),
        *(
            (host, 421)
            for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "1.2.3", "0x7f000001")
        ),
        *(
            (host, 400)
            for host in ("x/?", "x/#", "a@b", "a b", "localhost:x", "localhost:", "[::1", "a,b", "http://localhost", "")
        ),
    ],
)
def test_allowed_hosts_are_accepted_others_refused(host: str, status: int) -> None:
    client = make_client(allowed_hosts=("my.host",))
    answer = client.get("/health", headers={"Host": host})
    assert answer.status_code == status, answer.text


def test_allowed_hosts_wildcard_accepts_any_host() -> None:
    assert make_client(allowed_hosts=("*",)).get("/health", headers={"Host": "any.example"}).status_code == 200


def test_allowed_origins_are_closed_by_default() -> None:
    """Off by default, also for requests that a browser sends without asking."""
    closed, opened = make_client(), make_client("key-1", allowed_origins=("https://good.example",))
    for origin in ("https://evil.example", "null", "http://localhost.evil"):
        answer = closed.post("/echo", json={}, headers={"Origin": origin})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    assert closed.post("/echo", json={}, headers={"Origin": "http://localhost"}).status_code == 200
    assert (
        "access-control-allow-origin" not in closed.get("/health", headers={"Origin": "https://evil.example"}).headers
    )
    good = {"Origin": "https://good.example"}
    answer = opened.post("/echo", json={}, headers={**good, **KEY})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://good.example")
    query = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert opened.options("/echo", headers={**good, **query}).status_code == 200
    assert opened.options("/echo", headers={"Origin": "https://evil.example", **query}).status_code == 400
    assert opened.post("/echo", json={}, headers={"Origin": "https://evil.example", **KEY}).status_code == 403


@for_each("media_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_form_content_type_is_refused(client: TestClient, media_type: str) -> None:
    answer = client.post("/echo", content=b"{}", headers={**KEY, "Content-Type": media_type})
    assert answer.status_code == 415


@for_each(
    "given, is_kept",
    [
        ("abc-1.2:3_4", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("a b", False),
        ("a\tb", False),
        ("é", False),
        ("", False),
    ],
)
def test_request_id_is_kept_if_valid_else_made(client: TestClient, given: str, is_kept: bool) -> None:
    answer = client.get("/health", headers={"X-Request-Id": given.encode("latin-1")})  # type: ignore[dict-item]
    named = answer.headers["x-request-id"]
    assert (named == given) == is_kept
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", named)


def test_internal_error_reveals_no_detail(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    answer = client.get("/boom", headers=KEY)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert not LEAK.search(answer.text)
    assert "x-request-id" in answer.headers


@for_each(
    "error, status, code",
    [
        (PromptError("request.prompt_empty"), 400, "request.prompt_empty"),
        (QueueFullError("request.queue_full", count=1, waiting=1, maximum=1), 429, "queue_full"),
        (EngineDeadError("engine.dead", reason="/home/user/x"), 503, "engine_dead"),
        (MemoryPlanError("transfer.not_allowed", what="0xdeadbeefdead"), 500, "internal_error"),
        (OSError("/home/user/x"), 500, "internal_error"),
        (RuntimeError(), 500, "internal_error"),
        (ApiError("http.bad_host", value="x"), 400, "bad_host"),
    ],
)
def test_from_exception_gives_status_and_public_code(error: Exception, status: int, code: str | None) -> None:
    found = from_exception(error)
    assert (found.status, found.public_code) == (status, code)
    body = json.loads(found.to_json())
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert not LEAK.search(body["error"]["message"])
    if status == 429:
        assert found.headers["Retry-After"] == "1"


@for_each(
    "words, expected",
    [
        ("a file /usr/lib/x.py is gone", "a file ... is gone"),
        ("object at 0xffff8a001230", "object at ..."),
        ('File "/x/y.py", line 3', "..."),
        ("and/or, 1/2, https://example.com/usr/x", "and/or, 1/2, https://example.com/usr/x"),
    ],
)
def test_cleaned_removes_paths_and_addresses(words: str, expected: str) -> None:
    assert cleaned(words) == expected


def test_unknown_endpoint_or_method_is_a_coded_error(client: TestClient) -> None:
    assert client.get("/v1/nothing", headers=KEY).json()["error"]["code"] == "not_found"
    assert client.delete("/echo", headers=KEY).json()["error"]["code"] == "method_not_allowed"


def test_draining_server_refuses_new_requests() -> None:
    client = make_client()
    client.app.state.service.state = "draining"  # type: ignore[attr-defined]
    answer = client.post("/echo", json={})
    assert (answer.status_code, answer.headers["connection"]) == (503, "close")
    assert client.get("/health").status_code == 200
    # Open, and without an endpoint in this application.
    assert [client.get(path).status_code for path in ("/ready", "/metrics", "/memory")] == [404, 404, 503]


def test_request_log_writes_one_line_per_request() -> None:
    """With what is known, one line whatever a client sends; prompts only with --log-requests; no key."""
    for log_format in ("text", "json"):
        stream = io.StringIO()
        client = make_client("key-1", log=RequestLog(log_format, stream=stream))  # type: ignore[arg-type]
        client.post("/echo", json={"secret": 1}, headers={**KEY, "X-Request-Id": "mine"})
        client.get("/a%0Ab%22 c", headers=KEY)
        client.get("/health")
        lines = stream.getvalue().splitlines()
        assert len(lines) == 2
        assert "key-1" not in stream.getvalue()
        assert "secret" not in stream.getvalue()
        if log_format == "json":
            first, second = map(json.loads, lines)
            assert (first["request_id"], first["status"], first["path"], first["key"]) == ("mine", 200, "/echo", 0)
            assert (second["path"], second["error"]) == ('/a\nb" c', "not_found")
        else:
            assert "request_id=mine" in lines[0]
            assert r'path="/a\nb\" c"' in lines[1]


def test_request_log_failure_fails_no_request() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("disk full")

    client = make_client(log=RequestLog(stream=Broken()))
    assert client.get("/nothing").status_code == 404
    assert client.get("/nothing").status_code == 404


class AdvisedLLM(StubLLM):
    """A model whose makers advise something, or nothing."""

    def __init__(self, params: SamplingParams) -> None:
        super().__init__()
        self.params = params

    def default_sampling_params(self) -> SamplingParams:
        return self.params


def test_service_advice_applies_only_if_the_model_gives_none() -> None:
    silent, outspoken = (
        Service(AdvisedLLM(params), ("tiny",), advice={"temperature": 0.2})  # type: ignore[arg-type]
        for params in (SamplingParams(), SamplingParams(top_p=0.5))
    )
    assert silent.advised["temperature"] == 0.2
    assert (outspoken.advised["temperature"], outspoken.advised["top_p"]) == (1.0, 0.5)
