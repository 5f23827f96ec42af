"""The folder of one ``up``: results for people at the top, the daemons' state below ``state/``.

config.toml  config.json     the file as given, and every value resolved
metrics.jsonl                one line per step and evaluation
learning_curve.png  policy_lag.png  summary.json
models/NAME/                 the final model, a stock Hugging Face folder
logs/                        one file per process
state/keys  state/scheduler  state/agents/NAME  state/trainers/NAME
"""

from pathlib import Path

from transport.errors import ConfigError
from transport.runtime.files import FolderLock, lock_folder

_MAX_RUNS = 9999


class RunFolder:
    """Paths of one run; see the module docstring."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.config = self.path / "config.toml"
        self.resolved = self.path / "config.json"
        self.overrides = self.path / "overrides.json"
        self.deployment = self.path / "deployment.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.models = self.path / "models"
        self.logs = self.path / "logs"
        self.state = self.path / "state"
        self.keys = self.state / "keys"
        self.scheduler = self.state / "scheduler"
        self.gateway = self.scheduler / "gateway"

    def agent(self, name: str) -> Path:
        return self.state / "agents" / name

    def trainer(self, name: str) -> Path:
        return self.state / "trainers" / name

    def scheduler_metrics(self, run: str) -> Path:
        """Where the scheduler writes the records of a run."""
        return self.scheduler / "runs" / run / "metrics.jsonl"

    def lock(self) -> FolderLock:
        """Claim the folder for this process; raises ``StoreError`` when another one has it."""
        return lock_folder(self.path)


def new_run_folder(runs: Path, name: str) -> RunFolder:
    """The next free ``NAME-0001`` below ``runs``, made.

    Raises:
        ConfigError: the folder cannot be made.
    """
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for number in range(1, _MAX_RUNS + 1):
            path = runs / f"{name}-{number:04d}"
            try:
                path.mkdir()
            except FileExistsError:
                continue
            folder = RunFolder(path)
            for part in (folder.logs, folder.state, folder.models):
                part.mkdir()
            return folder
    except OSError as error:
        raise ConfigError(
            f"local.runs: cannot make a folder in {runs}: {error.strerror}"
        ) from error
    raise ConfigError(f"local.runs: {runs} already holds {_MAX_RUNS} runs of {name}; remove some")


def is_run_folder(path: Path) -> bool:
    """Whether a folder holds what ``farflow up`` writes before it starts anything."""
    return not _missing(RunFolder(path))


def _missing(folder: RunFolder) -> list[Path]:
    own = (folder.config, folder.overrides, folder.resolved)
    return [part for part in own if not part.is_file()]


def open_run_folder(path: Path) -> RunFolder:
    """An earlier run's folder, to go on with.

    Raises:
        ConfigError: it is not one.
    """
    folder = RunFolder(path)
    for part in _missing(folder):
        raise ConfigError(
            f"--resume {path}: not the folder of an earlier `farflow up`: {part.name} is missing"
        )
    return folder
