"""Command lines of the daemons of ``farflow up``: its file, overrides, and what belongs to a child.

What always holds: every child stops when its standard input ends; the places of keys and folders
and the ports come last, so that nothing in the file or in ``--set`` can point them elsewhere.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from farflow.run_folder import RunFolder
from farflow.up_config import LocalAgent
from transport.ids import policy_id
from transport.keys import trainer_name
from transport.runs import RunSpec

PLANES: Final = ("control", "trajectories", "weights")
FARFLOW: Final = (sys.executable, "-m", "farflow")


class CommandLines:
    """For one run folder; ``ports`` are by plane. ``http_port`` is the dashboard's, None for what
    the file says."""

    def __init__(
        self,
        folder: RunFolder,
        overrides: tuple[str, ...],
        spec: RunSpec,
        http_port: int | None = None,
    ) -> None:
        self._folder = folder
        self._http_port = http_port
        self._overrides = overrides
        self._spec = spec

    def scheduler(self, ports: Mapping[str, int]) -> list[str]:
        own: dict[str, Any] = {"scheduler.folder": str(self._folder.scheduler)}
        if self._http_port is not None:
            own["http.port"] = self._http_port
        return self._daemon("scheduler", own, ports)

    def trainer(self, name: str, ports: Mapping[str, int]) -> list[str]:
        """``name`` is a policy's."""
        policy = policy_id(self._spec.name, name)
        key = trainer_name(policy)
        return self._daemon(
            "trainer",
            {
                "trainer.policy": policy,
                "trainer.folder": str(self._folder.trainer(name)),
                "trainer.key": str(self._folder.keys / f"{key}.toml"),
                "trainer.signing_key": str(self._folder.keys / "signing" / f"{key}.toml"),
            },
            ports,
        )

    def agent(self, agent: LocalAgent, ports: Mapping[str, int]) -> list[str]:
        # What a policy's adapter belongs to is on this machine, too.
        models = {
            f"agent.local_models.{name}": policy.model
            for name, policy in self._spec.policies.items()
            if policy.publishes_adapter
        }
        settings = {f"agent.{key}": value for key, value in _flat(agent.settings)}
        return self._daemon(
            "agent",
            {
                **models,
                **settings,
                "agent.folder": str(self._folder.agent(agent.name)),
                "agent.key": str(self._folder.keys / f"{agent.name}.toml"),
            },
            ports,
        )

    def _daemon(self, verb: str, own: Mapping[str, Any], ports: Mapping[str, int]) -> list[str]:
        argv = [*FARFLOW, verb, "run", "--stop-on-eof", "--config", str(self._folder.config)]
        for text in self._overrides:
            argv += ["--set", text]
        settings: dict[str, Any] = {
            "transport.keys": str(self._folder.keys),
            "transport.reconnect_max_s": 5.0,
            **own,
            "transport.host": "127.0.0.1",
            **{f"transport.{plane}_port": ports[plane] for plane in PLANES},
        }
        for key, value in settings.items():
            argv += ["--set", f"{key}={json.dumps(value)}"]
        return argv


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.extend(_flat(value, f"{prefix}{key}."))
        else:
            flat.append((f"{prefix}{key}", value))
    return flat
