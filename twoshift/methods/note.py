"""NOTE: learn from a small memory that is balanced by predicted class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.methods._learning import entropy
from twoshift.methods._reservoir import (
    between_updates,
    check_facts,
    check_keepable,
    check_stored,
    in_layout_of,
    of_one_size,
    place,
)
from twoshift.methods.base import methods
from twoshift.methods.iabn import IABN
from twoshift.models.head import class_count
from twoshift.registry import check_numbers

MOST = 2**53  # arrivals that can be counted


@methods.register("note")
class NOTE(IABN):
    """IABN layers: predict by running statistics, learn from a memory balanced by prediction.

    Every image is predicted by the current running statistics and offered to the memory under its
    predicted class. After every ``update_every`` images, counted over the stream, one pass over the
    memory moves the running statistics and gives an entropy step.

    Args:
        model: The classifier.
        lr: Learning rate.
        momentum: Weight of the memory in the running statistics.
        optim: ``"adam"`` or ``"sgd"``.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
        capacity: Images in the memory.
        update_every: Images between two updates.
        bound: How far one update may move the running statistics, in standard deviations: see
            `twoshift.models.norm.bounded_statistics`; None for no bound.
    """

    title = "NOTE"
    remembers: ClassVar = {"images": None, "classes": torch.int64, "arrivals": torch.int64}

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-4,
        momentum: float = 0.01,
        optim: str = "adam",
        freeze: Sequence[str] = (),
        capacity: int = 64,
        update_every: int = 64,
        bound: float | None = None,
    ) -> None:
        super().__init__(model, lr, momentum, optim, freeze, bound)
        counts = {"capacity": capacity, "update_every": update_every}
        check_numbers("note", "a whole number from 1", **counts)
        self.capacity, self.update_every = capacity, update_every

    def adapt(self, x: Tensor) -> Scores:
        """Predict up to the next update, filling the memory; learn from it, and so on."""
        check_keepable(x)
        self.memory = of_one_size(self.memory, "images", x, self.inputs)
        labels, arrivals = self._recall()
        pool = torch.cat([self.memory["images"], x]) if labels else x
        rows, row = list(range(len(labels))), len(labels)  # of the pool: stored, and the next one
        scores: list[Scores] = []
        waiting = sum(arrivals.values()) % self.update_every
        for chunk in between_updates(x, waiting, self.update_every):
            with torch.no_grad():
                scores.append(self.predict(chunk))
            for label in scores[-1].logits.argmax(1).tolist():
                slot = place(label, labels, arrivals, self.capacity, self.generator)
                if slot is not None:
                    rows[slot : slot + 1] = [row]
                row += 1
            waiting += len(chunk)
            if waiting % self.update_every == 0:
                self.learn(in_layout_of(x, pool[rows]))
        counts = [arrivals[label] for label in range(scores[0].logits.shape[1])]
        self.memory = {
            "images": pool[rows],
            "classes": torch.tensor(labels, device=x.device),
            "arrivals": torch.tensor(counts, device=x.device),
        }
        return Scores.cat(scores)

    def check_memory(self, memory: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """As many classes as images, and arrivals of every class."""
        stored = check_stored(self.model, self.inputs, memory, self.remembers, self.capacity)
        classes = class_count(self.model)
        check_facts("classes", memory["classes"], (stored,), below=classes)
        check_facts("arrivals", memory["arrivals"], (classes,), below=MOST)

    def loss(self, logits: Tensor) -> Tensor:
        """Entropy, averaged over images and, as in the authors' code, over classes."""
        return entropy(logits).mean() / logits.shape[1]

    def _recall(self) -> tuple[list[int], Counter[int]]:
        """Predicted class of every stored image, and how many of each class have arrived."""
        if not self.memory:
            return [], Counter()
        arrivals = self.memory["arrivals"].tolist()
        return self.memory["classes"].tolist(), Counter(dict(enumerate(arrivals)))
