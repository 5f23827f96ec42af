"""The weight store's files over HTTP, with a real client and real sockets."""

import asyncio
import contextlib
import datetime
import gc
import hashlib
import ipaddress
import socket
import ssl

import aiohttp
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from publisher import Trainer
from service_world import service_world
from weight_folder import KEY, POLICY, TRUSTED, WeightFolder
from yarl import URL

from scheduler.config import SchedulerTable
from scheduler.http_access import TOKEN_NAME, load_token
from scheduler.weight_http import WeightHttp
from scheduler.weight_store import serve
from transport.errors import ConfigError
from transport.keys import trainer_name
from transport.messages import Plane
from transport.runtime.config import convert
from transport.weights.manifest import SignedManifest, verify


@contextlib.asynccontextmanager
async def serving(tmp_path, **options):
    """A served folder of four versions: (folder, client session with the token, server)."""
    made = await asyncio.to_thread(WeightFolder, tmp_path)
    server = WeightHttp(made.folder, tmp_path / TOKEN_NAME, host="127.0.0.1", port=0, **options)
    running = asyncio.create_task(server.run())
    try:
        await asyncio.wait({running, server.port}, timeout=10.0, return_when="FIRST_COMPLETED")
        port = server.port.result()
        headers = {"Authorization": f"Bearer {load_token(tmp_path / TOKEN_NAME)}"}
        base = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession(base, headers=headers) as client:
            yield made, client, server
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_reader_finds_the_head_and_verifies_all_of_it(tmp_path):
    async with serving(tmp_path) as (made, client, _):
        async with client.get("/v1/policies") as reply:
            assert await reply.json() == {"policies": [{"policy": POLICY, "head": 3}]}
        async with client.get(f"/v1/{POLICY}/versions") as reply:
            rows = (await reply.json())["versions"]
        assert [(row["version"], row["parent"]) for row in rows] == [
            (0, None), (1, 0), (2, 1), (3, 2),
        ]  # fmt: skip
        for number in (0, 3):
            async with client.get(f"/v1/{POLICY}/versions/{number}/signed") as reply:
                assert reply.content_type == "application/msgpack"
                signed = msgspec.msgpack.decode(await reply.read(), type=SignedManifest)
            manifest = verify(signed, TRUSTED)
            async with client.get(f"/v1/{POLICY}/versions/{number}") as reply:
                shown = await reply.json()
            assert shown["digest"] == manifest.digest == made.publications[number].manifest.digest
            assert shown["key_id"] == KEY.key_id
            assert [entry["name"] for entry in shown["files"]] == [e.name for e in manifest.files]
            for entry in manifest.files:
                async with client.get(f"/v1/files/{entry.digest}") as reply:
                    assert (reply.status, reply.headers["ETag"]) == (200, f'"{entry.digest}"')
                    data = await reply.read()
                assert hashlib.sha256(data).hexdigest() == entry.digest
                assert data == made.publications[number].files[entry.name]


@pytest.mark.asyncio
async def test_ranges_head_and_conditions_are_those_of_http(tmp_path):
    async with serving(tmp_path) as (made, client, _):
        manifest = made.publications[0].manifest
        [entry] = manifest.of_kind("snapshot")
        data, path = made.publications[0].files[entry.name], f"/v1/files/{entry.digest}"
        size = len(data)

        async def ask(method="GET", **headers):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            async with client.request(method, path, headers=named) as reply:
                return reply.status, reply.headers, await reply.read()

        for asked, start, end in (
            ("bytes=0-99", 0, 100), ("bytes=100-", 100, size), ("bytes=-7", size - 7, size),
            (f"bytes=5-{10 * size}", 5, size), ("bytes=3-3", 3, 4),
        ):  # fmt: skip
            status, headers, got = await ask(Range=asked)
            assert (status, got) == (206, data[start:end])
            assert headers["Content-Range"] == f"bytes {start}-{end - 1}/{size}"
        for asked in (f"bytes={size}-", "bytes=9-3", "bytes=0-1,4-5", "lines=1-2", "bytes=-0"):
            status, headers, _ = await ask(Range=asked)
            assert (status, headers["Content-Range"]) == (416, f"bytes */{size}")
        status, headers, got = await ask("HEAD")
        assert (status, headers["Content-Length"], got) == (200, str(size), b"")
        assert headers["Accept-Ranges"] == "bytes"
        assert (await ask(If_None_Match=f'"{entry.digest}"'))[0] == 304
        assert (await ask(Range="bytes=0-9", If_Range=f'"{entry.digest}"'))[2] == data[:10]
        assert (await ask(Range="bytes=0-9", If_Range='"other"'))[2] == data
        assert (await ask("POST"))[0] == 405


@pytest.mark.asyncio
async def test_without_the_token_nothing_is_told(tmp_path):
    async with serving(tmp_path) as (made, client, server):
        token = load_token(tmp_path / TOKEN_NAME)
        digest = made.publications[1].manifest.files[0].digest
        wrong = (
            "",
            "Bearer",
            "Bearer x",
            f"Basic {token}",
            f"Bearer {token}x",
            f"Bearer {token[1:]}",
        )
        for path in ("/v1/policies", f"/v1/files/{digest}", "/v1/files/" + "0" * 64, "/nothing"):
            for header in wrong:
                async with client.get(path, headers={"Authorization": header}) as reply:
                    assert reply.status == 401
                    assert reply.headers["WWW-Authenticate"] == "Bearer"
                    assert (await reply.json())["code"] == "http.unauthorised"
        assert server.counters["http.unauthorised"] == 4 * len(wrong)
        async with client.get(
            "/v1/policies", headers={"Authorization": f"bearer {token}"}
        ) as reply:
            assert reply.status == 200


@pytest.mark.asyncio
async def test_what_is_not_there_and_tricks_with_paths_are_not_found(tmp_path):
    async with serving(tmp_path) as (made, client, _):
        digest = made.publications[1].manifest.files[0].digest
        (made.folder / "secret").write_text("s")
        made.blob(digest).with_name("a" * 64 + ".part").write_bytes(b"unfinished")
        for path in (
            "/v1/files/" + "0" * 64,
            f"/v1/files/{digest[:-1]}",
            f"/v1/files/{digest.upper()}",
            f"/v1/files/{digest}.part",
            "/v1/files/..%2f..%2fsecret",
            "/v1/files/../../../secret",
            "/v1/files/%2e%2e/secret",
            "/v1/files/" + "a" * 64,
            f"/v1/{POLICY}/versions/99",
            f"/v1/{POLICY}/versions/-1",
            "/v1/r/other/versions",
            "/v1/%2e%2e/%2e%2e/versions",
            "/",
        ):
            url = URL(str(client._base_url.with_path("")).rstrip("/") + path, encoded=True)
            async with client.get(url) as reply:
                assert reply.status == 404, path
                said = await reply.read()
                assert b"secret" not in said
                assert bytes(tmp_path) not in said


@pytest.mark.asyncio
async def test_damaged_files_and_those_beyond_the_bounds_are_refused(tmp_path, caplog):
    bad: set[str] = set()
    async with serving(tmp_path, damaged=bad.__contains__) as (made, client, server):
        digest = made.publications[1].manifest.files[0].digest
        async with client.get(f"/v1/files/{digest}") as reply:
            assert reply.status == 200
        bad.add(digest)
        async with client.get(f"/v1/files/{digest}") as reply:
            assert reply.status == 404
        server._max_transfers = 0
        async with client.get("/v1/policies") as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "2")
        server._max_transfers = 1
        server.listener.max_connections = 1
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.ClientSession() as other, other.get(client._base_url) as reply:
                await reply.read()
        assert server.counters["too_many_connections"] >= 1
        async with client.get("/v1/policies") as reply:
            assert reply.status == 200
    gc.collect()  # a task that died unheard is reported when it goes
    assert not caplog.records


@pytest.mark.asyncio
async def test_a_reader_that_leaves_is_no_traceback_in_the_log(tmp_path, caplog, monkeypatch):
    async def left(response, request, data):
        request.transport.abort()
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr("scheduler.weight_http.write", left)
    async with serving(tmp_path) as (made, client, _):
        digest = made.publications[1].manifest.files[0].digest
        with pytest.raises(aiohttp.ClientError):
            async with client.get(f"/v1/files/{digest}") as reply:
                await reply.read()
        async with client.get("/v1/policies") as reply:
            assert reply.status == 200
    assert not caplog.records


@pytest.mark.asyncio
async def test_nonsense_is_answered_without_a_traceback_in_the_log(tmp_path, caplog):
    async with serving(tmp_path) as (_, _, server):
        for sent in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\nHost\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port.result())
            writer.write(sent)
            assert (await reader.read()).startswith(b"HTTP/1.0 400")
            writer.close()
            await writer.wait_closed()
    assert not caplog.records


@pytest.mark.asyncio
async def test_a_taken_port_or_unusable_secret_is_an_error_with_a_remedy(tmp_path):
    async with serving(tmp_path) as (made, _, server):
        second = WeightHttp(
            made.folder, tmp_path / TOKEN_NAME, host="127.0.0.1", port=server.port.result()
        )
        with pytest.raises(ConfigError, match="choose another port"):
            await second.run()
        second.port.cancel()
    assert (tmp_path / TOKEN_NAME).stat().st_mode & 0o777 == 0o600
    (tmp_path / TOKEN_NAME).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_token(tmp_path / TOKEN_NAME)
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="weights_http_certificate"):
        WeightHttp(
            made.folder,
            tmp_path / "token",
            host="0.0.0.0",  # noqa: S104
            port=0,
            certificate=str(tmp_path / "cert.pem"),
            key=str(tmp_path / "cert.pem"),
        )


def self_signed(folder):
    """Certificate and key of 127.0.0.1, as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "weights")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(folder / "cert.pem"), str(folder / "key.pem")


@pytest.mark.asyncio
async def test_with_a_certificate_only_tls_is_spoken(tmp_path):
    certificate, key = self_signed(tmp_path)
    async with serving(tmp_path, certificate=certificate, key=key) as (_, client, server):
        trust = ssl.create_default_context(cafile=certificate)
        url = f"https://127.0.0.1:{server.port.result()}/v1/policies"
        async with client.get(URL(url), ssl=trust) as reply:
            assert (await reply.json())["policies"] == [{"policy": POLICY, "head": 3}]
        with pytest.raises(aiohttp.ClientError):
            await client.get("/v1/policies")  # in the clear


def test_beyond_this_machine_weights_go_over_tls_or_not_at_all():
    for host in ("127.0.0.1", "::1", "localhost"):
        SchedulerTable(weights_http_port=7780, weights_http_host=host)
    for host in ("0.0.0.0", "10.0.0.1", "::", "weights.example"):  # noqa: S104
        SchedulerTable(weights_http_host=host)  # off
        tls = {"weights_http_certificate": "c.pem", "weights_http_key": "k.pem"}
        SchedulerTable(weights_http_port=7780, weights_http_host=host, **tls)
        with pytest.raises(ConfigError, match="set weights_http_certificate"):
            convert({"weights_http_port": 7780, "weights_http_host": host}, SchedulerTable)
    with pytest.raises(ConfigError, match="belong together"):
        convert({"weights_http_key": "k.pem"}, SchedulerTable)


@pytest.mark.asyncio
async def test_the_weight_store_serves_what_a_trainer_published(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with service_world(tmp_path) as world:
        config = world.config(weights_http_port=port)
        async with world.serving(serve, config) as plane_port:
            trainer = Trainer(tmp_path)
            link = world.link(trainer_name(trainer.policy), Plane.WEIGHTS, plane_port)
            await trainer.publish(link, trainer.first)
            token = load_token(tmp_path / "scheduler" / "weight-store" / TOKEN_NAME)
            headers = {"Authorization": f"Bearer {token}"}
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as client:
                for entry in trainer.first.manifest.files:
                    async with client.get(f"/v1/files/{entry.digest}") as reply:
                        assert await reply.read() == trainer.first.files[entry.name]
