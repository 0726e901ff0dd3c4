"""The files of the memory view, which is a page in the browser: read once, sent as they are.

The page holds no data. What it shows it asks the API for, with the key that its reader gives it.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import PurePath

from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    """/ui/ and what lies below it."""
    found: dict[str, tuple[bytes, str]] = {}
    root = files("octavo.server") / "ui"
    for folder in (root, root / "uplot"):
        for file in folder.iterdir():
            if file.is_file() and PurePath(file.name).suffix in TYPES:
                body = file.read_bytes()
                name = file.name if folder is root else f"uplot/{file.name}"
                found[name] = (body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')

    async def page(http: HTTPRequest) -> Response:
        name = http.path_params["name"] or "index.html"
        if name not in found:
            raise HTTPException(404)
        body, tag = found[name]
        headers = {**HEADERS, "ETag": tag}
        known = [part.strip().removeprefix("W/") for part in http.headers.get("if-none-match", "").split(",")]
        if tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=TYPES[PurePath(name).suffix])

    async def moved(http: HTTPRequest) -> Response:
        return Response(status_code=308, headers={"Location": "ui/"})  # relative: the Host header is anybody's

    return [Route("/ui", moved, methods=["GET"]), Route("/ui/{name:path}", page, methods=["GET"])]
