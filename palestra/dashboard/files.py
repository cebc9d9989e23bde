"""The page's static files from the package, with headers that block foreign content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

PAGE = "/dashboard"
ASSETS = f"{PAGE}/assets"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Nothing from elsewhere, and no script that does not stand in a file of the package: text of episodes can't become one.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and answered with 304
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    etag: str


def page_files() -> dict[str, _File]:
    """Return the files of the page by path."""
    root = files("palestra.dashboard") / "static"
    return {PAGE: _read(root / "page.html")} | {
        f"{ASSETS}/{name}": _read(file) for name, file in _below(root) if not name.endswith(".html")
    }


def _below(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _below(entry, f"{prefix}{entry.name}/")
        elif entry.name[entry.name.rfind(".") :] in _TYPES:
            found.append((prefix + entry.name, entry))
    return found


def _read(file: Traversable) -> _File:
    content = file.read_bytes()
    kind = _TYPES[file.name[file.name.rfind(".") :]]
    return _File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def public_paths() -> frozenset[str]:
    """Return the paths that need no key: files of the package, the same for everyone."""
    return frozenset(page_files())


def add_files(app: FastAPI) -> None:
    """Add the routes of the page's files to an application."""
    for path, file in page_files().items():
        _add(app, path, file)


def _add(app: FastAPI, path: str, file: _File) -> None:
    async def answer(request: Request) -> Response:
        headers = HEADERS | {"etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.kind, headers=headers)

    app.add_api_route(path, answer, methods=["GET"], include_in_schema=False)
