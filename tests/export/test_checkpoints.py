"""Reference models, adapted to corrupted images, as ONNX files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.documents import ROOT
from twoshift import Calibration, LabelEstimate, export_onnx, frozen, recommended
from twoshift.data import load
from twoshift.data.corruptions import corrupt
from twoshift.data.stream import to_float
from twoshift.train.checkpoint import load_source

pytestmark = pytest.mark.slow
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def stream(shared_data):
    """Images in fog, whose labels get less frequent with their number."""
    data = load("cifar10", "test", shared_data)
    shares = 0.6 ** np.arange(10)
    labels = np.random.default_rng(0).choice(10, 640, p=shares / shares.sum())
    rows = [np.flatnonzero(data.labels == c)[i] for i, c in enumerate(labels)]
    return to_float(corrupt(data.images[np.array(rows)], "fog", 5)), torch.from_numpy(labels)


@pytest.mark.parametrize("name", ["cifar10-bn", "cifar10-gn", "cifar10-vit"])
def test_a_reference_model_goes_on_outside_of_torch(name, stream, tmp_path):
    folder = ROOT / "checkpoints" / name
    facts = Calibration.load(folder)
    live = recommended(load_source(folder).model, facts)
    images, truth = stream
    for x in images[:256].split(64):
        live(x)
    done = export_onnx(live, tmp_path / "model.onnx", images[256:320], facts=facts)
    assert done.difference < 1e-4
    session = onnxruntime.InferenceSession(done.file)
    labels, net = LabelEstimate(session.get_modelmeta().custom_metadata_map), frozen(live)
    outside, inside, plain = [], [], []
    for x in images[256:].split(64):
        logits, raw = session.run(None, {"images": x.numpy()})
        np.testing.assert_allclose(logits, net(x), rtol=0, atol=1e-4)
        outside.append(torch.from_numpy(labels(raw)))
        plain.append(torch.from_numpy(raw))
        inside.append(live(x))
    right = [
        torch.cat(e).argmax(1).eq(truth[256:]).float().mean() for e in (outside, inside, plain)
    ]
    if name == "cifar10-bn":  # its statistics stay, its labels go on
        assert right[0] > right[1] - 0.05
        assert right[0] > right[2]
    else:
        torch.testing.assert_close(torch.cat(outside), torch.cat(inside), rtol=0, atol=1e-3)
    np.testing.assert_allclose(labels.prior, live.prior, atol=0.03)
