"""What a trainer answers to requests for chunks and their parts."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from publisher import weights

from cloud_trainer.outbox import Outbox
from transport.chunk_service import ChunkService
from transport.envelope import LIMITS, decode
from transport.keys import SigningKey
from transport.links import LinkOptions
from transport.memory_links import MemoryNetwork
from transport.messages import Chunk, ChunkRequest, Plane
from transport.plane_links import PlaneLinks
from transport.runtime.settings import TransportConfig
from transport.weights.folder import write_model_folder
from transport.weights.manifest import sign
from transport.weights.publication import build_version0

PLANE = Plane.WEIGHTS
CHUNK, PART = 128 << 10, 64 << 10


class Reading(Outbox):
    """Counts what is read from the disk."""

    reads = 0

    def read_chunk(self, digest: str, index: int) -> bytes | None:
        self.reads += 1
        return super().read_chunk(digest, index)


@pytest.mark.asyncio
async def test_parts_of_a_chunk_are_cut_from_one_verified_read(tmp_path):
    write_model_folder(tmp_path / "model", weights(0), {"config.json": b"{}"})
    made = build_version0(
        tmp_path / "model", run="r", policy="r/p", created_wall_s=0.0, chunk_bytes=CHUNK
    )
    outbox = Reading(tmp_path / "outbox")
    outbox.add(made, sign(made.manifest, SigningKey.generate("s", "r/p")))
    [entry] = made.manifest.of_kind("snapshot")[:1]
    contents = bytes(made.files[entry.name])
    assert CHUNK < len(contents) < 2 * CHUNK
    network = MemoryNetwork()
    hub = network.hub("tcp://127.0.0.1:0", LinkOptions.for_plane(PLANE))
    ports = dict.fromkeys(("control_port", "trajectories_port", "weights_port"), hub.port)
    links = PlaneLinks(network, TransportConfig(**ports), key=None, server_key=None)
    with ThreadPoolExecutor(1) as reader:
        service = ChunkService(outbox, links, reader)
        serving = asyncio.create_task(service.run())
        service.ask(ChunkRequest(digest=entry.digest, indices=(0, 1, 2, 3), part_bytes=PART))
        service.ask(ChunkRequest(digest=entry.digest, indices=(1,)))
        for part_bytes in (1, PART // 2, 2 * CHUNK):
            service.ask(ChunkRequest(digest=entry.digest, indices=(0,), part_bytes=part_bytes))
        got: dict[tuple[int, int], bytes | None] = {}
        while len(got) < 8:
            for inbound in await hub.recv():
                message, payload = decode(inbound.frames, LIMITS[PLANE])
                assert isinstance(message, Chunk)
                where = (message.part_bytes, message.index)
                got[where] = payload[0] if message.found else None
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert b"".join(got[PART, index] or b"" for index in (0, 1, 2)) == contents
    assert got[0, 1] == contents[CHUNK:]
    beyond = [got[PART, 3], got[1, 0], got[PART // 2, 0], got[2 * CHUNK, 0]]
    assert beyond == [None] * 4  # past the end of the file, and sizes that are not allowed
    assert outbox.reads == 2
    await links.close()
    await network.close()
