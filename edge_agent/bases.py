"""Which models of this machine policies that are published as adapters belong to."""

from collections.abc import Mapping
from pathlib import Path

from transport.errors import ModelError
from transport.ids import policy_name
from transport.weights.adapter import check_base, read_adapter
from transport.weights.folder import is_adapter_folder


def local_model(local_models: Mapping[str, str], policy: str) -> Path | None:
    """The folder that the owner of this agent names for a policy, by its id or its name."""
    folder = local_models.get(policy) or local_models.get(policy_name(policy))
    return Path(folder) if folder else None


def base_of(local_models: Mapping[str, str], policy: str, folder: Path) -> Path | None:
    """The model below the adapter in ``folder``, compared with what the trainer says about it; None
    where ``folder`` has a whole model. Blocks: reads all of both.

    Raises:
        ModelError: no model is named for the policy, or another one.
    """
    if not is_adapter_folder(folder):
        return None
    base = local_model(local_models, policy)
    if base is None:
        raise ModelError(
            f"{policy} is published as an adapter: name the folder of its model in"
            f' agent.local_models, as in local_models = {{ {policy_name(policy)} = "FOLDER" }}'
        )
    check_base(base, read_adapter(folder)[1])
    return base
