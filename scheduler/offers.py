"""Offers on their way out: prompts come in from the disk, and one frame carries several.

What always holds: messages to one peer leave in the order in which the core gave them, and other
effects in theirs; offers of one commit to one peer leave together where nothing else to that peer
stands between them, never in a frame above ``OFFERS_BYTES``, and only to a peer that understands
``LeaseOffers``; an offer of a job whose prompt is on disk leaves with exactly the stored bytes.

    effects   a:offer1  b:offer2  a:offer3  b:revoke  b:offer4
    leave     a:(offer1 offer3)  b:(offer2)  b:revoke  b:(offer4)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
import structlog

from scheduler.core.effects import Effect, Send
from transport.messages import LeaseOffer, LeaseOffers

OFFERS_BYTES: Final = 192 * 1024
"""Offers in one message; a control frame holds 256 KiB."""

_log = structlog.get_logger()
_encode = msgspec.msgpack.Encoder().encode


def prompts_wanted(effects: Iterable[Effect]) -> list[str]:
    """Keys of the prompts that offers among ``effects`` need."""
    wanted: dict[str, None] = {}
    for effect in effects:
        if type(effect) is Send and effect.prompt:
            wanted[effect.prompt] = None
    return list(wanted)


def gathered(
    effects: Sequence[Effect],
    prompts: Mapping[str, bytes],
    takes_many: Callable[[str], bool],
) -> list[Effect]:
    """``effects`` as they leave. ``prompts`` are stored items by key, for ``prompts_wanted``; an
    offer whose prompt is not among them is left out: a later event of the same commit ended its
    job, and what follows the offer revokes it."""
    leaving: list[Effect | _Group] = []
    latest: dict[str, _Group | None] = {}
    for effect in effects:
        if type(effect) is not Send:
            leaving.append(effect)
            continue
        message: Any = effect.message
        peer = effect.peer
        if type(message) is not LeaseOffer:
            latest[peer] = None
            leaving.append(effect)
            continue
        if effect.prompt:
            stored = prompts.get(effect.prompt)
            if stored is None:
                _log.info("offer.without_prompt", attempt=message.attempt)
                continue
            message = msgspec.structs.replace(message, items=cast("Any", msgspec.Raw(stored)))
        if not takes_many(peer):
            leaving.append(Send(peer, message))
            continue
        packed = _encode(message)
        group = latest.get(peer)
        if group is None or group.size_bytes + len(packed) > OFFERS_BYTES:
            group = latest[peer] = _Group(peer)
            leaving.append(group)
        group.packed.append(msgspec.Raw(packed))
        group.size_bytes += len(packed)
    return [one.sent() if type(one) is _Group else cast("Effect", one) for one in leaving]


class _Group:
    """Offers that leave at one place of the list; encoded ones need no second encoding, because
    MessagePack nests as it is."""

    __slots__ = ("packed", "peer", "size_bytes")

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.packed: list[msgspec.Raw] = []
        self.size_bytes = 0

    def sent(self) -> Send:
        return Send(self.peer, LeaseOffers(offers=cast("Any", tuple(self.packed))))
