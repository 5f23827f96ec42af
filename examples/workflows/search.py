"""A policy that may look things up: it searches a small library before it answers.

The library is ``corpus.txt`` beside this file, one fact a line, in an SQLite full-text index in
memory. A search is written as ``<search>words</search>``; the policy then reads the facts that fit
best, which it did not draw and is not trained on, and goes on. The reward is the run's verifier's,
of the last turn's text.

Every agent needs the same ``corpus.txt``: a workflow's fingerprint covers its module, not the files
that it reads. So ``[workflow.settings] corpus_sha256`` may name the digest that it must have.
"""

import hashlib
import re
import sqlite3
from functools import cache
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from edge_agent.workflow import (
    Item,
    MalformedWorkflow,
    Rollout,
    WorkflowContext,
    side_by_side,
    workflow,
)

CORPUS: Final = Path(__file__).with_name("corpus.txt")
SEARCH_ENDS: Final = "</search>"
MAX_WORDS: Final = 16
_SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_WORD = re.compile(r"\w+")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often the policy may search, how many facts it reads each time, what it is told."""

    searches: Annotated[int, Meta(ge=0, le=16)] = 2
    facts: Annotated[int, Meta(ge=1, le=20)] = 3
    instructions: str = "Write <search>words</search> to look something up, or the answer."
    corpus_sha256: str = ""


@workflow("search")
async def search(context: WorkflowContext, item: Item) -> list[Rollout]:
    """One conversation per sibling."""
    settings = context.settings_as(Settings)
    if settings.corpus_sha256 not in ("", _digest()):
        raise MalformedWorkflow(
            f"{CORPUS.name} has the SHA-256 {_digest()}, the run's settings name another; give this"
            " agent the run's file"
        )
    return await side_by_side(
        _converse(context, item, settings, number) for number in range(1, context.group_size + 1)
    )


async def _converse(
    context: WorkflowContext, item: Item, settings: Settings, number: int
) -> Rollout:
    policy = context.policy()
    prompt = policy.encode([{"role": "user", "content": f"{settings.instructions}\n{item.prompt}"}])
    tokens, parts = prompt, []
    for turn in range(settings.searches + 1):
        [said] = await policy.generate(tokens, stop=SEARCH_ENDS, label=f"turn-{turn}.{number}")
        parts.append(said)
        asked = _SEARCH.search(said.text)
        if asked is None or turn == settings.searches:
            break
        facts = "\n".join(find(asked[1], settings.facts)) or "nothing found"
        observed = policy.encode_next(said.tokens, [{"role": "user", "content": facts}])
        parts.append(observed)
        tokens = (*tokens, *said.tokens, *observed.tokens)
    return Rollout(
        prompt_tokens=prompt,
        parts=tuple(parts),
        text=said.text,
        finish_reason=said.completion.finish_reason,
    )


def find(words: str, count: int) -> list[str]:
    """The facts that fit best, at most ``count``; takes well below a millisecond here."""
    terms = _WORD.findall(words)[:MAX_WORDS]
    if not terms:
        return []
    query = " OR ".join(f'"{term}"' for term in terms)  # quoted: nothing of it is an operator
    found = _library().execute(
        "SELECT fact FROM library WHERE library MATCH ? ORDER BY rank, rowid LIMIT ?",
        (query, count),
    )
    return [fact for (fact,) in found]


@cache
def _library() -> sqlite3.Connection:
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.execute("CREATE VIRTUAL TABLE library USING fts5(fact, tokenize='porter')")
    facts = [(line,) for line in CORPUS.read_text(encoding="utf-8").splitlines() if line.strip()]
    database.executemany("INSERT INTO library VALUES (?)", facts)
    return database


@cache
def _digest() -> str:
    return hashlib.sha256(CORPUS.read_bytes()).hexdigest()
