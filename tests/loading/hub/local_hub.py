"""A server on this machine that speaks the Hub's protocol: lists, files with ranges, redirects of large ones, refusals."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin", "tokenizer.json")
"""Files that the Hub keeps in another store, to which it redirects."""


@dataclass
class Repo:
    """A repository with one commit, or several; the last is main."""

    files: dict[str, bytes]
    state: str = "public"
    """public, private, gated, or broken (the server fails)."""
    token: str = "hf_right"
    gguf: dict[str, object] | None = None
    other_refs: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        versions = {"main": self.files, **self.other_refs}
        by_commit = {commit_of(files): files for files in versions.values()}
        files = versions.get(revision, by_commit.get(revision))
        return None if files is None else (commit_of(files), files)


def commit_of(files: dict[str, bytes]) -> str:
    parts = b"".join(name.encode() + hashlib.sha1(data).digest() for name, data in sorted(files.items()))
    return hashlib.sha1(parts).hexdigest()


def etag_of(name: str, data: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class LocalHub:
    """Repositories by name, and the requests to them."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and Range of every request, in order."""
        self.cuts: dict[str, int] = {}
        """Files whose next download breaks off after so many bytes; each once."""
        self.waits: dict[str, threading.Event] = {}
        """Files whose download stops in the middle until the event."""
        self.address = ""

    def gets(self, word: str) -> list[str]:
        """Ranges of the downloads of files whose path holds a word."""
        return [span for method, path, span in self.requests if method == "GET" and word in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, has_body: bool) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if path.startswith("/store/"):
            return self._store(path.removeprefix("/store/"))
        if path.startswith("/api/models/"):
            return self._api(path.removeprefix("/api/models/"), parse_qs(url.query))
        repo_id, _, rest = path[1:].partition("/resolve/")
        revision, _, name = rest.partition("/")
        repo = self._repo(repo_id)
        if repo is None:
            return None
        if repo.state == "gated" and self.headers.get("Authorization") != f"Bearer {repo.token}":
            return self._refuse(401, "GatedRepo", "Access to this model is restricted")
        version = repo.at(revision)
        if version is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        commit, files = version
        if name not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        data, etag = files[name], etag_of(name, files[name])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if name.endswith(LARGE):
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{etag}"'}
            headers |= {
                "Location": f"{self.hub.address.replace('127.0.0.1', 'localhost')}/store/{repo_id}/{commit}/{name}"
            }
            return self._send(302, b"", headers)
        return self._file(name, data, headers, has_body)

    def _store(self, rest: str) -> None:
        owner, model, commit, name = rest.split("/", 3)
        version = self.hub.repos[f"{owner}/{model}"].at(commit)
        assert version is not None
        self._file(name, version[1][name], {"ETag": '"store"'}, has_body=self.command == "GET")

    def _file(self, name: str, data: bytes, headers: dict[str, str], has_body: bool) -> None:
        start = 0
        if span := self.headers.get("Range"):
            start = int(span.removeprefix("bytes=").partition("-")[0])
            headers = headers | {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        body = data[start:]
        cut = self.hub.cuts.pop(name, None) if has_body else None
        wait = self.hub.waits.get(name) if has_body else None
        self.send_response(206 if start else 200)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if not has_body:
            return
        if cut is not None:
            self.wfile.write(body[:cut])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
            return
        if wait is not None:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            wait.wait(20)
            body = body[len(body) // 2 :]
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has gone

    def _api(self, rest: str, query: dict[str, list[str]]) -> None:
        repo_id, _, tail = rest.partition("/revision/") if "/revision/" in rest else rest.partition("/tree/")
        repo = self._repo(repo_id)
        if repo is None:
            return None
        version = repo.at(tail.split("/")[0] or "main")
        if version is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        commit, files = version
        if "/tree/" in rest:
            entries = [_tree_entry(name, data) for name, data in files.items()]
            return self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
        info: dict[str, object] = {"id": repo_id, "modelId": repo_id, "sha": commit, "private": False, "tags": []}
        has_sizes = query.get("blobs") is not None
        info["siblings"] = [_sibling(name, data, has_sizes) for name, data in files.items()]
        info |= {} if repo.gguf is None else {"gguf": repo.gguf}
        return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _repo(self, repo_id: str) -> Repo | None:
        repo = self.hub.repos.get(repo_id)
        is_trusted = repo is not None and self.headers.get("Authorization") == f"Bearer {repo.token}"
        if repo is None or (repo.state == "private" and not is_trusted):
            # The Hub does not tell a stranger which of the two it is.
            self._refuse(401, "RepoNotFound", "Repository not found")
            return None
        if repo.state == "broken":
            self._refuse(500, "", "Internal")
            return None
        return repo

    def _refuse(self, code: int, error: str, message: str, headers: dict[str, str] | None = None) -> None:
        named = ({"X-Error-Code": error} if error else {}) | {"X-Error-Message": message} | (headers or {})
        self._send(code, json.dumps({"error": message}).encode(), named | {"Content-Type": "application/json"})

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _sibling(name: str, data: bytes, has_sizes: bool) -> dict[str, object]:
    if not has_sizes:
        return {"rfilename": name}
    entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": etag_of("", data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"sha256": etag_of(name, data), "size": len(data), "pointerSize": 134}
    return entry


def _tree_entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": etag_of("", data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": etag_of(name, data), "size": len(data), "pointerSize": 134}
    return entry


@contextmanager
def serving() -> Iterator[LocalHub]:
    """A hub on a free port, until the context ends."""
    hub = LocalHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
