"""Adapted classifiers for other runtimes.

`twoshift.export.onnx` writes ONNX files and needs torch. `twoshift.export.labels` keeps the label
estimate of such a file going, and needs numpy only: nothing is imported here.
"""
