"""Running methods over streams and keeping the results."""

from twoshift.bench.cell import Cell
from twoshift.bench.measure import evaluate, run_cell
from twoshift.bench.presets import preset
from twoshift.bench.request import make_cell
from twoshift.bench.result import Result

__all__ = ["Cell", "Result", "evaluate", "make_cell", "preset", "run_cell"]
