"""A user's own classifiers, adapted by the README's lines: measured, and the paragraph about it.

    python -m reproduction.own_classifier --data DIR

Trains a plain network on long-tailed CIFAR-10, once by cross-entropy and once by balanced softmax,
calibrates it on images that it was trained on and on others, and runs `recommended` on nine
streams. About fifteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twoshift
from reproduction import markdown
from twoshift import TwoshiftWarning, priors
from twoshift.bench.provenance import revision, run_facts
from twoshift.data import load
from twoshift.data.base import ImageSet
from twoshift.data.corrupted import corrupted
from twoshift.data.long_tail import long_tailed_indices
from twoshift.data.stream import Stream, to_float

FILE = Path("results/own-classifier.json")
START, END = "<!-- own-data:start -->", "<!-- own-data:end -->"
LOSSES = {"cross_entropy": "cross-entropy", "balanced_softmax": "balanced softmax"}
CORRUPTIONS = ("clean", "gaussian_noise", "contrast")
LABELS = {"F50": "forward-50", "U": "uniform", "B50": "backward-50"}
SEVERITY, RATIO, HELD_OUT, EPOCHS, BATCHES = 5, 100, 5, 12, 40


def network(classes: int = 10) -> nn.Sequential:
    """A plain convolutional network, as anybody would write one."""

    def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())

    return nn.Sequential(
        block(3, 24, 1),
        block(24, 48, 2),
        block(48, 48, 1),
        block(48, 96, 2),
        block(96, 96, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, classes),
    )


def parts(data: Path) -> tuple[ImageSet, ImageSet]:
    """Images to train on, and a fifth of every class that is held out."""
    train = load("cifar10", "train", data)
    tail = train.subset(long_tailed_indices(train.labels, RATIO))
    held_out = np.zeros(len(tail), bool)
    rng = np.random.default_rng(0)
    for label in range(len(tail.classes)):
        members = rng.permutation(np.flatnonzero(tail.labels == label))
        held_out[members[: len(members) // HELD_OUT]] = True
    return tail.subset(np.flatnonzero(~held_out)), tail.subset(np.flatnonzero(held_out))


def trained(images: ImageSet, loss: str, epochs: int = EPOCHS) -> nn.Module:
    """The network, trained with shifts and mirror images."""
    x, y = to_float(images.images[:]), torch.from_numpy(images.labels)
    log_prior = torch.from_numpy(priors.from_counts(images.counts)).float().log()
    torch.manual_seed(0)
    net: nn.Module = network(len(images.classes))
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * (len(x) // 128)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.2, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x))[: len(x) // 128 * 128].split(128):
            logits = net(_augmented(x[rows]))
            adjusted = logits + log_prior if loss == "balanced_softmax" else logits
            optimiser.zero_grad()
            F.cross_entropy(adjusted, y[rows]).backward()
            optimiser.step()
            schedule.step()
    return net.eval()


def _augmented(x: Tensor) -> Tensor:
    x = x.flip(3) if torch.rand(()) < 0.5 else x
    down, right = torch.randint(-3, 4, (2,)).tolist()
    return torch.roll(x, (down, right), (2, 3)).contiguous(memory_format=torch.channels_last)


def streams(data: Path) -> dict[str, Stream]:
    """Nine streams of test images: three looks, three label distributions."""
    test, found = load("cifar10", "test", data), {}
    for corruption in CORRUPTIONS:
        images = corrupted(test, corruption, SEVERITY, root=data)
        for name, labels in LABELS.items():
            prior = priors.named(labels, len(test.classes))
            found[f"{corruption} {name}"] = Stream(images, prior, batch_size=64)
    return found


def accuracy(predict: Callable[[Tensor], Tensor], stream: Stream) -> float:
    """Share of correct predictions, in the first batches of a stream."""
    right = total = 0
    with torch.no_grad():
        for batch in stream:
            right += int((predict(batch.x).argmax(1) == batch.y).sum())
            total += len(batch.y)
            if batch.step + 1 == BATCHES:
                break
    return right / total


def measure(net: nn.Module, calibrated_on: ImageSet, on: Mapping[str, Stream]) -> dict[str, Any]:
    """What the README's lines do to a classifier: accuracy on every stream, and what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", TwoshiftWarning)
        facts = twoshift.calibrate(net, Stream(calibrated_on, batch_size=64))
    live = twoshift.recommended(net, facts)
    results = {}
    for name, stream in on.items():
        live.reset()
        results[name] = accuracy(live, stream)
    return {
        "accuracy": results,
        "describe": live.describe(),
        "reading": str(facts.classifier and facts.classifier.reading),
        "warnings": [str(warning.message) for warning in said],
    }


def measure_all(data: Path, epochs: int = EPOCHS) -> dict[str, Any]:
    """Both networks, unadapted, and calibrated on either part of the images."""
    begun = time.monotonic()
    revision()  # of the code that measures, should it change meanwhile
    (train, held_out), on = parts(data), streams(data)
    results: dict[str, Any] = {}
    for loss in LOSSES:
        net = trained(train, loss, epochs)
        results[loss] = {
            "source": {"accuracy": {name: accuracy(net, stream) for name, stream in on.items()}},
            "new images": measure(net, held_out, on),
            "training images": measure(net, train, on),
        }
    facts = run_facts(train, torch.device("cpu"), time.monotonic() - begun)
    return {"results": results, "facts": facts}


def paragraph(record: Mapping[str, Any]) -> str:
    """The results as a table and a sentence."""
    rows, gains = [], []
    for loss, of_loss in record["results"].items():
        source = np.array([*of_loss["source"]["accuracy"].values()]) * 100
        for name, entry in of_loss.items():
            values = np.array([*entry["accuracy"].values()]) * 100
            what = "as it is" if name == "source" else f"`recommended`, {name}"
            row = [f"{LOSSES[loss]}, {what}", *(f"{v:.1f}" for v in (*values, values.mean()))]
            rows.append(row)
            if name == "new images":
                worst = int((values - source).argmin())
                stream = [*entry["accuracy"]][worst].replace("_", " ")
                change = f"at worst {(values - source)[worst]:+.1f}, on {stream}"
                mean = f"{(values - source).mean():+.1f} points on average"
                gains.append(f"{mean} ({LOSSES[loss]}; {change})")
    columns = [name.replace("_", " ") for name in of_loss["source"]["accuracy"]]
    intro = (
        f"Accuracy in %, corruptions at severity {SEVERITY}; *new images* and *training images* "
        "are what it was calibrated on, each with one training and one seed:"
    )
    verdict = (
        f"Calibrated on new images, `recommended` changes accuracy by {' and '.join(gains)}. "
        "Calibrated on training images, it leaves predictions as they are, and says so. Measured "
        "by `make own-classifier-results`."
    )
    table = markdown.table(["", *columns, "mean"], rows)
    return f"{markdown.paragraph(intro)}\n\n{table}\n{markdown.paragraph(verdict)}\n"


def insert(page: str, record: Mapping[str, Any]) -> str:
    """The page with the paragraph between its marks."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n\n{paragraph(record)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default="data", help="folder of the data sets")
    record = measure_all(parser.parse_args().data)
    FILE.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
