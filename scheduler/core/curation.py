"""Items that a run's curators leave out, and the statistics that they go by.

    item -> curators (shell) -> kept -> job -> group -> histories of the item and its family
               ^            |                                    |
               |            +-> skipped: the cursor moves on     |
               +-------------------------------------------------+

What always holds: a run without curators has no histories; at most ``MAX_HISTORIES`` of a run are
kept, those that changed last, also over restarts; of ``MAX_SKIPPED`` + 1 items in a row at least
one becomes a group, whatever curators say, so that a run never stands still for them.
"""

from hashlib import blake2b

from scheduler.core.context import Context, RunLive
from scheduler.core.histories import ItemHistory
from scheduler.core.state import Job, Run
from transport.messages import GroupSummary, Item

MAX_HISTORIES = 8192
MAX_SKIPPED = 64
RECENT = 8
"""How many groups of an item are remembered one by one."""
NEWEST_WEIGHT = 0.2
"""Of a group in the moving average."""


def item_key(item: Item) -> str:
    """Items with the same prompt are the same item, whenever they come up."""
    return blake2b(item.prompt.encode(), digest_size=8).hexdigest()


def family_key(family: str) -> str:
    return f"family {family}"


def learn(ctx: Context, job: Job, summary: GroupSummary) -> None:
    """A training group came back; its item is still there."""
    run = ctx.tables.runs[job.run]
    if job.kind != "train" or not run.spec.curators or not job.items:
        return
    item = job.items[0]
    mean = sum(summary.rewards) / len(summary.rewards)
    spread = max(summary.rewards) - min(summary.rewards)
    keys = [item_key(item), *([family_key(item.family)] if item.family else [])]
    for key in keys:
        _add(ctx, run, key, mean, spread)


def find(ctx: Context, run: str, key: str) -> ItemHistory | None:
    live = ctx.runs.get(run)
    return None if live is None else live.histories.get(key)


def load(ctx: Context) -> None:
    """Index the rows of the last life, in the order of their last change."""
    for history in sorted(ctx.tables.histories.values(), key=lambda found: found.number):
        if history.run in ctx.runs:
            ctx.runs[history.run].histories[history.item] = history


def skips(ctx: Context, run: Run, live: RunLive, item: Item) -> bool:
    """Whether the run's next item is left out; the cursor moves on then."""
    reason = live.skips.pop(item.index, "")
    if not reason:
        run.skipped_in_row = 0
        return False
    if run.skipped_in_row >= MAX_SKIPPED:
        run.skipped_in_row = 0
        ctx.count("curated.kept_anyway")
        return False
    run.cursor += 1
    run.skipped += 1
    run.skipped_in_row += 1
    ctx.tables.touch(run)
    ctx.count(f"curated.{reason}")
    ctx.note(run.name, "item skipped", index=item.index, curator=reason)
    return True


def forget(ctx: Context, run: str) -> None:
    """The run is over."""
    for history in ctx.runs[run].histories.values():
        ctx.tables.remove(history)


def _add(ctx: Context, run: Run, key: str, mean: float, spread: float) -> None:
    histories = ctx.runs[run.name].histories
    newest = next(reversed(histories.values())).number if histories else 0
    history = histories.pop(key, None)
    if history is None:
        history = ItemHistory(run=run.name, item=key, number=0, reward=mean)
        ctx.tables.add(history)
    histories[key] = history
    history.number = newest + 1
    history.groups += 1
    history.reward += NEWEST_WEIGHT * (mean - history.reward)
    history.means = [*history.means, mean][-RECENT:]
    history.spreads = [*history.spreads, spread][-RECENT:]
    ctx.tables.touch(history)
    while len(histories) > MAX_HISTORIES:
        ctx.tables.remove(histories.pop(next(iter(histories))))
