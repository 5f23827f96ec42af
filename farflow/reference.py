"""The reference of every table and key, generated from the Structs that check them.

``docs/configuration.md`` is this text; a test compares them.
"""

import msgspec

from cloud_trainer.config import PublicationTable, TrainerTable
from cloud_trainer.critic_table import CriticTable
from cloud_trainer.emulated_trainer import EmulatedSettings
from cloud_trainer.lora_table import LoraTable
from cloud_trainer.numpy_trainer import NumpySettings
from cloud_trainer.torch_settings import TorchSettings
from edge_agent.config import (
    AgentTable,
    FakeEngineTable,
    OpenaiServer,
    OpenaiTable,
    ProgramTable,
    VllmTable,
)
from farflow.deployment import RetentionTable
from farflow.run_file import RunTable
from farflow.up_config import LocalTable
from scheduler.autoscaler import AutoscalerTable
from scheduler.config import HttpTable, MqttTable, SchedulerTable
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
from transport.runtime.config_text import default_of, described, type_text
from transport.runtime.settings import LogConfig, RelayAddress, TransportConfig

DEPLOYMENT: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("transport", TransportConfig),
    ("transport.relays", RelayAddress),
    ("scheduler", SchedulerTable),
    ("scheduler.autoscaler", AutoscalerTable),
    ("http", HttpTable),
    ("mqtt", MqttTable),
    ("agent", AgentTable),
    ("agent.fake", FakeEngineTable),
    ("agent.vllm", VllmTable),
    ("agent.openai", OpenaiTable),
    ("agent.openai.servers.NAME", OpenaiServer),
    ("agent.programs.NAME", ProgramTable),
    ("trainer", TrainerTable),
    ("trainer.publication", PublicationTable),
    ("relay", RelayTable),
    ("log", LogConfig),
    ("local", LocalTable),
    ("retention", RetentionTable),
)
RUN: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("run", RunTable),
    ("policies.NAME", PolicySpec),
    ('policies.NAME.settings with trainer = "torch"', TorchSettings),
    ("policies.NAME.settings.lora", LoraTable),
    ("policies.NAME.settings.critic", CriticTable),
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
                f"\n### {_title(name)}\n\n{described(struct)}\n\n"
                "| key | type | default |\n|---|---|---|\n"
            )
            parts.extend(
                f"| `{field.encode_name}` | {type_text(field.type)} | {_default(field)} |\n"
                for field in msgspec.structs.fields(struct)
            )
    return "".join(parts)


def _title(name: str) -> str:
    """``a.b with c`` as a heading that quotes the table and the condition; ``a.b`` alone too."""
    table, _, condition = name.partition(" with ")
    return f"`[{table}]`" + (f" with `{condition}`" if condition else "")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = default_of(field)
    if isinstance(value, msgspec.Struct):
        return "its own table"
    return f"`{value!r}`"
