"""What ``farflow up`` adds to its daemons' command lines."""

import itertools
import json

from core_builders import make_run

from farflow.local_argv import CommandLines
from farflow.run_folder import RunFolder
from farflow.up_config import LocalAgent

PORTS = {"control": 1, "trajectories": 2, "weights": 3}
ADAPTER = {"settings": {"lora": {"publish": "adapter"}}}


def overrides_of(tmp_path, run, **settings):
    lines = CommandLines(RunFolder(tmp_path), (), run)
    argv = lines.agent(LocalAgent(name="near", link="none", settings=settings), PORTS)
    given = [text for flag, text in itertools.pairwise(argv) if flag == "--set"]
    pairs = [text.split("=", 1) for text in given]
    return {key: json.loads(value) for key, value in pairs}  # the last one counts


def test_an_agent_here_is_told_where_the_model_below_an_adapter_is(tmp_path):
    key = "agent.local_models.solver"
    assert overrides_of(tmp_path, make_run(policy=ADAPTER))[key] == "m"
    assert key not in overrides_of(tmp_path, make_run())
    named = overrides_of(tmp_path, make_run(policy=ADAPTER), local_models={"solver": "mine"})
    assert named[key] == "mine"
