"""What this installation of an agent is: its build, and what it tells the core that it can do."""

import platform
from collections.abc import Mapping
from importlib import metadata

from edge_agent.config import AgentConfig
from edge_agent.core.settings import AgentSettings
from edge_agent.rewards import available_rewards
from edge_agent.workflow import Workflow


def core_settings(
    config: AgentConfig, workflows: Mapping[str, Workflow], *, slots: int, takes_adapters: bool
) -> AgentSettings:
    """The core's view of ``[agent]`` and of what this installation can do."""
    table = config.agent
    return AgentSettings(
        slots=slots,
        hardware=table.hardware or f"{platform.machine()} {table.device}",
        engine=table.engine,
        workflows={name: workflow.fingerprint for name, workflow in workflows.items()},
        rewards=available_rewards(),
        labels=table.labels,
        bases=tuple(table.local_models) if takes_adapters else (),
        price_usd_hour=table.price_usd_hour,
        egress_usd_gb=table.egress_usd_gb,
        spool_bytes=table.spool_bytes,
        upload_window_bytes=table.upload_window_bytes,
        attempt_timeout_s=table.attempt_timeout_s,
        drain_s=table.drain_s,
        verify_every_swaps=table.verify_every_swaps,
        read_back_every_swaps=table.read_back_every_swaps,
    )


def build() -> str:
    """The version of the package that runs, "0" from a checkout."""
    try:
        return metadata.version("farflow")
    except metadata.PackageNotFoundError:
        return "0"
