"""What this installation can do, and what is wrong with it."""

import importlib.metadata
import importlib.util
import platform

from transport.runtime.build import installed_build
from transport.runtime.origin import find_problem

_REQUIRED = (
    "aiohttp", "aiomqtt", "pyzmq", "msgspec", "msgpack", "zstandard", "safetensors", "cryptography",
    "numpy",
)  # fmt: skip
_OPTIONAL = (
    ("torch", "torch", "torch engine and trainer", "torch"),
    ("transformers", "transformers", "torch engine and trainer", "torch"),
    ("reasoning_gym", "reasoning-gym", "reasoning-gym tasks", "tasks"),
    ("math_verify", "math-verify", "math-verify rewards", "tasks"),
    ("matplotlib", "matplotlib", "plots", "plots"),
    ("numba", "numba", "compiled delta codec", "fast"),
)


def report() -> tuple[list[str], bool]:
    """Lines for people, and whether everything that is required works."""
    import zmq

    from transport.weights.kernels import why_not

    lines = [f"farflow {installed_build()}, Python {platform.python_version()}"]
    healthy = True
    problem = find_problem()
    if problem is not None:
        lines.append(f"WRONG   {problem}")
        healthy = False
    else:
        lines.append("ok      packages come from one place")
    for name in _REQUIRED:
        version = _version(name)
        healthy = healthy and version is not None
        lines.append(f"ok      {name} {version}" if version else f"MISSING {name}")
    if zmq.has("curve"):
        lines.append(f"ok      libzmq {zmq.zmq_version()} with CURVE")
    else:
        lines.append("WRONG   libzmq without CURVE: reinstall pyzmq from PyPI")
        healthy = False
    for module, name, use, extra in _OPTIONAL:
        if importlib.util.find_spec(module) is None:
            lines.append(f"absent  {name}: no {use} (pip install 'farflow[{extra}]')")
        elif module == "numba" and why_not():
            lines.append(f"unused  {name} {_version(name)}: {why_not()}; numpy does the work")
        else:
            lines.append(f"ok      {name} {_version(name)}: {use}")
    return lines, healthy


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
