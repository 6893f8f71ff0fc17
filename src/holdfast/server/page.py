"""The web page at /: chat and the live memory map, as files of this package with the headers that keep a browser to them.

Nothing in them is secret and nothing is filled in, so they need no key; what the page then asks for does.
"""

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response

FOLDER = "page"
"""Beside this file, and under the same name in URLs."""
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
NAMES = ("index.html", "style.css", "app.js", "chat.js", "map.js", "client.js", "markdown.js", "icon.svg")
PATHS = {"/" if name == "index.html" else f"/{FOLDER}/{name}": name for name in NAMES}
PUBLIC_PATHS = frozenset(PATHS)
"""That are answered without an API key."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""The browser loads from this server and nowhere else, runs no script that stands in a text, and shows the page in no frame."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    content: bytes
    media_type: str
    etag: str


@cache
def page_file(name: str) -> PageFile:
    """A file of the page, read once: an upgrade under a running server does not mix two versions."""
    content = (files("holdfast.server") / FOLDER / name).read_bytes()
    media_type = MEDIA_TYPES[name[name.rindex(".") :]]
    return PageFile(content, media_type, f'"{sha256(content).hexdigest()[:32]}"')


async def send_page(request: Request) -> Response:
    """The file of this path; 304 where the browser has it already."""
    file = page_file(PATHS[request.url.path])
    headers = HEADERS | {"ETag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


for _path in PATHS:
    router.add_api_route(_path, send_page, methods=["GET", "HEAD"])
