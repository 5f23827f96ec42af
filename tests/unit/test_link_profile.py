"""Link profiles: the shipped ones, the user's, and what is refused."""

import math
from pathlib import Path

import pytest

from sim.link_profile import (
    LinkProfile,
    Outage,
    find_profile,
    load_profiles,
    profile_from_table,
)
from transport.errors import ConfigError


def test_the_shipped_profiles_are_what_their_names_say() -> None:
    profiles = load_profiles()
    assert {"local", "wan-80ms", "wan-180ms"} <= set(profiles)
    assert profiles["local"] == LinkProfile(name="local")
    wan = profiles["wan-180ms"]
    assert wan.rtt_s == pytest.approx(0.18)
    assert wan.delay_up_s == wan.delay_down_s
    assert wan.rate_up_bits_per_s == wan.rate_down_bits_per_s == 50e6
    assert profiles["wan-80ms"].rtt_s == pytest.approx(0.08)
    assert profiles["wan-80ms"].rate_up_bits_per_s == 200e6


def test_every_key_of_a_table_is_understood() -> None:
    profile = profile_from_table(
        "home",
        {
            "delay_up": "30ms",
            "delay_down": "10ms",
            "jitter": "3ms",
            "rate_up": "20Mbit/s",
            "rate_down": "100Mbit/s",
            "queue": "1MiB",
            "outages": [{"start": "60s", "duration": "20s"}, {"start": "2h", "duration": 5}],
        },
    )
    assert profile == LinkProfile(
        name="home",
        delay_up_s=0.03,
        delay_down_s=0.01,
        jitter_s=0.003,
        rate_up_bits_per_s=20e6,
        rate_down_bits_per_s=100e6,
        queue_bytes=1 << 20,
        outages=(Outage(60, 20), Outage(7200, 5)),
    )


def test_one_rate_for_a_single_direction_overrides_neither_the_other() -> None:
    assert profile_from_table("x", {"rate_up": "8Mbit/s"}).rate_down_bits_per_s == 0
    assert profile_from_table("x", {"rate": "8Mbit/s"}).rate_down_bits_per_s == 8e6


def test_the_queue_holds_200_ms_of_the_rate_unless_it_is_given() -> None:
    profile = LinkProfile(name="x")
    assert profile.queue_limit_bytes(80e6) == 2_000_000
    assert profile.queue_limit_bytes(1e6) == 256 * 1024
    assert LinkProfile(name="x", queue_bytes=5).queue_limit_bytes(80e6) == 5


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"rrt": "80ms"}, "unknown key 'rrt'"),
        ({"rtt": "80ms", "delay_up": "1ms"}, "'rtt' excludes 'delay_up'"),
        ({"rate": "1Mbit/s", "rate_down": "1Mbit/s"}, "'rate' excludes"),
        ({"rtt": "80"}, "delay_up_s = 40"),
        ({"rate": 50}, "rate_up = 50 has no unit"),
        ({"rate": "1kbit/s"}, "at least 8000"),
        ({"rtt": "3min"}, "between 0 and 10"),
        ({"outages": [{"start": "1s"}]}, "outages[0] must have exactly"),
        ({"outages": "1s"}, "outages must be a list"),
        ({"outages": [{"start": "1s", "duration": "0s"}]}, "outages[0].duration_s"),
        (
            {"outages": [{"start": "5s", "duration": "3s"}, {"start": "7s", "duration": "1s"}]},
            "outages[1].start_s",
        ),
    ],
)
def test_a_bad_table_is_refused_by_profile_and_key(table: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match="'paris'") as refusal:
        profile_from_table("paris", table)
    assert says in str(refusal.value)


@pytest.mark.parametrize("field", ["delay_up_s", "jitter_s", "rate_down_bits_per_s"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_profile_built_in_code_is_checked_too(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        LinkProfile(name="x", **{field: value})  # type: ignore[arg-type]


def test_a_file_adds_to_the_shipped_profiles_and_may_replace_one(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text('[local]\nrtt = "2ms"\n[home]\nrate_up = "20Mbit/s"\n')
    profiles = load_profiles(path)
    assert profiles["local"].rtt_s == pytest.approx(0.002)
    assert profiles["home"].rate_up_bits_per_s == 20e6
    assert "wan-80ms" in profiles


@pytest.mark.parametrize("text", ["[local", "local = 3", '[a]\nrtt = "x"'])
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "links.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"links\.toml"):
        load_profiles(path)


def test_a_missing_file_or_name_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read link profiles from .*nowhere\.toml"):
        load_profiles(tmp_path / "nowhere.toml")
    with pytest.raises(
        ConfigError, match=r"no link profile 'mars'; known: home-cable, .*local, lte"
    ):
        find_profile("mars")
