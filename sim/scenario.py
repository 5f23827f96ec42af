"""What is simulated: sites, agents, links, a run, faults. A scenario is a TOML file.

What always holds: the fleet is a function of the scenario and the seed; unknown keys are refused.
"""

import difflib
import random
import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from scheduler.core.settings import CoreSettings
from sim.fair_share import UNLIMITED
from sim.faults import FaultSpec
from sim.links import LinkKeys, link_rate
from sim.topology import Topology, load_regions, star
from sim.workload import Seconds, Spread, Workload
from transport.errors import ConfigError
from transport.runs import DataSpec, PolicySpec, RunSpec, TaskSpec, WorkflowSpec

RUN: Final = "sim"
MBIT: Final = 125_000.0
"""Bytes per second."""

Positive = Annotated[int, Meta(ge=1, le=10**6)]
Rate = Annotated[float, Meta(gt=0.0, le=1e9)]


class AgentsSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``per_site`` agents at each site; slots, tokens per second of one sequence and access link
    (Mbit/s; upwards ``up_mbit`` where given) are drawn from these choices, each by itself;
    ``usd_hour`` is what an agent costs, in the order of ``tokens_per_s``."""

    per_site: Positive = 2
    slots: tuple[Positive, ...] = (8,)
    tokens_per_s: tuple[Rate, ...] = (50.0,)
    link_mbit: tuple[Rate, ...] = (100.0,)
    up_mbit: tuple[Rate, ...] = ()
    usd_hour: tuple[Annotated[float, Meta(ge=0.0, le=1e6)], ...] = ()

    def price_usd_hour(self, tokens_per_s: float) -> float:
        """Raises ConfigError when prices and speeds are not pairs."""
        if not self.usd_hour:
            return 0.0
        if len(self.usd_hour) != len(self.tokens_per_s):
            raise ConfigError("agents.usd_hour: give one price for each of agents.tokens_per_s")
        return self.usd_hour[self.tokens_per_s.index(tokens_per_s)]


class PolicyShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``train_s`` and ``train_cv`` None: the workload's; ``data`` as in a run's file."""

    batch_groups: Positive = 64
    max_policy_lag: Annotated[int, Meta(ge=0, le=10_000)] = 2
    train_s: Seconds | None = None
    train_cv: Spread | None = None
    data: DataSpec = DataSpec()


class Scenario(LinkKeys, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``regions`` names a shipped table of round trips, or ``sites`` gives each site's round trip
    to the cloud in milliseconds, or ``profiles`` its link profile; ``cloud`` is where scheduler,
    services and trainers are, behind one NIC of ``nic_mbit`` (none in the ``proxy`` model). What
    links are like: ``LinkKeys``. Simulated until every policy has finished ``steps`` steps, or
    ``limit_s``. ``scheduler`` changes settings of its core; policies' ``data`` may name functions
    of ``data_modules``."""

    name: str
    about: str = ""
    regions: str = ""
    sites: dict[str, Annotated[float, Meta(ge=0.0, le=1e5)]] = msgspec.field(default_factory=dict)
    cloud: str = "us-east-1"
    nic_mbit: Rate = 25_000.0
    agents: AgentsSpec = AgentsSpec()
    policies: dict[str, PolicyShape] = msgspec.field(
        default_factory=lambda: {"policy": PolicyShape()}
    )
    group_size: Positive = 1
    mode: Literal["async", "sync"] = "async"
    steps: Positive = 60
    limit_s: Annotated[float, Meta(gt=0.0, le=1e9)] = 50_000.0
    workload: Workload = Workload()
    faults: FaultSpec = FaultSpec()
    scheduler: dict[str, Any] = msgspec.field(default_factory=dict)
    data_modules: Annotated[tuple[str, ...], Meta(max_length=32)] = ()

    @property
    def nic_rate(self) -> float:
        """Bytes per second of the cloud's NIC, each way."""
        return UNLIMITED if self.link_model == "proxy" else self.nic_mbit * MBIT

    def topology(self) -> Topology:
        """Raises ConfigError for sites that are given twice, or a profile that is not there."""
        profiles = self.link_profiles()
        if self.regions:
            if profiles:
                raise ConfigError("profiles: regions have their round trips; leave one of them out")
            return load_regions(self.regions, self.providers)
        if twice := sorted(set(self.sites) & set(profiles)):
            raise ConfigError(f"profiles.{twice[0]}: its round trip is in sites, too; say it once")
        rtt_s = {site: ms / 1000.0 for site, ms in self.sites.items()}
        rtt_s |= {site: profile.rtt_s for site, profile in profiles.items()}
        up_s = {site: profile.delay_up_s for site, profile in profiles.items()}
        return star(rtt_s, centre=self.cloud, up_s=up_s, providers=self.providers)

    def fleet(self, seed: int) -> list["AgentPlan"]:
        """The agents of this seed, by name."""
        topology, profiles = self.topology(), self.link_profiles()
        sites = topology.sites if self.regions else (*self.sites, *self.profiles)
        rng = random.Random(seed)  # noqa: S311
        spec = self.agents
        plans: list[AgentPlan] = []
        for site in sites:
            for number in range(spec.per_site):
                slots = rng.choice(spec.slots)
                tokens_per_s = rng.choice(spec.tokens_per_s)
                down = rng.choice(spec.link_mbit)
                up = rng.choice(spec.up_mbit) if spec.up_mbit else down
                rates = (up * MBIT, down * MBIT)
                if profile := profiles.get(site):
                    ways = (profile.rate_up_bits_per_s, profile.rate_down_bits_per_s)
                    rates = (link_rate(ways[0]), link_rate(ways[1]))
                usd_hour = spec.price_usd_hour(tokens_per_s)
                name = f"{site}-{number}"
                plans.append(AgentPlan(name, site, slots, tokens_per_s, *rates, usd_hour))
        return plans

    def core_settings(self, placement: str) -> CoreSettings:
        """Raises ConfigError for a setting that is not there or does not fit."""
        try:
            return msgspec.convert({**self.scheduler, "placement": placement}, CoreSettings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"scheduler of scenario {self.name}: {error}") from error

    def run_spec(self, seed: int) -> RunSpec:
        """The run of this seed, from which lengths and rewards follow: some steps longer than what
        is measured, so that the end does not show."""
        policies = {
            name: PolicySpec(
                model="sim",
                trainer="numpy",
                steps=self.steps + 4 * (shape.max_policy_lag + 1),
                batch_groups=shape.batch_groups,
                max_policy_lag=shape.max_policy_lag,
                checkpoint_every=10,
                data=shape.data,
            )
            for name, shape in self.policies.items()
        }
        return RunSpec(
            name=RUN,
            mode=self.mode,
            seed=seed,
            policies=policies,
            task=TaskSpec(source="reasoning-gym", dataset="chain_sum"),
            workflow=WorkflowSpec(
                policies=tuple(self.policies),
                group_size=self.group_size,
                max_new_tokens=self.workload.max_new_tokens,
            ),
        )


class AgentPlan(msgspec.Struct, frozen=True):
    """One agent; rates of its link in bytes per second."""

    name: str
    site: str
    slots: int
    tokens_per_s: float
    up: float
    down: float
    usd_hour: float = 0.0

    @property
    def hardware(self) -> str:
        """What an agent says of its machine: agents of one kind are equally fast."""
        return f"class-{self.tokens_per_s:g}"


def load_scenario(source: str | Path) -> Scenario:
    """A file, or the name of a shipped scenario.

    Raises:
        ConfigError: there is none, or it does not fit; names the field.
    """
    path = Path(source)
    shipped = resources.files("sim.data").joinpath(f"{source}.scenario.toml")
    if path.suffix == ".toml":
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"scenario {path}: {error.strerror}") from error
    elif shipped.is_file():
        text = shipped.read_bytes()
    else:
        known = ", ".join(shipped_scenarios())
        raise ConfigError(f"scenario {source!r} is not shipped; there are {known}")
    try:
        return msgspec.toml.decode(text, type=Scenario)
    except msgspec.DecodeError as error:
        raise ConfigError(f"scenario {source}: {error}{_remedy(str(error))}") from error


def _remedy(error: str) -> str:
    """What can be said instead of a key that there is not."""
    found = re.search(r"unknown field `(.*?)`(?: - at `\$\.?(.*)`)?", error)
    if found is None:
        return ""
    key, path = found[1], found[2] or ""
    kinds: list[type[msgspec.Struct]] = [Scenario]
    for part in re.sub(r"\[.*?\]", "", path).split(".") if path else ():
        kinds = [
            kind
            for struct in kinds
            for field in msgspec.structs.fields(struct)
            if field.encode_name == part
            for kind in _structs(field.type)
        ]
    known = sorted({field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)})
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.5) or known
    return f"; did you mean {', '.join(near)}?" if near else ""


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    """Those that a field's type is made of."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [found for part in get_args(kind) for found in _structs(part)]


def shipped_scenarios() -> list[str]:
    names = [entry.name for entry in resources.files("sim.data").iterdir()]
    ending = ".scenario.toml"
    return sorted(name.removesuffix(ending) for name in names if name.endswith(ending))
