"""A scenario of the simulator as the file, model and items of a deployment on this machine.

What always holds: agents get the scenario's slots, rates, service times and links of that seed;
jobs have the seeds that they have in the simulator, and with the fake engine so do the lengths of
sequences (``[agent.fake] lengths_by = "place"``); what cannot be emulated is refused by its key.
The delta of a version is made as large as the scenario says by measuring the codec on the very
model (``changed_share``); a share of cells that changes by one unit in the last place codes to 10 %
of the model at most, a scenario that wants more is refused.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from cloud_trainer.config import PublicationTable
from cloud_trainer.emulated_trainer import EmulatedTrainer
from sim.link_profile import LinkProfile
from sim.scenario import MBIT, AgentPlan, Scenario
from sim.topology import Topology
from sim.workload import make_items
from transport.errors import ConfigError
from transport.weights.folder import read_model_folder, write_model_folder
from transport.weights.publication import build_delta_version
from transport.weights.segments import CodecSettings
from transport.weights.tensors import TensorBytes

ITEMS: Final = 1000
TENSOR_CELLS: Final = 1 << 18
UNLIMITED_MBIT: Final = 1e5
"""From here on a link without delay is none: the agent connects directly."""

_MOST_SHARE: Final = 2 / 3
"""Of cells: unchanged, up and down are then equally likely, no share codes to more."""
_BISECTIONS: Final = 14


def write_emulation(
    scenario: Scenario,
    folder: Path,
    *,
    seed: int,
    placement: str,
    engine: str,
    model: Path | None = None,
) -> Path:
    """Write model, items and ``emulation.toml`` into the new ``folder``; returns the file.

    Raises:
        ConfigError: the scenario has something that cannot be emulated; names the key.
    """
    _refuse_what_is_not_emulated(scenario)
    if model is not None:
        _check_positions(model, scenario)
    folder.mkdir(parents=True)
    if model is None:
        model = make_model(folder / "model", scenario.workload.full_bytes)
    share = changed_share(model, scenario.workload.delta_bytes)
    write_items(folder / "items.jsonl", scenario.workload.prompt_tokens)
    plans = scenario.fleet(seed)
    tables = _tables(scenario, plans, seed, placement, engine, model.resolve(), share)
    path = folder / "emulation.toml"
    path.write_text(toml_text(tables), encoding="utf-8")
    return path


def make_model(folder: Path, full_bytes: int) -> Path:
    """A model folder of about ``full_bytes`` of BF16 noise, which only ``emulated`` trains."""
    rng = np.random.default_rng(1)
    tensors: dict[str, TensorBytes] = {}
    left = max(1, full_bytes // 2)
    while left:
        count = min(left, TENSOR_CELLS)
        values = (rng.standard_normal(count, np.float32) * np.float32(0.02)).view(np.uint32)
        cells = (values >> np.uint32(16)).astype("<u2")
        tensors[f"layers.{len(tensors):05d}.weight"] = TensorBytes(
            "BF16", (count,), cells.tobytes()
        )
        left -= count
    write_model_folder(folder, tensors, {"config.json": b'{"model_type": "farflow-emulated"}'})
    return folder


def changed_share(model: Path, delta_bytes: int) -> float:
    """The share of cells whose change makes a delta file of ``delta_bytes``, within 2 %, or what
    remains of it when even an empty one is larger.

    Raises:
        ConfigError: no share does.
    """
    low, high = 0.0, _MOST_SHARE
    if delta_size_bytes(model, high) < delta_bytes:
        raise ConfigError(
            f"workload.delta_bytes: {delta_bytes} is more than the emulated trainer can make of a "
            f"model of full_bytes = {full_bytes(model)} (about 10 %); raise full_bytes"
        )
    share = 0.0
    for _ in range(_BISECTIONS):
        share = (low + high) / 2
        size_bytes = delta_size_bytes(model, share)
        if math.isclose(size_bytes, delta_bytes, rel_tol=0.02):
            break
        low, high = (share, high) if size_bytes < delta_bytes else (low, share)
    return share


def delta_size_bytes(model: Path, share: float) -> int:
    """Size of the delta file of one step of the emulated trainer, coded as trainers code it."""
    table = PublicationTable()
    trainer = EmulatedTrainer({"step_s": 0.0, "changed_share": share})
    trainer.load(model)
    before = trainer.published_state()
    trainer.step(())
    publication = build_delta_version(
        before,
        trainer.published_state(),
        run="measure",
        policy="measure/policy",
        version=1,
        parent=0,
        step=1,
        created_wall_s=0.0,
        settings=CodecSettings(coder=table.coder, link_bytes_s=table.link_bits_per_s / 8),
    )
    return sum(entry.size_bytes for entry in publication.manifest.files)


def full_bytes(model: Path) -> int:
    return sum(len(tensor.data) for tensor in read_model_folder(model).values())


def write_items(path: Path, prompt_characters: int) -> None:
    """Sums in prompts of the simulator's size (a token of the fake engine is a character)."""
    lines = []
    for number, item in enumerate(make_items(0, ITEMS)):
        total = f"{number} + {number % 7} ="
        prompt = item.prompt[: max(0, prompt_characters - len(total) - 1)]
        answer = str(number + number % 7)
        lines.append(json.dumps({"prompt": f"{prompt} {total}", "answer": answer}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _tables(
    scenario: Scenario,
    plans: list[AgentPlan],
    seed: int,
    placement: str,
    engine: str,
    model: Path,
    share: float,
) -> dict[str, Any]:
    spec, workload = scenario.run_spec(seed), scenario.workload
    topology, profiles = scenario.topology(), scenario.link_profiles()
    tables: dict[str, Any] = {
        "run": {"name": spec.name, "seed": spec.seed},
        "task": {
            "source": "jsonl",
            "path": "items.jsonl",
            "reward": "exact",
            "held_out_one_in": 1000,
        },
        "workflow": {
            "reference": spec.workflow.reference,
            "policies": list(spec.workflow.policies),
            "group_size": spec.workflow.group_size,
            "max_new_tokens": spec.workflow.max_new_tokens,
        },
        "scheduler": {**scenario.scheduler, "placement": placement},
        "agent": {"engine": engine, "drain_s": 1.0},
        "local": {"start_s": 60.0, "stop_s": 5.0, "settle_s": 1.0},
    }
    for name, shape in scenario.policies.items():
        policy = spec.policies[name]
        tables[f"policies.{name}"] = {
            "model": str(model),
            "trainer": "emulated",
            "steps": policy.steps,
            "batch_groups": policy.batch_groups,
            "max_policy_lag": policy.max_policy_lag,
            "checkpoint_every": policy.checkpoint_every,
        }
        tables[f"policies.{name}.settings"] = {
            "step_s": workload.train_s if shape.train_s is None else shape.train_s,
            "changed_share": share,
        }
    models = {name: str(model) for name in scenario.policies}
    for plan in plans:
        link = _link(scenario, topology, plan, profiles.get(plan.site))
        if link is not None:
            tables[f"links.{plan.name}"] = link
        tables[f"local.agents.{plan.name}"] = {
            "link": "local" if link is None else plan.name,
            "slots": plan.slots,
            "hardware": plan.hardware,
        }
        tables[f"local.agents.{plan.name}.local_models"] = models
        tables[f"local.agents.{plan.name}.fake"] = {
            "lengths_by": "place",
            "tokens_per_s": plan.tokens_per_s,
            "first_token_s": workload.first_token_s,
            "mean_tokens": workload.mean_tokens,
            "cv_tokens": workload.cv_tokens,
        }
    return tables


def _link(
    scenario: Scenario, topology: Topology, plan: AgentPlan, profile: LinkProfile | None
) -> dict[str, Any] | None:
    """The table of an agent's emulated link; None when it needs none."""
    rtt_s = topology.rtt_s(scenario.cloud, plan.site)
    half_s = rtt_s / 2
    link: dict[str, Any] = {
        "delay_up": half_s,
        "delay_down": half_s,
        "jitter": topology.jitter_s,
        "rate_up": _rate(plan.up),
        "rate_down": _rate(plan.down),
    }
    if profile is not None:
        link |= {
            "delay_up": profile.delay_up_s,
            "delay_down": profile.delay_down_s,
            "jitter": profile.jitter_s,
            "queue": profile.queue_bytes,
            "outages": [
                {"start": outage.start_s, "duration": outage.duration_s}
                for outage in profile.outages
            ],
        }
    elif rtt_s == 0.0 and min(plan.up, plan.down) / MBIT >= UNLIMITED_MBIT:
        return None
    return link


def _rate(bytes_s: float) -> str:
    mbit = bytes_s / MBIT
    return f"{mbit:g}Mbit/s" if mbit < UNLIMITED_MBIT else "unlimited"


def _check_positions(model: Path, scenario: Scenario) -> None:
    """A model that has no room for a sequence would fail every attempt."""
    path = model / "config.json"
    try:
        found = json.loads(path.read_bytes()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--model {path}: does not load: {error}") from error
    workload = scenario.workload
    longest = workload.prompt_tokens + workload.max_new_tokens
    if isinstance(found, int) and longest > found:
        raise ConfigError(
            f"--model {model}: has {found} positions; workload.prompt_tokens + max_new_tokens is "
            f"{longest}, lower one of them or take another model"
        )


def _refuse_what_is_not_emulated(scenario: Scenario) -> None:
    if scenario.link_model == "tcp":
        raise ConfigError(
            "link_model: the emulator's links have no windows and no slow start, so tcp would not "
            "be what runs; say link_model = proxy (--set link_model=proxy)"
        )
    faults, workload = scenario.faults, scenario.workload
    for key, is_set in (
        ("loss", any(scenario.loss.values()) or scenario.tcp.loss > 0.0),
        ("drift", bool(scenario.drift)),
        ("rate", scenario.rate != "access"),
    ):
        if is_set:
            raise ConfigError(
                f"{key}: the emulator's links have no such thing; leave it out for `sim emulate`"
            )
    shapes = scenario.policies.items()
    for key, is_set in (
        ("faults.planned", bool(faults.planned)),
        ("faults.preempt_mtbf_s", faults.preempt_mtbf_s > 0.0),
        ("faults.slow_mtbf_s", faults.slow_mtbf_s > 0.0),
        ("faults.clock_skew_s", faults.clock_skew_s > 0.0),
        ("faults.agent_wiped_share", faults.agent_wiped_share > 0.0),
        ("workload.lengths_file", bool(workload.lengths_file)),
        ("workload.deltas_file", bool(workload.deltas_file)),
        ("workload.turns", workload.turns != (1,)),
        ("workload.train_cv", workload.train_cv > 0.0),
        *((f"policies.{name}.train_cv", (shape.train_cv or 0.0) > 0.0) for name, shape in shapes),
    ):
        if is_set:
            raise ConfigError(
                f"{key}: is simulated only (`sim run`); leave it out for `sim emulate`"
            )


def toml_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables by their dotted name, of keys that need no quotes, with texts, numbers and lists of
    them, or tables of texts."""
    lines: list[str] = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_value(value)}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(v)}" for key, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    return json.dumps(value)
