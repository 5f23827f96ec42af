"""A scheduler of the simulated world with the production store on disk, which may die at any
instant.

What always holds: as in the daemon, changes are committed before any effect that follows from them
leaves, one commit at a time, and what was decided meanwhile goes with the next; every message that
leaves has been through the codec; the core's clock stands still while the process is down. A new
life opens the files as they were when the last one died, so a commit that was being written is
there as a whole or not at all, and what is read must equal what was committed, row by row.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from scheduler.core import effects as do
from scheduler.core.events import Event, FromOperator, FromService, ItemsProduced, Tick
from scheduler.core.machine import SchedulerCore
from scheduler.core.settings import CoreSettings
from scheduler.offers import gathered, prompts_wanted
from scheduler.store import FILE_NAME, PROMPT_TABLE, Change, SchedulerStore
from sim.actors.names import LOG, SCHEDULER, STORE
from sim.kernel import Alarm, Kernel
from sim.network import Network
from sim.workload import make_items
from transport.envelope import LIMITS, decode, encode
from transport.errors import InvariantViolation
from transport.messages import Message, Plane

Death = Literal["before commit", "torn commit", "after commit"]
FromPeer = Callable[[str, Message, Any], Event]

COMMIT_S: Final = 0.004
ITEMS_S: Final = 0.002


class DurableScheduler:
    """``problems`` are promises of store and rows that were broken; ``on_effect`` sees each effect
    as it leaves."""

    def __init__(
        self,
        folder: Path,
        settings: CoreSettings,
        *,
        kernel: Kernel,
        network: Network,
        seed: int,
        check_every: int,
        takes_many: Callable[[str], bool],
        on_effect: Callable[[do.Effect], None],
    ) -> None:
        self.core: SchedulerCore
        self.alive = False
        self.lives = 0
        self.handled = 0
        self.checked = 0
        self.commits = 0
        self.torn = 0
        self.restored_rows = 0
        self.ended: dict[str, str] = {}
        self.problems: list[str] = []
        self._folder = folder
        self._settings = settings
        self._kernel = kernel
        self._network = network
        self._rng = random.Random(seed)
        self._check_every = check_every
        self._takes_many = takes_many
        self._on_effect = on_effect
        self._peers: dict[str, FromPeer] = {}
        self.know(LOG, lambda name, message, _: FromService(name, message))
        self.know(STORE, lambda name, message, _: FromService(name, message))
        self._store: SchedulerStore
        self._committed: dict[tuple[str, str], bytes] = {}
        self._prompts: dict[str, bytes] = {}
        self._start_s = 0.0
        self._effects: list[do.Effect] = []
        self._flying: tuple[list[Change], list[do.Effect], float] | None = None
        self._doom: tuple[Callable[[], None], Death] | None = None
        self._alarm = Alarm(kernel, self._tick)

    def know(self, name: str, from_peer: FromPeer) -> None:
        """Whose key it is."""
        self._peers[name] = from_peer

    # ---- life ----------------------------------------------------------------------------------

    def start(self, _: object = None) -> None:
        """Begin a life with the files of the last one."""
        self.lives += 1
        self.alive = True
        self._store = SchedulerStore.open(self._path(self.lives), "process-crash")
        rows = list(self._store.rows())
        if self._store.term != self.lives:
            self.problems.append(f"life {self.lives} got term {self._store.term}")
        self._compare("rows on disk", {(table, key): value for table, key, value in rows})
        missing = [k for k in self._prompts if not self._store.prompts([k])]
        if missing:
            self.problems.append(f"life {self.lives}: prompts {missing[:3]} are gone")
        self.restored_rows += len(rows)
        self.core = SchedulerCore(
            self._settings,
            term=self._store.term,
            rng=random.Random(self._rng.random()),
            build="sim",
            rows=rows,
            now=self._store.now,
        )
        dump = {(table, key): value for table, key, value in self.core.dump()}
        self._compare("the new core", dump)
        self._start_s = self._kernel.now - self._store.now
        self.feed(Tick())

    def doom(self, gone: Callable[[], None], how: Death) -> None:
        """``die`` in the middle of the next commit, then call ``gone``."""
        self._doom = (gone, how)

    def die(self, how: Death) -> None:
        """End at once. ``after commit``: everything decided is on disk and no effect of it has
        left; ``torn commit``: the file ends within the last transaction; ``before commit``: what
        was decided since the last commit is gone."""
        changes, now = self._undone()
        log = self._store.path.with_name(FILE_NAME + "-wal")
        torn: bytes | None = None
        if how == "after commit":
            # Nothing is left to be written: what is in memory must be what is on disk.
            self._commit(changes, now)
            dump = {(table, key): value for table, key, value in self.core.dump()}
            self._compare("memory at the end", dump)
        elif how == "torn commit" and changes:
            before = log.read_bytes()
            self._store.commit(changes, now)
            torn = self._torn(before, log.read_bytes())
            self.torn += 1
        self._copy(torn)
        self._store.close()
        shutil.rmtree(self._path(self.lives))
        self.alive = False
        self._flying = None
        self._effects = []
        self._alarm.set(None)

    def close(self) -> None:
        self._store.close()

    def _path(self, life: int) -> Path:
        return self._folder / f"life-{life}"

    def _torn(self, before: bytes, after: bytes) -> bytes:
        """A write-ahead log in the middle of being changed; it may have been begun anew."""
        both = min(len(before), len(after))
        changed = np.frombuffer(before[:both], np.uint8) != np.frombuffer(after[:both], np.uint8)
        places = np.flatnonzero(changed)
        first = int(places[0]) if places.size else both
        last = len(after) - 1 if len(after) > both else int(places[-1])
        cut = self._rng.randint(first, last)
        return after[:cut] + before[cut:]

    def _copy(self, log: bytes | None) -> None:
        """The files as they are, for the next life; with another write-ahead ``log`` if given."""
        target = self._path(self.lives + 1)
        target.mkdir(mode=0o700)
        for name in (FILE_NAME, FILE_NAME + "-wal"):
            content = self._store.path.with_name(name).read_bytes()
            if log is not None and name.endswith("-wal"):
                content = log
            (target / name).write_bytes(content)

    def _compare(self, what: str, found: dict[tuple[str, str], bytes]) -> None:
        if found == self._committed:
            return
        keys = sorted(found.keys() | self._committed.keys())
        wrong = [key for key in keys if found.get(key) != self._committed.get(key)]
        self.problems.append(f"life {self.lives}: {what} differs from what was committed: {wrong}")

    # ---- deciding ------------------------------------------------------------------------------

    def receive(self, source: str, message: Message, extra: object) -> None:
        self.feed(self._peers[source](source, message, extra))

    def feed(self, event: Event) -> None:
        """Let the core handle an event; what follows from it leaves after the commit."""
        if not self.alive:
            return
        self._handle(event, self._now())

    def _handle(self, event: Event, now: float) -> None:
        self._effects += self.core.handle(event, now)
        self.handled += 1
        if self.handled % self._check_every == 0:
            self.core.check()
            self.checked += 1
        self._commit_soon()
        deadline = self.core.next_deadline()
        self._alarm.set(None if deadline is None else deadline + self._start_s)

    def _now(self) -> float:
        return self._kernel.now - self._start_s

    def _tick(self) -> None:
        due_s = self.core.next_deadline()
        if self.alive and due_s is not None:
            # The difference of two clocks is rounded: it may be just short of the deadline.
            now = self._now()
            self._handle(Tick(), due_s if 0.0 < due_s - now < 1e-6 else now)

    def _commit_soon(self) -> None:
        if self._flying is not None:
            return
        changes = self.core.take_changes()
        effects, self._effects = self._effects, []
        if not changes and not prompts_wanted(effects):
            self._leave(effects, {})
            return
        self._flying = (changes, effects, self._now())
        self._kernel.after(COMMIT_S, self._durable, self.lives)

    def _durable(self, life: int) -> None:
        if self._flying is None or life != self.lives or not self.alive:
            return
        if self._doom is not None:
            (gone, how), self._doom = self._doom, None
            self.die(how)
            gone()
            return
        changes, effects, now = self._flying
        self._flying = None
        self._commit(changes, now)
        self._leave(effects, self._store.prompts(prompts_wanted(effects)))
        if self.alive:
            self._commit_soon()

    def _undone(self) -> tuple[list[Change], float]:
        """All that was decided since the last commit."""
        changes = [] if self._flying is None else list(self._flying[0])
        return changes + self.core.take_changes(), self._now()

    def _commit(self, changes: list[Change], now: float) -> None:
        self._store.commit(changes, now)
        self.commits += 1
        self._applied(changes)

    def _applied(self, changes: list[Change]) -> None:
        for table, key, value in changes:
            if table == PROMPT_TABLE:
                self._prompts.pop(key, None)
                if value is not None:
                    self._prompts[key] = value
            elif value is None:
                self._committed.pop((table, key), None)
            else:
                self._committed[table, key] = value

    # ---- effects -------------------------------------------------------------------------------

    def _leave(self, effects: list[do.Effect], prompts: dict[str, bytes]) -> None:
        for effect in gathered(effects, prompts, self._takes_many):
            match effect:
                case do.Send(peer=peer, message=message):
                    effect = do.Send(peer, self._recoded(message))
                    self._network.send(SCHEDULER, peer, effect.message)
                case do.Reply(peer=peer, message=message, request=request):
                    self._network.send(SCHEDULER, peer, self._recoded(message), extra=request)
                case do.ProduceItems():
                    self._kernel.after(ITEMS_S, self._produced, (self.lives, effect))
                case do.RunEnded(run=run, reason=reason):
                    self.ended[run] = reason
                case _:
                    pass
            self._on_effect(effect)

    def _recoded(self, message: Message) -> Message:
        """As it arrives: stored items and packed offers become what the peer reads."""
        return decode(encode(message), LIMITS[Plane.CONTROL])[0]

    def _produced(self, asked: tuple[int, do.ProduceItems]) -> None:
        life, wanted = asked
        if life == self.lives:
            items = make_items(wanted.start, wanted.count)
            made = ItemsProduced(wanted.run, wanted.kind, wanted.start, items, wanted.evaluation)
            self.feed(made)

    # ---- the end -------------------------------------------------------------------------------

    def leaks(self) -> list[str]:
        """What should be gone once every run has ended and everybody was left in peace."""
        ctx = self.core._ctx
        tables = ctx.tables
        found = {
            "jobs": list(tables.jobs),
            "leases": list(ctx.leases),
            "loads": [name for name, live in ctx.agents.items() if live.load],
            "held leases": [name for name, live in ctx.agents.items() if live.leases],
            "releases": list(tables.releases),
            "outcomes": list(tables.outcomes),
            "prompts": list(self._prompts),
            "bodies": list(ctx.bodies),
            "open external jobs": [name for name, s in ctx.submitters.items() if s.open],
            "waiting requests": [n for n, w in ctx.waiting.items() if w.kind != "results"],
            "timers": [
                (kind, id)
                for kind, id in ctx.timers._due
                if kind in ("attempt", "job", "expire", "produce", "trainer", "release")
            ],
            "uncommitted": [] if self._flying is None else [1],
        }
        if ctx.external_open or ctx.external_characters:
            raise InvariantViolation("external jobs are counted and there are none")
        return [f"{what}: {left[:5]}" for what, left in found.items() if left]


def operator(name: str, message: Message, extra: object) -> FromOperator:
    """What an operator or submitter says is a request with a number."""
    assert isinstance(extra, int)
    return FromOperator(name, extra, message)
