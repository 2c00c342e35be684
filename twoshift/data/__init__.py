"""Data sets, corruptions, label shift and streams of batches."""

from twoshift.data.base import ImageSet, data_root, datasets, load

__all__ = ["ImageSet", "data_root", "datasets", "load"]
