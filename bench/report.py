"""The form of every benchmark's output, and its command line.

    python -m bench.NAME --json [--quick]

prints ``{"bench": NAME, "rows": [{"metric", "value", "unit", "reference", "ratio", "target",
"ok"}]}``; without ``--json`` a table for people. ``--quick`` ends within a minute.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured value; ``ratio`` is to ``reference``, measured in the same run."""

    metric: str
    value: float
    unit: str
    reference: str | None = None
    ratio: float | None = None
    target: str = ""
    ok: bool = True


def main(name: str, measure: Callable[[bool], list[Row]]) -> None:
    """Parse the command line, measure and print; ``measure`` takes ``quick``."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.quick)
    if arguments.json:
        print(json.dumps({"bench": name, "rows": [asdict(row) for row in rows]}))
        return
    for row in rows:
        ratio = "" if row.ratio is None else f"  {row.ratio:.2f} x {row.reference}"
        verdict = "" if not row.target else f"  [{row.target}: {'ok' if row.ok else 'MISSED'}]"
        print(f"{row.metric:42} {row.value:12.3f} {row.unit}{ratio}{verdict}")
