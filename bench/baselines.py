"""Every method on corrupted CIFAR-10, a first run: ``results/cifar10-baselines.jsonl``.

    python -m bench.baselines --data DIR

Two corruptions, three label distributions, one seed: enough to see that a method works and where
it stands, not to rank what is close. Source models and adapters are taken from ``checkpoints/`` or
trained there. What the results files hold already, for the same weights, is not run again.
"""

from __future__ import annotations

from pathlib import Path

from bench.runner import (
    Experiment,
    Result,
    Row,
    clean_accuracies,
    disturbed,
    name,
    options,
    publish,
    run,
)
from twoshift.report import tables

BN = ["source", "bn_stats", "onda", "pseudo_label", "lame", "cotta", "tent", "sar", "delta"]
BN += ["isfda", "im_loss", "eata", "rotta"]
IABN = ("source", "note", "iabn", "im_loss", "lame")
BOTH = (None, "trained")
LABELS = ("forward-50", "uniform", "backward-50")
EXPERIMENT = Experiment(
    rows=[
        # CoTTA is by far the slowest: without its adapter, for a first look
        *(Row("bn", m, a) for m in BN for a in BOTH if (m, a) != ("cotta", "trained")),
        *(Row("bn", "tent", "trained", e) for e in ("em", "bbse", "rlls", "oracle")),
        Row("bn", "logit_adjust"),
        Row("bn", "logit_adjust", None, "oracle"),
        *(Row("iabn", m, a) for m in IABN for a in BOTH),
        Row("iabn", "iabn", "trained", "oracle"),
        Row("iabn", "logit_adjust"),
        Row("iabn", "logit_adjust", None, "oracle"),
        *(Row("gn", m, a) for m in ("source", "sar") for a in BOTH),
    ],
    corruptions=("gaussian_noise", "contrast"),
    seeds=dict.fromkeys(LABELS, (0,)),
    slow=frozenset({"cotta"}),
)


def summary(results: list[Result]) -> str:
    """The results as Markdown."""
    there = disturbed(results)
    pixels = sorted({r["facts"]["pixels"] for r in there})
    lines = [
        "# Every method on corrupted CIFAR-10: a first run",
        "",
        "Made by `python -m bench.baselines` from `results/cifar10-baselines.jsonl`. CIFAR-10-LT",
        "(ratio 100), width-16 ResNet-18, balanced softmax, one source training per normalisation;",
        "severity 5, batches of 64, one stream seed: differences of a point or two mean nothing.",
        f"Settings: preset `cifar10-c`. Pixels: {'; '.join(pixels)}. Clean test images, uniform",
        f"labels, source model: {clean_accuracies(results)}. Online accuracy in %.",
        "",
        "## Mean over gaussian_noise and contrast",
        "",
        tables.markdown(tables.with_mean(tables.grid(there, row=name))),
    ]
    for corruption in EXPERIMENT.corruptions:
        part = [r for r in there if r["cell"]["corruption"] == corruption]
        table = tables.with_mean(tables.grid(part, row=name))
        lines += [f"## {corruption}", "", tables.markdown(table)]
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, run what is missing, write the results and their table."""
    given = options(__doc__, "results/cifar10-baselines.jsonl")
    known = (Path("results/cifar10-foundation.jsonl"),)
    publish(given.out.with_suffix(".md"), summary(run(EXPERIMENT, given, also=known)))


if __name__ == "__main__":
    main()
