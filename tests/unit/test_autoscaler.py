"""The hook of an autoscaler: when it is called, what it gets, and what a bad one does."""

import asyncio
import json
import sys

import msgspec
import pytest
import structlog
from aiohttp import web

from scheduler.autoscaler import Autoscaler, AutoscalerTable, CallRule
from transport.runtime.clock import SystemClock
from transport.status import DemandStatus


def demand(more_slots, run="r"):
    return DemandStatus(
        run=run,
        binds="generation" if more_slots else "training",
        more_slots=more_slots,
        hardware="l40s",
        steps_hour=100.0,
        steps_hour_with=200.0,
        reason="because",
    )


def test_it_is_called_when_slots_are_wanted_and_not_again_before_the_cool_down():
    rule = CallRule(cool_down_s=300.0, least_slots=1)
    assert not rule.due([demand(0)], 0.0)
    assert rule.due([demand(8)], 10.0)
    assert not rule.due([demand(80)], 309.0)
    assert rule.due([demand(80)], 310.0)


def test_little_news_is_no_news_but_the_end_of_the_demand_is():
    rule = CallRule(cool_down_s=0.0, least_slots=1)
    assert rule.due([demand(100)], 0.0)
    assert not rule.due([demand(120)], 1.0)
    assert rule.due([demand(126)], 2.0)
    assert rule.due([demand(0)], 3.0)
    assert not rule.due([], 4.0)


def test_a_call_that_failed_is_made_again_after_the_cool_down():
    rule = CallRule(cool_down_s=5.0, least_slots=1)
    assert rule.due([demand(4)], 0.0)
    rule.failed()
    assert not rule.due([demand(4)], 4.0)
    assert rule.due([demand(4)], 5.0)


def test_fewer_slots_than_are_worth_it_are_not_told():
    rule = CallRule(cool_down_s=0.0, least_slots=16)
    assert not rule.due([demand(15)], 0.0)
    assert rule.due([demand(16)], 1.0)


@pytest.mark.asyncio
async def test_a_command_gets_the_demand_on_its_standard_input(tmp_path):
    out = tmp_path / "demand.json"
    script = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    table = AutoscalerTable(command=(sys.executable, "-c", script, str(out)))
    scaler = Autoscaler(table, SystemClock(), lambda: (demand(8),))
    await scaler.look()
    said = json.loads(out.read_text())
    assert said["demand"][0]["more_slots"] == 8
    assert said["wall_s"] > 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "script",
    [
        "import sys; print('x' * 10**6, file=sys.stderr); sys.exit(3)",
        "import sys; sys.stdin.close(); sys.exit(1)",
        "import time; time.sleep(600)",
        "import subprocess; subprocess.run(['sleep', '600'])",
    ],
    ids=["loud", "deaf", "endless", "with an endless child"],
)
async def test_a_bad_command_is_ended_and_told_again_later(script):
    table = AutoscalerTable(command=(sys.executable, "-c", script), cool_down_s=0.0, timeout_s=1.0)
    scaler = Autoscaler(table, SystemClock(), lambda: (demand(8),))
    async with asyncio.timeout(10):
        await scaler.look()
        await scaler.look()
    assert scaler.calls == 2


@pytest.mark.asyncio
async def test_a_command_is_over_when_it_ends_whatever_it_leaves_running():
    table = AutoscalerTable(command=("/bin/sh", "-c", "cat >&2; sleep 600 & exit 3"))
    scaler = Autoscaler(table, SystemClock(), lambda: (demand(8),))
    with structlog.testing.capture_logs() as logs:
        async with asyncio.timeout(10):
            await scaler.look()
    (line,) = logs
    assert "exit status 3" in line["reason"]
    assert '"more_slots":8' in line["reason"]


@pytest.mark.asyncio
async def test_a_webhook_gets_a_post_and_its_refusal_is_a_failure():
    seen = []
    answers = [500, 204]

    async def take(request):
        seen.append(await request.json())
        return web.Response(status=answers.pop(0))

    app = web.Application()
    app.router.add_post("/scale", take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        table = AutoscalerTable(webhook=f"http://127.0.0.1:{port}/scale", cool_down_s=0.0)
        scaler = Autoscaler(table, SystemClock(), lambda: (demand(8),))
        await scaler.look()
        await scaler.look()
        await scaler.look()
    finally:
        await runner.cleanup()
    assert [one["demand"][0]["more_slots"] for one in seen] == [8, 8]


def test_a_table_with_two_hooks_or_a_strange_address_is_refused():
    for fields in ({"command": ["x"], "webhook": "http://h/"}, {"webhook": "ftp://h/"}):
        with pytest.raises(msgspec.ValidationError, match="webhook"):
            msgspec.convert(fields, AutoscalerTable)
