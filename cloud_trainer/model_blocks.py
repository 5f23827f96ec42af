"""The repeated blocks of a transformer: what is sharded, and computed again, as a unit.

What always holds: blocks are those that transformers never splits over devices
(``_no_split_modules`` of the model class), in the order of the model, none inside another.
"""

from functools import partial
from typing import Any

from transport.errors import ModelError


def blocks_of(model: Any) -> list[Any]:
    """The blocks of a model of transformers; none where its class does not say."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if type(module).__name__ in names and not inside:
            found.append((name, module))
    return [module for _, module in found]


def checkpoint_activations(model: Any) -> None:
    """Keep only the inputs of blocks for the backward pass, which computes the rest again: a third
    more work for memory that grows with one block instead of all (arXiv:1604.06174).

    Raises:
        ModelError: the model does not say what its blocks are.
    """
    from torch.utils.checkpoint import checkpoint

    blocks = blocks_of(model)
    if not blocks:
        raise ModelError(
            f"gradient_checkpointing: {type(model).__name__} does not say what its blocks are "
            "(_no_split_modules); set it to false for this model"
        )
    for block in blocks:
        # Not the model's own switch: that one works in training mode only, where dropout is on.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
