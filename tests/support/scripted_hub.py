"""A plane's hub that answers by a function, for those who ask (operators, submitters)."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from transport.errors import LinkClosed
from transport.keys import create_keys
from transport.links import Network
from transport.messages import Message, Plane
from transport.plane_hub import PlaneHub
from transport.runtime.clock import SystemClock
from transport.runtime.settings import TransportConfig

Answer = Callable[[str, Message], list[tuple[Message, list[bytes]]]]
"""The key's name and what it said -> answers with their payloads; [] for silence."""


class ScriptedHub:
    """Listens on ``plane`` until closed; keeps what it heard."""

    def __init__(
        self, folder: Path, network: Network, answer: Answer, plane: Plane = Plane.CONTROL
    ) -> None:
        self.answer = answer
        self.heard: list[tuple[str, Message]] = []
        self.keys = folder / "keys"
        create_keys(self.keys, operators=["operator"], submitters=["submitter"])
        self._hub = PlaneHub(
            network,
            plane,
            TransportConfig(keys=str(self.keys)),
            port=0,
            port_file=folder / f"{plane.value}-port",
            clock=SystemClock(),
        )
        self.port = self._hub.port
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            try:
                arrivals = await self._hub.recv()
            except LinkClosed:
                return
            for arrival in arrivals:
                self.heard.append((arrival.peer.name, arrival.message))
                for message, payload in self.answer(arrival.peer.name, arrival.message):
                    self._hub.send(arrival.route, message, payload)

    async def close(self) -> None:
        await self._hub.close()
        await self._task
