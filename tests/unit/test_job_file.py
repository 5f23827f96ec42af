"""Files of jobs: what a line may hold, and how what is wrong is named."""

import json
from pathlib import Path

import pytest

from farflow.job_file import MAX_LINE_BYTES, read_jobs
from transport.errors import StoreError, TaskError


def written(folder: Path, *lines: str) -> Path:
    path = folder / "jobs.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_lines_become_jobs_with_the_options_where_a_line_says_nothing(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '{"id": "a", "prompt": "1 + 1 =", "answer": "2", "meta": {"k": [1]}, "family": "sums"}',
        "",
        '{"id": "b", "items": [{"prompt": "x"}, {"prompt": "y", "meta": "{}"}], "group_size": 8,'
        ' "require": {"region": ["eu"]}, "temperature": 0.5}',
    )
    first, second = read_jobs(path, {"group_size": 4, "deadline_s": 60.0})
    assert (first.id, first.group_size, first.deadline_s) == ("a", 4, 60.0)
    (item,) = first.items
    assert (item.index, item.prompt, item.answer, item.family) == (0, "1 + 1 =", "2", "sums")
    assert json.loads(item.meta) == {"k": [1]}
    assert (second.group_size, second.deadline_s, second.temperature) == (8, 60.0, 0.5)
    assert [(i.index, i.prompt, i.answer, i.meta) for i in second.items] == [
        (0, "x", "", ""),
        (1, "y", "", "{}"),
    ]
    assert second.require == {"region": ("eu",)}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "2: is not JSON"),
        ("[1]", "2: is no JSON object"),
        ('{"prompt": "x"}', "2: id: missing; give every job one"),
        ('{"id": "b"}', "2: prompt: must be a text"),
        ('{"id": "b", "prompt": ""}', "2: prompt: must be a text"),
        ('{"id": "B", "prompt": "x"}', "2: id: Expected `str` matching"),
        ('{"id": "b", "prompt": "x", "answer": 3}', "2: answer: Expected `str`, got `int`"),
        ('{"id": "b", "prompt": "x", "group_size": 0}', "2: group_size: Expected `int` >= 1"),
        ('{"id": "b", "prompt": "x", "promt": "y"}', "2: promt: unknown field; known are prompt,"),
        ('{"id": "b", "items": []}', "2: items: must be a list of at least one"),
        ('{"id": "b", "items": ["x"]}', r"2: items\[0\]: must be an object"),
        ('{"id": "b", "items": [{"prompt": "x", "n": 1}]}', r"2: items\[0\]\.n: unknown field"),
        ('{"id": "b", "prompt": "x", "items": [{"prompt": "x"}]}', "2: prompt: belongs into"),
        ('{"id": "a", "prompt": "x"}', "2: id: 'a' is in line 1 too"),
        ('{"id": "b", "prompt": "' + "x" * MAX_LINE_BYTES + '"}', "2: longer than"),
        ("[" * 100_000, "2: is not JSON"),
    ],
)
def test_what_is_wrong_is_named_by_file_line_and_field(
    tmp_path: Path, line: str, said: str
) -> None:
    path = written(tmp_path, '{"id": "a", "prompt": "x"}', line)
    with pytest.raises(TaskError, match=rf"jobs\.jsonl:{said}"):
        read_jobs(path, {})


def test_a_file_without_jobs_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="holds no jobs"):
        read_jobs(written(tmp_path, ""), {})
    with pytest.raises(StoreError, match="cannot read"):
        read_jobs(tmp_path, {})
