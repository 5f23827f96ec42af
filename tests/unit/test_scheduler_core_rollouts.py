"""Several sequences per sibling: how many a result may have, and what is learnt from it; agents
without the code of a run's workflow."""

import pytest
from core_builders import RUN, Scene, grants, make_items, make_run, make_scene

from scheduler.core.learning import _of_siblings
from scheduler.core.state import Job
from transport.messages import ExplainRequest, ExternalJob, JobSubmit, LeaseOffer, ResultsRequest
from transport.runs import MAX_ROLLOUTS


def two_policies(**changes: object) -> Scene:
    scene = make_scene(run=make_run(policies=("judge", "solver"), **changes))
    scene.joined("a", slots=64, versions={"r/judge": 0, "r/solver": 0})
    return scene


def of_kind(scene: Scene, kind: str) -> LeaseOffer:
    return next(offer for offer in scene.live_offers() if offer.kind == kind)


def finished(scene: Scene, offer: LeaseOffer, sequences: int, lengths: int | None = None) -> int:
    """Deliver a result of so many sequences; how many results were invalid so far."""
    scene.accepted(offer)
    scene.finished(
        offer,
        policies=("r/judge", "r/solver"),
        rewards=(0.5,) * sequences,
        lengths=(8,) * (sequences if lengths is None else lengths),
    )
    return scene.counter("results.invalid")


def summaries() -> Scene:
    evaluation = {"items": 4, "items_per_job": 4, "items_between": 2}
    scene = two_policies(evaluation=evaluation)
    job = ExternalJob(id="j0", items=make_items(0, 2), group_size=2)
    scene.asked(JobSubmit(run=RUN, jobs=(job,)), "u")
    return scene


@pytest.mark.parametrize("rollouts", [1, 2, MAX_ROLLOUTS])
@pytest.mark.parametrize("kind", ["train", "external"])
def test_a_result_may_have_several_sequences_per_sibling(kind: str, rollouts: int) -> None:
    scene = summaries()
    offer = of_kind(scene, kind)
    siblings = len(offer.items) * offer.group_size
    assert finished(scene, offer, siblings * rollouts) == 0
    assert scene.counter("results.accepted") == 1
    if kind == "external":
        [result] = scene.asked(ResultsRequest(after=0), "u").results
        assert len(result.rewards) == len(result.lengths) == siblings * rollouts
    else:
        assert scene.books("r/judge").buffered == scene.books("r/solver").buffered == 1


@pytest.mark.parametrize(
    ("kind", "sequences", "lengths"),
    [
        ("train", 3, None),
        ("train", 0, None),
        ("train", 2 * (MAX_ROLLOUTS + 1), None),
        ("train", 4, 2),
        ("external", 6, None),
        ("eval", 8, None),
        ("eval", 2, None),
    ],
)
def test_any_other_number_is_invalid(kind: str, sequences: int, lengths: int | None) -> None:
    scene = summaries()
    assert finished(scene, of_kind(scene, kind), sequences, lengths) == 1
    assert scene.counter("results.accepted") == 0


def test_a_step_of_such_groups_is_taken_trained_and_released_like_any_other() -> None:
    scene = two_policies()
    for offer in [offer for offer in scene.live_offers() if offer.kind == "train"]:
        finished(scene, offer, offer.group_size * 2)
    [grant] = grants(scene.requested(1, policy="r/judge"))
    assert len(grant.groups) == 2
    scene.stepped(1, policy="r/judge")
    scene.checkpointed(1, policy="r/judge")
    assert scene.books("r/judge").trained == 2
    assert [scene.books(policy).balance for policy in ("r/judge", "r/solver")] == [0, 0]


def test_a_restart_keeps_results_of_several_sequences() -> None:
    scene = summaries()
    finished(scene, of_kind(scene, "external"), 8)
    finished(scene, of_kind(scene, "train"), 4)
    scene.restart()
    [result] = scene.asked(ResultsRequest(after=0), "u").results
    assert len(result.rewards) == 8
    assert scene.books("r/solver").buffered == 1


def job_of(items: int, siblings: int) -> Job:
    return Job(
        id="r/t-000000",
        run=RUN,
        kind="train",
        index=0,
        sequences=items * siblings,
        items=make_items(0, items),
        copies={},
    )


@pytest.mark.parametrize(
    ("items", "siblings", "lengths", "expected"),
    [
        (1, 3, (1, 2, 3), (1, 2, 3)),
        (1, 3, (1, 2, 3, 10, 20, 30), (11, 22, 33)),
        (2, 1, (1, 10, 2, 20), (11, 22)),
        (2, 2, (1, 2, 10, 20, 3, 4, 30, 40), (11, 22, 33, 44)),
        (1, 1, (1, 10, 100), (111,)),
    ],
)
def test_a_sibling_is_as_long_as_all_its_sequences(
    items: int, siblings: int, lengths: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert _of_siblings(job_of(items, siblings), lengths) == expected


def test_a_run_learns_that_its_siblings_draw_several_sequences() -> None:
    scene = two_policies()
    finished(scene, of_kind(scene, "train"), 4)
    assert scene.core._ctx.runs[RUN].estimate.tokens_mean == 16.0


def test_an_agent_without_the_runs_code_is_told_what_to_install() -> None:
    scene = make_scene()
    scene.joined("a", slots=2)
    scene.joined("b", workflows={"single_turn": "0123456789abcdef"})
    scene.joined("c", workflows={})
    assert {scene.offered_to[o.attempt] for o in scene.live_offers()} == {"a"}
    why = {name: scene.asked(ExplainRequest(subject=name)).reasons for name in "abc"}
    assert not any("workflow" in line for line in why["a"])
    [other] = [line for line in why["b"] if "workflow" in line]
    assert "(01234567) is not that of the run's groups (f1); install the same version" in other
    [missing] = [line for line in why["c"] if "workflow" in line]
    assert "no work of run r: it has no workflow single_turn; install its module" in missing
