"""Chunks from several sources, some of which lie, are silent or come and go."""

import asyncio
import time
from collections.abc import Callable

import pytest
import pytest_asyncio
import structlog

from edge_agent import weight_download
from edge_agent.weight_download import Downloads, FetchFailed
from transport.chunk_parts import ChunkSource, SourceId
from transport.chunks import AcceptedChunk
from transport.delivery_window import DeliveryWindow
from transport.errors import PeerUnreachable
from transport.messages import Ahead, Chunk, ChunkRequest, WeightsRequest
from transport.runtime.clock import SystemClock
from transport.weights.manifest import describe_file

ORIGIN, RELAY = "origin", "relay near"
CHUNK = 1 << 16
FILE = bytes(range(256)) * 2048  # eight chunks
ENTRY = describe_file("delta.safetensors", "delta", FILE, chunk_bytes=CHUNK)
Answer = Callable[[ChunkRequest], None]


class Sources:
    """Connections without sockets: ``answers`` by source get what is asked there."""

    def __init__(self) -> None:
        self.answers: dict[SourceId, Answer] = {ORIGIN: self.honest(ORIGIN)}
        self.down: set[SourceId] = set()
        self.asked: list[SourceId] = []
        self.downloads = Downloads(self, SystemClock())
        self._all = {ORIGIN: ChunkSource(ORIGIN, DeliveryWindow())}
        self.rate_bytes_s = 0.0

    def relay(self, answer: Answer) -> None:
        self.answers[RELAY] = answer
        self._all[RELAY] = ChunkSource(RELAY, DeliveryWindow(), relay=True)

    def honest(self, source: SourceId, data: bytes = FILE, times: int = 1) -> Answer:
        def answer(request: ChunkRequest) -> None:
            for index in request.indices:
                size = request.part_bytes or CHUNK
                body = data[index * size : (index + 1) * size]
                for _ in range(times):
                    self.deliver(source, request, index, body)

        return answer

    def deliver(self, source: SourceId, request: ChunkRequest, index: int, body: bytes) -> None:
        chunk = Chunk(digest=request.digest, index=index, part_bytes=request.part_bytes)
        loop = asyncio.get_running_loop()
        loop.call_soon(self.downloads.arrived, source, chunk, [body])

    def lacking(self, request: ChunkRequest) -> None:
        for index in request.indices:
            missing = Chunk(
                digest=request.digest, index=index, part_bytes=request.part_bytes, found=False
            )
            asyncio.get_running_loop().call_soon(self.downloads.arrived, RELAY, missing, [])

    # ---- as ``ChunkSources`` -----------------------------------------------------------------

    def sources(self) -> list[ChunkSource]:
        return list(self._all.values())

    def is_up(self, source: SourceId) -> bool:
        return source not in self.down

    def send(self, source: SourceId, request: ChunkRequest) -> None:
        if source in self.down:
            raise PeerUnreachable("down")
        self.asked.append(source)
        self.answers[source](request)

    def busy(self, busy: bool) -> None:
        pass

    def ahead(self) -> tuple[int, int]:
        return 4 * CHUNK, CHUNK

    async def fetch(
        self, present: dict[str, frozenset[int]] | None = None, coming: tuple[Ahead, ...] = ()
    ) -> bytes:
        """The file as it was kept."""
        kept = bytearray(len(FILE))

        def keep(accepted: AcceptedChunk) -> None:
            kept[accepted.index * CHUNK : accepted.index * CHUNK + len(accepted.data)] = (
                accepted.data
            )

        async with asyncio.timeout(10):
            fetched = await self.downloads.fetch([ENTRY], present or {}, keep, coming)
        held = len((present or {}).get(ENTRY.digest, ()))
        assert fetched == len(FILE) - held * CHUNK
        return bytes(kept)


@pytest_asyncio.fixture
async def sources():
    made = Sources()
    yield made
    made.downloads.close()


@pytest.mark.asyncio
async def test_a_relay_is_asked_and_the_origin_only_for_what_it_lacks(sources: Sources) -> None:
    sources.relay(sources.honest(RELAY))
    assert await sources.fetch() == FILE
    assert set(sources.asked) == {RELAY}
    sources.asked.clear()
    sources.relay(sources.lacking)
    assert await sources.fetch() == FILE
    assert set(sources.asked) == {RELAY, ORIGIN}


@pytest.mark.asyncio
async def test_what_is_on_disk_is_not_fetched(sources: Sources) -> None:
    kept = await sources.fetch({ENTRY.digest: frozenset({0, 7})})
    assert kept[CHUNK : 7 * CHUNK] == FILE[CHUNK : 7 * CHUNK]
    assert kept[:CHUNK] == bytes(CHUNK)


@pytest.mark.asyncio
async def test_a_relay_that_lies_is_named_and_left_alone_for_a_while(sources: Sources) -> None:
    sources.relay(sources.honest(RELAY, bytes(len(FILE))))
    with structlog.testing.capture_logs() as logs:
        assert await sources.fetch() == FILE
        (warning,) = [log for log in logs if log["event"] == "relay.left_alone"]
        assert (warning["source"], warning["reason"]) == (RELAY, "relay.wrong_chunk")
        sources.asked.clear()
        assert await sources.fetch() == FILE
        assert set(sources.asked) == {ORIGIN}
        assert len([log for log in logs if log["event"] == "relay.left_alone"]) == 1


@pytest.mark.asyncio
async def test_a_relay_that_is_not_there_costs_nothing(sources: Sources) -> None:
    sources.relay(sources.honest(RELAY))
    sources.down.add(RELAY)
    assert await sources.fetch() == FILE
    assert set(sources.asked) == {ORIGIN}


@pytest.mark.asyncio
async def test_a_silent_relay_costs_a_short_wait_once(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_download, "RELAY_PATIENCE_S", 0.05)
    sources.relay(lambda request: None)
    with structlog.testing.capture_logs() as logs:
        assert await sources.fetch() == FILE
    assert [log["reason"] for log in logs] == ["relay.no_answer"]
    sources.asked.clear()
    assert await sources.fetch() == FILE
    assert set(sources.asked) == {ORIGIN}


@pytest.mark.asyncio
async def test_a_cut_connection_is_asked_again_when_it_is_back(sources: Sources) -> None:
    def cut(request: ChunkRequest) -> None:
        sources.answers[ORIGIN] = sources.honest(ORIGIN)
        loop = asyncio.get_running_loop()
        loop.call_soon(sources.downloads.changed, ORIGIN, False)
        loop.call_later(0.01, sources.downloads.changed, ORIGIN, True)

    sources.answers[ORIGIN] = cut
    assert await sources.fetch() == FILE


@pytest.mark.asyncio
async def test_an_origin_that_takes_nothing_now_is_tried_again(sources: Sources) -> None:
    sources.down.add(ORIGIN)
    fetch = asyncio.create_task(sources.fetch())
    await asyncio.sleep(0)
    sources.down.clear()
    sources.downloads.changed(ORIGIN, True)
    assert await fetch == FILE


@pytest.mark.asyncio
async def test_chunks_that_come_twice_or_damaged_from_the_origin_do_no_harm(
    sources: Sources,
) -> None:
    honest, first = sources.honest(ORIGIN, times=2), []

    def sometimes(request: ChunkRequest) -> None:
        if not first:
            first.append(request)
            sources.honest(ORIGIN, bytes(len(FILE)))(request)
        else:
            honest(request)

    sources.answers[ORIGIN] = sometimes
    assert await sources.fetch() == FILE


@pytest.mark.asyncio
async def test_a_fetch_fails_when_the_origin_has_no_such_file_or_nothing_arrives(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(request: ChunkRequest) -> None:
        chunk = Chunk(
            digest=request.digest,
            index=request.indices[0],
            part_bytes=request.part_bytes,
            found=False,
        )
        sources.downloads.arrived(ORIGIN, chunk, [])

    sources.answers[ORIGIN] = gone
    with pytest.raises(FetchFailed, match=r"chunk\.not_found") as caught:
        await sources.fetch()
    assert caught.value.code == "link.fetch"
    monkeypatch.setattr(weight_download, "STALL_S", 0.3)
    sources.down.add(ORIGIN)
    with pytest.raises(FetchFailed, match="no chunk arrived"):
        await sources.fetch()


@pytest.mark.asyncio
async def test_many_small_files_that_are_written_in_one_go_are_all_taken(sources: Sources) -> None:
    """A loop that comes round seldom finds all writings done and more chunks waiting."""
    files = [bytes([number]) * 100 for number in range(40)]
    entries = [describe_file("delta.safetensors", "delta", file) for file in files]
    by_digest = {entry.digest: file for entry, file in zip(entries, files, strict=True)}

    def answer(request: ChunkRequest) -> None:
        sources.deliver(ORIGIN, request, 0, by_digest[request.digest])

    async def hold_the_loop_up() -> None:
        while True:
            time.sleep(0.005)  # noqa: ASYNC251
            await asyncio.sleep(0)

    sources.answers[ORIGIN] = answer
    kept: list[str] = []
    busy = asyncio.create_task(hold_the_loop_up())
    async with asyncio.timeout(10):
        await sources.downloads.fetch(entries, {}, lambda a: kept.append(a.entry.digest))
    busy.cancel()
    assert sorted(kept) == sorted(by_digest)


@pytest.mark.asyncio
async def test_what_came_before_its_fetch_is_taken(sources: Sources) -> None:
    ahead = Ahead(digest=ENTRY.digest, indices=(0, 1, 2))
    for index in ahead.indices:
        chunk = Chunk(digest=ENTRY.digest, index=index)
        sources.downloads.arrived(ORIGIN, chunk, [FILE[index * CHUNK : (index + 1) * CHUNK]])
    requests: list[ChunkRequest] = []
    honest = sources.honest(ORIGIN)

    def answer(request: ChunkRequest) -> None:
        requests.append(request)
        honest(request)

    sources.answers[ORIGIN] = answer
    assert await sources.fetch(coming=(ahead,)) == FILE
    assert sorted(i for request in requests for i in request.indices) == [3, 4, 5, 6, 7]


@pytest.mark.asyncio
async def test_what_nobody_fetches_is_forgotten(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_download, "EARLY_BYTES", 2 * CHUNK)
    for index in range(8):
        sources.downloads.arrived(ORIGIN, Chunk(digest="other", index=index), [bytes(CHUNK)])
    assert sources.downloads.early_bytes == 2 * CHUNK
    assert await sources.fetch() == FILE
    assert sources.downloads.early_bytes == 2 * CHUNK


@pytest.mark.asyncio
async def test_a_copy_with_nothing_begun_may_be_sent_the_first_bytes(sources: Sources) -> None:
    joiner = WeightsRequest(policy="a/b", have_version=None)
    holder = WeightsRequest(policy="a/b", have_version=3)
    downloads = sources.downloads
    assert downloads.requesting(joiner, policies=1) == joiner
    asked = downloads.requesting(holder, policies=2)
    assert (asked.ahead_bytes, asked.ahead_piece_bytes) == (2 * CHUNK, CHUNK)
    sources.answers[ORIGIN] = lambda request: None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await downloads.fetch([ENTRY], {}, lambda chunk: None)
    assert downloads.requesting(holder, policies=2) == holder  # part of it may be on disk
    sources.answers[ORIGIN] = sources.honest(ORIGIN)
    assert await sources.fetch() == FILE
    assert downloads.requesting(holder, policies=2) == asked
