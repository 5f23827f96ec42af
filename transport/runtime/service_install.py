"""Puts a daemon's unit where systemd finds it, starts it, and takes it away again.

What always holds: installing again is an upgrade: the unit is written anew, the daemon started
again, and nothing else is touched; a unit that is not farflow's, or of another daemon of it, stays
as it is; where systemd does not run (containers, images) the unit is
written and nothing is started; taking away leaves the daemon's folders alone.
"""

import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from transport.errors import ConfigError, ProcessFailed, StoreError
from transport.ids import NAME_RULE, is_name
from transport.runtime.files import atomic_write, open_regular, store_errors
from transport.runtime.service_unit import MARK, STEPS_SINCE, Service, unit_text

RUNNING: Final = Path("/run/systemd/system")
"""Is there exactly while systemd is the machine's init: sd_booted(3)."""
SYSTEM_UNITS: Final = Path("/etc/systemd/system")
SLACK_S: Final = 60.0
_ASK_S: Final = 10.0
_UNIT_BYTES: Final = 64 * 1024
_SHIPPED: Final = {
    False: ("/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system"),
    True: ("/etc/systemd/user", "/usr/local/lib/systemd/user", "/usr/lib/systemd/user"),
}
"""Where other units are, by ``user_units``, that one of the same name in our folder would hide."""


class Place(NamedTuple):
    """Where a unit goes. ``starts`` says whether systemd is to be told; ``user_units`` that it is
    a user's own manager; ``run_as`` the user whom the machine's manager runs the daemon as;
    ``image`` that the folder was named, and the daemon may be run elsewhere."""

    folder: Path
    starts: bool
    user_units: bool
    run_as: str
    image: bool = False


def find_place(*, user_units: bool, run_as: str, unit_folder: Path | None) -> Place:
    """Where to install to, given the options of the command.

    Raises:
        ConfigError: not allowed to, options that contradict each other, or an unknown user.
    """
    if user_units and run_as:
        raise ConfigError("--run-as: your own systemd runs everything as you; leave --user out")
    image = unit_folder is not None
    starts = not image and RUNNING.is_dir()
    if user_units:
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return Place(unit_folder or home / "systemd" / "user", starts, True, "", image)
    name = run_as or os.environ.get("SUDO_USER") or pwd.getpwuid(os.geteuid()).pw_name
    try:
        pwd.getpwnam(name)
    except KeyError as error:
        raise ConfigError(
            f"--run-as {name}: no such user; `useradd --system {shlex.quote(name)}` makes one"
        ) from error
    if unit_folder is None and os.geteuid() != 0:
        raise ConfigError("only root may install for the machine: use sudo, or --user for yourself")
    return Place(unit_folder or SYSTEM_UNITS, starts, False, name, image)


def service_name(name: str) -> str:
    """``name``, checked.

    Raises:
        ConfigError: it is no name of a unit.
    """
    plain = name.removesuffix(".service")
    if not is_name(plain):
        raise ConfigError(f"--service {name!r}: must be {NAME_RULE}")
    return plain


def farflow_argv(*arguments: str) -> tuple[str, ...]:
    """This installation's ``farflow`` with arguments; ``-P`` as a folder's files are no modules."""
    return (sys.executable, "-P", "-m", "farflow", *arguments)


def install(service: Service, place: Place, *, named_by: Sequence[Path] = ()) -> list[str]:
    """Write the unit and start it; returns what was done, a line each. ``named_by`` are the files
    that say which folders are the daemon's: root makes and gives away none that a file names which
    others may write.

    Raises:
        ConfigError: as ``unit_text``, ``check_unit`` and ``give``.
        StoreError: the folder cannot be written.
        ProcessFailed: systemd refused; says what it said.
    """
    path = place.folder / f"{service.name}.service"
    text = unit_text(service, systemd_version())
    before = check_unit(service.name, place, _daemon(service.argv))
    _make(place.folder, 0o755)
    others = next((file for file in named_by if not _only_roots(file)), None)
    if others is not None and _uid(place.run_as) is not None:
        _made_by_user(service.writable, place.run_as, others)
    else:
        for folder in service.writable:
            _make(folder, 0o700)
        give(service.writable, place.run_as)
    unit = f"{service.name}.service"
    unchanged = before == text
    if not unchanged:
        atomic_write(path, text.encode())
    lines = [f"{'unchanged' if unchanged else 'wrote'}: {path}"]
    if place.run_as and pwd.getpwnam(place.run_as).pw_uid == 0:
        lines.append("advice: it runs as root, which it does not need; name a user with --run-as")
    if not place.starts:
        lines.append("not started: systemd does not run here, or a folder was named; by hand:")
        lines.append(f"  {shlex.join(service.argv)}")
        return lines
    _systemctl(place, "daemon-reload")
    _systemctl(place, "enable", unit)
    _systemctl(place, "restart", unit, within_s=service.stop_s + SLACK_S)
    user = " --user" if place.user_units else ""
    lines.append(f"started: systemctl{user} status {unit}; journalctl{user} -u {unit} -f")
    if place.user_units:
        lines.append("it ends when you log out, unless: loginctl enable-linger")
    return lines


def uninstall(name: str, place: Place, stop_s: float, *, component: str) -> list[str]:
    """Stop the daemon ``component``, within ``stop_s``, and remove its unit; returns what was done.

    Raises:
        ConfigError: there is no such unit, or as ``check_unit``.
        StoreError, ProcessFailed: as ``install``.
    """
    path = place.folder / f"{name}.service"
    if not os.path.lexists(path):
        raise ConfigError(f"{path}: no such unit; name it with --service")
    check_unit(name, place, component)
    if place.starts:
        _systemctl(place, "disable", "--now", path.name, within_s=stop_s + SLACK_S)
    with store_errors("remove", path):
        path.unlink()
    if place.starts:
        _systemctl(place, "daemon-reload")
    return [f"removed: {path}; the folders of the daemon are left as they are"]


def check_unit(name: str, place: Place, component: str) -> str | None:
    """The text of the unit ``name`` that is there, of farflow's daemon ``component`` ("agent");
    None where there is none.

    Raises:
        ConfigError: it is not farflow's, or another daemon's, or would hide such a one.
    """
    path = place.folder / f"{name}.service"
    text = _unit_of(path, component)
    if text is None and not place.image:
        for folder in _SHIPPED[place.user_units]:
            _unit_of(Path(folder, path.name), component)
    return text


def _unit_of(path: Path, component: str) -> str | None:
    remedy = "choose another --service"
    try:
        if path.is_symlink():
            raise ConfigError(f"{path}: a symbolic link, which no unit of farflow is; {remedy}")
        with open_regular(path) as file:
            text = file.read(_UNIT_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; {remedy}") from error
    started = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    try:
        daemon = _daemon(shlex.split(started[1])) if started else ""
    except ValueError:
        daemon = ""
    if not daemon and not text.startswith(MARK):
        raise ConfigError(f"{path}: is not farflow's and stays as it is; {remedy}")
    if daemon != component:
        raise ConfigError(
            f"{path}: is of {f'the {daemon}' if daemon else 'some daemon'}, not of the {component},"
            f" and stays as it is; {remedy}"
        )
    return text


def _daemon(argv: Sequence[str]) -> str:
    """Which of farflow's daemons a command starts, "" for none."""
    for number in range(len(argv) - 2):
        program, component, run = argv[number : number + 3]
        module = program == "farflow" and number > 0 and argv[number - 1] == "-m"
        if run == "run" and (module or program.endswith("/farflow")):
            return component
    return ""


def systemd_version() -> int:
    """Of the systemd that is installed here; one without news where there is none to ask."""
    program = shutil.which("systemctl")
    if program is None:
        return STEPS_SINCE - 1
    try:
        said = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_ASK_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return STEPS_SINCE - 1
    found = re.match(r"systemd (\d+)", said)
    return int(found[1]) if found else STEPS_SINCE - 1


def _systemctl(place: Place, *arguments: str, within_s: float = SLACK_S) -> None:
    argv = ["systemctl", *(["--user"] if place.user_units else []), "--no-pager", *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=within_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProcessFailed(f"{shlex.join(argv)}: {error}") from error
    if done.returncode != 0:
        raise ProcessFailed(f"{shlex.join(argv)}: {done.stderr.strip() or 'failed'}")


def _make(folder: Path, mode: int) -> None:
    try:
        with store_errors("create", folder):
            folder.mkdir(mode, parents=True, exist_ok=True)
    except FileNotFoundError as error:  # a file system that makes no folders, as /proc
        raise StoreError(f"cannot create {folder}; choose another folder") from error


def _uid(name: str) -> int | None:
    """Of the user to whom root gives folders; None where it gives none: we are not root, or the
    daemon runs as root."""
    if not name or os.geteuid() != 0:
        return None
    return pwd.getpwnam(name).pw_uid or None


def _only_roots(file: Path) -> bool:
    """Whether nobody but root says what is in ``file``."""
    found = file.stat()
    return found.st_uid == 0 and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _made_by_user(folders: Sequence[Path], name: str, file: Path) -> None:
    """Make ``folders``, which ``file`` names and whoever may write that, with the user's rights;
    raises ConfigError where these do not suffice."""
    for folder in folders:
        argv = ["mkdir", "-p", "-m", "700", "--", str(folder)]
        done = subprocess.run(
            argv, cwd="/", capture_output=True, text=True, timeout=_ASK_S, check=False,
            **become(name),
        )  # fmt: skip
        if done.returncode != 0 or folder.stat().st_uid != _uid(name):
            raise ConfigError(
                f"{file}: names {folder}, which is not {name}'s; root gives away nothing that a"
                f" file names which others may write: give it with `chown -R {name} {folder}`, or"
                f" make the file root's own with `chown root {file}` and `chmod go-w {file}`"
            )


def give(folders: Sequence[Path], name: str) -> None:
    """Make ``folders`` and all below them the user ``name``'s, where root says so; of what is not
    there yet, and for "", nothing. What is neither root's nor that user's is left alone.

    Raises:
        ConfigError: a folder so close to the root that it is certainly not a daemon's own, or
            something there is another user's, or has a second name elsewhere.
        StoreError: the disk refused.
    """
    uid = _uid(name)
    if uid is None:
        return
    gid = pwd.getpwnam(name).pw_gid
    for folder in folders:
        if len(folder.resolve().parts) <= 2:
            raise ConfigError(f"{folder}: too close to the root to be given to {name}")
        with store_errors("give away", folder):
            # Whom it belongs to may replace a folder by a link meanwhile: no paths but root's.
            linked = folder.is_symlink() and folder.lstat().st_uid == 0
            top = folder.resolve() if linked else folder
            names = Counter(_below(top))
            for path, _, files, opened in os.fwalk(top):
                _check_owner(Path(path), os.fstat(opened), uid, name)
                os.chown(opened, uid, gid)
                for file in files:
                    found = os.stat(file, dir_fd=opened, follow_symlinks=False)
                    _check_owner(Path(path, file), found, uid, name)
                    if names[_inode(found)] < found.st_nlink:
                        raise ConfigError(
                            f"{Path(path, file)}: has a second name outside of {folder}, where it"
                            f" would be {name}'s as well; remove one"
                        )
                    os.chown(file, uid, gid, dir_fd=opened, follow_symlinks=False)


def _below(folder: Path) -> Iterator[tuple[int, int]]:
    """Which files there are, once for each of their names."""
    for _, _, files, opened in os.fwalk(folder):
        for file in files:
            yield _inode(os.stat(file, dir_fd=opened, follow_symlinks=False))


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _check_owner(path: Path, found: os.stat_result, uid: int, name: str) -> None:
    if found.st_uid not in (0, uid):
        raise ConfigError(
            f"{path}: belongs to user {found.st_uid}, neither to root nor to {name}: name another"
            " folder, --run-as that user, or give it with chown"
        )


def become(name: str) -> dict[str, Any]:
    """Arguments with which ``subprocess`` runs a program as the user ``name``, where we are root;
    as ourselves otherwise, and for ""."""
    if not name or os.geteuid() != 0:
        return {}
    user = pwd.getpwnam(name)
    groups = os.getgrouplist(name, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}
