"""A real Mosquitto on this machine, and somebody who listens to it."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiomqtt
import pytest
from service_world import WAIT_S

MOSQUITTO = shutil.which("mosquitto") or "/usr/sbin/mosquitto"
NEEDED = os.environ.get("FARFLOW_TESTS_NEED_MOSQUITTO") == "1"
needs_mosquitto = pytest.mark.skipif(
    not NEEDED and not os.access(MOSQUITTO, os.X_OK),
    reason="no mosquitto (FARFLOW_TESTS_NEED_MOSQUITTO=1 makes that a failure)",
)


class Broker:
    """``more`` are further lines of its configuration."""

    def __init__(self, folder: Path, more: str = "allow_anonymous true") -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port: int = found.getsockname()[1]
        self._config = folder / "mosquitto.conf"
        self._config.write_text(
            f"listener {self.port} 127.0.0.1\n{more}\npersistence false\nlog_dest none\nuser root\n"
        )
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns once it listens."""
        self._child = await asyncio.create_subprocess_exec(MOSQUITTO, "-c", str(self._config))
        async with asyncio.timeout(WAIT_S):
            while True:
                assert self._child.returncode is None, "mosquitto ended"
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return
                await asyncio.sleep(0.02)

    def signal(self, what: signal.Signals) -> None:
        assert self._child is not None
        self._child.send_signal(what)

    async def kill(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
            await self._child.wait()


@contextlib.asynccontextmanager
async def mosquitto(folder: Path, more: str = "allow_anonymous true") -> AsyncIterator[Broker]:
    broker = Broker(folder, more)
    try:
        await broker.start()
        yield broker
    finally:
        await broker.kill()


class Listener:
    """Everything that a broker says under ``#``: what is kept (by topic) and all that was said."""

    def __init__(self, client: aiomqtt.Client) -> None:
        self.client = client
        self.kept: dict[str, bytes] = {}
        self.said: list[aiomqtt.Message] = []
        self._more = asyncio.Event()

    async def listen(self) -> None:
        async for message in self.client.messages:
            topic, payload = str(message.topic), message.payload
            assert isinstance(payload, bytes)
            self.said.append(message)
            if payload:
                self.kept[topic] = payload
            else:
                self.kept.pop(topic, None)
            self._more.set()

    async def until(self, what: str, condition: Callable[[], bool], within_s: float = WAIT_S):
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            raise AssertionError(f"never: {what}; kept: {self.kept}") from None

    async def is_kept(self, topic: str, wanted: bytes | None = None) -> None:
        await self.until(
            f"{topic} is {wanted}",
            lambda: topic in self.kept and wanted in (None, self.kept[topic]),
        )

    async def shows(self, topic: str, **facts: Any) -> dict[str, Any]:
        """Once the JSON of a topic has these facts."""

        def found() -> dict[str, Any]:
            return json.loads(self.kept.get(topic, b"{}"))

        await self.until(f"{topic}: {facts}", lambda: facts.items() <= found().items())
        return found()

    def replies(self, id: str) -> list[dict[str, Any]]:
        found = [
            json.loads(m.payload)
            for m in self.said
            if str(m.topic).endswith("/reply") and m.payload
        ]
        return [reply for reply in found if reply["id"] == id]

    async def reply(self, id: str, count: int = 1) -> dict[str, Any]:
        """The ``count``-th answer to a command."""
        await self.until(f"answer to {id!r}", lambda: len(self.replies(id)) >= count)
        return self.replies(id)[count - 1]


@contextlib.asynccontextmanager
async def listening(port: int, **more: Any) -> AsyncIterator[Listener]:
    """Begins with what the broker keeps."""
    async with aiomqtt.Client("127.0.0.1", port, **more) as client:
        listener = Listener(client)
        await client.subscribe("#", qos=1)
        task = asyncio.create_task(listener.listen())
        try:
            yield listener
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
