"""What a person is shown of an agent."""

import msgspec


class AgentSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a person sees of an agent; ``policies`` are (stage, version)."""

    session: str
    draining: bool
    waiting: int
    running: int
    scoring: int
    spooled: int
    spool_bytes: int
    unacked_bytes: int
    rtt_s: float | None
    clock_offset_s: float | None
    policies: dict[str, tuple[str, int | None]]
    counters: dict[str, int]
