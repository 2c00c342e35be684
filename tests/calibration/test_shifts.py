"""Simulated shifts: what is drawn, and windows against a loop over the model's own answers."""

import numpy as np
import pytest
import torch

from tests.calibration.trained import batches, trained
from twoshift import Paced
from twoshift.accuracy import VIEWS, read_signals, signals_of
from twoshift.adapters import attach, logit_adapter
from twoshift.calibration import shifts
from twoshift.calibration.shifts import Simulation, conditions, sure_threshold
from twoshift.data.stream import to_float
from twoshift.methods import create
from twoshift.methods.matched import class_moments

TEMPERATURE, THRESHOLD = 1.6, 0.7


def test_as_many_images_are_sure_as_predictions_are_right():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2000, 5, generator=generator)
    labels = torch.where(torch.rand(2000, generator=generator) < 0.7, logits.argmax(1), 0)
    threshold = sure_threshold(logits, labels, 1.5)
    sure = float(((logits / 1.5).softmax(1).amax(1) > threshold).float().mean())
    assert sure == pytest.approx(float((logits.argmax(1) == labels).float().mean()), abs=2e-3)


def test_gray_images_have_no_saturation():
    gray, colour = (np.zeros((1, 8, 8, channels), np.uint8) for channels in (1, 3))
    more = {*conditions(colour)} - {*conditions(gray)}
    assert {name for name, _ in more} == {"saturate"}


@pytest.mark.parametrize("stream", range(2 * shifts.STREAMS))
def test_a_stream_is_drawn_from_its_own_images(stream):
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(6), [40, 1, 9, 3, 3, 20]))
    one, again = (
        shifts._stream(labels, 6, stream, np.random.default_rng([0, stream])) for _ in range(2)
    )
    assert len(one) == shifts.BATCH * shifts.BATCHES
    assert np.array_equal(one, again)
    if stream % shifts.STREAMS == 0:  # uniform, however rare a class is
        assert np.bincount(labels[one], minlength=6).min() > len(one) / 12


def simulation(net, prior, moments):
    bias = torch.linspace(-0.5, 0.5, 10).double()
    known = {"temperature": TEMPERATURE, "bias": bias, "assumes": prior, "moments": moments}
    return Simulation(net, known, THRESHOLD), bias


@pytest.mark.parametrize("view", VIEWS)
def test_windows_are_what_the_recommended_parts_would_see(view):
    of = trained("cross_entropy")
    prior, moments = of.train.counts / len(of.train), class_moments(of.net, batches(of.train))
    simulated, bias = simulation(of.net, prior, moments)
    rows = np.random.default_rng(0).permutation(len(of.held_out))[: shifts.BATCH * shifts.BATCHES]
    x, y = to_float(of.held_out.images[rows]), torch.from_numpy(of.held_out.labels[rows])
    found = simulated._seen(3, VIEWS.index(view), x, y)

    adapter = logit_adapter(of.net, prior.tolist(), temperature=TEMPERATURE)
    name = {"matched": "streamed", "plain": "bn_stats", "source": "source"}[view]
    settings = {"moments": moments} if view == "matched" else {}
    live = create(name, attach(of.net, adapter), **settings)
    estimator = Paced(
        10,
        temperature=TEMPERATURE,
        bias=bias,
        assumes=prior.tolist(),
        relative=view != "matched",
    )
    log_prior, parts = torch.from_numpy(prior).log(), []
    for batch in x.split(shifts.BATCH):
        raw = live.adapt(batch).raw.double()
        fair = raw / TEMPERATURE - log_prior
        estimator.update(raw.softmax(1))
        parts.append(fair + estimator.present.double().log())
    size = shifts.BATCH * shifts.WINDOW
    windows = zip(torch.cat(parts).split(size), y.split(size), strict=True)
    for window, (logits, labels) in enumerate(windows):
        probs = logits.softmax(1)
        expected = read_signals(signals_of(probs, THRESHOLD)).float()
        torch.testing.assert_close(found.signals[window], expected, rtol=1e-3, atol=1e-3)
        right = float((probs.argmax(1) == labels).float().mean())
        assert float(found.right[window]) == pytest.approx(right, abs=1e-6)
    assert found.right.shape == (2,)
    assert found.corruption.unique().tolist() == [3]
    assert found.view.unique().tolist() == [VIEWS.index(view)]
