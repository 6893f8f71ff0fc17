"""Paths and methods that no endpoint takes: what is said, in the shape of the path's API family."""

import json

import pytest

from holdfast.server.dialects import dialect_of, error_body, error_piece
from holdfast.server.errors import ApiError

SPOKEN = {
    "/chat/completions": "POST /v1/chat/completions exists",
    "/v1/v1/chat/completions": "POST /v1/chat/completions exists",
    "/v1/chat/completions/": "POST /v1/chat/completions exists",
    "//v1//completions": "POST /v1/completions exists",
    "/V1/Models": "GET /v1/models exists",
    "/models/My/Model": "GET /v1/models/My/Model exists",
    "/v1/tokenize": "POST /tokenize exists",
    "/openai/v1/responses": "POST /v1/responses exists",
    "/messages": "POST /v1/messages exists",
    "/anthropic/v1/messages": "POST /v1/messages exists",
    "/v1/api/tags": "GET /api/tags exists",
    "/api/v1/chat/completions": "POST /v1/chat/completions exists",
    "/v1/chat": "answered by POST /v1/chat/completions",
    "/completion": "continued by POST /v1/completions",
    "/generate": "continued by POST /v1/completions",
    "/v1/audio/speech": "text alone",
    "/v1/images/generations": "text alone",
    "/v1/files": "stores no files",
    "/v1/batches": "stores no files",
    "/v1/moderations": "no model here moderates",
    "/v1/messages/batches": "stores no files",
    "/v1/messages/other": "POST /v1/messages/count_tokens; use one of them",
    "/api/pull": "serves the one model",
    "/api/blobs/sha256:0": "serves the one model",
    "/api/other": "POST /api/chat, POST /api/generate",
    "/other": "POST /v1/chat/completions, POST /v1/completions",
    "/docs": "GET /openapi.json",
    "/" + "x/" * 500: "there is no endpoint '/x/",
}


@pytest.mark.parametrize("path", SPOKEN, ids=lambda path: path[:40])
def test_unknown_path_is_told_what_to_use(client, path):
    answer = client.post(f"http://localhost{path}", json={})
    assert answer.status_code == 404
    value, dialect = answer.json(), dialect_of(path)
    message = value["error"] if dialect == "ollama" else value["error"]["message"]
    assert SPOKEN[path] in message
    assert len(message) < 900
    if dialect == "anthropic":
        assert (value["type"], value["error"]["type"]) == ("error", "not_found_error")
        assert value["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    elif dialect == "openai":
        assert value["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("GET", "/v1/messages", "POST"),
        ("PUT", "/api/chat", "POST"),
        ("POST", "/api/tags", "GET or HEAD"),
        ("DELETE", "/v1/models/fake", "GET"),
        ("POST", "/", "GET or HEAD"),
        ("PUT", "/v1/responses/x", "DELETE or GET"),
    ],
)
def test_wrong_method_is_told_the_right_one(client, method, path, allowed):
    answer = client.request(method, path)
    assert answer.status_code == 405
    assert f"it takes {allowed}; send {allowed}" in answer.text
    assert answer.headers["allow"] == allowed.replace(" or ", ", ")


@pytest.mark.parametrize("path", ["/apis", "/api2/chat", "/v1/messagesx", "/v1/message", "/", ""])
def test_dialect_of_a_like_path_is_openai(path):
    assert dialect_of(path) == "openai"


def test_listed_endpoints_have_all_of_their_methods(client):
    text = client.get("/v1/unheard-of").text
    assert "DELETE or GET /v1/responses/{response_id}" in text
    assert "POST /v1/completions" in text


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error")),
        *((404, "not_found_error"), (408, "timeout_error"), (413, "request_too_large"), (415, "invalid_request_error")),
        *((429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error")),
    ],
)
def test_error_has_the_shape_of_each_family(status, kind):
    error = ApiError(status, "words", "a_kind", "field", "code")
    own = {"type": "error", "error": {"type": kind, "message": "words"}, "request_id": "id"}
    assert json.loads(error_body(error, "/v1/messages", "id")) == own
    assert (
        error_piece(error, "/v1/messages", "id")
        == b"event: error\ndata: " + json.dumps(own, separators=(",", ":")).encode() + b"\n\n"
    )
    assert error_piece(error, "/api/chat", "id") == b'{"error":"words"}\n'
    told = {"error": {"message": "words", "type": "a_kind", "param": "field", "code": "code"}}
    assert json.loads(error_body(error, "/v1/models", "id")) == told
    assert json.loads(error_piece(error, "/v1/models", "id").removeprefix(b"data: ")) == told
