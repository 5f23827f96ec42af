"""What goes on beside the gateway's port: it outlives trouble, or its end is everybody's."""

import asyncio
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from scheduler.gateway import access, service
from scheduler.gateway.access import HttpRole, TokenBook, create_token, revoke_token
from transport.errors import StoreError

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(TokenBook, "SCAN_INTERVAL_S", 0.01)


class Keeping:
    """The keeper of ``book``'s tokens while inside."""

    def __init__(self, book) -> None:
        self.hung_up = 0
        gateway = SimpleNamespace(rates=SimpleNamespace(keep=lambda names: None))
        world = SimpleNamespace(book=book, submitters=SimpleNamespace(keep=self._hang_up))
        self._keep = service._keep(gateway, world)  # type: ignore[arg-type]

    async def _hang_up(self, names: set[str]) -> None:
        self.hung_up += 1
        raise ValueError("no way to say goodbye")

    async def __aenter__(self) -> "Keeping":
        self.task = asyncio.create_task(self._keep)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert not self.task.done()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(condition) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("error", [RecursionError("deep"), OSError(24, "Too many open files")])
async def test_tokens_are_looked_at_again_whatever_a_look_met(tmp_path, monkeypatch, error):
    secret = create_token(tmp_path, "ada", HttpRole.VIEWER)
    book = TokenBook(tmp_path)
    book.refresh()
    broken = monkeypatch.context()

    def fails(keys):
        raise error

    with capture_logs() as logs:
        async with Keeping(book) as keeping:
            with broken as patch:
                patch.setattr(access, "all_tokens", fails)
                new = create_token(tmp_path, "bob", HttpRole.VIEWER)
                await until(lambda: [one for one in logs if "unreadable" in one["event"]])
                await asyncio.sleep(0.05)
            await until(lambda: book.lookup(new))  # though the folder did not change since
            revoke_token(tmp_path, "ada")
            await until(lambda: not book.lookup(secret))
            await until(lambda: keeping.hung_up > 2)
    said = [one for one in logs if one["event"] == "http.tokens_unreadable"]
    assert len(said) <= 2, "not at every look"


async def test_nobody_is_let_in_when_tokens_cannot_be_read_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(TokenBook, "STALE_LOOKS", 5)
    secret = create_token(tmp_path, "ada", HttpRole.VIEWER)
    book = TokenBook(tmp_path)
    book.refresh()
    looks = []

    def fails():
        looks.append(book.lookup(secret))
        raise StoreError("cannot read")

    async with Keeping(book):
        with monkeypatch.context() as patch:
            patch.setattr(book, "refresh", fails)
            await until(lambda: len(looks) > 6)
        assert all(looks[:5]), "for a while they count"
        assert not looks[6]
        await until(lambda: book.lookup(secret))


async def test_a_token_that_was_skipped_is_looked_at_again_and_said_once(tmp_path):
    secret = create_token(tmp_path, "ada", HttpRole.VIEWER)
    file = tmp_path / "http" / "ada.toml"
    file.chmod(0o644)
    book = TokenBook(tmp_path)
    with capture_logs() as logs:
        for _ in range(3 * TokenBook.SKIPPED_LOOKS):
            book.refresh()
        assert not book.lookup(secret)
        file.chmod(0o600)  # which changes neither its time nor its size
        for _ in range(TokenBook.SKIPPED_LOOKS):
            book.refresh()
    assert book.lookup(secret)
    assert [one["event"] for one in logs] == ["http.token_skipped"]


@pytest.mark.parametrize("error", [ValueError("unforeseen"), None])
async def test_one_part_that_ends_ends_all_with_its_error(error):
    others = []

    async def goes_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            others.append("ended")

    async def ends() -> None:
        await asyncio.sleep(0)
        if error is not None:
            raise error

    with capture_logs() as logs, pytest.raises(type(error or RuntimeError())):
        await service._together({"http": goes_on(), "tokens": ends(), "mqtt": goes_on()})
    assert others == ["ended", "ended"]
    assert [(one["event"], one["part"]) for one in logs] == [("gateway.part_ended", "tokens")]
