"""Every method on corrupted CIFAR-10, a first run: ``results/cifar10-baselines.jsonl``.

    python -m bench.baselines --data DIR

Two corruptions, three label distributions, one seed: enough to see that a method works and where
it stands, not to rank what is close. Source models and adapters are taken from ``checkpoints/`` or
trained there. What the results files hold already, for the same weights, is not run again.
"""

from __future__ import annotations

from pathlib import Path

from scipy.stats import spearmanr

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
# Table 1, CIFAR-10-C: mean over 15 corruptions, ResNet-18 of full width
PAPER = {
    "Source (BN)": (56.78, 44.74, 33.88),
    "BN stats (BN)": (78.60, 53.19, 25.18),
    "ONDA (BN)": (77.93, 55.28, 28.64),
    "PseudoLabel (BN)": (79.39, 47.90, 22.61),
    "LAME (BN)": (58.27, 41.60, 31.54),
    "CoTTA (BN)": (80.45, 53.75, 24.01),
    "NOTE (IABN)": (76.27, 61.98, 49.45),
    "TENT (BN)": (80.36, 43.65, 20.32),
    "TENT + adapter (BN)": (80.39, 53.91, 30.32),
    "IABN": (76.23, 62.22, 49.69),
    "IABN + adapter": (80.58, 63.34, 71.64),
}


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
    return "\n".join([*lines, "## The order of the methods", "", order(there)])


def order(results: list[Result]) -> str:
    """Ranks here and in the paper's Table 1, and their rank correlation."""
    grid = tables.grid(results, row=name)
    here = {row: [grid[row][labels].mean for labels in LABELS] for row in PAPER if row in grid}
    lines = [
        "Rank of each method of the paper's Table 1 (CIFAR-10-C), here and there. The paper's is",
        "over 15 corruptions with a network of full width, so its numbers are not repeated here.",
        "",
        "| | F50 here | paper | U here | paper | B50 here | paper |",
        "|---|" + "---:|" * 6,
    ]
    columns = []
    for i in range(len(LABELS)):
        columns += [_ranks([v[i] for v in here.values()]), _ranks([PAPER[r][i] for r in here])]
    for j, row in enumerate(here):
        lines.append(f"| {row} | " + " | ".join(str(c[j]) for c in columns) + " |")
    agreement = [float(spearmanr(columns[i], columns[i + 1]).statistic) for i in (0, 2, 4)]
    shown = ", ".join(
        f"{tables.shift_name(c)} {v:+.2f}" for c, v in zip(LABELS, agreement, strict=True)
    )
    return "\n".join([*lines, "", f"Spearman's rank correlation: {shown}.", ""])


def _ranks(values: list[float]) -> list[int]:
    return [1 + sum(other > value for other in values) for value in values]


def main() -> None:
    """Train what is missing, run what is missing, write the results and their table."""
    given = options(__doc__, "results/cifar10-baselines.jsonl")
    known = (Path("results/cifar10-foundation.jsonl"),)
    publish(given.out.with_suffix(".md"), summary(run(EXPERIMENT, given, also=known)))


if __name__ == "__main__":
    main()
