"""Fetching the bodies of a granted batch.

What always holds: at most ``window_bytes`` of bodies are asked for and not yet here (one body may
be larger than that), and at most ``max_open`` of them, as a link holds few messages; a body that
does not come is asked for again; a job is given up only for what was learnt about its body, never
because the trajectory log is slow or away; a request that never left is made again soon, less and
less often while the link takes none; a body that was checked is kept when the batch is granted
again.

    waiting -> asked -> checking -> ready
       ^          ^        |  damaged: asked again, at most ``tries`` times
       +- unsent -+--------+-> bad (missing, damaged, other than its summary)
"""

from collections.abc import Sequence
from enum import Enum

from cloud_trainer.core.backoff import Backoff
from transport.messages import BodyRequest, GroupRef

MISSING = "body.missing"
DAMAGED = "body.damaged"
OTHER = "body.other"
UNTRAINABLE = "body.untrainable"


class _State(Enum):
    WAITING = "waiting"
    ASKED = "asked"
    CHECKING = "checking"
    READY = "ready"
    BAD = "bad"


class _Body:
    __slots__ = ("code", "due", "ref", "state", "tries")

    def __init__(self, ref: GroupRef) -> None:
        self.ref = ref
        self.state = _State.WAITING
        self.due = 0.0
        self.tries = 0
        self.code = ""


class BatchFetch:
    """The bodies of one step's batch, by digest."""

    def __init__(
        self,
        *,
        window_bytes: int,
        max_open: int,
        timeout_s: float,
        missing_retry_s: float,
        tries: int,
        resend: Backoff,
    ) -> None:
        self._window_bytes = window_bytes
        self._max_open = max_open
        self._timeout_s = timeout_s
        self._missing_retry_s = missing_retry_s
        self._tries = tries
        self._resend = resend
        self._bodies: dict[str, _Body] = {}
        self._heard: float | None = None
        self._polled = 0.0

    def adopt(self, refs: Sequence[GroupRef]) -> tuple[str, ...]:
        """Fetch exactly these from now on; returns the digests that are not wanted any more."""
        wanted = {ref.digest: ref for ref in refs}
        gone = tuple(digest for digest in self._bodies if digest not in wanted)
        for digest in gone:
            del self._bodies[digest]
        for digest, ref in wanted.items():
            known = self._bodies.get(digest)
            if known is None or known.ref != ref:
                self._bodies[digest] = _Body(ref)
        return gone

    def arrived(self, digest: str, found: bool, now: float) -> bool:
        """A reply came; true when it has a body that is now to be checked."""
        self._heard = now
        self._resend.reset()
        body = self._bodies.get(digest)
        if body is None or body.state not in (_State.ASKED, _State.WAITING):
            return False
        if found:
            body.state = _State.CHECKING
            return True
        self._failed(body, MISSING, now + self._missing_retry_s)
        return False

    def checked(
        self, digest: str, *, code: str, job: str, size_bytes: int, tokens: int, now: float
    ) -> bool:
        """A check ended; true when the body is good."""
        body = self._bodies.get(digest)
        if body is None or body.state is not _State.CHECKING:
            return False
        if code:
            self._failed(body, DAMAGED, now)
        elif job != body.ref.job or size_bytes != body.ref.size_bytes:
            body.state, body.code = _State.BAD, OTHER
        elif tokens == 0:
            body.state, body.code = _State.BAD, UNTRAINABLE
        else:
            body.state = _State.READY
        return body.state is _State.READY

    def _failed(self, body: _Body, code: str, due: float) -> None:
        body.tries += 1
        if body.tries >= self._tries:
            body.state, body.code = _State.BAD, code
        else:
            body.state, body.due = _State.WAITING, due

    def poll(self, now: float) -> BodyRequest | None:
        """What to ask for now."""
        self._polled = now
        for body in self._bodies.values():
            if body.state is _State.ASKED and body.due <= now:
                body.state, body.due = _State.WAITING, now
        sizes = self._open_sizes()
        open_count, open_bytes = len(sizes), sum(sizes)
        digests = []
        for digest, body in self._bodies.items():
            if body.state is not _State.WAITING or body.due > now:
                continue
            fits = open_bytes + body.ref.size_bytes <= self._window_bytes
            if open_count and not (fits and open_count < self._max_open):
                break
            open_count += 1
            open_bytes += body.ref.size_bytes
            body.state, body.due = _State.ASKED, now + self._timeout_s
            digests.append(digest)
        if not digests:
            return None
        if self._heard is None:
            self._heard = now
        return BodyRequest(digests=tuple(digests))

    def not_sent(self, digests: Sequence[str], now: float) -> None:
        """The request for these never left. Nothing more is asked for until it is made again,
        as the link would not take that either; for what was never asked, nobody is waiting."""
        due = now + self._resend.next_s()
        for digest, body in self._bodies.items():
            if body.state is _State.ASKED and digest in digests:
                body.state, body.due = _State.WAITING, due
            elif body.state is _State.WAITING:
                body.due = max(body.due, due)
        if self.silent_since() is None:
            self._heard = None

    def ask_again(self) -> None:
        """The link was made anew: whatever was asked on the old one is not coming."""
        self._heard = None
        for body in self._bodies.values():
            if body.state is _State.ASKED:
                body.state, body.due = _State.WAITING, 0.0

    def silent_since(self) -> float | None:
        """When the log was last heard of while it owes us bodies, None when it owes nothing."""
        if any(body.state is _State.ASKED for body in self._bodies.values()):
            return self._heard
        return None

    def next_deadline(self) -> float | None:
        """When ``poll`` has something to do again. What the last ``poll`` left waiting is held by
        the window, and goes on when an answer or a check makes room."""
        dues = [
            body.due
            for body in self._bodies.values()
            if body.state is _State.ASKED
            or (body.state is _State.WAITING and body.due > self._polled)
        ]
        return min(dues, default=None)

    def bad(self) -> dict[str, str]:
        """Job and code of every body that was given up."""
        return {b.ref.job: b.code for b in self._bodies.values() if b.state is _State.BAD}

    @property
    def complete(self) -> bool:
        return all(body.state is _State.READY for body in self._bodies.values())

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(self._bodies)

    def _open_sizes(self) -> list[int]:
        return [
            body.ref.size_bytes
            for body in self._bodies.values()
            if body.state in (_State.ASKED, _State.CHECKING)
        ]
