"""ROID: sure and diverse samples teach, weights stay near the source, labels are corrected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods._learning import entropy, make_optimizer, norm_affine, paths
from twoshift.methods._views import check_images, strong_view
from twoshift.methods.base import Method, methods
from twoshift.methods.cotta import cross_entropy
from twoshift.models.head import class_count
from twoshift.models.norm import use_batch_statistics
from twoshift.registry import check_choice, check_numbers

CORRECTIONS = ("probabilities", "logits", "none")
SUREST, SMALLEST = 0.99, 1e-5  # bounds of probability and ratio in the loss


@methods.register("roid")
class ROID(Method):
    """Weighted steps on likelihood ratios and a random view; the batch's labels are corrected.

    Samples that are sure and unlike the average prediction have the most weight, and those less
    unlike it than the mean have none. After every step the weights move back towards the source's.
    The prediction is that of the forward pass before the step, times a smoothed label distribution
    of the batch. Layer and group norms have no batch statistics; only their weights move.

    Args:
        model: The classifier.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"`` (momentum 0.9).
        correction: What the label distribution of the batch multiplies: ``"probabilities"``,
            ``"logits"``, or ``"none"``, as it should be with an adapter.
        ensembling: Share of the weights after a step in the new ones; the rest is the source's.
        average_momentum: Weight of the old average prediction in the new one.
        sharpness: Factor of the exponent of a sample's weight.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
    """

    title = "ROID"
    reference = (
        "Marsden et al., Universal test-time adaptation through weight ensembling, diversity "
        "weighting, and prior correction, WACV 2024, https://arxiv.org/abs/2306.00650"
    )
    statistics = "batch"
    not_negative = frozenset({"average"})
    fixed_buffers = frozenset({"source"})
    average: Tensor
    source: Tensor

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        optim: str = "adam",
        correction: str = "probabilities",
        ensembling: float = 0.99,
        average_momentum: float = 0.9,
        sharpness: float = 3.0,
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__(model)
        momenta = {"ensembling": ensembling, "average_momentum": average_momentum}
        check_numbers("roid", "from 0 to 1", **momenta)
        check_numbers("roid", "at least 0 and finite", sharpness=sharpness)
        check_choice("roid", CORRECTIONS, correction=correction)
        self.lr, self.optim, self.correction = lr, optim, correction
        self.ensembling, self.average_momentum = ensembling, average_momentum
        self.sharpness, self.freeze = sharpness, paths(freeze)
        use_batch_statistics(self.model)
        affine, classes = norm_affine(self.model, self.freeze), class_count(self.model)
        self.optimizer = make_optimizer(optim, affine, lr)
        with torch.inference_mode(False):  # buffers that can be written later
            self.register_buffer("average", affine[0].new_full((classes,), 1 / classes))
            self.register_buffer("source", torch.cat([p.detach().flatten() for p in affine]))
        self.ready()

    def adapt(self, x: Tensor) -> Scores:
        """Predict, step on the weighted samples, and pull the weights to the source."""
        check_images(x)
        scores = self.predict(x)
        logits = scores.logits
        weights = self._weights(logits.detach())
        taken = weights != 0
        plain, view = logits[taken], self.model(strong_view(x[taken], self.generator))
        loss = likelihood_ratio(plain) + cross_entropy(view, plain, symmetric=True)
        self.minimise((weights[taken] * loss).sum() / len(x))
        with torch.no_grad():
            mean = logits.softmax(1).mean(0).to(self.average)
            self.average.lerp_(mean, 1 - self.average_momentum)
            self._pull()
            return self._corrected(scores)

    def _weights(self, logits: Tensor) -> Tensor:
        """How much every sample teaches; some do not."""
        likeness = F.cosine_similarity(logits.softmax(1), self.average[None].to(logits))
        diversity, certainty = _stretched(-likeness), _stretched(-entropy(logits))
        weights = (self.sharpness * diversity * certainty).exp()
        return weights.masked_fill(diversity < diversity.mean(), 0)

    def _pull(self) -> None:
        weights: list[Tensor] = [*self._optimised()]
        source = self.source.split([w.numel() for w in weights])
        source = [s.view_as(w) for s, w in zip(source, weights, strict=True)]
        torch._foreach_lerp_(weights, source, 1 - self.ensembling)

    def _corrected(self, scores: Scores) -> Scores:
        """Scores whose logits are corrected; the raw ones, which estimators read, are not."""
        if self.correction == "none":
            return scores
        prior = smoothed_prior(scores.logits)
        by_prior = scores.logits * prior
        if self.correction == "probabilities":
            by_prior = (scores.logits + prior.log()).log_softmax(1)
        return scores._replace(logits=by_prior, features=None)


def likelihood_ratio(logits: Tensor) -> Tensor:
    """Soft likelihood ratio of every sample, minus the expected log-odds of the predicted class."""
    p = logits.softmax(1).clamp(max=SUREST)
    return -(p * (p / (1 - p) + SMALLEST).log()).sum(1)


def smoothed_prior(logits: Tensor) -> Tensor:
    """The mean prediction of a batch, drawn the more to uniform the smaller the batch is."""
    prior = logits.softmax(1).mean(0)
    smooth = max(1 / len(logits), 1 / len(prior)) / prior.max()
    return (prior + smooth) / (1 + smooth * len(prior))


def _stretched(values: Tensor) -> Tensor:
    """Values moved and scaled to reach from 0 to 1; zeros if they are all the same."""
    low, high = values.aminmax()
    return (values - low) / (high - low).clamp_min(torch.finfo(values.dtype).tiny)
