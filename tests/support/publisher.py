"""The publishing side of a trainer, without the trainer: signed versions and their chunks."""

import asyncio
from pathlib import Path

import numpy as np
from service_world import POLICY, PlaneLink

from transport.chunk_parts import place_of
from transport.keys import SigningKey, trainer_name
from transport.messages import Chunk, ChunkRequest, VersionDurable, VersionOffer
from transport.weights.folder import write_model_folder
from transport.weights.manifest import sign
from transport.weights.publication import Publication, build_delta_version, build_version0
from transport.weights.tensors import TensorBytes

CELLS = 40_000
CHUNK = 16 * 1024


def weights(seed: int) -> dict[str, TensorBytes]:
    rng = np.random.default_rng(seed)
    return {
        name: TensorBytes("BF16", (CELLS,), rng.integers(0x3B00, 0x3D00, CELLS, "<u2").tobytes())
        for name in "ab"
    }


class Trainer:
    """The publishing side: makes signed versions and gives their chunks when asked."""

    def __init__(self, folder: Path, policy: str = POLICY, chunk_bytes: int = CHUNK) -> None:
        self.policy = policy
        self.key = SigningKey.load(folder / "keys" / "signing" / f"{trainer_name(policy)}.toml")
        self.weights = weights(0)
        model = folder / f"model-{trainer_name(policy)}"
        write_model_folder(model, self.weights, {"config.json": b"{}"})
        self.first = build_version0(
            model, run="sums", policy=policy, created_wall_s=0.0, chunk_bytes=chunk_bytes
        )
        self.link: PlaneLink | None = None
        self.asked: list[ChunkRequest] = []
        self.silent = False

    def next(self, version: int, parent: int) -> Publication:
        cells = self.weights["a"].cells().copy()
        cells[:: 7 + version] ^= np.uint16(1)
        new = {**self.weights, "a": TensorBytes("BF16", (CELLS,), cells.tobytes())}
        made = build_delta_version(
            self.weights,
            new,
            run="sums",
            policy=self.policy,
            version=version,
            parent=parent,
            step=version,
            created_wall_s=0.0,
            chunk_bytes=CHUNK,
        )
        self.weights = new
        return made

    async def offer(self, link: PlaneLink, made: Publication, key=None) -> None:
        signed = sign(made.manifest, key or self.key)
        await link.send(
            VersionOffer(manifest=signed.manifest, signature=signed.signature, key_id=signed.key_id)
        )

    async def give(self, link: PlaneLink, made: Publication) -> None:
        """Answer requests for chunks until cancelled."""
        by_digest = {e.digest: (e, made.files[e.name]) for e in made.manifest.files}
        while True:
            [request] = await link.expect(ChunkRequest)
            self.asked.append(request)
            entry, data = by_digest[request.digest]
            for index in request.indices:
                if self.silent:
                    continue
                place = place_of(index, request.part_bytes, entry.chunk_bytes)
                assert place is not None
                chunk = data[place.number * entry.chunk_bytes :][: entry.chunk_bytes]
                await link.send(
                    Chunk(digest=request.digest, index=index, part_bytes=request.part_bytes),
                    (bytes(chunk[place.start : place.stop]),),
                )

    async def publish(self, link: PlaneLink, made: Publication) -> None:
        giving = asyncio.create_task(self.give(link, made))
        try:
            await self.offer(link, made)
            [durable] = await link.expect(VersionDurable)
            assert (durable.policy, durable.version) == (self.policy, made.manifest.version)
        finally:
            giving.cancel()
            await asyncio.gather(giving, return_exceptions=True)
