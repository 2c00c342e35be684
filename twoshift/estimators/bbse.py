"""Black box shift estimation: the label distribution that explains the mean prediction.

Lipton, Wang and Smola, "Detecting and Correcting for Label Shift with Black Box Predictors",
ICML 2018, https://arxiv.org/abs/1802.03916.
"""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.errors import SettingError
from twoshift.estimators._window import Array, Windowed, numbers
from twoshift.estimators.base import estimators

SMALLEST = 1e-6  # singular values below this share of the largest count as zero


@estimators.register("bbse")
class BBSE(Windowed):
    """The label distribution that explains the mean of the last predictions by the confusion.

    Solves C w = mu for the class weights w = pi_t / pi_s, in the equivalent form A q = mu, where A
    is the distribution of predictions given the class: it is better conditioned. If classes look
    the same to the model, the matrix is singular; the least-squares solution of smallest norm then
    divides their share evenly. Negative entries are cut off.

    Args:
        classes: Number of classes.
        confusion: Joint distribution of predicted and true class on held-out source images,
            (predicted, true), sum 1; its columns add up to the source prior.
        hard: Count the most likely classes instead of probabilities.
        window: Number of predictions to keep.
        hard_confusion: The joint distribution that counts the most likely classes, for ``hard``;
            without it ``confusion`` must be that one.
    """

    def __init__(
        self,
        classes: int,
        confusion: ArrayLike | Tensor,
        hard: bool = False,
        window: int = 512,
        hard_confusion: ArrayLike | Tensor | None = None,
    ) -> None:
        super().__init__(classes, window)
        self.confusion, self.hard = check_confusion(confusion, classes), hard
        matrix = None if hard_confusion is None else check_confusion(hard_confusion, classes)
        self.hard_confusion = matrix
        joint: Array = (matrix if hard and matrix is not None else self.confusion).numpy()
        self._joint = joint / joint.sum()
        self._source_prior = self._joint.sum(0)
        self._inverse = np.linalg.pinv(self._joint / self._source_prior, rcond=SMALLEST)
        self.reset()

    def keep(self, probs: Tensor) -> Tensor:
        """The probabilities, or ones at the most likely classes."""
        return F.one_hot(probs.argmax(1), self.classes).to(probs.dtype) if self.hard else probs

    def solve(self, rows: Array, before: Array) -> Array:
        """The solution for the mean of the window, without its negative part."""
        q: Array = np.maximum(self._inverse @ rows.mean(0), 0)
        return q if q.sum() > 0 else self._source_prior


def check_confusion(confusion: ArrayLike | Tensor, classes: int) -> Tensor:
    """A copy of a joint confusion matrix in double precision, or an error."""
    joint = numbers("confusion", confusion, (classes, classes))
    if (joint < 0).any() or abs(joint.sum() - 1) >= 1e-3:
        raise SettingError(
            "confusion",
            must_be="a joint distribution: non-negative, sum 1",
            got=f"sum {float(joint.sum()):.6g}",
            cure="Divide the counts of (predicted, true) by their sum.",
        )
    if (joint.sum(0) == 0).any():
        raise SettingError(
            "confusion",
            must_be="computed from images of every class",
            got=f"nothing in column {int(joint.sum(0).argmin())}",
        )
    return joint
