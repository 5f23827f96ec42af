"""The reference of every table and key, generated from the Structs that check them.

``docs/configuration.md`` is this text; a test compares them.
"""

import inspect
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, get_args, get_origin

import msgspec

from cloud_trainer.config import PublicationTable, TrainerTable
from cloud_trainer.emulated_trainer import EmulatedSettings
from cloud_trainer.lora_table import LoraTable
from cloud_trainer.numpy_trainer import NumpySettings
from cloud_trainer.torch_settings import TorchSettings
from edge_agent.config import AgentTable, FakeEngineTable, ProgramTable
from farflow.run_file import RunTable
from farflow.up_config import LocalTable
from scheduler.autoscaler import AutoscalerTable
from scheduler.config import SchedulerTable
from transport.relay_config import RelayTable
from transport.runs import (
    AlgorithmSpec,
    CodeReward,
    DataSpec,
    EvaluationSpec,
    PartSpec,
    PolicySpec,
    ReplaySpec,
    TaskSpec,
    WorkflowSpec,
)
from transport.runtime.settings import LogConfig, RelayAddress, TransportConfig

DEPLOYMENT: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("transport", TransportConfig),
    ("transport.relays", RelayAddress),
    ("scheduler", SchedulerTable),
    ("scheduler.autoscaler", AutoscalerTable),
    ("agent", AgentTable),
    ("agent.fake", FakeEngineTable),
    ("agent.programs.NAME", ProgramTable),
    ("trainer", TrainerTable),
    ("trainer.publication", PublicationTable),
    ("relay", RelayTable),
    ("log", LogConfig),
    ("local", LocalTable),
)
RUN: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("run", RunTable),
    ("policies.NAME", PolicySpec),
    ('policies.NAME.settings with trainer = "torch"', TorchSettings),
    ("policies.NAME.settings.lora", LoraTable),
    ('policies.NAME.settings with trainer = "numpy"', NumpySettings),
    ('policies.NAME.settings with trainer = "emulated"', EmulatedSettings),
    ("policies.NAME.data", DataSpec),
    ("policies.NAME.data.replay", ReplaySpec),
    ("policies.NAME.data.filters", AlgorithmSpec),
    ("run.curators", AlgorithmSpec),
    ("task", TaskSpec),
    ("task.code", CodeReward),
    ("task.parts", PartSpec),
    ("workflow", WorkflowSpec),
    ("evaluation", EvaluationSpec),
    ("evaluations.NAME", EvaluationSpec),
)

_HEAD = """# Configuration

Two kinds of TOML: a **deployment** (where the daemons are, their limits) and a **run** (what is
learnt); `farflow up` takes one file with both, each daemon reads its own tables. Later sources
win: defaults, files in order, `FARFLOW_TABLE__FIELD` variables, `--set table.field=value`.

`farflow config check FILE` refuses unknown keys, wrong types, ranges and units with the path of the
key; `farflow config show FILE` prints every value and where it came from. Keys ending in `_s` take
seconds or texts such as `"1500ms"`, keys ending in `_bytes` numbers or `"64MiB"`.

`[links.NAME]` describes an emulated link for `[local.agents.NAME] link`: `rtt` (or `delay_up` and
`delay_down`), `jitter`, `rate` (or `rate_up` and `rate_down`), `queue`, and
`outages = [{ start = "60s", duration = "20s" }]`; `farflow sim link profiles` lists ours.

This page is generated: `farflow config reference`.
"""


def reference() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for title, tables in (("Deployment", DEPLOYMENT), ("Run", RUN)):
        parts.append(f"\n## {title}\n")
        for name, struct in tables:
            parts.append(
                f"\n### {_title(name)}\n\n{_doc(struct)}\n\n"
                "| key | type | default |\n|---|---|---|\n"
            )
            parts.extend(
                f"| `{field.encode_name}` | {_type(field.type)} | {_default(field)} |\n"
                for field in msgspec.structs.fields(struct)
            )
    return "".join(parts)


def _title(name: str) -> str:
    """``a.b with c`` as a heading that quotes the table and the condition; ``a.b`` alone too."""
    table, _, condition = name.partition(" with ")
    return f"`[{table}]`" + (f" with `{condition}`" if condition else "")


def _doc(struct: type[msgspec.Struct]) -> str:
    text = " ".join(inspect.cleandoc(struct.__doc__ or "").split())
    return text.replace("``", "`")


def _type(kind: Any) -> str:
    if hasattr(kind, "__metadata__"):
        base, *extra = get_args(kind)
        bounds = [
            f"{sign} {value:g}"
            for meta in extra
            for sign, value in (("≥", meta.ge), (">", meta.gt), ("≤", meta.le))
            if value is not None
        ]
        return " ".join([_type(base), *bounds])
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(kind))
    if origin is dict and _is_table(get_args(kind)[1]):
        return f"tables `{get_args(kind)[1].__name__}` by name"
    element = get_args(kind)[0] if origin is tuple else None
    if _is_table(element):
        return f"list of tables `{element.__name__}`"
    if origin is UnionType:
        return " or ".join(_type(each) for each in get_args(kind) if each is not NoneType)
    if origin is not None:
        return str(kind).replace("typing.", "").replace(" | ", " or ")
    name = getattr(kind, "__name__", str(kind))
    return f"table `{name}`" if _is_table(kind) else name


def _is_table(kind: Any) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        return "its own table"
    return f"`{value!r}`"
