"""What ``farflow weights ls`` shows: one row per version, from the store's folder and from what the
scheduler says of its agents."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from farflow.view import PLAIN_WIDTH, human_bytes, new_table
from farflow.words import human_age

if TYPE_CHECKING:
    from scheduler.weight_reading import PolicyShelf
    from transport.status import SchedulerStatus

SHOWN_VERSIONS = 20
Holders = Mapping[tuple[str, int], Sequence[str]]


def held_by(status: "SchedulerStatus | None") -> dict[tuple[str, int], list[str]]:
    """Names of the agents that serve a version, by policy and number; not those that are away,
    whom the scheduler remembers with what they had."""
    found: dict[tuple[str, int], list[str]] = {}
    for agent in status.agents if status else ():
        if agent.state in ("gone", "lost"):
            continue
        for policy, version in agent.versions.items():
            found.setdefault((policy, version), []).append(agent.name)
    return found


def store_rows(shelf: "PolicyShelf", holders: Holders, now_wall_s: float) -> list[dict[str, Any]]:
    """What is in the store's folder, by number."""
    rows: list[dict[str, Any]] = []
    for number, stored in sorted(shelf.versions.items()):
        manifest = stored.manifest
        delta_bytes = sum(entry.size_bytes for entry in manifest.of_kind("delta"))
        rows.append(
            {
                "policy": shelf.policy,
                "version": number,
                "parent": manifest.parent,
                "step": manifest.step,
                "delta_bytes": delta_bytes or None,
                "full_bytes": manifest.full_bytes,
                "ratio": manifest.full_bytes / delta_bytes if delta_bytes else None,
                "snapshot": shelf.snapshot(number) is not None,
                "composites_from": sorted(b for b, v in shelf.composites if v == number),
                "kept": shelf.route(number) is not None,
                "age_s": round(max(0.0, now_wall_s - manifest.created_wall_s), 1),
                "held_by": list(holders.get((shelf.policy, number), ())),
            }
        )
    return rows


def status_rows(status: "SchedulerStatus", holders: Holders) -> list[dict[str, Any]]:
    """What a scheduler says of versions whose files are on another host."""
    rows: list[dict[str, Any]] = []
    for run in status.runs:
        for policy in run.policies:
            numbers = {version for of, version in holders if of == policy.policy}
            step = policy.last_step
            for number in sorted({*numbers, policy.head_version}):
                known = step if step is not None and step.version == number else None
                rows.append(
                    {
                        "policy": policy.policy,
                        "version": number,
                        "parent": None,
                        "step": known.step if known else None,
                        "delta_bytes": known.delta_bytes if known else None,
                        "full_bytes": known.full_bytes if known else None,
                        "ratio": None,
                        "snapshot": None,
                        "composites_from": [],
                        "kept": None,
                        "age_s": None,
                        "held_by": list(holders.get((policy.policy, number), ())),
                    }
                )
    return rows


def recent_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last ``SHOWN_VERSIONS`` of each policy, and the older ones that the store has full
    weights of or that an agent holds; ``rows`` are by number."""
    left = Counter(row["policy"] for row in rows)
    found = []
    for row in rows:
        recent = left[row["policy"]] <= SHOWN_VERSIONS
        left[row["policy"]] -= 1
        if recent or (row["snapshot"]) or row["held_by"]:
            found.append(row)
    return found


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table for each policy."""
    if not rows:
        click.echo("no versions", err=True)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        table = new_table(policy)
        for column in ("version", "parent", "step", "delta", "smaller", "also", "age", "held by"):
            table.add_column(column)
        for row in rows:
            if row["policy"] == policy:
                table.add_row(*_cells(row))
        console.print(table)


def _cells(row: Mapping[str, Any]) -> list[str]:
    also = ["snapshot"] if row["snapshot"] else []
    also += [f"from {base}" for base in row["composites_from"]]
    also += ["not kept"] if row["kept"] is False else []
    return [
        str(row["version"]),
        "-" if row["parent"] is None else str(row["parent"]),
        "-" if row["step"] is None else str(row["step"]),
        "-" if row["delta_bytes"] is None else human_bytes(row["delta_bytes"]),
        "-" if row["ratio"] is None else f"{row['ratio']:.1f} x",
        ", ".join(also),
        "-" if row["age_s"] is None else human_age(row["age_s"]),
        ", ".join(row["held_by"]),
    ]


def print_fields(fields: Mapping[str, Any]) -> None:
    """One line each: name, tab, value."""
    for name, value in fields.items():
        click.echo(f"{name}\t{'-' if value is None else value}")
