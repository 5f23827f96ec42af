"""The weights on an agent's disk and in its engine, modelled: what is fetched takes the network's
time, what is swapped in pauses the engine; nothing is verified because nothing is damaged.
"""

from typing import TYPE_CHECKING, Protocol

import msgspec

from edge_agent.core import effects as do
from edge_agent.core import events as on
from sim.actors.engine import Engine
from sim.actors.modelled import ModelledPlan
from sim.actors.names import STORE
from sim.kernel import Kernel
from sim.ledger import Ledger
from sim.network import Flow, Network
from sim.workload import Workload, make_digest
from transport.messages import VersionRef, WeightsPlan

if TYPE_CHECKING:
    from collections.abc import Callable


class Life(Protocol):
    """Whose weights they are."""

    name: str
    alive: bool

    @property
    def lives(self) -> int: ...

    def feed(self, event: on.Event) -> None: ...

    def later(self, delay_s: float, event: on.Event) -> None: ...


class WeightCopies:
    """Committed copies outlive the process; what is being fetched or waits to be swapped in does
    not. ``policies`` have their initial model on the disk: it was matched with a local folder, so
    nobody fetches it."""

    def __init__(
        self,
        life: Life,
        engine: Engine,
        *,
        kernel: Kernel,
        network: Network,
        workload: Workload,
        ledger: Ledger,
        policies: list[str],
    ) -> None:
        self._life = life
        self._engine = engine
        self._kernel = kernel
        self._network = network
        self._workload = workload
        self._ledger = ledger
        self._policies = policies
        self._copies: dict[str, VersionRef] = {}
        self._fetching: dict[str, tuple[int, Flow | None, float]] = {}
        self._staged: dict[str, tuple[int, str, int, float]] = {}
        self.wipe()
        self.perform: dict[type[do.Effect], Callable[..., None]] = {
            do.OpenCopy: self._open_copy,
            do.FetchPlan: self._fetch_plan,
            do.CancelFetch: self._cancel_fetch,
            do.SwapWeights: self._swap_weights,
            do.VerifyWeights: self._verify_weights,
            do.DiscardCopy: self._discard_copy,
        }

    def crash(self) -> None:
        """The process has died."""
        self._fetching.clear()
        self._staged.clear()

    def wipe(self) -> None:
        """Another disk, with the initial models only."""
        self._copies = {
            policy: VersionRef(version=0, digest=make_digest(policy, 0))
            for policy in self._policies
        }

    def _open_copy(self, effect: do.OpenCopy) -> None:
        ref = self._copies.get(effect.policy)
        if ref is None:
            self._life.feed(on.CopyOpened(policy=effect.policy, version=None))
            return
        self._engine.versions[effect.policy] = ref.version
        self._life.feed(on.CopyOpened(policy=effect.policy, version=ref.version, digest=ref.digest))

    def _fetch_plan(self, effect: do.FetchPlan) -> None:
        policy, ticket, plan = effect.policy, effect.ticket, effect.plan
        began_s = self._kernel.now
        life = self._life.lives
        size_bytes = sum(_modelled(plan, n).size_bytes for n in range(len(plan.steps)))
        digest, follows = _modelled(plan, -1).digest, _modelled(plan, -1).follows
        self._fetching[policy] = (ticket, None, began_s)
        if self._ledger.recorder is not None:
            self._ledger.recorder.fetching(self._life.name, policy, plan.version, size_bytes)

        def current() -> bool:
            fetching = self._fetching.get(policy)
            alive = self._life.alive and self._life.lives == life
            return alive and fetching is not None and fetching[0] == ticket

        def asked(_: object) -> None:
            if current():
                flow = self._network.transfer(
                    STORE, self._life.name, size_bytes, arrived, follows=follows
                )
                self._fetching[policy] = (ticket, flow, began_s)

        def arrived() -> None:
            if current():
                del self._fetching[policy]
                took_s = self._kernel.now - began_s
                self._staged[policy] = (plan.version, digest, size_bytes, took_s)
                if self._ledger.recorder is not None:
                    self._ledger.recorder.arrived(self._life.name, policy)
                self._life.later(
                    self._workload.apply_s, on.PlanStaged(policy=policy, ticket=ticket)
                )

        if follows:
            asked(None)
            return
        # The chunks are asked for: half a round trip passes before the first one leaves.
        self._kernel.after(self._network.delay_s(self._life.name, STORE), asked)

    def _cancel_fetch(self, effect: do.CancelFetch) -> None:
        fetching = self._fetching.get(effect.policy)
        if fetching is not None and fetching[0] == effect.ticket:
            del self._fetching[effect.policy]
            if fetching[1] is not None:
                self._network.cancel(fetching[1])

    def _swap_weights(self, effect: do.SwapWeights) -> None:
        policy = effect.policy
        version, digest, size_bytes, took_s = self._staged.pop(policy)
        pause_s = self._workload.swap_s if policy in self._engine.versions else 0.0
        self._engine.pause(pause_s)
        life = self._life.lives

        def swapped(_: object) -> None:
            if not self._life.alive or self._life.lives != life:
                return
            self._copies[policy] = VersionRef(version=version, digest=digest)
            self._engine.versions[policy] = version
            if self._ledger.recorder is not None:
                self._ledger.recorder.swapped(self._life.name, policy, version)
            self._life.feed(
                on.WeightsSwapped(
                    policy=policy,
                    ticket=effect.ticket,
                    version=version,
                    digest=digest,
                    pause_s=pause_s,
                    fetched_bytes=size_bytes,
                    fetch_s=took_s,
                    rate_bytes_s=size_bytes / max(took_s, 1e-9),
                )
            )

        self._kernel.after(pause_s, swapped)

    def _verify_weights(self, effect: do.VerifyWeights) -> None:
        self._life.feed(on.WeightsVerified(policy=effect.policy, ticket=effect.ticket))

    def _discard_copy(self, effect: do.DiscardCopy) -> None:
        self._copies.pop(effect.policy, None)
        self._staged.pop(effect.policy, None)
        if effect.unload:
            self._engine.versions.pop(effect.policy, None)
        self._life.feed(on.CopyDiscarded(policy=effect.policy))


def _modelled(plan: WeightsPlan, step: int) -> ModelledPlan:
    return msgspec.msgpack.decode(plan.steps[step].manifest, type=ModelledPlan)
