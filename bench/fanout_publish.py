"""From the trainer's weights to the agent's serving engine, rows of ``bench.fanout``.

Steps of simulated weights (learning rate 1e-6) go the whole way: diff and encode, upload to the
real store, transport over the emulated link to a real agent with the torch engine, swap. The second
one is reported: the first finds the programs of all processes uncompiled. Two ways of others go
through the same store and stream in the same run: their bytes are the snapshot of a version 0 of a
policy of their own, which store and agent move as any other.

What always holds: the references are not applied at the store, nothing is verified at their agent
beyond the chunks, and the swap takes as long as ours; what was timed at a smaller size says so in
its row.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.fanout_agents import Agents, agents
from bench.fanout_cloud import (
    RUN,
    Cloud,
    Publishing,
    Tensors,
    cloud,
    next_version,
    payload_bytes,
)
from bench.fanout_link import SLOW_OCEAN, Emulator, LinkPath, emulated
from bench.fanout_model import ModelSize, TwoVersions, artefacts
from bench.fanout_transport import TARGET, agent_spec
from bench.references import REFERENCES
from bench.report import Row
from transport.weights.delta_file import decode_delta
from transport.weights.publication import Publication
from transport.weights.segments import CodecSettings
from transport.weights.state import WeightArena
from transport.weights.tensors import TensorBytes

AGENT, RIVAL = "ours", "rival"
MODEL = f"{RUN}/model"
INDEX_LIST = f"{RUN}/index-list"
BROADCAST = f"{RUN}/broadcast"
THREADS = 2
LEAST_BYTES = 4_000_000
"""Below that the round trips of the exchange itself weigh more than the bytes."""
QUICK_BROADCAST, FULL_BROADCAST = 4_000_000, 64_000_000
"""Bytes of a full copy that are really moved; the rest is scaled."""


class _Coded(NamedTuple):
    """A reference's bytes for the step, and the seconds for making and for undoing them."""

    body: bytes
    encode_s: float
    decode_s: float


class _Way(NamedTuple):
    """Where the seconds of our version went."""

    encode_s: float
    durable_s: float
    transport_s: float
    verify_s: float
    swap_s: float
    pause_s: float
    total_s: float
    size_bytes: int


def index_list(two: TwoVersions) -> _Coded:
    """The step as int32 positions and bf16 values, tensor by tensor."""
    form = next(one for one in REFERENCES if one.name == "int32 + bf16")
    bodies, encode_s, decode_s = [], 0.0, 0.0
    for name, tensor in two.new.items():
        old, new = two.old[name].cells(), tensor.cells()
        began_s = time.monotonic()
        body = form.encode(old, new)
        coded_s = time.monotonic()
        back = form.decode(old, body)
        decode_s += time.monotonic() - coded_s
        encode_s += coded_s - began_s
        assert np.array_equal(back, new)
        bodies.append(body)
    return _Coded(b"".join(bodies), encode_s, decode_s)


async def publish_rows(folder: Path, size: ModelSize, two: TwoVersions, quick: bool) -> list[Row]:
    """Encode, decode, pause and the whole way of one version, and the ways of others."""
    path = SLOW_OCEAN
    hosted = {AGENT: (MODEL,), RIVAL: (INDEX_LIST, BROADCAST)}
    async with cloud(folder, hosted=hosted) as made, AsyncExitStack() as stack:
        targets = {"weights": made.store_port, "control": made.control_port}
        link = await stack.enter_async_context(emulated(path, targets, folder))
        way, first, second = await _ours(made, link, size, two, path)
        async with agents([agent_spec(made, RIVAL, link, {})], folder) as rival:
            coded = index_list(two)
            listed_s = await _moved(made, rival, INDEX_LIST, coded.body)
            part = np.random.default_rng(0).bytes(QUICK_BROADCAST if quick else FULL_BROADCAST)
            part_s = await _moved(made, rival, BROADCAST, part)
    full_s = (part_s - path.rtt_s) * two.full_bytes / len(part) + path.rtt_s
    decode_s = await asyncio.to_thread(_decode_s, two, first, second)
    what = f"{two.cells / 1e6:.0f} M cells, {way.size_bytes / 1e6:.2f} MB"
    list_s = coded.encode_s + listed_s + coded.decode_s + way.swap_s
    part_text = f"full broadcast (scaled from {len(part) / 1e6:.0f} MB)"
    return [
        *_columns(what, path, way, decode_s),
        *_against(path, way, "int32 + bf16", list_s, len(coded.body), judged=False),
        *_against(path, way, part_text, full_s + way.swap_s, two.full_bytes, judged=True),
    ]


async def _ours(
    made: Cloud, link: Emulator, size: ModelSize, two: TwoVersions, path: LinkPath
) -> tuple[_Way, Publication, Publication]:
    """The way of version 2, versions 1 and 2."""
    publishing = made.publishing(MODEL)
    zero = publishing.first(two.old, artefacts(size))
    spec = agent_spec(made, AGENT, link, {MODEL: str(publishing.model)}, engine="torch")
    async with agents([spec], made.folder) as fleet:
        await publishing.publish(zero)
        await fleet.until_asking([AGENT], MODEL, 0)
        first, _ = await _step(publishing, fleet, two.old, two.new, zero, path)
        await fleet.until_asking([AGENT], MODEL, 1)
        second, way = await _step(publishing, fleet, two.new, two.old, first, path)
    return way, first, second


async def _step(
    publishing: Publishing,
    fleet: Agents,
    old: Tensors,
    new: Tensors,
    parent: Publication,
    path: LinkPath,
) -> tuple[Publication, _Way]:
    """One version from its weights to the engine that serves it."""
    settings = CodecSettings(link_bytes_s=path.rate_bits_s / 8)
    began_s = time.monotonic()
    made = await asyncio.to_thread(
        next_version, old, new, parent, policy=MODEL, settings=settings, threads=THREADS
    )
    encoded_s = time.monotonic()
    durable_s = await publishing.publish(made)
    seen = await fleet.served(AGENT, MODEL, made.manifest.version)
    way = _Way(
        encode_s=encoded_s - began_s,
        durable_s=durable_s - encoded_s,
        transport_s=seen["chunk_s"] - durable_s,
        verify_s=seen["apply_s"] - seen["chunk_s"],
        swap_s=seen["served_s"] - seen["apply_s"],
        pause_s=seen["pause_s"],
        total_s=seen["served_s"] - began_s,
        size_bytes=payload_bytes(made),
    )
    return made, way


async def _moved(made: Cloud, rival: Agents, policy: str, body: bytes) -> float:
    """Seconds from the offer of ``body`` to its last chunk at an agent that waits for it."""
    publishing = made.publishing(policy)
    tensors = {"body": TensorBytes("U8", (len(body),), body)}
    await rival.until_asking([RIVAL], policy, None)
    version = publishing.first(tensors, {"config.json": b"{}"})
    began_s = time.monotonic()
    await publishing.publish(version)
    return (await rival.served(RIVAL, policy, 0))["chunk_s"] - began_s


def _decode_s(two: TwoVersions, first: Publication, second: Publication) -> float:
    """Decoding version 2 as a whole against version 1, with one thread."""
    arena = WeightArena.of(two.new, first.manifest)
    (entry,) = second.manifest.files
    times = []
    for _ in range(2):  # the first one loads what is compiled
        began_s = time.monotonic()
        decode_delta(arena, second.files[entry.name], second.manifest, entry)
        times.append(time.monotonic() - began_s)
    return times[-1]


def _columns(what: str, path: LinkPath, way: _Way, decode_s: float) -> list[Row]:
    """Where the time of our version went."""
    ratio = way.transport_s / path.ideal_s(way.size_bytes)
    seconds = {
        f"diff and encode, {THREADS} threads": way.encode_s,
        "upload, apply at the store, durable": way.durable_s,
        "decode, whole file, 1 thread": decode_s,
        "last chunk to engine (decode that is left, verification)": way.verify_s,
        "apply (staging and pause)": way.swap_s,
        "pause": way.pause_s,
    }
    rows = [Row(metric=f"{name}, {what}", value=value, unit="s") for name, value in seconds.items()]
    judged = way.size_bytes >= LEAST_BYTES
    transport = Row(
        metric=f"transport over {path.name}, warm, {what}",
        value=way.transport_s,
        unit="s",
        reference="bytes / link + 1 RTT",
        ratio=ratio,
        target=f"<= {TARGET}" if judged else "",
        ok=ratio <= TARGET or not judged,
    )
    return [*rows, transport]


def _against(
    path: LinkPath, way: _Way, name: str, total_s: float, moved: int, *, judged: bool
) -> list[Row]:
    """The time of another way, and ours as a ratio to it."""
    ratio = way.total_s / total_s
    where = f"publish to serving over {path.name}"
    return [
        Row(metric=f"{where}, {name}, {moved / 1e6:.1f} MB", value=total_s, unit="s"),
        Row(
            metric=f"{where}, ours",
            value=way.total_s,
            unit="s",
            reference=name,
            ratio=ratio,
            target="<= 1.0" if judged else "",
            ok=ratio <= 1.0 or not judged,
        ),
    ]
