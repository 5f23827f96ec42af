"""An environment behind HTTP: games of guessing a number.

    python examples/workflows/guessing_server.py --port 8123

    POST /start  {"seed": 7}                 -> {"game": G, "observation": TEXT}
    POST /step   {"game": G, "action": "50"} -> {"observation": TEXT, "reward": 0.0, "done": false}
    POST /close  {"game": G}                 -> {}

The number is 1 to 100 and follows from the seed. Every guess is answered with ``higher``, ``lower``
or ``right``; the reward of a right guess is 1 less a tenth for each guess before it, and a game
ends with it or after ``GUESSES``. What is wrong with a request is said with status 400, an unknown
game with 404. At most ``MAX_GAMES`` are open: the one that was touched longest ago is forgotten
first, so clients that never close theirs cost nothing.
"""

import argparse
import itertools
import random
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

GUESSES: Final = 7
MAX_GAMES: Final = 4096
MAX_REQUEST_BYTES: Final = 4096


@dataclass(slots=True)
class Game:
    """One number to be guessed."""

    secret: int
    guesses: int = 0
    done: bool = False

    def step(self, action: str) -> dict[str, Any]:
        """What a guess leads to."""
        self.guesses += 1
        guess = int(action) if action.isascii() and action.isdigit() and len(action) < 10 else None
        right = guess == self.secret
        self.done = right or self.guesses == GUESSES
        return {
            "observation": self._said(guess),
            "reward": round(1.0 - (self.guesses - 1) / 10, 3) if right else 0.0,
            "done": self.done,
        }

    def _said(self, guess: int | None) -> str:
        if guess is None:
            return "Write a number from 1 to 100."
        if guess == self.secret:
            return "right"
        return "higher" if guess < self.secret else "lower"


class Games:
    """The open games by name, longest untouched first."""

    def __init__(self) -> None:
        self._games: dict[str, Game] = {}
        self._numbers = itertools.count(1)

    async def start(self, request: web.Request) -> web.Response:
        seed = (await _asked(request, "seed", int))["seed"]
        name = f"game-{next(self._numbers)}"
        self._games[name] = Game(random.Random(seed).randint(1, 100))  # noqa: S311 - a game
        if len(self._games) > MAX_GAMES:
            del self._games[next(iter(self._games))]
        return web.json_response({"game": name, "observation": "Guess my number, 1 to 100."})

    async def step(self, request: web.Request) -> web.Response:
        asked = await _asked(request, "action", str)
        game = self._games.pop(str(asked.get("game")), None)
        if game is None:
            raise web.HTTPNotFound(text="no such game: it was closed or forgotten, or never was")
        self._games[asked["game"]] = game
        if game.done:
            raise web.HTTPBadRequest(text="the game is over: close it")
        return web.json_response(game.step(asked["action"].strip()))

    async def close(self, request: web.Request) -> web.Response:
        asked = await _asked(request, "game", str)
        self._games.pop(asked["game"], None)
        return web.json_response({})

    def __len__(self) -> int:
        return len(self._games)


async def _asked(request: web.Request, key: str, kind: type) -> dict[str, Any]:
    """The request's object, with a value of that type under ``key``."""
    try:
        asked = await request.json()
    except ValueError:
        asked = None
    if not isinstance(asked, dict) or type(asked.get(key)) is not kind:
        raise web.HTTPBadRequest(text=f"send an object with {key!r}, of type {kind.__name__}")
    return asked


def application(games: Games) -> web.Application:
    """The server."""
    made = web.Application(client_max_size=MAX_REQUEST_BYTES)
    made.add_routes(
        [
            web.post("/start", games.start),
            web.post("/step", games.step),
            web.post("/close", games.close),
        ]
    )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8123)
    arguments = parser.parse_args()
    web.run_app(application(Games()), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
