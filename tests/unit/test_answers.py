"""Answers within responses, and the rewards that look at them."""

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.answers import answer_in
from edge_agent.reward_worker import exact, score_one
from transport.messages import Item, RewardSpec
from transport.runs import AnswerForm

META = json.dumps(
    {"question": "3 + 4 = ?", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}
)
ITEM = Item(index=1, prompt="3 + 4 = ?", answer="7", meta=META)
FORMS: tuple[AnswerForm, ...] = get_args(AnswerForm)
PLAIN = st.text(st.characters(exclude_characters="<>\\{}"), max_size=60)


def gym(answer: AnswerForm) -> RewardSpec:
    return RewardSpec(name="reasoning-gym", dataset="chain_sum", answer=answer)


@pytest.mark.parametrize(
    ("form", "response", "answer"),
    [
        ("whole", " The result is 7. ", "The result is 7."),
        ("tags", "<think>3</think><answer> 7 </answer>", "7"),
        ("tags", "<answer>3</answer> no, <answer>7</answer>", "7"),
        ("tags", "<answer>7</answer> and <answer>8", "7"),
        ("tags", "<answer>7</answer> </answer>", "7"),
        ("tags", "<answer>3 <answer>7</answer>", "7"),
        ("tags", "</answer>7<answer>", None),
        ("tags", "<answer> </answer>", None),
        ("tags", "7", None),
        ("boxed", r"so \boxed{3}, or rather \(\boxed{7}\).", "7"),
        ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed {a\}b}", r"a\}b"),
        ("boxed", r"\boxed{7} and \boxed{8", "7"),
        ("boxed", r"}\boxed{7}{", "7"),
        ("boxed", r"\boxed{\boxed{7}}", "7"),
        ("boxed", "boxed{7}", None),
        ("last-number", "The result is **7**.", "7"),
        ("last-number", "3 + 4 = 7.", "7"),
        ("last-number", "It is -7", "-7"),
        ("last-number", "x=\u22127", "-7"),
        ("last-number", "from 3-7", "7"),
        ("last-number", "(3)-7", "7"),
        ("last-number", "in all $1,234,567.50!", "1234567.50"),
        ("last-number", "1,2345", "2345"),
        ("last-number", "about .5", "0.5"),
        ("last-number", "so ...5", "5"),
        ("last-number", "1.5e-3 m", "1.5e-3"),
        ("last-number", "seven", None),
    ],
)
def test_the_last_answer_of_a_form_is_found(
    form: AnswerForm, response: str, answer: str | None
) -> None:
    assert answer_in(response, form) == answer


@pytest.mark.parametrize(
    ("form", "response"),
    [
        ("tags", "3 and 4 make <answer>7</answer>"),
        ("boxed", r"Therefore $\boxed{7}$."),
        ("last-number", "The result is **7**."),
    ],
)
def test_a_right_answer_in_the_form_that_was_asked_for_has_the_full_reward(
    form: AnswerForm, response: str
) -> None:
    assert score_one(gym(form), ITEM, response) == 1.0
    assert score_one(RewardSpec(name="exact", answer=form), ITEM, response) == 1.0
    assert score_one(gym("whole"), ITEM, response) < 0.5
    assert score_one(gym(form), ITEM, response.replace("7", "9")) < 0.5
    assert score_one(gym(form), ITEM, "no answer") == 0.0


def test_without_an_answer_an_empty_one_is_not_right_either() -> None:
    empty = Item(index=1, prompt="say nothing", answer="")
    assert score_one(RewardSpec(name="exact", answer="tags"), empty, "anything") == 0.0
    assert score_one(RewardSpec(name="exact"), empty, "") == 1.0


@given(st.text(max_size=300))
def test_the_default_gives_the_verifier_all_of_the_response_as_ever(response: str) -> None:
    assert score_one(RewardSpec(name="exact"), ITEM, response) == exact(ITEM, response)


@given(st.text(alphabet="\\boxed{}<>/answer 0123456789.,-e\u2212", max_size=400))
def test_whatever_was_said_an_answer_is_part_of_it_or_there_is_none(response: str) -> None:
    for form in FORMS:
        found = answer_in(response, form)
        if found is None:
            continue
        assert found == found.strip() != ""
        if form == "last-number":
            float(found)
        else:
            assert found in response


@given(PLAIN, PLAIN, PLAIN)
def test_what_is_put_into_the_form_comes_out_of_it(before: str, said: str, after: str) -> None:
    said = said.strip()
    assert answer_in(f"{before}<answer>{said}</answer>{after}", "tags") == (said or None)
    assert answer_in(f"{before}\\boxed{{{said}}}{after}", "boxed") == (said or None)


@given(PLAIN, st.integers(), st.sampled_from([".", "**", " apples", ")", "", "\n"]))
def test_the_last_number_is_read_as_it_was_written(before: str, number: int, after: str) -> None:
    for text in (str(number), f"{number:,}"):
        assert answer_in(f"{before} {text}{after}", "last-number") == str(number)


@pytest.mark.parametrize(
    "part", ["<answer>", "</answer>", "\\boxed{", "\\", "{", "}", "1,", "1,234", "1.", "-", "1e"]
)
def test_long_nonsense_takes_no_time(part: str) -> None:
    for form in FORMS:
        answer_in(part * (400_000 // len(part)), form)
