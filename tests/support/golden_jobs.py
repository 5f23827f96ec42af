"""Golden messages of jobs, operators' orders and what agents answer to them."""

from transport.messages import (
    AgentLog,
    AgentLogRequest,
    AgentLogs,
    AgentLogsRequest,
    AgentOrder,
    AttemptRecord,
    DeadLetter,
    DeadLetters,
    DeadLettersRequest,
    DrainOrder,
    Events,
    EventsRequest,
    ExplainRequest,
    Explanation,
    ExternalJob,
    Item,
    JobCancel,
    JobReceipt,
    JobReceipts,
    JobReplay,
    JobResult,
    JobSubmit,
    LeaseOffer,
    LeaseOffers,
    LeaseRecall,
    LeaseReplies,
    LeaseReply,
    Message,
    Results,
    ResultsRequest,
    RewardSpec,
    ScoredCandidate,
    Transition,
)

POLICY = "arithmetic/solver"
JOB = "arithmetic/x-judge.item-7"
ATTEMPT = JOB + "#2"
FENCE = (3, 171)
ITEM = Item(index=7, prompt="2 + 3 = ?", answer="5", meta='{"terms": 2}', family="sums")
OFFER = LeaseOffer(
    attempt=ATTEMPT,
    fence=FENCE,
    job=JOB,
    kind="external",
    items=(ITEM,),
    group_size=4,
    workflow="single_turn",
    settings={"turns": 1},
    policies={"solver": POLICY},
    reward=RewardSpec(name="exact"),
    max_new_tokens=64,
    temperature=0.7,
    seed=2**62,
    lease_s=120.0,
    pinned={POLICY: 12},
)
RECORD = AttemptRecord(
    attempt=JOB + "#1",
    agent="paris",
    offered_s=10.5,
    ended_s=12.25,
    outcome="failed",
    detail="engine.generation: no memory left",
)

JOB_SAMPLES: tuple[tuple[Message, tuple[bytes, ...]], ...] = (
    (LeaseOffers(offers=(OFFER,)), ()),
    (
        LeaseReplies(
            replies=(
                LeaseReply(attempt=ATTEMPT, fence=FENCE, accepted=True),
                LeaseReply(attempt=JOB + "#3", fence=(3, 172), accepted=False, reason="full"),
            )
        ),
        (),
    ),
    (LeaseRecall(attempt=ATTEMPT, fence=FENCE), ()),
    (DrainOrder(deadline_s=90.0, reason="maintenance"), ()),
    (AgentLogRequest(request=9, run="arithmetic", lines=200), ()),
    (AgentLog(request=9, lines=("started", "zoë: ready")), ()),
    (
        JobSubmit(
            run="arithmetic",
            jobs=(
                ExternalJob(
                    id="item-7",
                    items=(ITEM,),
                    group_size=4,
                    priority=3,
                    deadline_s=600.0,
                    max_new_tokens=64,
                    temperature=0.7,
                    pinned={"solver": 12},
                    require={"region": ("eu-west-1", "eu-west-3")},
                ),
            ),
        ),
        (),
    ),
    (
        JobReceipts(
            receipts=(
                JobReceipt(id="item-7", state="queued"),
                JobReceipt(id="item-8", state="refused", code="job.invalid", message="too long"),
            )
        ),
        (),
    ),
    (JobCancel(run="arithmetic", ids=("item-7",)), ()),
    (ResultsRequest(after=41, limit=16, wait_s=30.0), ()),
    (
        Results(
            results=(
                JobResult(
                    number=42,
                    run="arithmetic",
                    id="item-7",
                    state="accepted",
                    digest="1f" * 32,
                    size_bytes=81_234,
                    rewards=(0.0, 1.0),
                    lengths=(17, 64),
                    versions={POLICY: (12, 12)},
                    agent="paris",
                    attempts=2,
                ),
                JobResult(
                    number=43, run="arithmetic", id="item-8", state="expired", code="deadline"
                ),
            ),
            last=43,
            open_jobs=5,
        ),
        (),
    ),
    (ExplainRequest(subject=JOB), ()),
    (
        Explanation(
            subject=JOB,
            kind="job",
            state="leased",
            reasons=("in flight on paris for 3.0 s",),
            candidates=(
                ScoredCandidate(agent="paris", verdict="chosen", cost_s=4.5, parts={"rtt_s": 0.04}),
                ScoredCandidate(agent="tokyo", verdict="full"),
            ),
            history=("10.500 arithmetic/x-judge.item-7#1 offered agent=paris",),
            now_s=13.5,
        ),
        (),
    ),
    (EventsRequest(after=2**33 + 17, limit=100, wait_s=5.0, subject="paris"), ()),
    (
        Events(
            transitions=(
                Transition(
                    number=2**33 + 18,
                    at_s=99.5,
                    subject="paris",
                    what="hello",
                    facts={"incarnation": "4"},
                ),
            ),
            last=2**33 + 20,
            missed=2,
            now_s=101.0,
        ),
        (),
    ),
    (
        AgentOrder(
            agent="paris", order="drain", deadline_s=90.0, reason="maintenance", by="http:ada"
        ),
        (),
    ),
    (DeadLettersRequest(run="arithmetic", after=JOB, limit=10), ()),
    (
        DeadLetters(
            letters=(
                DeadLetter(
                    job=JOB,
                    run="arithmetic",
                    kind="external",
                    reason="attempts",
                    died_s=99.5,
                    prompt="2 + 3 = ?",
                    attempts=(RECORD,),
                ),
            ),
            more=True,
        ),
        (),
    ),
    (JobReplay(run="arithmetic", jobs=(JOB,), by="http:ada"), ()),
    (AgentLogsRequest(agent="paris", run="arithmetic", lines=50), ()),
    (AgentLogs(agent="paris", lines=("started", "zoë: ready")), ()),
)
