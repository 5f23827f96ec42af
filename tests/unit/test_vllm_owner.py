"""Processes of a vLLM end with the agent that they belong to, and when they hang."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edge_agent.engines import vllm_owner
from edge_agent.engines.vllm_owner import OWNER, end_children

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc"),
]

WATCHES = (
    "import sys, time; from edge_agent.engines.vllm_owner import watch_owner; watch_owner();"
    " print('watches', flush=True); time.sleep(60)"
)
AGENT = f"""
import subprocess, sys, time
from edge_agent.engines.vllm_owner import own_processes
own_processes()
core = '''
import os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", {WATCHES!r}], stdout=subprocess.PIPE)
worker.stdout.readline()
print(os.getpid(), worker.pid, flush=True)
time.sleep(60)
'''
child = subprocess.Popen([sys.executable, "-c", core])
time.sleep(60)
"""
"""An agent whose engine core watches nobody, but its worker does, as with several workers."""
WITHIN_S, LOOK_S = 15.0, 0.05


LATE = """
import os, subprocess, sys, time
print(os.getpid(), flush=True)
sys.stdin.readline()
subprocess.run([sys.executable, "-c", 'from edge_agent.engines.vllm_owner import watch_owner;'
    ' watch_owner()'])
time.sleep(60)
"""
"""An engine core whose worker has loaded our code when the agent is gone."""


def lives(pid):
    return bool(vllm_owner._born(pid))


def gone(pids):
    for _ in range(int(WITHIN_S / LOOK_S)):
        if not any(map(lives, pids)):
            return True
        time.sleep(LOOK_S)
    return False


def test_an_agent_that_is_killed_leaves_nothing_behind():
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE)
    pids = [int(one) for one in agent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(lives, pids))
    agent.kill()  # not waited for: as a zombie it is dead, too
    assert gone(pids)
    agent.wait()
    agent.stdout.close()


def test_one_that_was_still_starting_ends_too():
    agent = subprocess.Popen(["sleep", "60"])
    own = f"{agent.pid}/{vllm_owner._born(agent.pid)}"
    core = subprocess.Popen(
        [sys.executable, "-c", LATE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, OWNER: own},
    )
    core.stdout.readline()
    agent.kill()
    agent.wait()
    core.stdin.close()
    assert core.wait(WITHIN_S) == -signal.SIGKILL
    core.stdout.close()


@pytest.mark.parametrize("owner", ["{pid}/1", "4194303/77", "{pid}/{born}", "", "nonsense", "1/"])
def test_only_an_owner_that_ended_ends_a_process(owner):
    """The first two are another process by that number, and none."""
    own = owner.format(pid=os.getpid(), born=vllm_owner._born(os.getpid()))
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHES], stdout=subprocess.PIPE, env={**os.environ, OWNER: own}
    )
    if owner in ("{pid}/1", "4194303/77"):
        assert process.wait(WITHIN_S) == -signal.SIGKILL
    else:
        assert process.stdout.readline() == b"watches\n"
        assert process.poll() is None
    process.kill()
    process.wait()
    process.stdout.close()


def test_what_a_thread_started_ends_with_its_descendants_and_nothing_else():
    tree = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)"
    made, done = {}, threading.Event()

    def start():
        made["thread"] = threading.get_native_id()
        made["process"] = subprocess.Popen(
            [sys.executable, "-c", f"{tree}; p.wait()"], stdout=subprocess.PIPE
        )
        made["below"] = int(made["process"].stdout.readline())
        done.wait()

    thread = threading.Thread(target=start)
    other = subprocess.Popen(["sleep", "60"])
    thread.start()
    while "below" not in made:
        time.sleep(0.01)
    try:
        assert end_children(made["thread"]) == 2
        assert gone([made["below"]])
        assert made["process"].wait(WITHIN_S) == -signal.SIGKILL
        assert other.poll() is None
        assert end_children(made["thread"]) == 0
    finally:
        done.set()
        thread.join()
        other.kill()
        other.wait()
        made["process"].stdout.close()
