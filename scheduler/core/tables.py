"""All entities by table and key, and which of them wait to be written.

What always holds: whoever changes an entity calls ``Tables.touch``; what ``take_changes`` gives is
all that differs from what it gave before.
"""

from typing import Any

import msgspec

from scheduler.core.conduct import Conduct
from scheduler.core.histories import ItemHistory
from scheduler.core.kept import Kept, Reuse
from scheduler.core.state import (
    Account,
    Agent,
    Change,
    Counters,
    Dead,
    Entity,
    Evaluation,
    Job,
    Policy,
    Release,
    Row,
    Run,
    Spend,
    Version,
)
from scheduler.core.state_results import Confirmed, Outcome, Submitter
from transport.errors import StoreError

_ENTITIES: tuple[type[Entity], ...] = (
    Run,
    Policy,
    Version,
    Job,
    Agent,
    Evaluation,
    Release,
    Outcome,
    Confirmed,
    Submitter,
    Dead,
    Spend,
    Account,
    Counters,
    Kept,
    Reuse,
    ItemHistory,
    Conduct,
)
PROMPT = "prompt"
"""Table of jobs' items that are stored apart: written and deleted here, never loaded."""

_DECODERS: dict[str, Any] = {kind.table: msgspec.msgpack.Decoder(kind).decode for kind in _ENTITIES}


class Tables:
    """All entities by table and key, and which of them changed since they were last taken."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.policies: dict[str, Policy] = {}
        self.versions: dict[str, Version] = {}
        self.jobs: dict[str, Job] = {}
        self.agents: dict[str, Agent] = {}
        self.evaluations: dict[str, Evaluation] = {}
        self.releases: dict[str, Release] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.confirmed: dict[str, Confirmed] = {}
        self.submitters: dict[str, Submitter] = {}
        self.dead: dict[str, Dead] = {}
        self.spends: dict[str, Spend] = {}
        self.accounts: dict[str, Account] = {}
        self.counters: dict[str, Counters] = {}
        self.kept: dict[str, Kept] = {}
        self.reuses: dict[str, Reuse] = {}
        self.histories: dict[str, ItemHistory] = {}
        self.conducts: dict[str, Conduct] = {}
        self._by_name: dict[str, dict[str, Any]] = {
            Run.table: self.runs,
            Policy.table: self.policies,
            Version.table: self.versions,
            Job.table: self.jobs,
            Agent.table: self.agents,
            Evaluation.table: self.evaluations,
            Release.table: self.releases,
            Outcome.table: self.outcomes,
            Confirmed.table: self.confirmed,
            Submitter.table: self.submitters,
            Dead.table: self.dead,
            Spend.table: self.spends,
            Account.table: self.accounts,
            Counters.table: self.counters,
            Kept.table: self.kept,
            Reuse.table: self.reuses,
            ItemHistory.table: self.histories,
            Conduct.table: self.conducts,
        }
        self._dirty: dict[int, Entity] = {}
        self._prompts: dict[str, bytes] = {}
        self._prompts_let_go: dict[str, str] = {}
        self._encode = msgspec.msgpack.Encoder().encode

    def add(self, entity: Entity) -> None:
        self._by_name[entity.table][entity.key] = entity
        self.touch(entity)

    def touch(self, entity: Entity) -> None:
        """``entity`` has changed; its row is due."""
        self._dirty[id(entity)] = entity  # some twenty times per lease: makes no key

    def remove(self, entity: Entity) -> None:
        self._by_name[entity.table].pop(entity.key, None)
        self.touch(entity)
        job = entity.job if isinstance(entity, Dead) else entity
        if isinstance(job, Job) and job.prompt:
            self._prompts_let_go[job.prompt] = job.id

    def put_prompt(self, key: str, value: bytes) -> None:
        """Store a job's items apart from its row, until neither a job nor a dead letter of that id
        names ``key`` any more; they are not kept here."""
        self._prompts[key] = value

    def take_changes(self) -> list[Change]:
        """Rows changed since the last call, in the order of their first change; O(changed)."""
        changes: list[Change] = []
        if not (self._dirty or self._prompts or self._prompts_let_go):
            return changes
        replaced: set[tuple[str, str]] = set()
        by_name, encode = self._by_name, self._encode
        for touched in self._dirty.values():
            table, key = touched.table, touched.key
            entity = by_name[table].get(key)
            if replaced and (table, key) in replaced:
                continue
            if entity is not touched:  # gone, or another one took its place
                replaced.add((table, key))
            changes.append((table, key, None if entity is None else encode(entity)))
        self._dirty.clear()
        changes += self._take_prompts()
        return changes

    def _take_prompts(self) -> list[Change]:
        changes: list[Change] = [(PROMPT, key, value) for key, value in self._prompts.items()]
        self._prompts.clear()
        for key, id in self._prompts_let_go.items():
            job, dead = self.jobs.get(id), self.dead.get(id)
            if (job is None or job.prompt != key) and (dead is None or dead.job.prompt != key):
                changes.append((PROMPT, key, None))
        self._prompts_let_go.clear()
        return changes

    def dump(self) -> list[Row]:
        """Every row, whether changed or not."""
        return [
            (table, key, self._encode(entity))
            for table, entities in self._by_name.items()
            for key, entity in entities.items()
        ]

    def load(self, table: str, key: str, value: bytes) -> None:
        """Take in a stored row.

        Raises:
            StoreError: the row is of no known table or does not decode; names table and key.
        """
        decode = _DECODERS.get(table)
        if decode is None:
            raise StoreError(
                f"row {table}/{key}: unknown table; it was written by a newer farflow, use that"
            )
        try:
            self._by_name[table][key] = decode(value)
        except msgspec.MsgspecError as error:
            raise StoreError(
                f"row {table}/{key} does not decode: {error}; restore the store from a backup"
            ) from error
