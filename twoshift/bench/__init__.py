"""Running methods over streams and keeping the results."""

from twoshift.bench.cell import Cell, evaluate, run_cell
from twoshift.bench.presets import preset

__all__ = ["Cell", "evaluate", "preset", "run_cell"]
