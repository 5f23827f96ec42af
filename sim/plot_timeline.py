"""The timeline of a simulation: what trainers and agents did when, and with which weights."""

from pathlib import Path
from typing import Any, Final

from sim.picture_style import FAINT, GRID, INK, OUTCOMES, figure, seconds_axis, short
from sim.recording import AgentFacts, AttemptSpan, Recording

MAX_AGENTS: Final = 14
STEPS: Final = 10
"""A timeline shows about so many steps of the fastest policy."""

_JOBS: Final = 0.66
"""What an agent's attempts take of its row; below come its weights."""

_IDLE: Final = 0.2
"""The same for one that has none in the window."""

_STRIP: Final = 0.17


def draw_timeline(recording: Recording, path: Path) -> None:
    """A window of the run: steps of the trainers, attempts and weight versions of the agents."""
    begin_s, end_s = _window(recording)
    agents = _chosen(recording.agents)
    policies = sorted(recording.bounds)
    colours = _Versions(recording, begin_s, end_s)
    jobs = [_JOBS if _is_busy(recording, agent, begin_s, end_s) else _IDLE for agent in agents]
    height = 1.5 + 0.42 * len(policies) + 0.62 * sum(one + 0.34 for one in jobs)
    with figure(path, 12.5, height) as made:
        axes = made.subplots()
        unit_s = seconds_axis(axes, end_s)
        ticks: list[tuple[float, str]] = []
        for number, policy in enumerate(policies):
            y = 0.62 * number
            _draw_steps(axes, recording, policy, colours, y, unit_s)
            ticks.append((y + 0.22, f"trainer {short(policy)}"))
        y = 0.62 * len(policies) + 0.12
        for agent, high in zip(agents, jobs, strict=True):
            _draw_attempts(axes, recording, agent, (begin_s, end_s), y, unit_s)
            _draw_versions(axes, recording, agent, policies, colours, y + high + 0.03, unit_s)
            text = f"{agent.name}\n{agent.slots} x {agent.tokens_per_s:g} tok/s, "
            ticks.append((y + (high + _STRIP) / 2, text + f"{agent.rtt_s * 1e3:.0f} ms"))
            axes.axhline(y - 0.05, color=GRID, linewidth=0.8)
            y += high + 0.34
        axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(begin_s / unit_s, end_s / unit_s)
        axes.set_ylim(y, -0.12)
        axes.spines["left"].set_visible(False)
        some = len(agents) < len(recording.agents)
        few = f"{len(agents)} of {len(recording.agents)} agents; " if some else ""
        axes.set_title(f"Who did what when ({few}strip: weight version, line: a fetch under way)")
        _draw_legend(made, recording)


def _draw_legend(made: Any, recording: Recording) -> None:
    from matplotlib.patches import Patch

    seen = {span.outcome for span in recording.attempts}
    patches = [
        Patch(color=colour, label=label)
        for outcome, (colour, label) in OUTCOMES.items()
        if outcome in seen
    ]
    if patches:
        made.legend(handles=patches, loc="outside lower right", ncols=len(patches))


def _draw_steps(
    axes: Any, recording: Recording, policy: str, colours: "_Versions", y: float, unit_s: float
) -> None:
    for span in recording.steps:
        if span.policy != policy or not colours.shows(span.began_s, span.ended_s):
            continue
        length = span.ended_s - span.began_s
        axes.broken_barh(
            [(span.began_s / unit_s, length / unit_s)],
            (y, 0.44),
            facecolor=colours.of(policy, span.step),
            edgecolor="white",
            linewidth=0.8,
        )
        if colours.share(length) > 0.02 and colours.holds(span.began_s, span.ended_s):
            middle = (span.began_s + length / 2) / unit_s
            ink = colours.ink(policy, span.step)
            axes.text(middle, y + 0.23, f"{span.step}", ha="center", va="center", color=ink)


def _draw_attempts(
    axes: Any,
    recording: Recording,
    agent: AgentFacts,
    window: tuple[float, float],
    y: float,
    unit_s: float,
) -> None:
    begin_s, end_s = window
    own = sorted(
        (
            (span.began_s, _end(span, recording.ends_s), span.outcome)
            for span in recording.attempts
            if span.agent == agent.name and span.began_s is not None
        ),
    )
    lanes: list[float] = []
    placed: list[tuple[int, float, float, str]] = []
    for began_s, ended_s, outcome in own:
        free = next((n for n, until in enumerate(lanes) if until <= began_s + 1e-9), len(lanes))
        if free == len(lanes):
            lanes.append(0.0)
        lanes[free] = ended_s
        placed.append((free, began_s, ended_s, outcome))
    thick = _JOBS / max(1, len(lanes))
    for outcome, (colour, _) in OUTCOMES.items():
        for lane in range(len(lanes)):
            bars = [
                (began_s / unit_s, (ended_s - began_s) / unit_s)
                for place, began_s, ended_s, what in placed
                if (place, what) == (lane, outcome) and began_s < end_s and ended_s > begin_s
            ]
            if bars:
                axes.broken_barh(
                    bars,
                    (y + lane * thick, thick * 0.86),
                    facecolor=colour,
                    edgecolor="white",
                    linewidth=0.5 if len(lanes) < 10 else 0.2,
                )


def _draw_versions(
    axes: Any,
    recording: Recording,
    agent: AgentFacts,
    policies: list[str],
    colours: "_Versions",
    y: float,
    unit_s: float,
) -> None:
    """Versions in use as strips with their number, fetches as thin lines below them."""
    high = _STRIP / len(policies)
    for number, policy in enumerate(policies):
        own = [f for f in recording.fetches if (f.agent, f.policy) == (agent.name, policy)]
        swaps = [(0.0, 0)]
        swaps += [(f.swapped_s, f.version) for f in own if f.swapped_s is not None]
        ends = [at_s for at_s, _ in swaps[1:]] + [recording.ends_s]
        at = y + number * high
        for (begin_s, version), end_s in zip(swaps, ends, strict=True):
            if not colours.shows(begin_s, end_s):
                continue
            axes.broken_barh(
                [(begin_s / unit_s, (end_s - begin_s) / unit_s)],
                (at, high * 0.9),
                facecolor=colours.of(policy, version),
                edgecolor="white",
                linewidth=0.6,
            )
            low_s, high_s = colours.cut(begin_s, end_s)
            if colours.share(high_s - low_s) > 0.015 and len(policies) == 1:
                axes.text(
                    (low_s + high_s) / 2 / unit_s,
                    at + high * 0.48,
                    f"v{version}",
                    ha="center",
                    va="center",
                    fontsize=6,
                    color=colours.ink(policy, version),
                )
        for fetch in own:
            until_s = recording.ends_s if fetch.arrived_s is None else fetch.arrived_s
            if colours.shows(fetch.began_s, until_s):
                axes.plot(
                    [fetch.began_s / unit_s, until_s / unit_s],
                    [y + _STRIP + 0.035] * 2,
                    color=FAINT,
                    linewidth=1.2,
                    solid_capstyle="butt",
                )


class _Versions:
    """Colours of the versions in a window: newer is darker."""

    def __init__(self, recording: Recording, begin_s: float, end_s: float) -> None:
        self._begin_s, self._end_s = begin_s, end_s
        self._range: dict[str, tuple[int, int]] = {}
        for policy in recording.bounds:
            steps = [
                span.step
                for span in recording.steps
                if span.policy == policy and self.shows(span.began_s, span.ended_s)
            ]
            bound = recording.bounds[policy]
            low, high = (min(steps) - bound - 2, max(steps)) if steps else (0, 1)
            self._range[policy] = (low, max(high, low + 1))

    def of(self, policy: str, version: int) -> Any:
        from matplotlib import colormaps

        return colormaps["YlGnBu"](0.1 + 0.85 * self._depth(policy, version))

    def ink(self, policy: str, version: int) -> str:
        return "white" if self._depth(policy, version) > 0.5 else INK

    def _depth(self, policy: str, version: int) -> float:
        low, high = self._range[policy]
        return min(1.0, max(0.0, (version - low) / (high - low)))

    def shows(self, begin_s: float, end_s: float) -> bool:
        return begin_s < self._end_s and end_s > self._begin_s

    def holds(self, begin_s: float, end_s: float) -> bool:
        """Whether the middle can be labelled."""
        return self._begin_s < (begin_s + end_s) / 2 < self._end_s

    def cut(self, begin_s: float, end_s: float) -> tuple[float, float]:
        return max(begin_s, self._begin_s), min(end_s, self._end_s)

    def share(self, length_s: float) -> float:
        """Of the window's length."""
        return length_s / (self._end_s - self._begin_s)


def _is_busy(recording: Recording, agent: AgentFacts, begin_s: float, end_s: float) -> bool:
    return any(
        span.agent == agent.name
        and span.began_s is not None
        and span.began_s < end_s
        and _end(span, recording.ends_s) > begin_s
        for span in recording.attempts
    )


def _end(span: AttemptSpan, ends_s: float) -> float:
    if span.generated_s is not None:
        return span.generated_s
    return ends_s if span.ended_s is None else span.ended_s


def _window(recording: Recording) -> tuple[float, float]:
    """Some steps from the middle of the run, where what happens is typical."""
    most = max((span.step for span in recording.steps), default=0)
    if most <= STEPS:
        return 0.0, max(recording.ends_s, 1e-6)
    first = (most - STEPS) // 2
    spans = [span for span in recording.steps if span.step == most]
    policy = spans[0].policy
    own = {span.step: span for span in recording.steps if span.policy == policy}
    begin_s = own[first].ended_s if first in own else 0.0
    last = own.get(first + STEPS)
    return begin_s, recording.ends_s if last is None else last.ended_s


def _chosen(agents: list[AgentFacts]) -> list[AgentFacts]:
    """At most ``MAX_AGENTS``, by distance, evenly."""
    order = sorted(agents, key=lambda agent: (agent.rtt_s, agent.name))
    if len(order) <= MAX_AGENTS:
        return order
    places = [round(n * (len(order) - 1) / (MAX_AGENTS - 1)) for n in range(MAX_AGENTS)]
    return [order[place] for place in places]
