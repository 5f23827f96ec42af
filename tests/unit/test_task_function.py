"""Task sources of users: a function that yields items."""

import itertools
import random
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from scheduler.task_function import KEPT
from scheduler.tasks import FunctionSource, evaluation_source, is_held_out, open_source
from transport.errors import TaskError
from transport.runs import EvaluationSpec, PartSpec, TaskSpec

MODULE = "farflow_test_tasks"


def products(seed: int, largest: int = 99) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    while True:
        a, b = rng.randint(1, largest), rng.randint(1, largest)
        yield {"prompt": f"{a} * {b} =", "answer": str(a * b), "meta": {"a": a}}


def twenty(seed: int) -> Iterator[SimpleNamespace]:
    numbers = list(range(20))
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        yield SimpleNamespace(prompt=f"what is {number}?", answer=str(number))


def breaks(seed: int) -> Iterator[dict[str, str]]:
    yield {"prompt": "1 + 1 =", "answer": "2"}
    raise ConnectionError("no such database")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(MODULE)
    for function in (products, twenty, breaks):
        setattr(made, function.__name__, function)
    made.constant = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


def task(name: str = "products", **settings: Any) -> TaskSpec:
    return TaskSpec(source="python", function=f"{MODULE}:{name}", settings=settings, reward="exact")


def opened(name: str = "products", seed: int = 7, **settings: Any) -> FunctionSource:
    source = open_source(task(name, **settings), seed, (MODULE,))
    assert isinstance(source, FunctionSource)
    return source


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_items_are_the_same_in_any_order_and_in_any_process(module: ModuleType, kind: Any) -> None:
    whole = opened().items(kind, 0, 300)
    assert [item.index for item in whole] == list(range(300))
    again = opened()
    for start, count in [(290, 10), (0, 1), (63, 3), (128, 70), (5, 5)]:
        assert again.items(kind, start, count) == whole[start : start + count]
    assert whole[0].meta.startswith('{"a": ')
    assert opened(seed=8).items(kind, 0, 9) != whole[:9]


def test_going_back_beyond_what_is_kept_begins_anew(module: ModuleType) -> None:
    source = opened()
    first = source.items("train", 0, 5)
    source.items("train", KEPT + 500, 5)
    assert source.items("train", 0, 5) == first


def test_training_and_evaluation_are_disjoint_by_the_hash(module: ModuleType) -> None:
    source = opened(largest=20)
    train = {item.prompt for item in source.items("train", 0, 1000)}
    held_out = [item.prompt for item in source.items("eval", 0, 60)]
    assert len(set(held_out)) == len(held_out) > 30
    assert not train & set(held_out)
    assert all(is_held_out(prompt, 5) for prompt in held_out)


def test_a_function_that_ends_is_called_again_in_another_order(module: ModuleType) -> None:
    source = opened("twenty")
    end = len(source.items("eval", 0, 100))
    assert end == source.held_out_end()
    lines = 20 - end
    passes = [[i.answer for i in source.items("train", n * lines, lines)] for n in range(3)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
    assert passes[0] != passes[1] != passes[2]


def test_all_of_a_data_set_is_evaluated_unless_only_its_held_out_part_is_wanted(
    module: ModuleType,
) -> None:
    everything = EvaluationSpec(task=task("twenty"))
    source = evaluation_source("numbers", everything, 7, (MODULE,))
    assert source is not None
    assert len(source.items("eval", 0, 100)) == 20
    part = EvaluationSpec(task=task("twenty"), split="held-out")
    source = evaluation_source("numbers", part, 7, (MODULE,))
    assert source is not None
    assert 0 < len(source.items("eval", 0, 100)) < 20
    assert evaluation_source("held-out", EvaluationSpec(), 7) is None


def test_parts_of_a_mixture_may_be_functions(module: ModuleType) -> None:
    parts = tuple(
        PartSpec(source="python", function=f"{MODULE}:{name}", reward="exact", weight=weight)
        for name, weight in (("products", 3.0), ("twenty", 1.0))
    )
    source = open_source(TaskSpec(source="mixture", parts=parts), 7, (MODULE,))
    families = [item.family for item in source.items("train", 0, 400)]
    assert families.count("products") == 300


@pytest.mark.parametrize(
    ("function", "value", "complaint"),
    [
        ("wrong", {"answer": "3"}, "pass 0, item 0: Object missing required field `prompt`"),
        ("wrong", {"prompt": 3}, "item 0: prompt: Expected `str`, got `int`"),
        ("wrong", {"prompt": " "}, "prompt: is empty"),
        ("wrong", {"prompt": "p", "meta": {1, 2}}, "item 0: meta: .* use a text or what JSON"),
        ("wrong", None, "item 0: Expected `object`"),
        ("wrong", {"prompt": "\ud800"}, "a lone surrogate is no text"),
        ("wrong", {"prompt": "p", "family": "f" * 81}, "family: longer than 80 characters"),
    ],
)
def test_what_is_no_item_is_named(
    module: ModuleType, function: str, value: object, complaint: str
) -> None:
    module.wrong = lambda seed: itertools.repeat(value)  # type: ignore[attr-defined]
    for kind in ("train", "eval"):
        with pytest.raises(TaskError, match=f"task.function: '{MODULE}:wrong'.*{complaint}"):
            opened(function).items(kind, 0, 1)  # type: ignore[arg-type]


def test_what_a_function_raises_is_told_with_the_place(module: ModuleType) -> None:
    with pytest.raises(TaskError, match=r"item 1: ConnectionError: no such database"):
        opened("breaks").items("train", 0, 2)
    with pytest.raises(TaskError, match=r"pass 0: TypeError: .*'largst'"):
        opened(largst=3).items("train", 0, 1)


def test_a_function_without_items_to_train_on_or_to_hold_out_says_so(module: ModuleType) -> None:
    module.none = lambda seed: iter(())  # type: ignore[attr-defined]
    with pytest.raises(TaskError, match="pass 0 yields no item to train on"):
        opened("none").items("train", 0, 1)
    with pytest.raises(TaskError, match="yields no held-out item"):
        opened("none").items("eval", 0, 1)


@pytest.mark.parametrize(
    ("function", "allowed", "complaint"),
    [
        (f"{MODULE}:products", (), r"not in scheduler.task_modules \(empty\); add it there"),
        ("os:system", (MODULE,), f"module 'os' is not in scheduler.task_modules \\({MODULE}"),
        (f"{MODULE}:nothing", (MODULE,), "has no function 'nothing'"),
        (f"{MODULE}:constant", (MODULE,), "has no function 'constant'"),
        ("no_such_module:f", ("no_such_module",), "ModuleNotFoundError: .*PYTHONPATH"),
    ],
)
def test_a_function_that_may_not_or_cannot_be_used_is_refused(
    module: ModuleType, function: str, allowed: tuple[str, ...], complaint: str
) -> None:
    wanted = TaskSpec(source="python", function=function, reward="exact")
    with pytest.raises(TaskError, match=complaint):
        open_source(wanted, 7, allowed)
