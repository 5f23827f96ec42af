"""A run's file over HTTP: what is refused before it keeps anybody waiting, and what is not."""

import pytest

from scheduler.gateway.routes_orders import MAX_DOTS, run_from_toml
from transport.errors import ConfigError
from transport.runs import MAX_RUN_BYTES
from transport.runtime.toml_text import MAX_DEPTH

RUN = """
[run]
name = "sums"
[task]
source = "jsonl"
path = "/data/sums.jsonl"
%s
[policies.solver]
model = "/m"
[workflow]
policies = ["solver"]
"""
DOTS = "." * (MAX_DOTS + 1)
LONG = "a." * MAX_DOTS + "a.a"


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "text",
    [
        "a." * 90_000 + "a = 1",
        "[run]\n" + "a . " * 45_000 + "a = 1",
        '"a".' * 40_000 + "a = 1",
        "['a'." + "a." * 90_000 + "a]",
        "b = {" + "a." * 90_000 + "a = 1}",
        "b = [[{" + LONG + " = 1}]]",
        'b = """\n"""\n' + LONG + " = 1",
        'b = """""\\""" """""\n' + LONG + " = 1",
        "b = '''''\\'''''\n" + LONG + " = 1",
        "b = '\\'\n" + LONG + " = 1",
        'b = "" # "\r\n' + LONG + " = 1",
    ],
    ids=lambda text: text[:20],
)
def test_a_long_key_is_refused_at_once_wherever_it_is(text):
    with pytest.raises(ConfigError, match="dots"):
        run_from_toml(text)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#" * (MAX_RUN_BYTES + 1), "characters"),
        ("a = " + "[" * MAX_DEPTH + "]" * MAX_DEPTH, "within each other"),
        ("a = " + "{a=" * 60_000, "within each other"),
    ],
)
def test_what_is_too_long_or_too_deep_for_a_run_is_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        run_from_toml(text)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", ['"""a"' + '\\"""b"' * 20_000, "a = '''" + "'' " * 50_000])
def test_strings_that_do_not_end_cost_one_look(text):
    with pytest.raises(ValueError, match=r"\(at "):
        run_from_toml(text)


@pytest.mark.parametrize(
    "line",
    [
        f"instruction = '{DOTS}'",
        f'instruction = "\\"{DOTS}" # {DOTS}',
        f'instruction = """\\"""{DOTS}""\n{"[" * 40}"""""',
        f"instruction = '''\n\\''{DOTS}\n{DOTS}'''",
        f"# it's {DOTS} {'{' * 40}",
        "settings = {numbers = [" + "1.5, " * 40 + "]}",
    ],
)
def test_dots_and_brackets_of_texts_comments_and_numbers_do_not_count(line):
    assert run_from_toml(RUN % line).name == "sums"
