"""What this installation of an agent is, beside the scheduler's, and what it tells the core that it
can do."""

import platform
from collections.abc import Mapping

from edge_agent.config import AgentConfig
from edge_agent.core.settings import AgentSettings
from edge_agent.engine import Engine
from edge_agent.engine_probes import Verdict
from edge_agent.rewards import available_rewards
from edge_agent.workflow import Workflow
from transport.runtime.build import installed_build


def core_settings(
    config: AgentConfig, workflows: Mapping[str, Workflow], engine: Engine
) -> AgentSettings:
    """The core's view of ``[agent]`` and of what this installation can do."""
    table = config.agent
    return AgentSettings(
        slots=engine.slots,
        hardware=table.hardware or f"{platform.machine()} {table.device}",
        engine=table.engine,
        workflows={name: workflow.fingerprint for name, workflow in workflows.items()},
        rewards=available_rewards(),
        labels=table.labels,
        bases=tuple(table.local_models) if engine.takes_adapters else (),
        price_usd_hour=table.price_usd_hour,
        egress_usd_gb=table.egress_usd_gb,
        spool_bytes=table.spool_bytes,
        upload_window_bytes=table.upload_window_bytes,
        attempt_timeout_s=table.attempt_timeout_s,
        drain_s=table.drain_s,
        verify_every_swaps=table.verify_every_swaps,
        read_back_every_swaps=table.read_back_every_swaps,
    )


def build_verdict(scheduler: str) -> Verdict:
    """Whether this build is the one that the scheduler says it is of."""
    own = installed_build()
    if own == scheduler:
        return Verdict(f"{own}, as the scheduler's")
    return Verdict(
        f"here {own}, the scheduler {scheduler}: they differ",
        "nothing, while both speak one protocol; for the same on both: `pip install"
        " --force-reinstall --no-deps farflow-*.whl` where the older is, and start it again",
        warning=True,
    )
