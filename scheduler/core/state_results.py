"""Rows about submitters and the results that they are owed; see ``state``."""

from typing import ClassVar

from scheduler.core.state import Entity
from transport.ids import external_job_id
from transport.messages import JobResult
from transport.messages.jobs import ResultState


class Outcome(Entity):
    """A result that waits for its submitter."""

    table: ClassVar[str] = "outcome"

    submitter: str
    result: JobResult
    fingerprint: str = ""

    @property
    def key(self) -> str:
        return f"{self.submitter}|{self.result.number}"

    @property
    def job(self) -> str:
        return external_job_id(self.result.run, self.submitter, self.result.id)


class Confirmed(Entity):
    """What is remembered of a result that its submitter has: enough to know its job again."""

    table: ClassVar[str] = "confirmed"

    submitter: str
    number: int
    job: str
    state: ResultState
    fingerprint: str = ""

    @property
    def key(self) -> str:
        return f"{self.submitter}|{self.number}"


class Submitter(Entity):
    """``last`` is the highest number that a result of it got, ``confirmed`` up to where it has
    them."""

    table: ClassVar[str] = "submitter"

    name: str
    last: int = 0
    confirmed: int = 0

    @property
    def key(self) -> str:
        return self.name
