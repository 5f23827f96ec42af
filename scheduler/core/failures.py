"""Whose fault a failed attempt is, by its code.

    class      codes (beginnings)                 the job            the agent
    away       agent.                             again at once      -
    copy       weights                            again at once      back-off after a streak
    box        engine.apply engine.away           again at once,     back-off after a streak,
               engine.busy engine.crashed         elsewhere          evidence
               integrity link process sandbox.
               spool store trajectory.
    data       summary.invalid                    as box             evidence, at once
    job        everything else (attempt. chat.    back-off with      back-off after a streak
               engine program. reward. task       jitter, elsewhere      that it began
               tool. workflow.)

A failure of class job that another agent saw before with the same job is no part of a streak.
What is not the job's fault counts as a loss, of which a job may have ``LOSSES_PER_ATTEMPT`` times
as many as failures. An engine that fails may be broken or the prompt impossible for it: that is
for the job's count, because a job that fails everywhere must end, and a broken engine fails many
jobs in a row.

What always holds: every code has a class; a code that nobody knows is the job's.
"""

from typing import Literal

FailureClass = Literal["away", "copy", "box", "data", "job"]

_BY_BEGINNING: tuple[tuple[str, FailureClass], ...] = (
    ("agent.", "away"),
    ("weights", "copy"),
    ("summary.", "data"),
    ("trajectory.malformed", "data"),
    ("integrity.checksum", "data"),
    ("trajectory.", "box"),
    ("engine.apply", "box"),
    ("engine.away", "box"),
    ("engine.busy", "box"),
    ("engine.crashed", "box"),
    ("integrity", "box"),
    ("link", "box"),
    ("process", "box"),
    ("sandbox.", "box"),
    ("spool", "box"),
    ("store", "box"),
)


def class_of(code: str) -> FailureClass:
    """The class of a failure's code."""
    for beginning, found in _BY_BEGINNING:
        if code.startswith(beginning):
            return found
    return "job"
