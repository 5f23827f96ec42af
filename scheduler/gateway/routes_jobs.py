"""What submitters may do: each with the key of its own token."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from scheduler.gateway.calls import SUBMIT, Call, Route
from scheduler.gateway.routes_look import Wait
from scheduler.gateway.submitters import Connections
from scheduler.http_server import HttpRefused
from transport.errors import ConfigError
from transport.messages import (
    MAX_JOBS_PER_SUBMIT,
    Count,
    ExternalJob,
    Id,
    JobCancel,
    JobReceipts,
    JobSubmit,
    Results,
    ResultsRequest,
)


class JobsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs of one's own; submitting them again is harmless."""

    jobs: Annotated[tuple[ExternalJob, ...], Meta(max_length=MAX_JOBS_PER_SUBMIT)]


class CancelBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``ids`` are those that the jobs were submitted under."""

    run: Id
    ids: Annotated[tuple[Id, ...], Meta(max_length=MAX_JOBS_PER_SUBMIT)]


class ResultsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As ``ResultsRequest``: results after number ``after``; those up to it are confirmed, and
    gone."""

    after: Count = 0
    limit: Annotated[int, Meta(ge=1, le=256)] = 256
    wait_s: Wait = 0.0


async def _submit(call: Call) -> JobReceipts:
    message = JobSubmit(run=call.names["run"], jobs=call.body.jobs)
    answer, _ = await _connections(call).jobs.ask(message, JobReceipts)
    return answer


async def _cancel(call: Call) -> JobReceipts:
    message = JobCancel(run=call.body.run, ids=call.body.ids)
    answer, _ = await _connections(call).jobs.ask(message, JobReceipts)
    return answer


async def _results(call: Call) -> Results:
    query: ResultsQuery = call.query
    message = ResultsRequest(after=query.after, limit=query.limit, wait_s=query.wait_s)
    asking = _connections(call).results
    answer, _ = await asking.ask(message, Results, wait_s=query.wait_s)
    return answer


def _connections(call: Call) -> Connections:
    token = call.token
    try:
        if token is not None:
            return call.world.submitters.of(token.name)
    except ConfigError as error:
        text = f"the key of this token is gone: revoke the token and make another ({error})"
        raise HttpRefused(409, "token.no_key", text) from error
    raise HttpRefused(401, "http.unauthorised", "a submitter's token is needed")


SUBMITTING: Final = (
    Route(method="POST", path="/v1/runs/{run}/jobs", roles=SUBMIT, change=True,
          summary="Submit jobs of one's own to a run.",
          answer=_submit, body=JobsBody, result=JobReceipts),
    Route(method="POST", path="/v1/jobs/cancel", roles=SUBMIT, change=True,
          summary="Cancel jobs of one's own.",
          answer=_cancel, body=CancelBody, result=JobReceipts),
    Route(method="GET", path="/v1/results", roles=SUBMIT,
          summary="How jobs ended, after a number; those up to it are confirmed and gone.",
          answer=_results, query=ResultsQuery, result=Results),
)  # fmt: skip
