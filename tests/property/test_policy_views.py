"""Groups of several policies, from what a workflow returns to what each policy's trainer sees."""

from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_trainer.bodies import check_body, training_group
from edge_agent.attempt_group import group_of
from edge_agent.engine import Completion
from edge_agent.rollouts import Generated, Observed, Rollout
from transport.messages import Item, LeaseOffer, RewardSpec
from transport.trajectory import body_digest, pack, unpack

POLICIES = {"a": "run/a", "b": "run/b", "c": "run/c"}
IDS = tuple(POLICIES.values())
OFFER = LeaseOffer(
    attempt="run/t-000001#1",
    fence=(1, 1),
    job="run/t-000001",
    kind="train",
    items=(Item(index=0, prompt="p", answer="a"),),
    group_size=1,
    workflow="w",
    settings={},
    policies=POLICIES,
    reward=RewardSpec(name="exact"),
    max_new_tokens=8,
    temperature=1.0,
    seed=0,
    lease_s=1.0,
)

token = st.integers(0, 2**32 - 1)
prompts = st.lists(token, min_size=1, max_size=4).map(tuple)


@st.composite
def generated(draw: st.DrawFn) -> Generated:
    tokens = draw(st.lists(token, max_size=5))
    count = len(tokens)
    logprobs = st.lists(st.floats(-20, 0, width=32), min_size=count, max_size=count)
    versions = st.lists(st.integers(0, 2**40), min_size=count, max_size=count)
    completion = Completion(
        tokens=tuple(tokens),
        logprobs=tuple(draw(logprobs)),
        versions=tuple(draw(versions)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
    )
    return Generated(
        policy=draw(st.sampled_from(IDS)), prompt_tokens=(1,), completion=completion, text=""
    )


observed = st.lists(token, max_size=5).map(lambda tokens: Observed(tokens=tuple(tokens)))


@st.composite
def rollout(draw: st.DrawFn) -> Rollout:
    made = Rollout(
        prompt_tokens=draw(prompts),
        parts=tuple(draw(st.lists(generated() | observed, max_size=6))),
        text="",
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        reward=draw(st.floats(-10, 10)),
    )
    only = draw(st.sampled_from([None, *IDS]))
    return made if only is None else made.only(only)


def drawn_by(rollouts: Sequence[Rollout], policy: str) -> list[list[tuple[int, int, float, int]]]:
    """Of each rollout in which the policy drew anything: place, token, log-probability, version."""
    found = []
    for one in rollouts:
        own: list[tuple[int, int, float, int]] = []
        at = 0
        for part in one.parts:
            if isinstance(part, Generated) and part.policy == policy:
                columns = (part.tokens, part.completion.logprobs, part.completion.versions)
                own += [(at + n, *row) for n, row in enumerate(zip(*columns, strict=True))]
            at += len(part.tokens)
        if own:
            found.append(own)
    return found


@given(st.lists(rollout(), min_size=1, max_size=6))
@settings(deadline=None, max_examples=40)
def test_every_token_is_trainable_for_exactly_the_policy_that_drew_it(
    rollouts: list[Rollout],
) -> None:
    rewards = [one.reward or 0.0 for one in rollouts]
    packed = pack(group_of(OFFER, rollouts, rewards))
    unpacked = unpack(packed)
    trainable = 0
    for policy in IDS:
        ours = training_group(unpacked, policy)
        seen = [
            [
                (n, s.tokens[n], s.logprobs[n], s.versions[n])
                for n, is_ours in enumerate(s.loss_mask)
                if is_ours
            ]
            for s in ours
        ]
        assert seen == drawn_by(rollouts, policy)
        kept = [one for one in rollouts if drawn_by([one], policy)]
        assert [s.reward for s in ours] == [one.reward for one in kept]
        assert [s.prompt_tokens for s in ours] == [one.prompt_tokens for one in kept]
        for sequence, one in zip(ours, kept, strict=True):
            assert sequence.tokens == tuple(t for part in one.parts for t in part.tokens)
        event = check_body(body_digest(packed), packed, policy).event
        assert event.trainable_tokens == sum(map(len, seen))
        trainable += event.trainable_tokens
    drawn = [p for one in rollouts for p in one.parts if isinstance(p, Generated)]
    assert trainable == sum(len(part.tokens) for part in drawn)
    assert training_group(unpacked, "run/other") == ()


@given(rollout())
@settings(deadline=None, max_examples=40)
def test_views_for_each_policy_share_a_conversation_and_no_token(whole: Rollout) -> None:
    views = [whole.only(policy) for policy in IDS]
    for view in views:
        assert [part.tokens for part in view.parts] == [part.tokens for part in whole.parts]
    for number in range(len(whole.parts)):
        learn = [view for view in views if isinstance(view.parts[number], Generated)]
        assert len(learn) == isinstance(whole.parts[number], Generated)
    assert views[0].only(IDS[0]) == views[0]
    bare = [part for part in views[0].only(IDS[1]).parts if isinstance(part, Generated)]
    assert bare == []


@given(st.lists(rollout(), min_size=1, max_size=6), st.data())
@settings(deadline=None, max_examples=40)
def test_what_other_policies_got_changes_nothing_for_ours(
    rollouts: list[Rollout], data: st.DataObject
) -> None:
    """Rewards of sequences without our tokens: no baseline of ours."""
    policy = data.draw(st.sampled_from(IDS))
    changed = [
        one
        if drawn_by([one], policy)
        else msgspec.structs.replace(one, reward=data.draw(st.floats(-1e6, 1e6)))
        for one in rollouts
    ]
    groups = [
        training_group(group_of(OFFER, some, [one.reward or 0.0 for one in some]), policy)
        for some in (rollouts, changed)
    ]
    assert groups[0] == groups[1]
