"""The true label distribution: what a perfect estimator would return."""

from __future__ import annotations

from typing import ClassVar

from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.errors import PriorError
from twoshift.estimators.base import estimators
from twoshift.estimators.fixed import Fixed


@estimators.register("oracle")
class Oracle(Fixed):
    """The true label distribution, given by the caller; an upper bound, not a method.

    Args:
        classes: Number of classes.
        prior: The label distribution of the stream, for example ``Stream.prior``.
    """

    is_oracle: ClassVar[bool] = True

    def __init__(self, classes: int, prior: ArrayLike | Tensor) -> None:
        if prior is None:  # Fixed would quietly take uniform
            raise PriorError(
                "prior of oracle", must_be="the stream's label distribution", got="None"
            )
        super().__init__(classes, prior)
