"""The one place where a (job, policy) copy changes its state.

What always holds: ``AccountingRow`` counts exactly the copies of all jobs ever made, each in one
state; a buffered training copy is in its policy's buffer or ``unplaced``, a taken one in ``taken``
of its step; a copy that leaves the waiting states gives its quota back (its run becomes due).
"""

from scheduler.core.context import Context
from scheduler.core.state import (
    OPEN_STATES,
    WAITING_STATES,
    Account,
    Copy,
    Job,
    account_key,
)
from transport.status import AccountingRow, CopyState


def account(ctx: Context, policy: str, kind: str) -> Account:
    """The row of a policy and kind, made when first asked for."""
    found = ctx.books.get((policy, kind))
    if found is None:
        found = ctx.tables.accounts.get(account_key(policy, kind))
        if found is None:
            found = Account(row=AccountingRow(policy=policy, kind=kind))
            ctx.tables.add(found)
        ctx.books[policy, kind] = found
    return found


def submit(ctx: Context, job: Job, policy: str, state: CopyState, reason: str = "") -> None:
    """Enter a copy of a new job."""
    job.copies[policy] = Copy(state, reason)
    books = account(ctx, policy, job.kind)
    books.row.submitted += 1
    _add(books, state, 1)
    ctx.tables.touch(books)
    if reason:
        ctx.count(f"{state}.{reason}")


def move(ctx: Context, job: Job, policy: str, state: CopyState, reason: str = "") -> None:
    """Change the state of a copy; ``reason`` is counted with it."""
    copy = job.copies[policy]
    before = copy.state
    if before == state:
        return
    books = ctx.books.get((policy, job.kind)) or account(ctx, policy, job.kind)
    _add(books, before, -1)
    _add(books, state, 1)
    ctx.tables.touch(books)
    ctx.tables.touch(job)
    copy.state = state
    copy.reason = reason
    live = ctx.policies[policy]
    if before == "buffered":
        if live.unplaced.pop(job.id, None) is None:
            live.buffer.remove(job.id)
    elif before == "taken":
        of_step = live.taken[copy.step]
        del of_step[job.id]
        if not of_step:
            del live.taken[copy.step]
    elif before == "in_flight" and state == "buffered" and job.result is not None:
        live.lengths.returned(job.result.response_tokens / job.sequences)
    if state == "trained" and job.result is not None:
        live.lengths.trained(job.result.response_tokens / job.sequences)
    if state == "taken":
        live.taken.setdefault(copy.step, {})[job.id] = None
    elif state == "buffered":
        ctx.due_policies[policy] = None
        live.unusable.usable()
    elif (state == "filtered" or state == "dropped") and job.kind == "train":
        live.unusable.lost(state, reason, ctx.now)
    if before in WAITING_STATES and state not in WAITING_STATES:
        ctx.due_runs[job.run] = None
    if reason:
        ctx.count(f"{state}.{reason}")
    if state == "queued" or state == "in_flight":
        return
    if reason:
        ctx.note(job.id, state, policy=policy, reason=reason)
    else:
        ctx.note(job.id, state, policy=policy)


def open_copies(job: Job) -> list[str]:
    """Policies that still want the job or its result."""
    return [policy for policy, copy in job.copies.items() if copy.state in OPEN_STATES]


def waiting(ctx: Context, policy: str) -> int:
    """Copies of training jobs that are queued, in flight or buffered."""
    row = account(ctx, policy, "train").row
    return row.queued + row.in_flight + row.buffered


def _add(books: Account, state: CopyState, amount: int) -> None:
    setattr(books.row, state, getattr(books.row, state) + amount)
