"""Test-time adaptation methods, one per file."""

from __future__ import annotations

from typing import Any

from torch import nn

from twoshift.methods._frozen import frozen as frozen
from twoshift.methods._inputs import Inputs as Inputs
from twoshift.methods._one_step import OneStep as OneStep
from twoshift.methods._streams import LiveStream as LiveStream
from twoshift.methods.balanced_bn import BalancedBN as BalancedBN
from twoshift.methods.base import Method as Method
from twoshift.methods.base import methods as methods
from twoshift.methods.bn_stats import BNStats as BNStats
from twoshift.methods.cotta import CoTTA as CoTTA
from twoshift.methods.dart import Dart as Dart
from twoshift.methods.decoupled import Decoupled as Decoupled
from twoshift.methods.delta import DELTA as DELTA
from twoshift.methods.eata import EATA as EATA
from twoshift.methods.hybrid_ttn import HybridTTN as HybridTTN
from twoshift.methods.iabn import IABN as IABN
from twoshift.methods.im_loss import IMLoss as IMLoss
from twoshift.methods.isfda import ISFDA as ISFDA
from twoshift.methods.label_aware import LabelAware as LabelAware
from twoshift.methods.lame import LAME as LAME
from twoshift.methods.matched import Matched as Matched
from twoshift.methods.matched import class_moments as class_moments
from twoshift.methods.note import NOTE as NOTE
from twoshift.methods.onda import ONDA as ONDA
from twoshift.methods.pseudo_label import PseudoLabel as PseudoLabel
from twoshift.methods.roid import ROID as ROID
from twoshift.methods.rotta import RoTTA as RoTTA
from twoshift.methods.sar import SAR as SAR
from twoshift.methods.source import Source as Source
from twoshift.methods.streamed import Streamed as Streamed
from twoshift.methods.tent import Tent as Tent
from twoshift.methods.tribe import TRIBE as TRIBE
from twoshift.methods.unmix_tns import UnMixTNS as UnMixTNS


def create(name: str, model: nn.Module, **settings: Any) -> Method:
    """Build a method around a copy of ``model``: ``create("tent", model, lr=1e-3)``."""
    return methods.create(name, model, **settings)
