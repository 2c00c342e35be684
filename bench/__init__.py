"""Benchmarks of the code itself: how fast it is, not how accurate."""
