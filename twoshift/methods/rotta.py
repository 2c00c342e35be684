"""RoTTA: robust statistics, a balanced memory of recent and sure samples, an averaged teacher."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.errors import BatchError
from twoshift.methods._learning import entropy, make_optimizer, norm_affine, paths
from twoshift.methods._reservoir import (
    check_facts,
    check_keepable,
    check_stored,
    in_layout_of,
    of_one_size,
)
from twoshift.methods._views import check_images, strong_view
from twoshift.methods.base import Method, methods
from twoshift.methods.bn_stats import require_plain_batch_norm
from twoshift.models.base import expand
from twoshift.models.head import class_count
from twoshift.models.norm import (
    AnyBatchNorm,
    bounded_statistics,
    check_bound,
    in_training,
    replace_batch_norms,
)
from twoshift.registry import check_numbers


@methods.register("rotta")
class RoTTA(Method):
    """A teacher predicts by slow statistics; its student learns from a balanced memory.

    The teacher predicts the batch, then each sample is offered to the memory. After every
    ``update_every`` samples the student learns, on a strong view of the memory, the teacher's
    predictions on the memory itself; the teacher's weights move towards the student's, and the
    statistics of both towards those of their inputs.

    Args:
        model: The classifier.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"`` (momentum 0.9).
        capacity: Samples in the memory.
        update_every: Samples between two updates.
        nu: Weight of the student in the new teacher.
        alpha: Weight of the memory's statistics in the new ones.
        lambda_t: Weight of a sample's age in the choice of the sample to forget.
        lambda_u: Weight of its entropy in that choice.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
        bound: How far one update may move the running statistics, in standard deviations: see
            `twoshift.models.norm.bounded_statistics`; None for no bound.
    """

    title = "RoTTA"
    reference = (
        "Yuan et al., Robust test-time adaptation in dynamic scenarios, CVPR 2023, "
        "https://arxiv.org/abs/2303.13899"
    )
    needs = frozenset({"batch norm layers"})
    remembers: ClassVar = {
        "images": None,
        "label": torch.int64,
        "uncertainty": torch.float64,
        "born": torch.int64,
    }
    not_negative = frozenset({"seen"})
    seen: Tensor

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        optim: str = "adam",
        capacity: int = 64,
        update_every: int = 64,
        nu: float = 0.001,
        alpha: float = 0.05,
        lambda_t: float = 1.0,
        lambda_u: float = 1.0,
        freeze: Sequence[str] = (),
        bound: float | None = None,
    ) -> None:
        super().__init__(model)
        counts = {"capacity": capacity, "update_every": update_every}
        check_numbers("rotta", "a whole number from 1", **counts)
        check_numbers("rotta", "from 0 to 1", nu=nu, alpha=alpha)
        check_numbers("rotta", "at least 0 and finite", lambda_t=lambda_t, lambda_u=lambda_u)
        self.lr, self.optim, self.capacity, self.update_every = lr, optim, capacity, update_every
        self.nu, self.alpha, self.lambda_t, self.lambda_u = nu, alpha, lambda_t, lambda_u
        self.freeze, self.bound = paths(freeze), check_bound("rotta", bound)
        require_plain_batch_norm(self.model, "rotta")
        for layer in replace_batch_norms(self.model, RobustBatchNorm):
            layer.momentum = alpha
        with torch.inference_mode(False):  # as in Method: the copy must be able to move
            self.teacher = copy.deepcopy(self.model)
            self.register_buffer("seen", torch.tensor(0))
        self._layers = [m for m in self.modules() if isinstance(m, RobustBatchNorm)]
        student = norm_affine(self.model, self.freeze)
        self._student: list[Tensor] = [*student]
        self._teacher: list[Tensor] = [*norm_affine(self.teacher, self.freeze)]
        self.optimizer = make_optimizer(optim, student, lr)
        self.ready()

    def adapt(self, x: Tensor) -> Scores:
        """Predict by the teacher, fill the memory, and learn whenever an update is due."""
        check_images(x)
        check_keepable(x)
        with torch.no_grad():
            scores = self.predict(x, self.teacher)
            logits = scores.logits
            labels, entropies = logits.argmax(1).tolist(), entropy(logits).tolist()
        if not logits.isfinite().all():
            return scores  # to be refused, not remembered
        pool, items = self._recall(x)
        classes, first, now = logits.shape[1], len(items), int(self.seen)
        # divided once: the rule is applied thousands of times
        fair, certainty = self.capacity / classes, self.lambda_u / math.log(max(classes, 2))
        rule = Rule(self.capacity, fair, self.lambda_t, certainty)
        for i, (label, uncertainty) in enumerate(zip(labels, entropies, strict=True), first):
            remember(items, Item(i, label, uncertainty, born=now), rule)
            now += 1
            if now % self.update_every == 0:
                images = in_layout_of(x, pool[[item.image for item in items]])
                self._learn(images, ages=[now - item.born for item in items])
        self.seen.fill_(now)
        self._store(pool, items)
        return scores

    def moving(self) -> dict[str, Tensor]:
        """The teacher's weights move too, without gradients."""
        moves = {id(p) for p in self._teacher}
        teacher = {n: p for n, p in self.named_parameters() if id(p) in moves}
        return {**super().moving(), **teacher}

    def check_memory(self, memory: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """As many facts as images, of known classes and of the past."""
        stored = check_stored(self.model, self.inputs, memory, self.remembers, self.capacity)
        check_facts("label", memory["label"], (stored,), below=class_count(self.model))
        check_facts("uncertainty", memory["uncertainty"], (stored,))
        check_facts("born", memory["born"], (stored,), below=int(state["seen"]))

    def _learn(self, images: Tensor, ages: list[int]) -> None:
        view = strong_view(images, self.generator)
        with in_training(self._layers), bounded_statistics(self._layers, self.bound):
            with torch.no_grad():
                target = self.teacher(images).softmax(1)
            logits = self.model(view)
        timely = torch.sigmoid(-torch.tensor(ages, dtype=logits.dtype) / self.capacity)
        loss = -(target * logits.log_softmax(1)).sum(1)
        self.minimise((timely.to(loss.device) * loss).mean())
        with torch.no_grad():
            torch._foreach_lerp_(self._teacher, self._student, self.nu)
            moved = [*self._teacher, *(s for m in self._layers for s in m.statistics())]
            # they may overflow although the loss is finite
            if not torch.stack(torch._foreach_norm(moved)).isfinite().all():
                raise BatchError(
                    "weights and statistics after the step", must_be="finite", got="NaN or infinity"
                )

    def _recall(self, x: Tensor) -> tuple[Tensor, list[Item]]:
        """The stored images followed by the batch, and the stored items, which point into them."""
        memory = of_one_size(self.memory, "images", x, self.inputs)
        if not memory:
            return x, []
        columns = [memory[name].tolist() for name in ("label", "uncertainty", "born")]
        items = [Item(i, *facts) for i, facts in enumerate(zip(*columns, strict=True))]
        return torch.cat([memory["images"], x]), items

    def _store(self, pool: Tensor, items: list[Item]) -> None:
        image, label, uncertainty, born = zip(*items, strict=True)
        self.memory = {
            "images": pool[list(image)],  # a copy: the batch is the caller's
            "label": torch.tensor(label),
            "uncertainty": torch.tensor(uncertainty, dtype=torch.float64),
            "born": torch.tensor(born),
        }


class Item(NamedTuple):
    """A remembered sample.

    Attributes:
        image: Its row among the images.
        label: The class that the teacher predicted on arrival.
        uncertainty: The entropy of that prediction.
        born: The number of samples before it.
    """

    image: int
    label: int
    uncertainty: float
    born: int


class Rule(NamedTuple):
    """How the memory chooses its samples.

    Attributes:
        capacity: Samples in the memory.
        fair: Samples of each class if all had the same number.
        timeliness: Weight of the age.
        certainty: Weight of the entropy.
    """

    capacity: int
    fair: float
    timeliness: float
    certainty: float

    def badness(self, item: Item, now: int) -> float:
        """High for old and unsure samples, which are forgotten first."""
        age = (now - item.born) / self.capacity
        return self.timeliness / (1 + math.exp(-age)) + self.certainty * item.uncertainty


def remember(items: list[Item], new: Item, rule: Rule) -> None:
    """Insert ``new`` into ``items``, in place, unless every item that it may replace is better.

    Once the memory is full, a class below its fair share replaces items of the largest classes; a
    class at or above it always replaces its own. The worst of these items goes if it is worse than
    the new one. Items stay ordered by class, and by arrival within a class.
    """
    sizes = Counter(item.label for item in items)
    rivals: list[int] = []
    if sizes[new.label] >= rule.fair:
        rivals = [i for i, item in enumerate(items) if item.label == new.label]
    elif len(items) >= rule.capacity:
        largest = max(sizes.values())
        rivals = [i for i, item in enumerate(items) if sizes[item.label] == largest]
    if rivals:
        scores = [rule.badness(items[i], new.born) for i in rivals]
        worst = max(scores)
        if worst <= rule.badness(new, new.born):
            return
        # the last one among equals
        del items[max(i for i, score in zip(rivals, scores, strict=True) if score == worst)]
    after = sum(item.label <= new.label for item in items)
    items.insert(after, new)


class RobustBatchNorm(AnyBatchNorm):
    """Batch normalisation by running statistics, which in training mode take a step first.

    The step is towards the batch's mean and biased variance, by ``momentum``, and the gradient
    flows through the batch's part.
    """

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Running mean and variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        return self.running_mean, self.running_var

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (B, C, ...)."""
        self._check_input_dim(input)
        running_mean, running_var = self.statistics()
        if not self.training:
            return F.batch_norm(
                input, running_mean, running_var, self.weight, self.bias, eps=self.eps
            )
        assert self.momentum is not None
        others = [d for d in range(input.dim()) if d != 1]
        batch_mean = input.mean(others)
        centred = input - expand(batch_mean, input)
        batch_var = centred.square().mean(others)  # var_mean is several times slower on a CPU
        mean = torch.lerp(running_mean, batch_mean, self.momentum)
        var = torch.lerp(running_var, batch_var, self.momentum)
        with torch.no_grad():
            running_mean.copy_(mean)
            running_var.copy_(var)
        scale = (var + self.eps).rsqrt()
        scale = scale * self.weight if self.affine else scale
        offset = (batch_mean - mean) * scale
        offset = offset + self.bias if self.affine else offset
        return centred * expand(scale, input) + expand(offset, input)
