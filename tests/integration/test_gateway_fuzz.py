"""The HTTP interface under a fuzzer that is driven by its own description (schemathesis): no 500,
no hang, every answer as described, and nothing happens without a token that allows it."""

import asyncio
import json
import sys

import pytest
from gateway_world import gateway_world

EXAMPLES = {"viewer": 5, "submitter": 5, "operator": 40}
"""For each operation, beside those that cover the description's bounds."""
MAX_RESPONSE_S = 5.0
WAITS_S = 0.05
"""Waiting for events and results is asked for, but not for long."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "ignored_auth",
)


def described(text: str) -> str:
    """The interface's description with short waits."""
    found = json.loads(text)
    for item in found["paths"].values():
        for operation in item.values():
            for parameter in operation["parameters"]:
                if parameter["name"] == "wait_s":
                    parameter["schema"]["maximum"] = WAITS_S
    return json.dumps(found)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_fuzzer_finds_no_500_no_hang_and_no_unauthorised_effect(tmp_path):
    async with gateway_world(tmp_path, requests_per_s=10_000.0) as world:
        await world.join("a")
        async with world.client(None) as client, client.get("/v1/openapi.json") as reply:
            (tmp_path / "openapi.json").write_text(described(await reply.text()))
        for role, examples in EXAMPLES.items():
            if role == "operator":
                # Nothing was changed by those who may only look or have jobs of their own.
                async with world.world.operator() as operator:
                    status = await operator.status()
                    assert [run.name for run in status.runs] == []
                    [agent] = status.agents
                    assert (agent.cordoned, agent.quarantined) == (False, "")
                    assert not [n for n in status.counters if n.startswith("orders.")]
                done = [line for line in world.audit() if line["status"] == 200]
                assert {line["role"] for line in done} <= {"submitter"}
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "schemathesis.cli", "run", str(tmp_path / "openapi.json"),
                "--url", (await world.address()).rstrip("/"),
                "--header", f"Authorization: Bearer {world.tokens[role]}",
                "--checks", ",".join(CHECKS),
                "--max-examples", str(examples),
                "--request-timeout", str(2 * MAX_RESPONSE_S),
                "--max-response-time", str(MAX_RESPONSE_S),
                "--phases", "examples,coverage,fuzzing",
                "--suppress-health-check", "all", "--warnings", "off", "--no-color",
                "--seed", "8", "--generation-database", ":memory:",
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            said, _ = await child.communicate()
            assert child.returncode == 0, said.decode()[-6000:]
        log = (world.folder / "logs" / "gateway.log").read_text()
        assert "Traceback" not in log
        async with world.client("viewer") as client, client.get("/v1/runs") as reply:
            assert reply.status == 200
