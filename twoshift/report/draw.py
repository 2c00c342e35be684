"""Drawings of the paper's figures: from plain data to a matplotlib figure, and to SVG or PNG.

Figures do not use pyplot, so none has to be closed, and the same data give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twoshift.errors import MissingExtra, SettingError
from twoshift.metrics import imbalance
from twoshift.priors import class_order
from twoshift.report.columns import SHIFTS, degree, shift_name
from twoshift.report.tables import Grid
from twoshift.storage import atomic_file

# Okabe and Ito's colours: colour-blind readers can distinguish them
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
# Tol's "muted", for ten classes
CLASS_COLOURS = (
    *("#332288", "#88CCEE", "#44AA99", "#117733", "#999933"),
    *("#DDCC77", "#CC6677", "#882255", "#AA4499", "#888888"),
)
MARKERS = "osD^vPX*"
FEW = 12  # classes, up to which each has a marker
SIDE = 0.05  # distance between methods, where that of labels is 1
FORMATS = (".svg", ".png")


def check_format(path: Path) -> None:
    """Refuse a file of another format, before any work is done."""
    if path.suffix not in FORMATS:
        raise SettingError("file of a figure", must_be="FILE.svg or FILE.png", got=path.name)


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format of the suffix."""
    import matplotlib as mpl

    check_format(path)
    fixed = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}
    with mpl.rc_context({"svg.hashsalt": "twoshift"}), atomic_file(path) as temporary:
        kind = path.suffix
        figure.savefig(temporary, format=kind[1:], dpi=140, metadata=fixed[kind])


def canvas(rows: int, columns: int, size: tuple[float, float], title: str, **options: Any) -> Any:
    """A figure of ``rows`` x ``columns`` panels, of ``size`` inches each, and its axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingExtra("figures need matplotlib", cure="pip install 'twoshift[plots]'") from e
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, lw=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
    return figure, axes


def accuracy(panels: Mapping[str, Grid], title: str) -> Any:
    """Accuracy against the degree of label shift: a panel per origin, a line per method.

    Columns that are no label shifts stay in their order.
    """
    width = max(5.2, 8 / len(panels))  # including the legend
    figure, axes = canvas(1, len(panels), (width, 4.2), title, sharey=True)
    longest_first = sorted(panels.values(), key=len, reverse=True)  # gives the legend its order
    names = list(dict.fromkeys(name for table in longest_first for name in table))
    shifts = (c for table in longest_first for cells in table.values() for c in cells)
    labels = sorted(dict.fromkeys(shifts), key=lambda name: degree(name)[0])
    are_shifts = {name.partition("-")[0] for name in labels} <= {*SHIFTS, "dirichlet"}
    lines = {}
    for ax, (origin, table) in zip(axes[0], panels.items(), strict=True):
        for name, cells in table.items():
            i = names.index(name)
            # side by side, so that intervals do not hide one another
            aside = SIDE * (i - (len(names) - 1) / 2)
            places = np.array([labels.index(c) for c in cells]) + aside
            means = np.array([100 * entry.mean for entry in cells.values()])
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            style = {"color": colour, "marker": marker, "ls": "--" if "oracle" in name else "-"}
            (lines[name],) = ax.plot(places, means, ms=5, label=name, **style)
            for place, entry in zip(places, cells.values(), strict=True):
                if entry.interval is not None:
                    low, high = 100 * np.array(entry.interval)
                    ax.vlines(place, low, high, color=colour, alpha=0.4, lw=1)
        ax.set_xticks(range(len(labels)), [shift_name(c) if are_shifts else c for c in labels])
        ax.set_title(origin, loc="left", fontsize=10)
        if are_shifts:
            ax.set_xlabel("label shift: forward (as in training) to backward")
    axes[0, 0].set_ylabel("accuracy, %")
    handles = [lines[name] for name in names]
    figure.legend(handles, names, frameon=False, fontsize=9, loc="outside right center")
    return figure


def distributions(
    panels: Mapping[str, Mapping[str, NDArray[np.int64]]], title: str, note: str = ""
) -> Any:
    """Label distributions: a panel per data set, a line per split, with its number of images.

    Classes are ordered by frequency in the first split of a panel.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = canvas(rows, columns, (4.3, 3.1), title)
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    for ax, (name, splits) in zip(axes.flat, panels.items(), strict=False):
        of_splits = list(splits.values())
        order = np.lexsort((of_splits[-1], -of_splits[0]))  # the last split breaks ties
        for i, (split, counts) in enumerate(splits.items()):
            share = 100 * counts[order] / counts.sum()
            marker = MARKERS[i] if len(order) <= FEW else None
            style = {"color": COLOURS[i], "lw": 1.6, "label": f"{split}: {counts.sum():,}"}
            ax.plot(np.arange(1, len(order) + 1), share, marker=marker, ms=4, **style)
        ax.set_title(name, loc="left", fontsize=10)
        ax.set_ylim(bottom=0)
        ax.set_xlabel(f"class, by frequency in {next(iter(splits))}", fontsize=8)
        ax.legend(frameon=False, fontsize=7.5)
    for ax in axes[:, 0]:
        ax.set_ylabel("share of the images, %", fontsize=9)
    if note:
        figure.supxlabel(note, fontsize=8, x=0.01, ha="left")
    return figure


def estimates(
    runs: Mapping[str, Mapping[str, Mapping[str, Any]]], counts: Sequence[int], title: str
) -> Any:
    """Estimated against true labels: s over time, and the distribution after the last batch.

    Args:
        runs: Traces of results, by label shift (a column each) and method (a line each).
        counts: Training images of every class.
        title: Printed above.
    """
    figure, axes = canvas(2, len(runs), (4.2, 2.9), title, sharey="row")
    order = class_order(counts)
    for (upper, lower), (labels, traces) in zip(axes.T, runs.items(), strict=True):
        truth = np.asarray(next(iter(traces.values()))["true_prior"])
        places = np.arange(1, len(truth) + 1)
        upper.axhline(imbalance(truth, counts), color="black", ls="--", lw=1.2, label="truth")
        lower.bar(places, 100 * truth[order], width=0.9, color="0.8", label="truth")
        for i, (name, trace) in enumerate(traces.items()):
            style = {"color": COLOURS[i], "lw": 1.6, "label": name}
            upper.plot(np.arange(1, len(trace["s"]) + 1), trace["s"], **style)
            marker = MARKERS[i] if len(truth) <= FEW else None
            share = 100 * np.asarray(trace["prior"][-1])[order]
            lower.plot(places, share, marker=marker, ms=4, **style)
        upper.set_title(f"{labels} labels", loc="left", fontsize=10)
        upper.set_ylim(-1, 1)
        upper.set_xlabel("batch", fontsize=9)
        lower.set_xlabel("class, by frequency in training", fontsize=9)
    axes[0, 0].set_ylabel("degree s: +1 head, -1 tail", fontsize=9)
    axes[1, 0].set_ylabel("share after the last batch, %", fontsize=9)
    for ax in axes[:, 0]:
        ax.legend(frameon=False, fontsize=8)
    return figure


def boundaries(
    panels: Mapping[str, Mapping[str, NDArray[np.float64]]],
    axis: NDArray[np.float64],
    clouds: Mapping[str, NDArray[np.float32]],
    best: Sequence[float],
    title: str,
) -> Any:
    """Decision boundaries in the plane.

    Args:
        panels: Margins on a square grid, by panel and line; 0 is the boundary.
        axis: Coordinates of the grid, along both axes.
        clouds: Points of the ``"head"`` and the ``"tail"`` class, (N, 2) each.
        best: Where the best boundary crosses the first axis, for every line of a panel.
        title: Printed above.
    """
    figure, axes = canvas(1, len(panels), (4.3, 4.5), title, sharex=True, sharey=True)
    marks = {"head": ("0.72", "o", 6), "tail": ("black", "^", 12)}
    for ax, (name, lines) in zip(axes[0], panels.items(), strict=True):
        ax.grid(visible=False)
        for kind, (colour, marker, size) in marks.items():
            style = {"s": size, "c": colour, "marker": marker, "lw": 0, "alpha": 0.8}
            ax.scatter(*clouds[kind].T, label=f"{kind} class", **style)
        for place, colour, dashes, (label, margins) in zip(
            best, COLOURS, ("-", "--", "-."), lines.items(), strict=False
        ):
            style = {"colors": [colour], "linestyles": [dashes], "linewidths": 2.2}
            ax.contour(axis, axis, margins, levels=[0], **style)
            ax.plot([], [], color=colour, ls=dashes, lw=2.2, label=label)
            ax.axvline(place, color=colour, lw=0.8, ls=":")
        ax.plot([], [], color="0.3", lw=0.8, ls=":", label="best for these labels")
        ax.set_title(name, loc="left", fontsize=10)
        ends = (axis[0], axis[-1])
        ax.set(xlim=ends, ylim=ends, aspect="equal")
        ax.set_xlabel("first coordinate", fontsize=9)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12)}
        ax.legend(fontsize=8, frameon=False, ncols=3, handlelength=2.8, **below)
    axes[0, 0].set_ylabel("second coordinate", fontsize=9)
    return figure


def maps(
    panels: Mapping[str, tuple[NDArray[np.float64], NDArray[np.int64]]],
    classes: Sequence[str],
    title: str,
) -> Any:
    """Maps of features: a panel per method, coloured by the true class.

    Args:
        panels: Places, (N, 2), and labels, (N,).
        classes: Names, in the order of the labels; at most ten.
        title: Printed above.
    """
    assert len(classes) <= len(CLASS_COLOURS)
    figure, axes = canvas(1, len(panels), (5.0, 4.8), title)
    for ax, (name, (places, labels)) in zip(axes[0], panels.items(), strict=True):
        for c, label in enumerate(classes):
            ax.scatter(*places[labels == c].T, s=5, c=CLASS_COLOURS[c], lw=0, label=label)
        ax.set_title(name, loc="left", fontsize=10)
        ax.set_xlabel("t-SNE 1", fontsize=9)
        ax.grid(visible=False)
        ax.set(xticks=[], yticks=[])
    axes[0, 0].set_ylabel("t-SNE 2", fontsize=9)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, names, frameon=False, fontsize=9, markerscale=3, loc="outside right center"
    )
    return figure
