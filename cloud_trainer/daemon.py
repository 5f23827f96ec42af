"""The trainer daemon: claims its folder, connects, and runs one incarnation after the other.

A rollback begins a new incarnation in the same process; more than ``MAX_ROLLBACKS`` without a
checkpoint in between end it. Exit status: 0 done or asked to stop, 1 failed, 78 (from the command
line) wrong configuration.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from cloud_trainer.config import TrainerConfig, TrainerTable
from cloud_trainer.core.effects import Exit, Rollback
from cloud_trainer.factory import MakeTrainer, make_trainer
from cloud_trainer.home import Start, TrainerHome
from cloud_trainer.process_group import IDLES_PER_TIMEOUT, ProcessRanks, ranks_from
from cloud_trainer.ranks import follow
from cloud_trainer.shell import TrainerShell
from cloud_trainer.tracking import check_tracking
from cloud_trainer.tracking_sinks import LastNumbers
from cloud_trainer.trainer_keys import load_keys
from transport.errors import ConfigError
from transport.ids import is_name
from transport.links import Network
from transport.messages import WORK_PLANES
from transport.plane_links import PlaneLinks
from transport.runtime.build import installed_build
from transport.runtime.clock import Clock, SystemClock
from transport.runtime.metrics_http import serve_metrics

MAX_ROLLBACKS = 3

_log = structlog.get_logger()


async def run_daemon(
    config: TrainerConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[dict[str, Any]], None],
    network: Network | None = None,
    clock: Clock | None = None,
    trainers: MakeTrainer | None = None,
) -> int:
    """Train until the run is finished or ``stop`` is set; returns the exit status. ``on_ready`` is
    called once the links are made, whether or not anybody answers yet.

    Under torchrun this is one rank of several: rank 0 does all that, the others (where nothing is
    called) compute their share until it lets them go. ``trainers`` stands in for ``make_trainer``.

    Raises:
        ConfigError: settings, keys or the model's trainer are wrong.
        ModelError: the model does not load.
        StoreError: the folder is in use, or the disk refused.
        RankLost: another rank ended or hangs.
    """
    table = config.trainer
    run, _, name = table.policy.partition("/")
    if not (is_name(run) and is_name(name)):
        raise ConfigError(
            f"trainer.policy: {table.policy!r} must be RUN/NAME, as in arithmetic/solver"
        )
    check_tracking(table)
    ranks = await asyncio.to_thread(
        ranks_from, os.environ, device=table.device, timeout_s=table.rank_timeout_s
    )
    if isinstance(ranks, ProcessRanks) and ranks.rank != 0:
        return await _follow(ranks, table)
    make = partial(make_trainer, ranks=ranks) if trainers is None else trainers
    keys = await asyncio.to_thread(
        load_keys, config.transport, table.policy, link=table.key, signing=table.signing_key
    )
    build = await asyncio.to_thread(installed_build)
    clock = SystemClock() if clock is None else clock
    own_network = network is None
    if network is None:
        from transport.zmq_links import ZmqNetwork

        network = ZmqNetwork()
    try:
        home = await asyncio.to_thread(
            TrainerHome, Path(table.folder), keep_checkpoints=table.keep_checkpoints
        )
        try:
            links = PlaneLinks(network, config.transport, key=keys.link, server_key=keys.server)
            numbers = LastNumbers()
            on_ready({"ready": True, "ports": {}, "policy": table.policy})
            try:

                def make_shell(start: Start) -> TrainerShell:
                    return TrainerShell(
                        table,
                        home=home,
                        start=start,
                        links=links,
                        signer=keys.signer,
                        ranks=ranks,
                        trainers=make,
                        clock=clock,
                        build=build,
                        sinks={"prometheus": numbers} if table.metrics_port else {},
                    )

                work = _incarnations(home, clock, links, make_shell, stop)
                serving = asyncio.create_task(
                    serve_metrics(table.metrics_port, numbers.page, "trainer.metrics_port")
                )
                try:
                    return await (_lead(ranks, work) if isinstance(ranks, ProcessRanks) else work)
                finally:
                    serving.cancel()
                    await asyncio.gather(serving, return_exceptions=True)
            finally:
                await links.close()
        finally:
            home.release()
    finally:
        if own_network:
            await network.close()


async def _follow(ranks: ProcessRanks, table: TrainerTable) -> int:
    """The life of a rank other than 0; being asked to stop is rank 0's business."""
    _log.info("rank.following", rank=ranks.rank, ranks=ranks.world_size, device=ranks.device)
    make = partial(make_trainer, config=table, ranks=ranks)
    await asyncio.to_thread(follow, ranks, make)
    await asyncio.to_thread(ranks.close, tell=False)
    return 0


async def _lead(ranks: ProcessRanks, work: Coroutine[Any, Any, int]) -> int:
    """Do ``work`` as rank 0, then let the other ranks go. After an error they are told only if they
    are listening; otherwise they notice that we are gone."""
    tasks = [asyncio.create_task(work), asyncio.create_task(_keep_in_touch(ranks))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(ranks.close, tell=True)


async def _keep_in_touch(ranks: ProcessRanks) -> int:
    while True:
        await asyncio.sleep(ranks.timeout_s / IDLES_PER_TIMEOUT)
        await asyncio.to_thread(ranks.idle)


async def _incarnations(
    home: TrainerHome,
    clock: Clock,
    links: PlaneLinks,
    make_shell: Callable[[Start], TrainerShell],
    stop: asyncio.Event,
) -> int:
    rollbacks, last_step, republish = 0, -1, False
    while True:
        start = await asyncio.to_thread(home.start, clock, republish=republish)
        if start.position.step > last_step:
            rollbacks, last_step = 0, start.position.step
        match await make_shell(start).run(stop):
            case Exit(status=status, code=code, message=message):
                level = _log.info if status == 0 else _log.error
                level("trainer.ended", code=code, reason=message)
                return status
            case Rollback(code=code, message=message) as rollback:
                republish = rollback.republish
                rollbacks += 1
                _log.error("trainer.rolled_back", code=code, reason=message, times=rollbacks)
                if rollbacks > MAX_ROLLBACKS:
                    return 1
                # New connections: what was asked for on the old ones is then asked for again.
                for plane in WORK_PLANES:
                    links.renew(plane)
