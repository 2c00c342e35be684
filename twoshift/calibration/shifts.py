"""What a classifier predicts when its images and labels shift: simulated on source images.

Images that the model was not trained on are corrupted and drawn with other labels, as streams. The
source model, batch statistics and `Streamed` predict them, and `Paced` adjusts the predictions.
From windows of these streams, `twoshift.accuracy` learns to tell without labels how often
predictions are right. The corruptions are none of the fifteen of CIFAR-10-C and ImageNet-C, which
stay for testing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift import priors
from twoshift.accuracy import VIEWS, read_signals, signal_count, signals_of
from twoshift.accuracy.fits import Windows
from twoshift.adapters import ANSWER, attach, logit_adapter
from twoshift.adapters.base import FLOOR
from twoshift.data.base import Images
from twoshift.data.corruptions import corrupt
from twoshift.data.stream import to_float
from twoshift.estimators.paced import Paced
from twoshift.methods import BNStats, Method, Source, Streamed

Rows = NDArray[np.int64]
CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SEVERITIES = (1, 3, 5)
BATCH, BATCHES, WINDOW = 64, 8, 4  # images of a batch, batches of a stream and of a window
BURST = 2  # batches
COLOURED = frozenset({"saturate"})  # those that need colours
STREAMS = 4  # of every condition
LEAST = 200  # images: with fewer, nothing is simulated


def sure_threshold(logits: Tensor, labels: Tensor, temperature: float) -> float:
    """The confidence above which as many images are as predictions are right."""
    probs = (logits.double() / temperature).softmax(1)
    error = (probs.argmax(1) != labels).double().mean()
    return float(probs.amax(1).quantile(error))


class Simulation:
    """A classifier, and how its answers are read.

    Args:
        model: The classifier.
        known: Its facts: temperature, bias, assumes, and moments where it has them.
        threshold: Confidence above which an image counts as sure.
    """

    def __init__(self, model: nn.Module, known: Mapping[str, Any], threshold: float) -> None:
        self.temperature, self.threshold = float(known["temperature"]), threshold
        self.bias = torch.as_tensor(known["bias"]).double()
        self.classes = len(self.bias)
        self.assumes = known.get("assumes")
        base = priors.uniform(self.classes) if self.assumes is None else np.asarray(self.assumes)
        self.contained = torch.from_numpy(base).double().clamp_min(FLOOR).log()
        # its answers are calibrated, and contain no label distribution; votes neither
        adapter = logit_adapter(
            model, base.tolist(), temperature=self.temperature, head=ANSWER, classes=self.classes
        )
        model = attach(model, adapter, ANSWER)
        self.views: dict[int, Method] = {VIEWS.index("source"): Source(model)}
        if known.get("moments") is not None:
            self.views[VIEWS.index("matched")] = Streamed(model, known["moments"])
            self.views[VIEWS.index("plain")] = BNStats(model)

    def windows(
        self,
        images: Images,
        labels: Rows,
        streams: range = range(STREAMS),
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Windows:
        """The windows of all simulated streams.

        Args:
            images: Images that the model was not trained on, uint8 (N, H, W, C).
            labels: Their classes; all must occur.
            streams: Which streams of every condition.
            progress: Called after every stream with the number of streams so far, and of all.
        """
        parts, total = [], len(conditions(images)) * len(streams)
        for condition, (name, severity) in enumerate(conditions(images)):
            corrupted = corrupt(images, name, severity) if severity else images
            number = CORRUPTIONS.index(name) if severity else len(CORRUPTIONS)
            for done, stream in enumerate(streams, 1 + condition * len(streams)):
                rng = np.random.default_rng([condition, stream])
                rows = _stream(labels, self.classes, stream, rng)
                x, y = to_float(corrupted[rows]), torch.from_numpy(labels[rows])
                parts += [self._seen(number, view, x, y) for view in self.views]
                progress(done, total)
        return Windows.cat(parts)

    @torch.no_grad()
    def _seen(self, corruption: int, view: int, x: Tensor, y: Tensor) -> Windows:
        method = self.views[view]
        method.reset()
        estimator = Paced(self.classes, None, self.temperature, self.bias, self.assumes)
        estimator.view = view
        sums, right = torch.zeros(BATCHES, signal_count(self.classes)), torch.zeros(BATCHES)
        for i, batch in enumerate(x.split(BATCH)):
            fair = method(batch).double().cpu()
            estimator.update((self.temperature * (fair + self.contained)).softmax(1).float())
            probs = (fair + estimator.present.double().clamp_min(FLOOR).log()).softmax(1)
            sums[i] = signals_of(probs, self.threshold)
            right[i] = (probs.argmax(1) == y[i * BATCH : (i + 1) * BATCH]).float().mean()
        signals = read_signals(sums.unflatten(0, (-1, WINDOW)).sum(1)).float()
        count = len(signals)
        return Windows(
            corruption=torch.full((count,), corruption),
            view=torch.full((count,), view),
            signals=signals,
            right=right.unflatten(0, (-1, WINDOW)).mean(1),
        )


def conditions(images: Images) -> list[tuple[str, int]]:
    """Corruption and severity of every condition; none, with severity 0, is the first one."""
    grey = images.shape[-1] == 1
    names = [name for name in CORRUPTIONS if not (grey and name in COLOURED)]
    return [("", 0), *itertools.product(names, SEVERITIES)]


def _stream(labels: Rows, classes: int, stream: int, rng: np.random.Generator) -> Rows:
    """Rows of a stream, drawn with replacement: uniform, tilted, few classes, or in bursts."""
    drawn = [
        lambda: priors.uniform(classes),
        lambda: rng.permutation(priors.longtail(classes, 20)),
        lambda: rng.dirichlet(np.full(classes, 0.5)),
        lambda: rng.dirichlet(np.full(classes, 0.1)),
    ][stream % STREAMS]
    bursts = BATCHES // BURST if stream % STREAMS == STREAMS - 1 else 1
    counts = np.bincount(labels, minlength=classes)
    members, first = np.argsort(labels, kind="stable"), np.cumsum(counts) - counts
    y = np.concatenate(
        [rng.choice(classes, BATCH * BATCHES // bursts, p=drawn()) for _ in range(bursts)]
    )
    return members[first[y] + rng.integers(counts[y])]
