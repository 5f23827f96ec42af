"""Curators: which items become groups, what they are judged by, and that no run stands still."""

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from core_builders import RUN, Scene, make_run, make_summary, of_type

from scheduler.core import curation
from scheduler.core.effects import ProduceItems
from scheduler.core.events import ItemsProduced, Verdict
from scheduler.data.algorithms import chance
from scheduler.event_log import pack_event, unpack_event
from transport.messages import ExplainRequest, Item
from transport.runs import AlgorithmSpec, RunSpec

PROMPTS = 6


def make_items(start: int, count: int) -> tuple[Item, ...]:
    """A file of ``PROMPTS`` lines, gone through again and again; two families."""
    return tuple(
        Item(
            index=index,
            prompt=f"prompt {index % PROMPTS}",
            answer="",
            family="even" if index % 2 == 0 else "odd",
        )
        for index in range(start, start + count)
    )


def produced(scene: Scene) -> None:
    """Answer every request for items that was not answered yet."""
    while scene.effects:
        asked = of_type([scene.effects.pop(0)], ProduceItems)
        for one in asked:
            items = make_items(one.start, one.count)
            scene.feed(ItemsProduced(one.run, one.kind, one.start, items))


def make(*curators: AlgorithmSpec, seed: int = 0) -> Scene:
    spec = make_run(
        curators=curators, seed=seed, policy={"steps": 100, "batch_groups": 4, "max_policy_lag": 1}
    )
    scene = Scene(modules=("data_functions",))
    scene.submitted(spec)
    scene.version_stored(0)
    scene.trainer_joined()
    scene.joined("a", slots=64)
    produced(scene)
    return scene


def play(scene: Scene, steps: int, reward: Callable[[int], tuple[float, float]]) -> list[int]:
    """Train for some steps; what a group's rewards are depends on its prompt. Returns the indices
    of the items that became groups, in order."""
    for _ in range(steps):
        done = scene.policy().step
        scene.requested(done + 1, head=done, groups=4)
        produced(scene)
        while scene.policy().trainer != "training":
            offer = scene.live_offers()[0]
            scene.finished(offer, version=done, rewards=reward(offer.items[0].index % PROMPTS))
            produced(scene)
        scene.stepped(done + 1)
        scene.checkpointed(done + 1)
        scene.version_stored(done + 1)
        scene.serving(done + 1)
        produced(scene)
    return sorted({offer.items[0].index for offer in scene.offers.values()})


def solved_out(**settings) -> AlgorithmSpec:
    return AlgorithmSpec(name="solved_out", settings=settings)


def test_the_story_of_an_item_that_is_solved_out():
    scene = make(solved_out(groups=2))
    made = play(scene, 12, lambda prompt: (1.0, 1.0) if prompt == 3 else (1.0, 0.0))
    tries = [index for index in made if index % PROMPTS == 3]
    others = [index for index in made if index % PROMPTS == 2]
    assert 2 <= len(tries) < len(others)
    assert scene.counter("curated.solved_out") == scene.core._ctx.tables.runs[RUN].skipped > 0
    assert scene.books().balance == 0
    skipped = [line.split(" ", 2)[2] for line in scene.core.story(RUN) if "skipped" in line]
    assert all(line.endswith("curator=solved_out") for line in skipped)
    told = scene.asked(ExplainRequest(subject=RUN))
    assert any("items were skipped by curators" in line for line in told.reasons)


def test_an_item_that_is_failed_again_is_not_solved_out():
    scene = make(solved_out(groups=2))
    made = play(scene, 12, lambda _: (1.0, 0.0))
    assert scene.counter("curated.solved_out") == 0
    assert made == list(range(len(made)))


def test_when_everything_is_solved_the_run_goes_on_slowly():
    scene = make(solved_out(groups=1))
    made = play(scene, 5, lambda _: (1.0, 1.0))
    assert scene.policy().step == 5
    assert scene.counter("curated.kept_anyway") > 0
    assert max(b - a for a, b in pairwise(made)) <= curation.MAX_SKIPPED + 1


def test_greso_skips_the_likelier_the_longer_the_streak():
    scene = make(AlgorithmSpec(name="greso", settings={"easy": 0.5, "hard": 0.5}))
    made = play(scene, 12, lambda prompt: (0.0, 0.0) if prompt < 3 else (1.0, 0.0))
    flat = [index for index in made if index % PROMPTS < 3]
    mixed = [index for index in made if index % PROMPTS >= 3]
    assert 3 < len(flat) < 0.6 * len(mixed)
    # The chance is fixed for seed and index: the same again is skipped again.
    again = make(AlgorithmSpec(name="greso", settings={"easy": 0.5, "hard": 0.5}))
    assert play(again, 12, lambda prompt: (0.0, 0.0) if prompt < 3 else (1.0, 0.0)) == made


def test_a_difficulty_band_by_family_leaves_the_family_that_is_too_hard():
    band = AlgorithmSpec(
        name="difficulty_band", settings={"by": "family", "low": 0.2, "groups": 4, "explore": 0.0}
    )
    scene = make(band)
    made = play(scene, 12, lambda prompt: (0.0, 0.0) if prompt % 2 == 0 else (1.0, 0.0))
    families = [index % 2 for index in made]
    assert families.count(0) < families.count(1) / 3
    assert families.count(0) > 0


def test_a_curator_of_ones_own():
    scene = make(AlgorithmSpec(name="data_functions:odd_items"))
    made = play(scene, 3, lambda _: (1.0, 0.0))
    assert made
    assert all(index % 2 == 0 for index in made)
    assert scene.counter("curated.data_functions:odd_items") >= len(made) - 1


def test_a_restart_keeps_what_was_learnt_of_items():
    scene = make(solved_out(groups=2))
    play(scene, 6, lambda prompt: (1.0, 1.0) if prompt == 3 else (1.0, 0.0))
    before = dict(scene.core._ctx.runs[RUN].histories)
    skipped = scene.core._ctx.tables.runs[RUN].skipped
    scene.restart()
    after = scene.core._ctx.runs[RUN].histories
    assert list(after) == list(before)  # the order of their last change, too
    assert after == before
    assert scene.core._ctx.tables.runs[RUN].skipped == skipped


def test_histories_are_bounded_and_the_stalest_go_first():
    scene = make(solved_out())
    ctx = scene.core._ctx
    offer = scene.live_offers()[0]
    summary = make_summary(offer, "a", versions={})
    job = ctx.tables.jobs[offer.job]
    for number in range(curation.MAX_HISTORIES + 2):
        item = Item(index=number, prompt=f"another {number}", answer="")
        curation.learn(ctx, msgspec.structs.replace(job, items=(item,)), summary)
    kept = ctx.runs[RUN].histories
    assert len(kept) == len(ctx.tables.histories) == curation.MAX_HISTORIES
    assert curation.item_key(Item(index=0, prompt="another 1", answer="")) not in kept
    assert curation.item_key(Item(index=0, prompt="another 2", answer="")) in kept


def test_a_run_without_curators_keeps_no_histories():
    scene = make()
    play(scene, 2, lambda _: (1.0, 0.0))
    assert not scene.core._ctx.tables.histories


def test_a_run_that_is_over_forgets_its_items():
    scene = make(solved_out())
    play(scene, 2, lambda _: (1.0, 0.0))
    assert scene.core._ctx.tables.histories
    scene.commanded("abandon")
    assert not scene.core._ctx.tables.histories


def test_what_curators_said_is_part_of_the_event():
    scene = make(AlgorithmSpec(name="data_functions:odd_items"))
    event = scene.data.prepare(scene.core, ItemsProduced(RUN, "train", 8, make_items(8, 2)))
    assert event.verdicts == (Verdict(), Verdict(filter="data_functions:odd_items"))
    assert unpack_event(pack_event(event)) == event


def test_evaluation_items_are_not_asked_about():
    scene = make(AlgorithmSpec(name="data_functions:odd_items"))
    event = ItemsProduced(RUN, "eval", 0, make_items(0, 2))
    assert scene.data.prepare(scene.core, event) is event


def test_a_wrong_curator_is_refused_with_its_key():
    spec: RunSpec = make_run(curators=(AlgorithmSpec(name="solved_out", settings={"group": 2}),))
    reply = Scene().submitted(spec)
    assert (reply.ok, reply.code) == (False, "run.invalid")
    assert reply.message.startswith("run.curators[0].settings.group: unknown key")
    named = msgspec.structs.replace(spec, curators=(AlgorithmSpec(name="data_functions:broken"),))
    assert "must be a curator" in Scene(modules=("data_functions",)).submitted(named).message


def test_chances_are_spread_over_the_unit_interval():
    chances = [chance(7, index) for index in range(2000)]
    assert all(0.0 <= value < 1.0 for value in chances)
    assert sum(chances) / len(chances) == pytest.approx(0.5, abs=0.03)
    assert len(set(chances)) == 2000
