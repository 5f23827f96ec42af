"""Coastlines and places for the dashboard's map, from the tables of ``sim.data``.

    python -m sim.geography > scheduler/dashboard/geography.js

The dashboard may not read the simulator's tables; that its copy is theirs is tested.
"""

import json
import sys

from sim.plot_map import load_places, load_world


def javascript() -> str:
    """The module that the dashboard imports."""
    rings = ",\n".join(json.dumps(ring, separators=(",", ":")) for ring in load_world().rings)
    places = sorted(load_places().places.items())
    known = ",\n".join(f"  {json.dumps(name)}: {json.dumps(list(at))}" for name, at in places)
    return (
        "// Made by `python -m sim.geography`; do not edit. Coastlines: Natural Earth, 1:110m,\n"
        "// public domain; places: the cities that providers name for their regions.\n\n"
        f"// Rings of longitude, latitude, ...\nexport const COASTS = [\n{rings},\n];\n\n"
        f"// [latitude, longitude]\nexport const PLACES = {{\n{known},\n}};\n"
    )


if __name__ == "__main__":
    sys.stdout.write(javascript())
