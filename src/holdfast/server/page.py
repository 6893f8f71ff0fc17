"""The web page at /: chat and the live memory map, as static files with a strict content security policy.

The files contain no secrets and no data, so they need no API key; the page's own requests do.
"""

from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response

FOLDER = "page"
"""Next to this file, and the same in URLs."""
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
NAMES = ("index.html", "style.css", "app.js", "chat.js", "map.js", "client.js", "markdown.js", "icon.svg")
PATHS = {"/" if name == "index.html" else f"/{FOLDER}/{name}": name for name in NAMES}
PUBLIC_PATHS = frozenset(PATHS)
"""Answered without an API key."""
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
"""Load only from this server, run no inline scripts, allow no frames."""
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


@cache
def page_file(name: str) -> tuple[bytes, str]:
    """Read a file and its ETag once: an upgrade of a running server must not mix two versions."""
    content = (files("holdfast.server") / FOLDER / name).read_bytes()
    return content, f'"{sha256(content).hexdigest()[:32]}"'


async def send_page(request: Request) -> Response:
    """Return the file of this path; 304 if the browser has it."""
    name = PATHS[request.url.path]
    content, etag = page_file(name)
    headers = HEADERS | {"ETag": etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if etag in known:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA_TYPES[name[name.rindex(".") :]], headers=headers)


for _path in PATHS:
    router.add_api_route(_path, send_page, methods=["GET", "HEAD"])
