"""CoTTA: a student, its averaged teacher, and weights that are reset to the source."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods._learning import make_optimizer, paths, trainable
from twoshift.methods._views import check_images, strong_view
from twoshift.methods.base import Method, check_finite, methods
from twoshift.models.norm import use_batch_statistics
from twoshift.registry import check_choice, check_numbers

LOSSES = ("cifar", "imagenet")


@methods.register("cotta")
class CoTTA(Method):
    """The student learns from an averaged teacher; each batch resets some weights to the source.

    Student, teacher and anchor (the source weights) all normalise by the batch's statistics. If
    the anchor is unsure about a batch, the teacher's logits are averaged over random views of it.
    The student learns the teacher's logits, which are also the prediction.

    Args:
        model: The classifier.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"`` (momentum 0.9).
        confidence_threshold: The anchor is unsure about a batch if its mean confidence is lower.
        views: How many views of such a batch the teacher averages over.
        restore: Share of the weights that are reset to the source after each batch.
        teacher_momentum: Weight of the old teacher in the new one.
        loss: ``"cifar"``, cross entropy, or ``"imagenet"``, symmetric cross entropy.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
    """

    title = "CoTTA"
    reference = (
        "Wang et al., Continual test-time domain adaptation, CVPR 2022, "
        "https://arxiv.org/abs/2203.13591"
    )
    needs = frozenset({"confidence threshold from source data"})
    statistics = "batch"

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        optim: str = "adam",
        confidence_threshold: float = 0.92,
        views: int = 32,
        restore: float = 0.01,
        teacher_momentum: float = 0.999,
        loss: str = "cifar",
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__(model)
        shares = {"confidence_threshold": confidence_threshold, "restore": restore}
        check_numbers("cotta", "from 0 to 1", **shares, teacher_momentum=teacher_momentum)
        check_numbers("cotta", "a whole number from 1", views=views)
        check_choice("cotta", LOSSES, loss=loss)
        self.lr, self.optim, self.views = lr, optim, views
        self.confidence_threshold, self.restore = confidence_threshold, restore
        self.teacher_momentum, self.loss = teacher_momentum, loss
        self.freeze = paths(freeze)
        use_batch_statistics(self.model)
        with torch.inference_mode(False):  # as in Method: the copies must be able to move
            self.teacher, self.anchor = copy.deepcopy(self.model), copy.deepcopy(self.model)
        names = trainable(self.model, self.freeze)
        self._names = [n for n in names if n.rpartition(".")[2] in ("weight", "bias")]
        student = [self.model.get_parameter(name) for name in self._names]
        self._student: list[Tensor] = [*student]
        self._teacher: list[Tensor] = [self.teacher.get_parameter(name) for name in self._names]
        self._source: list[Tensor] = [self.anchor.get_parameter(name) for name in self._names]
        self.optimizer = make_optimizer(optim, student, lr)
        self.ready()

    def adapt(self, x: Tensor) -> Scores:
        """Predict by the teacher, teach the student, move the teacher, reset some weights."""
        check_images(x)
        with torch.no_grad():  # before the student's pass: its graph would slow these down
            scores = self._target(x)
        symmetric = self.loss == "imagenet"
        self.minimise(cross_entropy(self.model(x), scores.logits, symmetric).mean())
        with torch.no_grad():
            # a gradient may overflow where the loss did not
            norms = torch.stack(torch._foreach_norm(self._student))
            check_finite("the weights after the step", norms)
            torch._foreach_lerp_(self._teacher, self._student, 1 - self.teacher_momentum)
            self._restore()
        return scores

    def moving(self) -> dict[str, Tensor]:
        """The teacher's weights move too, without gradients."""
        teacher = dict(zip((f"teacher.{n}" for n in self._names), self._teacher, strict=True))
        return {**super().moving(), **teacher}

    def _target(self, x: Tensor) -> Scores:
        confidence = self.anchor(x).softmax(1).amax(1).mean()
        if confidence >= self.confidence_threshold:
            # not to be predicted again by the head of the student, which is another one
            return self.predict(x, self.teacher)._replace(features=None)
        # one by one: each view has statistics of its own
        views = (strong_view(x, self.generator) for _ in range(self.views))
        passes = [self.predict(view, self.teacher) for view in views]
        logits, raw = (
            reduce(torch.add, each) for each in zip(*(p[:2] for p in passes), strict=True)
        )
        return Scores(logits / self.views, raw / self.views)

    def _restore(self) -> None:
        if self.restore == 0:
            return
        sizes = [weight.numel() for weight in self._student]
        draws = torch.rand(sum(sizes), generator=self.generator)
        masks = (draws < self.restore).to(self.device).split(sizes)
        for weight, source, mask in zip(self._student, self._source, masks, strict=True):
            weight.copy_(torch.where(mask.view(weight.shape), source, weight))


def cross_entropy(logits: Tensor, target: Tensor, symmetric: bool = False) -> Tensor:
    """Cross entropy per sample; if symmetric, the mean of both directions.

    Args:
        logits: Logits of the student, (B, C).
        target: Logits to learn, (B, C).
        symmetric: Whether each of the two is the other's target.
    """
    loss = -(target.softmax(1) * logits.log_softmax(1)).sum(1)
    if not symmetric:
        return loss
    return (loss - (logits.softmax(1) * target.log_softmax(1)).sum(1)) / 2
