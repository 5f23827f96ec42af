"""Statuses as a scheduler shows them, for tests of what draws them."""

from transport.status import AgentStatus, PolicyStatus, RunStatus, SchedulerStatus, StepStatus


def agent(name: str, **changes: object) -> AgentStatus:
    facts = {
        **{"name": name, "state": "ready", "slots": 64, "running_sequences": 12, "leases": 3},
        **{"rtt_s": 0.081, "rate_tokens_s": 50.0, "tokens_generated": 1000, "bytes_up": 10},
        **{"bytes_down": 2000, "versions": {"first/solver": 41}, "digests": {}, "groups_done": 9},
        **{"attempts_failed": 0, "hardware": "NVIDIA H200"},
    }
    return AgentStatus(**{**facts, **changes})  # type: ignore[arg-type]


def step(number: int, reward: float) -> StepStatus:
    return StepStatus(
        policy="first/solver",
        step=number,
        version=number,
        reward_mean=reward,
        policy_lag_mean=1.5,
        policy_lag_max=3,
        response_tokens=1000,
        busy_s=1.0,
        waiting_s=0.5,
        delta_bytes=10,
        full_bytes=100,
        at_s=1.0,
    )


def run(name: str, last: StepStatus | None = None) -> RunStatus:
    policy = PolicyStatus(
        policy=f"{name}/solver",
        trainer="training",
        step=0 if last is None else last.step,
        steps=120,
        head_version=41,
        head_digest="",
        checkpoint_step=40,
        buffered_groups=8,
        last_step=last,
        evaluations=(),
    )
    return RunStatus(name=name, state="running", reason="", policies=(policy,), accounting=())


def status(agents: int = 3, runs: int = 1, **changes: object) -> SchedulerStatus:
    facts = {
        "term": 1,
        "build": "x",
        "uptime_s": 7200.0,
        "runs": tuple(run(f"r{n}" if n else "first", step(41, 0.5)) for n in range(runs)),
        "agents": tuple(agent(f"box{n}") for n in range(agents)),
        "counters": {},
    }
    return SchedulerStatus(**{**facts, **changes})  # type: ignore[arg-type]
