"""The control plane's way in, from a peer's frames to the scheduler's core, without sockets: the
production hub, plane and core, and a link layer that hands over what it is told to.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core_builders import SOLVER, Scene, make_run

from scheduler.control_plane import ControlPlane
from scheduler.core.effects import Effect, Reply, Send
from transport.envelope import LIMITS, decode
from transport.keys import DeploymentKeys, KeyPair, create_keys
from transport.messages import Message, Plane
from transport.plane_hub import PlaneHub
from transport.runtime.clock import ManualClock
from transport.runtime.settings import TransportConfig


class Mouth:
    """A link layer's hub: keeps what is sent, by route."""

    port = 7700
    endpoint = "tcp://127.0.0.1:7700"
    peers = 0
    dropped = handshake_failures = hung_up = 0
    last_failure = ""

    def __init__(self) -> None:
        self.sent: dict[bytes, list[list[bytes]]] = {}

    def hub(self, *_: Any, **__: Any) -> "Mouth":
        return self

    def send(self, route: bytes, frames: Sequence[bytes]) -> None:
        self.sent.setdefault(route, []).append(list(frames))

    def reachable(self, route: bytes) -> bool:
        return True


def make_deployment(folder: Path) -> DeploymentKeys:
    """A key of every role."""
    return create_keys(
        folder,
        agents=["a", "b", "healthy"],
        trainers=[SOLVER],
        viewers=["viewer"],
        relays=["relay"],
        submitters=["submitter"],
    )


def pairs(keys: DeploymentKeys) -> dict[str, KeyPair]:
    """Every key that is no server's, by name."""
    groups = (keys.services, keys.operators, keys.viewers, keys.agents, keys.relays)
    found = {name: pair for group in groups for name, pair in group.items()}
    found |= {pair.name: pair for pair in keys.trainers.values()}
    return found | dict(keys.submitters)


class Gate:
    """One scheduler behind one hub of ``plane``; only the control plane has a core behind it."""

    def __init__(self, folder: Path, keys: DeploymentKeys, plane: Plane = Plane.CONTROL) -> None:
        self.plane = plane
        self.mouth = Mouth()
        self.clock = ManualClock()
        self.hub = PlaneHub(
            self.mouth,
            plane,
            TransportConfig(keys=str(folder)),
            port=7700,
            port_file=folder / "port",
            clock=self.clock,
        )
        self.control = ControlPlane(self.hub, self.clock)
        self.scene = Scene()
        self.scene.submitted(make_run())
        self.keys = pairs(keys)

    def push(self, peer: str, frames: list[bytes], route: bytes | None = None) -> str:
        """What becomes of frames that the key of ``peer`` sent: ``taken``, or a counter's name."""
        before = dict(self.hub.counters) | dict(self.control.counters)
        sent = sum(len(frames) for frames in self.mouth.sent.values())
        came_from = peer.encode() if route is None else route
        arrival = self.hub._check(came_from, self.keys[peer].public_key, frames)
        event = None if arrival is None else self.control.event(arrival)
        if event is not None:
            self.execute(self.scene.feed(event))
            return "taken"
        after = dict(self.hub.counters) | dict(self.control.counters)
        counted = [name for name, value in after.items() if value > before.get(name, 0)]
        answered = sum(len(frames) for frames in self.mouth.sent.values()) > sent
        return counted[0] if counted else "answered" if answered else "lost without a trace"

    def execute(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.control.send(effect.peer, effect.message)
            elif isinstance(effect, Reply):
                self.control.reply(effect.request, effect.message)

    def heard(self, route: str | bytes) -> list[Message]:
        """What was sent to a route, and forget it."""
        name = route.encode() if isinstance(route, str) else route
        return [decode(frames, LIMITS[self.plane])[0] for frames in self.mouth.sent.pop(name, [])]
