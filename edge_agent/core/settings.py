"""Constants of the agent's decisions; the shell fills in what the configuration says."""

import msgspec

from transport.summaries import WHOLE_BODY_BYTES


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds, sizes in bytes.

    ``slots`` is the engine's number of concurrent sequences, ``bases`` the policies whose adapters
    it can have: their model is here; ``recheck_kinds`` are the workflows and rewards that
    ``edge_agent.recheck`` knows beside the first ones. ``prefetch_sequences`` is how many more may
    wait for a slot or for weights: far above what a scheduler prefetches, it only bounds memory, as
    does ``max_attempt_sequences`` for a single attempt. ``max_held`` bounds the attempts held at
    once, spooled ones included, so that an inventory of all of them fits into one control frame. A
    policy that is hosted no more is kept up to date for ``linger_s``: its last version is still to
    arrive, and it may be wanted again. The copy of a policy is read again as a whole every
    ``verify_every_swaps`` swaps and at versions with a signed full digest, and cells of the engine
    are compared with it after the first two and every ``read_back_every_swaps``-th (0: never).
    While an attempt waits for a slot only, the engine is asked every ``slot_poll_s`` what it holds,
    besides when sequences leave it. Bodies above ``whole_body_bytes`` are offered, at most
    ``upload_offers`` at once, and asked for in chunks by the log; the others are put whole, at most
    the upload window of them under way.
    """

    slots: int
    hardware: str = ""
    engine: str = ""
    workflows: dict[str, str] = {}
    rewards: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    bases: tuple[str, ...] = ()
    recheck_kinds: tuple[str, ...] = ("multi_turn", "solve_and_verify", "code")
    price_usd_hour: float = 0.0
    egress_usd_gb: float = 0.0
    prefetch_sequences: int = 512
    max_attempt_sequences: int = 4096
    max_held: int = 1024
    spool_bytes: int = 2**30
    upload_window_bytes: int = 8 * 2**20
    upload_window_messages: int = 64
    upload_offers: int = 256
    whole_body_bytes: int = WHOLE_BODY_BYTES
    attempt_timeout_s: float = 3600.0
    drain_s: float = 30.0
    hello_repeat_s: float = 1.0
    lost_after_s: float = 12.0
    heartbeat_s: float = 2.0
    slot_poll_s: float = 1.0
    request_repeat_s: float = 5.0
    linger_s: float = 60.0
    upload_stall_s: float = 30.0
    upload_stall_max_s: float = 600.0
    upload_retry_s: float = 0.1
    verify_every_swaps: int = 32
    read_back_every_swaps: int = 4
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
