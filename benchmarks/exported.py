"""What is recommended, exported to ONNX and run by onnxruntime, as a candidate to time."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Candidate
from twoshift import LabelAware, LabelEstimate, export_onnx

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def missing() -> list[str]:
    """The packages that it needs and that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def exported(live: LabelAware, images: Tensor) -> Any:
    """A session of onnxruntime with the snapshot, and with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    with TemporaryDirectory() as folder:
        file = export_onnx(live, Path(folder) / "model.onnx", images).file
        return onnxruntime.InferenceSession(file.read_bytes(), options)


def by_onnxruntime(session: Any, stream: tuple[Tensor, ...], labels: bool) -> Candidate:
    """Prediction of batch after batch.

    Args:
        session: What `exported` returns.
        stream: The batches.
        labels: Whether the label estimate goes on, in numpy.
    """
    feed = itertools.cycle([{"images": x.contiguous().numpy()} for x in stream])
    if not labels:
        return Candidate(lambda: session.run(["logits"], next(feed)))
    estimate = LabelEstimate(session.get_modelmeta().custom_metadata_map)
    return Candidate(lambda: estimate(session.run(["raw_logits"], next(feed))[0]))
