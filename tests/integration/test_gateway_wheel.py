"""The wheel that boxes install farflow from: pip takes it, and nobody gets anything else."""

import asyncio
import base64
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest
import pytest_asyncio
from gateway_world import GatewayWorld, gateway_world

NAME = "boxed-1.0+cu-py3-none-any.whl"
INFO = "boxed-1.0+cu.dist-info"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def make_wheel(path: Path) -> None:
    """The least that pip installs."""
    files = {
        "boxed.py": "FOUND = True\n",
        f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: boxed\nVersion: 1.0+cu\n",
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            record += f"{name},sha256={digest.decode().rstrip('=')},{len(text)}\n"
        wheel.writestr(f"{INFO}/RECORD", f"{record}{INFO}/RECORD,,\n")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "dist").mkdir()
    make_wheel(folder / "dist" / NAME)
    (folder / "dist" / "other-1.0-py3-none-any.whl").write_bytes(b"secret")
    wheel = str(folder / "dist" / NAME)
    async with gateway_world(folder, tokens=False, wheel=wheel) as found:
        yield found


async def test_pip_installs_from_the_line_that_a_token_comes_with(world: GatewayWorld, tmp_path):
    url = f"{await world.address()}v1/wheel/{NAME.replace('+', '%2B')}"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet",
        "--disable-pip-version-check", "--no-cache-dir", "--target", str(tmp_path / "box"), url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await child.communicate()
    assert child.returncode == 0, said.decode()
    assert (tmp_path / "box" / "boxed.py").read_text() == "FOUND = True\n"


async def test_the_file_comes_whole_with_its_tag_and_nothing_else_does(world: GatewayWorld):
    file = world.world.folder / "dist" / NAME
    async with world.client(None) as client:
        async with client.get(f"/v1/wheel/{NAME}") as reply:
            assert (reply.status, reply.content_type) == (200, "application/zip")
            assert reply.content_length == file.stat().st_size
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
            assert await reply.read() == file.read_bytes()
            tag = reply.headers["ETag"]
        async with client.get(f"/v1/wheel/{NAME}", headers={"If-None-Match": tag}) as reply:
            assert (reply.status, await reply.read()) == (304, b"")
        for name in ("other-1.0-py3-none-any.whl", "..%2Fitems.whl", "x.whl", "server.toml", ""):
            async with client.get(f"/v1/wheel/{name}") as reply:
                assert reply.status == 404, name
        async with client.post(f"/v1/wheel/{NAME}") as reply:
            assert (reply.status, reply.headers["Allow"]) == (405, "GET")


async def test_a_file_that_is_gone_or_none_is_said_and_one_that_is_back_is_given(
    world: GatewayWorld,
):
    file = world.world.folder / "dist" / NAME
    data = file.read_bytes()
    async with world.client(None) as client:
        file.unlink()
        async with client.get(f"/v1/wheel/{NAME}") as reply:
            assert (reply.status, (await reply.json())["code"]) == (503, "wheel.unreadable")
        file.mkdir()
        async with client.get(f"/v1/wheel/{NAME}") as reply:
            assert (reply.status, (await reply.json())["code"]) == (503, "wheel.unreadable")
        file.rmdir()
        file.write_bytes(data + b"more")
        async with client.get(f"/v1/wheel/{NAME}") as reply:
            assert await reply.read() == data + b"more"
