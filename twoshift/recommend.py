"""What is recommended, ready to use: matched statistics, logit adjustment, labels by EM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from twoshift.adapters import attach, logit_adapter
from twoshift.estimators import EM
from twoshift.methods import LabelAware, Matched
from twoshift.methods.matched import Moments


def recommended(
    model: nn.Module,
    moments: Moments,
    *,
    temperature: float = 1.0,
    bias: Sequence[float] | None = None,
    source_prior: Sequence[float] | None = None,
    **settings: Any,
) -> LabelAware:
    """The combination that did best in our measurements; see the preset of the same name.

    Args:
        model: A classifier with batch normalisation and a linear head; it is not changed.
        moments: Of each class, from ``class_moments(model, source_batches)``.
        temperature: Of a calibration on held-out source images, where there is one. Worth having:
            the estimate and the adjustment both take probabilities at their word.
        bias: Of the same calibration, one per class.
        source_prior: Label distribution of the training set, if it was trained by plain
            cross-entropy; None if the training balanced the classes.
        settings: Of `Matched`.
    """
    adapter = logit_adapter(model, source_prior, temperature=temperature)
    # calibrated with a bias, probabilities are those of equally frequent classes
    assumed = source_prior if bias is None else None
    estimator = EM(adapter.classes, assumed, temperature, bias)
    return LabelAware(Matched(attach(model, adapter), moments, **settings), estimator)
