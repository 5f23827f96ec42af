"""Finished turns of an attempt as they are kept, and back.

What always holds: what is taken up again is what was handed over: tokens, log-probabilities, the
policy and version of each, the rewards and the workflow's own state, bit for bit; turns that do not
belong to the offer, to its workflow's very code or to the versions it is pinned to are refused
before a workflow sees any of them.
"""

from collections.abc import Mapping, Sequence

import msgspec

from edge_agent.attempt_group import group_of
from edge_agent.core.attempts import pins_of
from edge_agent.engine import Completion, Engine
from edge_agent.rollouts import check_rollout
from edge_agent.workflow import Generated, MalformedWorkflow, Observed, Rollout, Sibling
from transport.errors import FarflowError
from transport.messages import MAX_COUNT, LeaseOffer
from transport.partials import Partial, PartialPart, PartialSibling, unpack_partial
from transport.trajectory import SequenceRecord, body_digest, expand

Standing = Mapping[int, Sequence[Sibling]]
"""Siblings by the position of their item in the offer."""


class NotResumable(FarflowError):
    """Finished turns are of no use for this offer; says why."""

    code = "attempt.not_resumable"


def partial_of(offer: LeaseOffer, code: str, standing: Standing) -> Partial:
    """The finished turns of an attempt; ``code`` is its workflow's fingerprint.

    Raises:
        MalformedWorkflow: a rollout does not add up, or a state is not plain JSON.
    """
    pairs = [(item, sibling) for item in sorted(standing) for sibling in standing[item]]
    rollouts = [sibling.rollout for _, sibling in pairs]
    for rollout in rollouts:
        check_rollout(rollout)
    turns = [sibling.turns for _, sibling in pairs]
    if set(map(type, turns)) - {int} or not 0 <= min(turns, default=0) <= sum(turns) <= MAX_COUNT:
        raise MalformedWorkflow("a sibling's turns are no number of turns")
    group = group_of(offer, rollouts, [rollout.reward or 0.0 for rollout in rollouts])
    index = {policy: number for number, policy in enumerate(group.policies)}
    return Partial(
        group=group,
        code=code,
        siblings=tuple(
            PartialSibling(
                item=item,
                turns=sibling.turns,
                parts=tuple(_part(part, index) for part in sibling.rollout.parts),
                text=sibling.rollout.text,
                scored=sibling.rollout.reward is not None,
                state=_json(sibling.state),
            )
            for item, sibling in pairs
        ),
    )


def verified(offer: LeaseOffer, data: bytes) -> Partial:
    """The turns that the offer's ``resume`` names. Blocks.

    Raises:
        NotResumable: ``data`` is something else.
        RemoteProtocolError, IntegrityError: they are malformed.
    """
    if offer.resume is None or body_digest(data) != offer.resume.digest:
        raise NotResumable("the turns that came are not those of the offer")
    return unpack_partial(data)


def resumed(
    offer: LeaseOffer, code: str, engine: Engine, partial: Partial
) -> dict[int, tuple[Sibling, ...]]:
    """Where the siblings of an offer stand by what an earlier attempt had finished.

    Raises:
        NotResumable: the offer could not go on from there.
        GenerationFailed: the engine does not host one of the policies.
    """
    fault = _fault(offer, code, partial)
    if fault:
        raise NotResumable(fault)
    standing: dict[int, list[Sibling]] = {}
    for sibling, sequence in zip(partial.siblings, partial.group.sequences, strict=True):
        standing.setdefault(sibling.item, []).append(_sibling(partial, sibling, sequence, engine))
    if any(len(siblings) != offer.group_size for siblings in standing.values()):
        raise NotResumable(f"an item has not {offer.group_size} siblings")
    return {item: tuple(siblings) for item, siblings in standing.items()}


def _fault(offer: LeaseOffer, code: str, partial: Partial) -> str:
    group = partial.group
    if group.job != offer.job:
        return f"they are of job {group.job}"
    if partial.code != code:
        return "another version of the workflow's code made them"
    if group.policies != tuple(sorted(set(offer.policies.values()))):
        return "they are of other policies"
    if max(sibling.item for sibling in partial.siblings) >= len(offer.items):
        return "they are of more items"
    pinned = pins_of(offer)
    for sequence in group.sequences:
        for _, policy, version in sequence.segments:
            if policy >= 0 and pinned.get(group.policies[policy], version) != version:
                return f"they are of version {version}, which the offer is not pinned to"
    return ""


def _part(part: Generated | Observed, index: Mapping[str, int]) -> PartialPart:
    if isinstance(part, Observed):
        return PartialPart(len(part.tokens), -1)
    return PartialPart(len(part.tokens), index[part.policy], part.completion.finish_reason)


def _json(state: object) -> bytes:
    try:
        return msgspec.json.encode(state)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise MalformedWorkflow(f"a sibling's state is not plain JSON: {error}") from error


def _sibling(
    partial: Partial, sibling: PartialSibling, sequence: SequenceRecord, engine: Engine
) -> Sibling:
    prompt = partial.group.prompts[sequence.prompt]
    _, versions = expand(sequence.segments)
    logprobs = tuple(sequence.logprobs.tolist())
    parts: list[Generated | Observed] = []
    at = 0
    for part in sibling.parts:
        end = at + part.tokens
        tokens = sequence.tokens[at:end]
        if part.policy < 0:
            parts.append(Observed(tokens=tokens))
        else:
            policy = partial.group.policies[part.policy]
            completion = Completion(
                tokens=tokens,
                logprobs=logprobs[at:end],
                versions=versions[at:end],
                finish_reason="stop" if part.finish_reason == "stop" else "length",
            )
            parts.append(
                Generated(
                    policy=policy,
                    prompt_tokens=(*prompt, *sequence.tokens[:at]),
                    completion=completion,
                    text=engine.decode(policy, tokens),
                )
            )
        at = end
    try:
        state = msgspec.json.decode(sibling.state)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotResumable(f"the state of a sibling does not decode: {error}") from error
    rollout = Rollout(
        prompt_tokens=prompt,
        parts=tuple(parts),
        text=sibling.text,
        finish_reason=sequence.finish_reason,
        reward=sequence.reward if sibling.scored else None,
    )
    return Sibling(rollout=rollout, turns=sibling.turns, state=state)
