"""Which process speaks with an agent's key, and when another one may take over.

What always holds: while the process that said hello is connected and heard, no other process with
its key gets in; the same process gets in at once over any new connection; another one gets in at
once when the connection of the first is gone, which is what a process that ends leaves behind, and
otherwise once the first has been silent for ``QUIET_HEARTBEATS``: a box that lost its power or its
network waits that long and no longer, which is less than it takes to be counted as lost.

A process is told by ``Hello.process``, drawn at every start. Neither the incarnation nor anything
of the machine would do: boxes made from one image can have both in common.
"""

from typing import Final

from transport.messages import Hello, Refuse

QUIET_HEARTBEATS: Final = 3.0
FIRST_HEARTBEAT_S: Final = 2.0


class _Speaker:
    __slots__ = ("heard_s", "heartbeat_s", "incarnation", "process", "route")

    def __init__(self, route: bytes, hello: Hello, now: float) -> None:
        self.route = route
        self.process = hello.process
        self.incarnation = hello.incarnation
        self.heard_s = now
        self.heartbeat_s = FIRST_HEARTBEAT_S

    def is_process_of(self, hello: Hello) -> bool:
        if self.process and hello.process:
            return self.process == hello.process
        return self.incarnation == hello.incarnation


class Speakers:
    """One entry per agent that has said hello; times are monotonic."""

    def __init__(self) -> None:
        self._speakers: dict[str, _Speaker] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._speakers

    def names(self) -> list[str]:
        return list(self._speakers)

    def other_route(self, name: str, hello: Hello, now: float) -> tuple[bytes, float] | None:
        """The route of another process that was heard a moment ago with this key, and in how many
        seconds it counts as silent; None when the hello may go on."""
        speaker = self._speakers.get(name)
        if speaker is None or speaker.is_process_of(hello):
            return None
        left_s = speaker.heard_s + QUIET_HEARTBEATS * speaker.heartbeat_s - now
        return (speaker.route, left_s) if left_s > 0.0 else None

    def took(self, name: str, route: bytes, hello: Hello, now: float) -> None:
        """This process speaks for ``name`` from now on."""
        self._speakers[name] = _Speaker(route, hello, now)

    def heard(self, name: str, now: float) -> None:
        speaker = self._speakers.get(name)
        if speaker is not None:
            speaker.heard_s = now

    def beats(self, name: str, heartbeat_s: float) -> None:
        """It was told to say something every ``heartbeat_s``."""
        speaker = self._speakers.get(name)
        if speaker is not None:
            speaker.heartbeat_s = heartbeat_s


def duplicate(name: str, retry_s: float) -> Refuse:
    """What the second process with a key hears."""
    return Refuse(
        code="agent.duplicate",
        message=f"another process speaks as {name!r} with this key now: stop one of them, or give"
        " this box a key of its own (`farflow agent enrol` with a fresh folder; for images, a token"
        " with a name prefix and no key in the image)",
        retry_s=retry_s,
    )
