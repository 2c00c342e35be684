"""The recommended combination against the same parts put together by hand."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.calibration.trained import batches, trained
from tests.documents import ROOT
from twoshift import (
    LabelAware,
    Paced,
    Streamed,
    TwoshiftWarning,
    attach,
    calibrate,
    class_moments,
    logit_adapter,
    recommended,
)
from twoshift.errors import BatchError, HeadError, MismatchError, SettingError
from twoshift.models.head import find_head
from twoshift.train.checkpoint import load_source

PLAIN, FAIR = "cross_entropy", "balanced_softmax"


@functools.cache
def facts_of(loss, simulate=True):
    return calibrate(trained(loss).net, batches(trained(loss).held_out), simulate=simulate)


def stream(count=5):
    return [x for x, _ in batches(trained(PLAIN).held_out, 32, seed=7)[:count]]


@pytest.mark.parametrize("loss", [PLAIN, FAIR])
@pytest.mark.parametrize("simulate", [True, False])
def test_it_is_its_parts(loss, simulate):
    net, facts = trained(loss).net, facts_of(loss, simulate)
    live = recommended(net, facts, share=0.3, half_life=50.0)
    known = facts.of("running")
    temperature, contained = known["temperature"], known["assumes"]
    in_logits = torch.tensor(contained).log().float() if contained else torch.zeros(10)
    fair = copy.deepcopy(net)  # its logits favour no class, so its votes do not
    with torch.no_grad():
        find_head(fair)[1].bias -= temperature * in_logits
    moments = class_moments(net, batches(trained(loss).held_out))
    raw = Streamed(fair, moments, share=0.3, half_life=50.0)
    estimate = Paced(
        10,
        temperature=temperature,
        bias=known["bias"],
        assumes=contained,
    )
    for x in stream():
        logits = raw(x)
        estimate.view = raw.view_in_use
        estimate.update((logits + temperature * in_logits).softmax(1))
        expected = logits / temperature + estimate.present.log()
        torch.testing.assert_close(live(x), expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(live.prior, estimate.prior, rtol=1e-2, atol=1e-4)
    assert (live.expected_accuracy is not None) == simulate


def test_it_says_what_it_does():
    assert "minus the label distribution of the training" in recommended_line(PLAIN)
    assert "no label distribution in the logits" in recommended_line(FAIR)


def recommended_line(loss):
    line = recommended(trained(loss).net, facts_of(loss)).describe()
    assert "\n" not in line
    assert line.startswith("Streamed statistics, adapter calibrated, estimator paced: temperature ")
    return line


def test_from_the_folder_of_the_facts_and_on_from_a_saved_state(tmp_path):
    net = trained(PLAIN).net
    facts_of(PLAIN).save(tmp_path / "facts")
    live = recommended(net, tmp_path / "facts")
    first, second, third, *_ = stream()
    live(first)
    live(second)
    live.save(tmp_path / "state")
    again = LabelAware.load(tmp_path / "state", net)
    assert torch.equal(again(third), live(third))
    assert torch.equal(again.prior, live.prior)
    assert again.describe() == live.describe()
    with pytest.raises(BatchError, match="Divide by 255"):
        again(255 * third)


def test_from_the_folder_of_a_source_model():
    folder = ROOT / "checkpoints" / "cifar10-bn"
    live = recommended(load_source(folder).model, folder)
    assert live.describe().startswith("Streamed statistics")
    assert live(torch.rand(4, 3, 32, 32)).shape == (4, 10)


def test_facts_of_another_model_are_refused():
    with pytest.raises(MismatchError, match="another model"):
        recommended(trained(FAIR).net, facts_of(PLAIN))
    with pytest.raises(SettingError, match=r"twoshift\.calibrate"):
        recommended(trained(PLAIN).net, replace(facts_of(PLAIN), classifier=None))


def test_images_far_outside_of_the_range_are_refused():
    live = recommended(trained(PLAIN).net, facts_of(PLAIN))
    before, x = live.state(), stream(1)[0]
    with pytest.raises(BatchError, match="0 to 1"):
        live(x * 255)
    with pytest.raises(BatchError, match="28"):
        live(torch.rand(4, 1, 32, 32))
    assert all(torch.equal(before[name], value) for name, value in live.state().items())


def unchanged(live, net):
    with torch.no_grad():
        return all(torch.allclose(live(x), net(x), atol=1e-6) for x in stream(3))


def test_after_a_calibration_on_training_images_nothing_is_changed():
    net = copy.deepcopy(trained(PLAIN).net)
    with torch.no_grad():
        net[8].weight *= 0.3
        net[8].bias *= 0.3
    with pytest.warns(TwoshiftWarning, match="held_out="):
        facts = calibrate(net, batches(trained(PLAIN).train))
    live = recommended(net, facts)
    assert unchanged(live, net)
    assert "trained on" in live.describe()
    assert abs(live.prior - 0.1).max() > 0.02  # estimated all the same


@pytest.mark.filterwarnings("ignore::twoshift.errors.TwoshiftWarning")
@pytest.mark.parametrize("simulate", [True, False])
def test_without_batch_normalisation_labels_alone_are_followed(simulate):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.LayerNorm(784), nn.Linear(784, 10)).eval()
    pairs = batches(trained(PLAIN).held_out)
    facts = calibrate(net, pairs, held_out=pairs, simulate=simulate)
    live, known = recommended(net, facts), facts.of("running")
    assert live.describe().endswith(
        "no batch normalisation, so only changes of the labels adjust predictions"
    )
    estimate = Paced(
        10,
        temperature=known["temperature"],
        bias=known["bias"],
        assumes=known["assumes"],
        relative=True,
    )
    contained = torch.tensor(known["assumes"] or [0.1] * 10)
    for x in stream():
        with torch.no_grad():
            raw = net(x)
        estimate.update(raw.softmax(1))
        logits = raw / known["temperature"] - contained.log() + estimate.present.log()
        assert torch.allclose(live(x).softmax(1), logits.softmax(1), atol=1e-5)


class Cosine(nn.Module):
    """A classifier without any linear layer at its end."""

    def __init__(self, body):
        super().__init__()
        self.body, self.centres = body, nn.Parameter(torch.randn(10, 64))

    def forward(self, x):
        h = self.body(x)
        cosines = nn.functional.normalize(h) @ nn.functional.normalize(self.centres).T
        return {"features": h, "logits": 8 * cosines}


@pytest.mark.filterwarnings("ignore::twoshift.errors.TwoshiftWarning")
def test_a_classifier_without_a_head():
    torch.manual_seed(0)
    net = Cosine(copy.deepcopy(trained(FAIR).net)[:8]).eval()
    pairs = batches(trained(FAIR).held_out)
    facts = calibrate(net, pairs, held_out=pairs)
    assert facts.classifier.head == "answer"
    live = recommended(net, facts)
    assert live.describe().startswith("Streamed")
    logits = live(stream(1)[0])
    assert logits.shape == (32, 10)
    assert torch.equal(live(stream(1)[0]).isfinite(), torch.ones(32, 10, dtype=torch.bool))


def test_the_head_can_be_named():
    live = recommended(trained(FAIR).net, facts_of(FAIR), head="8")
    assert torch.equal(
        live(stream(1)[0]), recommended(trained(FAIR).net, facts_of(FAIR))(stream(1)[0])
    )
    with pytest.raises(HeadError, match="no module"):
        recommended(trained(FAIR).net, facts_of(FAIR), head="9")


def test_wrapped_and_plain_models_are_the_same():
    net, x = trained(FAIR).net, stream(1)[0]
    plain, wrapped = (recommended(m, facts_of(FAIR)) for m in (net, nn.DataParallel(net)))
    assert torch.equal(plain(x), wrapped(x))


def test_a_wrong_setting_is_refused():
    with pytest.raises(SettingError, match="share of streamed"):
        recommended(trained(FAIR).net, facts_of(FAIR), share=2.0)


def test_a_model_with_an_adapter_is_refused():
    net = trained(FAIR).net
    with pytest.raises((HeadError, MismatchError)):
        recommended(attach(net, logit_adapter(net)), facts_of(FAIR))


def test_it_gains_where_labels_are_reversed():
    of = trained(PLAIN)
    rng = np.random.default_rng(0)
    rare = np.concatenate([np.flatnonzero(of.held_out.labels == c) for c in range(5, 10)])
    shifted = of.held_out.subset(rng.choice(rare, 400))
    live, right, before = recommended(of.net, facts_of(PLAIN)), 0, 0
    for x, y in batches(shifted):
        with torch.no_grad():
            before += int((of.net(x).argmax(1) == y).sum())
        right += int((live(x).argmax(1) == y).sum())
    assert right > before + 20
