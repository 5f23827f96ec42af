"""What ``farflow up`` reads beside the run: which agents to start here, and behind which links."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cloud_trainer.config import TrainerTable
from edge_agent.config import AgentTable
from edge_agent.workflow import SHIPPED
from farflow.workflow_settings import workflows
from scheduler.config import HttpTable, MqttTable, SchedulerTable
from sim.link_profile import load_profiles, profile_from_table
from transport.errors import ConfigError
from transport.ids import NAME_RULE, is_name
from transport.runs import RunSpec
from transport.runtime.config import convert, merge
from transport.runtime.settings import LogConfig, PositiveSeconds, TransportConfig


class LocalTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[local]``. ``agents`` maps an agent's name to overrides of ``[agent]``, among them
    ``link``, the name of a ``[links.*]`` profile or a shipped one (``local`` = no emulator)."""

    runs: str = "runs"
    agents: dict[str, dict[str, Any]] = {}
    stop_s: PositiveSeconds = 8.0
    start_s: PositiveSeconds = 90.0
    settle_s: PositiveSeconds = 20.0


class LocalAgent(msgspec.Struct, frozen=True, kw_only=True):
    """One agent of ``up``: its link and the settings it is started with. ``join_after_s`` starts
    it late, to see what an agent that joins in mid-run does."""

    name: str
    link: str
    settings: dict[str, Any]
    join_after_s: Annotated[float, Meta(ge=0.0)] = 0.0


ANY_PORT = HttpTable(port=0)
"""Without a table ``[http]``: two runs on one machine have a dashboard each."""


class UpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of ``up`` that are not the run's."""

    local: LocalTable
    transport: TransportConfig = TransportConfig()
    scheduler: SchedulerTable = SchedulerTable()
    http: HttpTable = ANY_PORT
    mqtt: MqttTable = MqttTable()
    agent: AgentTable = AgentTable()
    trainer: TrainerTable = TrainerTable()
    links: dict[str, dict[str, Any]] = {}
    log: LogConfig = LogConfig()


def up_config(data: dict[str, Any]) -> tuple[UpConfig, list[LocalAgent]]:
    """The settings and the agents in the merged tables ``data``.

    Raises:
        ConfigError: a value is wrong; names the key and the remedy.
    """
    if "local" not in data:
        raise ConfigError("[local]: missing; `farflow up` needs [local.agents.NAME] tables")
    config = convert({k: data[k] for k in UpConfig.__struct_fields__ if k in data}, UpConfig)
    shipped = load_profiles()
    own = {name: profile_from_table(name, table) for name, table in config.links.items()}
    known = sorted({*shipped, *own})
    agents = []
    for name, overrides in sorted(config.local.agents.items()):
        if not is_name(name):
            raise ConfigError(f"local.agents.{name}: the name must be {NAME_RULE}")
        settings = dict(overrides)
        link = settings.pop("link", "local")
        late = settings.pop("join_after_s", 0.0)
        if link not in known:
            raise ConfigError(
                f"local.agents.{name}.link: no link profile {link!r}; known are "
                f"{', '.join(known)}; add your own as [links.NAME]"
            )
        if not isinstance(late, int | float) or late < 0:
            raise ConfigError(f"local.agents.{name}.join_after_s: must be seconds >= 0")
        convert(merge(data.get("agent", {}), settings), AgentTable, f"local.agents.{name}")
        agents.append(LocalAgent(name=name, link=link, settings=settings, join_after_s=late))
    if not agents:
        raise ConfigError("local.agents: at least one [local.agents.NAME] is needed")
    return config, agents


def check_workflow(spec: RunSpec, config: UpConfig, agents: list[LocalAgent]) -> None:
    """Whether some agent of ``up`` offers each workflow of the run and its evaluations.

    Raises:
        ConfigError: none does, so the run or the evaluation would wait for ever.
    """
    offered = {*SHIPPED, *config.agent.workflows}
    offered.update(f"program:{name}" for name in config.agent.programs)
    for agent in agents:
        offered.update(agent.settings.get("workflows", ()))
        offered.update(f"program:{name}" for name in agent.settings.get("programs", ()))
    for _, key, workflow in workflows(spec):
        if workflow.reference not in offered:
            raise ConfigError(
                f"{key}: no agent offers {workflow.reference!r}; offered are "
                f"{', '.join(sorted(offered))}; name your own as module:function in "
                "agent.workflows, or a program in [agent.programs]"
            )
