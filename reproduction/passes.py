"""Measure offline passes beside an online run: ``python -m reproduction.passes --data DIR``.

The same images are predicted online and in 1, 2 and 3 passes, by `recommended` around the source
model with batch normalisation, and once by sums of a pass that does not adapt; results go to
``results/passes.json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reproduction import markdown
from twoshift import priors, recommended
from twoshift.data import load
from twoshift.data.corrupted import corrupted
from twoshift.data.stream import Batch, Stream
from twoshift.methods import LabelAware
from twoshift.methods._passes import Passes, Whole
from twoshift.predict.plan import chunk_of
from twoshift.storage import write_json
from twoshift.train.checkpoint import load_source

CORRUPTIONS = ("gaussian_noise", "contrast", "glass_blur", "jpeg_compression")
LABELS = ("forward-50", "uniform", "backward-50")
SHORT = {"forward-50": "F50", "uniform": "U", "backward-50": "B50"}
SEVERITY, BATCH, PASSES = 5, 64, 3
PLAIN = "2 passes, the first by the source model"  # as a comparison: it is not what is done
START, END = "<!-- passes:start -->", "<!-- passes:end -->"
RESULTS = Path(__file__).resolve().parents[1] / "results" / "passes.json"


def accuracies(live: LabelAware, batches: Sequence[Batch]) -> dict[str, float]:
    """Accuracy online, and in each number of passes."""
    online = [live(batch.x).argmax(1) == batch.y for batch in batches]
    live.reset()
    found = {"online": _mean(online)}
    passes, whole = Passes(live), None
    for count in range(1, PASSES + 1):
        with passes.frozen(whole):
            right = [passes.look(batch.x).argmax(1) == batch.y for batch in batches]
        found[f"{count} passes"] = _mean(right)
        whole = _frozen(passes, whole, batches) if whole else _adapted(passes, batches)
    with passes.frozen(_frozen(passes, None, batches)):
        right = [passes.look(batch.x).argmax(1) == batch.y for batch in batches]
    found[PLAIN] = _mean(right)
    return found


def _frozen(passes: Passes, whole: Whole | None, batches: Sequence[Batch]) -> Whole | None:
    """What a pass finds under frozen statistics; None for those of the source model."""
    sums = passes.new()
    with passes.frozen(whole):
        for batch in batches:
            passes.look(batch.x, sums, range(len(batch.x)))
    return passes.whole(sums)


def _adapted(passes: Passes, batches: Sequence[Batch]) -> Whole | None:
    """What a pass finds that adapts, begun anew for every chunk."""
    sums = passes.new()
    size = chunk_of(BATCH)
    for start in range(0, len(batches), size):
        with passes.afresh():
            for batch in batches[start : start + size]:
                passes.follow(batch.x, sums, range(len(batch.x)))
    return passes.whole(sums)


def _mean(right: Sequence[Tensor]) -> float:
    return float(torch.cat(list(right)).double().mean())


def measure(source: Path, data: Path, images: int | None) -> dict[str, dict[str, float]]:
    """Accuracies on every stream, by its name."""
    model = load_source(source)
    clean = load("cifar10", "test", data)
    order = priors.class_order(model.card.class_counts).tolist()
    found = {}
    for corruption in CORRUPTIONS:
        worse = corrupted(clean, corruption, SEVERITY, root=data).aligned(model.card.classes)
        for labels in LABELS:
            prior = priors.named(labels, len(model.card.classes), order=order)
            batches = list(Stream(worse, prior, batch_size=BATCH, seed=0, images=images))
            live = recommended(model.model, source)
            found[f"{corruption} {SHORT[labels]}"] = accuracies(live, batches)
    return found


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", type=Path, default=Path("checkpoints/cifar10-bn"))
    parser.add_argument("--images", type=int, default=None, help="at most so many per stream")
    options = parser.parse_args()
    streams = measure(options.source, options.data, options.images)
    mean = {name: float(np.mean([s[name] for s in streams.values()])) for name in _first(streams)}
    facts = {"source": options.source.name, "severity": SEVERITY, "batch_size": BATCH}
    write_json(RESULTS, {**facts, "images": options.images, "streams": streams, "mean": mean})


def _first(streams: Mapping[str, Mapping[str, float]]) -> list[str]:
    return list(next(iter(streams.values())))


def paragraph(record: Mapping[str, Any]) -> str:
    """What the page says of the results: a table, in percent."""
    rows = {**record["streams"], "mean": record["mean"]}
    names = _first(rows)
    some = "all" if record["images"] is None else f"at most {record['images']:,}"
    intro = (
        f"Accuracy in % of `recommended` around {record['source']}, CIFAR-10 at severity "
        f"{record['severity']}, {some} images of each stream, one draw, batches of "
        f"{record['batch_size']}. One pass is the source model."
    )
    lines = [
        [stream.replace("_", " "), *(f"{100 * values[name]:.1f}" for name in names)]
        for stream, values in rows.items()
    ]
    verdict = "Measured by `make passes-results`."
    shown = markdown.table(["", *names], lines)
    return f"{markdown.paragraph(intro)}\n\n{shown}\n{markdown.paragraph(verdict)}\n"


def insert(page: str, record: Mapping[str, Any]) -> str:
    """The page with the paragraph between its marks."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n\n{paragraph(record)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    main()
