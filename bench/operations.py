"""What it costs to look: the dashboard in a browser, metrics, requests, and many viewers.

The deployment is the real daemon with its real gateway, 200 light agents over real sockets and
100 000 jobs that they work on (``operations_world``), and Debian's Chromium, all on this machine's
cores. What is measured:

- a page that is opened: until something is painted, and until the first status is drawn;
- an update of a page: the time in the page's own script, and all that its main thread did
  (Chromium's ``TaskDuration`` in CPU time: parsing, layout and painting as well) per update;
- a scrape of 1 000 agents' metrics over HTTP, and the writing of its page beside that of
  ``prometheus_client`` from the same samples;
- the scheduler's CPU and loop lag while 50 viewers follow the event stream, beside none.
"""

import os
import select
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from bench.leases import quantile
from bench.leases_world import cpu_s
from bench.operations_world import Asking, Busy, busy
from bench.report import Row, main
from scheduler.gateway.metrics import render
from transport.runtime.logs import configure_logging
from transport.status import SchedulerStatus

AGENTS: Final = 200
FULL_JOBS, QUICK_JOBS = 100_000, 5_000
SCRAPED_AGENTS: Final = 1000
SCRAPES: Final = 20
STATUS_S: Final = 1.1
"""After so long the gateway asks for another status."""
PAGES: Final = ("overview", "agents", "policies", "weights", "jobs", "events")
PAINT_MS, DRAW_MS, SCRAPE_MS = 1000.0, 100.0, 50.0
VIEWERS: Final = 50
CPU_RATIO: Final = 1.5
LAG_WINDOW_S: Final = 62.0
"""The scheduler says its longest lag within the last minute."""
WAIT_MS: Final = 60_000.0


# ---- the browser ---------------------------------------------------------------------------------


def browser_rows(deployment: Busy, place: str, quick: bool) -> list[Row]:
    """Opening the page, and updates of it."""
    path = shutil.which("chromium")
    if path is None:
        return [
            Row(metric="operations.browser skipped: apt-get install chromium", value=0, unit="")
        ]
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            rows = _opening_rows(browser, deployment, place, 3 if quick else 10)
            return [*rows, *_update_rows(browser, deployment, 3 if quick else 15)]
        finally:
            browser.close()


def _opened(browser: Any, deployment: Busy) -> Any:
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{deployment.address}/#token={deployment.token}")
    page.wait_for_function("() => performance.getEntriesByName('farflow:draw').length > 0")
    return page


def _opening_rows(browser: Any, deployment: Busy, place: str, times: int) -> list[Row]:
    painted, drawn = [], []
    for _ in range(times):
        page = _opened(browser, deployment)
        painted.append(
            page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        )
        drawn.append(
            page.evaluate(
                "(e => e.startTime + e.duration)(performance.getEntriesByName('farflow:draw')[0])"
            )
        )
        page.context.close()
    paint_ms = statistics.median(painted)
    return [
        Row(
            metric=f"operations.dashboard: first contentful paint, {place}",
            value=round(paint_ms),
            unit="ms",
            target=f"< {PAINT_MS:.0f}",
            ok=paint_ms < PAINT_MS,
        ),
        Row(
            metric="operations.dashboard: first status drawn",
            value=round(statistics.median(drawn)),
            unit="ms",
        ),
    ]


def _update_rows(browser: Any, deployment: Busy, updates: int) -> list[Row]:
    page = _opened(browser, deployment)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    script: dict[str, float] = {}
    whole: dict[str, float] = {}
    count = "performance.getEntriesByName('farflow:draw').length"
    for name in PAGES:
        page.evaluate("name => { location.hash = `#/${name}`; }", name)
        page.wait_for_timeout(1000)
        before, busy_before = page.evaluate(count), _task_s(session)
        page.wait_for_function(f"(least) => {count} >= least", arg=before + updates)
        busy_s, after = _task_s(session) - busy_before, page.evaluate(count)
        spent = page.evaluate(
            "n => performance.getEntriesByName('farflow:draw').slice(n).map(e => e.duration)",
            before,
        )
        script[name] = statistics.median(spent)
        whole[name] = 1e3 * busy_s / (after - before)
    page.context.close()
    return [
        row
        for what, found in (("script, median", script), ("main thread's CPU, mean", whole))
        for slowest in [max(found, key=lambda name: found[name])]
        for row in [
            Row(
                metric=f"operations.dashboard: update, {what} of the slowest page ({slowest})",
                value=round(found[slowest], 1),
                unit="ms",
                target=f"< {DRAW_MS:.0f}",
                ok=found[slowest] < DRAW_MS,
            )
        ]
    ]


def _task_s(session: Any) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(m["value"] for m in metrics if m["name"] == "TaskDuration"))


# ---- requests ------------------------------------------------------------------------------------


def request_rows(deployment: Busy, quick: bool) -> list[Row]:
    """How soon requests of different kinds are answered."""
    times = 20 if quick else 100
    asked = {
        "status": "/v1/status",
        "jobs, a page of 100": "/v1/jobs?state=queued&limit=100",
        "jobs, by prefix": "/v1/jobs?prefix=bench/x-load-2.&limit=100",
        "explain an agent": "/v1/explain/agent-0001",
        "last 100 events": "/v1/events?after=0&limit=100",
    }
    rows = []
    with closing(Asking(deployment)) as asking:
        for name, path in asked.items():
            took = [asking.timed(path)[0] for _ in range(times)]
            rows.append(
                Row(
                    metric=f"operations.request: {name}, p99 {quantile(took, 0.99) * 1e3:.1f} ms",
                    value=round(statistics.median(took) * 1e3, 1),
                    unit="ms",
                )
            )
    return rows


# ---- metrics -------------------------------------------------------------------------------------


def scrape_rows() -> list[Row]:
    """Scrapes with a status that is new each time, as once in 15 s. From the third on the gateway
    expects them, and has asked for it half a second before."""
    with busy(SCRAPED_AGENTS, SCRAPED_AGENTS) as deployment, closing(Asking(deployment)) as asking:
        took = []
        for _ in range(SCRAPES):
            time.sleep(STATUS_S)
            took.append(asking.timed("/metrics")[0])
        status = msgspec.json.decode(asking.timed("/v1/status")[1], type=SchedulerStatus)
    assert len(status.agents) == SCRAPED_AGENTS
    mine, theirs = _writing_s(status)
    scrape_ms = statistics.median(took) * 1e3
    return [
        Row(
            metric=f"operations.metrics: scrape of {SCRAPED_AGENTS} agents, median of {SCRAPES}",
            value=round(scrape_ms, 1),
            unit="ms",
            target=f"< {SCRAPE_MS:.0f}",
            ok=scrape_ms < SCRAPE_MS,
        ),
        Row(
            metric="operations.metrics: making and writing that page",
            value=round(mine * 1e3, 1),
            unit="ms",
            reference="prometheus_client's writer, same samples",
            ratio=round(mine / theirs, 2),
            target="<= 1 x",
            ok=mine <= theirs,
        ),
    ]


def _writing_s(status: SchedulerStatus) -> tuple[float, float]:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    page = render(status)
    families = list(text_string_to_metric_families(page.decode()))

    class Same:
        def collect(self) -> Iterator[Any]:
            yield from families

    registry = CollectorRegistry()
    registry.register(Same())
    assert generate_latest(registry).count(b"\n") >= page.count(b"\n")

    def median_s(write: Callable[[], bytes]) -> float:
        took = []
        for _ in range(SCRAPES):
            began = time.perf_counter()
            write()
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    return median_s(lambda: render(status)), median_s(lambda: generate_latest(registry))


# ---- viewers -------------------------------------------------------------------------------------


class Viewers:
    """Readers of the event stream in a thread of this process: they take all and look at none of
    it but whether something was missed."""

    def __init__(self, deployment: Busy, count: int) -> None:
        place = urlsplit(deployment.address)
        self.received_bytes = 0
        self.missed = 0
        self._ended = threading.Event()
        self._sockets: dict[int, socket.socket] = {}
        self._epoll = select.epoll()
        for _ in range(count):
            one = socket.create_connection((str(place.hostname), place.port or 80))
            one.sendall(
                f"GET /v1/events HTTP/1.1\r\nHost: {place.netloc}\r\nAccept: text/event-stream\r\n"
                f"Authorization: Bearer {deployment.token}\r\n\r\n".encode()
            )
            status = one.recv(len(b"HTTP/1.1 200"))
            assert status.endswith(b" 200"), status
            self._sockets[one.fileno()] = one
            self._epoll.register(one, select.EPOLLIN)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._ended.is_set():
            for descriptor, _ in self._epoll.poll(0.1):
                data = self._sockets[descriptor].recv(2**18)
                assert data, "a stream ended"
                self.received_bytes += len(data)
                self.missed += data.count(b"event: missed")

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._epoll.close()
        for one in self._sockets.values():
            one.close()


@contextmanager
def _viewers(deployment: Busy, count: int) -> Iterator[Viewers]:
    viewers = Viewers(deployment, count)
    try:
        yield viewers
    finally:
        viewers.close()


def viewer_rows(deployment: Busy, quick: bool) -> list[Row]:
    """The scheduler with and without viewers, in turns: the load is the same."""
    seconds = 5.0 if quick else LAG_WINDOW_S
    cores: dict[int, list[float]] = {0: [], VIEWERS: []}
    lags: dict[int, list[float]] = {0: [], VIEWERS: []}
    sent = missed = 0
    for count in (0, VIEWERS, 0, VIEWERS):
        with _viewers(deployment, count) as viewers:
            used_s, lag_s = _scheduler(deployment, seconds)
            sent, missed = sent + viewers.received_bytes, missed + viewers.missed
        cores[count].append(used_s / seconds)
        lags[count].append(lag_s)
    cpu, lag = (
        {count: statistics.mean(found) for count, found in each.items()} for each in (cores, lags)
    )
    ratio = cpu[VIEWERS] / cpu[0]
    assert sent > 0
    return [
        Row(
            metric=f"operations.scheduler: CPU with {VIEWERS} viewers of the event stream",
            value=round(cpu[VIEWERS], 3),
            unit="cores",
            reference="without viewers",
            ratio=round(ratio, 2),
            target=f"<= {CPU_RATIO:g} x",
            ok=ratio <= CPU_RATIO,
        ),
        Row(
            metric=f"operations.scheduler: longest loop lag in a minute with {VIEWERS} viewers",
            value=round(lag[VIEWERS] * 1e3),
            unit="ms",
            reference="without viewers",
            ratio=round(lag[VIEWERS] / lag[0], 2) if lag[0] else None,
        ),
        Row(
            metric=f"operations.gateway: sent to {VIEWERS} viewers",
            value=round(sent / (2 * seconds) / 1e6, 1),
            unit="MB/s",
        ),
        Row(metric="operations.gateway: times that one missed events", value=missed, unit="times"),
    ]


def _scheduler(deployment: Busy, seconds: float) -> tuple[float, float]:
    """CPU seconds of its process within ``seconds``, and its loop lag after them."""
    pid = deployment.started.process.pid
    before = cpu_s(pid)
    time.sleep(seconds)
    used_s = cpu_s(pid) - before
    with closing(Asking(deployment)) as asking:
        status = msgspec.json.decode(asking.timed("/v1/status")[1], type=SchedulerStatus)
    return used_s, status.counters["loop.lag_ms"] / 1e3


def measure(quick: bool) -> list[Row]:
    configure_logging("error", component="bench")
    jobs = QUICK_JOBS if quick else FULL_JOBS
    cores = os.cpu_count() or 1
    place = f"{AGENTS} agents, {jobs} jobs, {cores} shared cores"
    with busy(AGENTS, jobs) as deployment:
        rows = browser_rows(deployment, place, quick)
        rows += request_rows(deployment, quick)
        rows += viewer_rows(deployment, quick)
    rows += scrape_rows()
    load = round(os.getloadavg()[0], 1)
    name = "operations.load average of the machine, what is measured included"
    return [*rows, Row(metric=name, value=load, unit="processes")]


if __name__ == "__main__":
    main("operations", measure)
