"""A deployment's whole file, as ``farflow init`` writes it and ``farflow gc`` reads it."""

import msgspec

from scheduler.config import SchedulerConfig
from transport.runtime.settings import Bytes, PositiveSeconds

_DAY_S = 86_400.0


class RetentionTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[retention]``: what ``farflow gc`` leaves. Folders of ``farflow up`` go once they were not
    touched for ``run_s``, and the longest untouched of them while all are larger than
    ``run_bytes``; the records of a scheduler's finished runs (``metrics.jsonl``) after
    ``record_s``, its event logs of earlier terms after ``event_log_s``, turns of attempts that
    never ended (``*.turns``) after ``partial_s``, the weights that its weight store has of policies
    of finished runs after ``weights_s``, logs of daemons after ``log_s``. What is in use stays.
    Versions of live runs, bodies, spools and checkpoints are bounded by their daemons and never
    touched."""

    run_s: PositiveSeconds = 90 * _DAY_S
    run_bytes: Bytes = 200 * 2**30
    record_s: PositiveSeconds = 365 * _DAY_S
    event_log_s: PositiveSeconds = 30 * _DAY_S
    partial_s: PositiveSeconds = 7 * _DAY_S
    weights_s: PositiveSeconds = 365 * _DAY_S
    log_s: PositiveSeconds = 30 * _DAY_S


class DeploymentConfig(SchedulerConfig, frozen=True, kw_only=True):
    """The scheduler's settings and what belongs to no daemon."""

    retention: RetentionTable = RetentionTable()
