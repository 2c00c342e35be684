"""The recommended combination, ready to use: matched statistics, logit adjustment, and EM."""

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
        moments: Statistics of each class, from ``class_moments(model, source_batches)``.
        temperature: The temperature of a calibration on held-out source images. It is worth having:
            the estimate and the adjustment both rely on calibrated probabilities.
        bias: The bias of the same calibration, one number per class.
        source_prior: Label distribution of the training set, if the model was trained by plain
            cross-entropy; None if the training balanced the classes.
        settings: Settings of `Matched`.
    """
    adapter = logit_adapter(model, source_prior, temperature=temperature)
    # a calibration with a bias gives the probabilities of equally frequent classes
    model_prior = source_prior if bias is None else None
    estimator = EM(adapter.classes, model_prior, temperature, bias)
    return LabelAware(Matched(attach(model, adapter), moments, **settings), estimator)
