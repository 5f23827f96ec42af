"""What a trainer core is started with."""

import msgspec


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations, bounds and who we are. ``max_undurable`` is how many versions may be on their
    way to the weight store before the next step has to wait; a request that its link did not take
    is tried again after ``resend_s``, then less and less often, but every ``max_resend_s``."""

    policy: str
    incarnation: int
    build: str
    hello_retry_s: float = 1.0
    request_every_s: float = 2.0
    resend_s: float = 0.1
    max_resend_s: float = 1.0
    offer_every_s: float = 2.0
    fetch_window_bytes: int = 64 * 2**20
    max_open_bodies: int = 12
    fetch_timeout_s: float = 10.0
    missing_retry_s: float = 1.0
    body_tries: int = 3
    publish_timeout_s: float = 120.0
    max_undurable: int = 2
    leave_grace_s: float = 5.0


class PendingVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the checkpoint's lineage that the weight store may not have yet."""

    version: int
    parent: int | None
    step: int
    whole: bool = False


class StartPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer begins: its last checkpoint that counts (step 0 and version 0 are the
    initial model) with the newest number of its weights, the versions that are still to be
    published, parents first, and the highest number that this host ever gave to a version."""

    step: int = 0
    version: int = 0
    highest_version: int = 0
    pending: tuple[PendingVersion, ...] = ()
