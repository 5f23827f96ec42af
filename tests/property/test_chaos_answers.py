"""An answer that is meant for a process that has died does nothing to the one in its place.

The scheduler may read a hello long after its sender has ended (it was held up, the connection was
broken), when another process already speaks with the same key: its answer reaches that one.
"""

import random

import pytest
from core_builders import SOLVER, Scene, make_agent_hello, make_run, make_trainer_hello

from cloud_trainer.core import effects as trainer_do
from cloud_trainer.core import events as trainer_on
from cloud_trainer.core.machine import TrainerCore
from cloud_trainer.core.settings import CoreSettings, StartPosition
from edge_agent.core import effects as agent_do
from edge_agent.core import events as agent_on
from edge_agent.core.machine import AgentCore
from edge_agent.core.settings import AgentSettings
from scheduler.core.effects import Send
from scheduler.core.events import FromAgent, FromTrainer
from transport.messages import Hello, Message, Refuse, Welcome

POLICY = SOLVER
ANSWERS = [
    Welcome(term=1, heartbeat_s=2.0, lost_after_s=12.0, run=make_run(), incarnation=1),
    Refuse(code="agent.superseded", message="a newer process speaks", incarnation=1),
]


def make_agent() -> AgentCore:
    return AgentCore(
        AgentSettings(slots=4),
        incarnation=2,
        build="test",
        rng=random.Random(1),
    )


def make_trainer() -> TrainerCore:
    settings = CoreSettings(policy=POLICY, incarnation=2, build="test")
    return TrainerCore(settings, StartPosition())


@pytest.mark.parametrize("answer", ANSWERS, ids=["welcome", "refusal"])
def test_an_agent_goes_on_saying_hello(answer: Message) -> None:
    agent = make_agent()
    agent.handle(agent_on.Tick(), 0.0)
    effects = agent.handle(agent_on.FromScheduler(message=answer), 1.0)
    effects += agent.handle(agent_on.Tick(), 5.0)
    assert agent.status().counters["answer.of_another_life"] == 1
    assert any(
        isinstance(effect, agent_do.ToScheduler) and isinstance(effect.message, Hello)
        for effect in effects
    )


@pytest.mark.parametrize("answer", ANSWERS, ids=["welcome", "refusal"])
def test_a_trainer_goes_on_saying_hello(answer: Message) -> None:
    trainer = make_trainer()
    trainer.handle(trainer_on.Tick(), 0.0)
    effects = trainer.handle(trainer_on.FromScheduler(message=answer), 1.0)
    effects += trainer.handle(trainer_on.Tick(), 5.0)
    assert trainer.counters["answer.of_another_life"] == 1
    assert any(
        isinstance(effect, trainer_do.ToScheduler) and isinstance(effect.message, Hello)
        for effect in effects
    )


def answers(scene: Scene, peer: str) -> list[int]:
    return [
        effect.message.incarnation
        for effect in scene.effects
        if isinstance(effect, Send)
        and effect.peer == peer
        and isinstance(effect.message, Welcome | Refuse)
    ]


def test_the_scheduler_says_whose_hello_it_answers() -> None:
    scene = Scene()
    scene.submitted()
    for incarnation in (4, 3):
        scene.feed(FromAgent("a0", make_agent_hello(incarnation)))
        scene.feed(FromTrainer("t", make_trainer_hello(POLICY, incarnation)))
    assert answers(scene, "a0") == [4, 3]
    assert answers(scene, "t") == [4, 3]
