"""Streamed statistics: the stream, not the batch, is compared with source images of its labels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift.accuracy import VIEWS
from twoshift.adapters import Scores, unbiased
from twoshift.errors import MismatchError
from twoshift.methods._appearance import (
    BLOCK,
    KINDS,
    appearance,
    distance,
    new_images,
    pooled,
    summary,
)
from twoshift.methods._state import State
from twoshift.methods.base import Method, methods
from twoshift.methods.bn_stats import require_plain_batch_norm
from twoshift.methods.matched import Moments, SourceMoments, given_moments
from twoshift.models.head import class_count
from twoshift.models.norm import replace_batch_norms
from twoshift.models.streamed_norm import Looks, StreamedNorm
from twoshift.registry import check_numbers

PART = 64  # images that are taken in at once: more would be compared with the labels before them
AFRESH = 8.0  # what all images so far count at most, once images look different
MOST = 1e30  # images: far beyond any stream, far below where a count overflows


@methods.register("streamed")
class Streamed(Method):
    """Normalisation by the statistics of the last hundreds of images, without their labels' effect.

    Every layer follows mean and variance of the stream, this batch included, with a half-life
    counted in images; the votes for the stream's labels are forgotten at the same pace. So the
    statistics and the labels that they are compared under belong to the same images, and batches
    of any size give nearly the same predictions.

    The stream's share of the statistics grows with the images seen: the first image is predicted
    almost by the source model. It also grows, layer by layer, with the distance of the stream from
    source images, and the votes count less: far from what it has learned, a source model is not
    to be trusted. An image that looks like the one before it, as those of a stuck camera, hardly
    counts. If images suddenly look different, their statistics start afresh.

    Args:
        model: The classifier, with batch normalisation.
        moments: Mean and variance of every channel for each class, as `class_moments` computes
            them from source images.
        half_life: Images after which an image counts half.
        share: The stream's share of the statistics in the end, near the source.
        start: Images after which the share is half of that.
        far: The distance of a layer at which the share is half-way from that to 1.
        pseudo_count: Images to add to the predicted ones, the same share of every class.
        doubt: The pseudo-count is multiplied by 1 + ``doubt`` times the mean distance of layers.
        change: How different the last images look when statistics start afresh: a squared
            difference, in standard deviations of an image.
    """

    title = "Streamed statistics"
    reference = (
        "ours; statistics of a stream: Mirza et al., The norm must go on, CVPR 2022, "
        "https://arxiv.org/abs/2112.00463"
    )
    needs = frozenset({"source images and labels (for the moments of each class)"})
    not_negative = frozenset({"counts", "images", "distance"})
    part = PART
    counts: Tensor
    followed: Tensor
    images: Tensor
    distance: Tensor
    last: Tensor
    usual: Tensor
    recent: Tensor

    def __init__(
        self,
        model: nn.Module,
        moments: Moments | None = None,
        half_life: float = 421.0,
        share: float = 0.6,
        start: float = 32.0,
        far: float = 0.5,
        pseudo_count: float = 10.0,
        doubt: float = 30.0,
        change: float = 1.0,
    ) -> None:
        super().__init__(model)
        check_numbers("streamed", "from 0 to 1", share=share)
        positive = {"half_life": half_life, "far": far, "pseudo_count": pseudo_count}
        check_numbers("streamed", "above 0 and finite", **positive, change=change)
        check_numbers("streamed", "at least 0 and finite", start=start, doubt=doubt)
        require_plain_batch_norm(model, "streamed")
        self.half_life, self.share, self.start, self.far = half_life, share, start, far
        self.pseudo_count, self.doubt, self.change = pseudo_count, doubt, change
        self.moments = given_moments(moments, "streamed")
        classes = class_count(self.model)
        self._source = SourceMoments(self.model, self.moments, classes)
        self._layers = replace_batch_norms(self.model, StreamedNorm)
        channels = sum(layer.num_features for layer in self._layers)
        wide = torch.promote_types(self.dtype, torch.float32)
        with torch.inference_mode(False):  # buffers that can be written later
            for name, shape in {
                "counts": (classes,),
                "followed": (2, channels),  # mean and variance
                "images": (),
                "distance": (),  # of the stream from the source, mean over layers
                "last": (KINDS,),  # what the last image looked like
                "usual": (3, KINDS),  # and all images, in short
                "recent": (3, KINDS),  # and those that are not yet among them
            }.items():
                self.register_buffer(name, torch.zeros(shape, dtype=wide, device=self.device))
            self._looks = Looks(self._layers, self.followed)
        self.ready()

    @property
    def prior(self) -> Tensor:
        """The label distribution of the source images that the next batch is compared with."""
        with self._using():
            return self._prior().float()

    def _prior(self) -> Tensor:
        added = self.pseudo_count * (1 + self.doubt * float(self.distance))
        votes = self.counts.double() + min(added, MOST) / len(self.counts)
        return votes / votes.sum()

    @property
    def view_in_use(self) -> int:
        """Position in `VIEWS` of matched statistics."""
        return VIEWS.index("matched")

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Scores:
        """Predict by the statistics of the stream, this batch included, and count the classes."""
        parts = [self._take_in(part) for part in x.split(PART)]
        return parts[0] if len(parts) == 1 else Scores.cat(parts)

    def _take_in(self, x: Tensor) -> Scores:
        # only images can look alike
        new = float(len(x)) if x.dim() == 2 else self._follow_looks(appearance(x))
        # what older images keep of their weight, and the weight of these ones
        keep, forgotten = 0.5 ** (new / self.half_life), 1 - 0.5 ** (1 / self.half_life)
        weight = (1 - keep) / forgotten if forgotten else new
        self.counts.mul_(keep)
        images = keep * float(self.images) + weight
        self.images.fill_(images)
        scores = self._look(x, images, weight / images)
        votes = torch.bincount(
            unbiased(self.model, scores.raw).argmax(1), minlength=len(self.counts)
        )
        self.counts.add_(votes, alpha=weight / len(x))
        return scores

    def _follow_looks(self, seen: NDArray[np.float64]) -> float:
        """How many images are new; if the last ones look different, those before hardly count."""
        started = bool(self.images)
        new = new_images(seen, _numbers(self.last) if started else None)
        self.last.copy_(torch.from_numpy(seen[-1]))
        recent = pooled(_numbers(self.recent), summary(seen, new))
        if recent[0, 0] < BLOCK:
            self.recent.copy_(torch.from_numpy(recent))
            return new
        self.recent.zero_()
        usual = _numbers(self.usual)
        if started and usual[0, 0] and distance(usual, recent) > self.change:
            # votes and statistics are of the same images
            rest = self.images.clamp(max=AFRESH)
            self.counts.mul_(rest / self.images)
            self.images.copy_(rest)
        else:
            usual[0] *= 0.5 ** (recent[0, 0] / self.half_life)
            recent = pooled(usual, recent)
        self.usual.copy_(torch.from_numpy(recent))
        return new

    def _fit_state(self, state: Mapping[str, Tensor], quiet: bool = False) -> State:
        fit = super()._fit_state(state, quiet)
        rows = {"followed": [1], "usual": [0, 2], "recent": [0, 2]}  # numbers and variances
        for name, tensor in fit.items():
            last = name.rpartition(".")[2]
            if last in rows and (tensor[rows[last]] < 0).any():
                what = f"numbers and variances in {last!r} in the state of streamed"
                raise MismatchError(what, must_be="at least 0", got=float(tensor.min()))
        return fit

    def _look(self, x: Tensor, images: float, step: float) -> Scores:
        """Score a batch by the statistics of the stream, which follow it."""
        self._renew_looks()
        expected = self._source.mixture(self._prior().cpu()).to(self.followed)
        share_at = partial(self._share, images)
        distance = self._looks.start(self.followed, expected, share_at, step)
        if step < 1:
            self.distance.fill_(distance)
        scores = self.predict(x)
        self._looks.follow(self.followed, step)
        return scores

    @torch.no_grad()
    def frozen_statistics(self) -> list[tuple[Tensor, Tensor]] | None:
        """Mean and variance by which each layer normalises images that change nothing.

        None before the first image: those of the source.
        """
        with self._using():
            if not self.images:
                return None
            # others than those in use, which belong to the last batch
            looks = Looks(self._layers, self.followed)
            expected = self._source.mixture(self._prior().cpu()).to(self.followed)
            return looks.frozen(self.followed, expected, partial(self._share, float(self.images)))

    def _renew_looks(self) -> None:
        if not self._looks.fits(self.followed):  # the method was moved
            self._looks = Looks(self._layers, self.followed)

    def _share(self, images: float, distance: float) -> float:
        """The stream's share of the statistics of a layer."""
        lost = distance**2 / (distance**2 + self.far * self.far) if distance else 0.0
        most = self.share + (1 - self.share) * lost
        return most * images / (images + self.start * (1 - lost))


def _numbers(tensor: Tensor) -> NDArray[np.float64]:
    """A copy of a small tensor, to compute with."""
    return tensor.cpu().numpy().astype(np.float64)
