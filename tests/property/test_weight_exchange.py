"""A chunk fetch ends complete over any links that deliver now and then, whatever relays do."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from transport.chunk_parts import ChunkSource, place_of
from transport.chunks import ChunkFetcher
from transport.delivery_window import DeliveryWindow
from transport.weights.manifest import describe_file

CHUNK = 1 << 17
PART = CHUNK // 2


def files(sizes):
    made = {}
    for number, size in enumerate(sizes):
        data = random.Random(number).randbytes(size)
        entry = describe_file("delta.safetensors", "delta", data, chunk_bytes=CHUNK)
        made[entry.digest] = (entry, data)
    return made


class Link:
    """Loses, repeats, delays, damages and cuts, as a seeded source of chance says."""

    def __init__(self, contents, chance, *, loss, repeat, damage, cut):
        self.contents, self.chance = contents, chance
        self.loss, self.repeat, self.damage, self.cut = loss, repeat, damage, cut
        self.flying = []

    def send(self, requests, now):
        for source, request in requests:
            for index in request.indices:
                entry, data = self.contents[request.digest]
                assert request.part_bytes in (0, PART)
                place = place_of(index, request.part_bytes, CHUNK)
                assert place.number < len(entry.chunk_digests)
                part = data[place.number * CHUNK :][place.start : place.stop]
                if source == "liar":
                    part = bytes(len(part))
                for _ in range(1 + (self.chance.random() < self.repeat)):
                    if self.chance.random() < self.loss:
                        continue
                    if self.chance.random() < self.damage:
                        part = bytes(b ^ 1 for b in part)
                    at = now + self.chance.uniform(0.001, 20.0)
                    found = source != "poor" or self.chance.random() < 0.5
                    self.flying.append(
                        (at, source, request.digest, index, request.part_bytes, part, found)
                    )
        self.flying.sort(key=lambda item: item[0])

    def next(self):
        if self.flying and self.chance.random() < self.cut:
            self.flying.clear()
            return None
        return self.flying.pop(0) if self.flying else None


RATES = st.sampled_from([0.0, 0.05, 0.3])


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 10 * CHUNK), max_size=3),
    seed=st.integers(0, 1 << 32),
    loss=RATES,
    repeat=RATES,
    damage=RATES,
    cut=st.sampled_from([0.0, 0.02]),
    window=st.integers(1, 1 << 20),
    others=st.sets(st.sampled_from(["lane", "poor", "liar"])),
)
def test_every_chunk_arrives_once_whatever_links_and_relays_do(
    sizes, seed, loss, repeat, damage, cut, window, others
):
    contents = files(sizes)
    chance = random.Random(seed)
    link = Link(contents, chance, loss=loss, repeat=repeat, damage=damage, cut=cut)
    disk = {digest: {} for digest in contents}
    names = ["origin", *sorted(others)]
    windows = {name: DeliveryWindow(max_window_bytes=window) for name in names}
    relays = {"poor", "liar"}
    now = 0.0

    def fetcher_after_restart():
        entries = [entry for entry, _ in contents.values()]
        sources = [ChunkSource(name, windows[name], name in relays) for name in names]
        return ChunkFetcher(entries, disk, sources=sources, max_attempts=60)

    fetcher = fetcher_after_restart()
    for _ in range(20_000):
        if fetcher.done:
            break
        link.send(fetcher.next_requests(now), now)
        assert fetcher.failed is None
        assert all(fetcher.outstanding_bytes(name) <= max(window, CHUNK) for name in names)
        arrival = link.next()
        if arrival is None:
            deadline = fetcher.next_deadline()
            assert deadline is not None
            if not link.flying and chance.random() < 0.3:
                name = chance.choice(names)
                fetcher.source_down(name)
                fetcher.source_up(name)
            elif chance.random() < 0.1:
                fetcher = fetcher_after_restart()
            now = max(now, deadline)
            continue
        at, source, digest, index, part_bytes, part, found = arrival
        now = max(now, at)
        if not found:
            fetcher.chunk_not_found(source, digest, index, part_bytes)
            continue
        accepted = fetcher.chunk_arrived(source, digest, index, part_bytes, part, now)
        if accepted is not None:
            assert accepted.index not in disk[digest]
            disk[digest][accepted.index] = bytes(accepted.data)
            complete = len(disk[digest]) == len(accepted.entry.chunk_digests)
            assert accepted.file_complete == complete
    assert fetcher.done
    progress = fetcher.progress()
    assert (
        progress.have_bytes
        == progress.total_bytes
        == sum(len(data) for _, data in contents.values())
    )
    for digest, (_, data) in contents.items():
        assert b"".join(part for _, part in sorted(disk[digest].items())) == data
