"""The dashboard's files. They hold no data, so that nobody needs a token for them.

What always holds: only files of this folder with a known ending are given out, by their own name;
the page may load nothing from elsewhere and speak to nobody else.
"""

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Final

from aiohttp import web

from scheduler.http_server import HttpRefused

FOLDER: Final = Path(__file__).parent.parent / "dashboard"
MAX_BYTES: Final = 4 * 2**20
TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".ico": "image/x-icon",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none';"
    " form-action 'self'; frame-ancestors 'none'"
)
_TEXT: Final = ("text/", "application/json", "application/manifest")
_NAME: Final = re.compile(r"/assets/([A-Za-z0-9][A-Za-z0-9._-]{0,80})")


def is_static(path: str) -> bool:
    """Whether a path is one of the dashboard's."""
    return path == "/" or path.startswith("/assets/")


async def static_file(request: web.BaseRequest, folder: Path = FOLDER) -> web.Response:
    """The file under the request's path.

    Raises:
        HttpRefused: there is none.
    """
    if request.method not in ("GET", "HEAD"):
        raise HttpRefused(405, "http.method", "only GET and HEAD", Allow="GET, HEAD")
    match = _NAME.fullmatch(request.path)
    name = "index.html" if request.path == "/" else match[1] if match else ""
    kind = TYPES.get(Path(name).suffix, "")
    data = await asyncio.to_thread(_read, folder / name) if kind else None
    if data is None:
        raise HttpRefused(404, "http.not_found", "the dashboard has no such file")
    etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {
        "ETag": etag,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
    }
    if etag in (one.strip() for one in request.headers.get("If-None-Match", "").split(",")):
        return web.Response(status=304, headers=headers)
    charset = "utf-8" if kind.startswith(_TEXT) else None
    return web.Response(body=data, content_type=kind, charset=charset, headers=headers)


def _read(path: Path) -> bytes | None:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None
