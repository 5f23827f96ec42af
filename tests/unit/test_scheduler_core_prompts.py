"""Items of submitters' jobs on disk: what the core keeps, and when it lets go of what is stored."""

import msgspec
from core_builders import RUN, Scene, make_run, make_scene

from scheduler.core.effects import Effect, Send
from scheduler.core.events import Event
from scheduler.core.external import STAND_IN
from scheduler.core.state import Job
from scheduler.core.tables import PROMPT
from scheduler.store import PROMPT_TABLE
from transport.messages import (
    DeadLettersRequest,
    ExternalJob,
    Item,
    JobCancel,
    JobReplay,
    JobSubmit,
    LeaseOffer,
    ResultsRequest,
)

LONG = "How long is a piece of string? " * 100
ITEMS = (
    Item(index=7, prompt=LONG, answer="a" * 500, meta='{"b": 1}', family="long"),
    Item(index=8, prompt="short", answer="", family="long"),
)


class PromptScene(Scene):
    """Keeps prompts apart, like the store."""

    prompts: dict[str, bytes]

    def feed(self, event: Event) -> list[Effect]:
        effects = super().feed(event)
        stored = {k: v for (table, k), v in self.rows.items() if table == PROMPT}
        self.prompts = stored
        return effects

    def restart(self) -> list[Effect]:
        kept = {k: v for k, v in self.rows.items() if k[0] == PROMPT}
        for key in kept:
            del self.rows[key]
        effects = super().restart()
        self.rows.update(kept)
        return effects


def made(**changes: object) -> PromptScene:
    return make_scene(kind=PromptScene, prompts_on_disk=True, **changes)


def submitted(scene: Scene, id: str = "j0", items: tuple[Item, ...] = ITEMS) -> str:
    """Submit a job; its receipt's state."""
    job = ExternalJob(id=id, items=items, group_size=2)
    return scene.asked(JobSubmit(run=RUN, jobs=(job,)), "judge").receipts[0].state


def offered(scene: Scene, agent: str = "a") -> list[tuple[LeaseOffer, str]]:
    return [
        (effect.message, effect.prompt)
        for effect in scene.effects
        if isinstance(effect, Send)
        and isinstance(effect.message, LeaseOffer)
        and effect.message.kind == "external"
    ]


def test_what_is_stored_is_exactly_what_was_submitted_and_little_of_it_stays():
    scene = made()
    submitted(scene)
    [(key, value)] = scene.prompts.items()
    assert msgspec.msgpack.decode(value, type=tuple[Item, ...]) == ITEMS
    [job] = [j for j in scene.core._ctx.tables.jobs.values() if j.kind == "external"]
    assert job.prompt == key
    assert [item.family for item in job.items] == ["long", "long"]
    assert job.items[0].prompt == LONG[:STAND_IN]
    row = scene.rows["job", job.id]
    assert len(row) < 1000 < len(value)
    assert msgspec.msgpack.decode(row, type=Job) == job
    assert PROMPT == PROMPT_TABLE


def test_every_offer_names_the_prompt_also_after_a_restart():
    scene = made()
    submitted(scene)
    scene.restart()
    scene.joined("a", slots=64)
    [(offer, key)] = offered(scene)
    assert list(scene.prompts) == [key]
    assert (offer.group_size, len(offer.items)) == (2, 2)


def test_the_prompt_goes_with_the_job():
    scene = made()
    submitted(scene)
    scene.joined("a", slots=64)
    [(offer, _)] = offered(scene)
    scene.accepted(offer)
    assert scene.prompts
    scene.finished(offer)
    assert not scene.prompts
    assert submitted(scene) == "known"
    assert not scene.prompts


def test_the_prompt_of_a_cancelled_job_goes():
    scene = made()
    submitted(scene)
    scene.asked(JobCancel(run=RUN, ids=("j0",)), "judge")
    assert not scene.prompts


def test_a_dead_letter_keeps_its_prompt_until_it_is_tried_again_and_done():
    scene = made(run=make_run(max_attempts=1))
    submitted(scene)
    scene.joined("a", slots=64)
    [(offer, key)] = offered(scene)
    scene.accepted(offer)
    scene.failed(offer, "workflow.error")
    [letter] = scene.asked(DeadLettersRequest()).letters
    assert letter.prompt == LONG[:STAND_IN]
    assert list(scene.prompts) == [key]
    scene.asked(ResultsRequest(after=1), "judge")
    scene.effects.clear()
    assert scene.asked(JobReplay(jobs=(letter.job,))).ok
    scene.joined("b", slots=64)
    [(offer, again)] = offered(scene)
    assert again == key
    scene.accepted(offer)
    scene.finished(offer)
    assert not scene.prompts


def test_another_job_under_a_dead_letters_id_has_a_prompt_of_its_own():
    scene = made(run=make_run(max_attempts=1), remembered_results=0)
    submitted(scene)
    scene.joined("a", slots=64)
    [(offer, first)] = offered(scene)
    scene.accepted(offer)
    scene.failed(offer, "workflow.error")
    scene.asked(ResultsRequest(after=1), "judge")
    assert submitted(scene, items=ITEMS[1:]) == "queued"
    assert len(scene.prompts) == 2
    scene.asked(JobCancel(run=RUN, ids=("j0",)), "judge")
    assert list(scene.prompts) == [first]


def test_without_the_setting_nothing_is_stored_apart():
    scene = make_scene(kind=PromptScene)
    submitted(scene)
    assert not scene.prompts
    scene.joined("a", slots=64)
    [(offer, key)] = offered(scene)
    assert (offer.items, key) == (ITEMS, "")
