"""Runs whose results are kept in ``results/``: how accurate the methods are, and how fast."""
