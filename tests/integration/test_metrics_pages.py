"""The pages of metrics that daemons serve on their own machine."""

import asyncio
import contextlib
import socket
from collections import Counter

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cloud_trainer.tracking_sinks import LastNumbers
from edge_agent.metrics import metrics_page
from scheduler.service import _serve_metrics
from transport.runtime.metrics_http import serve_metrics
from transport.telemetry import METRICS

pytestmark = pytest.mark.asyncio
WAIT_S = 10.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.asynccontextmanager
async def running(work):
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def fetched(
    port: int, path: str = "/metrics", method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, str]:
    async with asyncio.timeout(WAIT_S), aiohttp.ClientSession(headers=headers) as session:
        while True:
            try:
                async with session.request(method, f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status, await answer.text()
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.02)


def names(text: str) -> set[str]:
    return {s.name for f in text_string_to_metric_families(text) for s in f.samples}


async def test_one_page_and_no_other():
    port = free_port()
    async with running(serve_metrics(port, lambda: b"# nothing\n", "x.metrics_port")):
        assert await fetched(port) == (200, "# nothing\n")
        assert (await fetched(port, "/"))[0] == 404
        assert (await fetched(port, "/metrics", "POST"))[0] == 404
        rebound = {"Host": "evil.example"}  # a page whose name was made to lead here
        assert (await fetched(port, headers=rebound))[0] == 421


async def test_a_port_that_is_taken_is_no_failure_of_the_daemon():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        work = serve_metrics(taken.getsockname()[1], lambda: b"", "x.metrics_port")
        await asyncio.wait_for(work, WAIT_S)


async def test_a_service_says_its_counters():
    class Service:
        def __init__(self) -> None:
            self.counters = Counter({"stored": 3, "dropped": 1})

    port = free_port()
    async with running(_serve_metrics(port, Service())):
        _, text = await fetched(port)
    assert 'farflow_service_happened_total{what="stored"} 3' in text


async def test_a_trainer_says_its_last_numbers():
    numbers = LastNumbers()
    numbers.write("step", 1.0, 4, {"loss": 0.5, "reward": 0.25})
    numbers.write("step", 2.0, 5, {"loss": 0.4})
    text = numbers.page().decode()
    assert 'farflow_trainer_step{kind="step"} 5' in text
    assert 'farflow_trainer_last_metric{kind="step",name="loss"} 0.4' in text
    assert names(text) == {metric.name for metric in METRICS["trainer"]}


async def test_an_agent_says_what_its_heartbeats_say():
    from transport.messages import Heartbeat, VersionRef
    from transport.status import GpuReading

    class Core:
        def heartbeat(self, now: float) -> Heartbeat:
            return Heartbeat(
                sequence=1,
                sent_s=now,
                tokens_generated=100,
                spool_bytes=7,
                versions={"sums/solver": VersionRef(version=3, digest="")},
                gpus=(GpuReading(name="H200", power_w=300.0, temperature_c=60.0),),
            )

    text = metrics_page(Core(), 64, 1.0).decode()
    assert "farflow_edge_slots 64" in text
    assert 'farflow_edge_policy_version{policy="sums/solver"} 3' in text
    assert names(text) == {metric.name for metric in METRICS["agent"]}
