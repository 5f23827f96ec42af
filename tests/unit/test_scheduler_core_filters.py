"""Filters: what objects, what becomes of the group, and that a broken one harms nobody."""

import msgspec
import pytest
from core_builders import (
    RUN,
    SOLVER,
    Scene,
    grants,
    make_run,
    make_scene,
    messages,
    released,
)

from scheduler.core.events import FromService, Verdict
from scheduler.event_log import pack_event, unpack_event
from transport.messages import ExplainRequest, LeaseOffer
from transport.runs import AlgorithmSpec, DataSpec

ZERO = "zero_advantage"


def filters(*names: str, **settings) -> dict:
    specs = tuple(AlgorithmSpec(name=name, settings=settings) for name in names)
    return {"data": DataSpec(filters=specs)}


def make(*names: str, settings: dict | None = None, policy: dict | None = None, **changes) -> Scene:
    spec = make_run(policy={**filters(*names, **(settings or {})), **(policy or {})})
    scene = make_scene(run=spec, modules=("data_functions",), **changes)
    scene.joined("a", slots=8)
    return scene


def test_the_story_of_a_group_that_teaches_nothing():
    scene = make(ZERO)
    first, second, *_ = scene.live_offers()
    under_way = len(scene.offers)

    effects = scene.finished(first, rewards=(1.0, 1.0))

    assert scene.books().filtered == 1
    assert scene.counter("filtered.zero_advantage") == 1
    assert len(released(effects)) == 1
    # Its quota is back: another group is sampled in its place.
    assert len(scene.offers) == under_way + 1
    assert scene.finished(second, rewards=(1.0, 0.0))
    assert (scene.books().filtered, scene.books().buffered, scene.books().balance) == (1, 1, 0)
    story = [line.split(" ", 2)[2] for line in scene.core.story(first.job)]
    assert story[-1] == "filtered policy=r/solver reason=zero_advantage"
    told = scene.asked(ExplainRequest(subject=first.job))
    assert told.state == "rejected"
    assert any("zero_advantage" in line for line in told.history)


def test_sampling_goes_on_until_the_batch_is_full():
    scene = make(ZERO)
    scene.requested(1)
    made = 0
    while not grants(scene.effects):
        for offer in scene.live_offers():
            rewards = (1.0, 0.0) if made % 3 == 0 else (0.0, 0.0)
            made += 1
            scene.produced(scene.finished(offer, rewards=rewards))
    [grant] = grants(scene.effects)
    assert len(grant.groups) == 2
    assert scene.books().filtered >= 2
    assert scene.books().balance == 0


def test_the_first_filter_that_objects_gives_the_reason():
    scene = make("data_functions:even_items", ZERO)
    even, odd = scene.live_offers()[:2]
    scene.finished(even, rewards=(1.0, 1.0))
    scene.finished(odd, rewards=(1.0, 1.0))
    assert scene.counter("filtered.data_functions:even_items") == 1
    assert scene.counter("filtered.zero_advantage") == 1


def test_a_filter_that_raises_keeps_the_group_and_is_counted():
    scene = make("data_functions:broken", ZERO)
    first, second = scene.live_offers()[:2]
    scene.finished(first, rewards=(1.0, 0.0))
    scene.finished(second, rewards=(1.0, 1.0))
    assert scene.counter("data.failed.data_functions:broken") == 2
    assert (scene.books().buffered, scene.books().filtered) == (1, 1)


def test_a_run_whose_module_is_gone_after_a_restart_goes_on_and_says_so():
    scene = make("data_functions:even_items")
    scene.data = type(scene.data)()
    scene.restart()
    scene.joined("a", slots=8, incarnation=2)
    [offer, *_] = [o for o in scene.live_offers() if o.job.endswith("0")]
    scene.finished(offer)
    assert scene.counter("data.failed.data_functions:even_items") == 1
    assert scene.books().buffered == 1


def test_verdicts_are_part_of_the_event_and_of_its_record():
    scene = make(ZERO)
    other = make(ZERO)
    scene.finished(scene.live_offers()[0], rewards=(0.0, 0.0))
    event = scene.event
    assert isinstance(event, FromService)
    assert event.verdicts == ({SOLVER: Verdict(filter=ZERO)},)
    recorded = unpack_event(pack_event(event))
    assert recorded == event
    # A core that is only told the event makes the same of it, without any function.
    other.core.handle(recorded, other.now)
    assert other.core.story(f"{RUN}/t-000000")[-1] == scene.core.story(f"{RUN}/t-000000")[-1]


def test_each_policy_has_filters_of_its_own():
    names = ("judge", "solver")
    plain, filtered = make_run(policies=names), make_run(policies=names, policy=filters(ZERO))
    policies = {"judge": plain.policies["judge"], "solver": filtered.policies["solver"]}
    scene = make_scene(run=msgspec.structs.replace(plain, policies=policies))
    both = ("r/judge", SOLVER)
    scene.trainer_joined("t2", policy=SOLVER)
    scene.joined("a", versions=dict.fromkeys(both, 0))
    [offer, *_] = scene.live_offers()
    effects = scene.finished(offer, policies=both, rewards=(1.0, 1.0))
    assert (scene.books("r/judge").buffered, scene.books(SOLVER).filtered) == (1, 1)
    assert not released(effects)


def test_a_policy_is_judged_by_the_sequences_that_it_drew_in():
    scene = make(ZERO)
    first, second = scene.live_offers()[:2]
    # Two rollouts per sibling: those of the other role do not count.
    rewards, lengths = (1.0, 1.0, 0.0, 0.0), (8, 8, 8, 8)
    scene.finished(first, rewards=rewards, lengths=lengths, members={SOLVER: (0, 1)})
    scene.finished(second, rewards=rewards, lengths=lengths, members={SOLVER: (1, 2)})
    assert (scene.books().filtered, scene.books().buffered) == (1, 1)


def test_evaluations_are_not_filtered():
    spec = make_run(policy=filters(ZERO), evaluation={"items": 2, "items_per_job": 2})
    scene = make_scene(run=spec)
    scene.joined("a", slots=8)
    [offer] = [offer for offer in scene.live_offers() if offer.kind == "eval"]
    scene.finished(offer, rewards=(1.0, 1.0))
    assert scene.books(kind="eval").scored == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (AlgorithmSpec(name="zero"), "policies.solver.data.filters[0].name: there is no filter"),
        (
            AlgorithmSpec(name="overlong", settings={"tokens": 5, "tokns": 1}),
            "policies.solver.data.filters[0].settings.tokns: unknown key",
        ),
        (
            AlgorithmSpec(name="overlong", settings={"tokens": 0}),
            "policies.solver.data.filters[0].settings.tokens: Expected `int` >= 1",
        ),
        (
            AlgorithmSpec(name="os:getpid"),
            "policies.solver.data.filters[0].name: module 'os' is not one that the scheduler may"
            " use; add it to [scheduler] data_modules",
        ),
        (
            AlgorithmSpec(name="data_functions:undecorated"),
            "decorate the function with @filter_function",
        ),
        (AlgorithmSpec(name="data_functions:nothing"), "must be a filter, and is not there"),
        (AlgorithmSpec(name="data_functions:lowest_index"), "must be a filter, and is something"),
    ],
)
def test_a_run_with_wrong_functions_is_refused_with_the_key(spec, message):
    scene = Scene(modules=("data_functions",))
    reply = scene.submitted(make_run(policy={"data": DataSpec(filters=(spec,))}))
    assert (reply.ok, reply.code) == (False, "run.invalid")
    assert message in reply.message
    assert scene.counter("refused.run.invalid") == 1


def test_a_run_that_was_taken_is_not_refused_when_it_is_submitted_again():
    scene = Scene(modules=("data_functions",))
    spec = make_run(policy=filters("data_functions:even_items"))
    assert scene.submitted(spec).ok
    scene.data = type(scene.data)()
    assert scene.submitted(spec).ok


def test_a_paused_quota_of_filtered_groups_ends_a_budget():
    """All that the budget allows was filtered: the run ends instead of waiting."""
    spec = make_run(policy=filters(ZERO), max_groups=2)
    scene = make_scene(run=spec)
    scene.joined("a", slots=8)
    scene.requested(1)
    for offer in scene.live_offers():
        scene.finished(offer, rewards=(0.0, 0.0))
    assert scene.run().state == "stopping"
    assert not messages(scene.effects[-1:], LeaseOffer)
