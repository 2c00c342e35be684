"""Streamed statistics: the stream, not the batch, is compared with source images of its labels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from twoshift.accuracy import VIEWS, ViewJudge, signal_count, signals_of
from twoshift.adapters import Scores, unbiased
from twoshift.errors import MismatchError, SettingError
from twoshift.methods._state import State
from twoshift.methods.base import Method, methods
from twoshift.methods.bn_stats import require_plain_batch_norm
from twoshift.methods.matched import Moments, SourceMoments
from twoshift.models.head import class_count
from twoshift.models.norm import replace_batch_norms
from twoshift.models.streamed_norm import Looks, StreamedNorm
from twoshift.registry import check_choice, check_numbers

MATCHED, PLAIN, SOURCE = range(len(VIEWS))
JUDGED = 256.0  # images after which those that were seen by several views count half
PART = 64  # images that are taken in at once: more would be compared with the labels before them
FIRST = 2 * PART  # images that all views see


@methods.register("streamed")
class Streamed(Method):
    """Normalisation by the statistics of the last hundreds of images, without their labels' effect.

    Every layer follows mean and variance of the stream, this batch included, with a half-life
    counted in images; the votes for the stream's labels are forgotten at the same pace. So the
    statistics and the labels that they are compared under belong to the same images, and batches
    of any size give nearly the same predictions. The stream's share of the statistics grows with
    the images seen: the first image is predicted almost by the source model.

    There are three views of a batch: ``"matched"`` compares the stream with source images of the
    same labels, as `Matched` does; ``"plain"`` with all source images; ``"source"`` takes the
    source's statistics as they are. If ``judged``, other views are taken now and then, and the view
    that is expected to be right most often is used: without labels, by what the predictions look
    like. On the selection streams that gained nothing, and lost where few classes come at a time:
    it is off by default.

    Args:
        model: The classifier, with batch normalisation.
        moments: Mean and variance of every channel for each class, as `class_moments` computes
            them from source images.
        view: The view to start with; it stays unless judged.
        view_judge: The fact that tells views apart, fitted by a calibration; see `ViewJudge`.
        judged: Whether the judge chooses the view.
        temperature: T of calibrated probabilities, which the judge reads.
        half_life: Images after which an image counts half.
        share: The stream's share of the statistics in the end, if they are matched.
        plain_share: The same if they are plain.
        start: Images after which the share is half of that.
        pseudo_count: Images to add to the predicted ones, the same share of every class.
        every: If judged, another view is taken of 64 images in every 64 times so many, after the
            first 128.
    """

    title = "Streamed statistics"
    reference = (
        "ours; statistics of a stream: Mirza et al., The norm must go on, CVPR 2022, "
        "https://arxiv.org/abs/2112.00463"
    )
    needs = frozenset({"source images and labels (for the moments of each class)"})
    not_negative = frozenset({"counts", "images", "signals", "seen", "chosen"})
    part = PART
    counts: Tensor
    followed: Tensor
    images: Tensor
    signals: Tensor
    seen: Tensor
    chosen: Tensor

    def __init__(
        self,
        model: nn.Module,
        moments: Moments | None = None,
        view: str = VIEWS[MATCHED],
        view_judge: Tensor | None = None,
        judged: bool = False,
        temperature: float = 1.0,
        half_life: float = 421.0,
        share: float = 0.6,
        plain_share: float = 0.9,
        start: float = 32.0,
        pseudo_count: float = 10.0,
        every: int = 10,
    ) -> None:
        super().__init__(model)
        check_choice("streamed", VIEWS, view=view)
        check_numbers("streamed", "from 0 to 1", share=share, plain_share=plain_share)
        check_numbers(
            "streamed", "above 0 and finite", half_life=half_life, temperature=temperature
        )
        check_numbers("streamed", "at least 0 and finite", start=start)
        check_numbers("streamed", "above 0 and finite", pseudo_count=pseudo_count)
        check_numbers("streamed", "a whole number from 1", every=every)
        require_plain_batch_norm(model, "streamed")
        if moments is None:
            raise SettingError(
                "moments of streamed",
                must_be="given",
                got="None",
                cure="Compute them with class_moments(model, source_batches) or `twoshift "
                "calibrate`.",
            )
        if judged and view_judge is None:
            raise SettingError(
                "view_judge of streamed",
                must_be="given where judged is True",
                got="None",
                cure="Calibrate with simulated shifts, or leave judged at False.",
            )
        judge = None if view_judge is None else ViewJudge(view_judge)
        self.view_judge = None if judge is None else judge.weights
        self.judged, self._judge = judged, judge if judged else None
        self.view, self.temperature = view, temperature
        self.half_life, self.share, self.plain_share = half_life, share, plain_share
        self.start, self.pseudo_count, self.every = start, pseudo_count, every
        self.moments = {name: torch.as_tensor(values) for name, values in moments.items()}
        classes = class_count(self.model)
        self._source = SourceMoments(self.model, self.moments, classes)
        self._layers = replace_batch_norms(self.model, StreamedNorm)
        channels = sum(layer.num_features for layer in self._layers)
        wide = torch.promote_types(self.dtype, torch.float32)
        with torch.inference_mode(False):  # buffers that can be written later
            for name, shape in {
                "counts": (classes,),
                "followed": (2, 2, channels),  # by view, matched and plain
                "images": (2,),
                "signals": (2, len(VIEWS), signal_count(classes)),
                "seen": (),  # images; goes round, so that it never loses count
                "chosen": (),
            }.items():
                self.register_buffer(name, torch.zeros(shape, dtype=wide, device=self.device))
            self.chosen.fill_(VIEWS.index(view))
            self._looks = Looks(self._layers, self.followed)
        self.ready()

    @property
    def prior(self) -> Tensor:
        """The label distribution of the source images that the next batch is compared with."""
        with self._using():
            return self._prior()

    def _prior(self) -> Tensor:
        votes = self.counts.float() + self.pseudo_count / len(self.counts)
        return votes / votes.sum()

    @property
    def view_in_use(self) -> int:
        """Position in `VIEWS` of the view that predicts."""
        with self._using():
            return int(self.chosen)

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Scores:
        """Predict by the view in use, see whether another one is better, count the classes."""
        parts = [self._take_in(part) for part in x.split(PART)]
        return parts[0] if len(parts) == 1 else Scores.cat(parts)

    def _take_in(self, x: Tensor) -> Scores:
        keep, weight = self._pace(len(x))
        for decayed in (self.counts, self.images):
            decayed.mul_(keep)
        in_use = int(self.chosen)
        seen = {in_use: self._look(x, in_use, weight)}
        if self._judge is not None and (due := self._due(in_use)):
            seen |= {view: self._look(x, view, weight) for view in due}
            self.chosen.fill_(self._judged(seen, in_use))
        self._count(len(x))
        scores = seen[int(self.chosen)]
        votes = torch.bincount(self._unbiased(scores).argmax(1), minlength=len(self.counts))
        self.counts.add_(votes, alpha=weight / len(x))
        return scores

    def _pace(self, images: int) -> tuple[float, float]:
        """What older images keep of their weight after a batch, and the weight of the batch."""
        keep = 0.5 ** (images / self.half_life)
        return keep, (1 - keep) / (1 - 0.5 ** (1 / self.half_life))

    def _look(self, x: Tensor, view: int, weight: float) -> Scores:
        """Score a batch by the statistics of a view, which follow it."""
        if view == SOURCE:
            self._looks.stop()
            return self.predict(x)
        images = float(self.images[view].add_(weight))
        most = self.share if view == MATCHED else self.plain_share
        share, step = most * images / (images + self.start), weight / images
        followed = self.followed[view]
        if not self._looks.fits(followed):  # the method was moved
            self._looks = Looks(self._layers, followed)
        expected = self._expected().to(followed) if view == MATCHED else None
        self._looks.start(followed, expected, share, step)
        scores = self.predict(x)
        self._looks.follow(followed, step)
        return scores

    def _expected(self) -> Tensor:
        """Mean and variance of source images with the labels so far, (2, all channels)."""
        return self._source.mixture(self._prior().cpu().double())

    def _due(self, in_use: int) -> list[int]:
        """The other views to take now: all of the first images, later one at a time."""
        others = [view for view in range(len(VIEWS)) if view != in_use]
        seen = int(self.seen)
        if seen < FIRST:
            return others
        turn, rest = divmod(seen - FIRST, PART * self.every)
        return [others[turn % len(others)]] if rest >= PART * (self.every - 1) else []

    def _count(self, images: int) -> None:
        """Count images; two rounds of looks at other views after the first, start again."""
        self.seen += images
        rounds = PART * self.every * (len(VIEWS) - 1)
        if self.seen >= FIRST + rounds:
            self.seen -= rounds

    def _judged(self, seen: dict[int, Scores], in_use: int) -> int:
        """The view to use from now on."""
        assert self._judge is not None
        signals = {view: self._signals(scores) for view, scores in seen.items()}
        keep = 0.5 ** (len(seen[in_use].raw) / JUDGED)
        for view in seen.keys() - {in_use}:
            # both views of the same images: those of other images may be of other classes
            pair = torch.stack([signals[view], signals[in_use]])
            self.signals[:, view] = keep * self.signals[:, view] + pair
        chosen = self._judge.choose(in_use, *self.signals)
        if chosen == in_use or chosen not in seen:  # one that predicted this very batch
            return in_use
        self.signals.zero_()
        return chosen

    def _fit_state(self, state: Mapping[str, Tensor], quiet: bool = False) -> State:
        fit = super()._fit_state(state, quiet)
        if (chosen := float(fit["chosen"])) not in range(len(VIEWS)):
            must_be = f"0 to {len(VIEWS) - 1}, a view"
            raise MismatchError("'chosen' in the state of streamed", must_be=must_be, got=chosen)
        return fit

    def _signals(self, scores: Scores) -> Tensor:
        return signals_of((self._unbiased(scores) / self.temperature).softmax(1)).to(self.signals)

    def _unbiased(self, scores: Scores) -> Tensor:
        return unbiased(self.model, scores.raw)
