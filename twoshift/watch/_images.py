"""What the images of a stream tell: how they look, whether they repeat, what the source sees."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from twoshift.calibration import Calibration
from twoshift.methods import Inputs
from twoshift.methods._appearance import KINDS, appearance, novelty
from twoshift.watch.distances import KnownImages, LayerDistances

Array = NDArray[np.float64]
PROBE = 16  # images of a second pass
OFTEN = 4  # times as often while statistics are far outside
KEEP = 0.75  # what older second passes count when there is a new one


class Looks(NamedTuple):
    """What is seen of the pixels of a batch.

    Attributes:
        repeated: How much every image looked at is like the one before, from 0 to 1.
        outside: Which of them look like none of the calibration; None if that is not known.
        distance: How far they are from those of the calibration on average; None as before.
    """

    repeated: Array
    outside: NDArray[np.bool_] | None
    distance: float | None


class Images:
    """The pixels of some images of a stream.

    Args:
        facts: The calibration of the classifier.
    """

    def __init__(self, facts: Calibration) -> None:
        known = None if facts.classifier is None else facts.classifier.appearance
        self._known = None if known is None else KnownImages(known)
        self._last: Array | None = None

    def restart(self) -> None:
        """Forget the last image."""
        self._last = None

    def look(self, x: Tensor) -> Looks | None:
        """What images look like; None for vectors, which are no pictures."""
        if x.dim() < 3:
            return None
        seen = appearance(x)
        repeated = 1 - novelty(seen, self._last)
        self._last = seen[-1]
        if self._known is None:
            return Looks(repeated, None, None)
        return Looks(repeated, self._known.outside(seen), self._known.distance(seen))

    def state(self) -> dict[str, Array]:
        """All that `load` needs to go on."""
        return {"last": np.full(KINDS, np.nan) if self._last is None else self._last}

    def load(self, state: Mapping[str, Array]) -> None:
        """Go on from a `state`."""
        last = np.array(state["last"], np.float64).reshape(KINDS)
        self._last = None if np.isnan(last).any() else last


class Probe:
    """A second pass now and then, of a few images through the unadapted network.

    Args:
        model: The unadapted network.
        facts: Its calibration.
        classes: Number of classes.
        share: The largest share of images that take a second pass; 0 for none.

    Attributes:
        agreement: Share of images that both predict alike, of the last passes; None before.
        layers: The distance of every layer, by name; None where it is not known.
        passes: Number of second passes.
    """

    def __init__(self, model: nn.Module, facts: Calibration, classes: int, share: float) -> None:
        self.model, self._share = model, share
        moments = facts.of("running").get("moments")
        self._layers = None if moments is None else LayerDistances(model, moments, classes)
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self._images: list[Tensor] = []
        self._classes: list[NDArray[np.int64]] = []
        self._same = np.zeros(2)  # images that are predicted alike, and all
        self.layers: dict[str, float] | None = None
        self.passes, self._due = 0, 0

    @property
    def agreement(self) -> float | None:
        """Share of images that both predict alike, of the last passes."""
        return float(self._same[0] / self._same[1]) if self._same[1] else None

    @property
    def distance(self) -> float | None:
        """The mean distance of layers."""
        return float(np.mean([*self.layers.values()])) if self.layers else None

    @property
    def far(self) -> float | None:
        """The distance that neither labels nor usual corruptions reach."""
        return None if self._layers is None else self._layers.far

    def look(
        self,
        x: Tensor,
        predicted: NDArray[np.int64] | None,
        labels: ArrayLike,
        images: int,
        often: bool = False,
    ) -> bool:
        """Let images pass, if it is time and there are enough; whether they did.

        Args:
            x: Some images.
            predicted: Classes that the live classifier predicts; None if it did not.
            labels: The label distribution, as it is estimated.
            images: Number of images of the stream so far.
            often: Whether the next pass is to come soon.
        """
        if not self._share or images < self._due:
            return False
        self._images.append(x)
        self._classes.append(np.full(0, 0) if predicted is None else predicted)
        if (count := sum(map(len, self._images))) < PROBE:
            return False
        self._due = images + int(count / min(1.0, self._share * (OFTEN if often else 1)))
        self._pass(torch.cat(self._images), np.concatenate(self._classes), labels)
        self._images, self._classes = [], []
        return True

    def _pass(self, x: Tensor, predicted: NDArray[np.int64], labels: ArrayLike) -> None:
        parameter = next(self.model.parameters())
        looking = nullcontext() if self._layers is None else self._layers.looking()
        with torch.no_grad(), looking:
            classes = self.model(x.to(parameter)).argmax(1).cpu().numpy()
        if len(predicted) == len(classes):
            same = np.array([(classes == predicted).sum(), len(classes)], np.float64)
            self._same = KEEP * self._same + same
        if self._layers is not None:
            self.layers = self._layers.read(labels)
        self.passes += 1

    def state(self) -> dict[str, Array]:
        """All that `load` needs to go on; images that wait for a pass are left out."""
        known = self.layers or {}
        names = [] if self._layers is None else self._layers.names
        return {
            "same": self._same,
            "counts": np.array([self.passes, self._due], np.float64),
            "layers": np.array([known.get(name, np.nan) for name in names], np.float64),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Go on from a `state`."""
        self.restart()
        self._same = np.array(state["same"], np.float64).reshape(2)
        self.passes, self._due = (int(n) for n in np.asarray(state["counts"]).reshape(2))
        if self._layers is not None:
            pairs = zip(self._layers.names, np.asarray(state["layers"]).tolist(), strict=True)
            self.layers = {n: d for n, d in pairs if np.isfinite(d)} or None


def out_of_range(x: object, inputs: Inputs | None) -> bool:
    """Whether the pixels of a batch are why it was refused.

    Args:
        x: The batch.
        inputs: What is known about the images.
    """
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.numel() or not x.is_floating_point():
        return False
    low, high = (float(limit) for limit in x.detach().aminmax())
    if not (np.isfinite(low) and np.isfinite(high)):
        return True
    if inputs is None or inputs.low is None or inputs.high is None:
        return False
    span = inputs.high - inputs.low
    return low < inputs.low - span or high > inputs.high + span
