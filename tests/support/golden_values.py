"""Values of the golden messages."""

from transport.messages import (
    GroupSummary,
    HeldAttempt,
    SignerCertificate,
    VersionRef,
)
from transport.runs import EvaluationSpec, PolicySpec, RunSpec, TaskSpec, WorkflowSpec
from transport.status import (
    AccountingRow,
    AgentStatus,
    EvaluationStatus,
    PolicyStatus,
    RunStatus,
    SchedulerStatus,
    StepStatus,
)

POLICY = "arithmetic/solver"
JOB = "arithmetic/t-000041"
ATTEMPT = JOB + "#2"
FENCE = (3, 170)
DIGEST = "1f" * 32
SIGNATURE = bytes(range(64))
SIGNER = SignerCertificate(policy=POLICY, verify_key="ab" * 32, signature=SIGNATURE)

HELD = HeldAttempt(attempt=ATTEMPT, fence=FENCE, spooled=True)
SERVED = {POLICY: VersionRef(version=12, digest=DIGEST)}
SUMMARY = GroupSummary(
    attempt=ATTEMPT,
    fence=FENCE,
    job=JOB,
    digest=DIGEST,
    size_bytes=81_234,
    rewards=(0.0, 1.0),
    lengths=(17, 64),
    versions={POLICY: (11, 12)},
    prompt_tokens=23,
    queued_s=0.25,
    generating_s=3.5,
    agent="paris",
)
RUN = RunSpec(
    name="arithmetic",
    seed=7,
    policies={"solver": PolicySpec(model="models/tiny", settings={"learning_rate": 0.001})},
    task=TaskSpec(
        source="reasoning-gym", dataset="chain_sum", settings={"min_terms": 2}, held_out_one_in=5
    ),
    workflow=WorkflowSpec(policies=("solver",), settings={"system": "Answer with a number."}),
    evaluation=EvaluationSpec(items=512, every_versions=20),
)
STATUS = SchedulerStatus(
    term=3,
    build="0.1.0",
    uptime_s=12.5,
    runs=(
        RunStatus(
            name="arithmetic",
            state="running",
            reason="",
            policies=(
                PolicyStatus(
                    policy=POLICY,
                    trainer="training",
                    step=12,
                    steps=100,
                    head_version=12,
                    head_digest=DIGEST,
                    checkpoint_step=0,
                    buffered_groups=9,
                    delta_bytes=70_000,
                    full_bytes=600_000,
                    last_step=StepStatus(
                        policy=POLICY,
                        step=12,
                        version=12,
                        reward_mean=0.4,
                        policy_lag_mean=1.5,
                        policy_lag_max=3,
                        response_tokens=4096,
                        busy_s=1.25,
                        waiting_s=0.5,
                        delta_bytes=70_000,
                        full_bytes=600_000,
                        at_s=99.0,
                    ),
                    evaluations=(
                        EvaluationStatus(
                            policy=POLICY,
                            version=0,
                            step=0,
                            items=512,
                            scored=512,
                            accuracy=0.11,
                            done=True,
                        ),
                    ),
                ),
            ),
            accounting=(AccountingRow(policy=POLICY, kind="train", submitted=3, queued=3),),
        ),
    ),
    agents=(
        AgentStatus(
            name="paris",
            state="ready",
            slots=8,
            running_sequences=8,
            leases=2,
            rtt_s=0.04,
            rate_tokens_s=None,
            tokens_generated=123_456,
            bytes_up=1000,
            bytes_down=2000,
            versions={POLICY: 12},
            digests={POLICY: DIGEST},
            groups_done=40,
            attempts_failed=1,
        ),
    ),
    counters={"leases_offered": 42},
)
