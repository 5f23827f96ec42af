"""A recorded deployment's arrivals under another placement rule, beside the recorded one.

What always holds: both rules are simulated in the same world (agents, comings and goings, jobs,
lengths, all from the log), so that only the rule differs; what the deployment itself made stands
beside, to judge how near the world is.
"""

import msgspec

from scheduler.core.settings import PlacementName
from sim.compare import Interval, interval
from sim.run import Result, Simulation
from sim.trace import Trace, place_of, steps_hour_of
from sim.workload import Draws
from transport.messages import LeaseOffer


class Counterfactual(msgspec.Struct, frozen=True, kw_only=True):
    """The same arrivals under another rule. ``ratio`` is steps per hour over the recorded rule's,
    both simulated, seed by seed; ``recorded_steps_hour`` is what the deployment made. Steps per
    hour are those of the slowest policy from its first step to its last: loading models, which no
    rule changes, is left out."""

    scenario: str
    recorded_placement: str
    placement: str
    agents: int
    jobs: int
    unknown_jobs: int
    recorded_steps_hour: float
    simulated_steps_hour: Interval
    steps_hour: Interval
    ratio: Interval
    recorded_wasted_share: Interval
    wasted_share: Interval
    problems: list[str]


class TraceDraws(Draws):
    """Lengths and rewards of a trace. A job beyond it, or without a result in it, gets those of a
    recorded one, chosen by its seed, so that every rule gets the same."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.scenario.workload)
        self._lengths = trace.lengths
        self._rewards = trace.rewards
        self._known = sorted(trace.lengths)

    def lengths(self, offer: LeaseOffer) -> list[int]:
        found = self._lengths[self._place(offer)]
        count = len(offer.items) * offer.group_size
        most = min(self.workload.max_new_tokens, offer.max_new_tokens)
        return [max(1, min(most, found[n % len(found)])) for n in range(count)]

    def rewards(self, offer: LeaseOffer) -> tuple[float, ...]:
        found = self._rewards[self._place(offer)]
        count = len(offer.items) * offer.group_size
        return tuple(found[n % len(found)] for n in range(count)) if found else (0.0,) * count

    def _place(self, offer: LeaseOffer) -> int:
        place = place_of(offer.job)
        if place is not None and place in self._lengths:
            return place
        return self._known[offer.seed % len(self._known)]


def counterfactual(
    trace: Trace, placement: PlacementName, seeds: range, steps: int | None = None
) -> Counterfactual:
    """Simulate a trace under the recorded rule and another; a seed draws jitter and the core's own
    choices. ``steps`` instead of as many as were recorded."""
    scenario = trace.scenario
    if steps is not None:
        scenario = msgspec.structs.replace(scenario, steps=steps)
    draws = TraceDraws(trace)

    def run(rule: PlacementName, seed: int) -> tuple[Result, float]:
        world = Simulation(
            scenario,
            placement=rule,
            seed=seed,
            plans=trace.plans,
            draws=draws,
            faults=trace.faults,
        )
        result = world.run()
        made = [
            [s.at_s for s in own if s.step <= scenario.steps] for own in world.ledger.steps.values()
        ]
        return result, min((steps_hour_of(own) for own in made), default=0.0)

    before = [run(trace.placement, seed) for seed in seeds]
    after = before if placement == trace.placement else [run(placement, seed) for seed in seeds]
    pairs = list(zip(after, before, strict=True))
    return Counterfactual(
        scenario=scenario.name,
        recorded_placement=trace.placement,
        placement=placement,
        agents=len(trace.plans),
        jobs=trace.jobs,
        unknown_jobs=trace.unknown,
        recorded_steps_hour=trace.steps_hour,
        simulated_steps_hour=interval([rate for _, rate in before]),
        steps_hour=interval([rate for _, rate in after]),
        ratio=interval([one / max(other, 1e-9) for (_, one), (_, other) in pairs]),
        recorded_wasted_share=interval([result.wasted_share for result, _ in before]),
        wasted_share=interval([result.wasted_share for result, _ in after]),
        problems=[
            f"{result.placement}, seed {result.seed}: {problem}"
            for result, _ in [*before, *after]
            for problem in result.problems
        ],
    )
