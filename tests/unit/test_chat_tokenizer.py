"""Texts, conversations and stop texts through a real tokenizer and templates of several kinds."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch_models import EXAMPLE, VOCABULARY

from edge_agent.engines.chat_tokenizer import ChatTokenizer
from transport.errors import GenerationFailed

pytestmark = pytest.mark.slow

PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>\n{% endif %}" + PLAIN
STRICT = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('ask first') }}{% endif %}" + PLAIN
)
FORGETFUL = "{{ messages[-1]['content'] }}<|assistant|>"
THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last %}<think></think>{% endif %}"
    "{{ m['content'] | trim }}<|end|>\n{% endfor %}<|assistant|>"
)
SWITCHED = (
    PLAIN + "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
"""As Qwen3's: an answer without thinking begins behind an empty thought."""
PICKY = "{% if effort is defined %}{{ effort + 1 }}{% endif %}" + PLAIN
QUESTION = {"role": "user", "content": "12 + 34 ="}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
END = 1
Make = Callable[[str | None], ChatTokenizer]


@pytest.fixture
def make() -> Make:
    from transport.runtime.model_folder import load_tokenizer

    def made(template: str | None) -> ChatTokenizer:
        tokenizer = load_tokenizer(EXAMPLE, vocabulary=VOCABULARY)
        tokenizer.chat_template = template
        return ChatTokenizer("run/p", tokenizer)

    return made


@pytest.mark.parametrize("template", [PLAIN, WITH_TOOLS, STRICT, THINKING])
@pytest.mark.parametrize("ended", [False, True])
def test_a_conversation_grows_as_its_template_has_it(
    make: Make, template: str, ended: bool
) -> None:
    tokenizer = make(template)
    more = [{"role": "tool", "content": "46\n"}, {"role": "user", "content": "Sure?"}]
    answer = (*tokenizer.encode_chat([{"role": "user", "content": "46"}])[1:3],)
    answer = (*answer, END) if ended else answer
    behind = tokenizer.encode_next(answer, more)
    whole = tokenizer.decode((*tokenizer.encode(QUESTION["content"]), *answer, *behind))
    assert behind.count(END) == (2 if ended else 3)
    assert (behind[0] == END) is not ended
    assert whole.endswith("Sure?\n")
    assert tokenizer.encode_chat([QUESTION]) == tokenizer.encode(QUESTION["content"])


def test_tools_are_shown_or_the_request_is_refused(make: Make) -> None:
    shown = make(WITH_TOOLS).encode_chat([QUESTION], [TOOL])
    assert '"name": "calculator"' in make(WITH_TOOLS).decode(shown)
    with pytest.raises(GenerationFailed, match=r"run/p: its chat template shows no tools"):
        make(PLAIN).encode_chat([QUESTION], [TOOL])


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (None, [QUESTION], "no chat template"),
        (STRICT, [{"role": "system", "content": "x"}], "ask first"),
        ("{{ 1 / 0 }}", [QUESTION], "refuses these messages"),
        ("{{ messages[9]['content'] + 1 }}", [QUESTION], "refuses these messages"),
        ("{% for %}", [QUESTION], "refuses these messages"),
    ],
)
def test_a_template_that_fails_is_a_failed_request(
    make: Make, template: str | None, messages: list[dict[str, str]], words: str
) -> None:
    with pytest.raises(GenerationFailed, match=words):
        make(template).encode_chat(messages)


def test_a_template_that_forgets_answers_cannot_go_on(make: Make) -> None:
    with pytest.raises(GenerationFailed, match="does not show earlier answers"):
        make(FORGETFUL).encode_next((5,), [QUESTION])


def test_a_template_that_leaves_a_message_out_says_so(make: Make) -> None:
    """Else a tool's output would vanish, and the policy be trained on calls without answers."""
    only = "{% for m in messages if m.role != 'tool' %}{{ m.content }}|{% endfor %}"
    with pytest.raises(GenerationFailed, match="shows no messages of tool"):
        make(only).encode_next((5,), [{"role": "tool", "content": "41"}])
    assert "41" in make(only).decode(
        make(only).encode_next((5,), [{"role": "user", "content": "41"}])
    )


def test_without_a_template_a_text_is_taken_as_it_is(make: Make) -> None:
    bare = make(None)
    assert bare.decode(bare.encode("12 + 34 =")) == "12 + 34 ="
    with pytest.raises(GenerationFailed, match="no chat template"):
        bare.encode_next((5,), [QUESTION])


def test_a_stop_text_is_found_with_the_token_that_completes_it(make: Make) -> None:
    """As often as not across tokens, characters of several bytes and special tokens."""
    tokenizer, rng = make(PLAIN), random.Random(1)
    found = 0
    for _ in range(100):
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 60))]
        if rng.random() < 0.5:
            at = rng.randrange(len(tokens) + 1)
            tokens[at:at] = [0] * rng.randrange(30)  # decodes to nothing
        text = tokenizer.decode(tokens)
        start = rng.randrange(len(text) + 1)
        stop = ("never there", text[start : start + rng.randrange(1, 6)] or "nor this")
        said = [tokenizer.decode(tokens[: n + 1]) for n in range(len(tokens))]
        first = next((n for n, words in enumerate(said) if any(s in words for s in stop)), None)
        ours = next(
            (n for n in range(len(tokens)) if tokenizer.ends_in(tokens[: n + 1], stop)), None
        )
        assert ours == first, (tokens, stop)
        found += first is not None
    assert found > 40


def test_many_threads_may_use_one_tokenizer(make: Make) -> None:
    tokenizer = make(PLAIN)
    expected = tokenizer.encode("12 + 34 =")
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda _: tokenizer.decode(tokenizer.encode("12 + 34 =")), range(200))
        tokens = pool.map(lambda _: tokenizer.encode("12 + 34 ="), range(200))
        assert set(texts) == {tokenizer.decode(expected)}
        assert set(tokens) == {expected}


def test_the_arguments_of_a_template_reach_it_wherever_it_is_applied(make: Make) -> None:
    tokenizer, plain = make(SWITCHED), make(PLAIN)
    off = {"enable_thinking": False}
    asked, more = QUESTION["content"], [{"role": "user", "content": "Sure?"}]
    for given in (tokenizer.encode(asked, off), tokenizer.encode_chat([QUESTION], (), off)):
        assert tokenizer.decode(given).endswith("<think>\n\n</think>\n\n")
    behind = tokenizer.encode_next((5,), more, off)
    assert tokenizer.decode(behind).endswith("<think>\n\n</think>\n\n")
    # Without them, and where a template knows no such argument, every byte is as it was.
    assert tokenizer.encode(asked) == plain.encode(asked) == plain.encode(asked, off)
    assert tokenizer.encode(asked, {"enable_thinking": True}) == plain.encode(asked)
    assert tokenizer.encode_next((5,), more) == plain.encode_next((5,), more, off)


def test_tools_are_told_from_arguments(make: Make) -> None:
    with pytest.raises(GenerationFailed, match="shows no tools"):
        make(SWITCHED).encode_chat([QUESTION], [TOOL], {"enable_thinking": False})


def test_a_template_that_refuses_an_argument_names_the_setting(make: Make) -> None:
    picky = make(PICKY)
    with pytest.raises(GenerationFailed, match=r"policies\.p\.chat_template_kwargs = .*'effort'"):
        picky.encode_chat([QUESTION], (), {"effort": "high"})
    assert picky.encode(QUESTION["content"]) == make(PLAIN).encode(QUESTION["content"])
    with pytest.raises(GenerationFailed, match=r"no chat template for policies\.p\.chat_template"):
        make(None).encode("12 + 34 =", {"effort": 1})
