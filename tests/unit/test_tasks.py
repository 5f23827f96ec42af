"""Items of task sources: pure, disjoint, distinct, and clear about what is wrong."""

import json
import random
import sys
from typing import Literal

import msgspec
import pytest
from core_builders import make_run

from scheduler.tasks import (
    JsonlSource,
    ReasoningGymSource,
    check_sources,
    is_held_out,
    open_source,
)
from transport.errors import TaskError
from transport.runs import PartSpec, TaskSpec


def gym(dataset: str = "chain_sum", run_seed: int = 7, **settings) -> ReasoningGymSource:
    task = TaskSpec(source="reasoning-gym", dataset=dataset, settings=settings, held_out_one_in=5)
    return open_source(task, run_seed)


def two_digit_sums(seed: int = 7) -> ReasoningGymSource:
    return gym(run_seed=seed, min_terms=2, max_terms=2, min_digits=2, max_digits=2)


def jsonl(path, lines, one_in: int = 5, seed: int = 3) -> JsonlSource:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return open_source(jsonl_task(path, one_in), seed)


def jsonl_task(path, one_in: int = 5) -> TaskSpec:
    return TaskSpec(source="jsonl", path=str(path), reward="exact", held_out_one_in=one_in)


def numbered(count: int) -> list[str]:
    return [
        json.dumps({"prompt": f"what is {i}?", "answer": str(i), "id": i}) for i in range(count)
    ]


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_items_are_the_same_in_any_order_and_in_any_source_of_the_same_seed(kind):
    whole = two_digit_sums().items(kind, 0, 300)
    assert [item.index for item in whole] == list(range(300))
    again = two_digit_sums()
    for start, count in [(290, 10), (0, 1), (63, 3), (128, 70), (5, 5)]:
        assert again.items(kind, start, count) == whole[start : start + count]
    other = two_digit_sums(seed=8).items(kind, 0, 300)
    assert sum(a.prompt == b.prompt for a, b in zip(whole, other, strict=True)) < 30


def test_training_and_held_out_items_are_disjoint_and_the_hash_decides():
    source = two_digit_sums()
    train = {item.prompt for item in source.items("train", 0, 2000)}
    held_out = {item.prompt for item in source.items("eval", 0, 1024)}
    assert not train & held_out
    assert all(is_held_out(prompt, 5) for prompt in held_out)
    assert not any(is_held_out(prompt, 5) for prompt in train)
    assert len(train) > 1500


def test_held_out_prompts_are_distinct():
    prompts = [item.prompt for item in two_digit_sums().items("eval", 0, 1024)]
    assert len(set(prompts)) == 1024


def test_the_evaluation_space_of_a_small_data_set_ends_after_its_distinct_prompts():
    source = gym(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    items = source.items("eval", 0, 300)
    assert 10 < len({item.prompt for item in items}) == len(items) == source.held_out_end() < 100
    assert source.items("eval", len(items) - 2, 64) == items[-2:]
    assert source.items("eval", len(items), 64) == []


def test_the_verifier_of_the_data_set_accepts_the_answer_with_the_meta_of_the_item():
    import reasoning_gym

    item = two_digit_sums().items("train", 41, 1)[0]
    score = reasoning_gym.create_dataset("chain_sum").score_answer
    assert score(item.answer, json.loads(item.meta)) == 1.0
    assert score("no", json.loads(item.meta)) < 1.0


@pytest.mark.parametrize("dataset", ["word_ladder", "acre", "graph_color", "list_functions"])
def test_eager_and_answerless_data_sets_work_too(dataset):
    source = gym(dataset)
    items = source.items("train", 3, 2)
    assert gym(dataset).items("train", 3, 2) == items
    assert all(item.prompt and item.meta for item in items)


@pytest.mark.parametrize(
    ("dataset", "settings", "complaint"),
    [
        ("chain_sums", {}, "no data set 'chain_sums'; it has .*chain_sum"),
        ("chain_sum", {"min_term": 2}, "task.settings.min_term: .* it has .*min_terms"),
        ("chain_sum", {"seed": 2}, "task.settings.seed: is chosen by the scheduler"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "refuses them: max_terms must be"),
        ("chain_sum", {"size": 20000}, "task.settings.size: is chosen by the scheduler"),
        ("chain_sum", {"min_terms": "two"}, "task.settings.min_terms: Expected `int`, got `str`"),
        ("chain_sum", {"min_terms": 2.5}, "task.settings.min_terms: Expected `int`, got `float`"),
        ("chain_sum", {"allow_negation": 1}, "task.settings.allow_negation: Expected `bool`"),
    ],
)
def test_wrong_data_sets_and_settings_are_named(dataset, settings, complaint):
    with pytest.raises(TaskError, match=complaint):
        gym(dataset, **settings)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.11 warns of it first
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_settings_that_fail_only_when_an_entry_is_made_are_named_too(kind):
    complaint = (
        r"'chain_sum' with .*'min_digits': 5000.* cannot make an entry: .*; change the settings"
    )
    with pytest.raises(TaskError, match=complaint):
        gym(min_digits=5000, max_digits=5000).items(kind, 0, 1)


def test_a_long_search_for_held_out_items_is_cut_into_requests_and_gives_the_same_items():
    task = TaskSpec(source="reasoning-gym", dataset="chain_sum", held_out_one_in=1000)
    source = open_source(task, 7)
    first = source.items("eval", 0, 1000)
    assert 0 < len(first) < 40
    assert source.held_out_end() is None
    assert source.items("train", 0, 1)
    again = open_source(task, 7)
    assert [again.items("eval", n, 1)[0] for n in range(len(first))] == first


def test_lines_are_shuffled_anew_in_every_pass_and_each_comes_once_per_pass(tmp_path):
    source = jsonl(tmp_path / "t.jsonl", numbered(50))
    lines = 50 - source.held_out_end()
    first = [item.answer for item in source.items("train", 0, lines)]
    second = [item.answer for item in source.items("train", lines, lines)]
    assert sorted(first) == sorted(second) != first
    assert first != second
    assert len(set(first)) == lines
    middle = source.items("train", lines + 3, 1)[0]
    assert (middle.answer, middle.index) == (second[3], lines + 3)
    assert json.loads(middle.meta) == {"id": int(middle.answer)}


def test_held_out_lines_come_once_each_and_never_in_training(tmp_path):
    lines = numbered(60) + numbered(60)
    random.Random(1).shuffle(lines)
    source = jsonl(tmp_path / "t.jsonl", lines)
    distinct = source.held_out_end()
    held_out = [item.prompt for item in source.items("eval", 0, distinct)]
    assert len(set(held_out)) == distinct > 3
    assert source.items("eval", distinct, 8) == []
    train = {item.prompt for item in source.items("train", 0, 200)}
    assert not train & set(held_out)
    assert len(train) + distinct == 60


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "x"}', r"t\.jsonl:3: Object missing required field `answer`"),
        ('{"prompt": "x", "answer": 3}', r"t\.jsonl:3: answer: Expected `str`, got `int`"),
        ('{"prompt": "  ", "answer": "3"}', r"t\.jsonl:3: prompt: is empty"),
        ('{"prompt": "x", ', r"t\.jsonl:3: not a JSON object"),
        ('{"o": ' + "[" * 100_000, r"t\.jsonl:3: nested too deeply"),
        ("[1]", r"t\.jsonl:3: Expected `object`, got `array`"),
        ('{"prompt": "%s", "answer": ""}' % ("y" * 70_000), r"t\.jsonl:3: 70000 bytes"),
    ],
)
def test_a_malformed_line_is_named_with_file_line_and_field(tmp_path, line, complaint):
    with pytest.raises(TaskError, match=complaint):
        jsonl(tmp_path / "t.jsonl", [*numbered(1), "", line, *numbered(1)])


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(numbered(30)), encoding="utf-8-sig")
    source = open_source(jsonl_task(path), 3)
    assert {"what is 0?", "what is 29?"} <= {
        item.prompt for kind in ("train", "eval") for item in source.items(kind, 0, 30)
    }


def test_an_empty_missing_or_one_sided_file_is_refused(tmp_path):
    with pytest.raises(TaskError, match="has no lines"):
        jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(TaskError, match=r"gone\.jsonl: No such file .*; check the path"):
        open_source(jsonl_task(tmp_path / "gone.jsonl"), 1)
    with pytest.raises(TaskError, match=r"task\.reward: 'verifier' belongs to reasoning-gym"):
        open_source(TaskSpec(source="jsonl", path="x", reward="verifier"), 1)
    lines = [line for line in numbered(9) if not is_held_out(json.loads(line)["prompt"], 5)]
    source = jsonl(tmp_path / "one-sided.jsonl", lines)
    with pytest.raises(TaskError, match=r"no line is held out; add lines"):
        source.items("eval", 0, 1)


# ---- instructions --------------------------------------------------------------------------------

TOLD = "Put the answer in <answer> tags."


def test_an_instruction_ends_every_prompt_and_changes_no_items_kind():
    plain = TaskSpec(source="reasoning-gym", dataset="chain_sum", held_out_one_in=3)
    told = msgspec.structs.replace(plain, instruction=TOLD)
    kinds: tuple[Literal["train", "eval"], ...] = ("train", "eval")
    for kind in kinds:
        before = open_source(plain, 5).items(kind, 3, 20)
        after = open_source(told, 5).items(kind, 3, 20)
        assert [item.prompt for item in after] == [f"{item.prompt}\n\n{TOLD}" for item in before]
        assert [(item.index, item.answer, item.meta) for item in after] == [
            (item.index, item.answer, item.meta) for item in before
        ]


def test_each_part_of_a_mixture_has_an_instruction_of_its_own():
    sums = PartSpec(source="reasoning-gym", dataset="chain_sum", instruction=TOLD)
    twins = PartSpec(source="reasoning-gym", dataset="chain_sum", family="twins")
    source = open_source(TaskSpec(source="mixture", parts=(sums, twins)), 5)
    for item in source.items("train", 0, 20):
        assert item.prompt.endswith(TOLD) is (item.family == "chain_sum")
    held_out = [item.prompt.removesuffix(f"\n\n{TOLD}") for item in source.items("eval", 0, 20)]
    assert len({*held_out}) == 20, "a question comes once, whatever is put behind it"


def test_an_instruction_that_makes_a_prompt_too_long_is_named(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "x" * (64 * 1024 - 10), "answer": "1"}) + "\n")
    task = msgspec.structs.replace(jsonl_task(path, 1000), instruction=TOLD)
    with pytest.raises(TaskError, match=r"instruction: .* bytes of prompt, answer and meta"):
        open_source(task, 1).items("train", 0, 1)


# ---- before a run is submitted -------------------------------------------------------------------


def test_sources_are_opened_beforehand_and_faults_begin_with_the_key(tmp_path):
    gym_part = PartSpec(source="reasoning-gym", dataset="chain_sum", settings={"size": 5})
    own = PartSpec(source="python", function="not.there:items", reward="exact")
    mixed = TaskSpec(source="mixture", parts=(own, gym_part))
    with pytest.raises(TaskError, match=r"^task\.parts\[1\]\.settings\.size: is chosen by"):
        check_sources(make_run(task=mixed))
    gone = jsonl_task(tmp_path / "gone.jsonl", 2)
    for name, run in {
        "evaluation": make_run(evaluation={"task": gone}),
        "evaluations.x": make_run(evaluations={"x": {"task": gone}}),
    }.items():
        with pytest.raises(TaskError, match=rf"^{name}\.task\.path: .*gone\.jsonl: No such file"):
            check_sources(run)
    assert check_sources(make_run()) == []


def test_where_reasoning_gym_is_not_installed_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    [unchecked] = check_sources(make_run())
    assert unchecked.startswith("task: reasoning-gym 'chain_sum': reasoning-gym is not installed")
