"""Golden messages: two files per kind and protocol version, written once and never again.

``NAME.bin`` holds the frames, each behind its length as u32 little-endian; ``NAME.json`` what they
mean: kind byte, header (bytes as base64) and payload (hexadecimal digits). Add the files of a new
kind from the repository's root with ``PYTHONPATH=.:tests/support python -m golden``, which never
touches a file that exists: what was on the wire once stays readable.
"""

import struct
from pathlib import Path
from typing import Any

import click
import msgspec
from golden_jobs import JOB_SAMPLES
from golden_partials import PARTIAL_SAMPLES
from golden_values import (
    ATTEMPT,
    DIGEST,
    FENCE,
    HELD,
    JOB,
    POLICY,
    RUN,
    SERVED,
    SIGNATURE,
    SIGNER,
    STATUS,
    SUMMARY,
)

from transport.envelope import KIND_OF, encode
from transport.messages import (
    KINDS,
    PROTOCOL_VERSION,
    AgentInventory,
    Ahead,
    AttemptFailed,
    BatchGrant,
    BatchRequest,
    BodiesGone,
    BodiesReleased,
    Body,
    BodyRef,
    BodyRequest,
    CheckpointReport,
    Chunk,
    ChunkRequest,
    CommandReply,
    EnrolReply,
    EnrolRequest,
    Goodbye,
    GroupDrift,
    GroupRef,
    GroupUnusable,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloRequired,
    HostedPolicies,
    Item,
    LeaseOffer,
    LeaseReply,
    LeaseRevoke,
    Message,
    NextServerKey,
    OfferedBody,
    PartialRef,
    Ping,
    PlanStep,
    Pong,
    Probe,
    ProbeReply,
    Refuse,
    RewardSpec,
    Role,
    RunCommand,
    RunState,
    RunSubmit,
    StatusReply,
    StatusRequest,
    StepReport,
    SummariesAccepted,
    TrainerInventory,
    TrajectoriesStored,
    TrajectoryAck,
    TrajectoryAcks,
    TrajectoryOffer,
    TrajectoryPut,
    TrajectoryRefused,
    VersionAccepted,
    VersionDurable,
    VersionOffer,
    VersionRejected,
    VersionServing,
    VersionStored,
    WeightsPlan,
    WeightsRequest,
    Welcome,
)
from transport.status import GpuReading

FOLDER = Path(__file__).parents[1] / "golden" / f"v{PROTOCOL_VERSION}"

SAMPLES: tuple[tuple[Message, tuple[bytes, ...]], ...] = (
    (
        Hello(
            role=Role.AGENT,
            incarnation=4,
            build="0.1.0",
            features=("zstd",),
            process="0f" * 16,
            agent=AgentInventory(
                slots=8,
                hardware="h100",
                engine="torch",
                workflows={"single_turn": DIGEST},
                rewards=("exact",),
                held=(HELD,),
                versions=SERVED,
                labels={"site": "home"},
            ),
            trainer=TrainerInventory(policy=POLICY, checkpoint_step=40, checkpoint_version=41),
        ),
        (),
    ),
    (
        Welcome(
            incarnation=3,
            term=3,
            heartbeat_s=2.0,
            lost_after_s=12.0,
            features=("zstd",),
            policies=(POLICY,),
            run=RUN,
            highest_version=41,
            stopping=True,
            signers=(SIGNER,),
            upto={POLICY: 3},
            kinds=bytes((1, 2, 0x66)),
        ),
        (),
    ),
    (Refuse(code="protocol.version", message="speak version 1", retry_s=5.0, incarnation=3), ()),
    (HelloRequired(), ()),
    (Ping(sequence=9, sent_s=100.5), ()),
    (Pong(sequence=9, sent_s=100.5), ()),
    (Goodbye(reason="drained"), ()),
    (
        Heartbeat(
            sequence=9,
            sent_s=100.5,
            held=(HELD,),
            running_sequences=7,
            waiting_sequences=1,
            tokens_generated=123_456,
            versions=SERVED,
            rtt_s=0.04,
            spool_bytes=81_234,
            bytes_up=1000,
            bytes_down=2**40,
            draining=True,
            wall_s=1.7e9,
            clock_offset_s=-0.25,
            gpus=(GpuReading(name="H200", power_w=320.5, temperature_c=61.0),),
        ),
        (),
    ),
    (
        HeartbeatReply(
            sequence=9,
            sent_s=100.5,
            unknown=(ATTEMPT,),
            received_s=1.7e9,
            replied_s=1.7e9 + 0.5,
            upto={POLICY: 3},
        ),
        (),
    ),
    (HostedPolicies(policies=(POLICY,), signers=(SIGNER,)), ()),
    (
        LeaseOffer(
            attempt=ATTEMPT,
            fence=FENCE,
            job=JOB,
            kind="train",
            items=(Item(index=41, prompt="2 + 3 = ?", answer="5", meta='{"terms": 2}'),),
            group_size=8,
            workflow="single_turn",
            settings={"system": "Answer with a number.", "turns": 1},
            policies={"solver": POLICY},
            reward=RewardSpec(name="reasoning-gym", dataset="chain_sum"),
            max_new_tokens=64,
            temperature=1.0,
            seed=2**63,
            lease_s=120.0,
            pinned={POLICY: 12},
            resume=PartialRef(digest=DIGEST, turns=2),
            recheck=DIGEST,
            chat_template_kwargs={POLICY: {"enable_thinking": False}},
        ),
        (),
    ),
    (LeaseReply(attempt=ATTEMPT, fence=FENCE, accepted=False, reason="draining"), ()),
    (LeaseRevoke(attempt=ATTEMPT, fence=FENCE, reason="superseded"), ()),
    (AttemptFailed(attempt=ATTEMPT, fence=FENCE, code="engine.generation", detail="é"), ()),
    (
        VersionServing(
            policy=POLICY, version=12, digest=DIGEST, pause_s=0.2, fetched_bytes=70_000, fetch_s=1.5
        ),
        (),
    ),
    (BatchRequest(policy=POLICY, step=13, groups=32, head_version=12), ()),
    (
        BatchGrant(
            policy=POLICY,
            step=13,
            groups=(GroupRef(job=JOB, digest=DIGEST, size_bytes=81_234, policy_lag=2),),
        ),
        (),
    ),
    (GroupUnusable(policy=POLICY, step=13, job=JOB, code="integrity.checksum"), ()),
    (
        StepReport(
            policy=POLICY,
            step=13,
            version=13,
            busy_s=1.25,
            waiting_s=0.5,
            metrics={"loss": -0.1},
            drifts=(GroupDrift(job=JOB, version=12, tokens=64, difference=0.0125, kl=0.0005),),
            older=(
                GroupDrift(
                    job=JOB, version=9, tokens=64, difference=0.25, kl=0.03125, moved=0.1875
                ),
            ),
        ),
        (),
    ),
    (CheckpointReport(policy=POLICY, step=20, version=20, final=True), ()),
    (RunState(run="arithmetic", state="paused"), ()),
    (TrajectoriesStored(summaries=(SUMMARY,)), ()),
    (SummariesAccepted(digests=(DIGEST,), rechecked=(DIGEST,)), ()),
    (BodiesReleased(digests=(DIGEST,)), ()),
    (BodiesGone(digests=(DIGEST,)), ()),
    (
        VersionStored(
            policy=POLICY,
            version=13,
            parent=12,
            step=13,
            digest=DIGEST,
            delta_bytes=70_000,
            full_bytes=600_000,
        ),
        (),
    ),
    (VersionAccepted(policy=POLICY, version=13), ()),
    (RunSubmit(run=RUN, by="http:ada"), ()),
    (RunCommand(run="arithmetic", command="stop", by="http:ada"), ()),
    (CommandReply(ok=False, code="config", message="no such run"), ()),
    (StatusRequest(agents_after="london"), ()),
    (StatusReply(status=STATUS), ()),
    (TrajectoryPut(summary=SUMMARY, cumulative=True), (b"fftg\x01 packed",)),
    (TrajectoryAck(attempt=ATTEMPT, digest=DIGEST), ()),
    (
        TrajectoryOffer(
            bodies=(
                OfferedBody(
                    summary=SUMMARY, chunk_bytes=262_144, chunk_digests=(bytes(range(16)),)
                ),
            )
        ),
        (),
    ),
    (TrajectoryAcks(bodies=(BodyRef(attempt=ATTEMPT, digest=DIGEST),)), ()),
    (TrajectoryRefused(attempt=ATTEMPT, digest=DIGEST, code="integrity", message="no"), ()),
    (BodyRequest(digests=(DIGEST,)), ()),
    (Body(digest=DIGEST), (b"fftg\x01 packed",)),
    (VersionOffer(manifest=b"\x81\xa1v\x0d", signature=SIGNATURE, key_id="ab" * 8), ()),
    (VersionDurable(policy=POLICY, version=13), ()),
    (VersionRejected(policy=POLICY, version=13, code="integrity.base", message="wrong base"), ()),
    (
        WeightsRequest(
            policy=POLICY,
            have_version=12,
            have_digest=DIGEST,
            upto=16,
            rate_bytes_s=6.25e6,
            decode_cells_s=4e8,
            ahead_bytes=1048576,
            ahead_piece_bytes=65536,
        ),
        (),
    ),
    (
        WeightsPlan(
            policy=POLICY,
            version=13,
            steps=(
                PlanStep(
                    manifest=b"\x81\xa1v\x0d",
                    signature=SIGNATURE,
                    key_id="ab" * 8,
                    files=("delta.safetensors",),
                ),
            ),
            ahead=(Ahead(digest=DIGEST, indices=(0, 300), part_bytes=65536),),
        ),
        (),
    ),
    (
        ChunkRequest(
            digest=DIGEST,
            indices=(0, 300),
            part_bytes=65536,
            chunk_digests=(b"\x01" * 16, b"\x02" * 16),
            chunk_bytes=1048576,
            file_bytes=20000000,
        ),
        (),
    ),
    (Chunk(digest=DIGEST, index=300, part_bytes=65536), (b"\x00\xff" * 8,)),
    *JOB_SAMPLES,
    *PARTIAL_SAMPLES,
)

SAMPLES += (
    (
        EnrolRequest(
            token="0123456789abcdef",  # noqa: S106 - of no deployment
            secret="5" * 64,
            name="spot-7",
            protocol=1,
            build="1.0",
        ),
        (),
    ),
    (
        EnrolReply(
            name="spot-7",
            role=Role.AGENT,
            control_port=7700,
            trajectories_port=7701,
            weights_port=7702,
            server_key="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
            root_key="ab" * 32,
        ),
        (),
    ),
    (Probe(sequence=3, sent_s=1700000000.25), ()),
    (
        ProbeReply(
            sequence=3,
            sent_s=1700000000.25,
            received_s=1700000001.5,
            replied_s=1700000001.75,
            build="1.0",
            name="spot-7",
            known=True,
        ),
        (),
    ),
    (
        NextServerKey(
            public_key="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", signature=b"\x05" * 64
        ),
        (),
    ),
)

_LENGTH = struct.Struct("<I")


def join_frames(frames: list[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)


def split_frames(blob: bytes) -> list[bytes]:
    frames = []
    while blob:
        (size_bytes,) = _LENGTH.unpack_from(blob)
        end = _LENGTH.size + size_bytes
        frames.append(blob[_LENGTH.size : end])
        blob = blob[end:]
    return frames


def expectation(message: Message, payload: tuple[bytes, ...]) -> dict[str, Any]:
    return {
        "kind": KIND_OF[type(message)],
        "header": msgspec.to_builtins(message),
        "payload": [frame.hex() for frame in payload],
    }


def write_missing(folder: Path) -> list[str]:
    """Names of the kinds whose files were written; files that exist are left as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for message, payload in SAMPLES:
        name = type(message).__name__
        paths = (folder / f"{name}.bin", folder / f"{name}.json")
        if any(path.exists() for path in paths):
            continue
        meaning = msgspec.json.format(msgspec.json.encode(expectation(message, payload)), indent=1)
        contents = (join_frames(encode(message, payload)), meaning + b"\n")
        for path, content in zip(paths, contents, strict=True):
            with path.open("xb") as file:
                file.write(content)
        written.append(name)
    return written


@click.command()
def main() -> None:
    """Write the golden files that do not exist yet."""
    written = write_missing(FOLDER)
    click.echo(f"{len(written)} of {len(KINDS)} written to {FOLDER.name}: {' '.join(written)}")


if __name__ == "__main__":
    main()
