"""What a simulation tells for pictures, off unless asked for: attempts, steps, weights, load.

What always holds: recording changes nothing of what is simulated (equal digests with and without
it); times are virtual seconds; every list is bounded, and ``left_out`` counts what no longer
fitted; samples stay evenly spaced, with fewer of them per second the longer a run gets.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from sim.actors.agent import AgentActor
    from sim.kernel import Kernel
    from transport.ids import Fence
    from transport.messages import LeaseOffer

MAX_SPANS: Final = 50_000
"""Of attempts and of fetched versions, each."""

MAX_SAMPLES: Final = 400
MAX_ROWS: Final = 64
"""Fleets of more agents are sampled by site."""

Key = tuple[str, "Fence"]


class AgentFacts(msgspec.Struct, frozen=True):
    """One agent: rates of its link in bytes per second, ``rtt_s`` to the cloud."""

    name: str
    site: str
    slots: int
    tokens_per_s: float
    up: float
    down: float
    rtt_s: float


class AttemptSpan(msgspec.Struct):
    """One attempt on an agent. It waits from ``accepted_s`` for a slot, draws tokens from
    ``began_s``, is whole at ``generated_s`` (or was stopped or lost at ``ended_s``) and is in the
    trajectory log at ``ended_s``. Outcome: ``trained``, ``wasted`` (came, but nobody trained on
    it), ``stopped``, ``lost`` (its agent died), ``open`` (undecided at the end)."""

    agent: str
    attempt: str
    job: str
    sequences: int
    tokens: int
    accepted_s: float
    began_s: float | None = None
    generated_s: float | None = None
    ended_s: float | None = None
    outcome: str = "open"


class StepSpan(msgspec.Struct, frozen=True):
    """One optimizer step; ``lags`` counts its groups by policy lag."""

    policy: str
    step: int
    began_s: float
    ended_s: float
    lags: dict[int, int]


class Publication(msgspec.Struct, frozen=True):
    """A version became durable in the weight store."""

    policy: str
    version: int
    step: int
    at_s: float


class FetchSpan(msgspec.Struct):
    """An agent fetched its way to a version, and used it from ``swapped_s``."""

    agent: str
    policy: str
    version: int
    size_bytes: int
    began_s: float
    arrived_s: float | None = None
    swapped_s: float | None = None


class Sample(msgspec.Struct, frozen=True):
    """Totals since time 0. ``busy_s`` is slot seconds per row, ``up_bytes`` and ``down_bytes`` of
    all agents' links, tokens by what became of them."""

    at_s: float
    busy_s: tuple[float, ...]
    up_bytes: int
    down_bytes: int
    trained_tokens: int
    wasted_tokens: int
    drawn_tokens: int


class Recording(msgspec.Struct):
    """All of one simulation. ``rows`` names what ``Sample.busy_s`` is of (agents, or sites of a
    large fleet) and ``row_slots`` how many slots that is; ``bounds`` is the largest lag by policy,
    ``link_bytes`` each agent's bytes up and down."""

    cloud: str
    ends_s: float
    agents: list[AgentFacts]
    bounds: dict[str, int]
    rows: list[str]
    row_slots: list[int]
    attempts: list[AttemptSpan]
    steps: list[StepSpan]
    publications: list[Publication]
    fetches: list[FetchSpan]
    samples: list[Sample]
    link_bytes: dict[str, tuple[int, int]]
    left_out: dict[str, int]

    def lags(self) -> dict[str, dict[int, int]]:
        """Groups by policy and lag."""
        found: dict[str, dict[int, int]] = {}
        for step in self.steps:
            counts = found.setdefault(step.policy, {})
            for lag, count in step.lags.items():
                counts[lag] = counts.get(lag, 0) + count
        return found


class Recorder:
    """Takes what happens; ``result`` gives the recording. ``link_bytes`` gives an agent's bytes up
    and down so far, ``tokens`` the tokens that were trained on, wasted and drawn so far."""

    def __init__(
        self,
        kernel: "Kernel",
        *,
        cloud: str,
        agents: list[AgentFacts],
        bounds: dict[str, int],
        link_bytes: Callable[[str], tuple[int, int]],
        tokens: Callable[[], tuple[int, int, int]],
    ) -> None:
        by_site = len(agents) > MAX_ROWS
        rows: dict[str, int] = {}
        for agent in agents:
            row = agent.site if by_site else agent.name
            rows[row] = rows.get(row, 0) + agent.slots
        self._row_of = {
            agent.name: list(rows).index(agent.site if by_site else agent.name) for agent in agents
        }
        self._kernel = kernel
        self._link_bytes = link_bytes
        self._tokens = tokens
        self._recording = Recording(
            cloud=cloud,
            ends_s=0.0,
            agents=agents,
            bounds=bounds,
            rows=list(rows),
            row_slots=list(rows.values()),
            attempts=[],
            steps=[],
            publications=[],
            fetches=[],
            samples=[],
            link_bytes={},
            left_out={},
        )
        self._open: dict[Key, AttemptSpan] = {}
        self._bodies: dict[str, AttemptSpan] = {}
        self._fetching: dict[tuple[str, str], FetchSpan] = {}
        self._sample_every_s = 1.0

    # ---- attempts ------------------------------------------------------------------------------

    def accepted(self, agent: str, offer: "LeaseOffer", tokens: int, queued_s: float) -> None:
        """An agent runs an attempt that it accepted ``queued_s`` ago."""
        span = AttemptSpan(
            agent=agent,
            attempt=offer.attempt,
            job=offer.job,
            sequences=len(offer.items) * offer.group_size,
            tokens=tokens,
            accepted_s=self._kernel.now - queued_s,
        )
        if self._keep("attempts", self._recording.attempts, span):
            self._open[offer.attempt, offer.fence] = span

    def began(self, key: Key) -> None:
        """Its first sequence got a slot."""
        if key in self._open:
            self._open[key].began_s = self._kernel.now

    def generated(self, key: Key, digest: str) -> None:
        """Its last token is drawn; its body will have this digest."""
        span = self._open.pop(key, None)
        if span is not None:
            span.generated_s = self._kernel.now
            self._bodies[digest] = span

    def stopped(self, key: Key, outcome: str) -> None:
        span = self._open.pop(key, None)
        if span is not None:
            span.ended_s = self._kernel.now
            span.outcome = outcome

    def stored(self, digest: str) -> None:
        if digest in self._bodies:
            self._bodies[digest].ended_s = self._kernel.now

    def judged(self, digest: str, outcome: str) -> None:
        """A body was trained on, or nobody wants it; ``open`` takes that back."""
        if digest in self._bodies:
            self._bodies[digest].outcome = outcome

    # ---- weights and steps ---------------------------------------------------------------------

    def step_made(self, policy: str, step: int, began_s: float, lags: list[int]) -> None:
        counts: dict[int, int] = {}
        for lag in sorted(lags):
            counts[lag] = counts.get(lag, 0) + 1
        span = StepSpan(policy, step, began_s, self._kernel.now, counts)
        self._keep("steps", self._recording.steps, span)

    def published(self, policy: str, version: int, step: int) -> None:
        published = Publication(policy, version, step, self._kernel.now)
        self._keep("publications", self._recording.publications, published)

    def fetching(self, agent: str, policy: str, version: int, size_bytes: int) -> None:
        span = FetchSpan(agent, policy, version, size_bytes, self._kernel.now)
        if self._keep("fetches", self._recording.fetches, span):
            self._fetching[agent, policy] = span

    def arrived(self, agent: str, policy: str) -> None:
        if (agent, policy) in self._fetching:
            self._fetching[agent, policy].arrived_s = self._kernel.now

    def swapped(self, agent: str, policy: str, version: int) -> None:
        span = self._fetching.get((agent, policy))
        if span is not None and span.version == version:
            span.swapped_s = self._kernel.now

    # ---- load ----------------------------------------------------------------------------------

    def watch(self, agents: dict[str, "AgentActor"]) -> None:
        """Sample these from now on."""

        def sample(_: Any) -> None:
            self._sample(agents)
            # From the last one that was kept, so that those kept stay evenly spaced.
            self._kernel.at(self._recording.samples[-1].at_s + self._sample_every_s, sample)

        sample(None)

    def _sample(self, agents: dict[str, "AgentActor"]) -> None:
        busy = [0.0] * len(self._recording.rows)
        up = down = 0
        for name, agent in agents.items():
            busy[self._row_of[name]] += agent.engine.slot_seconds()
            one_up, one_down = self._link_bytes(name)
            up, down = up + one_up, down + one_down
        samples = self._recording.samples
        samples.append(Sample(self._kernel.now, tuple(busy), up, down, *self._tokens()))
        if len(samples) >= MAX_SAMPLES:
            self._sample_every_s *= 2.0
            # Sample 0 is at time 0, so that those kept are at multiples of the new distance.
            del samples[1::2]

    def result(self, agents: dict[str, "AgentActor"]) -> Recording:
        """What was recorded until now."""
        found = self._recording
        if not found.samples or found.samples[-1].at_s < self._kernel.now:
            self._sample(agents)
        found.ends_s = self._kernel.now
        found.link_bytes = {name: self._link_bytes(name) for name in agents}
        return found

    def _keep(self, what: str, kept: list[Any], one: Any) -> bool:
        if len(kept) < MAX_SPANS:
            kept.append(one)
            return True
        self._recording.left_out[what] = self._recording.left_out.get(what, 0) + 1
        return False
