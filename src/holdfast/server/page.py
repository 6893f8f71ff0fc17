"""The web page at /: chat and the live memory map, as static files with a strict content security policy.

The files contain no secrets and no data, so they need no API key; the page's own requests do.
"""

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from holdfast.server.tables import data_table

FOLDER = "page"
"""Folder beside this file; URLs use the same name."""
_TABLE = data_table("page.toml")
MEDIA_TYPES: Mapping[str, str] = _TABLE["files"]
"""Media types by file name."""
PATHS = {"/" if name == "index.html" else f"/{FOLDER}/{name}": name for name in MEDIA_TYPES}
PUBLIC_PATHS = frozenset(PATHS)
"""Paths that need no API key."""
POLICY = "; ".join(f"{name} {value}" for name, value in _TABLE["policy"].items())
HEADERS = {"Content-Security-Policy": POLICY, **_TABLE["headers"]}

router = APIRouter(include_in_schema=False)


@cache
def page_file(name: str) -> tuple[bytes, str]:
    """Read a file and its ETag once, so that an upgrade of a running server never mixes two versions."""
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
    return Response(content, media_type=MEDIA_TYPES[name], headers=headers)


for _path in PATHS:
    router.add_api_route(_path, send_page, methods=["GET", "HEAD"])
