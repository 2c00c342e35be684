"""Matched statistics: each batch is compared with source images of the same labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.errors import BatchError, ModelError, SettingError
from twoshift.methods._votes import Voting
from twoshift.methods.base import methods
from twoshift.methods.bn_stats import require_plain_batch_norm
from twoshift.models.classifier import prepare
from twoshift.models.norm import MatchedNorm, batch_norms, replace_batch_norms
from twoshift.registry import check_numbers

Moments = Mapping[str, Tensor]
LARGEST_PART = 2**22  # numbers in double precision at a time


@methods.register("matched")
class Matched(Voting):
    """Batch statistics without the effect of the stream's labels.

    A batch's mean and variance differ from the source's for two reasons: its images look
    different, and its labels are distributed differently. Plain batch normalisation undoes both, at
    the cost of frequent classes. The effect of the labels is known: the source's statistics, class
    by class, weighted by the label distribution. Matched statistics undo only the rest.

    The label distribution is that of the classes predicted so far, by the original head, without
    the label distribution that its adapter knows its logits contain. One forward pass; no parameter
    moves.

    Args:
        model: The classifier, with batch normalisation.
        moments: Mean and variance of every channel for each class, as `class_moments` computes
            them from source images.
        share: The batch's share of the statistics; the rest is the source's.
        half_life: Images after which a prediction counts half; 421 is 0.1 per batch of 64.
        pseudo_count: Images of every class to add to the predicted ones.
    """

    title = "Matched statistics"
    reference = (
        "ours; mixed statistics: You et al., Test-time batch statistics calibration for covariate "
        "shift, 2021, https://arxiv.org/abs/2110.04065"
    )
    needs = frozenset({"source images and labels (for the moments of each class)"})

    def __init__(
        self,
        model: nn.Module,
        moments: Moments | None = None,
        share: float = 0.5,
        half_life: float = 421.0,
        pseudo_count: float = 1.0,
    ) -> None:
        super().__init__(model, half_life, pseudo_count)
        check_numbers("matched", "from 0 to 1", share=share)
        require_plain_batch_norm(model, "matched")
        self.share, self.moments = share, given_moments(moments, "matched")
        self._layers = replace_batch_norms(self.model, MatchedNorm)
        self._source = SourceMoments(self.model, self.moments, len(self.counts))
        self.ready()

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Scores:
        """Predict by the labels counted so far, then count the predicted classes."""
        self._expect(self.prior.cpu().double())
        scores = self.predict(x)
        self._count(scores)
        return scores

    def _expect(self, prior: Tensor) -> None:
        """Give every layer the statistics of source images with this label distribution."""
        both = self._source.mixture(prior).to(next(self.model.parameters()))
        sizes = [layer.num_features for layer in self._layers]
        for layer, expected in zip(self._layers, both.split(sizes, 1), strict=True):
            layer.share, layer.expected = self.share, expected


def given_moments(moments: Moments | None, method: str) -> dict[str, Tensor]:
    """The setting ``moments`` of a method as tensors, or where to get them."""
    if moments is None:
        raise SettingError(
            f"moments of {method}",
            must_be="given",
            got="None",
            cure="Compute them with class_moments(model, source_batches) or `twoshift calibrate`.",
        )
    return {name: torch.as_tensor(values) for name, values in moments.items()}


class SourceMoments:
    """Statistics of source images, class by class, for all batch normalisations side by side.

    Args:
        model: The network.
        moments: What `class_moments` computed for it.
        classes: Number of classes.
    """

    def __init__(self, model: nn.Module, moments: Moments, classes: int) -> None:
        parts = [
            _moments_of(name, layer.num_features, classes, moments)
            for name, layer in batch_norms(model)
        ]
        if sum(part.numel() for part in parts) <= 2 * LARGEST_PART:
            parts = [torch.cat([part.double() for part in parts], 2)]
        self._parts = parts

    def mixture(self, prior: Tensor) -> Tensor:
        """Mean and variance of source images with a label distribution, (2, all channels)."""
        return torch.cat([_mixture(prior.to(part), part) for part in self._parts], 1).to(prior)

    def distances(self, statistics: Tensor) -> Tensor:
        """How far every class is from mean and variance, (2, all channels): (classes, channels)."""
        sizes = [part.shape[2] for part in self._parts]
        pairs = zip(self._parts, statistics.split(sizes, 1), strict=True)
        return torch.cat([wasserstein(part, own.to(part)[:, None]) for part, own in pairs], 1)


def wasserstein(a: Tensor, b: Tensor) -> Tensor:
    """Squared 2-Wasserstein distances of normal distributions with these means and variances."""
    (mean, var), (other_mean, other_var) = a, b
    return (mean - other_mean).square() + (var.sqrt() - other_var.sqrt()).square()


def class_moments(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Mean and variance of each channel before every batch normalisation, class by class.

    Args:
        model: The classifier; it is evaluated with its running statistics and not changed.
        batches: Source images with their labels; every class must occur.

    Returns:
        Means and variances, (2, classes, channels), by name of the layer.
    """
    model = prepare(model).eval()
    require_plain_batch_norm(model, "matched")
    device, moments = next(model.parameters()).device, ClassMoments(model)
    with torch.no_grad():
        for x, labels in batches:
            classes = model(x.to(device)).shape[1]
            moments.add(labels, classes)
    return moments.read()


class ClassMoments:
    """Collects, pass by pass, what `class_moments` returns.

    Args:
        model: The network, in evaluation mode; each of its passes must be followed by `add`.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = dict(batch_norms(model))
        self._sums: dict[str, Tensor] = {}
        self._images = torch.zeros(0, dtype=torch.float64)
        self._inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
        for name, layer in layers.items():  # reduced at once: a network may write into activations
            layer.register_forward_pre_hook(
                lambda _layer, args, name=name: self._inputs[name].append(_moments(args[0]))
            )

    def add(self, labels: Tensor, classes: int) -> None:
        """Count the pass that was just made, of images with these labels."""
        y = labels.cpu()
        if not len(self._images):
            self._images = torch.zeros(classes, dtype=torch.float64)
        self._images.index_add_(0, y, torch.ones(len(y), dtype=torch.float64))
        for name, calls in self._inputs.items():
            if not calls:
                raise ModelError(
                    f"batch normalisation {name!r}",
                    must_be="used in evaluation mode",
                    got="no input",
                    cure="Remove it from the model.",
                )
            moments = torch.stack(calls).mean(0)
            calls.clear()
            if name not in self._sums:
                channels = moments.shape[2]
                self._sums[name] = torch.zeros(2, classes, channels, dtype=torch.float64)
            self._sums[name].index_add_(1, y, moments)

    def read(self) -> dict[str, Tensor]:
        """The moments of all images so far. The sums are given up: they may be large."""
        absent = (self._images == 0).nonzero().flatten().tolist()
        if absent or not len(self._images):
            raise BatchError(
                "source images for class moments",
                must_be="of every class",
                got=f"none of class {absent[0]}" if absent else "none at all",
            )
        moments = {}
        while self._sums:
            name = next(iter(self._sums))
            mean, squares = self._sums.pop(name).div_(self._images[:, None])
            variance = (squares - mean.square()).clamp(min=0)
            moments[name] = torch.stack([mean.float(), variance.float()])
        return moments


def _moments(x: Tensor) -> Tensor:
    """Mean and mean square of every channel of every image, (2, B, C)."""
    flat = x.reshape(*x.shape[:2], -1)
    images = max(1, LARGEST_PART // max(1, flat[0].numel()))
    doubles = (part.double() for part in flat.split(images))  # all at once would be large
    return torch.cat([torch.stack([p.mean(2), p.square().mean(2)]) for p in doubles], 1).cpu()


def _mixture(prior: Tensor, moments: Tensor) -> Tensor:
    """Mean and variance of images whose classes have these moments, (2, channels)."""
    means, variances = moments
    mean = prior @ means
    return torch.stack([mean, prior @ (means - mean).square_().add_(variances)])


def _moments_of(name: str, channels: int, classes: int, moments: Moments) -> Tensor:
    values = torch.as_tensor(moments.get(name, ()), device="cpu")
    fits = values.shape == (2, classes, channels)
    if not fits or not values.isfinite().all() or (values[1] < 0).any():
        raise SettingError(
            f"moments of {name}",
            must_be=f"finite, (2, {classes}, {channels}), variances of at least 0",
            got=f"shape {tuple(values.shape)}",
            cure="Compute them with class_moments(model, batches).",
        )
    return values.to(torch.promote_types(values.dtype, torch.float32))
