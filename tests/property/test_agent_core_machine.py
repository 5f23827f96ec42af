"""Any order of offers, losses, failures, swaps and silences keeps the agent's promises.

The model plays the scheduler, the trajectory log, the weight store, the engine and the disk. After
every step: no attempt starts on unverified weights, or pinned and at another version; sequences
stay within slots and prefetch; nothing leaves the spool without a word from outside; and at the end
every accepted attempt ended exactly once.
"""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_agent.core.effects import (
    AbortAttempt,
    CancelFetch,
    DiscardCopy,
    DropSpooled,
    Effect,
    Exit,
    FetchPlan,
    OfferBodies,
    OpenCopy,
    RemakeLink,
    RunAttempt,
    SwapWeights,
    ToScheduler,
    ToTrajectoryLog,
    ToWeightStore,
    VerifyWeights,
)
from edge_agent.core.events import (
    AttemptCrashed,
    CopyDiscarded,
    CopyOpened,
    DrainRequested,
    Event,
    FromScheduler,
    FromTrajectoryLog,
    FromWeightStore,
    GroupGenerated,
    GroupSpooled,
    LinkDown,
    LinkUp,
    PlanStaged,
    SendFailed,
    StageFailed,
    SwapFailed,
    Tick,
    VerifyFailed,
    WeightsSwapped,
    WeightsVerified,
)
from edge_agent.core.machine import AgentCore
from edge_agent.core.settings import AgentSettings
from transport.messages import (
    AttemptFailed,
    BodyRef,
    GroupSummary,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloRequired,
    HostedPolicies,
    Item,
    LeaseOffer,
    LeaseReply,
    LeaseRevoke,
    Plane,
    PlanStep,
    RewardSpec,
    TrajectoryAck,
    TrajectoryAcks,
    TrajectoryPut,
    TrajectoryRefused,
    WeightsPlan,
    WeightsRequest,
    Welcome,
)

POLICIES = ("run/a", "run/b")
SLOTS, PREFETCH = 4, 8
INDEX = st.integers(0, 10**6)
STEP = PlanStep(manifest=b"", signature=b"", key_id="", files=())


class AgentMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.core = AgentCore(
            AgentSettings(
                slots=SLOTS,
                prefetch_sequences=PREFETCH,
                workflows={"w": "f"},
                rewards=("exact",),
                spool_bytes=5000,
                upload_window_bytes=1500,
                whole_body_bytes=1000,
                upload_offers=2,
                max_held=12,
                attempt_timeout_s=200.0,
                linger_s=3.0,
                verify_every_swaps=3,
                read_back_every_swaps=2,
            ),
            incarnation=1,
            build="b",
            rng=random.Random(1),
        )
        self.number = 0
        self.newest = dict.fromkeys(POLICIES, 0)
        self.engine: dict[str, int | None] = dict.fromkeys(POLICIES)
        self.trusted = dict.fromkeys(POLICIES, False)
        self.fetches: dict[str, FetchPlan] = {}
        self.swaps: dict[str, SwapWeights] = {}
        self.checks: dict[str, VerifyWeights] = {}
        self.swap_targets: dict[tuple[str, int], int] = {}
        self.opening: list[str] = []
        self.discarding: list[str] = []
        self.upto: dict[str, int | None] = dict.fromkeys(POLICIES)
        self.offers: dict[str, LeaseOffer] = {}
        self.live: dict[str, LeaseOffer] = {}  # accepted, not ended
        self.running: dict[str, LeaseOffer] = {}  # drawing tokens
        self.scoring: dict[str, LeaseOffer] = {}  # tokens drawn, not yet in the spool
        self.spool: dict[str, GroupSummary] = {}
        self.allowed_drops: set[str] = set()  # bodies that the outside has spoken about
        self.ended: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.spoken: dict[str, str] = {}  # the log's last word
        self.unwanted: set[str] = set()  # attempts that the scheduler gave up
        self.last_beat = 0
        self.log_connected = True
        self.exited = False
        self.feed(Tick())
        self.feed(
            FromScheduler(
                message=Welcome(term=1, heartbeat_s=2.0, lost_after_s=12.0, policies=POLICIES)
            )
        )

    # ---- the shell -----------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        for effect in self.core.handle(event, self.now):
            assert not self.exited, "an effect after Exit"
            self.perform(effect)
        for name in self.aborted:
            assert name in self.unwanted, "aborted without a word to anybody"
            self.end(name, "forgotten")
        self.aborted.clear()
        self.core.check()
        due = self.core.next_deadline()
        assert due is None or due > self.now, "a deadline that is over would spin"

    def perform(self, effect: Effect) -> None:
        match effect:
            case ToScheduler(message=LeaseReply() as reply):
                if reply.accepted and reply.attempt not in self.live:
                    assert reply.attempt not in self.ended
                    self.live[reply.attempt] = self.offers[reply.attempt]
            case ToScheduler(message=AttemptFailed() as failed):
                self.aborted.discard(failed.attempt)
                self.end(failed.attempt, "failed")
                assert self.ended[failed.attempt] == "failed", "two different ends"
            case ToScheduler(message=Heartbeat() | Hello() as message):
                inventory = message.held if isinstance(message, Heartbeat) else message.agent
                held = inventory if isinstance(inventory, tuple) else inventory.held  # type: ignore[union-attr]
                assert {one.attempt for one in held} == set(self.live)
                assert {one.attempt for one in held if one.spooled} == set(self.spool)
                if isinstance(message, Heartbeat):
                    self.last_beat = message.sequence
                    for policy, ref in message.versions.items():
                        assert self.engine[policy] == ref.version
            case RunAttempt(offer=offer):
                assert offer.attempt in self.live
                assert offer.attempt not in self.running
                self.running[offer.attempt] = offer
                for policy in offer.policies.values():
                    assert self.trusted[policy], "started on unverified weights"
            case AbortAttempt(attempt=name):
                assert name in self.running or name in self.scoring
                self.running.pop(name, None)
                self.scoring.pop(name, None)
                self.aborted.add(name)
            case DropSpooled(attempt=name, digest=digest):
                if name in self.spool:
                    assert digest in self.allowed_drops, "dropped without a word from outside"
                    del self.spool[name]
                    self.end(name, self.spoken.get(name, "forgotten"))
            case FetchPlan(policy=policy, plan=plan):
                assert policy not in self.fetches
                assert policy not in self.swaps
                bound = self.upto[policy]
                assert bound is None or plan.version <= bound
                self.fetches[policy] = effect
            case CancelFetch(policy=policy, ticket=ticket):
                assert self.fetches.pop(policy).ticket == ticket
            case SwapWeights(policy=policy):
                self.swaps[policy] = effect
            case VerifyWeights(policy=policy):
                self.checks[policy] = effect
            case OpenCopy(policy=policy):
                self.opening.append(policy)
            case DiscardCopy(policy=policy, unload=unload):
                # The engine goes on with what it has, unless nobody uses it; its copy can no
                # longer be built upon.
                self.trusted[policy] = False
                if unload:
                    self.engine[policy] = None
                    users = (self.running | self.scoring).values()
                    assert all(policy not in o.policies.values() for o in users)
                self.swaps.pop(policy, None)
                self.checks.pop(policy, None)
                self.opening = [one for one in self.opening if one != policy]
                self.discarding.append(policy)
            case ToWeightStore(message=WeightsRequest() as request):
                self.upto[request.policy] = request.upto
            case ToTrajectoryLog(summary=summary):
                assert summary.attempt in self.spool
                assert summary.size_bytes <= 1000
                assert self.log_connected
            case OfferBodies(summaries=summaries):
                assert all(summary.attempt in self.spool for summary in summaries)
                assert all(summary.size_bytes > 1000 for summary in summaries)
                assert self.log_connected
            case Exit(status=status):
                assert status == 0
                self.exited = True
            case RemakeLink() | ToScheduler():
                pass
            case _:
                raise AssertionError(effect)

    def end(self, name: str, how: str) -> None:
        self.live.pop(name, None)
        self.ended.setdefault(name, how)

    def pick(self, names: list[str], index: int) -> str:
        return names[index % len(names)]

    # ---- the scheduler -----------------------------------------------------------------------

    @rule(size=st.integers(1, 5), policy=st.sampled_from(POLICIES), ahead=st.integers(-2, 2))
    def pinned_offer(self, size: int, policy: str, ahead: int) -> None:
        version = max(0, (self.engine[policy] or 0) + ahead)
        self.offer(size, {"p": policy}, {policy: version})

    @rule(size=st.integers(1, 5), both=st.booleans())
    def new_offer(self, size: int, both: bool) -> None:
        policies = {"a": POLICIES[0], "b": POLICIES[1]} if both else {"a": POLICIES[0]}
        self.offer(size, policies, {})

    def offer(self, size: int, policies: dict[str, str], pinned: dict[str, int]) -> None:
        self.number += 1
        offer = LeaseOffer(
            attempt=f"run/t-{self.number:06d}#1",
            fence=(1, self.number),
            job=f"run/t-{self.number:06d}",
            kind="train",
            items=(Item(index=0, prompt="p", answer="a"),),
            group_size=size,
            workflow="w",
            settings={},
            policies=policies,
            reward=RewardSpec(name="exact"),
            max_new_tokens=4,
            temperature=1.0,
            seed=0,
            lease_s=120.0,
            pinned=pinned,
        )
        self.offers[offer.attempt] = offer
        self.feed(FromScheduler(message=offer))

    @precondition(lambda self: self.offers)
    @rule(index=INDEX)
    def repeated_offer(self, index: int) -> None:
        name = self.pick(list(self.offers), index)
        self.feed(FromScheduler(message=self.offers[name]))

    @precondition(lambda self: self.live)
    @rule(index=INDEX, unknown=st.booleans())
    def revoked(self, index: int, unknown: bool) -> None:
        name = self.pick(list(self.live), index)
        if name in self.spool:
            self.allowed_drops.add(self.spool[name].digest)
        self.unwanted.add(name)
        message = (
            HeartbeatReply(sequence=self.last_beat, sent_s=0.0, unknown=(name,))
            if unknown
            else LeaseRevoke(attempt=name, fence=self.offers[name].fence, reason="r")
        )
        self.feed(FromScheduler(message=message))
        if self.exited:
            return
        assert name not in self.running
        assert name not in self.spool
        self.end(name, "forgotten")

    @rule(kind=st.sampled_from(["reply", "required", "welcome"]), hosted=st.integers(0, 3))
    def scheduler_says(self, kind: str, hosted: int) -> None:
        policies = POLICIES if hosted else POLICIES[:1]
        match kind:
            case "reply":
                message = HeartbeatReply(sequence=self.last_beat, sent_s=0.0)
                self.feed(FromScheduler(message=message))
            case "required":
                self.feed(FromScheduler(message=HelloRequired()))
                self.feed(
                    FromScheduler(
                        message=Welcome(
                            term=1, heartbeat_s=2.0, lost_after_s=12.0, policies=policies
                        )
                    )
                )
            case _:
                self.feed(FromScheduler(message=HostedPolicies(policies=policies)))

    # ---- attempts ------------------------------------------------------------------------------

    @precondition(lambda self: self.running)
    @rule(index=INDEX)
    def generated(self, index: int) -> None:
        name = self.pick(list(self.running), index)
        self.scoring[name] = self.running.pop(name)
        self.feed(GroupGenerated(attempt=name, fence=self.offers[name].fence))

    @precondition(lambda self: self.scoring)
    @rule(index=INDEX, size=st.integers(1, 2000))
    def spooled(self, index: int, size: int) -> None:
        offer = self.scoring.pop(self.pick(list(self.scoring), index))
        summary = GroupSummary(
            attempt=offer.attempt,
            fence=offer.fence,
            job=offer.job,
            digest=f"of {offer.attempt}",
            size_bytes=size,
            rewards=(),
            lengths=(),
            versions={},
            prompt_tokens=0,
            queued_s=0.0,
            generating_s=0.0,
        )
        self.spool[offer.attempt] = summary
        self.feed(GroupSpooled(summary=summary))

    @precondition(lambda self: self.running or self.scoring)
    @rule(index=INDEX)
    def crashed(self, index: int) -> None:
        name = self.pick([*self.running, *self.scoring], index)
        self.running.pop(name, None)
        self.scoring.pop(name, None)
        self.feed(
            AttemptCrashed(attempt=name, fence=self.offers[name].fence, code="workflow.error")
        )

    @precondition(lambda self: self.spool)
    @rule(index=INDEX, outcome=st.sampled_from(["ack", "acks", "refused", "unsent", "wrong"]))
    def answered(self, index: int, outcome: str) -> None:
        name = self.pick(list(self.spool), index)
        digest = self.spool[name].digest
        if outcome == "unsent":
            put = TrajectoryPut(summary=self.spool[name])
            self.feed(SendFailed(plane=Plane.TRAJECTORIES, message=put))
            return
        if outcome == "wrong":
            self.feed(FromTrajectoryLog(message=TrajectoryAck(attempt=name, digest="other")))
            assert name in self.spool
            return
        self.allowed_drops.add(digest)
        self.spoken[name] = "acknowledged" if outcome in ("ack", "acks") else "failed"
        if outcome == "ack":
            self.feed(FromTrajectoryLog(message=TrajectoryAck(attempt=name, digest=digest)))
        elif outcome == "acks":
            bodies = (BodyRef(attempt=name, digest=digest),)
            self.feed(FromTrajectoryLog(message=TrajectoryAcks(bodies=bodies)))
        else:
            refused = TrajectoryRefused(attempt=name, digest=digest, code="c", message="m")
            self.feed(FromTrajectoryLog(message=refused))

    # ---- weights -------------------------------------------------------------------------------

    @precondition(lambda self: self.opening)
    @rule(version=st.none() | st.integers(0, 3))
    def opened(self, version: int | None) -> None:
        policy = self.opening.pop(0)
        self.engine[policy], self.trusted[policy] = version, version is not None
        self.newest[policy] = max(self.newest[policy], version or 0)
        self.feed(CopyOpened(policy=policy, version=version, digest=f"d{version}"))

    @rule(policy=st.sampled_from(POLICIES), step=st.integers(0, 2), late=st.booleans())
    def planned(self, policy: str, step: int, late: bool) -> None:
        self.newest[policy] += step
        bound = self.upto[policy]
        version = self.newest[policy] if bound is None or late else min(bound, self.newest[policy])
        plan = WeightsPlan(policy=policy, version=version, steps=(STEP,))
        self.feed(FromWeightStore(message=plan))

    @precondition(lambda self: self.fetches)
    @rule(index=INDEX, code=st.sampled_from(["", "", "", "link", "integrity.base", "integrity"]))
    def fetched(self, index: int, code: str) -> None:
        policy = self.pick(sorted(self.fetches), index)
        fetch = self.fetches.pop(policy)
        self.swap_targets[policy, fetch.ticket] = fetch.plan.version
        if code:
            self.feed(StageFailed(policy=policy, ticket=fetch.ticket, code=code))
        else:
            self.feed(PlanStaged(policy=policy, ticket=fetch.ticket))

    @precondition(lambda self: self.swaps)
    @rule(index=INDEX, works=st.sampled_from([True, True, True, False]))
    def swapped(self, index: int, works: bool) -> None:
        policy = self.pick(sorted(self.swaps), index)
        swap = self.swaps.pop(policy)
        if not works:
            self.engine[policy], self.trusted[policy] = None, False
            self.feed(SwapFailed(policy=policy, ticket=swap.ticket, code="engine.apply"))
            return
        version = self.swap_targets[policy, swap.ticket]
        self.engine[policy], self.trusted[policy] = version, True
        self.feed(
            WeightsSwapped(
                policy=policy, ticket=swap.ticket, version=version, digest="d", pause_s=0.0
            )
        )

    @precondition(lambda self: self.checks)
    @rule(index=INDEX, works=st.sampled_from([True, True, False]))
    def verified(self, index: int, works: bool) -> None:
        policy = self.pick(sorted(self.checks), index)
        check = self.checks.pop(policy)
        if works:
            self.feed(WeightsVerified(policy=policy, ticket=check.ticket))
            return
        self.engine[policy], self.trusted[policy] = None, False
        self.feed(VerifyFailed(policy=policy, ticket=check.ticket, code="engine.weights"))

    @precondition(lambda self: self.discarding)
    @rule()
    def discarded(self) -> None:
        self.feed(CopyDiscarded(policy=self.discarding.pop(0)))

    @rule(plane=st.sampled_from(Plane), up=st.booleans())
    def link_changed(self, plane: Plane, up: bool) -> None:
        if plane is Plane.TRAJECTORIES:
            self.log_connected = up
        self.feed(LinkUp(plane=plane) if up else LinkDown(plane=plane))

    # ---- time ------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.05, 1.0, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(200):
            due = self.core.next_deadline()
            if due is None or due > end:
                break
            self.now = max(due, self.now)
            self.feed(Tick())
        self.now = end
        self.feed(Tick())

    @precondition(lambda self: self.number > 15)
    @rule()
    def drain(self) -> None:
        self.feed(DrainRequested(reason="test"))

    # ---- what always holds ---------------------------------------------------------------------

    @invariant()
    def running_work_has_the_weights_that_it_needs(self) -> None:
        for name, offer in self.running.items():
            assert name in self.live
            for policy in offer.policies.values():
                assert self.engine[policy] is not None, f"{name} runs on unknown weights"
            for policy, version in offer.pinned.items():
                assert self.engine[policy] == version, f"{name} runs at another version"

    @invariant()
    def slots_and_prefetch_are_never_exceeded(self) -> None:
        waiting = [
            offer
            for name, offer in self.live.items()
            if name not in self.scoring and name not in self.spool
        ]
        sequences = sum(offer.group_size for offer in waiting)
        assert len(waiting) <= 1 or sequences <= SLOTS + PREFETCH

    @invariant()
    def the_core_holds_what_was_accepted_and_not_ended(self) -> None:
        if self.exited:
            return
        dump = self.core.dump()
        held = {one[0] for one in dump["attempts"]} | {one["attempt"] for one in dump["spooled"]}
        assert held == set(self.live)
        assert not set(self.live) & set(self.ended)

    def teardown(self) -> None:
        """Everything that is still held can be brought to its one end."""
        if not hasattr(self, "core") or self.exited:
            return
        for name in list(self.live):
            self.revoked(list(self.live).index(name), False)
        assert self.core.status().spooled == 0
        assert self.core.status().running == self.core.status().waiting == 0
        assert not self.running
        assert not self.spool


AgentMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestAgentMachine = AgentMachine.TestCase
