"""The scheduler's core against a world that loses, repeats, dies and comes back.

After every event the core checks all of its invariants (``Scene.feed``) and its rows must be all
that a new life needs; the world checks what was promised to it (``core_world.World``): nothing is
trained on twice along a lineage, no lag beyond the bound, no body released too early, no revoked
attempt wins, every external job ends with one numbered result whose body is kept until it is
confirmed (``core_world_people``). At the end, left in peace, the run finishes and everything is
given back.
"""

import os

from core_builders import make_run
from core_world_people import PeopleWorld
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.core.settings import TRAJECTORY_LOG, WEIGHT_STORE
from transport.runs import AlgorithmSpec, DataSpec, ReplaySpec

AGENTS = st.sampled_from(["a0", "a1"])
ORDERS = st.sampled_from(["drain", "cordon", "uncordon", "quarantine", "release"])
PLACES = st.integers(0, 3)
ZERO = AlgorithmSpec(name="zero_advantage")
DATA = st.sampled_from(
    [
        DataSpec(),
        DataSpec(filters=(ZERO,), order="fifo"),
        DataSpec(replay=ReplaySpec(ratio=0.5, keep=3, max_uses=1)),
        DataSpec(
            filters=(ZERO,),
            replay=ReplaySpec(
                ratio=0.7, keep=64, max_uses=2, select=AlgorithmSpec(name="prioritised")
            ),
        ),
    ]
)
PEERS = st.sampled_from(["a0", "a1", "t", "t", TRAJECTORY_LOG, WEIGHT_STORE])


FEW = {"items": 3, "items_between": 2, "every_versions": 1, "samples": 2, "temperature": 1.0}
LAST = {"items": 2, "items_per_job": 1, "at_start": False}


class SchedulerWorld(RuleBasedStateMachine):
    """Anything may happen at any time."""

    @initialize(
        policies=st.sampled_from([("solver",), ("judge", "solver")]),
        lag=st.integers(0, 2),
        batch=st.integers(1, 3),
        group=st.integers(1, 2),
        evaluation=st.sampled_from(
            [None, {"items": 5, "items_per_job": 2}, {"items": 3, "every_versions": 1}]
        ),
        evaluations=st.sampled_from([{}, {"few": FEW}, {"few": FEW, "last": LAST}]),
        prefetch=st.integers(0, 2),
        placement=st.sampled_from(["finish-time", "finish-time", "least-outstanding"]),
        shortlist=st.sampled_from([1, 64]),
        republish=st.booleans(),
        max_attempts=st.sampled_from([1, 50]),
        hedge=st.sampled_from([0.0, 1.0]),
        recheck=st.sampled_from([0.0, 1.0]),
        quota=st.sampled_from([{}, {"max_sequences_in_flight": 2}, {"tokens_per_minute": 600}]),
        data=DATA,
        curators=st.sampled_from([(), (AlgorithmSpec(name="data_functions:odd_items"),)]),
        seed=st.integers(0, 3),
    )
    def start(
        self,
        policies,
        lag,
        batch,
        group,
        evaluation,
        evaluations,
        prefetch,
        placement,
        shortlist,
        republish,
        max_attempts,
        hedge,
        recheck,
        quota,
        data,
        curators,
        seed,
    ) -> None:
        steps = 3
        if data.replay.ratio:  # there must be room for it
            steps, lag, batch = 6, lag + 2, batch + 1
        spec = make_run(
            policies=policies,
            policy={
                "steps": steps,
                "batch_groups": batch,
                "max_policy_lag": lag,
                "data": data,
            },
            workflow={"group_size": group},
            evaluation=evaluation,
            evaluations=evaluations,
            max_attempts=max_attempts,
            hedge_share=hedge,
            recheck_rewards=recheck,
            curators=curators,
            **quota,
        )
        self.world = PeopleWorld(
            spec,
            seed=seed,
            republish=republish,
            modules=("data_functions",),
            prefetch_groups=prefetch,
            placement=placement,
            shortlist=shortlist,
            max_dead_letters=3,
            remembered_results=2,
        )
        self.stopped = False

    def _peer(self, name: str, at: int) -> str:
        trainers = list(self.world.trainers)
        return trainers[at % len(trainers)] if name == "t" else name

    @rule(peer=PEERS, at=PLACES, count=st.integers(1, 6))
    def messages_flow(self, peer, at, count) -> None:
        name = self._peer(peer, at)
        for _ in range(count):
            self.world.arrive(name)
            self.world.hear(name)

    @rule(peer=PEERS, at=PLACES)
    def message_arrives_twice(self, peer, at) -> None:
        self.world.arrive(self._peer(peer, at), twice=True)

    @rule(peer=PEERS, at=PLACES)
    def connection_breaks(self, peer, at) -> None:
        self.world.cut(self._peer(peer, at))

    @rule(agent=AGENTS)
    def agent_shows_life(self, agent) -> None:
        self.world.agent_beats(agent)

    @rule(agent=AGENTS, at=PLACES)
    def agent_gets_weights(self, agent, at) -> None:
        self.world.agent_updates(agent, self.world.policies[at % len(self.world.policies)])

    @rule(agent=AGENTS, at=PLACES)
    def agent_generates(self, agent, at) -> None:
        self.world.agent_starts(agent, at) or self.world.agent_finishes(agent, at)

    @rule(agent=AGENTS, at=PLACES)
    def a_turn_is_kept(self, agent, at) -> None:
        self.world.log_keeps_turns(agent, at)

    @rule(agent=AGENTS)
    def agent_uploads(self, agent) -> None:
        self.world.agent_uploads(agent)

    @rule(agent=AGENTS, at=PLACES)
    def attempt_fails(self, agent, at) -> None:
        self.world.agent_fails(agent, at)

    @rule(agent=AGENTS)
    def agent_dies_or_returns(self, agent) -> None:
        if self.world.agents[agent].alive:
            self.world.agent_dies(agent)
        else:
            self.world.agent_returns(agent)

    @rule(agent=AGENTS)
    def key_is_revoked(self, agent) -> None:
        """The next hello of the name is that of a new key."""
        self.world.agent_revoked(agent)

    @rule(at=PLACES, again=st.booleans())
    def log_announces(self, at, again) -> None:
        self.world.log_announces(at, again=again)

    @rule(at=PLACES)
    def store_announces(self, at) -> None:
        self.world.store_announces(at)

    @rule(share=st.integers(1, 2))
    def items_come(self, share) -> None:
        self.world.produce(share)

    @rule(at=PLACES)
    def trainer_speaks(self, at) -> None:
        self.world.trainer_speaks(self._peer("t", at))

    @rule(at=PLACES)
    def trainer_steps(self, at) -> None:
        self.world.trainer_steps(self._peer("t", at))

    @rule(at=PLACES)
    def trainer_checkpoints(self, at) -> None:
        self.world.trainer_checkpoints(self._peer("t", at))

    @rule(at=PLACES)
    def trainer_crashes(self, at) -> None:
        self.world.trainer_crashes(self._peer("t", at))

    @rule(at=PLACES)
    def trainer_refuses_a_group(self, at) -> None:
        self.world.trainer_refuses(self._peer("t", at), at)

    @rule(seconds=st.sampled_from([0.1, 2.0, 7.0, 15.0]))
    def time_passes(self, seconds) -> None:
        self.world.pass_time(seconds)

    @rule(count=st.integers(1, 3))
    def all_goes_well_for_a_while(self, count) -> None:
        for _ in range(count):
            self.world.round()

    @rule()
    def scheduler_is_killed(self) -> None:
        self.world.restart_core()

    @rule(command=st.sampled_from(["pause", "resume"]))
    def operator_commands(self, command) -> None:
        self.world.commanded(command)

    @rule(number=PLACES, deadline_s=st.sampled_from([0.0, 0.0, 5.0]), pin=st.integers(-2, 1))
    def submitter_submits(self, number, deadline_s, pin) -> None:
        self.world.submits(number, deadline_s, pin)

    @rule(number=PLACES)
    def submitter_cancels(self, number) -> None:
        self.world.cancels(number)

    @rule(limit=st.integers(1, 3))
    def submitter_fetches(self, limit) -> None:
        self.world.fetches(limit)

    @rule(agent=AGENTS, order=ORDERS)
    def operator_orders(self, agent, order) -> None:
        self.world.orders(agent, order)

    @rule()
    def operator_replays(self) -> None:
        self.world.replays()

    @precondition(lambda self: not self.stopped)
    @rule(at=st.integers(0, 9))
    def operator_stops(self, at) -> None:
        if at == 9:
            self.stopped = True
            self.world.commanded("stop")

    @invariant()
    def rows_are_all_that_a_new_life_needs(self) -> None:
        if hasattr(self, "world"):
            scene = self.world.scene
            rows = {(table, key): value for table, key, value in scene.core.dump()}
            assert rows == scene.rows

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.commanded("resume")
            self.world.finish()


SchedulerWorld.TestCase.settings = settings(
    max_examples=int(os.environ.get("FARFLOW_EXAMPLES", "25")),
    stateful_step_count=40,
    deadline=None,
    derandomize="FARFLOW_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestSchedulerWorld = SchedulerWorld.TestCase
