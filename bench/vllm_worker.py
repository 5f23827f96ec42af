"""In a worker of the vLLM that ``bench.vllm`` measures: vLLM's own patches of a checkpoint, on the
same weights as ours. Nothing else imports it."""

import time

from safetensors.torch import load_file
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from edge_agent.engines.vllm_worker import FarflowExtension


class NativeExtension(FarflowExtension):
    """``FarflowExtension`` with one call more."""

    def native_patch(self, path: str, shapes: dict[str, list[int]]) -> float:
        """Apply ``NAME#at`` (int32 positions) and ``NAME#to`` (values) of a safetensors file with
        vLLM's patch loader; returns the seconds of that alone. Positions are known to be unique,
        so they are not looked through."""
        held = load_file(path)
        patches = [
            CheckpointWeightPatch(
                name, tuple(shape), held[f"{name}#to"].dtype, held[f"{name}#to"], held[f"{name}#at"]
            )
            for name, shape in shapes.items()
        ]
        began_s = time.monotonic()
        model = self.get_model()  # type: ignore[attr-defined]  # of the worker that it is part of
        load_checkpoint_weight_patches(model, patches, validate_unique_indices=False)
        return time.monotonic() - began_s
