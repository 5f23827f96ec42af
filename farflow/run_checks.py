"""What a run names that is looked at before anything starts: models and the sources of its tasks.

What always holds: nothing is drawn, loaded into memory as a model or imported that is a user's own;
what is wrong is named with its key and the remedy.
"""

from pathlib import Path

from scheduler.tasks import check_sources
from transport.errors import ConfigError, ModelError, TaskError
from transport.runs import RunSpec
from transport.runtime.model_folder import tokenizer_file
from transport.weights.folder import shard_names


def check_tasks(run: RunSpec) -> list[str]:
    """Opens the sources of a run's tasks as its scheduler does, and closes them. Returns a text for
    each that only the scheduler can open.

    Raises:
        ConfigError: a data set, its settings, a file or a line of it is wrong.
    """
    try:
        return check_sources(run)
    except TaskError as error:
        raise ConfigError(str(error)) from error


def check_models(run: RunSpec) -> None:
    """Whether the model folders of a run have weights, and a tokenizer where texts are needed.

    Raises:
        ConfigError: something is missing; names it.
    """
    for name, policy in run.policies.items():
        folder = Path(policy.model)
        try:
            for shard in shard_names(folder):
                if not (folder / shard).is_file():
                    raise ModelError(f"{folder / shard}: is missing")
            if policy.trainer == "torch":
                tokenizer_file(folder)
        except ModelError as error:
            raise ConfigError(
                f"policies.{name}.model: {error}; bring all files of the model, as with"
                f" hf download ORGANISATION/NAME --local-dir {folder}"
            ) from error
