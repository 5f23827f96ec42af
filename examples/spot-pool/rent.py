"""An autoscaler hook: how many spot instances should there be?

The scheduler starts it with the demand on its standard input, as JSON, whenever that has changed:
per run how many more slots would help. This one only writes down how many instances that makes;
call your provider's command at the end of ``main``. After an exit status other than 0 the scheduler
asks again later.
"""

import json
import math
import sys
from pathlib import Path

SLOTS = 64
"""Of one instance, as in agent.toml."""
MOST = 16
"""More are not rented, whatever the scheduler would like."""


def instances(demand: dict[str, object]) -> int:
    """How many more instances of ``SLOTS`` slots the demand makes, at most ``MOST``.

    Raises:
        KeyError, TypeError: this is not what the scheduler says.
    """
    runs = demand["demand"]
    if not isinstance(runs, list):
        raise TypeError("demand is no list")
    slots: int = sum(run["more_slots"] for run in runs)
    return min(MOST, math.ceil(slots / SLOTS))


def main(out: Path) -> None:
    wanted = instances(json.load(sys.stdin))
    out.write_text(json.dumps({"more_instances": wanted}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
