"""What operators may order."""

import re
from typing import Annotated, Any, Final, get_args

import msgspec
from msgspec import Meta

from scheduler.gateway.calls import ORDER, Call, Done, Route
from scheduler.operator import Command, Order
from transport.errors import ConfigError
from transport.messages import MAX_JOBS_PER_SUBMIT, Id
from transport.runs import MAX_RUN_BYTES, RunSpec
from transport.runtime.config import convert
from transport.runtime.toml_text import toml_tables

COMMANDS: Final[tuple[str, ...]] = get_args(Command)
ORDERS: Final[tuple[str, ...]] = get_args(Order)
MAX_DOTS: Final = 16
"""In one key of a run's file; none that a run has needs half of them."""
_STRING_OR_COMMENT: Final = re.compile(
    r""""{3}(?:[^"\\]|\\.|"{1,2}(?!"))*+(?:"{3,5}|.*)|"(?:[^"\\\n]|\\.)*+(?:"|.*)"""
    r"""|'{3}(?:[^']|'{1,2}(?!'))*+(?:'{3,5}|.*)|'[^'\n]*+(?:'|.*)|#[^\n]*+""",
    re.DOTALL,
)
"""A string that is not closed goes on to the end: no parser gets beyond it, and so every character
is looked at once."""
_BESIDE: Final = ("policies", "task", "workflow", "evaluation", "evaluations")


class OrderBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``deadline_s`` is for ``drain``: how long the agent may take (0: its own setting)."""

    deadline_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    reason: Annotated[str, Meta(max_length=500)] = ""


class ReplayBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Without ``jobs`` all dead letters of ``run``."""

    run: Id = ""
    jobs: Annotated[tuple[Id, ...], Meta(max_length=MAX_JOBS_PER_SUBMIT)] = ()


def run_from_toml(text: str) -> RunSpec:
    """A run as TOML: the file that ``farflow run submit`` takes, its paths absolute. Tables that
    are not the run's are left to others, as everywhere.

    Raises:
        ValueError: no TOML.
        ConfigError: a value is wrong; names its key. Or it is longer or more deeply nested than any
            run.
    """
    text = text.replace("\r\n", "\n")
    _check_shape(text)
    data = toml_tables(text, "the file")
    head = data.get("run")
    if isinstance(head, dict):
        data = {**head, **{name: data[name] for name in _BESIDE if name in data}}
    return convert(data, RunSpec)


def _check_shape(text: str) -> None:
    """Raises ConfigError for what would take the parser long: its time grows with the square of a
    key's parts. What is between strings and comments is looked at once."""
    if len(text) > MAX_RUN_BYTES:
        raise ConfigError(f"the file has {len(text)} characters, a run at most {MAX_RUN_BYTES}")
    for part in re.finditer(r"[^][{}=,\n]+", _STRING_OR_COMMENT.sub("''", text)):
        if part[0].count(".") > MAX_DOTS:
            raise ConfigError(f"a key has more than {MAX_DOTS} dots: {part[0][:40]}")


async def _submit(call: Call) -> Done:
    async with call.world.orders.turn() as operator:
        return Done(message=await operator.submit(call.body, by=call.by))


async def _command(call: Call) -> Done:
    command: Command = call.names["command"]  # type: ignore[assignment]  # the path allows no other
    async with call.world.orders.turn() as operator:
        return Done(message=await operator.command(call.names["run"], command, by=call.by))


async def _order(call: Call) -> Done:
    order: Order = call.names["order"]  # type: ignore[assignment]  # the path allows no other
    body: OrderBody = call.body
    async with call.world.orders.turn() as operator:
        said = await operator.order(
            call.names["agent"],
            order,
            deadline_s=body.deadline_s,
            reason=body.reason,
            by=call.by,
        )
    return Done(message=said)


async def _replay(call: Call) -> Done:
    body: ReplayBody = call.body
    async with call.world.orders.turn() as operator:
        return Done(message=await operator.replay(body.jobs, run=body.run, by=call.by))


def _change(path: str, summary: str, answer: Any, **more: Any) -> Route:
    return Route(
        method="POST",
        path=path,
        roles=ORDER,
        summary=summary,
        answer=answer,
        result=Done,
        change=True,
        **more,
    )


ORDERING: Final = (
    _change("/v1/runs", "Submit a run, as JSON or as TOML; the same one again is harmless.",
            _submit, body=RunSpec, toml=run_from_toml),
    _change("/v1/runs/{run}/{command}", "Pause, resume, stop or abandon a run.", _command),
    _change("/v1/agents/{agent}/{order}", "Drain, cordon, uncordon, quarantine or release.",
            _order, body=OrderBody, body_optional=True),
    _change("/v1/dead/replay", "Queue jobs again that were given up.", _replay, body=ReplayBody),
)  # fmt: skip
