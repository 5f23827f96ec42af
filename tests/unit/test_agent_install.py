"""``farflow agent install`` where the doctor cannot even be asked; with a scheduler it is tested in
``tests/e2e/test_installed_agent.py``."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from edge_agent import install as module
from edge_agent.agent_file import config_text
from edge_agent.install import default_folder, install_agent
from transport.errors import ConfigError
from transport.keys import KeyPair
from transport.messages import Role
from transport.runtime.service_install import Place
from transport.token_files import Enrolment

FACTS = Enrolment(
    name="box",
    host="203.0.113.5",
    control_port=7700,
    trajectories_port=7701,
    weights_port=7702,
)


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """An enrolled box."""
    keys = tmp_path / "box" / "keys"
    keys.mkdir(parents=True)
    (tmp_path / "box").chmod(0o700)
    KeyPair.generate("box", Role.AGENT).save(keys / "agent.toml")
    (keys / "enrolment.toml").write_text(FACTS.text())
    return tmp_path / "box"


def install(
    box: Path, *, image: bool = False, name: str = "", **settings: object
) -> tuple[list[str], bool]:
    place = Place(box.parent / "units", False, True, "", image)
    return install_agent(
        place, "farflow-agent", token_file=None, folder=box, name=name, settings=settings
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied"), "install farflow where you may read it"),
        (subprocess.TimeoutExpired("farflow", 1.0), "no end within 300 s"),
    ],
)
def test_nothing_is_installed_where_the_doctor_cannot_be_asked(
    box: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(module.subprocess, "run", fails)
    lines, healthy = install(box, engine="fake")
    assert not healthy
    assert any(said in line for line in lines)
    assert lines[-1] == "not started"
    assert not (box.parent / "units").exists()
    assert (box / "agent.toml").exists()  # the command can be given again


def test_a_unit_for_an_image_is_written_whatever_the_doctor_finds_here(
    box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "wrong    gpu               no nvidia-smi here, or it hangs\n"
    done = subprocess.CompletedProcess(["farflow"], 1, said, "")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: done)
    lines, healthy = install(box, engine="fake")
    assert (healthy, lines[-1], (box.parent / "units").exists()) == (False, "not started", False)
    lines, written = install(box, image=True)
    assert written
    assert said.strip() in lines
    assert any(line.startswith("warning: something is wrong on this machine") for line in lines)
    assert (box.parent / "units" / "farflow-agent.service").exists()


def test_a_box_without_an_enrolment_wants_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--token-file"):
        install(tmp_path / "new")


def test_a_unit_of_somebody_else_is_found_before_the_token_is_used(tmp_path: Path) -> None:
    (tmp_path / "units").mkdir()
    (tmp_path / "units" / "farflow-agent.service").write_text("[Service]\nExecStart=/bin/true\n")
    with pytest.raises(ConfigError, match="is not farflow's"):
        install(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_setting_that_cannot_be_is_refused_before_anything_is_written(box: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.engine: .*allowed are"):
        install(box, engine="warp")
    assert not (box / "agent.toml").exists()


def test_the_file_of_an_agent_says_every_key_and_sets_its_own(tmp_path: Path) -> None:
    text = config_text(tmp_path, FACTS, {"slots": 7})
    assert "\nslots = 7\n" in text
    assert '\nhost = "203.0.113.5"\n' in text
    assert "\n#drain_s = 30.0 " in text


def test_agents_live_where_their_systemd_expects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_folder(user_units=False) == Path("/var/lib/farflow-agent")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_folder(user_units=True) == Path("/data/farflow-agent")


def test_a_second_install_says_what_it_kept_and_refuses_what_contradicts_it(
    box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess(["farflow"], 1, "", "")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: done)
    install(box, engine="fake", slots=7)
    file = box / "agent.toml"
    before = file.read_bytes()
    for given in ({}, {"engine": "fake"}, {"slots": 7, "device": "cpu"}):
        lines, _ = install(box, **given)
        kept = f'kept: engine = "fake", device = "cpu", slots = 7 ({file}); change it there'
        assert kept in lines
    for given, there in (
        ({"engine": "torch"}, 'engine = "fake"'),
        ({"slots": 0}, "slots = 7"),
        ({"engine": "fake", "device": "cuda"}, 'device = "cpu"'),
    ):
        with pytest.raises(ConfigError, match=rf"agent\.toml has {there}.*change agent\."):
            install(box, **given)
    assert file.read_bytes() == before


def test_a_name_that_was_not_granted_is_said(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess(["farflow"], 1, "", "")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: done)
    assert any("not called 'paris' but 'box'" in line for line in install(box, name="paris")[0])
    for name in ("", "box"):
        assert not any("not called" in line for line in install(box, name=name)[0])
