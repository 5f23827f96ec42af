"""No-op tasks through dask.distributed: the reference of the lease bench, in a process of its own.

One worker process per core of one thread each, the scheduler beside the client, as ``LocalCluster``
makes them: plain TCP, nothing durable, no agents that come and go. It favours dask.

    python -m bench.leases_dask TASKS      prints {"tasks_s": float, "version": str}
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

WARM_TASKS: Final = 500
BATCH: Final = 2000


def noop(number: int) -> int:
    return number


def tasks_s(tasks: int) -> float:
    """Tasks per second from submission to the last result at the client."""
    distributed: Any = importlib.import_module("distributed")
    with (
        distributed.LocalCluster(
            n_workers=os.cpu_count(), threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        _run(client, range(-WARM_TASKS, 0))
        began = time.perf_counter()
        for start in range(0, tasks, BATCH):
            _run(client, range(start, min(tasks, start + BATCH)))
        return tasks / (time.perf_counter() - began)


def _run(client: Any, numbers: Sequence[int]) -> None:
    assert client.gather(client.map(noop, numbers, pure=False)) == list(numbers)


if __name__ == "__main__":
    version = importlib.import_module("distributed").__version__
    print(json.dumps({"tasks_s": tasks_s(int(sys.argv[1])), "version": version}))
