"""Whether more signals or another interval make `ExpectedAccuracy` better: tried, and measured.

    python -m reproduction.accuracy_features --data DIR

Simulates shifts as a calibration does, on training images outside of the long-tailed subset and
under the four corruptions that are not tested on. Each regression is judged on the corruption that
it was not fitted to. About ten minutes on a core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twoshift.accuracy import VIEWS, read_signals, signals_of
from twoshift.accuracy.fits import RIDGE, ridge
from twoshift.accuracy.others import nuclear_norm, transport
from twoshift.accuracy.signals import NAMES
from twoshift.adapters.base import FLOOR
from twoshift.bench.provenance import revision, run_facts
from twoshift.calibration import facts as of_source
from twoshift.calibration import shifts
from twoshift.data import load
from twoshift.data.base import ImageSet
from twoshift.data.corruptions import corrupt
from twoshift.data.stream import to_float
from twoshift.errors import ModelError
from twoshift.estimators._bcts import fit_bcts, scaled
from twoshift.estimators._pace import FULL, RELATIVE
from twoshift.estimators.paced import Paced
from twoshift.methods import Streamed
from twoshift.train import reading
from twoshift.train.adapter import source_images
from twoshift.train.checkpoint import SourceModel, load_source

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
FILE = Path("results/accuracy-features.json")
NETWORKS = ("cifar10-bn", "cifar10-bn-ce", "cifar10-gn", "cifar10-vit")  # by loss, by architecture
STREAMS = range(2 * shifts.STREAMS)  # of every condition, as in a calibration with two twins
PER_CLASS = 300  # images to calibrate on, and as many to simulate with
MORE = ("transport", "norm", "mean_shift", "variance_shift")  # signals to try
SETS: dict[str, tuple[str, ...]] = {
    "present signals": (),
    "and Q-COT": ("transport",),
    "and nuclear norm": ("norm",),
    "and both": ("transport", "norm"),
    "and covariate distance": ("mean_shift", "variance_shift"),
    "and all": MORE,
}
APART = "each adjustment by itself"  # present signals, two regressions
COVERED = 0.95
EPS = 1e-5  # added to variances


class Rows(NamedTuple):
    """Windows of simulated streams, each under both adjustments.

    Attributes:
        signals: The signals `NAMES` and `MORE`, (rows, 8).
        right: True accuracy, (rows,).
        group: Number of the corruption.
        view: Position in `VIEWS` of the statistics that predicted.
        adjustment: 0 by the full label estimate, 1 by the relative one.
    """

    signals: Array
    right: Array
    group: Ints
    view: Ints
    adjustment: Ints

    def of(self, rows: NDArray[Any]) -> Rows:
        """Some of the rows."""
        return Rows(*(array[rows] for array in self))

    @staticmethod
    def cat(parts: Sequence[Rows]) -> Rows:
        """The rows of several parts."""
        return Rows(*map(np.concatenate, zip(*parts, strict=True)))


class Study(shifts.Simulation):
    """A simulation that reads more signals."""

    def rows(self, images: NDArray[np.uint8], labels: Ints) -> Rows:
        """All windows, as `Simulation.windows` draws them."""
        found: list[Rows] = []
        for condition, (name, severity) in enumerate(shifts.conditions(images)):
            corrupted = corrupt(images, name, severity) if severity else images
            group = shifts.CORRUPTIONS.index(name) if severity else len(shifts.CORRUPTIONS)
            for stream in STREAMS:
                rng = np.random.default_rng([condition, stream])
                drawn = shifts._stream(labels, self.classes, stream, rng)
                x, y = to_float(corrupted[drawn]), torch.from_numpy(labels[drawn])
                found += [self._read(group, view, x, y) for view in self.views]
        return Rows.cat(found)

    @torch.no_grad()
    def _read(self, group: int, view: int, x: Tensor, y: Tensor) -> Rows:
        method = self.views[view]
        method.reset()
        estimator = Paced(self.classes, temperature=self.temperature, bias=self.bias)
        kept = estimator._pace.start()
        signals, right, window = [], [], list[Tensor]()
        for i, batch in enumerate(x.split(shifts.BATCH), 1):
            fair = method(batch).double().cpu()
            calibrated = fair + self.contained
            probs = (self.temperature * calibrated).softmax(1)
            rows = scaled(probs, self.temperature, self.bias).double().numpy()
            kept, present = estimator._pace.advance(kept, rows)[:2]
            logs = torch.from_numpy(present).clamp_min(FLOOR).log()
            both = torch.stack([fair + logs[FULL], calibrated + logs[RELATIVE]])
            window.append(both.softmax(2))
            if i % shifts.WINDOW == 0:
                truth = y[(i - shifts.WINDOW) * shifts.BATCH : i * shifts.BATCH]
                for answers in torch.cat(window, 1):
                    now = read_signals(signals_of(answers, self.threshold)).tolist()
                    norms = [transport(answers, kept["prior"]), nuclear_norm(answers)]
                    signals.append([*now, *norms, *distances(method)])
                    right.append(float((answers.argmax(1) == truth).double().mean()))
                window = []
        same = np.full(len(right), group), np.full(len(right), view)
        return Rows(np.array(signals), np.array(right), *same, np.arange(len(right)) % 2)


def distances(method: torch.nn.Module) -> tuple[float, float]:
    """How far the stream's channel statistics are from the source's, mean over layers.

    Squared distance of the means in source standard deviations, and size of the log-ratio of the
    variances; logarithms of both means. They are compared with those of source images of the same
    labels. Zero for a method that follows no statistics.
    """
    if not isinstance(method, Streamed):
        return 0.0, 0.0
    source = method._source.mixture(method.prior.cpu().double()).float()
    means, variances = [], []
    sizes = [layer.num_features for layer in method._layers]
    parts = (s.split(sizes, 1) for s in (method.followed.cpu(), source))
    for (mean, var), (source_mean, source_var) in zip(*parts, strict=True):
        means.append(((mean - source_mean).square() / (source_var + EPS)).mean())
        variances.append(((var + EPS) / (source_var + EPS)).log().abs().mean())
    both = torch.stack([torch.stack(means).mean(), torch.stack(variances).mean()])
    first, second = both.clamp_min(1e-6).log().tolist()
    return first, second


def simulated(source: SourceModel, outside: ImageSet, data: Path) -> Rows:
    """The windows of a network, calibrated on other images than those that are simulated with."""
    order = np.argsort(outside.labels, kind="stable").reshape(len(outside.classes), -1)
    known, new = (
        outside.subset(np.sort(order[:, part].ravel()))
        for part in (slice(PER_CLASS), slice(PER_CLASS, 2 * PER_CLASS))
    )
    parts = reading.in_parts(len(known), known.images)
    with torch.inference_mode():
        logits = torch.cat([source.model(x) for x in reading.tensors(known.images, parts)])
    truth = torch.from_numpy(known.labels)
    temperature, bias = fit_bcts(logits, truth)
    facts: dict[str, Any] = {
        "temperature": temperature,
        "bias": bias,
        "assumes": of_source.assumes(source.card),
    }
    try:
        facts["moments"] = of_source.moments(source.model, source_images(source, data))
    except ModelError:
        facts["moments"] = None
    threshold = shifts.sure_threshold(logits, truth, temperature)
    return Study(source.model, facts, threshold).rows(new.images[:], new.labels)


def predictor(rows: Rows, columns: Sequence[int], strength: float = RIDGE) -> Callable[..., Array]:
    """From signals to accuracy, by a ridge regression."""
    weights, intercept = ridge(rows.signals[:, columns], rows.right, strength)
    return lambda x: x[:, columns] @ weights + intercept


def left_out(rows: Rows, columns: Sequence[int]) -> Array:
    """Errors, true minus foretold, on every corruption by a regression on the others."""
    errors = np.zeros(len(rows.right))
    for group in np.unique(rows.group):
        test = rows.group == group
        foretell = predictor(rows.of(~test), columns)
        errors[test] = rows.right[test] - foretell(rows.signals[test])
    return errors


def quantiles(errors: Array, group: Ints) -> tuple[float, float]:
    """The middle 95 % of all errors."""
    low, high = np.quantile(errors, [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return float(low), float(high)


def worst_group(errors: Array, group: Ints) -> tuple[float, float]:
    """The widest of the middle 95 % of the errors of each corruption."""
    each = [quantiles(errors[group == g], group) for g in np.unique(group)]
    return min(low for low, _ in each), max(high for _, high in each)


def symmetric(errors: Array, group: Ints) -> tuple[float, float]:
    """As far down as up: the 95th percentile of the size of all errors."""
    size = float(np.quantile(np.abs(errors), COVERED))
    return -size, size


def worst_symmetric(errors: Array, group: Ints) -> tuple[float, float]:
    """As far down as up, by the corruption with the largest errors."""
    size = max(symmetric(errors[group == g], group)[1] for g in np.unique(group))
    return -size, size


def stretched(errors: Array, group: Ints) -> tuple[float, float]:
    """The middle 95 % of all errors, wider by (groups + 1) / (groups - 1)."""
    groups = len(np.unique(group))
    low, high = quantiles(errors, group)
    factor = (groups + 1) / (groups - 1)
    return low * factor, high * factor


Rule = Callable[[Array, Ints], tuple[float, float]]
RULES: dict[str, Rule] = {
    "middle 95 % of all errors": quantiles,
    "the same, wider for few corruptions": stretched,
    "95 % of sizes of errors, both ways": symmetric,
    "widest middle 95 % of a corruption": worst_group,
    "the same, both ways": worst_symmetric,
}


def judged(rows: Rows, columns: Sequence[int], rule: Rule = quantiles) -> dict[str, float]:
    """Error and interval on every corruption, by what is known of the others alone."""
    return _told(rows, [_told_apart(rows, columns, rule)])


def judged_apart(rows: Rows, columns: Sequence[int], rule: Rule = quantiles) -> dict[str, float]:
    """The same by two regressions, one for each adjustment."""
    parts = [rows.of(rows.adjustment == a) for a in np.unique(rows.adjustment)]
    return _told(Rows.cat(parts), [_told_apart(part, columns, rule) for part in parts])


def _told_apart(rows: Rows, columns: Sequence[int], rule: Rule) -> Array:
    """For every row: the error, the distances to both ends of the interval, and its width."""
    told = np.zeros((len(rows.right), 4))
    for group in np.unique(rows.group):
        test = rows.group == group
        others = rows.of(~test)
        foretold = predictor(others, columns)(rows.signals[test])
        low, high = rule(left_out(others, columns), others.group)
        error = rows.right[test] - foretold
        ends = np.clip([foretold + low, foretold + high], 0, 1)
        told[test] = np.stack([error, error - low, high - error, ends[1] - ends[0]], 1)
    return told


def _told(rows: Rows, parts: Sequence[Array]) -> dict[str, float]:
    error, above, below, width = np.concatenate(parts).T
    inside, size = (above >= 0) & (below >= 0), np.abs(error)
    groups = [rows.group == group for group in np.unique(rows.group)]
    return {
        "error": 100 * float(size.mean()),
        "worst_error": 100 * max(float(size[group].mean()) for group in groups),
        "covered": 100 * float(inside.mean()),
        "least_covered": 100 * min(float(inside[group].mean()) for group in groups),
        "width": 100 * float(width.mean()),
    }


def compare(rows: Rows) -> dict[str, Any]:
    """Every set of signals with the present interval, and the present signals with every rule."""
    base, names = list(range(len(NAMES))), (*NAMES, *MORE)
    results: dict[str, Any] = {}
    for view in np.unique(rows.view):
        own = rows.of(rows.view == view)
        signals = {
            name: judged(own, [*base, *map(names.index, more)])
            for name, more in SETS.items()
            if own.signals[:, [names.index(m) for m in more]].any(0).all()  # has such signals
        }
        signals[APART] = judged_apart(own, base)
        rules = {name: judged(own, base, rule) for name, rule in RULES.items()}
        results[VIEWS[view]] = {"windows": len(own.right), "signals": signals, "intervals": rules}
    return results


def measure(data: Path, checkpoints: Path) -> dict[str, Any]:
    """All networks."""
    begun = time.monotonic()
    revision()  # of the code that measures, should it change meanwhile
    outside = load("cifar10_outside", "test", data)
    results = {
        name: compare(simulated(load_source(checkpoints / name), outside, data))
        for name in NETWORKS
    }
    facts = run_facts(outside, torch.device("cpu"), time.monotonic() - begun)
    return {"results": results, "facts": facts}


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default="data", help="folder of the data sets")
    add("--checkpoints", type=Path, default="checkpoints", help="folder of the source models")
    options = parser.parse_args()
    FILE.write_text(json.dumps(measure(options.data, options.checkpoints), indent=2) + "\n")


if __name__ == "__main__":
    main()
