"""Labels that an agent must have to get a job.

A requirement maps labels to the values that are allowed; all of them must match. Beside what its
owner configured, an agent has the labels ``hardware``, ``engine`` and ``agent`` (its name), which
no configuration can change. What always holds: a label that an agent lacks matches nothing.
"""

from scheduler.core.state import Agent

Require = dict[str, tuple[str, ...]]


def label(agent: Agent, name: str) -> str | None:
    match name:
        case "hardware":
            return agent.hardware
        case "engine":
            return agent.engine
        case "agent":
            return agent.name
        case _:
            return agent.labels.get(name)


def unmet(require: Require, agent: Agent) -> str:
    """The first label that does not match, or nothing."""
    return next((name for name, ok in require.items() if label(agent, name) not in ok), "")
