"""What the tests of the vLLM engine need: a policy, and new versions of it."""

import itertools
from pathlib import Path

import numpy as np
from deltas import after, decoded, published

from edge_agent.config import VllmTable
from edge_agent.engine import GenerationRequest, SamplingParams
from edge_agent.engines.vllm_engine import VllmEngine
from transport.weights.folder import read_artefacts, read_model_folder, write_model_folder
from transport.weights.patch import whole
from transport.weights.tensors import TensorBytes

QWEN, LLAMA = "run/qwen", "run/llama"
TABLE = VllmTable(max_model_len=512, max_sequences=32, kv_cache_gib=0.05, enforce_eager=True)
"""``enforce_eager``: on a CPU the alternative compiles for half a minute."""

names = itertools.count()


class VllmBench:
    """A loaded policy; ``weights`` are what it should have, of ``version``."""

    def __init__(self, engine: VllmEngine, policy: str, folder: Path) -> None:
        self.engine = engine
        self.policy = policy
        self.folder = folder
        self.version = engine.version(policy)
        self.weights = dict(engine.read_weights(policy))

    async def generate(self, n=2, name="", prompt="State the answer: 3 + 4 =", **sampling):
        return await self.engine.generate(self.request(n, name, prompt, **sampling))

    def request(self, n=2, name="", prompt="State the answer: 3 + 4 =", **sampling):
        tokens = self.engine.encode(self.policy, prompt) if isinstance(prompt, str) else prompt
        return GenerationRequest(
            request_id=name or f"request {next(names)}",
            policy=self.policy,
            prompt_tokens=tokens,
            n=n,
            sampling=SamplingParams(**{"max_new_tokens": 16, "seed": 5, **sampling}),
        )

    async def advance(self, share=0.1, seed=0, bits=0):
        """One version further, through a published delta as an agent decodes it; the pause in s."""
        new = moved(self.weights, share, seed + self.version, bits)
        publication = published(self.weights, new, self.version + 1, self.version)
        patch = decoded(self.weights, publication).patch
        pause_s = await self.engine.apply(self.policy, self.version + 1, patch)
        self.version += 1
        self.weights = after(self.weights, decoded(self.weights, publication))
        return pause_s

    async def back(self):
        """To the folder's weights, as one more version."""
        await self.back_at(self.version + 1)

    async def back_at(self, version):
        tensors = read_model_folder(self.folder)
        await self.engine.apply(self.policy, version, whole(tensors))
        self.version, self.weights = version, tensors

    def snapshot(self, folder: Path) -> Path:
        """A model folder of the weights that the policy should have."""
        write_model_folder(folder, self.weights, read_artefacts(self.folder))
        return folder


def moved(tensors, share, seed, bits=0):
    """Weights of which about ``share`` of the cells, one at least, moved by one unit in the last
    place, or 2 ** ``bits`` of them."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, tensor in tensors.items():
        cells = tensor.cells().copy()
        where = rng.random(cells.size) < share
        where[rng.integers(cells.size)] = True
        cells[where] ^= cells.dtype.type(1 << bits)
        new[name] = TensorBytes(tensor.dtype, tensor.shape, cells.tobytes())
    return new
