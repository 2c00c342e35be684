"""How often predictions are right, told without labels from what they look like.

Regressions from label-free signals of predictions to accuracy, fitted by a calibration on source
images that were corrupted and drawn with other labels. They tell people how good predictions are
(`ExpectedAccuracy`).
"""

from twoshift.accuracy.expected import Expected as Expected
from twoshift.accuracy.expected import ExpectedAccuracy as ExpectedAccuracy
from twoshift.accuracy.signals import read_signals as read_signals
from twoshift.accuracy.signals import signal_count as signal_count
from twoshift.accuracy.signals import signals_of as signals_of
from twoshift.accuracy.views import VIEWS as VIEWS
