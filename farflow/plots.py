"""The pictures of a finished run, out of its ``metrics.jsonl``; needs the ``plots`` extra."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transport.errors import ConfigError
from transport.ids import policy_name
from transport.runs import HELD_OUT


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; lines that are none, as a torn last one, are left out."""
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def plots_available() -> bool:
    """Whether matplotlib can be imported."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def draw(records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """``learning_curve.png`` and ``policy_lag.png`` in ``folder``; returns what was written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    steps = [r for r in records if r.get("type") == "step"]
    evaluations = [r for r in records if r.get("type") == "evaluation" and r.get("done")]
    written = []
    policies = sorted({r["policy"] for r in steps})

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for policy in policies:
        own = [r for r in steps if r["policy"] == policy]
        axes.plot(
            [r["step"] for r in own],
            [r["reward_mean"] for r in own],
            linewidth=1,
            label=f"{policy_name(policy)}: training reward (sampled)",
        )
        by_name: dict[str, list[dict[str, Any]]] = {}
        for found in evaluations:
            if found["policy"] == policy:
                by_name.setdefault(found.get("name", HELD_OUT), []).append(found)
        for name, found_all in by_name.items():
            axes.plot(
                [r["step"] for r in found_all],
                [r["accuracy"] for r in found_all],
                "o-",
                label=f"{policy_name(policy)}: {name} accuracy",
            )
    axes.set(xlabel="optimizer step", ylabel="share correct", ylim=(0, 1), title="Learning curve")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    written.append(folder / "learning_curve.png")
    figure.savefig(written[-1], dpi=120)
    plt.close(figure)

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for policy in policies:
        own = [r for r in steps if r["policy"] == policy]
        x = [r["step"] for r in own]
        axes.plot(x, [r["policy_lag_mean"] for r in own], label=f"{policy_name(policy)}: mean")
        axes.plot(
            x,
            [r["policy_lag_max"] for r in own],
            ".",
            markersize=3,
            label=f"{policy_name(policy)}: maximum",
        )
    axes.set(xlabel="optimizer step", ylabel="policy lag (optimizer steps)", title="Policy lag")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    written.append(folder / "policy_lag.png")
    figure.savefig(written[-1], dpi=120)
    plt.close(figure)
    return written


def draw_comparison(
    curves: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]], file: Path
) -> None:
    """Rewards and held-out accuracies by step, both shares, of several runs in one PNG; ``curves``
    is by the label in the legend.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (label, (rewards, accuracies)) in enumerate(curves.items()):
        colour = f"C{number % 10}"
        axes.plot([*rewards], [*rewards.values()], color=colour, linewidth=1, label=label)
        axes.plot([*accuracies], [*accuracies.values()], "o--", color=colour)
    title = "Training reward (lines) and held-out accuracy (dots)"
    axes.set(xlabel="optimizer step", ylabel="share correct", title=title)
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(loc="lower right")
    try:
        figure.savefig(file, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(
            f"--plot {file}: {error.strerror or error}; name a file in a folder that is there"
        ) from error
    finally:
        plt.close(figure)
