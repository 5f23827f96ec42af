"""How the simulator's pictures look; needs the ``plots`` extra.

What always holds: colours are told apart by people who do not see red and green apart (Okabe and
Ito's set, and maps that grow darker evenly), and never carry a meaning alone; importing this module
does not import matplotlib.
"""

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from transport.errors import ConfigError

INK: Final = "#22252a"
FAINT: Final = "#7b818a"
GRID: Final = "#e3e6ea"
SERIES: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B8A800")
OUTCOMES: Final = {
    "trained": ("#0072B2", "trained on"),
    "wasted": ("#E69F00", "came, not used"),
    "stopped": ("#A4A9B0", "stopped"),
    "lost": ("#D55E00", "lost with its agent"),
    "open": ("#C3DDEE", "undecided at the end"),
}
DPI: Final = 110


def require_matplotlib() -> None:
    """Raises ConfigError, with the remedy, where pictures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib: pip install 'farflow[plots]'")


@contextlib.contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """A figure of so many inches, written to ``path`` as PNG in the end.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image  # matplotlib needs it, too

    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10.0,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "text.color": INK,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "grid.color": GRID,
        "legend.frameon": False,
    }
    with rc_context(style):
        made = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(made)
        yield made
        drawn = io.BytesIO()
        made.savefig(drawn, dpi=DPI, format="png", facecolor="white")
        # A palette makes the file a third as large; and without the metadata that matplotlib
        # writes (its version), equal pictures are equal files.
        image = Image.open(drawn).convert("RGB")
        image.quantize(256, dither=Image.Dither.NONE).save(path, format="PNG", optimize=True)


def short(policy: str) -> str:
    """A policy's name without its run."""
    return policy.rpartition("/")[2]


def seconds_axis(axes: Any, longest_s: float) -> float:
    """Label the x axis with a fitting unit; returns seconds per unit."""
    unit_s, unit = (1.0, "s") if longest_s < 600 else (60.0, "min")
    if longest_s >= 6 * 3600:
        unit_s, unit = 3600.0, "h"
    axes.set_xlabel(f"virtual time ({unit})")
    return unit_s
