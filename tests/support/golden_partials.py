"""Golden samples of finished turns."""

from golden_values import ATTEMPT, DIGEST, FENCE, JOB, POLICY

from transport.messages import (
    Message,
    PartialAck,
    PartialOffer,
    PartialPut,
    PartialStored,
    PartialSummary,
)

PARTIAL = PartialSummary(
    attempt=ATTEMPT,
    fence=FENCE,
    job=JOB,
    turns=11,
    digest=DIGEST,
    size_bytes=262_145,
    oldest={POLICY: 40},
    agent="near",
)

PARTIAL_SAMPLES: tuple[tuple[Message, tuple[bytes, ...]], ...] = (
    (PartialPut(partial=PARTIAL), (b"packed turns",)),
    (
        PartialOffer(
            partial=PARTIAL, chunk_bytes=262_144, chunk_digests=(b"\x07" * 16, b"\x08" * 16)
        ),
        (),
    ),
    (PartialAck(attempt=ATTEMPT, digest=DIGEST, kept=True), ()),
    (PartialStored(partials=(PARTIAL,)), ()),
)
