"""The weight store's files over HTTP, for readers that speak nothing else.

    GET /v1/policies                                policies, as JSON
    GET /v1/RUN/NAME/versions                       the versions of a policy
    GET /v1/RUN/NAME/versions/NUMBER                manifest of one, and what the store made of it
    GET /v1/RUN/NAME/versions/NUMBER/signed         the same manifest, MessagePack, as signed
    GET /v1/files/SHA256                            a file, whole or one range of it

What always holds: whoever does not send the bearer token learns nothing; a file is named by its
digest, which is also its ETag, so a reader can verify all it gets and no path of the request ever
reaches the disk; connections and transfers are bounded, and one that exceeds them is told to come
back; without TLS only this machine is served (``SchedulerTable`` refuses anything else).
"""

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from scheduler.config import SchedulerTable
from scheduler.http_access import TOKEN_NAME, load_token, tls_context
from scheduler.http_server import (
    HttpListener,
    HttpRefused,
    bearer,
    json_response,
    same_secret,
    write,
)
from scheduler.weight_reading import PolicyShelf, StoreReader
from scheduler.weight_rows import version_rows
from transport.errors import FarflowError, StoreError
from transport.weights.manifest import FileEntry, VersionManifest

if TYPE_CHECKING:
    from aiohttp import web

MAX_CONNECTIONS: Final = 256
MAX_TRANSFERS: Final = 32
PIECE_BYTES: Final = 1 << 18
RETRY_AFTER: Final = "2"  # seconds
_SETTING: Final = "scheduler.weights_http_"

_FILE = re.compile(r"/v1/files/([0-9a-f]{64})")
_NO_BYTES = re.compile(r"\s*bytes\s*=\s*-0+\s*")  # the last 0 bytes, not all
_VERSIONS = re.compile(
    r"/v1/([a-z0-9][a-z0-9._-]{0,47}/[a-z0-9][a-z0-9._-]{0,47})/versions"
    r"(?:/(\d{1,18})(/signed)?)?"
)
_log = structlog.get_logger()


def weight_http(
    table: SchedulerTable, folder: Path, damaged: Callable[[str], bool]
) -> "WeightHttp | None":
    """The server that the settings ask for, None for none; ``folder`` is the weight store's.

    Raises:
        ConfigError: token, certificate or key are not usable.
    """
    if not table.weights_http_port:
        return None
    return WeightHttp(
        folder / "versions",
        folder / TOKEN_NAME,
        host=table.weights_http_host,
        port=table.weights_http_port,
        certificate=table.weights_http_certificate,
        key=table.weights_http_key,
        damaged=damaged,
    )


class WeightHttp:
    """Serves the store in ``folder``; ``run`` until cancelled. ``damaged`` says which files are no
    longer to be given out."""

    def __init__(
        self,
        folder: Path,
        token_file: Path,
        *,
        host: str,
        port: int,
        certificate: str = "",
        key: str = "",
        damaged: Callable[[str], bool] = lambda digest: False,
        max_connections: int = MAX_CONNECTIONS,
        max_transfers: int = MAX_TRANSFERS,
    ) -> None:
        """Blocks a moment.

        Raises:
            ConfigError: token, certificate or key are not usable.
            StoreError: there is no such folder.
        """
        self._reader = StoreReader(folder)
        self._token = load_token(token_file).encode()
        tls = tls_context(Path(certificate), Path(key), _SETTING) if certificate else None
        self._host, self._asked_port = host, port
        self._damaged = damaged
        self._max_transfers = max_transfers
        self._transfers = 0
        self._reading = asyncio.Lock()
        self.counters: Counter[str] = Counter()
        self.listener = HttpListener(
            self._handle,
            host=host,
            tls=tls,
            max_connections=max_connections,
            counters=self.counters,
            setting=f"{_SETTING}port",
        )
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Where it listens, once it does."""

    async def run(self) -> None:
        """Raises ConfigError when the address cannot be used."""

        def listening(port: int) -> None:
            self.port.set_result(port)
            _log.info("weight_http.ready", host=self._host, port=port)

        await self.listener.run([self._asked_port], listening)

    # ---- requests -----------------------------------------------------------------------------

    async def _handle(self, request: "web.BaseRequest") -> "web.StreamResponse":
        from aiohttp import web

        self.listener.heard(request.protocol)
        try:
            self._check(request)
            if match := _FILE.fullmatch(request.path):
                answer: web.StreamResponse = await self._counted(self._file(request, match[1]))
                return answer
            if request.path == "/v1/policies":
                return json_response(await self._counted(self._read(self._policies)))
            if match := _VERSIONS.fullmatch(request.path):
                policy, number, signed = match.groups()
                if number is None:
                    return json_response(await self._counted(self._read(self._versions, policy)))
                found = await self._counted(self._read(self._version, policy, int(number), signed))
                if isinstance(found, bytes):
                    return web.Response(body=found, content_type="application/msgpack")
                return json_response(found)
            raise HttpRefused(404, "http.not_found", "there is nothing under this path")
        except HttpRefused as refused:
            self.counters[refused.code] += 1
            return refused.response()

    def _check(self, request: "web.BaseRequest") -> None:
        if not same_secret(bearer(request), self._token):
            raise HttpRefused(
                401,
                "http.unauthorised",
                "send the header Authorization: Bearer TOKEN; the token is `token` in "
                f"{TOKEN_NAME} of the weight store's folder",
                **{"WWW-Authenticate": "Bearer"},
            )
        if request.method not in ("GET", "HEAD"):
            raise HttpRefused(405, "http.method", "only GET and HEAD", Allow="GET, HEAD")

    async def _counted(self, answer: Coroutine[Any, Any, Any]) -> Any:
        if self._transfers >= self._max_transfers:
            answer.close()
            raise HttpRefused(
                503, "http.busy", "too many transfers; try again", **{"Retry-After": RETRY_AFTER}
            )
        self._transfers += 1
        try:
            return await answer
        finally:
            self._transfers -= 1

    async def _read(self, call: Callable[..., Any], *args: Any) -> Any:
        """One at a time in a thread: the reader belongs to one."""
        async with self._reading:
            try:
                return await asyncio.to_thread(call, *args)
            except FarflowError as error:
                if isinstance(error.__cause__, OSError):
                    raise HttpRefused(
                        503, error.code, "the store's disk does not answer"
                    ) from error
                raise HttpRefused(404, "http.not_found", str(error)) from error

    # ---- what is there (in a thread) ----------------------------------------------------------

    def _policies(self) -> dict[str, Any]:
        shelves = [shelf for shelf in self._reader.shelves() if shelf.versions]
        heads = {shelf.policy: max(shelf.versions) for shelf in shelves}
        return {"policies": [{"policy": name, "head": head} for name, head in heads.items()]}

    def _shelf(self, policy: str) -> PolicyShelf:
        known = self._reader.policies()
        if policy not in known:
            text = f"no policy {policy!r}; known: {', '.join(known) or 'none'}"
            raise HttpRefused(404, "http.not_found", text)
        return self._reader.shelf(policy)

    def _versions(self, policy: str) -> dict[str, Any]:
        rows = version_rows(self._shelf(policy))
        return {"policy": policy, "versions": rows}

    def _version(self, policy: str, number: int, signed: str | None) -> dict[str, Any] | bytes:
        shelf = self._shelf(policy)
        stored = shelf.version(number)
        if signed:
            return msgspec.msgpack.encode(stored.signed)
        made = {
            "snapshot": self._offered(shelf, shelf.snapshots.get(number)),
            "composites": [
                {"base": base, "files": self._offered(shelf, composite)}
                for (base, version), composite in sorted(shelf.composites.items())
                if version == number
            ],
        }
        manifest = manifestjson_response(stored.manifest)
        return {**manifest, "key_id": stored.signed.key_id, "made_by_store": made}

    def _offered(self, shelf: PolicyShelf, stored: Any) -> list[dict[str, Any]]:
        entries = () if stored is None else stored.manifest.files
        return [
            entryjson_response(entry)
            for entry in entries
            if not self._damaged(entry.digest) and shelf.blob(entry.digest).is_file()
        ]

    # ---- files --------------------------------------------------------------------------------

    async def _file(self, request: "web.BaseRequest", digest: str) -> "web.StreamResponse":
        path = await self._read(self._reader.file, digest)
        try:
            if path is None or self._damaged(digest):
                raise FileNotFoundError(digest)
            descriptor = await asyncio.to_thread(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            text = "no such file, or it is no longer kept; ask for the newest version's files"
            raise HttpRefused(404, "http.not_found", text) from None
        try:
            return await self._send(request, digest, descriptor)
        finally:
            await asyncio.to_thread(os.close, descriptor)

    async def _send(
        self, request: "web.BaseRequest", digest: str, descriptor: int
    ) -> "web.StreamResponse":
        from aiohttp import web

        size = os.fstat(descriptor).st_size
        etag = f'"{digest}"'
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": "private, immutable"}
        if etag in _listed(request.headers.get("If-None-Match", "")):
            return web.Response(status=304, headers=headers)
        start, end, status = 0, size, 200
        if "Range" in request.headers and request.headers.get("If-Range", etag) == etag:
            start, end = _range(request, size)
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        response = web.StreamResponse(status=status, headers=headers)
        response.content_type = "application/octet-stream"
        response.content_length = end - start
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # a reader that has left needs no traceback
            while request.method == "GET" and start < end:
                piece = await asyncio.to_thread(
                    os.pread, descriptor, min(PIECE_BYTES, end - start), start
                )
                if not piece:
                    raise StoreError(f"{digest}: the file is shorter than it was")
                start += len(piece)
                if not await write(response, request, piece):
                    self.counters["stalled"] += 1
                    break
            await response.write_eof()
        return response


def _listed(header: str) -> set[str]:
    return {part.strip().removeprefix("W/") for part in header.split(",")}


def _range(request: "web.BaseRequest", size: int) -> tuple[int, int]:
    """First byte and the one behind the last of the one range that was asked for."""
    try:
        last = _NO_BYTES.fullmatch(request.headers["Range"])
        asked = slice(size, size) if last else request.http_range
    except ValueError:
        asked = slice(size, size)
    start = size if asked.start is None else asked.start
    start = max(0, size + start) if start < 0 else start
    end = size if asked.stop is None else min(asked.stop, size)
    if start >= end:
        unsatisfied = {"Content-Range": f"bytes */{size}"}
        raise HttpRefused(416, "http.range", "one range inside the file, please", **unsatisfied)
    return start, end


def entryjson_response(entry: FileEntry) -> dict[str, Any]:
    """A file as JSON has it: digests in hexadecimal."""
    fields: Mapping[str, Any] = msgspec.structs.asdict(entry)
    return {**fields, "chunk_digests": [digest.hex() for digest in entry.chunk_digests]}


def manifestjson_response(manifest: VersionManifest) -> dict[str, Any]:
    """A manifest as JSON has it."""
    fields: Mapping[str, Any] = msgspec.structs.asdict(manifest)
    return {**fields, "files": [entryjson_response(entry) for entry in manifest.files]}
