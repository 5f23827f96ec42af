"""An agent core fed by hand: builders for messages, and a story that moves its clock."""

import random
from typing import Any, TypeVar

import msgspec

from edge_agent.core.effects import (
    Effect,
    FetchPlan,
    ToScheduler,
    ToWeightStore,
)
from edge_agent.core.events import (
    CopyOpened,
    Event,
    FromScheduler,
    FromWeightStore,
    GroupGenerated,
    GroupSpooled,
    PlanStaged,
    Tick,
    WeightsSwapped,
)
from edge_agent.core.machine import AgentCore
from edge_agent.core.settings import AgentSettings
from transport.messages import (
    GroupSummary,
    Item,
    LeaseOffer,
    LeaseReply,
    Message,
    PlanStep,
    RewardSpec,
    WeightsPlan,
    WeightsRequest,
    Welcome,
)

POLICY = "arithmetic/solver"
E = TypeVar("E", bound=Effect)
M = TypeVar("M", bound=Message)


def offer(number: int = 1, **changes: Any) -> LeaseOffer:
    values: dict[str, Any] = {
        "attempt": f"arithmetic/t-{number:06d}#1",
        "fence": (1, number),
        "job": f"arithmetic/t-{number:06d}",
        "kind": "train",
        "items": (Item(index=number, prompt="1+1", answer="2"),),
        "group_size": 4,
        "workflow": "single_turn",
        "settings": {},
        "policies": {"solver": POLICY},
        "reward": RewardSpec(name="exact"),
        "max_new_tokens": 8,
        "temperature": 1.0,
        "seed": number,
        "lease_s": 120.0,
    }
    return LeaseOffer(**{**values, **changes})


def summary(of: LeaseOffer, size_bytes: int = 1000) -> GroupSummary:
    return GroupSummary(
        attempt=of.attempt,
        fence=of.fence,
        job=of.job,
        digest=f"digest of {of.attempt}",
        size_bytes=size_bytes,
        rewards=(1.0,) * 4,
        lengths=(3,) * 4,
        versions={POLICY: (0, 0)},
        prompt_tokens=3,
        queued_s=0.0,
        generating_s=1.0,
    )


def welcome(**changes: Any) -> Welcome:
    values: dict[str, Any] = {
        "term": 1,
        "heartbeat_s": 2.0,
        "lost_after_s": 12.0,
        "policies": (POLICY,),
    }
    return Welcome(**{**values, **changes})


def plan(version: int, steps: int = 1) -> WeightsPlan:
    step = PlanStep(manifest=b"m", signature=b"s", key_id="k", files=("delta",))
    return WeightsPlan(policy=POLICY, version=version, steps=(step,) * steps)


class Steady(random.Random):
    """Spreads nothing: heartbeats come at whole intervals from the first one on."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2.0


class Story:
    """Feeds a core, moves its clock, and looks at what came out since the last look."""

    def __init__(
        self,
        spooled: tuple[GroupSummary, ...] = (),
        rng: random.Random | None = None,
        **settings: Any,
    ) -> None:
        values: dict[str, Any] = {
            "slots": 8,
            "workflows": {"single_turn": "f"},
            "rewards": ("exact",),
            "engine": "fake",
        }
        self.now = 100.0
        self.core = AgentCore(
            AgentSettings(**{**values, **settings}),
            incarnation=3,
            build="b",
            rng=rng or Steady(0),
            spooled=spooled,
            now=self.now,
        )

    def feed(self, *events: Event) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            effects += self.core.handle(event, self.now)
            self.core.check()
            due = self.core.next_deadline()
            assert due is None or due > self.now, "a deadline that is over would spin"
        return effects

    def scheduler(self, *messages: Message) -> list[Effect]:
        return self.feed(*(FromScheduler(message=message) for message in messages))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass from deadline to deadline, as the shell would."""
        end, effects = self.now + seconds, []
        for _ in range(10_000):
            due = self.core.next_deadline()
            if due is None or due > end:
                break
            self.now = max(due, self.now)
            effects += self.feed(Tick())
        self.now = end
        return effects

    def up(self, version: int | None = 0) -> "Story":
        """Welcomed, hosting the policy at ``version``."""
        self.feed(Tick())
        self.scheduler(welcome())
        self.feed(CopyOpened(policy=POLICY, version=version, digest=f"d{version}"))
        return self

    def serve(self, version: int, *, full_digest: bool = False) -> list[Effect]:
        """The whole way to a new version."""
        fetched = one(FetchPlan, self.feed(FromWeightStore(message=plan(version))))
        self.feed(PlanStaged(policy=POLICY, ticket=fetched.ticket))
        swapped = self.swapped(version, fetched.ticket)
        return self.feed(msgspec.structs.replace(swapped, full_digest=full_digest))

    @staticmethod
    def swapped(version: int, ticket: int) -> WeightsSwapped:
        return WeightsSwapped(
            policy=POLICY, ticket=ticket, version=version, digest=f"d{version}", pause_s=0.01
        )

    def spool(self, of: LeaseOffer, size_bytes: int = 1000) -> list[Effect]:
        return self.feed(
            GroupGenerated(attempt=of.attempt, fence=of.fence),
            GroupSpooled(summary=summary(of, size_bytes)),
        )


def of(kind: type[E], effects: list[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def one(kind: type[E], effects: list[Effect]) -> E:
    (found,) = of(kind, effects)
    return found


def said(kind: type[M], effects: list[Effect]) -> list[M]:
    """Messages of a kind to the scheduler."""
    return [e.message for e in of(ToScheduler, effects) if isinstance(e.message, kind)]


def asked(effects: list[Effect]) -> list[WeightsRequest]:
    return [e.message for e in of(ToWeightStore, effects) if isinstance(e.message, WeightsRequest)]


def reason_for(effects: list[Effect]) -> str:
    (reply,) = said(LeaseReply, effects)
    assert reply.accepted is (reply.reason == "")
    return reply.reason
