"""Identifiers and how they are written; they are counters, never random.

run          a user's name, unique in a scheduler          arithmetic
policy       RUN/NAME                                      arithmetic/solver
job          RUN/KIND-INDEX, kind t (train), e (eval)      arithmetic/t-000041
             RUN/x-SUBMITTER.ID, a submitter's own         arithmetic/x-judge.item-7
attempt      JOB#N                                         arithmetic/t-000041#2
fence        (term, counter): the scheduler's life number and a counter within it
"""

import re
from typing import NewType

RunId = NewType("RunId", str)
PolicyId = NewType("PolicyId", str)
JobId = NewType("JobId", str)
AttemptId = NewType("AttemptId", str)
AgentId = NewType("AgentId", str)

Fence = tuple[int, int]

NAME_RULE = "1 to 48 characters out of a-z, 0-9, '-', '_' and '.', starting with a letter or digit"
_SPACES = {"train": 0, "eval": 1, "external": 1 << 40}
_MASK = 0x7FFF_FFFF_FFFF_FFFF
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,47}")


def is_name(text: str) -> bool:
    """Whether ``text`` may name a run, policy, agent or link (``NAME_RULE``)."""
    return _NAME.fullmatch(text) is not None


def policy_id(run: str, name: str) -> PolicyId:
    return PolicyId(f"{run}/{name}")


def policy_name(policy: str) -> str:
    """The part of a policy id that the run's file uses."""
    return policy.rpartition("/")[2]


def job_id(run: str, kind: str, index: int) -> JobId:
    """``kind`` is one letter: t (train) or e (evaluation)."""
    return JobId(f"{run}/{kind}-{index:06d}")


def external_job_id(run: str, submitter: str, id: str) -> JobId:
    """A submitter's own ``id`` is unique among its jobs of a run."""
    return JobId(f"{run}/x-{submitter}.{id}")


def attempt_id(job: str, number: int) -> AttemptId:
    return AttemptId(f"{job}#{number}")


def job_of(attempt: str) -> JobId:
    return JobId(attempt.rpartition("#")[0])


def item_seed(run_seed: int, kind: str, index: int) -> int:
    """The seed of a job's generation: the same on whatever agent and attempt (splitmix64)."""
    x = (run_seed * 0x9E3779B97F4A7C15 + index * 2 + _SPACES[kind]) & 0xFFFF_FFFF_FFFF_FFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFF_FFFF_FFFF_FFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFF_FFFF_FFFF_FFFF
    return (x ^ (x >> 31)) & _MASK
