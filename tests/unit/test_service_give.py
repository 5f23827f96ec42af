"""Folders that root gives to the user of a daemon, who may work against it meanwhile."""

import os
import pwd
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edge_agent import install as install_module
from edge_agent.agent_file import config_text
from edge_agent.install import install_agent
from scheduler.cli import scheduler_group
from transport.errors import ConfigError
from transport.keys import KeyPair
from transport.messages import Role
from transport.runtime.service_install import Place, give
from transport.token_files import Enrolment

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
USER = "nobody"
OTHER = 12345
FACTS = Enrolment(
    name="box",
    host="203.0.113.5",
    control_port=7700,
    trajectories_port=7701,
    weights_port=7702,
)


def owner(path: Path) -> int:
    return path.lstat().st_uid


def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, system = tmp_path / "theirs", tmp_path / "system"
    for folder in (theirs / "etc", system):
        folder.mkdir(parents=True)
        (folder / "shadow").write_text("x")
    chown = os.chown

    def swapped(path: Any, *args: Any, **more: Any) -> None:
        """The user replaces a folder just after it was listed."""
        chown(path, *args, **more)
        if (theirs / "etc").is_dir() and not (theirs / "etc").is_symlink() and listed():
            (theirs / "etc").rename(tmp_path / "aside")
            (theirs / "etc").symlink_to(system)

    def listed() -> bool:
        return owner(theirs / "etc") != 0

    monkeypatch.setattr(os, "chown", swapped)
    give([theirs], USER)
    assert (theirs / "etc").is_symlink()
    assert owner(system / "shadow") == 0
    assert owner(theirs) == pwd.getpwnam(USER).pw_uid


def test_a_link_is_followed_where_root_made_it_and_not_where_the_user_did(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    link.symlink_to(target)
    user = pwd.getpwnam(USER)
    os.chown(link, user.pw_uid, user.pw_gid, follow_symlinks=False)
    give([link], USER)
    assert owner(target) == 0
    os.chown(link, 0, 0, follow_symlinks=False)
    give([link], USER)
    assert owner(target) == user.pw_uid


def test_what_is_another_users_is_not_given(tmp_path: Path) -> None:
    theirs, mixed = tmp_path / "theirs", tmp_path / "mixed"
    for folder in (theirs, mixed):
        folder.mkdir()
        (folder / "file").write_text("x")
    os.chown(theirs, OTHER, OTHER)
    os.chown(mixed / "file", OTHER, OTHER)
    for folder in (theirs, mixed):
        with pytest.raises(ConfigError, match=rf"belongs to user {OTHER}, neither to root nor"):
            give([folder], USER)
    assert (owner(theirs), owner(theirs / "file"), owner(mixed / "file")) == (OTHER, 0, OTHER)


def test_a_file_with_a_second_name_elsewhere_is_not_given(tmp_path: Path) -> None:
    state, shadow = tmp_path / "state", tmp_path / "shadow"
    state.mkdir()
    shadow.write_text("x")
    (state / "mine").hardlink_to(shadow)
    with pytest.raises(ConfigError, match="has a second name"):
        give([state], USER)
    assert owner(shadow) == 0
    shadow.rename(state / "both")
    give([state], USER)
    assert owner(state / "both") == pwd.getpwnam(USER).pw_uid


@pytest.mark.parametrize("mode", [0o644, 0o664])
def test_root_gives_nothing_that_a_file_of_others_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """The file of a scheduler names a folder of the system, and one that is not there yet."""
    monkeypatch.chdir(tmp_path)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.owner() == "root" and not parent.stat().st_mode & 0o001:
            parent.chmod(0o711)  # pytest keeps others out
    system, file = tmp_path / "system", tmp_path / "deployment.toml"
    system.mkdir()
    (system / "sshd_config").write_text("x")
    user = pwd.getpwnam(USER)
    where = ["--run-as", USER, "--unit-folder", str(tmp_path / "units")]

    def install(folder: Path) -> Any:
        file.write_text(
            f'[scheduler]\nfolder = "{folder}"\n[transport]\nkeys = "{tmp_path}/own/keys"\n'
        )
        os.chown(file, user.pw_uid if mode == 0o644 else 0, 0)
        file.chmod(mode)
        return CliRunner().invoke(scheduler_group, ["install", "--config", str(file), *where])

    (tmp_path / "own").mkdir()
    os.chown(tmp_path / "own", user.pw_uid, user.pw_gid)
    for folder in (system, system / "sshd_config.d"):
        done = install(folder)
        assert (done.exit_code, "root gives away nothing" in done.stderr) == (78, True)
    assert [owner(path) for path in (system, system / "sshd_config")] == [0, 0]
    assert not (system / "sshd_config.d").exists()
    assert not (tmp_path / "units" / "farflow-scheduler.service").exists()
    done = install(tmp_path / "own" / "state")  # what they may make themselves is theirs
    assert (done.exit_code, owner(tmp_path / "own" / "state")) == (0, user.pw_uid)
    assert (tmp_path / "own" / "state").stat().st_mode & 0o777 == 0o700
    file.chmod(0o600)
    os.chown(file, 0, 0)
    again = ["install", "--config", str(file), *where]
    assert CliRunner().invoke(scheduler_group, again).exit_code == 0


def test_an_agent_does_not_choose_what_root_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, system = tmp_path / "box", tmp_path / "system"
    (box / "keys").mkdir(parents=True)
    system.mkdir()
    box.chmod(0o700)
    KeyPair.generate("box", Role.AGENT).save(box / "keys" / "agent.toml")
    (box / "keys" / "enrolment.toml").write_text(FACTS.text())
    file = box / "agent.toml"
    text = config_text(box, FACTS, {"engine": "fake"})
    file.write_text(text.replace(str(box / "state"), str(system)))
    user = pwd.getpwnam(USER)
    os.chown(file, user.pw_uid, user.pw_gid)
    monkeypatch.setattr(install_module, "_doctor", lambda *_: ([], False))
    place = Place(tmp_path / "units", False, False, USER)

    def again() -> None:
        install_agent(place, "a", token_file=None, folder=box, name="", settings={})

    with pytest.raises(ConfigError, match=r"agent.folder: .*system: is not nobody's"):
        again()
    assert owner(system) == 0
    os.chown(system, user.pw_uid, user.pw_gid)  # what the remedy says
    again()
