"""Plots as PNG: accuracy against label shift, and the label estimate against the truth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twoshift.errors import MissingExtra
from twoshift.metrics import imbalance
from twoshift.report.tables import Grid, Result, row_name, shift_name
from twoshift.storage import atomic_file

PALETTE = ("#7f7f7f", "#bcbd22", "#1f77b4", "#17becf", "#d62728", "#ff7f0e", "#2ca02c", "#9467bd")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as e:
        raise MissingExtra("plots need matplotlib", cure="pip install 'twoshift[plots]'") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def accuracy_against_shift(table: Grid, path: Path, title: str = "") -> None:
    """One line per method over the degree of label shift, with 95 % intervals."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for i, ((name, cells), colour) in enumerate(zip(table.items(), PALETTE * 3, strict=False)):
        columns = list(cells)
        # side by side: bands or bars of many methods would hide one another
        places = np.arange(len(columns)) + 0.05 * (i - (len(table) - 1) / 2)
        style = "--" if "oracle" in name else "-"
        means = np.array([100 * cells[c].mean for c in columns])
        axes.plot(places, means, style, marker="o", ms=4, color=colour, label=name)
        if all(cells[c].interval for c in columns):
            low, high = np.array([cells[c].interval for c in columns]).T * 100
            reach = [means - low, high - means]
            axes.errorbar(places, means, reach, fmt="none", ecolor=colour, alpha=0.35, lw=1)
    axes.set_xticks(range(len(columns)), [shift_name(c) for c in columns])
    axes.set_xlabel("label shift: forward (as in training) to backward (reversed)")
    axes.set_ylabel("accuracy, %")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    _save(figure, path)


def estimate_over_time(
    results: Sequence[Result], class_counts: Sequence[int], path: Path, title: str = ""
) -> None:
    """Estimated against true label distribution: its degree s over time, and at the end.

    One column per label shift; lines are the methods of ``results``, one run each.
    """
    plt = _pyplot()
    by_labels: dict[str, list[Result]] = {}
    for result in results:
        by_labels.setdefault(result["cell"]["labels"], []).append(result)
    figure, axes = plt.subplots(
        2, len(by_labels), figsize=(4 * len(by_labels), 6), layout="constrained", squeeze=False
    )
    for column, (labels, runs) in enumerate(by_labels.items()):
        upper, lower = axes[0, column], axes[1, column]
        truth = np.asarray(runs[0]["trace"]["true_prior"])
        classes = np.arange(len(truth))
        upper.axhline(imbalance(truth, class_counts), color="black", ls="--", lw=1, label="true")
        lower.bar(classes, truth, color="0.85", label="true")
        for run, colour in zip(runs, PALETTE[2:] * 3, strict=False):
            upper.plot(run["trace"]["s"], color=colour, label=row_name(run))
            lower.plot(classes, run["trace"]["prior"][-1], "o-", ms=4, color=colour)
        upper.set_title(f"{labels} labels", loc="left", fontsize=10)
        upper.set_ylim(-1, 1)
        upper.set_xlabel("batch")
        lower.set_xlabel("class, most frequent in training first")
        for ax in (upper, lower):
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.25)
    axes[0, 0].set_ylabel("s: +1 head, -1 tail")
    axes[1, 0].set_ylabel("share, after the last batch")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=140, metadata={"Software": None})
    finally:
        _pyplot().close(figure)
