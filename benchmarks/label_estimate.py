"""What bounding the state of ``paced`` costs: ``python -m benchmarks.label_estimate [--quick]``.

Streams of Gaussian classes whose exact posteriors are known, at several numbers of classes. Each is
adjusted by the estimator as it is, which keeps the largest probabilities of the last images, and by
one that keeps them all. Times are ratios to a product of matrices of the batch's and window's size.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.speed_report import Out, Quick, finish
from benchmarks.timing import Candidate, Check, milliseconds, ratios, take_turns
from twoshift.estimators import Paced, _pace
from twoshift.priors import longtail

BATCH, SLOT = 64, 128  # images per batch, and with the same labels
MOST = 2**15  # more classes than any stream here: all probabilities are kept
LIMITS = {10: 0.5, 100: 20.0, 1000: 20.0}  # ms per batch
LOSS = 0.25  # points that bounding may cost
Array = NDArray[np.float64]


def stream(classes: int, images: int, bursts: bool, seed: int) -> tuple[Array, NDArray[np.int64]]:
    """Posteriors that assume equally frequent classes, and labels: long-tailed, or in bursts."""
    rng = np.random.default_rng([seed, classes])
    width = 16
    means = rng.normal(size=(classes, width)) * np.sqrt(np.log(classes) / width)
    draws = [rng.dirichlet(np.full(classes, 1 / classes)) for _ in range(0, images, SLOT)]
    tail = rng.permutation(longtail(classes, 50))
    y = np.concatenate([rng.choice(classes, SLOT, p=q if bursts else tail) for q in draws])
    x = means[y] + rng.normal(size=(len(y), width))
    logits = x @ means.T - (means**2).sum(1) / 2
    rows = np.exp(logits - logits.max(1, keepdims=True))
    return rows / rows.sum(1, keepdims=True), y


def accuracy(estimator: Paced, rows: Array, labels: NDArray[np.int64]) -> float:
    """Per cent of predictions that are right when each batch is adjusted by its estimate."""
    right = 0
    for i in range(0, len(rows), BATCH):
        estimator.update(torch.from_numpy(rows[i : i + BATCH]))
        adjusted = rows[i : i + BATCH] * estimator.present.numpy()
        right += int((adjusted.argmax(1) == labels[i : i + BATCH]).sum())
    return 100 * right / len(rows)


def loss_checks(classes: int, images: int) -> list[Check]:
    """Accuracy without adjustment, with all probabilities, and what is lost with the largest."""
    checks = []
    for bursts, relative in ((False, False), (True, False), (True, True)):
        rows, labels = stream(classes, images, bursts, seed=0)
        with mock.patch.object(_pace, "KEPT", MOST):
            full = accuracy(Paced(classes, relative=relative), rows, labels)
        kind = "relative" if relative else "full"
        name = f"C={classes}, {'bursts' if bursts else 'long tail'}, {kind} estimate"
        plain = 100 * float((rows.argmax(1) == labels).mean())
        checks += [
            Check(f"{name}, not adjusted", plain, unit="% right"),
            Check(f"{name}, all probabilities kept", full, unit="% right"),
        ]
        if classes > _pace.KEPT:
            bounded = accuracy(Paced(classes, relative=relative), rows, labels)
            kept = f"the {_pace.KEPT} largest kept"
            checks.append(Check(f"{name}, {kept}", bounded, full - LOSS, unit="% right"))
    return checks


def cost_checks(classes: int, rounds: int) -> list[Check]:
    """Time of a batch, and memory of the state."""
    paced = Paced(classes, temperature=1.3, bias=[0.0] * classes)
    rows, _ = stream(classes, BATCH * 8, bursts=True, seed=1)
    for part in torch.from_numpy(rows).split(BATCH):
        paced.update(part)
    batch, window = torch.from_numpy(rows[:BATCH]).float(), rows[: _pace.WINDOWS[-1]]
    pair = {
        "paced": Candidate(lambda: paced.update(batch)),
        "product": Candidate(lambda: rows[:BATCH] @ window.T),
    }
    times = take_turns(pair, rounds)
    size = sum(tensor.nbytes for tensor in paced.state().values()) / 1e3
    ratio = float(np.median(ratios(times, "paced", "product")))
    return [
        milliseconds(f"C={classes}, a batch of {BATCH}", times["paced"], LIMITS[classes]),
        Check(f"C={classes}, a batch / a product of matrices", ratio),
        Check(f"C={classes}, state", size, high=256, unit="kB"),
    ]


def main(quick: Quick = False, out: Out = Path("results/label-estimate.json")) -> None:
    """Measure, print and write; the exit code is 1 if a limit is broken."""
    torch.set_num_threads(1)
    images, rounds = (512, 20) if quick else (4096, 200)
    checks = [c for n in LIMITS for c in (*loss_checks(n, images), *cost_checks(n, rounds))]
    finish(out, checks, settings={"batch": BATCH, "images": images, "threads": 1})


if __name__ == "__main__":
    typer.run(main)
