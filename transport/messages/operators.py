"""Control plane: operators and viewers."""

from typing import Literal

from transport.messages.base import By, Id, Message
from transport.runs import RunSpec
from transport.status import SchedulerStatus


class RunSubmit(Message, frozen=True, kw_only=True):
    """Submitting the same run again is harmless; another one under the same name is refused."""

    run: RunSpec
    by: By = ""


class RunCommand(Message, frozen=True, kw_only=True):
    run: str
    command: Literal["pause", "resume", "stop", "abandon"]
    by: By = ""


class CommandReply(Message, frozen=True, kw_only=True):
    ok: bool
    code: str = ""
    message: str = ""


class StatusRequest(Message, frozen=True, kw_only=True):
    """Agents come in the order of their names, those after ``agents_after`` only: what a reply has
    no room for (``status.agents_left_out``) is asked for with the last name that was in it."""

    agents_after: Id = ""


class StatusReply(Message, frozen=True, kw_only=True):
    status: SchedulerStatus
