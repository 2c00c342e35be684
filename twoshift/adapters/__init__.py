"""Adapters of a classifier's head to a label distribution, one per file."""

from __future__ import annotations

from typing import Any

from twoshift.adapters._files import load_adapter as load_adapter
from twoshift.adapters._files import save_adapter as save_adapter
from twoshift.adapters.base import ANSWER as ANSWER
from twoshift.adapters.base import AdaptedHead as AdaptedHead
from twoshift.adapters.base import Adapter as Adapter
from twoshift.adapters.base import HeadShift as HeadShift
from twoshift.adapters.base import adapted_heads as adapted_heads
from twoshift.adapters.base import adapters as adapters
from twoshift.adapters.base import attach as attach
from twoshift.adapters.base import condition as condition
from twoshift.adapters.base import detach as detach
from twoshift.adapters.base import mapping_vector as mapping_vector
from twoshift.adapters.base import shifted_logits as shifted_logits
from twoshift.adapters.classwise import ClasswiseAdapter as ClasswiseAdapter
from twoshift.adapters.identity import IdentityAdapter as IdentityAdapter
from twoshift.adapters.label_shift import LabelShiftAdapter as LabelShiftAdapter
from twoshift.adapters.logit import CalibratedAdapter as CalibratedAdapter
from twoshift.adapters.logit import LogitAdapter as LogitAdapter
from twoshift.adapters.logit import logit_adapter as logit_adapter
from twoshift.adapters.scores import Scores as Scores
from twoshift.adapters.scores import rescore as rescore
from twoshift.adapters.scores import score as score
from twoshift.adapters.scores import unbiased as unbiased


def create(name: str, features: int, classes: int, **settings: Any) -> Adapter:
    """Build the adapter registered under ``name``."""
    return adapters.create(name, features, classes, **settings)
