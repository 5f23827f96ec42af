"""A chunk fetch ends complete over any link that delivers now and then."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from transport.chunks import ChunkFetcher, DeliveryWindow
from transport.weights.manifest import describe_file

CHUNK = 100


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
        for request in requests:
            for index in request.indices:
                entry, data = self.contents[request.digest]
                part = data[index * CHUNK :][: entry.chunk_size_bytes(index)]
                for _ in range(1 + (self.chance.random() < self.repeat)):
                    if self.chance.random() < self.loss:
                        continue
                    if self.chance.random() < self.damage:
                        part = bytes(b ^ 1 for b in part)
                    at = now + self.chance.uniform(0.001, 20.0)
                    self.flying.append((at, request.digest, index, part))
        self.flying.sort(key=lambda item: item[0])

    def next(self):
        if self.flying and self.chance.random() < self.cut:
            self.flying.clear()
            return None
        return self.flying.pop(0) if self.flying else None


RATES = st.sampled_from([0.0, 0.05, 0.3])


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 1500), max_size=4),
    seed=st.integers(0, 1 << 32),
    loss=RATES,
    repeat=RATES,
    damage=RATES,
    cut=st.sampled_from([0.0, 0.02]),
    window=st.integers(1, 2000),
)
def test_every_chunk_arrives_once_whatever_the_link_does(
    sizes, seed, loss, repeat, damage, cut, window
):
    contents = files(sizes)
    chance = random.Random(seed)
    link = Link(contents, chance, loss=loss, repeat=repeat, damage=damage, cut=cut)
    disk = {digest: {} for digest in contents}
    shared = DeliveryWindow(max_window_bytes=window)
    now = 0.0

    def fetcher_after_restart():
        entries = [entry for entry, _ in contents.values()]
        return ChunkFetcher(entries, disk, window=shared, max_attempts=60)

    fetcher = fetcher_after_restart()
    for _ in range(20_000):
        if fetcher.done:
            break
        link.send(fetcher.next_requests(now), now)
        assert fetcher.failed is None
        assert fetcher.outstanding_bytes <= max(window, CHUNK)
        arrival = link.next()
        if arrival is None:
            deadline = fetcher.next_deadline()
            assert deadline is not None
            if not link.flying and chance.random() < 0.3:
                fetcher.link_cut()
            elif chance.random() < 0.1:
                fetcher = fetcher_after_restart()
            now = max(now, deadline)
            continue
        at, digest, index, part = arrival
        now = max(now, at)
        accepted = fetcher.chunk_arrived(digest, index, part, now)
        if accepted is not None:
            assert index not in disk[digest]
            disk[digest][index] = part
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
