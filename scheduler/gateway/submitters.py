"""Submitters of the HTTP interface: each of their tokens has a key, and so a list of results, of
its own."""

from pathlib import Path
from typing import NamedTuple

from scheduler.gateway.access import submitter_key
from transport.asking import Asking
from transport.links import Network
from transport.runtime.settings import TransportConfig


class Connections(NamedTuple):
    """One each: a request for results that waits must not hold up a submission."""

    jobs: Asking
    results: Asking


class Submitters:
    """The connections of submitters' tokens, made when they are first used."""

    def __init__(self, transport: TransportConfig, network: Network, answer_s: float) -> None:
        self._transport = transport
        self._network = network
        self._answer_s = answer_s
        self._open: dict[str, Connections] = {}

    def of(self, token: str) -> Connections:
        """Raises ConfigError when the token's key is gone."""
        found = self._open.get(token)
        if found is None:
            key = submitter_key(Path(self._transport.keys), token)
            found = self._open[token] = Connections(self._asking(key), self._asking(key))
        return found

    async def keep(self, tokens: set[str]) -> None:
        """Hang up for everybody else."""
        for name in [name for name in self._open if name not in tokens]:
            for asking in self._open.pop(name):
                await asking.close()

    async def close(self) -> None:
        """Hang up for all."""
        await self.keep(set())

    def _asking(self, key: Path) -> Asking:
        return Asking(self._transport, key, answer_s=self._answer_s, network=self._network)
