"""Settings: every wrong key, type, range and unit is refused with its path."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_agent.config import AgentConfig
from farflow.commands import config_check
from farflow.reference import reference
from farflow.run_file import run_spec
from farflow.up_config import check_workflow, up_config
from scheduler.config import SchedulerConfig
from transport.errors import ConfigError, ModelError
from transport.runs import RunSpec, WorkflowSpec
from transport.runtime.config import collect, convert, load_config
from transport.runtime.daemon_cli import foreseen_errors

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "file.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[scheduler]\nleese_s = 3", "scheduler.leese_s: unknown key"),
        ("[scheduler]\nlease_s = 'soon'", "scheduler.lease_s"),
        ("[scheduler]\nlease_s = -1", "scheduler.lease_s"),
        ("[scheduler]\nlease_s = inf", "scheduler.lease_s"),
        ("[scheduler]\nlease_s = nan", "scheduler.lease_s"),
        (
            "[scheduler]\nlost_after_s = 3",
            "scheduler: lost_after_s = 3 is shorter than two heartbeats (heartbeat_s = 2)",
        ),
        (
            "[scheduler]\nheartbeat_s = 61",
            "raise lost_after_s to 122 or more, or lower heartbeat_s",
        ),
        ("[scheduler]\nlease_s = 3.5", "raise lease_s to 4 or more"),
        (
            "[scheduler]\nplacement = 'best'",
            "scheduler.placement: Invalid enum value 'best'; allowed are finish-time, round-robin,",
        ),
        (
            "[[transport.relays]]\nname = 'a'\nhost = 'h'\nprot = 1",
            "transport.relays[0].prot: unknown key; known are host, name, port",
        ),
        (
            "[[transport.relays]]\nname = '../eu'\nhost = 'h'",
            "transport.relays[0]: name '../eu' is not 1 to 48 characters",
        ),
        (
            "[[transport.relays]]\nname = 'eu'\nhost = 'a'\n"
            "[[transport.relays]]\nname = 'eu'\nhost = 'b'",
            "transport: relays: 'eu' is there twice",
        ),
        ("[schedular]\nx = 1", "unknown table [schedular]"),
        ("scheduler = 3", "scheduler must be a table"),
        ("[scheduler", "not valid TOML"),
        ("[transport]\ncontrol_port = 70000", "transport.control_port"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(SchedulerConfig, [write(tmp_path, text)], environ={})
    assert expected in str(error.value)


def test_a_nested_table_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.fake\.tokens: unknown key"):
        load_config(AgentConfig, [write(tmp_path, "[agent.fake]\ntokens = 1")], environ={})


def test_units_are_read_in_time_and_size_fields(tmp_path: Path) -> None:
    path = write(tmp_path, "[agent]\nspool_bytes = '64MiB'\ndrain_s = '1500ms'")
    config = load_config(AgentConfig, [path], environ={}).value
    assert (config.agent.spool_bytes, config.agent.drain_s) == (64 * 2**20, 1.5)


def test_later_sources_win_and_are_remembered(tmp_path: Path) -> None:
    path = write(tmp_path, "[scheduler]\nlease_s = 10\nheartbeat_s = 1")
    resolved = load_config(
        SchedulerConfig,
        [path],
        ["scheduler.lease_s=30"],
        {"FARFLOW_SCHEDULER__LEASE_S": "20", "FARFLOW_SCHEDULER__PREFETCH_GROUPS": "2"},
    )
    table = resolved.value.scheduler
    assert (table.lease_s, table.heartbeat_s, table.prefetch_groups) == (30.0, 1.0, 2)
    assert resolved.origins["scheduler.lease_s"] == "--set"
    assert resolved.origins["scheduler.prefetch_groups"] == "environment"
    assert resolved.origins["scheduler.heartbeat_s"] == str(path)


def test_tables_of_other_daemons_are_left_to_them(tmp_path: Path) -> None:
    path = write(tmp_path, "[agent]\nslots = 3\n[scheduler]\nlease_s = 5")
    assert load_config(AgentConfig, [path], environ={}).value.agent.slots == 3


@pytest.mark.parametrize("text", ["no_equals", "=3", "a..b=1"])
def test_a_malformed_override_says_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"table\.field=value"):
        load_config(SchedulerConfig, [], [text], {})


RUN = """
[run]
name = "r"
[policies.p]
model = "."
[task]
source = "reasoning-gym"
dataset = "chain_sum"
[workflow]
policies = ["p"]
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('name = "r"', 'name = "R!"', "run.name"),
        ('model = "."', 'model = "nowhere"', "policies.p.model"),
        ('model = "."', 'model = ""', "policies.p.model"),
        ("[task]", "[policies.q]\n[task]", "`model`; or is one of these meant: p?"),
        ('model = "."', 'model = "."\ntrainer = "x"', "trainer: Invalid enum value 'x'; allowed"),
        ('model = "."', 'model = "."\nstepz = 1', "policies.p.stepz: unknown key"),
        ('policies = ["p"]', 'policies = ["q"]', "workflow.policies"),
        ('policies = ["p"]', "policies = []", "policies.p: is trained"),
        ('source = "reasoning-gym"', 'source = "jsonl"', "task.path: missing"),
        ('dataset = "chain_sum"', "", "task.dataset: missing"),
        ("[task]", "[tasks]", "unknown table [tasks]"),
        (
            'model = "."',
            'model = "."\nsteps = 10_000_000_000',
            "policies.p.steps: Expected `int` <= ",
        ),
        (
            'model = "."',
            'model = "."\nbatch_groups = 1025',
            "policies.p.batch_groups: Expected `int` <= ",
        ),
        (
            'model = "."',
            'model = "."\nmax_policy_lag = 10_001',
            "policies.p.max_policy_lag: Expected `int` <= ",
        ),
        ("[task]", "[task]\nheld_out_one_in = 1001", "task.held_out_one_in: Expected"),
        (
            "[task]",
            '[[policies.p.data.filters]]\nname = "zero"\n[task]',
            "policies.p.data.filters[0].name: there is no filter 'zero'; shipped are overlong",
        ),
        (
            "[task]",
            '[[policies.p.data.filters]]\nname = "truncated"\nsettings = {shar = 1}\n[task]',
            "policies.p.data.filters[0].settings.shar: unknown key; known are share",
        ),
        (
            "[task]",
            '[[policies.p.data.filters]]\nname = "truncated"\nsetings = {}\n[task]',
            "policies.p.data.filters[0].setings: unknown key",
        ),
        (
            "[task]",
            '[[run.curators]]\nname = "greso"\nsettings = {easy = 2}\n[task]',
            "run.curators[0].settings.easy: Expected",
        ),
        ("[workflow]", "[workflow]\ngroup_size = 1025", "workflow.group_size: Expected"),
        ("[workflow]", "[workflow]\nmax_new_tokens = 1_000_001", "workflow.max_new_tokens"),
        ("[workflow]", f"[workflow]\nsettings.t = '{'x' * 17_000}'", "settings: take 17"),
        ('policies = ["p"]', 'policies = ["p"]\ntemperature = 0.7', "settings.temperature"),
        ('policies = ["p"]', 'policies = ["p"]\ntemperature = 0', "workflow.temperature"),
        ('[workflow]\npolicies = ["p"]', "", "[workflow]: missing"),
        ("[workflow]", "[evaluations.x]\nitem = 3\n[workflow]", "evaluations.x.item: unknown key"),
        (
            "[workflow]",
            "[evaluations.x]\nsamples = 8\n[workflow]",
            "evaluations.x.temperature: is 0 (greedy), so all 8 samples",
        ),
        (
            "[workflow]",
            "[evaluations.x.task]\nsource = 'jsonl'\npath = 'y'\nreward = 'exact'\n[workflow]",
            "evaluations.x.task.path: /",
        ),
        (
            'source = "reasoning-gym"\ndataset = "chain_sum"',
            "source = 'mixture'\nparts = [{source = 'reasoning-gym', datasat = 'x'}]",
            "task.parts[0].datasat: unknown key; known are answer, code, dataset",
        ),
        (
            'source = "reasoning-gym"\ndataset = "chain_sum"',
            "source = 'mixture'\nparts = [{source = 'mixture'}]",
            "task.parts[0].source: Invalid enum value 'mixture'; allowed are reasoning-gym, jsonl",
        ),
        ('dataset = "chain_sum"', 'dataset = "chain_sum"\npath = "x"', "task.path: source = "),
        ('source = "reasoning-gym"', 'source = "mixture"', "task.parts: missing"),
    ],
)
def test_a_wrong_run_file_names_the_key(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in RUN
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError) as error:
        run_spec(collect([write(tmp_path, RUN.replace(old, new))], (), {})[0], tmp_path)
    assert expected in str(error.value)


MIXED = """
[task]
source = "mixture"
parts = [
    {weight = 3, source = "reasoning-gym", dataset = "chain_sum"},
    {source = "jsonl", path = "data/facts.jsonl", reward = "exact"},
    {source = "python", function = "my.tasks:items", reward = "exact", family = "mine"},
]
[evaluations.facts]
samples = 4
temperature = 1.0
[evaluations.facts.task]
source = "jsonl"
path = "data/facts.jsonl"
reward = "exact"
"""


def test_files_of_parts_and_evaluations_are_found_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "data").mkdir()
    facts = tmp_path / "data" / "facts.jsonl"
    facts.touch()
    plain = '[task]\nsource = "reasoning-gym"\ndataset = "chain_sum"\n'
    assert plain in RUN
    path = write(tmp_path, RUN.replace(plain, MIXED))
    run = run_spec(collect([path], (), {})[0], tmp_path)
    assert [part.name for part in run.task.parts] == ["chain_sum", "facts", "mine"]
    assert [part.weight for part in run.task.parts] == [3.0, 1.0, 1.0]
    task = run.evaluations["facts"].task
    assert task is not None
    assert run.task.parts[1].path == task.path == str(facts)
    assert run.task.parts[0].path == ""


def test_an_agent_of_up_is_checked_like_the_agent_table(tmp_path: Path) -> None:
    path = write(tmp_path, "[local.agents.a]\nslotz = 1")
    with pytest.raises(ConfigError, match=r"local\.agents\.a\.slotz: unknown key"):
        up_config(collect([path], (), {})[0])


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_every_example_resolves(path: Path) -> None:
    data, _ = collect([path], (), {})
    run_spec(data, path.parent)
    up_config(data)


def test_the_configuration_page_is_generated() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "run: farflow config reference > docs/configuration.md"


SPEC = {
    "name": "r",
    "policies": {"p": {"model": "m"}},
    "task": {"source": "jsonl", "path": "x", "reward": "exact"},
    "workflow": {"policies": ["p"]},
}


def test_a_seed_that_no_message_carries_is_refused() -> None:
    assert convert({**SPEC, "seed": 2**63 - 1}, RunSpec).seed == 2**63 - 1
    with pytest.raises(ConfigError, match="seed: Expected `int` <= 9223372036854775807"):
        convert({**SPEC, "seed": 2**63}, RunSpec)


def test_a_run_too_large_for_one_message_is_refused() -> None:
    policies = {"p": {"model": "m", "settings": {"text": "x" * 200_000}}}
    with pytest.raises(ConfigError, match=r"the run takes 200\d+ bytes, a message has room"):
        convert({**SPEC, "policies": policies}, RunSpec)
    with pytest.raises(ConfigError, match="settings: take 20"):
        WorkflowSpec(policies=("p",), settings={"text": "x" * 20_000})


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 101.0])
def test_a_temperature_that_means_nothing_is_refused(number: float) -> None:
    with pytest.raises(ConfigError, match=r"workflow\.temperature: Expected `float`"):
        convert({**SPEC, "workflow": {"policies": ["p"], "temperature": number}}, RunSpec)


@pytest.mark.parametrize(
    ("overrides", "offered"),
    [
        ((), False),
        (("agent.workflows=['mine:flow']",), True),
        (("local.agents.near.workflows=['mine:flow']",), True),
        (("workflow.reference=program:mine",), False),
        (("workflow.reference=program:mine", "agent.programs.mine.command=['x']"), True),
        (
            ("workflow.reference=program:mine", "local.agents.far.programs.mine.command=['x']"),
            True,
        ),
    ],
)
def test_a_workflow_that_no_agent_of_up_offers_is_refused(
    overrides: tuple[str, ...], offered: bool
) -> None:
    path = ROOT / "examples" / "arithmetic.toml"
    data, _ = collect([path], ("workflow.reference=mine:flow", *overrides), {})
    spec, (config, agents) = run_spec(data, path.parent), up_config(data)
    if offered:
        check_workflow(spec, config, agents)
    else:
        with pytest.raises(ConfigError, match=r"workflow\.reference: no agent offers '"):
            check_workflow(spec, config, agents)


def test_a_model_that_does_not_load_ends_a_daemon_like_a_wrong_configuration() -> None:
    with pytest.raises(SystemExit) as ended, foreseen_errors("trainer"):
        raise ModelError("folder/model.safetensors: truncated")
    assert ended.value.code == 78


def test_config_check_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[scheduler]\nleese_s = 3")
    with pytest.raises(ConfigError, match=r"file\.toml: scheduler\.leese_s: unknown key"):
        CliRunner().invoke(config_check, [str(path)], catch_exceptions=False)


@pytest.mark.parametrize("value", ["[" * 3000, "{a=" * 3000])
def test_what_nests_too_deep_is_refused_with_its_place(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"file.toml: nested too deep"):
        collect([write(tmp_path, f"[log]\nx = {value}")], environ={})
    with pytest.raises(ConfigError, match=r"--set log.x: nested too deep"):
        collect([], [f"log.x={value}"], environ={})
    with pytest.raises(ConfigError, match=r"file.toml: nested too deep"):
        collect([write(tmp_path, "log." + "a." * 2000 + "a = 1")], environ={})


@pytest.mark.timeout(10)
def test_a_pipe_is_no_file_of_settings_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        collect([tmp_path / "pipe"], environ={})
