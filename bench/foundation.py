"""CIFAR-10-LT to CIFAR-10-C, four corruptions: the results in ``results/cifar10-foundation.jsonl``.

    python -m bench.foundation --data DIR

Source models and adapters are taken from ``checkpoints/`` or trained there (an hour on two cores).
What is in the results file already, for the same weights, is not run again.
"""

from __future__ import annotations

from typing import Any

from bench.runner import Experiment, Row, clean_accuracies, disturbed, options, publish, run
from twoshift.report import tables

CORRUPTIONS = ("gaussian_noise", "defocus_blur", "contrast", "jpeg_compression")
EXPERIMENT = Experiment(
    rows=[
        Row("bn", "source"),
        Row("bn", "bn_stats"),
        Row("bn", "tent"),
        Row("bn", "tent", "identity"),
        Row("bn", "tent", "trained"),
        Row("bn", "tent", "trained", "oracle"),
        Row("iabn", "source"),
        Row("iabn", "iabn"),
        Row("iabn", "iabn", "identity"),
        Row("iabn", "iabn", "trained"),
        Row("iabn", "iabn", "trained", "oracle"),
    ],
    corruptions=CORRUPTIONS,
    # every image is in the uniform stream, so its seeds differ by the order only
    seeds={"forward-50": (0, 1, 2), "uniform": (0,), "backward-50": (0, 1, 2)},
)


def name(result: dict[str, Any]) -> str:
    """Row of the table; the two source models are told apart."""
    plain = tables.row_name(result)
    return f"{plain} ({result['source']['norm'].upper()})" if plain == "Source" else plain


def summary(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    table = tables.with_mean(tables.grid(disturbed(results), row=name))
    pairs = [
        ("TENT + adapter", "TENT"),
        ("TENT + adapter", "TENT + identity adapter"),
        ("TENT + adapter, oracle prior", "TENT"),
        ("TENT + adapter, oracle prior", "TENT + identity adapter"),
        ("IABN + adapter", "IABN"),
        ("IABN + adapter", "IABN + identity adapter"),
        ("IABN + adapter, oracle prior", "IABN"),
        ("IABN + adapter, oracle prior", "IABN + identity adapter"),
    ]
    estimates = tables.grid(disturbed(results), "s_error_mean", row=name)
    pixels = sorted({r["facts"]["pixels"] for r in disturbed(results)})
    lines = [
        "# CIFAR-10-LT (ratio 100) to corrupted CIFAR-10, severity 5",
        "",
        "Made by `python -m bench.foundation` from `results/cifar10-foundation.jsonl`. Online",
        f"accuracy in %, mean over {', '.join(CORRUPTIONS)}; width-16 ResNet-18, one source",
        "training, batches of 64; 95 % interval (Student's t) over 3 stream seeds (uniform: one).",
        f"Pixels: {'; '.join(pixels)}. Clean test images, uniform labels, source model: "
        f"{clean_accuracies(results)}.",
        "",
        tables.markdown(table),
        "Paired differences on identical streams, points of accuracy:",
        "",
        tables.markdown_differences(tables.differences(table, pairs)),
        "Backward-50 by corruption, since a mean hides what differs:",
        "",
        by_corruption(results, "backward-50"),
        "Error of the label estimate: s minus the true s, mean over time (+: too far to the head):",
        "",
        tables.markdown(estimates, scale=1, digits=2),
    ]
    return "\n".join(lines)


def by_corruption(results: list[dict[str, Any]], labels: str) -> str:
    """One column per corruption, mean over seeds."""
    lines = ["| | " + " | ".join(CORRUPTIONS) + " |", "|---|" + "---:|" * len(CORRUPTIONS)]
    columns = {}
    for corruption in CORRUPTIONS:
        place = (corruption, labels)
        there = [r for r in results if (r["cell"]["corruption"], r["cell"]["labels"]) == place]
        columns[corruption] = tables.grid(there, row=name)
    for row in columns[CORRUPTIONS[0]]:
        values = [f"{100 * columns[c][row][labels].mean:.1f}" for c in CORRUPTIONS]
        lines.append(f"| {row} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train what is missing, run what is missing, write the results and their table."""
    given = options(__doc__, "results/cifar10-foundation.jsonl")
    results = run(EXPERIMENT, given)
    publish(given.out.with_suffix(".md"), summary(results))


if __name__ == "__main__":
    main()
