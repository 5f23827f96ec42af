"""What an agent says about itself in its hello, and whether that is taken.

What always holds: an older incarnation is refused; what is kept of an inventory's labels and bases
is of bounded size; what an agent was ordered, proved or did before stays when it comes back. Two
processes are two lives, also where both drew the same incarnation.

An order to drain that was not confirmed yet is for the box: a process that takes the place of one
that died with it gets it too. It is over once the agent said goodbye, or was away for so long that
it counted as lost and comes back as another process.
"""

from scheduler.core.context import AgentState, Context
from scheduler.core.state import Agent
from transport.messages import (
    MAX_ID_LENGTH,
    PROTOCOL_VERSION,
    AgentInventory,
    Hello,
    Refuse,
    Role,
)

MAX_LABELS = 64
MAX_LABEL_LENGTH = 128
MAX_SLOTS = 1_000_000


def refusal(message: Hello, known: Agent | None) -> Refuse | None:
    """Why a hello is not taken, or nothing; ``known`` is whom the key stood for so far."""
    if message.protocol != PROTOCOL_VERSION:
        return Refuse(
            code="protocol.version",
            message=f"protocol {message.protocol}, the scheduler speaks {PROTOCOL_VERSION}:"
            " install the same farflow on both sides",
        )
    inventory = message.agent
    if message.role is not Role.AGENT or inventory is None:
        return Refuse(code="hello.invalid", message="an agent's hello needs its inventory")
    if not 1 <= inventory.slots <= MAX_SLOTS:
        return Refuse(code="hello.invalid", message=f"slots must be 1 to {MAX_SLOTS}")
    if known is not None and message.incarnation < known.incarnation:
        return Refuse(
            code="agent.superseded",
            message=f"a newer process (incarnation {known.incarnation}) speaks with this key;"
            " give each agent a key of its own",
        )
    return None


def is_reborn(message: Hello, known: Agent | None) -> bool:
    """Whether another process than before speaks with the key."""
    if known is None or message.incarnation > known.incarnation:
        return True
    return bool(message.process and known.process) and message.process != known.process


def introduce(
    ctx: Context, name: str, message: Hello, inventory: AgentInventory, state: AgentState | None
) -> Agent:
    """Write the row of an agent: what it says that it can do, within bounds, and what is known of
    it from before; ``state`` is the one that it had until now."""
    before = ctx.tables.agents.get(name)
    agent = Agent(
        name=name,
        incarnation=message.incarnation,
        process=message.process[:MAX_ID_LENGTH],
        slots=inventory.slots,
        hardware=inventory.hardware[:64],
        engine=inventory.engine[:64],
        workflows=inventory.workflows,
        rewards=inventory.rewards,
        rechecks=inventory.rechecks,
        recheck_kinds=tuple(kind[:MAX_ID_LENGTH] for kind in inventory.recheck_kinds[:MAX_LABELS]),
        features=tuple(name[:MAX_ID_LENGTH] for name in message.features[:MAX_LABELS]),
        labels=_labels(inventory),
        bases=tuple(base[:MAX_ID_LENGTH] for base in inventory.bases[:MAX_LABELS]),
        versions={p: ref for p, ref in inventory.versions.items() if p in ctx.hosted},
        price_usd_hour=max(0.0, inventory.price_usd_hour),
        egress_usd_gb=max(0.0, inventory.egress_usd_gb),
    )
    if before is not None:
        agent.groups_done, agent.attempts_failed = before.groups_done, before.attempts_failed
        agent.cordoned, agent.quarantined = before.cordoned, before.quarantined
        agent.evidence = before.evidence
        reborn = is_reborn(message, before)
        agent.draining = before.draining and not reborn
        if not reborn or state not in ("lost", "gone"):
            agent.drain = before.drain
        elif before.drain is not None:
            ctx.note(name, "drain is over", was=str(state))
    ctx.tables.add(agent)
    return agent


def _labels(inventory: AgentInventory) -> dict[str, str]:
    """So few and short ones that a status has room for them."""
    fitting = [
        (name, value)
        for name, value in inventory.labels.items()
        if len(name) <= MAX_LABEL_LENGTH and len(value) <= MAX_LABEL_LENGTH
    ]
    return dict(fitting[:MAX_LABELS])
