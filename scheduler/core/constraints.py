"""Labels and models that an agent must have to get a job.

A requirement maps labels to the values that are allowed; all of them must match. Beside what its
owner configured, an agent has the labels ``hardware``, ``engine`` and ``agent`` (its name), which
no configuration can change. What always holds: a label that an agent lacks matches nothing.

A policy that is published as an adapter needs an agent that says that it has its model.
"""

from collections.abc import Mapping

from scheduler.core.state import Agent, Run

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


def without_model(run: Run, policies: Mapping[str, str], agent: Agent) -> str:
    """Of ``policies`` (ids by name) of a run the first one that is published as an adapter whose
    model the agent has not, or whose engine takes none; empty: there is no such policy."""
    for name, id in policies.items():
        if run.spec.policies[name].publishes_adapter and not {name, id} & {*agent.bases}:
            return id
    return ""
