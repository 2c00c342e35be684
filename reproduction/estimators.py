"""Measure the estimators where only the labels shift: ``results/estimators.json`` and its table.

    python -m reproduction.estimators

The data are four overlapping Gaussian classes whose exact posteriors are known, which is the best
case for every estimator.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from reproduction import markdown
from twoshift.calibration import calibration_from, hand_out
from twoshift.estimators import BBSE, EM, EMA, FMAPLS, MAPLS, RLLS, OnlineFMAPLS, PriorEstimator
from twoshift.storage import atomic_file, write_json

SOURCE = np.array([0.70, 0.20, 0.07, 0.03])
TARGETS = {"labels as in training": SOURCE, "uniform": np.full(4, 0.25), "reversed": SOURCE[::-1]}
CENTRES = np.array([[0.0, 0.0], [1.5, 0.0], [0.0, 1.5], [1.5, 1.5]])
RUNS, SAMPLES, HELD_OUT, BATCH = 30, 512, 4000, 64
Array = NDArray[np.float64]


def draw(rng: np.random.Generator, prior: Array, n: int) -> tuple[Array, NDArray[np.int64]]:
    """Log-likelihoods under the source prior, and labels, of ``n`` samples."""
    labels = rng.choice(len(prior), n, p=prior)
    points = CENTRES[labels] + rng.normal(size=(n, 2))
    distances = ((points[:, None] - CENTRES) ** 2).sum(2)
    return -distances / 2 + np.log(SOURCE), labels


def estimate(estimator: PriorEstimator, logits: Array) -> Array:
    """The estimate after all samples, which come batch by batch."""
    for start in range(0, len(logits), BATCH):
        estimator.update(torch.from_numpy(logits[start : start + BATCH]).float().softmax(1))
    return estimator.prior.double().numpy()


def errors(seed: int, target: Array) -> dict[str, float]:
    """L1 error of every estimator on one stream."""
    rng = np.random.default_rng(seed)
    held_out, labels = draw(rng, SOURCE, HELD_OUT)
    facts = calibration_from(torch.from_numpy(held_out), torch.from_numpy(labels))
    logits, _ = draw(rng, target, SAMPLES)
    estimators: dict[str, PriorEstimator] = {
        "`ema`, with `bias_correction`": EMA(4, bias_correction=True),
        "`em`, calibrated": EM(4, **hand_out(facts, EM)),
        "`mapls`": MAPLS(4, SOURCE.tolist(), **hand_out(facts, MAPLS)),
        "`fmapls`": FMAPLS(4, **hand_out(facts, FMAPLS)),
        "`online_fmapls`": OnlineFMAPLS(4, **hand_out(facts, OnlineFMAPLS)),
        "`bbse`": BBSE(4, **hand_out(facts, BBSE)),
        "`rlls`": RLLS(4, **hand_out(facts, RLLS)),
    }
    return {
        name: float(np.abs(estimate(estimator, logits) - target).sum())
        for name, estimator in estimators.items()
    }


def table(record: dict[str, dict[str, float]]) -> str:
    """The errors as a Markdown table."""
    rows = [[name, *(f"{row[t]:.2f}" for t in TARGETS)] for name, row in record.items()]
    return markdown.table(["", *TARGETS], rows)


def main() -> None:
    """Measure, and write the errors and their table."""
    record: dict[str, dict[str, float]] = {}
    for name, target in TARGETS.items():
        runs = [errors(seed, target) for seed in range(RUNS)]
        for estimator in runs[0]:
            mean = float(np.mean([run[estimator] for run in runs]))
            record.setdefault(estimator, {})[name] = round(mean, 4)
    write_json(Path("results/estimators.json"), record)
    with atomic_file(Path("results/estimators.md")) as temporary:
        temporary.write_text(table(record))


if __name__ == "__main__":
    main()
