"""Folders that root gives to the user of a daemon, who may work against it meanwhile."""

import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from edge_agent import install as install_module
from edge_agent.enrol import config_text
from edge_agent.install import install_agent
from transport.errors import ConfigError
from transport.keys import KeyPair
from transport.messages import Role
from transport.runtime.service_install import Place, give
from transport.token_files import Enrolment

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
USER = "nobody"
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
