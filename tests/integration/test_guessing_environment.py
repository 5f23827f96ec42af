"""The example of an environment behind HTTP: its server over real sockets, and its workflow."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from scripted_engine import ScriptedEngine, script
from workflow_bench import Bench, crash

from edge_agent.engine import GenerationRequest
from edge_agent.engines.fake_text import decode_text
from edge_agent.workflow import load_workflow
from transport.messages import Item
from transport.trajectory import expand

FOLDER = Path(__file__).parents[2] / "examples" / "workflows"
ITEM = Item(index=4, prompt="Game 4.", answer="")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@contextlib.asynccontextmanager
async def serving(application: web.Application) -> AsyncIterator[str]:
    """The address of a server on a free port."""
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def secret_of(seed: int) -> int:
    import guessing_server

    return guessing_server.random.Random(seed).randint(1, 100)


async def run(bench: Bench, url: str, **changes: Any) -> Any:
    function = load_workflow("guessing:guessing").function
    values = {"items": (ITEM,), "group_size": 1, "settings": {"url": url}, **changes}
    return await bench.run(function, **values)


@pytest.mark.asyncio
async def test_a_player_searches_the_number_and_closes_its_game(tmp_path: Path) -> None:
    import guessing_server

    games, bench = guessing_server.Games(), Bench(tmp_path)

    def bisects(request: GenerationRequest, sibling: int) -> str:
        low, high = 1, 100
        answers = decode_text(request.prompt_tokens).partition("1 to 100.")[2]
        while True:
            middle = (low + high) // 2
            said = answers.removeprefix(f"My guess: {middle}")
            if said == answers:
                return f"My guess: {middle}"
            low, high = (middle + 1, high) if said.startswith("higher") else (low, middle - 1)
            answers = said.removeprefix("higher").removeprefix("lower")

    bench.engine = ScriptedEngine(bisects)
    async with serving(guessing_server.application(games)) as url:
        await run(bench, url, group_size=2)
    first, second = bench.group().sequences
    guesses = sum(policy >= 0 for _, policy, _ in first.segments)
    assert first.reward == second.reward == round(1.0 - (guesses - 1) / 10, 3) > 0
    assert decode_text(first.tokens).endswith(f"My guess: {secret_of(4)}")
    observed = [
        token
        for token, policy in zip(first.tokens, expand(first.segments)[0], strict=True)
        if policy < 0
    ]
    assert set(decode_text(observed).replace("higher", "").replace("lower", "")) == set()
    assert len(games) == 0


@pytest.mark.asyncio
async def test_a_bad_player_is_told_so_and_earns_nothing(tmp_path: Path) -> None:
    import guessing_server

    games, bench = guessing_server.Games(), Bench(tmp_path)
    bench.engine = ScriptedEngine(script("no idea", "", "1000"))
    async with serving(guessing_server.application(games)) as url:
        await run(bench, url, settings={"url": url, "turns": 3})
    (sequence,) = bench.group().sequences
    assert sequence.reward == 0.0
    assert "Write a number from 1 to 100." in decode_text(sequence.tokens)
    assert len(games) == 0


async def nonsense(request: web.Request) -> web.Response:
    return web.json_response({"game": 3})


async def broken(request: web.Request) -> web.Response:
    if request.path == "/start":
        return web.json_response({"game": "g", "observation": "go"})
    raise web.HTTPInternalServerError(text="out of order")


@pytest.mark.parametrize(
    ("handler", "words"),
    [(nonsense, "ValidationError"), (broken, "/step: status 500: out of order")],
)
@pytest.mark.asyncio
async def test_an_environment_that_fails_fails_the_attempt(
    tmp_path: Path, handler: Any, words: str
) -> None:
    bench = Bench(tmp_path)
    bench.engine = ScriptedEngine(lambda *_: "50")
    application = web.Application()
    application.router.add_post("/{verb}", handler)
    async with serving(application) as url:
        failed = crash(await run(bench, url))
    assert failed.code == "environment.failed"
    assert words in failed.detail


@pytest.mark.asyncio
async def test_an_environment_that_is_away_fails_the_attempt(tmp_path: Path) -> None:
    async with serving(web.Application()) as url:
        pass
    bench = Bench(tmp_path)
    bench.engine = ScriptedEngine(lambda *_: "50")
    failed = crash(await run(bench, url))
    assert failed.code == "environment.failed"
    assert "/start" in failed.detail


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/start", {"seed": "7"}, 400),
        ("/start", [1], 400),
        ("/step", {"game": "game-9", "action": "1"}, 404),
        ("/step", {"game": "game-1", "action": 1}, 400),
        ("/step", {"game": "game-1", "action": "1" * 5000}, 413),
        ("/close", {"game": "game-9"}, 200),
    ],
)
@pytest.mark.asyncio
async def test_the_server_bounds_what_it_takes(path: str, body: Any, status: int) -> None:
    import guessing_server

    application = guessing_server.application(guessing_server.Games())
    async with serving(application) as url, aiohttp.ClientSession(url) as session:
        async with session.post("/start", json={"seed": 1}) as response:
            assert (await response.json())["game"] == "game-1"
        async with session.post(path, json=body) as response:
            assert response.status == status


@pytest.mark.asyncio
async def test_the_server_forgets_the_oldest_game(monkeypatch: pytest.MonkeyPatch) -> None:
    import guessing_server

    monkeypatch.setattr(guessing_server, "MAX_GAMES", 2)
    games = guessing_server.Games()
    async with (
        serving(guessing_server.application(games)) as url,
        aiohttp.ClientSession(url) as session,
    ):
        for seed in (1, 2):
            await session.post("/start", json={"seed": seed})
        await session.post("/step", json={"game": "game-1", "action": "x"})
        await session.post("/start", json={"seed": 3})
        assert len(games) == 2
        step = {"action": "x"}
        async with session.post("/step", json={**step, "game": "game-1"}) as response:
            assert response.status == 200
        async with session.post("/step", json={**step, "game": "game-2"}) as response:
            assert response.status == 404
