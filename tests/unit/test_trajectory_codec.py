"""The packed trajectory: lossless, compact, and strict about what it reads."""

import hashlib
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest

from transport.compression import compress, decompress
from transport.errors import (
    IntegrityError,
    LocalProtocolError,
    RemoteProtocolError,
    SizeLimitExceeded,
    TruncatedBlob,
)
from transport.summaries import summary_fault
from transport.trajectory import (
    SequenceRecord,
    TrajectoryGroup,
    body_digest,
    expand,
    pack,
    run_length,
    summarise,
    unpack,
)

GOLDEN = bytes.fromhex(
    "66667467019d01000028b52ffd649d00b50700020c2d31804bd201f380195869059a7381fe56270800ca45c150"
    "932276ef3df2db26810c310120119a84625a00c201d41c697bcb14d42b2a3351fdd41528fe84ebc235602e0901"
    "68549bc7e79c5375a9ae5708cf74e8bffe60d733488531dc87d8118c861bee83962f8cf7813b8158be58dcf2c5"
    "495a646cb6881a822b55280c233b3b452276d039642cd43091684c1b2145dea0f0bac749515e0c04302ddf763b"
    "968283d65a1b6882c7f5bea8dde47030444985c47f4c1d0020e6251c184c350489b9201308a8010100712c3c40"
    "011004e240b09a410373802c08068880141fa2ca056580827179ac8c03821aa6a6d98632be3f994f11838e2c"
)  # format 1; append another when the format changes, never edit this one


def sequence(**changes: Any) -> SequenceRecord:
    values: dict[str, Any] = {
        "prompt": 0,
        "tokens": (7, 70_000, 2),
        "logprobs": np.array([-0.5, -1e-30, -3.25], dtype=np.float32),
        "segments": ((2, 0, 4), (1, 0, 5)),
        "reward": 1.0,
        "finish_reason": "stop",
    }
    return SequenceRecord(**{**values, **changes})


def group(*sequences: SequenceRecord, **changes: Any) -> TrajectoryGroup:
    values: dict[str, Any] = {
        "job": "arithmetic/t-000041",
        "attempt": "arithmetic/t-000041#2",
        "policies": ("arithmetic/solver", "arithmetic/judge"),
        "prompts": ((1, 5, 9), ()),
        "sequences": sequences or (sequence(),),
    }
    return TrajectoryGroup(**{**values, **changes})


def two_siblings() -> TrajectoryGroup:
    tool = sequence(
        prompt=1,
        tokens=(4_294_967_295, 0, 3, 4),
        logprobs=np.array([-0.0, -1.0, 0.0, -1.4e-45], dtype=np.float32),
        segments=((1, 1, 2**40), (2, -1, 0), (1, 0, 0)),
        reward=-0.125,
        finish_reason="length",
    )
    empty = sequence(tokens=(), logprobs=np.zeros(0, np.float32), segments=(), reward=0.0)
    return group(sequence(), tool, empty)


def repacked(body: bytes, size: int | None = None, prefix: bytes = b"fftg\x01") -> bytes:
    declared = len(body) if size is None else size
    return prefix + declared.to_bytes(4, "little") + compress("zstd", body)


def body_of(data: bytes) -> bytes:
    return decompress("zstd", data[9:], max_bytes=2**20)


def with_header(data: bytes, **changes: Any) -> bytes:
    body = body_of(data)
    size = int.from_bytes(body[:4], "little")
    header = {**msgpack.unpackb(body[4 : 4 + size]), **changes}
    encoded = msgpack.packb(header)
    return repacked(len(encoded).to_bytes(4, "little") + encoded + body[4 + size :])


def test_a_group_survives_packing_bit_for_bit() -> None:
    before = two_siblings()
    after = unpack(pack(before))
    assert after == before
    assert after.sequences[1].logprobs.tobytes() == before.sequences[1].logprobs.tobytes()


def test_equal_groups_pack_to_equal_bytes() -> None:
    assert pack(two_siblings()) == pack(two_siblings())
    assert body_digest(b"x") == hashlib.sha256(b"x").hexdigest()


def test_the_golden_bytes_of_format_1_still_read() -> None:
    assert unpack(GOLDEN) == two_siblings()


def test_siblings_share_their_prompt() -> None:
    rng = np.random.default_rng(0)
    prompt = tuple(rng.integers(0, 2**32, 4096).tolist())
    one = len(pack(group(sequence(), prompts=(prompt,))))
    eight = len(pack(group(*[sequence()] * 8, prompts=(prompt,))))
    assert eight < one + 64


def test_segments_and_per_token_columns_are_inverse() -> None:
    policies, versions = (0, 0, -1, 1, 1), (3, 4, 0, 4, 4)
    segments = run_length(policies, versions)
    assert segments == ((1, 0, 3), (1, 0, 4), (1, -1, 0), (2, 1, 4))
    assert expand(segments) == (policies, versions)
    assert expand(()) == ((), ())


def test_a_summary_tells_the_age_per_policy_and_skips_tool_output() -> None:
    result = two_siblings()
    data = pack(result)
    summary = summarise(result, data, fence=(2, 9), queued_s=0.25, generating_s=1.5)
    assert summary.versions == {"arithmetic/solver": (0, 5), "arithmetic/judge": (2**40, 2**40)}
    assert summary.lengths == (3, 4, 0)
    assert summary.rewards == (1.0, -0.125, 0.0)
    assert (summary.prompt_tokens, summary.size_bytes) == (3, len(data))
    assert (summary.attempt, summary.fence) == ("arithmetic/t-000041#2", (2, 9))


def test_a_summary_tells_what_was_cut_off_and_who_drew_in_which_sequences() -> None:
    result = two_siblings()
    data = pack(result)
    summary = summarise(result, data, fence=(2, 9), queued_s=0.25, generating_s=1.5)
    cut_off = sum(s.finish_reason == "length" for s in result.sequences)
    assert summary.truncated == cut_off > 0
    drew = {
        policy: tuple(
            place
            for place, s in enumerate(result.sequences)
            if any(index == number for _, index, _ in s.segments)
        )
        for number, policy in enumerate(result.policies)
    }
    assert summary.members == {name: places for name, places in drew.items() if len(places) < 3}
    assert summary_fault(msgspec.structs.replace(summary, size_bytes=1)) == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"truncated": -1}, "truncated"),
        ({"truncated": 4}, "truncated"),
        ({"members": {"arithmetic/solver": ()}}, "members"),
        ({"members": {"arithmetic/solver": (1, 0)}}, "members"),
        ({"members": {"arithmetic/solver": (0, 3)}}, "members"),
        ({"members": {"arithmetic/solver": (-1, 0)}}, "members"),
        ({"members": {"arithmetic/nobody": (0,)}}, "members"),
    ],
)
def test_a_summary_whose_counts_do_not_add_up_is_refused(fields, words) -> None:
    result = two_siblings()
    summary = summarise(result, pack(result), fence=(2, 9), queued_s=0.25, generating_s=1.5)
    assert words in summary_fault(msgspec.structs.replace(summary, **fields))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (group(sequences=()), "at least one sequence"),
        (group(sequence(prompt=2)), "prompt 2 of 2"),
        (group(sequence(segments=((2, 0, 4),))), "cover 2 of 3"),
        (group(sequence(segments=((3, 2, 4),))), "impossible segment"),
        (group(sequence(segments=((3, 0, -1),))), "impossible segment"),
        (group(sequence(reward=float("nan"))), "reward is nan"),
        (group(sequence(logprobs=np.full(3, -np.inf, np.float32))), "not finite"),
        (group(sequence(logprobs=np.zeros(3))), "must be float32"),
        (group(sequence(logprobs=np.zeros(2, np.float32))), "must be float32"),
        (group(sequence(tokens=(1, 2, 2**32))), "does not fit"),
        (group(sequence(tokens=(1, 2, -1))), "does not fit"),
        (group(sequence(tokens=(1, 2, "x"))), "does not fit"),
        (group(job="j" * 70_000), "too large"),
    ],
)
def test_packing_refuses_a_broken_group_by_name(broken: TrajectoryGroup, words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        pack(broken)


def test_a_declared_size_over_the_limit_is_refused_before_decompressing() -> None:
    with pytest.raises(SizeLimitExceeded):
        unpack(repacked(b"", size=2**20 + 1), max_bytes=2**20)


def test_a_bomb_behind_a_small_declared_size_is_cut_off() -> None:
    with pytest.raises(SizeLimitExceeded):
        unpack(repacked(b"\0" * 50_000_000, size=10))


def test_missing_bytes_are_called_truncated() -> None:
    data = pack(two_siblings())
    for part in (b"", data[:8], repacked(body_of(data)[:-1]), repacked(b"abc"), data[:-20]):
        with pytest.raises(IntegrityError):
            unpack(part)
    with pytest.raises(TruncatedBlob):
        unpack(repacked(body_of(data)[:-1]))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 8},
        {"prompts": 1},
        {"sequences": -1},
        {"segments": 2**40},
        {"finish_reasons": ["stop"]},
        {"policies": []},
        {"job": 7},
        {"prompts": 3},
    ],
)
def test_a_header_that_disagrees_with_its_columns_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((RemoteProtocolError, TruncatedBlob)):
        unpack(with_header(pack(two_siblings()), **changes))


def test_foreign_bytes_are_refused() -> None:
    data = pack(two_siblings())
    for broken in (
        repacked(body_of(data), prefix=b"fftg\x02"),
        repacked(body_of(data), prefix=b"zzzz\x01"),
        repacked(body_of(data) + b"\0"),
        repacked((2**20).to_bytes(4, "little") + b"\0" * 10),
        repacked((3).to_bytes(4, "little") + b"\xc1\xc1\xc1"),
        data[:9] + b"not zstd at all",
    ):
        with pytest.raises((RemoteProtocolError, IntegrityError)):
            unpack(broken)


def test_a_group_is_not_equal_to_something_else() -> None:
    assert sequence() != "sequence"
    assert sequence() != sequence(reward=0.5)
