"""Watch a live classifier without labels: readings, alarms, and a guard that falls back."""

from __future__ import annotations

from twoshift.watch.alarms import Alarm as Alarm
from twoshift.watch.alarms import AlarmLog as AlarmLog
from twoshift.watch.alarms import read_log as read_log
from twoshift.watch.distances import by_chance as by_chance
from twoshift.watch.distances import label_distance as label_distance
from twoshift.watch.evidence import Evidence as Evidence
from twoshift.watch.guard import Guard as Guard
from twoshift.watch.guard import Switch as Switch
from twoshift.watch.history import History as History
from twoshift.watch.watch import Watch as Watch
