"""Shortlists that several jobs of a pass share: the same choices as drawing anew for each."""

import pytest
from core_builders import RUN, SOLVER, Scene, make_items, make_ref, make_run, make_scene
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core import candidates
from scheduler.core.effects import Send
from scheduler.core.shortlists import REUSED, Shortlists
from transport.messages import ExternalJob, Item, JobSubmit, LeaseOffer


def anew(self, ctx, run, job, view, names):
    return candidates.shortlist(ctx, run, job, view, names)


def placed(scene: Scene, jobs: tuple[ExternalJob, ...]) -> list[tuple[str, str]]:
    """(job, agent) of each offer that one submission leads to."""
    effects = scene.asks(JobSubmit(run=RUN, jobs=jobs), "judge")
    return [
        (effect.message.job, effect.peer)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, LeaseOffer)
    ]


def fleet(rule: str, slots: list[int], rtts: list[float]) -> Scene:
    scene = make_scene(run=make_run(max_groups=1), placement=rule, check=False)
    for number, (size, rtt_s) in enumerate(zip(slots, rtts, strict=True)):
        scene.joined(f"a{number}", slots=size)
        scene.heard(f"a{number}", rtt_s=rtt_s, versions={SOLVER: make_ref(SOLVER, 0)})
    return scene


JOBS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(["", "long"]), st.booleans()),
    min_size=1,
    max_size=3 * REUSED,
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(6, 24), st.floats(0.0, 2.0)), min_size=1, max_size=40),
    JOBS,
    st.sampled_from(["finish-time", "least-outstanding", "nearest", "round-robin"]),
)
def test_a_small_fleet_is_used_as_if_every_job_looked_at_all_of_it(agents, asked, rule):
    jobs = tuple(
        ExternalJob(
            id=f"j{number}",
            items=tuple(
                Item(index=i.index, prompt=i.prompt, answer=i.answer, family=family)
                for i in make_items(0, 1)
            ),
            group_size=size,
            require={"engine": ("fake",)} if labelled else {},
        )
        for number, (size, family, labelled) in enumerate(asked)
    )
    slots, rtts = [slots for slots, _ in agents], [rtt for _, rtt in agents]
    shared = placed(fleet(rule, slots, rtts), jobs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shortlists, "candidates", anew)
        alone = placed(fleet(rule, slots, rtts), jobs)
    assert shared == alone
    assert shared


def test_a_draw_from_a_large_fleet_serves_a_bounded_number_of_jobs(monkeypatch):
    scene = fleet("finish-time", [8] * 200, [0.1] * 200)
    draws: list[int] = []
    draw = candidates.shortlist

    def counted(*args, **kwargs):
        found = draw(*args, **kwargs)
        draws.append(len(found))
        return found

    monkeypatch.setattr(candidates, "shortlist", counted)
    count = 10 * REUSED
    jobs = tuple(ExternalJob(id=f"j{n}", items=make_items(0, 1)) for n in range(count))
    offers = placed(scene, jobs)
    assert len(offers) == count
    assert count // REUSED <= len(draws) <= 2 * count // REUSED + 2
    busiest = max(sum(agent == name for _, agent in offers) for name in {a for _, a in offers})
    assert busiest <= 8


def test_the_best_few_of_a_draw_are_enough_for_the_jobs_that_it_serves(monkeypatch):
    """Every job fills its agent, so that each next one is best off somewhere else."""
    rtts = [0.01 * ((7 * number) % 50) for number in range(50)]
    jobs = tuple(
        ExternalJob(id=f"j{n}", items=make_items(0, 1), group_size=6) for n in range(3 * REUSED)
    )
    shared = placed(fleet("finish-time", [6] * 50, rtts), jobs)
    monkeypatch.setattr(Shortlists, "candidates", anew)
    alone = placed(fleet("finish-time", [6] * 50, rtts), jobs)
    assert shared == alone
    assert len({agent for _, agent in shared}) > 2 * REUSED
