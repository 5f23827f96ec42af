"""Rewards that another agent finds again: who is asked, who decides, against whom it speaks."""

import msgspec
import pytest
from core_builders import RUN, SOLVER, Scene, make_run, make_scene, make_summary, messages

from scheduler.core import rechecks
from scheduler.core.events import FromAgent, FromService
from scheduler.core.settings import TRAJECTORY_LOG
from transport.messages import (
    BodiesReleased,
    Goodbye,
    Hello,
    LeaseOffer,
    Role,
    SummariesAccepted,
)
from transport.runs import TaskSpec

TRUE, LIE = (1.0, 0.0), (1.0, 1.0)


def recheck_scene(agents: str = "abc", share: float = 1.0, **changes) -> Scene:
    changes.setdefault("policy", {"max_policy_lag": 16, "steps": 100})
    scene = make_scene(run=make_run(recheck_rewards=share, **changes))
    for name in agents:
        scene.joined(name, slots=2)
    return scene


def asked(scene: Scene) -> dict[str, LeaseOffer]:
    """Live offers of rechecks, by agent."""
    return {scene.offered_to[o.attempt]: o for o in scene.live_offers() if o.recheck}


def draw(scene: Scene, share: float) -> None:
    run = scene.core._ctx.tables.runs[RUN]
    run.spec = msgspec.structs.replace(run.spec, recheck_rewards=share)
    scene.core._ctx.tables.touch(run)


def made(scene: Scene, agent: str, rewards=TRUE) -> LeaseOffer:
    """A group of an agent is accepted."""
    effects, scene.effects = scene.effects, []
    scene.produced(effects)
    offer = next(offer for offer in scene.live_offers(agent) if not offer.recheck)
    scene.accepted(offer)
    scene.finished(offer, rewards=rewards)
    return offer


def free(scene: Scene) -> None:
    """Let agents finish what they have, with true rewards, so that they can be asked."""
    for offer in scene.live_offers():
        if not offer.recheck:
            scene.accepted(offer)
            scene.finished(offer, rewards=TRUE)


def only_first(scene: Scene, agent: str = "a", rewards=TRUE) -> LeaseOffer:
    """A group of an agent is accepted and drawn, and no other is; the others become free."""
    draw(scene, 1.0)
    offer = made(scene, agent, rewards)
    draw(scene, 0.0)
    free(scene)
    assert asked(scene)
    return offer


def answered(scene: Scene, rewards) -> str:
    """Whoever is asked now finds these rewards; returns its name."""
    [(name, offer)] = asked(scene).items()
    scene.accepted(offer)
    scene.finished(offer, rewards=rewards)
    free(scene)
    return name


def test_another_agent_is_asked_for_the_rewards_of_the_very_body():
    scene = recheck_scene()
    offer = only_first(scene)
    [(name, again)] = asked(scene).items()
    assert name != "a"
    assert again.recheck == next(iter(scene.core._ctx.held_bodies))
    assert (again.items, again.group_size, again.reward) == (offer.items, 2, offer.reward)
    assert again.kind == "external"


def test_the_same_rewards_are_the_end_of_it():
    scene = recheck_scene()
    only_first(scene)
    answered(scene, TRUE)
    assert asked(scene) == {}
    assert scene.counter("rechecks.agree") == scene.counter("rechecks.delivered") == 1
    assert scene.core._ctx.held_bodies == {}
    assert all(scene.agent(name).evidence == () for name in "abc")


def test_the_third_agent_proves_the_first_a_liar():
    scene = recheck_scene()
    offer = only_first(scene, "a", LIE)
    second = answered(scene, TRUE)
    assert scene.agent("a").evidence == ()  # one word against another
    third = answered(scene, TRUE)
    assert {"a", second, third} == {"a", "b", "c"}
    assert scene.agent("a").evidence == (
        f"{rechecks.DIFFERS}: {offer.attempt}: 1 for response 1, {second} and {third} find 0",
    )
    assert all(scene.agent(name).evidence == () for name in "bc")


def test_the_third_agent_proves_the_second_a_liar():
    scene = recheck_scene()
    offer = only_first(scene, "a", TRUE)
    second = answered(scene, LIE)
    third = answered(scene, TRUE)
    assert scene.agent(second).evidence == (
        f"{rechecks.DIFFERS}: {offer.attempt}: 1 for response 1, a and {third} find 0",
    )
    assert scene.agent("a").evidence == scene.agent(third).evidence == ()


def test_three_answers_blame_nobody():
    scene = recheck_scene()
    only_first(scene, "a", (1.0, 0.0))
    answered(scene, (1.0, 0.5))
    answered(scene, (1.0, 0.75))
    assert scene.counter("rechecks.undecided") == 1
    assert all(scene.agent(name).evidence == () for name in "abc")


def test_more_rewards_than_the_group_has_sequences_are_no_answer():
    scene = recheck_scene()
    only_first(scene, "a", TRUE)
    [(name, offer)] = asked(scene).items()
    scene.accepted(offer)
    scene.finished(offer, rewards=TRUE * 2, lengths=(10,) * 4)
    [line] = scene.agent(name).evidence
    assert line.startswith("summary.invalid: r/")
    assert scene.counter("rechecks.differ") == 0
    free(scene)
    answered(scene, TRUE)
    assert scene.counter("rechecks.agree") == 1
    assert scene.core._ctx.held_bodies == {}


def test_two_proven_lies_exclude():
    scene = recheck_scene()
    for count in range(2):
        assert scene.agent("a").state == "ready", count
        only_first(scene, "a", LIE)
        answered(scene, TRUE)
        answered(scene, TRUE)
    assert scene.agent("a").quarantined == rechecks.DIFFERS
    assert scene.agent("b").state == scene.agent("c").state == "ready"


def test_without_a_third_agent_nothing_is_decided_and_nothing_stays():
    scene = recheck_scene("ab")
    only_first(scene, "a", LIE)
    answered(scene, TRUE)
    assert asked(scene) == {}
    for _ in range(int(rechecks.EXPIRE_S) + 2):
        scene.beats("a")
        scene.beats("b")
        scene.wait(1.0)
    assert scene.counter("rechecks.expired") == 1
    assert scene.core._ctx.held_bodies == {}
    assert scene.agent("a").evidence == scene.agent("b").evidence == ()


def test_a_single_agent_is_not_asked_about_itself():
    scene = recheck_scene("a")
    made(scene, "a")
    assert scene.counter("rechecks.skipped") == 1
    assert scene.core._ctx.held_bodies == {}


def test_agents_of_a_build_that_knows_no_rechecks_are_not_asked():
    scene = recheck_scene("a")
    scene.joined("old", slots=2, rechecks=False)
    made(scene, "a")
    draw(scene, 0.0)
    free(scene)
    assert scene.counter("rechecks.begun") == 1
    assert asked(scene) == {}


def test_a_recheck_that_fails_is_not_tried_again():
    scene = recheck_scene()
    only_first(scene)
    [offer] = asked(scene).values()
    scene.accepted(offer)
    scene.failed(offer, "recheck.failed")
    free(scene)
    assert asked(scene) == {}
    assert scene.counter("rechecks.failed") == 1
    assert scene.core._ctx.tables.dead == {}


def test_a_recheck_that_fails_takes_no_tokens_from_the_runs_quota():
    scene = recheck_scene("")
    ctx = scene.core._ctx
    bucket = ctx.runs[RUN].bucket
    bucket.level = 1e6
    for name in "abc":
        scene.joined(name, slots=2)
    only_first(scene)
    [offer] = asked(scene).values()
    scene.accepted(offer)
    scene.failed(offer, "recheck.failed")
    under_way = [lease.tokens for lease in ctx.leases.values()]
    drawn = 16 * scene.counter("results.accepted")  # two sequences of eight
    assert 1e6 - bucket.level == pytest.approx(drawn + sum(under_way))


def test_the_body_is_kept_until_its_rewards_were_found_again():
    scene = recheck_scene()
    only_first(scene)
    [digest] = scene.core._ctx.held_bodies
    scene.requested(1)
    scene.stepped(1)
    scene.checkpointed(1)
    released = [d for m in messages(scene.effects, BodiesReleased) for d in m.digests]
    assert digest not in released
    answered(scene, TRUE)
    released = [d for m in messages(scene.effects, BodiesReleased) for d in m.digests]
    assert digest in released


def test_open_rechecks_survive_a_restart():
    scene = recheck_scene()
    only_first(scene, "a", LIE)
    held = dict(scene.core._ctx.held_bodies)
    scene.restart()
    assert scene.core._ctx.held_bodies == held
    for name in "abc":
        scene.joined(name, slots=2, held=scene.held_by(name))
    answered(scene, TRUE)
    answered(scene, TRUE)
    assert len(scene.agent("a").evidence) == 1


def test_a_log_that_comes_back_is_told_again_which_bodies_agents_may_have():
    scene = recheck_scene()
    hello = Hello(role=Role.SERVICE, incarnation=2, build="b")
    assert messages(scene.feed(FromService(TRAJECTORY_LOG, hello)), SummariesAccepted) == []
    only_first(scene)
    [digest] = scene.core._ctx.held_bodies
    [told] = messages(scene.feed(FromService(TRAJECTORY_LOG, hello)), SummariesAccepted)
    assert (told.digests, told.rechecked) == ((), (digest,))
    answered(scene, TRUE)
    assert messages(scene.feed(FromService(TRAJECTORY_LOG, hello)), SummariesAccepted) == []


def test_an_agent_that_leaves_with_a_recheck_leaves_it_to_another():
    scene = recheck_scene("abcd")
    only_first(scene)
    [(name, _)] = asked(scene).items()
    scene.feed(FromAgent(name, Goodbye(reason="spot")))
    free(scene)
    [other] = asked(scene).keys() - {name}
    assert other != "a"


@pytest.mark.parametrize(
    "changes",
    [
        {"share": 0.0},
        {"workflow": {"reference": "tool_use"}},
        {"workflow": {"reference": "somebodys:own"}},
    ],
)
def test_what_is_no_function_of_item_and_response_is_not_found_again(changes):
    scene = recheck_scene("", **changes)
    workflows = dict.fromkeys(("single_turn", "tool_use", "somebodys:own"), "f")
    more = {"workflows": workflows, "rewards": ("code", "reasoning-gym")}
    for name in "ab":
        scene.joined(name, slots=2, **more)
    made(scene, "a")
    assert scene.counter("rechecks.begun") == 0


def test_the_share_is_what_is_drawn():
    scene = recheck_scene(share=0.5, policy={"batch_groups": 64, "max_policy_lag": 4})
    ctx = scene.core._ctx
    done = 0
    while done < 200:
        effects, scene.effects = scene.effects, []
        scene.produced(effects)
        for offer in scene.live_offers():
            scene.accepted(offer)
            scene.finished(offer, rewards=TRUE)
            done += not offer.recheck
        if not scene.live_offers():
            break
    begun = ctx.counters()["rechecks.begun"] + ctx.counters().get("rechecks.skipped", 0)
    assert 0.35 * done < begun < 0.65 * done


def test_rechecks_that_are_placed_in_one_go_are_each_kept_from_those_they_judge(monkeypatch):
    """A shortlist that one job leaves for the next would let agents judge themselves."""
    monkeypatch.setitem(rechecks.WEIGHTS, "reasoning-gym", 0.0)  # nobody is excluded
    scene = recheck_scene("", policy={"batch_groups": 64, "max_policy_lag": 4, "steps": 100})
    for name in "abc":
        scene.joined(name, slots=16)
    for _ in range(6):
        effects, scene.effects = scene.effects, []
        scene.produced(effects)
        live = scene.live_offers()
        for offer in live:
            scene.accepted(offer)
        # Who makes a group lies, so that a third agent is asked each time.
        scene.stored(
            *(
                make_summary(
                    offer,
                    scene.offered_to[offer.attempt],
                    versions={SOLVER: (0, 0)},
                    rewards=TRUE if offer.recheck else LIE,
                )
                for offer in live
            )
        )
    assert scene.counter("rechecks.differ") > 15
    assert scene.counter("rechecks.agree") == 0
    assert scene.counter(f"quarantine.evidence.{rechecks.DIFFERS}") > 10


def test_a_run_that_ends_gives_its_rechecks_up():
    scene = recheck_scene()
    only_first(scene)
    scene.commanded("stop")
    scene.wait(1.0)
    assert scene.core._ctx.held_bodies == {}
    assert scene.counter("rechecks.cancelled") == 1


# ---- agents whose word decides ------------------------------------------------------------------


def test_two_that_lie_alike_do_not_outvote_an_agent_that_is_trusted():
    scene = recheck_scene("abc", recheck_by=("c",))
    offer = only_first(scene, "a", LIE)
    assert answered(scene, TRUE) == "c"
    assert scene.agent("a").evidence == (
        f"{rechecks.DIFFERS}: {offer.attempt}: 1 for response 1,"
        " c, which run.recheck_by trusts, finds 0",
    )
    assert asked(scene) == {}  # nobody else is heard
    assert scene.agent("c").evidence == ()
    assert scene.core._ctx.held_bodies == {}


def test_without_such_an_agent_they_do():
    """What ``recheck_by`` is for."""
    scene = recheck_scene("abc")
    only_first(scene, "a", LIE)
    second = answered(scene, TRUE)
    answered(scene, LIE)
    assert len(scene.agent(second).evidence) == 1


def test_two_findings_of_an_agent_that_is_trusted_exclude():
    scene = recheck_scene("abc", recheck_by=("c",))
    for _ in range(2):
        assert scene.agent("a").state == "ready"
        only_first(scene, "a", LIE)
        answered(scene, TRUE)
    assert scene.agent("a").quarantined == rechecks.DIFFERS


def test_an_agent_that_is_trusted_is_not_looked_at():
    scene = recheck_scene("abc", recheck_by=("c", "b"))
    made(scene, "c", LIE)
    assert scene.counter("rechecks.begun") == scene.counter("rechecks.skipped") == 0


def test_where_none_that_is_trusted_is_there_nobody_is_asked():
    scene = recheck_scene("ab", recheck_by=("c",))
    made(scene, "a", LIE)
    assert scene.counter("rechecks.skipped") == 1
    assert scene.core._ctx.held_bodies == {}


def test_an_agent_that_is_trusted_and_finds_the_same_ends_it():
    scene = recheck_scene("abc", recheck_by=("c",))
    only_first(scene)
    assert answered(scene, TRUE) == "c"
    assert scene.counter("rechecks.agree") == 1


# ---- what not every agent can find --------------------------------------------------------------

CODE = {"task": TaskSpec(source="jsonl", path="p", reward="code")}
TURNS = {"workflow": {"reference": "multi_turn"}}


@pytest.mark.parametrize(("changes", "kind"), [(CODE, "code"), (TURNS, "multi_turn")])
def test_other_kinds_are_asked_of_agents_that_say_that_they_can(changes, kind):
    scene = recheck_scene("", **changes)
    more = {
        "workflows": {"single_turn": "f", "multi_turn": "f"},
        "rewards": ("code", "reasoning-gym"),
    }
    scene.joined("a", slots=2, **more)
    scene.joined("old", slots=2, **more)
    draw(scene, 1.0)
    made(scene, "a")
    draw(scene, 0.0)
    free(scene)
    assert scene.counter("rechecks.begun") == 1
    assert asked(scene) == {}
    scene.joined("new", slots=2, recheck_kinds=(kind,), **more)
    free(scene)
    assert [*asked(scene)] == ["new"]


def test_a_program_that_fails_elsewhere_weighs_less():
    scene = recheck_scene("", **CODE)
    for name in "abc":
        scene.joined(name, slots=2, rewards=("code",), recheck_kinds=("code",))
    for _ in range(2):
        only_first(scene, "a", LIE)
        answered(scene, TRUE)
        answered(scene, TRUE)
    assert scene.agent("a").state == "ready"
    assert len(scene.agent("a").evidence) == 2
