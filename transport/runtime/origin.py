"""Install guard: are the packages that would be imported really ours?

Other distributions own the import names ``scheduler`` and ``edge_agent``. Installed into the same
environment they shadow ours, or overwrite files of ours, and the first symptom is an error far from
the cause. Every entry point calls ``verify_origin`` first.

What always holds: no foreign code runs. The packages are located, and their ``__init__`` is read
for the project's mark, but not imported.
"""

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Final

PROJECT: Final = "farflow"
PACKAGES: Final = ("cloud_trainer", "edge_agent", "farflow", "scheduler", "sim", "transport")
EXIT_CONFIG: Final = 78
"""EX_CONFIG of sysexits.h: a service manager must not restart us for it."""

_REMEDY: Final = (
    "farflow needs an environment of its own: another distribution (PyPI has a 'scheduler' and an "
    "'edge-agent') owns the same import name. Create a fresh one and install farflow alone:\n"
    "    python3 -m venv farflow-env && farflow-env/bin/pip install farflow"
)


def find_problem() -> str | None:
    """What is wrong with where the packages come from, in one sentence, or ``None``."""
    roots: dict[Path, str] = {}
    for name in PACKAGES:
        located = _locate(name)
        if isinstance(located, str):
            return located
        if not _is_ours(located):
            return f"package {name!r} at {located} is not farflow's"
        roots.setdefault(located.resolve().parent.parent, name)
    if len(roots) > 1:
        (first, one), (second, other) = list(roots.items())[:2]
        return f"two copies of farflow are mixed: {one!r} is in {first}, {other!r} in {second}"
    return None


def verify_origin() -> None:
    """Returns if all packages are ours; otherwise explains on stderr and exits with status 78."""
    problem = find_problem()
    if problem is not None:
        sys.stderr.write(f"farflow: {problem}.\n{_REMEDY}\n")
        raise SystemExit(EXIT_CONFIG)


def _locate(name: str) -> Path | str:
    """The package's ``__init__.py``, or what is wrong."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # imported already, by something that left no spec
        return f"package {name!r} was put into sys.modules by something else"
    if spec is None:
        return f"package {name!r} is not installed"
    if spec.origin is None or not spec.origin.endswith(".py"):
        places = list(spec.submodule_search_locations or [])
        return f"package {name!r} at {places[0] if places else spec.origin} has no __init__.py"
    return Path(spec.origin)


def _is_ours(init: Path) -> bool:
    """Does the module assign the project's name to ``__project__``?"""
    try:
        tree = ast.parse(init.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__project__" for t in node.targets)
        and isinstance(node.value, ast.Constant)
        and node.value.value == PROJECT
        for node in tree.body
    )
