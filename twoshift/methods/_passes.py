"""Passes over images that are all known: each sums up what the network sees, the next uses it.

From the sums follow the statistics and the labels of the whole, by which the next pass runs, with
everything frozen: no image depends on another one. The first pass cannot simply run the source
model, since the statistics of a layer mean nothing once the layers before it are normalised
differently: frozen passes would need one for each layer. So it adapts as a stream does, begun anew
for every thousand images, and what its layers see on the way is summed up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from twoshift.adapters import Scores, adapted_heads, unbiased
from twoshift.errors import SettingError
from twoshift.estimators import Paced
from twoshift.methods._batch import check_finite, checked
from twoshift.methods.base import Method
from twoshift.methods.label_aware import LabelAware
from twoshift.methods.source import Source
from twoshift.methods.streamed import Streamed
from twoshift.models.head import class_count

ROUNDS = 3  # in which the distance from the source and what it is compared with settle
SAMPLE, NUMBERS = 1 << 16, 1 << 24  # images, and numbers, that labels are estimated from


@dataclass(frozen=True)
class Whole:
    """What is known of all images of a stream at once.

    Attributes:
        images: Their number.
        votes: Predicted classes, (classes,).
        labels: The label distribution to adjust by, (classes,).
        followed: Mean and variance of every channel of every layer, (2, channels); None for a
            network without batch normalisation.
    """

    images: int
    votes: Tensor
    labels: Tensor
    followed: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """As a flat dictionary."""
        found = {"images": torch.tensor(self.images), "votes": self.votes, "labels": self.labels}
        return found if self.followed is None else {**found, "followed": self.followed}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Whole:
        """What `tensors` made, read back."""
        images = int(tensors["images"])
        return cls(images, tensors["votes"], tensors["labels"], tensors.get("followed"))


@dataclass
class Sums:
    """Sums over images, in float64; those of several parts add up.

    Attributes:
        images: Number of images.
        votes: Predicted classes, (classes,).
        moments: Sums of means and of mean squares of every channel, (2, channels).
        rows: Probabilities of a sample of the images, one tensor for each batch.
    """

    images: int
    votes: Tensor
    moments: Tensor
    rows: list[Tensor] = field(default_factory=list)

    def add(self, other: Sums) -> None:
        """Add the sums of the images that follow."""
        self.images += other.images
        self.votes = self.votes + other.votes
        self.moments = self.moments + other.moments
        self.rows += other.rows

    def tensors(self) -> dict[str, Tensor]:
        """As a flat dictionary."""
        rows = torch.cat(self.rows) if self.rows else torch.zeros(0, len(self.votes))
        images = torch.tensor(self.images)
        return {"images": images, "votes": self.votes, "moments": self.moments, "rows": rows}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Sums:
        """What `tensors` made, read back."""
        images = int(tensors["images"])
        return cls(images, tensors["votes"], tensors["moments"], [tensors["rows"]])


class Passes:
    """Runs a method's network over images that are all known.

    Args:
        live: `recommended`, or streamed statistics or the source model alone.
    """

    def __init__(self, live: Method) -> None:
        if reason := refusal(live):
            raise SettingError("offline passes", must_be="with another method", cure=reason)
        self._live = live
        core = live.method if isinstance(live, LabelAware) else live
        self._estimator = live.estimator if isinstance(live, LabelAware) else None
        self._streamed = core if isinstance(core, Streamed) else None
        self._heads = [head for _, head in adapted_heads(core)]
        self.classes = class_count(core.model)
        layers = () if self._streamed is None else self._streamed._layers
        self._channels = sum(layer.num_features for layer in layers)

    @property
    def adapts(self) -> bool:
        """Whether a second pass differs from the first."""
        return self._streamed is not None

    def new(self) -> Sums:
        """Sums over no images."""
        votes = torch.zeros(self.classes, dtype=torch.float64)
        return Sums(0, votes, torch.zeros(2, self._channels, dtype=torch.float64))

    def stride(self, images: int) -> int:
        """Every how many images of a stream one is in the sample for the label estimate."""
        most = max(1024, min(SAMPLE, NUMBERS // self.classes))
        return -(-images // most)

    @contextmanager
    def frozen(self, whole: Whole | None) -> Iterator[None]:
        """Within the block, the network is as a whole says, or the source's; then as before."""
        with self._live._using(), torch.no_grad():
            before = self._live._take_state()
            try:
                self._freeze(whole)
                yield
            finally:
                self._live._put_state(before)

    @contextmanager
    def afresh(self) -> Iterator[None]:
        """Within the block, the method is as it was built; then as before."""
        with self._live._using(), torch.no_grad():
            before = self._live._take_state()
            try:
                self._live._put_state(self._live._initial)
                yield
            finally:
                self._live._put_state(before)

    def follow(self, x: Tensor, sums: Sums, sample: Sequence[int]) -> None:
        """Adapt to a batch, within `afresh`, and add what is seen.

        Args:
            x: The images.
            sums: Where to add it.
            sample: Which of the images the labels are estimated from.
        """
        assert self._streamed is not None
        x, part = checked(x, self._live._core.model, self._live.inputs), self._streamed.part
        for start in range(0, len(x), part):
            images = x[start : start + part]
            own = [i - start for i in sample if start <= i < start + part]
            with self._told() as seen:
                scores = self._live.adapt(images)
            check_finite("the prediction", scores.logits)
            self._add(sums, scores, len(images), own, seen)

    @contextmanager
    def _told(self) -> Iterator[list[Tensor]]:
        """What the layers see of the batch within the block: mean and variance."""
        assert self._streamed is not None
        self._streamed._renew_looks()
        looks, seen = self._streamed._looks, list[Tensor]()
        looks.told = lambda *both: seen.extend(t.double().cpu() for t in both)
        try:
            yield seen
        finally:
            looks.told = None

    def look(self, x: Tensor, sums: Sums | None = None, sample: Sequence[int] = ()) -> Tensor:
        """Logits of a batch, within `frozen`.

        Args:
            x: The images.
            sums: Where to add what is seen; None for nowhere.
            sample: Which of the images the labels are estimated from.
        """
        core, seen = self._live._core, list[Tensor]()
        x = checked(x, core.model, self._live.inputs)
        scores = core.predict(x)
        check_finite("the prediction", scores.logits)
        if self._streamed is not None:
            seen = [part.double().cpu() for part in self._streamed._looks.pooled()]
            self._streamed._looks.forget()
        if sums is not None:
            self._add(sums, scores, len(x), sample, seen)
        return scores.logits.detach()

    def whole(self, sums: Sums) -> Whole | None:
        """What is known of the images whose sums these are; None of no images."""
        if not sums.images:
            return None
        labels = torch.full((self.classes,), 1 / self.classes, dtype=torch.float64)
        if isinstance(self._estimator, Paced):
            self._estimator.view = self._live.view_in_use
            labels = self._estimator.whole(torch.cat(sums.rows))
        followed = None
        if self._streamed is not None:
            mean, square = sums.moments / sums.images
            followed = torch.stack([mean, (square - mean.square()).clamp_min(0)])
        return Whole(sums.images, sums.votes, labels, followed)

    def _freeze(self, whole: Whole | None) -> None:
        labels = self._neutral() if whole is None else whole.labels
        for head in self._heads:
            head.prior.copy_(labels)
        if self._streamed is not None:
            _freeze(self._streamed, whole)

    def _neutral(self) -> Tensor:
        """The labels under which predictions are those of the source model."""
        contained = getattr(self._estimator, "assumes", None)
        if contained is None:
            return torch.full((self.classes,), 1 / self.classes)
        return torch.tensor(contained) / sum(contained)

    def _add(
        self, sums: Sums, scores: Scores, images: int, sample: Sequence[int], seen: list[Tensor]
    ) -> None:
        found = unbiased(self._live._core.model, scores.raw).argmax(1).cpu()
        sums.images += images
        sums.votes += torch.bincount(found, minlength=self.classes)
        if sample:
            sums.rows.append(scores.raw[list(sample)].float().softmax(1).cpu())
        if seen:
            mean, var = seen
            sums.moments += images * torch.stack([mean, var + mean.square()])


def _freeze(method: Streamed, whole: Whole | None) -> None:
    """Let the layers normalise by the statistics of a whole; of none, by the source's."""
    method._renew_looks()
    if whole is None:
        expected = method._source.mixture(method._prior().cpu()).to(method.followed)
        method._looks.start(expected, expected, lambda _: 0.0, 0.0)
        return
    assert whole.followed is not None
    # all images together count as much as those of a long stream: settings are made for that
    most = 1 / (1 - 0.5 ** (1 / method.half_life))
    images = min(float(whole.images), most)
    method.images.fill_(images)
    method.counts.copy_(whole.votes * (images / whole.images))
    method.distance.zero_()
    followed = whole.followed.to(method.followed)
    for _ in range(ROUNDS):
        expected = method._source.mixture(method._prior().cpu()).to(method.followed)
        distance = method._looks.start(followed, expected, partial(method._share, images), 0.0)
        method.distance.fill_(distance)


def refusal(live: Method) -> str | None:
    """Why a method cannot make passes over images that are all known; None if it can."""
    core = live.method if isinstance(live, LabelAware) else live
    if not isinstance(core, Streamed | Source):
        how = "learns from every batch" if core.optimizer is not None else "follows its batches"
        return f"{core.title} {how}, so that their order matters: it runs online only."
    if isinstance(live, LabelAware) and not isinstance(live.estimator, Paced):
        name = type(live.estimator).__name__
        return f"The estimator {name} follows its batches: it runs online only."
    return None
