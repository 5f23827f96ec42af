"""What an agent keeps in its folder: incarnation, spool, copies of weights, believed signers.

What always holds: a start never reuses an incarnation; one result per attempt is carried over, the
one of the newest fence; what is damaged is thrown away and logged, never used.

    FOLDER/incarnation      how often this agent was started (or the time in ms, if that is more)
    FOLDER/spool/           finished groups (``edge_agent.spool``)
    FOLDER/drain.json       the deadline of a ``farflow agent drain`` under way
    FOLDER/weights/         copies of the policies' weights (``edge_agent.weight_copy``)
    FOLDER/certified.json   signers that the root has certified (``edge_agent.trust``)
"""

import os
import secrets
from pathlib import Path

import structlog

from edge_agent.config import AgentConfig
from edge_agent.draining import take_note
from edge_agent.spool import Spool
from edge_agent.trust import AgentTrust
from edge_agent.weight_copy import WeightCopies
from transport.messages import GroupSummary
from transport.runtime.files import next_incarnation

_log = structlog.get_logger()


class AgentHome:
    """The folder, opened. Opening blocks: every copy is verified.

    Raises:
        StoreError: the disk refused.
    """

    def __init__(self, folder: Path, config: AgentConfig, wall_s: float) -> None:
        self.folder = folder
        take_note(folder)  # meant for an earlier life
        self.incarnation = next_incarnation(folder, wall_s)
        self.spool = Spool(folder / "spool", config.agent.spool_bytes)
        self.process = secrets.token_hex(16)
        self.trust = AgentTrust(Path(config.transport.keys), folder)
        self.copies = WeightCopies(
            folder / "weights",
            trusted=self.trust.signers,
            decode_threads=config.agent.decode_threads or min(4, os.cpu_count() or 1),
        )
        self.copied = self.copies.stored()
        self.spooled = self._newest_per_attempt()
        for reason in (*self.spool.discarded, *self.copies.warnings):
            _log.warning("agent.discarded", reason=reason)
        self.copies.warnings.clear()

    def _newest_per_attempt(self) -> list[GroupSummary]:
        newest: dict[str, GroupSummary] = {}
        for summary in self.spool.entries():
            other = newest.get(summary.attempt)
            if other is not None:
                self.spool.drop(min(other, summary, key=lambda one: one.fence).digest)
            if other is None or other.fence <= summary.fence:
                newest[summary.attempt] = summary
        return list(newest.values())
