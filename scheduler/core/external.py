"""Jobs of submitters: programs beside the trainers that want groups of a live run's policies.

    submitted -> queued <-> in flight -> an outcome (``outcomes``), numbered for its submitter

What always holds: a submitter's own id makes its job once, however often it is submitted, also
while the job's result is unconfirmed or remembered; the same id with anything else in it is a
conflict; external jobs have books and a bound of their own (``max_queued_jobs``, not shared with
training), need no trained policy and no quota of one; none outlives its run.
"""

import hashlib
from itertools import islice

import msgspec

from scheduler.core import attempts, jobs, outcomes, submitters
from scheduler.core.accounting import submit as submit_copy
from scheduler.core.context import Context
from scheduler.core.state import External, Job, Run
from scheduler.core.work import TRAINING
from transport.ids import external_job_id, policy_name
from transport.messages import ExternalJob, Item, JobCancel, JobReceipt, JobReceipts, JobSubmit
from transport.summaries import MAX_SEQUENCES

CANCEL_AT_ONCE = 500
CANCEL_PAUSE_S = 0.001
"""A run that ends gives up so many jobs of submitters in one go, some 10 ms of work, and then lets
others have their turn."""
MAX_JOB_BYTES = 192 * 1024
"""Items of one job, encoded: an offer is one control frame, with a workflow's settings in it."""

STAND_IN = 64
"""Characters of a prompt that stay in memory when it is on disk."""

MAX_CHARACTERS = 256 * 2**20
"""Of the items of all open external jobs, which are kept in memory."""

MAX_SEQUENCES_HELD = 1_000_000
"""Of one submitter's open jobs and unconfirmed results, whose lengths and rewards are kept."""

SHARE_OF_FREE = 4
"""One submitter may hold so many times as many open jobs, and characters of their texts, as there
is room for more (a dynamic threshold, Choudhury and Hahne 1998): alone it gets four fifths of
``max_queued_jobs`` and of ``MAX_CHARACTERS``, the next one four fifths of what is left, and so
on."""

_FULL = {
    "quota.queued": "too many external jobs are open (scheduler.max_queued_jobs), or their texts"
    " are too long together; try again later",
    "quota.share": "you hold most of the external jobs that may be open"
    " (scheduler.max_queued_jobs), or of the texts that they may have together; the rest is for"
    " other submitters: try again when some of yours are done, or cancel some",
    "quota.results": "too many open jobs and unconfirmed results"
    " (scheduler.max_results_per_submitter, or sequences of them); fetch and confirm results first",
}

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def submit_jobs(ctx: Context, submitter: str, message: JobSubmit) -> JobReceipts:
    """Take what is new and allowed; one receipt per job, in order."""
    run = ctx.tables.runs.get(message.run)
    receipts = tuple(_submit(ctx, submitter, run, message.run, job) for job in message.jobs)
    for receipt in receipts:
        if receipt.code:
            ctx.count(f"refused.{receipt.code}")
    return JobReceipts(receipts=receipts)


def cancel_jobs(ctx: Context, submitter: str, message: JobCancel) -> JobReceipts:
    """End jobs of this submitter; what is over already stays as it is."""
    receipts: list[JobReceipt] = []
    for id in message.ids:
        name = external_job_id(message.run, submitter, id)
        job = ctx.tables.jobs.get(name)
        if job is not None:
            jobs.close(ctx, job, "cancelled", "submitter")
            receipts.append(JobReceipt(id=id, state="known"))
        elif (ended := outcomes.known(ctx, name)) is not None:
            receipts.append(JobReceipt(id=id, state="known", message=f"it was {ended[0]} before"))
        else:
            text = f"no job {id!r} of {submitter} in run {message.run!r} is open or remembered"
            receipts.append(_refused(id, "job.unknown", text))
    return JobReceipts(receipts=tuple(receipts))


def room(ctx: Context, submitter: str, sequences: int) -> str:
    """The quota that keeps one more job of this submitter out, or nothing."""
    many = ctx.external_open >= ctx.settings.max_queued_jobs
    if many or ctx.external_characters >= MAX_CHARACTERS:
        return "quota.queued"
    live = submitters.submitter(ctx, submitter)
    free = ctx.settings.max_queued_jobs - ctx.external_open
    free_characters = MAX_CHARACTERS - ctx.external_characters
    mine = len(live.open) >= SHARE_OF_FREE * free
    if mine or live.characters >= SHARE_OF_FREE * free_characters:
        return "quota.share"
    held = len(live.open) + len(live.unconfirmed)
    many = held >= ctx.settings.max_results_per_submitter
    if many or live.sequences + sequences > MAX_SEQUENCES_HELD:
        return "quota.results"
    return ""


def enter(ctx: Context, job: Job, external: External) -> None:
    """Begin a new job, or one that was a dead letter."""
    ctx.tables.add(job)
    submitters.index(ctx, job, external)
    for policy in ctx.runs[job.run].policies.values():
        submit_copy(ctx, job, policy, "queued")
    attempts.settle(ctx, job)
    ctx.dispatch_due = True


def deadline_due(ctx: Context, id: str) -> None:
    """Nobody waits for it any more."""
    job = ctx.tables.jobs.get(id)
    if job is not None:
        jobs.close(ctx, job, "expired", "deadline")


def cancel_some(ctx: Context, run: Run) -> bool:
    """The run ends: cancel some of what is open, and more a moment later, so that a hundred
    thousand jobs do not hold up everybody else. Whether none is left."""
    live = ctx.runs[run.name]
    if live.external and ctx.now >= live.cancel_s:
        live.cancel_s = ctx.now + CANCEL_PAUSE_S
        for id in tuple(islice(live.external, CANCEL_AT_ONCE)):
            jobs.close(ctx, ctx.tables.jobs[id], "cancelled", "run_stopping")
    if live.external:
        ctx.timers.set_earlier("cancel", run.name, live.cancel_s)
    return not live.external


def _submit(
    ctx: Context, submitter: str, run: Run | None, run_name: str, asked: ExternalJob
) -> JobReceipt:
    name = external_job_id(run_name, submitter, asked.id)
    encoded = _encode(asked)
    fingerprint = hashlib.blake2b(encoded, digest_size=16).hexdigest()
    before = _submitted_before(ctx, name, fingerprint, asked.id)
    if before is not None:
        return before
    if run is None:
        live = ", ".join(sorted(ctx.runs)) or "none"
        return _refused(asked.id, "run.unknown", f"no run {run_name!r}; live runs: {live}")
    if not run.live or run.finishing:
        text = f"run {run.name} ends: {run.reason or run.finishing}; submit to another run"
        return _refused(asked.id, "run.finished", text)
    pinned, fault = _pins(ctx, run, asked)
    fault = fault or _fault(ctx, run, asked, len(encoded))
    if fault:
        return _refused(asked.id, "job.invalid", fault)
    full = room(ctx, submitter, asked.group_size * len(asked.items))
    if full:
        return _refused(asked.id, full, _FULL[full])
    external = External(
        submitter=submitter,
        id=asked.id,
        fingerprint=fingerprint,
        due_s=ctx.now + asked.deadline_s if asked.deadline_s else 0.0,
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        pinned=pinned,
        require=asked.require,
    )
    items, prompt = asked.items, ""
    if ctx.settings.prompts_on_disk:
        prompt = f"{name}|{fingerprint}"
        ctx.tables.put_prompt(prompt, _encode(items))
        items = tuple(map(_stand_in, items))
    job = Job(
        id=name,
        run=run.name,
        kind="external",
        index=run.external_jobs,
        sequences=asked.group_size * len(asked.items),
        items=items,
        prompt=prompt,
        copies={},
        priority=asked.priority,
        created_s=ctx.now,
        external=external,
    )
    run.external_jobs += 1
    ctx.tables.touch(run)
    enter(ctx, job, external)
    return JobReceipt(id=asked.id, state="queued")


def _submitted_before(ctx: Context, name: str, fingerprint: str, id: str) -> JobReceipt | None:
    job = ctx.tables.jobs.get(name)
    ended = outcomes.known(ctx, name)
    if job is not None and job.external is not None:
        theirs, state = job.external.fingerprint, "open"
    elif ended is not None:
        state, theirs = ended
    else:
        return None
    if theirs == fingerprint:
        return JobReceipt(id=id, state="known", message=f"it is {state}")
    text = f"another job with id {id!r} is {state}; give each job an id of its own"
    return _refused(id, "job.conflict", text)


def _pins(ctx: Context, run: Run, asked: ExternalJob) -> tuple[dict[str, int], str]:
    """Pinned versions by policy id, or what is wrong with them."""
    policies = ctx.runs[run.name].policies
    pinned: dict[str, int] = {}
    for name, version in asked.pinned.items():
        id = policies.get(name) or policies.get(policy_name(name))
        if id is None or name not in (id, policy_name(id)):
            return {}, f"pinned: {name!r} is not a policy of the run; use {', '.join(policies)}"
        tree = ctx.policies[id].tree
        if version not in tree.nodes and not tree.may_be_placed(version):
            near = ", ".join(map(str, sorted(tree.nodes)[-3:]))
            return {}, (
                f"pinned.{name}: version {version} is not there and will not come; the latest are"
                f" {near}"
            )
        pinned[id] = version
    return pinned, ""


def _fault(ctx: Context, run: Run, asked: ExternalJob, size_bytes: int) -> str:
    work = ctx.runs[run.name].works[TRAINING]
    if any(work.reward((item,)) != work.reward(asked.items) for item in asked.items):
        return "items: their families have different rewards; make one job for each family"
    sequences = asked.group_size * len(asked.items)
    if sequences > MAX_SEQUENCES:
        return f"group_size: {sequences} sequences in all, at most {MAX_SEQUENCES}; split the job"
    if size_bytes > MAX_JOB_BYTES:
        return f"items: {size_bytes} bytes, at most {MAX_JOB_BYTES} fit an offer; split the job"
    return ""


def _stand_in(item: Item) -> Item:
    """What is kept in memory of an item that is on disk: enough to estimate and to recognise."""
    return Item(index=item.index, prompt=item.prompt[:STAND_IN], answer="", family=item.family)


def _refused(id: str, code: str, message: str) -> JobReceipt:
    return JobReceipt(id=id, state="refused", code=code, message=message)
