"""Offers the demand for slots to a command or webhook of the operator's, with a cool-down.

The hook gets one JSON object, ``{"demand": [DemandStatus...], "wall_s": seconds}``, on its standard
input or as the body of a POST. It is called when the slots that would help have changed by more
than a quarter (or begun or ceased to be wanted at all), and not again before ``cool_down_s``.

What always holds: one call at a time, ended after ``timeout_s``; a hook that fails is logged and
tried again after the cool-down, and nothing else depends on it; the command runs without a shell.
It leads a process group of its own, and when it ends, or is ended, what is left of that group is
killed: what is to go on after the call is started with ``setsid``.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec
import structlog
from msgspec import Meta

from transport.errors import FarflowError
from transport.runtime.clock import Clock
from transport.runtime.commands import run_command
from transport.runtime.settings import PositiveSeconds, Seconds
from transport.status import DemandStatus

LOOK_S: Final = 15.0
WORTH_TELLING: Final = 0.25
MAX_OUTPUT: Final = 2000

_log = structlog.get_logger()


class AutoscalerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[scheduler.autoscaler]``. ``command`` is a program and its arguments, ``webhook`` an
    http(s) address; at most one of them. Fewer than ``least_slots`` are not worth a call."""

    command: tuple[str, ...] = ()
    webhook: str = ""
    cool_down_s: Seconds = 300.0
    timeout_s: PositiveSeconds = 30.0
    least_slots: Annotated[int, Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        if self.command and self.webhook:
            raise ValueError("command and webhook exclude each other; set one of them")
        if self.webhook and not self.webhook.startswith(("http://", "https://")):
            raise ValueError(f"webhook = {self.webhook!r} is no http or https address")

    @property
    def enabled(self) -> bool:
        return bool(self.command or self.webhook)


class HookFailed(FarflowError):
    """The operator's hook did not do its work."""

    code = "autoscaler.hook_failed"


class CallRule:
    """When to call; decides from its arguments alone."""

    def __init__(self, cool_down_s: float, least_slots: int) -> None:
        self._cool_down_s = cool_down_s
        self._least_slots = least_slots
        self._told: dict[str, int] = {}
        self._called_s: float | None = None

    def due(self, demand: Sequence[DemandStatus], now: float) -> bool:
        """Whether ``demand`` is news, and enough time has passed; if so it counts as told."""
        if self._called_s is not None and now < self._called_s + self._cool_down_s:
            return False
        wanted = {d.run: d.more_slots for d in demand if d.more_slots >= self._least_slots}
        names = sorted({*wanted, *self._told})
        if not any(_changed(self._told.get(name, 0), wanted.get(name, 0)) for name in names):
            return False
        self._told, self._called_s = wanted, now
        return True

    def failed(self) -> None:
        """The call did not arrive: what it said counts as not told."""
        self._told = {}


class Autoscaler:
    """Looks at the demand and calls the hook."""

    def __init__(
        self, table: AutoscalerTable, clock: Clock, demand: Callable[[], Sequence[DemandStatus]]
    ) -> None:
        self._table = table
        self._clock = clock
        self._demand = demand
        self._rule = CallRule(table.cool_down_s, table.least_slots)
        self.calls = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Call the hook if that is due."""
        demand = self._demand()
        if not self._rule.due(demand, self._clock.monotonic_s()):
            return
        body = msgspec.json.encode({"demand": demand, "wall_s": self._clock.wall_s()})
        self.calls += 1
        try:
            async with asyncio.timeout(self._table.timeout_s):
                await (self._execute(body) if self._table.command else self._post(body))
        except (HookFailed, OSError, TimeoutError) as error:
            self._rule.failed()
            reason = str(error) or f"no end within {self._table.timeout_s:g} s"
            _log.warning("autoscaler.failed", reason=reason[:MAX_OUTPUT])
        else:
            slots = sum(one.more_slots for one in demand)
            _log.info("autoscaler.called", more_slots=slots)

    async def _execute(self, body: bytes) -> None:
        command = self._table.command
        status, said = await run_command(command, body=body, stdout=asyncio.subprocess.DEVNULL)
        if status:
            text = said.decode(errors="replace").strip()[-MAX_OUTPUT:]
            raise HookFailed(f"{command[0]}: exit status {status}: {text}")

    async def _post(self, body: bytes) -> None:
        import aiohttp

        headers = {"Content-Type": "application/json"}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(self._table.webhook, data=body, headers=headers) as answer,
            ):
                if answer.status >= 300:
                    raise HookFailed(f"{self._table.webhook}: HTTP status {answer.status}")
        except aiohttp.ClientError as error:
            raise HookFailed(f"{self._table.webhook}: {error}") from error


def _changed(before: int, now: int) -> bool:
    if (before == 0) != (now == 0):
        return True
    return abs(now - before) > WORTH_TELLING * before
