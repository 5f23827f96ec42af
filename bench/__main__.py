"""``python -m bench``: every benchmark in full, results into ``bench/results``.

Not ``bench.vllm``: it needs an environment of its own and is run by hand there (``docs/vllm.md``).
"""

import subprocess
import sys
from pathlib import Path

NAMES = (
    "bulk",
    "data_algorithms",
    "delta",
    "fanout",
    "leases",
    "learning",
    "learning_lag",
    "operations",
    "placement",
    "simulator_network",
    "simulator_scale",
    "trainer_memory",
    "trajectory",
    "virtual_chaos",
    "wire",
)

if __name__ == "__main__":
    results = Path(__file__).parent / "results"
    for name in NAMES:
        done = subprocess.run(
            [sys.executable, "-m", f"bench.{name}", "--json"],
            check=True,
            capture_output=True,
            text=True,
        )
        (results / f"{name}.json").write_text(done.stdout, encoding="utf-8")
        print(f"{name}: {results / name}.json")
