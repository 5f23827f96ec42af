"""Presets are the methods they are named after, and what a file says wins."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from cloud_trainer.critic_table import CriticTable
from cloud_trainer.presets import PRESETS, resolve_settings
from cloud_trainer.torch_settings import Preset, TorchSettings
from farflow.run_file import run_spec
from transport.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "learning.md"
COLUMNS = ["ratio", "clip", "clip_low", "clip_high", "ratio_max", "aggregation", "baseline"]
COLUMNS += ["normalisation", "overlong_penalty", "kl_coefficient", "kl_estimator", "kl_in"]
COLUMNS += ["second_moment_budget"]


def settings_of(preset, **given):
    return resolve_settings({"preset": preset, "max_tokens": 100, **given})


def shown_value(settings, name):
    """A dash for what the form of clipping makes no use of."""
    unused = {"ppo": (), "cispo": ("ratio_max",), "none": ("clip_low", "clip_high", "ratio_max")}
    if name in unused[settings.clip]:
        return "-"
    value = getattr(settings, name)
    return value if isinstance(value, str) else f"{value:g}"


def test_every_name_has_a_preset():
    assert set(PRESETS) == set(get_args(Preset))


def test_the_default_is_our_own():
    assert resolve_settings({}) == TorchSettings()
    assert PRESETS["farflow"] == {}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_page_shows_every_key_of_the_loss_as_the_preset_sets_it(preset):
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| `\w+` \|", line)
    ]
    (header,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| preset |")]
    names = [cell.strip().strip("`") for cell in header.strip("|").split("|")][1:]
    assert names == COLUMNS
    (shown,) = [row[1:] for row in rows if row[0] == preset and len(row) == len(COLUMNS) + 1]
    assert shown == [shown_value(settings_of(preset), name) for name in COLUMNS]


def test_the_switches_of_each_method():
    assert settings_of("grpo").aggregation == "sequence"
    assert settings_of("grpo").kl_coefficient == 0.04
    assert settings_of("dr_grpo").aggregation == "constant"
    assert settings_of("dr_grpo").normalisation == "none"
    assert settings_of("dapo").clip_high > settings_of("dapo").clip_low
    assert settings_of("dapo").overlong_penalty == 1.0
    assert settings_of("gspo").ratio == "sequence"
    assert settings_of("cispo").clip == "cispo"
    assert settings_of("rloo").baseline == "leave_one_out"
    assert settings_of("ppo").baseline == "critic"
    assert settings_of("m2po").second_moment_budget == 0.04


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_keys_of_the_loss_only_and_given_ones_win(preset):
    assert PRESETS[preset].keys() <= set(COLUMNS)
    defaults = {
        field.name: field.default
        for field in msgspec.structs.fields(TorchSettings)
        if field.name not in ("preset", "max_tokens")
    }
    # Also where the given value is the default: that is no reason to take the preset's.
    resolved = resolve_settings({**defaults, "preset": preset})
    assert resolved == TorchSettings(preset=preset)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "best"}, r"solver\.settings\.preset.*dr_grpo"),
        ({"preset": ["grpo"]}, r"solver\.settings\.preset"),
        ({"ratio_max": 0.5}, r"solver\.settings\.ratio_max: is 0\.5; it must be above 1"),
        ({"preset": "dr_grpo"}, r"solver\.settings\.max_tokens: .*divides by it"),
        ({"aggregation": "constant"}, r"solver\.settings\.max_tokens: "),
        ({"preset": "dapo"}, r"solver\.settings\.max_tokens: .*or set overlong_penalty = 0"),
        ({"critic": {}}, r'solver\.settings\.critic: is given, but baseline is "group_mean"'),
        ({"preset": "ppo", "critic": {"lam": 2}}, r"solver\.settings\.critic\.lam"),
        (
            {"baseline": "critic"},
            r'solver\.settings\.normalisation: is "group_std", .* set it to "batch_std"',
        ),
        ({"clip_low": 1.5}, r"solver\.settings\.clip_low"),
        ({"kl_coefficient": float("inf")}, r"solver\.settings\.kl_coefficient"),
        ({"ratio": "word"}, r"solver\.settings\.ratio"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve_settings(settings, "policies.solver.settings")


def test_a_length_or_another_choice_is_the_remedy():
    assert resolve_settings({"preset": "dapo", "overlong_penalty": 0}).clip_high == 0.28
    assert resolve_settings({"preset": "dr_grpo", "max_tokens": 64}).max_tokens == 64


def test_a_critic_has_its_table_and_nothing_else_has_one():
    assert resolve_settings({"preset": "ppo"}).critic == CriticTable()
    given = resolve_settings({"preset": "ppo", "critic": {"lam": 0.5}}).critic
    assert given == CriticTable(lam=0.5)
    assert resolve_settings({"preset": "ppo", "baseline": "group_mean"}).critic is None


def test_a_run_file_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    data = {
        "run": {"name": "sums"},
        "policies": {"solver": {"model": ".", "settings": {"preset": "dr_grpo"}}},
        "task": {"source": "reasoning-gym", "dataset": "chain_sum"},
        "workflow": {"reference": "single_turn", "policies": ["solver"]},
    }
    with pytest.raises(ConfigError, match=r"policies\.solver\.settings\.max_tokens: is 0"):
        run_spec(data, tmp_path)
    data["policies"]["solver"]["settings"]["max_tokens"] = 64
    assert run_spec(data, tmp_path).policies["solver"].settings["preset"] == "dr_grpo"
