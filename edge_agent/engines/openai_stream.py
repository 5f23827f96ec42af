"""One sequence at a server: what is asked of it, and what comes back.

What always holds: the connection is closed when nobody waits for the sequence any more, which
aborts it at the server; a sequence none of whose tokens has come before new weights did begins anew
with them; what broke off is drawn again from its start, with the same seed.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any, Final

import msgspec

from edge_agent.engine import Completion, GenerationRequest
from edge_agent.engines.openai_served import Served
from edge_agent.engines.openai_wire import NO_LOGPROB, Piece, ServerAway, ask, fault, read_answer
from transport.errors import EngineCrashed, GenerationFailed

_ERROR_BYTES: Final = 64 * 1024
_ROUNDING: Final = 1e-3  # a log-probability of a token that is certain may be so much above 0


class Stale(Exception):
    """It is to begin anew."""


class Drawing:
    """Sibling ``sibling`` of a request, drawn in ``task``. ``drawn`` is told of new tokens, as many
    as came."""

    def __init__(
        self,
        served: Served,
        request: GenerationRequest,
        sibling: int,
        task: asyncio.Task[Any],
        drawn: Callable[[int], None],
    ) -> None:
        self.task = task
        self._served = served
        self._request = request
        self._sibling = sibling
        self._drawn = drawn
        self._answer: Any = None
        self._stale = False
        self._pieces: list[Piece] = []
        self._left = 0

    def begin_anew(self) -> None:
        """Unless it has begun: end it, so that ``run`` raises Stale."""
        if not self._pieces:
            self._stale = True
            if self._answer is not None:
                self._answer.close()

    async def run(self, session: Any, version: int, salt: str) -> Completion:
        """Draw it, from its start; ``version`` is that of weights that never change.

        Raises:
            Stale: new weights came before its first token.
            ServerAway, ServerBusy: try again.
            EngineCrashed: weights drew it that are none of ours.
            GenerationFailed: the server refuses it, or what came is not to be used.
        """
        import aiohttp

        self._pieces, self._stale = [], False
        self._left = self._request.sampling.max_new_tokens
        served = self._served
        body = ask(served.path, served.model, self._request, self._sibling, salt)
        url = f"{served.address.url}{served.path}"
        try:
            async with session.post(
                url,
                data=msgspec.json.encode(body),
                headers=served.address.headers,
                allow_redirects=False,  # nobody but the server gets the key and the prompt
            ) as answer:
                self._answer = answer
                if answer.status != 200:
                    data = await answer.content.read(_ERROR_BYTES)
                    raise fault(answer.status, data, answer.headers.get("Retry-After"), url)
                await self._read(answer, url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._not_stale()
            raise ServerAway(f"{url}: {type(error).__name__}: {error}") from error
        finally:
            self._answer = None
        return self._completion(version)

    async def _read(self, answer: Any, url: str) -> None:
        from aiohttp.http_exceptions import LineTooLong

        try:
            async for line in answer.content:
                self._not_stale()
                data = line.removeprefix(b"data:").strip()
                if data == line.strip():
                    continue  # no data: a comment, or nothing
                piece = None if data == b"[DONE]" else read_answer(data, url)
                if piece is not None:
                    self._take(piece, url)
        except (LineTooLong, ValueError) as error:  # which of them is aiohttp's version's choice
            raise GenerationFailed(f"{url}: the server's answer is malformed: {error}") from error
        self._not_stale()
        if not self._pieces or self._pieces[-1].finish_reason is None:
            raise ServerAway(f"{url}: the answer broke off")

    def _take(self, piece: Piece, url: str) -> None:
        self._left -= len(piece.tokens)
        if self._left < 0 or not all(0 <= each < self._served.vocabulary for each in piece.tokens):
            raise GenerationFailed(f"{url}: the server gives too many tokens, or unknown ones")
        self._pieces.append(piece)
        self._drawn(len(piece.tokens))

    def _not_stale(self) -> None:
        if self._stale:
            raise Stale

    def _completion(self, version: int) -> Completion:
        name, last = self._request.request_id, self._pieces[-1]
        tokens = tuple(token for piece in self._pieces for token in piece.tokens)
        logprobs = tuple(number for piece in self._pieces for number in piece.logprobs)
        if last.finish_reason not in ("stop", "length"):
            raise GenerationFailed(f"{name}: the server ended it: {last.finish_reason}")
        if not all(math.isfinite(number) and number > NO_LOGPROB for number in logprobs):
            raise GenerationFailed(f"{name}: the server's logits are not finite")
        if not tokens:
            raise GenerationFailed(f"{name}: the server ended it without a token")
        if max(logprobs) > _ROUNDING:
            raise GenerationFailed(
                f"{name}: the server gives a log-probability of {max(logprobs):g}: that is none"
            )
        versions = (version,) * len(tokens)
        if self._served.weights is not None:
            versions = self._versions(last, len(tokens))
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            versions=versions,
            finish_reason="stop" if last.finish_reason == "stop" else "length",
        )

    def _versions(self, last: Piece, tokens: int) -> tuple[int, ...]:
        weights = self._served.weights
        versions: list[int] = []
        for span in last.spans:
            number = None if weights is None else weights.version_of(span.version)
            if number is None:
                raise EngineCrashed(
                    f"{self._request.request_id}: weights {span.version!r} drew it, which are not"
                    " this agent's: the server was started anew, or others write to it, too"
                )
            if span.start != len(versions) or not span.start < span.end <= tokens:
                versions = []
                break
            versions += [number] * (span.end - span.start)
        if len(versions) != tokens:
            raise GenerationFailed(
                f"{self._request.request_id}: {tokens} tokens, versions of {len(versions)}"
            )
        return tuple(versions)
