# The estimators, for type checkers and, read by __init__.py, at run time.

from typing import Any

from twoshift.estimators.base import PriorEstimator as PriorEstimator
from twoshift.estimators.base import estimators as estimators
from twoshift.estimators.batch_oracle import BatchOracle as BatchOracle
from twoshift.estimators.bbse import BBSE as BBSE
from twoshift.estimators.decayed_counts import DecayedCounts as DecayedCounts
from twoshift.estimators.em import EM as EM
from twoshift.estimators.ema import EMA as EMA
from twoshift.estimators.fixed import Fixed as Fixed
from twoshift.estimators.fmapls import FMAPLS as FMAPLS
from twoshift.estimators.fmapls import OnlineFMAPLS as OnlineFMAPLS
from twoshift.estimators.mapls import MAPLS as MAPLS
from twoshift.estimators.oracle import Oracle as Oracle
from twoshift.estimators.paced import Paced as Paced
from twoshift.estimators.readout import Readout as Readout
from twoshift.estimators.rlls import RLLS as RLLS
from twoshift.estimators.tilt import Tilt as Tilt

def create(name: str, classes: int, **settings: Any) -> PriorEstimator: ...
