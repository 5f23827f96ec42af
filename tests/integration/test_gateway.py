"""The HTTP interface of a real scheduler daemon: every route, every role, what is refused."""

import asyncio
import gzip
import json

import msgspec
import pytest
import pytest_asyncio
from gateway_world import GatewayWorld, gateway_world, read_events
from publisher import Trainer
from service_world import POLICY, WAIT_S

from scheduler.gateway.access import HttpRole, create_token, revoke_token
from scheduler.gateway.routes import ROUTES, openapi
from transport.keys import trainer_name
from transport.messages import JobReceipts, Plane, Results, VersionServing
from transport.runs import EvaluationSpec, PolicySpec, RunSpec, TaskSpec, WorkflowSpec
from transport.runtime.clock import SystemClock
from transport.status import SchedulerStatus

pytestmark = pytest.mark.asyncio(loop_scope="module")

VIEWER, OPERATOR, SUBMITTER = "viewer", "operator", "submitter"
MEANT = {
    ("GET", "/v1/status"): {VIEWER, OPERATOR},
    ("GET", "/v1/runs"): {VIEWER, OPERATOR},
    ("GET", "/v1/agents"): {VIEWER, OPERATOR},
    ("GET", "/v1/explain/{subject}"): {VIEWER, OPERATOR},
    ("GET", "/v1/events"): {VIEWER, OPERATOR},
    ("GET", "/v1/versions/{run}/{policy}"): {VIEWER, OPERATOR},
    ("GET", "/v1/agents/{agent}/logs"): {OPERATOR},
    ("GET", "/v1/dead"): {OPERATOR},
    ("POST", "/v1/runs"): {OPERATOR},
    ("POST", "/v1/runs/{run}/{command}"): {OPERATOR},
    ("POST", "/v1/agents/{agent}/{order}"): {OPERATOR},
    ("POST", "/v1/dead/replay"): {OPERATOR},
    ("POST", "/v1/runs/{run}/jobs"): {SUBMITTER},
    ("POST", "/v1/jobs/cancel"): {SUBMITTER},
    ("GET", "/v1/results"): {SUBMITTER},
    ("GET", "/v1/about"): {VIEWER, OPERATOR},
    ("GET", "/v1/jobs"): {VIEWER, OPERATOR},
    ("GET", "/v1/runs/{run}/history"): {VIEWER, OPERATOR},
    ("GET", "/metrics"): {VIEWER, OPERATOR},
}
"""Who may use what needs a token, spelled out."""
PARTS = {"run": "nothing", "policy": "solver", "agent": "nobody", "subject": "nothing/t-1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    async with gateway_world(tmp_path_factory.mktemp("gateway"), max_body_bytes=65536) as found:
        await found.join("a")
        yield found


def run_spec(world: GatewayWorld, name: str) -> RunSpec:
    items = world.world.folder / "items.jsonl"
    items.write_text(
        "".join(json.dumps({"prompt": f"{i} + 1 =", "answer": "1"}) + "\n" for i in range(9))
    )
    return RunSpec(
        name=name,
        policies={"solver": PolicySpec(model="model")},
        task=TaskSpec(source="jsonl", path=str(items), reward="exact"),
        workflow=WorkflowSpec(policies=("solver",), group_size=2),
        evaluation=EvaluationSpec(items=1),
    )


async def said(client, method, path, **more):
    async with client.request(method, path, **more) as reply:
        text = await reply.text()
        is_json = reply.content_type == "application/json"
        return reply.status, (json.loads(text) if text and is_json else text)


# ---- who may what ------------------------------------------------------------------------------


async def test_every_route_asks_for_the_roles_that_are_meant(world):
    found = {(r.method, r.path): {role.value for role in r.roles} for r in ROUTES if r.roles}
    assert found == MEANT
    open_to_all = {"/v1/healthz", "/v1/openapi.json", "/v1/wheel/{wheel}"}
    assert {r.path for r in ROUTES if not r.roles} == open_to_all
    for (method, template), roles in MEANT.items():
        path = template.format(command="pause", order="cordon", **PARTS)
        for role in (None, VIEWER, OPERATOR, SUBMITTER):
            async with world.client(role) as client:
                status, body = await said(client, method, path)
            if role is None:
                assert (status, body["code"]) == (401, "http.unauthorised"), path
            elif role not in roles:
                assert (status, body["code"]) == (403, "http.forbidden"), (role, path)
            else:
                assert status not in (401, 403, 500), (role, path, body)


async def test_without_a_token_that_counts_nothing_is_told(world):
    secret = world.tokens["operator"]
    for header in ("", "Bearer", "Bearer x", f"Basic {secret}", f"Bearer {secret}x", secret,
                   f"Bearer {'x' * 4000}"):  # fmt: skip
        headers = {"Authorization": header}
        async with world.client(None) as client, client.get("/v1/status", headers=headers) as reply:
            assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert reply.headers["Cache-Control"] == "no-store"
    async with world.client(None) as client:
        assert await said(client, "GET", "/v1/healthz") == (200, {"ok": True})
        async with client.get("/v1/status", headers={"Authorization": f"bearer {secret}"}) as reply:
            assert reply.status == 200


async def test_a_revoked_token_is_refused_and_its_stream_ends_within_a_second_or_two(world):
    keys = world.world.folder / "keys"
    secret = await asyncio.to_thread(create_token, keys, "leaving", HttpRole.VIEWER)
    loop = asyncio.get_running_loop()
    async with world.client(secret) as client:
        async with asyncio.timeout(WAIT_S):
            while (await said(client, "GET", "/v1/runs"))[0] == 401:
                await asyncio.sleep(0.05)
        async with client.get("/v1/events", headers={"Accept": "text/event-stream"}) as stream:
            await read_events(stream, "status")
            await asyncio.to_thread(revoke_token, keys, "leaving")
            started = loop.time()
            while (await said(client, "GET", "/v1/runs"))[0] == 200:
                assert loop.time() - started < 1.5
                await asyncio.sleep(0.05)
            async with asyncio.timeout(3.0):
                await stream.content.read()


async def test_one_that_waits_for_events_learns_none_after_its_revocation(world):
    keys = world.world.folder / "keys"
    secret = await asyncio.to_thread(create_token, keys, "waiting", HttpRole.VIEWER)
    async with world.client(secret) as client, world.client(OPERATOR) as operator:
        async with asyncio.timeout(WAIT_S):
            while (await said(client, "GET", "/v1/runs"))[0] == 401:
                await asyncio.sleep(0.05)
        last = (await said(client, "GET", "/v1/events"))[1]["last"]
        wait = f"/v1/events?after={last}&wait_s=20"
        waiting = asyncio.create_task(said(client, "GET", wait))
        await asyncio.to_thread(revoke_token, keys, "waiting")
        async with asyncio.timeout(WAIT_S):
            while (await said(client, "GET", "/v1/runs"))[0] != 401:
                await asyncio.sleep(0.05)
        for order in ("cordon", "uncordon"):
            await said(operator, "POST", f"/v1/agents/a/{order}")
        code, answer = await waiting
        assert (code, answer["code"]) == (401, "http.unauthorised")


async def test_a_token_file_that_is_wrong_lets_nobody_in_and_harms_no_other(world):
    wrong = world.token_file("wrong")
    wrong.write_text(world.token_file("ops").read_text())
    wrong.chmod(0o600)  # says that it is `ops`
    bad = world.token_file("bad")
    bad.write_text("name = 1")
    async with world.client(OPERATOR) as client:
        for _ in range(15):
            await asyncio.sleep(0.05)
            assert (await said(client, "GET", "/v1/runs"))[0] == 200
    wrong.unlink()
    bad.unlink()


# ---- looking -----------------------------------------------------------------------------------


async def test_the_status_and_what_is_unchanged(world):
    async with world.client(VIEWER) as client:
        async with client.get("/v1/status") as reply:
            etag = reply.headers["ETag"]
            status = msgspec.json.decode(await reply.read(), type=SchedulerStatus)
        assert [agent.name for agent in status.agents] == ["a"]
        async with client.get("/v1/status", headers={"If-None-Match": etag}) as reply:
            assert (reply.status, await reply.read()) == (304, b"")
        assert (await said(client, "GET", "/v1/agents"))[1][0]["name"] == "a"
        code, found = await said(client, "GET", "/v1/explain/a")
        assert (code, found["kind"]) == (200, "agent")
        code, found = await said(client, "GET", "/v1/explain/sums%2Ft-000001")
        assert (code, found["code"]) == (404, "subject.unknown")
        assert "sums/t-000001" in found["message"]


async def test_the_status_is_asked_for_once_a_second_however_many_want_it(world):
    async with world.client(VIEWER) as client:
        texts = await asyncio.gather(*(said(client, "GET", "/v1/status") for _ in range(40)))
    assert len({body["uptime_s"] for _, body in texts}) <= 2


async def test_events_by_page_by_waiting_and_by_stream(world):
    async with (
        world.client(VIEWER) as viewer,
        world.client(OPERATOR) as operator,
        viewer.get("/v1/events", headers={"Accept": "text/event-stream"}) as stream,
    ):
        assert stream.content_type == "text/event-stream"
        [(_, status)] = await read_events(stream, "status")
        assert status["term"] == 1
        _, page = await said(viewer, "GET", "/v1/events")
        assert page["transitions"] == []
        wait = f"/v1/events?after={page['last']}&wait_s=10&subject=a"
        waiting = asyncio.create_task(said(viewer, "GET", wait))
        await asyncio.sleep(0.1)
        code, done = await said(
            operator, "POST", "/v1/agents/a/cordon", json={"reason": "maintenance"}
        )
        assert (code, done) == (200, {"message": ""})
        code, later = await waiting
        assert code == 200
        first = later["transitions"][0]
        assert (first["subject"], first["what"]) == ("a", "ordered to cordon")
        assert first["facts"] == {"by": "gateway/http:ops", "reason": "maintenance"}
        [(number, told)] = await read_events(stream, "transition")
        assert abs(told.pop("wall_s") - SystemClock().wall_s()) < 60.0
        assert (number, told) == (first["number"], first)
        # One that was away goes on after what it heard last; another subject's events are not its.
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(page["last"])}
        async with viewer.get("/v1/events", headers=headers) as again:
            [(number, told)] = await read_events(again, "transition")
            assert abs(told.pop("wall_s") - SystemClock().wall_s()) < 60.0
            assert (number, told) == (first["number"], first)
        async with viewer.get("/v1/events?subject=b", headers=headers) as others:
            assert (await said(operator, "POST", "/v1/agents/a/uncordon"))[0] == 200
            [(_, status)] = await read_events(others, "status")
        [(_, told)] = await read_events(stream, "transition")
        assert told["what"] == "ordered to uncordon"
        headers = {"Accept": "text/event-stream", "Last-Event-ID": "x"}
        async with viewer.get("/v1/events", headers=headers) as wrong:
            assert wrong.status == 422
        code, nothing = await said(viewer, "GET", "/v1/events?wait_s=0.1&subject=nobody")
        assert (code, nothing["transitions"]) == (200, [])


async def test_what_the_dashboards_pages_and_metrics_ask(world):
    async with world.client(VIEWER) as client:
        code, about = await said(client, "GET", "/v1/about")
        assert (code, about["token"], about["role"]) == (200, "look", "viewer")
        assert (await said(client, "GET", "/v1/jobs?limit=5"))[1]["jobs"] == []
        code, body = await said(client, "GET", "/v1/runs/nothing/history")
        assert (code, body["code"]) == (404, "run.unknown")
        async with client.get("/metrics") as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "farflow_scheduler_uptime_seconds" in await reply.text()


async def test_versions_and_who_serves_them(world):
    spec = run_spec(world, "sums")
    trainer = Trainer(world.world.folder)
    async with world.client(OPERATOR) as client:
        assert (await said(client, "POST", "/v1/runs", data=msgspec.json.encode(spec)))[0] == 200
        link = world.world.link(trainer_name(POLICY), Plane.WEIGHTS)
        await trainer.publish(link, trainer.first)
        second = trainer.next(1, 0)
        await trainer.publish(link, second)
        digest = trainer.first.manifest.digest
        serving = VersionServing(policy=POLICY, version=0, digest=digest, pause_s=0.0)
        await world.agents["a"].send(serving)
        async with asyncio.timeout(WAIT_S):
            while True:
                code, found = await said(client, "GET", f"/v1/versions/{POLICY}")
                if code == 200 and found["agents"]:
                    break
                await asyncio.sleep(0.1)
    assert [(row["version"], row["parent"]) for row in found["versions"]] == [(0, None), (1, 0)]
    assert found["versions"][1]["digest"] == second.manifest.digest
    [copy] = found["agents"]
    assert (copy["agent"], copy["version"], copy["behind"]) == ("a", 0, 1)


async def test_versions_of_nothing_and_logs_of_nobody(world):
    async with world.client(OPERATOR) as client:
        code, body = await said(client, "GET", "/v1/versions/nothing/solver")
        assert (code, body["code"]) == (404, "policy.unknown")
        code, body = await said(client, "GET", "/v1/agents/nobody/logs?lines=5")
        assert (code, body["code"]) == (404, "agent.unknown")
        assert await said(client, "GET", "/v1/dead?limit=3") == (200, [])


# ---- orders and their record -------------------------------------------------------------------


async def test_runs_are_submitted_as_json_and_toml_and_commanded(world):
    spec = run_spec(world, "adds")
    encoded = msgspec.json.encode(spec)
    async with world.client(OPERATOR) as client:
        assert await said(client, "POST", "/v1/runs", data=encoded) == (200, {"message": ""})
        code, again = await said(client, "POST", "/v1/runs", data=encoded)
        assert (code, again) == (200, {"message": "already submitted"})
        toml = f"""
            [run]
            name = "from-toml"
            [policies.solver]
            model = "model"
            [task]
            source = "jsonl"
            path = {json.dumps(spec.task.path)}
            reward = "exact"
            [workflow]
            policies = ["solver"]
            [local]
            runs = "left to others"
        """
        headers = {"Content-Type": "application/toml"}
        code, body = await said(client, "POST", "/v1/runs", data=toml, headers=headers)
        assert (code, body) == (200, {"message": ""})
        bad = toml.replace("[policies.solver]", "[policies.solver]\nbatch_groups = -1")
        code, body = await said(client, "POST", "/v1/runs", data=bad, headers=headers)
        assert (code, body["code"]) == (422, "http.body")
        assert "batch_groups" in body["message"] or ">= 1" in body["message"]
        code, body = await said(client, "POST", "/v1/runs", data="[", headers=headers)
        assert (code, body["code"]) == (400, "http.body")
        names: set[str] = set()
        async with asyncio.timeout(WAIT_S):  # the status may be from before
            while names != {"sums", "adds", "from-toml"}:
                await asyncio.sleep(0.05)
                names = {run["name"] for run in (await said(client, "GET", "/v1/runs"))[1]}
        for command in ("pause", "resume", "stop"):
            done = await said(client, "POST", f"/v1/runs/from-toml/{command}")
            assert done == (200, {"message": ""}), command
        code, body = await said(client, "POST", "/v1/runs/nothing/stop")
        assert (code, body["code"]) == (404, "run.unknown")
        other = msgspec.structs.replace(spec, seed=9)
        code, body = await said(client, "POST", "/v1/runs", data=msgspec.json.encode(other))
        assert (code, body["code"]) == (409, "run.exists")
        code, body = await said(client, "POST", "/v1/dead/replay", json={"run": "adds"})
        assert (code, body) == (200, {"message": "0 queued again"})
        code, body = await said(client, "POST", "/v1/dead/replay", json={})
        assert (code, body["code"]) == (422, "replay.which")
        assert await said(client, "POST", "/v1/runs/adds/abandon") == (200, {"message": ""})
        _, page = await said(client, "GET", "/v1/events?after=0&subject=from-toml")
        ordered = [one for one in page["transitions"] if "ordered" in one["what"]]
        assert {one["facts"]["by"] for one in ordered} == {"gateway/http:ops"}
        assert ordered[0]["what"] == "ordered to pause"


async def test_every_change_is_recorded_before_and_after_with_who_did_it(world):
    before = len(world.audit())
    async with world.client(OPERATOR) as client:
        await said(client, "POST", "/v1/agents/a/drain", json={"deadline_s": 1, "reason": "r"})
        await said(client, "POST", "/v1/agents/nobody/drain")
        await said(client, "POST", "/v1/agents/a/drain", json={"deadline_s": "soon"})
        headers = {"Content-Type": "application/toml"}
        await said(client, "POST", "/v1/runs", data="a." * 400 + "a = 1", headers=headers)
        await said(client, "POST", "/v1/runs", data="a = " + "1" * 4500, headers=headers)
        await said(client, "GET", "/v1/agents")
    async with world.client(VIEWER) as client:
        await said(client, "POST", "/v1/agents/a/quarantine", json={})
    lines = world.audit()[before:]
    assert [(line["what"], line["status"], line["code"]) for line in lines] == [
        ("begun", 0, ""), ("ended", 200, ""),
        ("begun", 0, ""), ("ended", 404, "agent.unknown"),
        ("ended", 422, "http.body"), ("ended", 422, "http.body"), ("ended", 400, "http.body"),
        ("ended", 403, "http.forbidden"),
    ]  # fmt: skip
    first, second = lines[:2]
    assert (first["token"], first["role"], first["address"]) == ("ops", "operator", "127.0.0.1")
    assert (first["method"], first["path"]) == ("POST", "/v1/agents/a/drain")
    assert first["number"] == second["number"]
    assert len(first["body_sha256"]) == 64
    assert all(len(line["body_sha256"]) == 64 for line in lines[4:7])
    assert (lines[7]["token"], lines[7]["role"], lines[7]["body_sha256"]) == ("look", "viewer", "")


async def test_what_cannot_be_recorded_is_not_done(world):
    record = world.folder / "http-audit.jsonl"
    record.rename(world.folder / "aside")
    record.mkdir()
    async with world.client(OPERATOR) as client:
        code, body = await said(client, "POST", "/v1/agents/a/cordon")
        assert (code, body["code"]) == (503, "http.not_recorded")
        assert (await said(client, "GET", "/v1/agents"))[1][0]["cordoned"] is False
    record.rmdir()
    (world.folder / "aside").rename(record)


async def test_submitters_have_jobs_and_results_of_their_own(world):
    async with world.client(OPERATOR) as operator:
        spec = run_spec(world, "judged")
        assert (await said(operator, "POST", "/v1/runs", data=msgspec.json.encode(spec)))[0] == 200
    job = {"id": "one", "items": [{"index": 0, "prompt": "2 + 2 =", "answer": "4"}]}
    async with world.client(SUBMITTER) as client:
        async with client.post("/v1/runs/judged/jobs", json={"jobs": [job]}) as reply:
            receipts = msgspec.json.decode(await reply.read(), type=JobReceipts).receipts
        assert [(one.id, one.state) for one in receipts] == [("one", "queued")]
        _, again = await said(client, "POST", "/v1/runs/judged/jobs", json={"jobs": [job]})
        assert again["receipts"][0]["state"] == "known"
        cancel = {"run": "judged", "ids": ["one", "none"]}
        _, gone = await said(client, "POST", "/v1/jobs/cancel", json=cancel)
        assert [one["state"] for one in gone["receipts"]] == ["known", "refused"]
        async with client.get("/v1/results?wait_s=5") as reply:
            results = msgspec.json.decode(await reply.read(), type=Results)
        assert [(one.id, one.state) for one in results.results] == [("one", "cancelled")]
        code, body = await said(client, "GET", f"/v1/results?after={results.last}")
        assert (code, body["results"]) == (200, [])
        code, body = await said(client, "POST", "/v1/runs/nothing/jobs", json={"jobs": [job]})
        assert body["receipts"][0]["code"] == "run.unknown"
    async with world.client(OPERATOR) as operator:
        code, body = await said(operator, "GET", "/v1/explain/judged%2Fx-http-jobs.one")
    assert code == 200 or body["code"] == "subject.unknown"  # a cancelled job is soon forgotten


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "more", "status"),
    [
        ("GET", "/nothing", {}, 404),
        ("GET", "/v1/", {}, 404),
        ("GET", "/v1/agents/UPPER/logs", {}, 404),
        ("POST", "/v1/runs/sums/explode", {}, 404),
        ("DELETE", "/v1/runs", {}, 405),
        ("HEAD", "/v1/status", {}, 405),
        ("GET", "/v1/status?colour=red", {}, 422),
        ("GET", "/v1/events?after=1&after=2", {}, 422),
        ("GET", "/v1/events?wait_s=nan", {}, 422),
        ("GET", "/v1/events?wait_s=61", {}, 422),
        ("GET", "/v1/events?after=-1", {}, 422),
        ("GET", f"/v1/explain/{'x' * 201}", {}, 404),
        ("GET", "/v1/explain/%FF%00", {}, 404),
        ("POST", "/v1/agents/a/drain", {"data": b"{"}, 400),
        ("POST", "/v1/agents/a/drain", {"data": b'{"deadline_s": -1}'}, 422),
        ("POST", "/v1/agents/a/drain", {"data": b'{"hurry": true}'}, 422),
        ("POST", "/v1/agents/a/drain", {"data": b'{"reason": "\\ud800"}'}, 400),
        ("POST", "/v1/runs/sums/pause", {"data": b'{"a": 1}'}, 422),
        ("POST", "/v1/runs", {"data": b""}, 400),
        ("POST", "/v1/runs", {"data": b"[" * 60000}, 422),
        ("POST", "/v1/runs", {"data": b"x" * 65537}, 413),
        ("POST", "/v1/agents/a/drain", {"data": gzip.compress(b"{}"),
                                        "headers": {"Content-Encoding": "gzip"}}, 415),
    ],
)  # fmt: skip
async def test_bad_requests_are_refused_with_a_code_and_a_remedy(world, method, path, more, status):
    async with world.client(OPERATOR) as client:
        found, body = await said(client, method, path, **more)
    assert found == status, body
    if method != "HEAD":
        assert set(body) == {"code", "message"}
        assert body["message"]


async def test_a_body_without_a_length_is_cut_off_where_it_is_too_long(world):
    async def pieces():
        for _ in range(40):
            yield b"x" * 4096

    async with world.client(OPERATOR) as client:
        code, body = await said(client, "POST", "/v1/runs", data=pieces())
    assert (code, body["code"]) == (413, "http.too_large")


# ---- description and files ---------------------------------------------------------------------


async def test_the_description_is_that_of_the_routes_and_types(world):
    async with world.client(None) as client:
        code, found = await said(client, "GET", "/v1/openapi.json")
    assert (code, found) == (200, json.loads(msgspec.json.encode(openapi())))
    assert found["openapi"] == "3.1.0"
    listed = {(m.upper(), path) for path, item in found["paths"].items() for m in item}
    assert listed == {(route.method, route.path) for route in ROUTES}
    submit = found["paths"]["/v1/runs"]["post"]["requestBody"]
    assert set(submit["content"]) == {"application/json", "application/toml"}
    schema = submit["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert "workflow" in found["components"]["schemas"][schema]["properties"]

    def references(value):
        if isinstance(value, dict):
            yield from ([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
            for each in value.values():
                yield from references(each)
        elif isinstance(value, list):
            for each in value:
                yield from references(each)

    schemas = found["components"]["schemas"]
    assert all(ref.rpartition("/")[2] in schemas for ref in references(found))


async def test_the_dashboard_needs_no_token_and_nothing_beside_it_is_given_out(world):
    async with world.client(None) as client:
        async with client.get("/") as reply:
            assert reply.status == 200
            assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
            etag, page = reply.headers["ETag"], await reply.text()
        assert "<title>farflow" in page
        async with client.get("/", headers={"If-None-Match": etag}) as reply:
            assert reply.status == 304
        async with client.get("/assets/app.js") as reply:
            assert (reply.status, reply.content_type) == (200, "text/javascript")
        for name in ("", "none.js", "..%2fconfig.py", "%2e%2e/x.js", "../gateway/app.py",
                     ".hidden.js", "a/b.js"):  # fmt: skip
            path = f"/assets/{name}"
            assert (await said(client, "GET", path))[0] == 404, path
        assert (await said(client, "POST", "/"))[0] == 405


async def test_who_has_no_token_asks_only_so_often_and_holds_up_nobody_who_has(world):
    async with (
        asyncio.timeout(WAIT_S),
        world.client("x" * 43) as stranger,
        world.client(VIEWER) as viewer,
    ):
        codes = {401}
        while codes == {401}:
            many = (said(stranger, "GET", "/v1/runs") for _ in range(300))
            codes = {code for code, _ in await asyncio.gather(*many)}
        assert codes <= {401, 429}
        assert (await said(viewer, "GET", "/v1/runs"))[0] == 200
        while (await said(stranger, "GET", "/v1/runs"))[0] == 429:
            await asyncio.sleep(0.05)
