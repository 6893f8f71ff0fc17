"""Unknown paths and methods, and errors in the shape of each API family."""

import json

from holdfast.server.errors import ANTHROPIC_TYPES, ApiError, dialect_of

ANSWERS = {
    "/chat/completions": "mean POST /v1/chat/completions?",
    "/v1/v1/chat/completions": "mean POST /v1/chat/completions?",
    "/v1/chat/completions/": "mean POST /v1/chat/completions?",
    "//v1//completions": "mean POST /v1/completions?",
    "/V1/Models": "mean GET /v1/models?",
    "/models/My/Model": "mean GET /v1/models/My/Model?",
    "/v1/tokenize": "mean POST /tokenize?",
    "/openai/v1/responses": "mean POST /v1/responses?",
    "/messages": "mean POST /v1/messages?",
    "/anthropic/v1/messages": "mean POST /v1/messages?",
    "/v1/api/tags": "mean GET /api/tags?",
    "/api/v1/chat/completions": "mean POST /v1/chat/completions?",
    "/v1/chat": "Use POST /v1/chat/completions",
    "/completion": "Use POST /v1/completions",
    "/generate": "Use POST /v1/completions",
    "/v1/audio/speech": "text only",
    "/v1/images/generations": "text only",
    "/v1/files": "stores no files",
    "/v1/batches": "stores no files",
    "/v1/moderations": "no moderation model",
    "/v1/messages/batches": "stores no files",
    "/v1/messages/other": "POST /v1/messages/count_tokens. GET",
    "/api/pull": "serves the one model",
    "/api/blobs/sha256:0": "serves the one model",
    "/api/other": "POST /api/chat, POST /api/generate",
    "/other": "POST /v1/chat/completions, POST /v1/completions",
    "/docs": "GET /openapi.json",
    "/" + "x/" * 500: "There is no endpoint '/x/",
}
METHODS = (
    ("GET", "/v1/chat/completions", "POST"),
    ("GET", "/v1/messages", "POST"),
    ("PUT", "/api/chat", "POST"),
    ("POST", "/api/tags", "GET or HEAD"),
    ("DELETE", "/v1/models/fake", "GET"),
    ("POST", "/", "GET or HEAD"),
    ("PUT", "/v1/responses/x", "DELETE or GET"),
)


def test_unknown_path_is_answered_with_the_right_one(client):
    for path, expected in ANSWERS.items():
        answer = client.post(f"http://localhost{path}", json={})
        assert answer.status_code == 404, path
        value, dialect = answer.json(), dialect_of(path)
        message = value["error"] if dialect == "ollama" else value["error"]["message"]
        assert expected in message, path
        assert len(message) < 900, path
        if dialect == "anthropic":
            assert (value["type"], value["error"]["type"]) == ("error", "not_found_error")
            assert value["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
        elif dialect == "openai":
            assert value["error"]["code"] == "not_found"


def test_wrong_method_is_answered_with_the_allowed_ones(client):
    for method, path, allowed in METHODS:
        answer = client.request(method, path)
        assert answer.status_code == 405, path
        assert f"does not support {method}. Use {allowed}." in answer.text
        assert answer.headers["allow"] == allowed.replace(" or ", ", ")


def test_dialect_of_a_similar_path_is_openai():
    for path in ("/apis", "/api2/chat", "/v1/messagesx", "/v1/message", "/", ""):
        assert dialect_of(path) == "openai", path


def test_listed_endpoints_have_all_of_their_methods(client):
    text = client.get("/v1/unheard-of").text
    assert "DELETE or GET /v1/responses/{response_id}" in text
    assert "POST /v1/completions" in text


def test_error_has_the_shape_of_each_family():
    kinds = {400: "invalid_request_error", 415: "invalid_request_error", 500: "api_error", **ANTHROPIC_TYPES}
    for status, kind in kinds.items():
        error = ApiError("http.draining", param="field").reword("text")
        error.status = status
        own = {"type": "error", "error": {"type": kind, "message": "text"}, "request_id": "id"}
        assert json.loads(error.to_json("/v1/messages", "id")) == own
        event = b"event: error\ndata: " + json.dumps(own, separators=(",", ":")).encode() + b"\n\n"
        assert error.to_event("/v1/messages", "id") == event
        assert error.to_event("/api/chat", "id") == b'{"error":"text"}\n'
        openai = {"error": {"message": "text", "type": error.kind, "param": "field", "code": "draining"}}
        assert json.loads(error.to_json("/v1/models", "id")) == openai
        assert json.loads(error.to_event("/v1/models", "id").removeprefix(b"data: ")) == openai
    assert ApiError("http.draining").kind == "service_unavailable_error"
    assert ApiError("http.invalid_api_key", has="").kind == "authentication_error"
