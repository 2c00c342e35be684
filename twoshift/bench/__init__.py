"""Running methods over streams and keeping the results."""

from twoshift.bench.cell import Cell, evaluate, preset, run_cell

__all__ = ["Cell", "evaluate", "preset", "run_cell"]
