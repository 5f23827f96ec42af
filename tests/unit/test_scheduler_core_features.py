"""What a run asks of agents that older ones do not heed: template arguments, forms of answers."""

from typing import Any

import msgspec
import pytest
from core_builders import SOLVER, Scene, make_agent_hello, make_run, make_scene

from scheduler.core.events import FromAgent
from transport.messages import FEATURE_ANSWER, FEATURE_TEMPLATE
from transport.runs import PartSpec, TaskSpec

OFF = {"enable_thinking": False}
TEMPLATE = {"policy": {"chat_template_kwargs": OFF}}
TAGS = {"task": TaskSpec(source="reasoning-gym", dataset="chain_sum", answer="tags")}


def joins(scene: Scene, name: str, *features: str, **changes: Any) -> None:
    hello = msgspec.structs.replace(make_agent_hello(**changes), features=features)
    scene.feed(FromAgent(name, hello))


@pytest.mark.parametrize(
    ("changes", "feature"), [(TEMPLATE, FEATURE_TEMPLATE), (TAGS, FEATURE_ANSWER)]
)
def test_an_agent_that_does_not_heed_what_a_run_asks_for_gets_none_of_its_work(
    changes: dict[str, Any], feature: str
) -> None:
    scene = make_scene(run=make_run(**changes))
    joins(scene, "old", "offers")
    assert not scene.live_offers()
    [run] = scene.core.status(scene.now).runs
    assert run.reason == f"no agent offers {feature} (it is of an older version)"
    joins(scene, "new", "offers", feature)
    offers = scene.live_offers()
    assert {scene.offered_to[offer.attempt] for offer in offers} == {"new"}
    for offer in offers:
        assert offer.chat_template_kwargs == ({SOLVER: OFF} if changes is TEMPLATE else {})
        assert offer.reward.answer == ("tags" if changes is TAGS else "whole")


def test_what_a_run_does_not_ask_for_nobody_need_heed() -> None:
    scene = make_scene(run=make_run())
    joins(scene, "old")
    assert scene.live_offers()


def test_each_part_of_a_mixture_has_its_own_form_of_answer() -> None:
    parts = (
        PartSpec(source="reasoning-gym", dataset="chain_sum", answer="boxed"),
        PartSpec(source="reasoning-gym", dataset="word_ladder"),
    )
    run = make_run(task=TaskSpec(source="mixture", parts=parts))
    work = make_scene(run=run).core._ctx.runs[run.name].works[""]
    assert {name: reward.answer for name, reward in work.rewards.items()} == {
        "chain_sum": "boxed",
        "word_ladder": "whole",
    }
    assert work.features == (FEATURE_ANSWER,)
