"""How well accuracy is told without labels, on streams whose labels are known; others beside it.

    python -m reproduction.accuracy --data DIR

Runs `recommended` on the source model ``cifar10-bn`` over the 15 corruptions of CIFAR-10-C at three
severities, each with three label distributions, and compares `live.expected_accuracy` with the
true accuracy of every 512 images, and with other estimates. Under twenty minutes on a core; run
again after an interruption, it continues. Nothing is chosen by these streams.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor

from twoshift import priors
from twoshift.accuracy import VIEWS, others
from twoshift.adapters import CalibratedAdapter, adapted_heads, attach, logit_adapter
from twoshift.bench.provenance import revision, run_facts
from twoshift.calibration import hand_out, known_facts
from twoshift.data import load
from twoshift.data.corrupted import corrupted
from twoshift.data.corruptions import BENCHMARK
from twoshift.data.stream import Stream
from twoshift.estimators import Paced
from twoshift.methods import LabelAware, Streamed
from twoshift.models.head import capture_features
from twoshift.storage import atomic_file
from twoshift.train.checkpoint import SourceModel, load_source

FILE = Path("results/accuracy.json")
SOURCE = "cifar10-bn"
LABELS = ("forward-50", "uniform", "backward-50")
SEVERITIES = (1, 3, 5)
BATCH, WINDOW, IMAGES = 64, 512, 1536
DROPPED = ("gaussian_noise", "defocus_blur", "contrast", "jpeg_compression")  # AETTA's, at 5
OURS = "expected accuracy"
SCORE = "nuclear norm"  # no accuracy; only its order counts
AETTA = "AETTA"
Row = dict[str, Any]


def recommended_of(source: SourceModel) -> LabelAware:
    """What is recommended, made of a source model's facts as tables do, with the expectation."""
    facts = known_facts(source, Streamed.statistics_on(source.model))
    known = hand_out(facts, CalibratedAdapter)
    counts, assumes = known["class_counts"], known.get("assumes")
    adapter = logit_adapter(source.model, assumes, counts, known["temperature"])
    method = Streamed(attach(source.model, adapter), **hand_out(facts, Streamed))
    estimator = Paced(adapter.classes, **hand_out(facts, Paced, calibrated=True))
    return LabelAware(method, estimator, facts["accuracy_judge"])


@torch.no_grad()
def seen(live: LabelAware, stream: Stream) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Answers, labels and features of the batches of a stream."""
    head = next(head for _, head in adapted_heads(live))
    for batch in stream:
        with capture_features(head) as passes:
            logits = live(batch.x)
        # of several passes, the one that was answered by
        features = min(passes, key=lambda h: float((head.shifted(h) - logits).abs().max()))
        yield logits, batch.y, features


def source_facts(live: LabelAware, data: Path) -> dict[str, float]:
    """What others know of the source: answers to images that the model was not trained on."""
    live.reset()
    stream = Stream(load("cifar10_outside", "test", data), batch_size=BATCH)
    answers, labels, _ = map(torch.cat, zip(*seen(live, stream), strict=True))
    probs = answers.softmax(1)
    accuracy = float((probs.argmax(1) == labels).float().mean())
    return {
        "accuracy": accuracy,
        "confidence": others.mean_confidence(probs),
        "threshold": others.confidence_threshold(probs, accuracy),
    }


def windows(
    live: LabelAware, stream: Stream, known: Mapping[str, float], prior: Sequence[float], drop: bool
) -> Iterator[Row]:
    """The truth and all estimates for every window of a stream.

    Args:
        live: What is recommended.
        stream: The stream.
        known: The facts of `source_facts`.
        prior: Label distribution of the source.
        drop: Whether to compute AETTA.
    """
    live.reset()
    head = next(head for _, head in adapted_heads(live))
    generator = torch.Generator().manual_seed(0)
    parts: list[tuple[Tensor, Tensor]] = []
    dropped: list[Tensor] = []
    for logits, y, features in seen(live, stream):
        parts.append((logits.softmax(1), y))
        if drop:
            dropped.append(others.dropout_passes(features, head.shifted, generator))
        if len(parts) < WINDOW // BATCH:
            continue
        probs, labels = map(torch.cat, zip(*parts, strict=True))
        expected = live.expected_accuracy
        assert expected is not None
        estimates = {
            OURS: expected.value,
            "mean confidence": others.mean_confidence(probs),
            "DoC": others.difference_of_confidences(probs, known["accuracy"], known["confidence"]),
            "ATC": others.thresholded_confidence(probs, known["threshold"]),
            "COT": others.transport(probs, prior),
            "Q-COT": others.transport(probs, live.prior.double()),
            SCORE: others.nuclear_norm(probs),
        }
        if drop:
            estimates[AETTA] = others.dropout_disagreement(probs, torch.cat(dropped, 1))
        yield {
            "right": float((probs.argmax(1) == labels).double().mean()),
            "low": round(expected.low, 6),
            "high": round(expected.high, 6),
            "view": VIEWS[live.view_in_use],
            "estimates": {name: round(value, 6) for name, value in estimates.items()},
        }
        parts, dropped = [], []


def measure_corruption(
    live: LabelAware, source: SourceModel, name: str, known: Mapping[str, float], data: Path
) -> list[Row]:
    """All windows of all streams under a corruption."""
    test, rows = load("cifar10", "test", data), list[Row]()
    order = list(priors.class_order(source.card.class_counts))
    for severity, labels in itertools.product(SEVERITIES, LABELS):
        images = corrupted(test, name, severity, root=data)
        prior = priors.named(labels, len(test.classes), order=order)
        stream = Stream(images, prior, batch_size=BATCH, images=IMAGES)
        drop = name in DROPPED and severity == max(SEVERITIES)
        found = windows(live, stream, known, source.card.prior.tolist(), drop)
        condition = {"corruption": name, "severity": severity, "labels": labels}
        rows += [{**condition, "window": i, **row} for i, row in enumerate(found)]
    return rows


def measure(data: Path, checkpoints: Path, file: Path = FILE) -> None:
    """Measure all corruptions that a record of the same code and model lacks, and write each."""
    source = load_source(checkpoints / SOURCE)
    live = recommended_of(source)
    begun = {"revision": revision(), "source": source.weights}
    record = json.loads(file.read_text()) if file.exists() else {}
    if record.get("begun") != begun:
        record = {"begun": begun, "known": source_facts(live, data), "rows": [], "seconds": 0.0}
    done = {row["corruption"] for row in record["rows"]}
    for name in BENCHMARK:
        if name in done:
            continue
        start = time.monotonic()
        record["rows"] += measure_corruption(live, source, name, record["known"], data)
        record["seconds"] += time.monotonic() - start
        images = corrupted(load("cifar10", "test", data), name, SEVERITIES[0], root=data)
        record["facts"] = run_facts(images, torch.device("cpu"), record["seconds"])
        record["summary"] = summary(record["rows"])
        with atomic_file(file) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n")


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of all estimates in points, and how often the interval is right."""
    names = [name for name in rows[0]["estimates"] if name not in (SCORE, AETTA)]
    with_aetta = [row for row in rows if AETTA in row["estimates"]]
    found: dict[str, Any] = {
        "windows": len(rows),
        "errors": {name: _errors(rows, name) for name in names},
        "order": {name: _order(rows, name) for name in (*names, SCORE)},
        "interval": {"all": _interval(rows)},
        "conditions": _conditions(rows),
        "with_aetta": {
            "windows": len(with_aetta),
            "errors": {
                name: _mean_error(with_aetta, name) for name in (*names, AETTA) if with_aetta
            },
        },
    }
    for key in ("severity", "labels"):
        found["interval"] |= {str(value): _interval(own) for value, own in _by(rows, key)}
    return found


def _errors(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Mean sizes of errors in points: all, by severity, by labels; and the mean error.

    ``more`` is by how much errors are larger than ours; standard errors are over corruptions.
    """
    parts = [*_by(rows, "severity"), *_by(rows, "labels")]
    by_corruption = [own for _, own in _by(rows, "corruption")]
    errors, ours = ([_mean_error(own, n) for own in by_corruption] for n in (name, OURS))
    return {
        "all": _mean_error(rows, name),
        **{str(value): _mean_error(own, name) for value, own in parts},
        "mean": float(_points(rows, name).mean()),
        "standard_error": _standard_error(errors),
        "more": _mean_error(rows, name) - _mean_error(rows, OURS),
        "more_standard_error": _standard_error([e - o for e, o in zip(errors, ours, strict=True)]),
    }


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values) / max(len(values) - 1, 1) ** 0.5)


def _conditions(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Size of our errors under every condition, the largest first, and what others do there."""
    found = []
    for key in dict.fromkeys((r["corruption"], r["severity"], r["labels"]) for r in rows):
        own = [r for r in rows if (r["corruption"], r["severity"], r["labels"]) == key]
        found.append(
            {
                **dict(zip(("corruption", "severity", "labels"), key, strict=True)),
                "right": 100 * float(np.mean([r["right"] for r in own])),
                "expected": 100 * float(np.mean([r["estimates"][OURS] for r in own])),
                "error": _mean_error(own, OURS),
                "confidence_error": _mean_error(own, "mean confidence"),
                **_interval(own),
            }
        )
    return sorted(found, key=lambda condition: -condition["error"])


def _interval(rows: Sequence[Row]) -> dict[str, float]:
    """How often the interval holds the truth, and how wide it is, in %."""
    inside = [row["low"] <= row["right"] <= row["high"] for row in rows]
    widths = [row["high"] - row["low"] for row in rows]
    return {"covered": 100 * float(np.mean(inside)), "width": 100 * float(np.mean(widths))}


def _order(rows: Sequence[Row], name: str) -> float:
    """Rank correlation with the truth."""
    values, right = ([row["estimates"][name] for row in rows], [row["right"] for row in rows])
    return float(spearmanr(values, right).statistic)


def _points(rows: Sequence[Row], name: str) -> NDArray[np.float64]:
    return 100 * np.array([row["estimates"][name] - row["right"] for row in rows])


def _mean_error(rows: Sequence[Row], name: str) -> float:
    return float(np.abs(_points(rows, name)).mean())


def _by(rows: Sequence[Row], key: str) -> list[tuple[Any, list[Row]]]:
    values = dict.fromkeys(row[key] for row in rows)
    return [(value, [row for row in rows if row[key] == value]) for value in values]


def main() -> None:
    """Measure, and write the record after every corruption."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default="data", help="folder of the data sets")
    add("--checkpoints", type=Path, default="checkpoints", help="folder of the source models")
    options = parser.parse_args()
    measure(options.data, options.checkpoints)


if __name__ == "__main__":
    main()
