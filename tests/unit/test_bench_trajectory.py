"""What ``bench.trajectory`` compares: the same tokens in every form, and a bound that is one."""

import msgpack
import numpy as np

from bench.trajectory import SIBLINGS, bound_bytes, group_rows, references, uniform_group

TOKENS = 512


def test_every_reference_carries_all_tokens_and_ours_is_the_smallest() -> None:
    rows = group_rows("uniform", uniform_group(TOKENS), target=True)
    ours, lists, arrays, packed = rows[:4]
    assert ours.value < packed.value < arrays.value < lists.value
    assert arrays.value >= 4 + 4 + 1 + 4
    assert ours.target == "<= 5 B/token"


def test_the_bound_of_noise_is_what_noise_takes() -> None:
    group = uniform_group(TOKENS)
    ids = np.concatenate([np.array(record.tokens) for record in group.sequences])
    entropy = np.log2(len(np.unique(ids)))
    assert 23 + 0.9 * entropy < 8 * bound_bytes(group) < 23 + entropy + 8
    sizes = dict(references(group))
    assert sizes["raw arrays"] >= SIBLINGS * TOKENS * 13
    assert sizes["MessagePack lists"] > len(msgpack.packb(ids.tolist()))
