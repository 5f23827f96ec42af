"""An agent's enrolment: from a token to a key of its own that the scheduler lets in.

What always holds: the key is made here and its secret never leaves; it is on the disk before the
scheduler hears of it, so that an enrolment that was cut off anywhere is gone on with, by the same
key, and uses the token once; nobody but the holder of the token's server key is talked to; the key
file gets its final name last, so that where it is, everything else is.

    KEYS/agent.toml             secret  our key, once we are in
    KEYS/enrolling.toml         secret  the same before that
    KEYS/agent.previous.toml    secret  the key before ``enrol --new-key``
    KEYS/server.public.toml     whom we talk to
    KEYS/root.public.toml       who certifies signers
    KEYS/signers/               signers that the owner of this box believes besides
    KEYS/enrolment.toml         what we are called, and where the scheduler is
"""

import asyncio
import os
import re
import socket
from pathlib import Path
from typing import Final

import msgspec
import structlog

from edge_agent.config import AgentConfig
from transport.certificates import RootPublic
from transport.envelope import LIMITS, decode, encode, peek
from transport.errors import (
    ConfigError,
    LinkError,
    PeerUnreachable,
    ProtocolError,
    RemoteProtocolError,
)
from transport.key_files import load_toml, make_folder, to_toml
from transport.keys import KeyPair, PublicKey, load_server_key
from transport.links import Link, LinkOptions, Network
from transport.messages import EnrolReply, EnrolRequest, Plane, Refuse, Role
from transport.permissions import may_send
from transport.plane_links import bracketed
from transport.reaching import (
    NAME,
    NO_ANSWER,
    Rarely,
    address_of,
    refuses_key,
    what_to_look_at,
)
from transport.runtime.files import atomic_write
from transport.runtime.settings import TransportConfig
from transport.server_keys import PinnedServerKeys
from transport.token_files import Enrolment, TokenFile, load_token

PLANE: Final = Plane.ENROLMENT
ANSWER_S: Final = 10.0
WAIT_S: Final = 60.0
"""How long ``farflow agent enrol`` tries."""
AGAIN_S: Final = 2.0
AGAIN_MAX_S: Final = 30.0
SETTLE_S: Final = 2.0
"""How long a refusal must last before it counts: the scheduler's planes read its folder of keys now
and then, so a key that was let in a moment ago may still be new to them."""
_LOOK_S: Final = 0.1

KEY: Final = "agent.toml"
_PENDING: Final = "enrolling.toml"
_PREVIOUS: Final = "agent.previous.toml"
_FACTS: Final = "enrolment.toml"
_OPTIONS: Final = LinkOptions.for_plane(PLANE)
_log = structlog.get_logger()


class _Revoked(Exception):
    """The key that asks was let in once and taken back."""


async def enrol(
    network: Network,
    token: TokenFile,
    keys: Path,
    *,
    name: str = "",
    wait_s: float = WAIT_S,
    new_key: bool = False,
) -> Enrolment:
    """Get the key in the folder ``keys`` let in, which is made when there is none. Of an enrolment
    that is complete the scheduler is asked whether its key is (still) let in, unless ``new_key``
    asks for another one, which takes its place once it is let in. ``name`` is a wish, which a token
    with a prefix need not grant.

    Raises:
        ConfigError: the token is refused, the key was revoked, or the folder belongs to another
            deployment.
        PeerUnreachable: no answer within ``wait_s``.
    """
    done = None if new_key else await asyncio.to_thread(enrolled, keys)
    if done is not None:
        await _check_let_in(network, keys, done, wait_s)
        return done
    pair = await asyncio.to_thread(_prepare, keys, token, new_key)
    request = EnrolRequest(token=token.id, secret=token.secret, name=name or host_name())
    try:
        reply = await _let_in(network, token, pair, request, wait_s)
    except _Revoked as error:
        # It never comes back, so that a try with it would fail for good.
        await asyncio.to_thread((keys / _PENDING).unlink, missing_ok=True)
        raise ConfigError(
            f"enrolment refused: enrol.key_revoked: the key of the last try was revoked; it is"
            f" removed: {new_key_remedy(keys)}"
        ) from error
    except (ConfigError, PeerUnreachable) as error:
        raise type(error)(f"{error}; {_kept(keys)}") from error
    return await asyncio.to_thread(_finish, keys, token, pair, reply)


async def why_not_connected(link: Link, within_s: float) -> str:
    """Wait for the link's first connection; "" once it is up, else why not. A refusal of our key is
    believed after ``SETTLE_S``."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while (spent_s := loop.time() - began_s) < within_s:
        try:
            async with asyncio.timeout(_LOOK_S):
                await link.wait_connected()
                return ""
        except TimeoutError:
            if refuses_key(link.last_failure) and spent_s >= SETTLE_S:
                break
    return await link.why() or NO_ANSWER


def new_key_remedy(keys: Path) -> str:
    """What to do on a box whose key in ``keys`` is not let in."""
    token = "make a token on the cloud host (`farflow token create`), then here"  # noqa: S105
    if keys.name != "keys":
        return f"{token} `farflow agent enrol --token-file FILE` with a fresh --folder"
    folder = keys.absolute().parent
    return f"{token} `farflow agent enrol --new-key --token-file FILE --folder {folder}`"


def enrolled(keys: Path) -> Enrolment | None:
    """The complete enrolment in a folder; None without one.

    Raises:
        ConfigError: a file of it does not load.
    """
    if not (keys / KEY).exists() or not (keys / _FACTS).exists():
        return None
    return load_toml(keys / _FACTS, Enrolment)


async def enrolled_config(config: AgentConfig, network: Network) -> AgentConfig:
    """``config`` with the key and the addresses of its enrolment, which happens now if it did not
    before; without ``agent.token_file`` it is returned as it is. Waits for the scheduler as long as
    it takes.

    Raises:
        ConfigError: the token is refused or does not load.
    """
    table = config.agent
    if not table.token_file:
        return config
    keys = Path(config.transport.keys)
    facts = await asyncio.to_thread(enrolled, keys)
    if facts is None:
        token = await asyncio.to_thread(load_token, table.token_file)
        facts = await enrol(network, token, keys, wait_s=float("inf"))
    return msgspec.structs.replace(
        config,
        transport=enrolled_transport(config.transport, facts),
        agent=msgspec.structs.replace(table, key=table.key or str(keys / KEY)),
    )


def enrolled_transport(transport: TransportConfig, facts: Enrolment) -> TransportConfig:
    """``transport`` with the addresses of an enrolment."""
    return msgspec.structs.replace(
        transport,
        host=facts.host,
        control_port=facts.control_port,
        trajectories_port=facts.trajectories_port,
        weights_port=facts.weights_port,
    )


def host_name() -> str:
    """This machine's name as a name of farflow, "" if nothing of it is left."""
    plain = re.sub(r"[^a-z0-9._-]", "-", socket.gethostname().split(".")[0].lower())
    return plain.strip("-._")[:48]


def another_name(facts: Enrolment, wanted: str) -> list[str]:
    """What to say to who asked for the name ``wanted``: nothing if that is granted."""
    if wanted in ("", facts.name):
        return []
    return [
        f"not called {wanted!r} but {facts.name!r}: that is how the scheduler enrolled this folder"
        " (a token with a prefix numbers its boxes); another name needs a fresh --folder and a"
        " token without a prefix"
    ]


# ---- steps ---------------------------------------------------------------------------------------


async def _check_let_in(network: Network, keys: Path, facts: Enrolment, wait_s: float) -> None:
    """Raises as ``enrol`` unless the scheduler lets the folder's key in now."""
    pair = await asyncio.to_thread(KeyPair.load, keys / KEY)
    server_keys = await asyncio.to_thread(PinnedServerKeys, keys)
    endpoint = f"tcp://{bracketed(facts.host)}:{facts.control_port}"
    options = LinkOptions.for_plane(Plane.CONTROL)
    link = network.link(endpoint, options, key=pair, server_key=server_keys)
    try:
        why = await why_not_connected(link, min(wait_s, ANSWER_S))
    finally:
        await link.close()
    if refuses_key(why):
        raise ConfigError(
            f"{keys / KEY}: the scheduler does not let this key ({facts.name!r}) in, so it was"
            f" revoked; {new_key_remedy(keys)}"
        )
    if why:
        raise PeerUnreachable(
            f"{keys} holds the key of {facts.name!r}, but whether it is let in is not known:"
            f" {address_of(endpoint)}: {why}; {what_to_look_at(why, 'its host', 'its port')}"
        )


def _kept(keys: Path) -> str:
    return f"the key made for this stays in {keys / _PENDING}: the next try goes on with it"


def _prepare(keys: Path, token: TokenFile, new_key: bool) -> KeyPair:
    """The key to be let in; blocks."""
    make_folder(keys, 0o700)
    make_folder(keys / "signers", 0o755)
    server = keys / "server.public.toml"
    if server.exists() and load_server_key(keys) != token.server_key:
        raise ConfigError(
            f"{server}: is the key of another scheduler than the token's; enrol in a fresh folder"
        )
    if (keys / KEY).exists() and not new_key:
        raise ConfigError(f"{keys / KEY}: is a key from elsewhere; enrol in a fresh folder")
    pending = keys / _PENDING
    if not pending.exists():
        KeyPair.generate("enrolling", Role.AGENT).save(pending)
    return KeyPair.load(pending)


async def _let_in(
    network: Network, token: TokenFile, pair: KeyPair, request: EnrolRequest, wait_s: float
) -> EnrolReply:
    endpoint = f"tcp://{bracketed(token.host)}:{token.enrolment_port}"
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + wait_s
    again_s = AGAIN_S
    rarely, said = Rarely(), ""
    while True:
        due_s = rarely.due_s(loop.time())
        why = NO_ANSWER
        # One question per connection: a second one is not taken.
        link = network.link(endpoint, _OPTIONS, key=pair, server_key=token.server_key)
        try:
            async with asyncio.timeout(min(ANSWER_S, max(deadline_s - loop.time(), 0.1))):
                answer = await _ask(link, request)
            if isinstance(answer, EnrolReply):
                return answer
            if answer.code == "enrol.key_revoked":
                raise _Revoked(answer.message)
            if answer.retry_s is None:
                raise ConfigError(f"enrolment refused: {answer.code}: {answer.message}")
            why, again_s = f"{answer.code}: {answer.message}", max(AGAIN_S, answer.retry_s)
        except (TimeoutError, LinkError):
            why = await link.why() or why
        finally:
            await link.close()
        address, remedy = address_of(endpoint), _what_to_look_at(why)
        if loop.time() + again_s > deadline_s:
            raise PeerUnreachable(f"{address}: {why}. {remedy}")
        if why != said or loop.time() >= due_s:
            _log.warning(
                "enrolment.again", address=address, reason=why, remedy=remedy, in_s=again_s
            )
            rarely.said(loop.time())
            said = why
        await asyncio.sleep(again_s)
        again_s = min(2 * again_s, AGAIN_MAX_S)


def _what_to_look_at(why: str) -> str:
    if why.startswith(NAME):
        return (
            "Does this machine resolve names, and is the address of the token right (`farflow"
            " token create --host` on the cloud host)?"
        )
    if why.startswith("enrol."):
        return "The scheduler asks to be asked later."
    # Without an open token the scheduler does not listen there.
    return (
        "Is the token still open (`farflow token ls` on the cloud host), the address right, the"
        " port open?"
    )


async def _ask(link: Link, request: EnrolRequest) -> EnrolReply | Refuse:
    """Raises TimeoutError never by itself: the caller bounds it."""
    await link.wait_connected()
    link.send(encode(request, limits=LIMITS[PLANE]))
    while True:
        for frames in await link.recv():
            try:
                if not may_send(Role.SCHEDULER, PLANE, peek(frames)):
                    continue
                answer, _ = decode(frames, LIMITS[PLANE])
            except ProtocolError as error:
                _log.warning("enrolment.malformed", reason=str(error))
                continue
            if isinstance(answer, EnrolReply | Refuse):
                return answer


def _finish(keys: Path, token: TokenFile, pair: KeyPair, reply: EnrolReply) -> Enrolment:
    """Write everything down, our key last; blocks."""
    if reply.server_key != token.server_key or reply.role is not Role.AGENT:
        raise RemoteProtocolError(
            f"enrolled as {reply.role.value} with server key {reply.server_key[:64]!r}: this is not"
            " what the token is for"
        )
    try:
        server = PublicKey(name="server", role=Role.SCHEDULER, public_key=reply.server_key)
        facts = msgspec.convert(
            {
                "name": reply.name,
                "host": token.host,
                "control_port": reply.control_port,
                "trajectories_port": reply.trajectories_port,
                "weights_port": reply.weights_port,
            },
            Enrolment,
        )
        own = KeyPair(
            name=reply.name,
            role=Role.AGENT,
            public_key=pair.public_key,
            secret_key=pair.secret_key,
        )
        root = RootPublic(verify_key=reply.root_key) if reply.root_key else None
    except (ValueError, msgspec.ValidationError) as error:
        raise RemoteProtocolError(f"the scheduler's answer: {error}") from error
    if (keys / KEY).exists():
        os.replace(keys / KEY, keys / _PREVIOUS)
    atomic_write(keys / "server.public.toml", to_toml(server).encode())
    if root is not None:
        atomic_write(keys / "root.public.toml", to_toml(root).encode())
    atomic_write(keys / _FACTS, facts.text().encode())
    own.save(keys / KEY)
    os.unlink(keys / _PENDING)
    return facts
