"""The label estimate without torch, against the method that it continues."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.export.snapshots import ASSUMES, snapshot
from twoshift import EMA, LabelAware, LabelEstimate, LogitAdapter, Paced, attach
from twoshift.adapters import CalibratedAdapter, IdentityAdapter
from twoshift.errors import BatchError, MismatchError, SettingError
from twoshift.export._metadata import metadata_of
from twoshift.export.labels import ESTIMATE, KEPT, packed, unpacked
from twoshift.methods import Source


class Passing(nn.Module):
    """A network whose raw logits are its input."""

    def __init__(self, classes):
        super().__init__()
        self.fc = nn.Linear(classes, classes, bias=False)
        self.fc.weight.data = torch.eye(classes)

    def forward(self, x):
        return self.fc(x)


def passing(classes=5, adapter=None, **chosen):
    adapter = adapter or CalibratedAdapter(classes, classes, temperature=1.7)
    live = LabelAware(Source(attach(Passing(classes), adapter)), Paced(classes, **chosen))
    live.expect(None)
    return live


def logits(count, classes=5, seed=0, favours=None):
    g = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(count, classes, generator=g)
    return x if favours is None else x + 3 * nn.functional.one_hot(torch.tensor(favours), classes)


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    seed=st.integers(0, 100),
    relative=st.sampled_from([True, False, None]),
    assumes=st.sampled_from([None, ASSUMES]),
    bias=st.sampled_from([None, [0.3, -0.2, 0.1, 0.0, -0.2]]),
    temperature=st.sampled_from([1.0, 0.6]),
)
def test_it_goes_on_as_the_method_does(sizes, seed, relative, assumes, bias, temperature):
    adapter = CalibratedAdapter(5, 5, temperature=1.7, assumes=assumes)
    model_prior = None if seed % 2 else [0.1, 0.2, 0.3, 0.2, 0.2]
    live = passing(
        adapter=adapter,
        relative=relative,
        assumes=assumes,
        bias=bias,
        temperature=temperature,
        model_prior=model_prior,
        evidence=0.5,
    )
    live(logits(seed + 1, seed=seed))  # the snapshot is not of a new stream
    labels = LabelEstimate(metadata_of(live, None, None))
    for i, size in enumerate(sizes):
        x = logits(size, seed=seed + i, favours=seed % 5)
        expected = live(x)
        torch.testing.assert_close(torch.from_numpy(labels(x.numpy())), expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(labels.prior, live.prior, atol=1e-5)
        np.testing.assert_allclose(np.exp(labels.log_prior), live.prior_ahead, atol=1e-5)


@pytest.mark.parametrize("adapter", [IdentityAdapter(5, 5), LogitAdapter(5, 5)])
def test_other_adapters_of_logits(adapter):
    live = passing(adapter=adapter, relative=False)
    labels = LabelEstimate(metadata_of(live, None, None))
    x = logits(30, favours=2)
    torch.testing.assert_close(torch.from_numpy(labels(x.numpy())), live(x), rtol=0, atol=1e-5)
    assert labels.prior.argmax() == 2


def test_many_classes_are_kept_in_short():
    live = passing(100, relative=False)
    live(logits(70, 100))
    labels = LabelEstimate(metadata_of(live, None, None))
    x = logits(80, 100, seed=1)
    torch.testing.assert_close(torch.from_numpy(labels(x.numpy())), live(x), rtol=0, atol=1e-3)
    assert labels.state()["rows"].dtype == np.float16


def test_a_state_goes_on_bit_for_bit(tmp_path):
    metadata = metadata_of(passing(), None, None)
    first, second = LabelEstimate(metadata), LabelEstimate(metadata)
    first(logits(40))
    np.savez(tmp_path / "labels.npz", **first.state())
    with np.load(tmp_path / "labels.npz") as state:
        second.load_state(state)
    x = logits(10, seed=3)
    assert np.array_equal(first(x), second(x))
    assert np.array_equal(first.prior, second.prior)
    kept = first.state()
    kept["prior"][:] = 0
    assert first.prior.sum() == pytest.approx(1)


def test_what_is_no_state_changes_nothing():
    labels = LabelEstimate(metadata_of(passing(), None, None))
    other = LabelEstimate(metadata_of(passing(7), None, None))
    spoilt = {**labels.state(), "prior": np.full(5, np.nan, np.float32)}
    for state in (other.state(), {}, spoilt):
        with pytest.raises(MismatchError, match="state of a label estimate"):
            labels.load_state(state)
    assert labels.prior.tolist() == pytest.approx([0.2] * 5)


@pytest.mark.parametrize("x", [np.zeros((3, 4)), np.zeros(5), np.zeros((0, 5))])
def test_logits_of_another_shape_are_refused(x):
    labels = LabelEstimate(metadata_of(passing(), None, None))
    with pytest.raises(BatchError, match=r"must be \(B, 5\)"):
        labels(x)
    with pytest.raises(BatchError, match="finite"):
        labels(np.full((2, 5), np.inf))
    assert int(labels.state()["seen"]) == 0


def test_metadata_that_are_not_ours_or_were_edited():
    good = metadata_of(passing(), None, None)
    told = json.loads(good[ESTIMATE])
    with pytest.raises(SettingError, match=r"estimated by paced.*twoshift export onnx"):
        LabelEstimate({})
    for entry in (
        "no json",
        "[]",
        json.dumps({**told, "bias": [1.0]}),
        json.dumps({**told, "temperature": 0}),
        json.dumps({n: v for n, v in told.items() if n != "own"}),
    ):
        with pytest.raises(SettingError, match="as twoshift export onnx wrote it"):
            LabelEstimate({**good, ESTIMATE: entry})
    for entry in ("*", "aGVsbG8=", ""):
        with pytest.raises(SettingError, match="as twoshift export onnx wrote it"):
            LabelEstimate({**good, KEPT: entry})


def test_pickles_are_not_read():
    text = packed({"rows": np.array([object()], dtype=object)})
    with pytest.raises(ValueError, match="pickle"):
        unpacked(text)


def test_an_estimator_that_needs_torch_is_left_out():
    live = LabelAware(Source(attach(Passing(5), LogitAdapter(5, 5))), EMA(5))
    metadata = metadata_of(live, None, None)
    assert ESTIMATE not in metadata
    with pytest.raises(SettingError, match="paced"):
        LabelEstimate(metadata)


def test_matched_statistics_use_the_full_estimate():
    assert json.loads(metadata_of(snapshot(), None, None)[ESTIMATE])["relative"] is False
    relative = metadata_of(snapshot("resnet_gn"), None, None)
    assert json.loads(relative[ESTIMATE])["relative"] is True


def test_it_needs_no_torch(tmp_path):
    (tmp_path / "metadata.json").write_text(json.dumps(metadata_of(passing(), None, None)))
    program = (
        "import json, sys\n"
        "sys.modules['torch'] = None\n"  # as if it were not installed
        "import numpy as np\n"
        "from twoshift import LabelEstimate\n"
        "labels = LabelEstimate(json.load(open('metadata.json')))\n"
        "print(labels(np.eye(5)).shape, labels.prior.sum().round(6))\n"
    )
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "(5, 5) 1.0\n"), done.stderr
