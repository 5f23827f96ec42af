"""A whole scheduler daemon with its gateway, and clients that speak HTTP to it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from deployment import Deployment, deployment
from service_world import WAIT_S, PlaneLink

from scheduler.config import HttpTable, MqttTable
from scheduler.gateway.access import HttpRole, create_token
from scheduler.gateway.service import ADDRESS
from transport.keys import create_keys
from transport.messages import AgentInventory, Hello, Role, Welcome


class GatewayWorld:
    """``tokens`` has one secret by role, as text."""

    def __init__(self, world: Deployment, tokens: dict[str, str]) -> None:
        self.world = world
        self.tokens = tokens
        self.agents: dict[str, PlaneLink] = {}
        self.folder = world.folder / "scheduler"
        self.address_file = self.folder / "gateway" / ADDRESS

    async def address(self, old: str = "") -> str:
        """Where the gateway listens, once it does, at another place than ``old``."""
        async with asyncio.timeout(2 * WAIT_S):
            while True:
                with contextlib.suppress(FileNotFoundError):
                    found = self.address_file.read_text().strip()
                    if found and found != old:
                        return found
                await asyncio.sleep(0.02)

    def audit(self) -> list[dict[str, Any]]:
        lines = (self.folder / "http-audit.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @contextlib.asynccontextmanager
    async def client(self, role: str | None, **more: Any) -> AsyncIterator[aiohttp.ClientSession]:
        """``role`` is one of the roles, a secret, or None for no token."""
        secret = self.tokens.get(role or "", role)
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        base = await self.address()
        async with aiohttp.ClientSession(base, headers=headers, **more) as session:
            yield session

    def token_file(self, name: str) -> Path:
        return self.world.folder / "keys" / "http" / f"{name}.toml"

    async def join(self, agent: str) -> None:
        """An agent says hello."""
        link = self.world.link(agent)
        inventory = AgentInventory(
            slots=2,
            hardware="cpu",
            engine="fake",
            workflows={"single_turn": "x"},
            rewards=("exact",),
        )
        await link.send(Hello(role=Role.AGENT, incarnation=1, build="t", agent=inventory))
        await link.expect(Welcome)
        self.agents[agent] = link


@contextlib.asynccontextmanager
async def gateway_world(
    folder: Path, *, tokens: bool = True, mqtt: MqttTable | None = None, **http: Any
) -> AsyncIterator[GatewayWorld]:
    """A daemon in ``folder`` with ``[http]`` (and ``[mqtt]``) settings; tokens ``look``, ``ops``
    and ``jobs``, made before it starts."""
    names = {"viewer": "look", "operator": "ops", "submitter": "jobs"} if tokens else {}
    table = HttpTable(**{"port": 0, "requests_per_s": 1000.0, **http})
    keys = folder / "keys"
    create_keys(keys)
    secrets = {
        role: await asyncio.to_thread(create_token, keys, name, HttpRole(role))
        for role, name in names.items()
    }
    # Agents that say hello here send no heartbeats after it.
    async with deployment(folder, table, mqtt, lost_after_s=600.0) as world:
        yield GatewayWorld(world, secrets)


async def read_events(
    response: aiohttp.ClientResponse, wanted: str, count: int = 1
) -> list[tuple[int | None, Any]]:
    """The next ``count`` events of a kind from a stream: (id, data)."""
    found: list[tuple[int | None, Any]] = []
    kind, number, data = "", None, ""
    async with asyncio.timeout(WAIT_S):
        while len(found) < count:
            line = (await response.content.readline()).decode()
            assert line, "the stream ended"
            field, _, value = line.rstrip("\n").partition(": ")
            if field == "event":
                kind = value
            elif field == "id":
                number = int(value)
            elif field == "data":
                data = value
            elif not field and kind:
                if kind == wanted:
                    found.append((number, json.loads(data)))
                kind, number, data = "", None, ""
    return found
