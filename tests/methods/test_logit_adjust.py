"""Logit adjustment against a plain loop and against Bayes' rule."""

import math

import pytest
import torch
from torch import nn

from tests.methods import slow
from tests.toys import CLASSES, make_adapter, make_batches, make_net, same
from twoshift.adapters import attach
from twoshift.errors import MismatchError, ModelError, PriorError, SettingError, UnknownName
from twoshift.estimators import EMA
from twoshift.methods import Method
from twoshift.methods.logit_adjust import STRATEGIES, LogitAdjust
from twoshift.models.norm import batch_norms

SIZES = (8, 5, 8, 3, 8, 2, 6, 8, 4, 8)
SOURCE = [0.4, 0.3, 0.15, 0.1, 0.05]
TARGET = [0.05, 0.05, 0.1, 0.2, 0.6]


def adjusted_by_hand(logits, prior, strategy):
    shift = [math.log(max(float(p), 1e-6)) for p in prior]
    if strategy == "cross_entropy":
        shift = [s - math.log(p) for s, p in zip(shift, SOURCE, strict=True)]
    return torch.stack([row + torch.tensor(shift, dtype=row.dtype) for row in logits])


def run_by_hand(net, running, batches, strategy, lr, momentum, alpha, raw):
    """Logits, and the estimate after each batch: a moving average from uniform."""
    prior = [1 / CLASSES] * CLASSES
    parameters = list(slow.affine(net).values())
    optimizer, outputs, priors = slow.Adam(parameters, lr), [], []
    for _, layer in batch_norms(net):
        layer.momentum, layer.track_running_stats = momentum, running
    for x in batches:
        slow.batch_norms_in_training(net, not running)
        plain = net(x).detach()
        slow.batch_norms_in_training(net, True)
        loss = slow.mean_entropy(adjusted_by_hand(net(x), prior, strategy))
        optimizer.step(torch.autograd.grad(loss, parameters))
        outputs.append(adjusted_by_hand(plain, prior, strategy))
        probs = (plain if raw else outputs[-1]).softmax(1)
        prior = [(1 - alpha) * p + alpha * float(probs[:, c].mean()) for c, p in enumerate(prior)]
        priors.append(prior)
    return outputs, priors


@pytest.mark.parametrize(
    ("name", "strategy", "raw"),
    [
        ("resnet_bn", "cross_entropy", False),
        ("resnet_bn", "balanced_sampling", True),
        ("resnet_iabn", "balanced_softmax", False),
    ],
)
def test_against_a_plain_loop(name, strategy, raw, monkeypatch):
    monkeypatch.setattr(EMA, "reads_unadjusted", raw)
    batches, by_hand = [x.double() for x in make_batches(name, SIZES)], make_net(name).double()
    live = LogitAdjust(
        make_net(name).double(),
        SOURCE,
        strategy,
        estimator_settings={"alpha": 0.3},
        lr=2e-3,
        momentum=0.1,
    )
    logits, priors = [], []
    for x in batches:
        logits.append(live(x))
        priors.append(live.prior.tolist())
    expected, estimates = run_by_hand(
        by_hand, name == "resnet_iabn", batches, strategy, 2e-3, 0.1, 0.3, raw
    )
    # the estimate is kept in single precision
    torch.testing.assert_close(torch.cat(logits), torch.cat(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(priors), torch.tensor(estimates), rtol=1e-5, atol=1e-6)
    moved = slow.affine(live.model)
    for path, wanted in slow.affine(by_hand).items():
        torch.testing.assert_close(moved[path], wanted, rtol=1e-5, atol=1e-5)
    for path, layer in batch_norms(live.model):
        torch.testing.assert_close(layer.running_mean, by_hand.get_buffer(f"{path}.running_mean"))


def gaussian_classifier(means, prior):
    """Exact log-densities of unit Gaussians, up to what all classes share, plus a log prior."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(*reversed(means.shape)))
    with torch.no_grad():
        net[1].weight.copy_(means)
        net[1].bias.copy_(-0.5 * means.square().sum(1) + prior.log())
    return net.double()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_the_bayes_rule_for_the_target(strategy):
    g = torch.Generator().manual_seed(0)
    means, x = torch.randn(CLASSES, 12, generator=g).double(), torch.randn(50, 12, generator=g)
    kept = SOURCE if strategy == "cross_entropy" else [1 / CLASSES] * CLASSES
    model = gaussian_classifier(means, torch.tensor(kept, dtype=torch.float64))
    live = LogitAdjust(model, SOURCE, strategy, prior=TARGET, step=False)
    got = live(x.double().reshape(50, 3, 2, 2)).softmax(1)
    for row, point in zip(got, x.double(), strict=True):
        joint = [
            p * math.exp(-0.5 * float((point - m).square().sum()))
            for p, m in zip(TARGET, means, strict=True)
        ]
        wanted = [j / sum(joint) for j in joint]
        assert row.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-9)


def test_without_the_step_only_the_estimate_moves():
    net = make_net("resnet_bn")
    live, batches = LogitAdjust(net, SOURCE, step=False), make_batches("resnet_bn")
    before = live.state()
    with torch.no_grad():
        expected = net(batches[0]) - math.log(CLASSES)
    torch.testing.assert_close(live(batches[0]), expected)
    for x in batches[1:]:
        live(x)
    changed = {n for n, t in live.state().items() if not torch.equal(t, before[n])}
    assert changed == {"estimator.seen", "estimator.weight"}
    assert not any(p.requires_grad for p in live.parameters())


def test_a_given_prior_stays():
    live = LogitAdjust(make_net("resnet_bn"), SOURCE, prior=TARGET)
    for x in make_batches("resnet_bn"):
        live(x)
    assert live.prior.tolist() == pytest.approx(TARGET)
    assert live.settings()["prior"] == TARGET
    assert live.settings()["source_prior"] == SOURCE


def test_an_estimate_of_zero_is_not_infinite():
    live = LogitAdjust(make_net("resnet_bn"), SOURCE, prior=[1, 0, 0, 0, 0], lr=0.1)
    for x in make_batches("resnet_bn", (8, 1, 8)):
        assert live(x).isfinite().all()
    logits = torch.zeros(1, CLASSES)
    assert live.adjust(logits)[0].tolist() == pytest.approx([0] + [math.log(1e-6)] * 4)


def test_reset_saving_and_loading_take_the_estimate_along(tmp_path):
    settings = {"estimator_settings": {"alpha": 0.5, "classes": CLASSES}, "freeze": ["layer4"]}
    live, batches = LogitAdjust(make_net("resnet_bn"), SOURCE, **settings), make_batches("bn")
    for x in batches:
        live(x)
    live.save(tmp_path / "s")
    restored = Method.load(tmp_path / "s", make_net("resnet_bn"))
    assert torch.equal(restored.prior, live.prior)
    assert same(restored.state(), live.state())
    restored.reset()
    assert restored.prior.tolist() == pytest.approx([1 / CLASSES] * CLASSES)
    assert not restored.optimizer.state


def test_a_state_that_does_not_fit_is_refused_whole():
    live, other = (LogitAdjust(make_net(n), SOURCE) for n in ("resnet_bn", "mlp"))
    live(make_batches("resnet_bn")[0])
    before = live.state()
    with pytest.raises(MismatchError):
        live.load_state(other.state())
    assert same(live.state(), before)
    with pytest.raises(MismatchError, match="state of EMA"):
        live.load_state({n: t for n, t in before.items() if not n.startswith("estimator.")})


def test_an_adapter_is_refused():
    net = make_net("resnet_bn")
    with pytest.raises(ModelError, match=r"bare classifier.*detach\(model\) first"):
        LogitAdjust(attach(net, make_adapter(net)), SOURCE)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"strategy": "focal"}, SettingError, "strategy, must be one of .* got 'focal'"),
        ({"source_prior": [0.5, 0.5]}, PriorError, "source_prior, must be of length 5"),
        ({"source_prior": [1, 1, 1, 1, 1]}, PriorError, "sum 1"),
        (
            {"source_prior": [0.5, 0.5, 0, 0, 0], "strategy": "cross_entropy"},
            PriorError,
            "above 0 for every class, got 0 for class 2",
        ),
        ({"prior": [1.0]}, PriorError, "of length 5"),
        ({"estimator": "emma"}, UnknownName, "Did you mean 'ema'"),
        ({"estimator_settings": {"beta": 1}}, SettingError, "no setting 'beta'"),
        ({"momentum": 2}, SettingError, "momentum of the statistics"),
        ({"lr": 0}, SettingError, "lr, must be positive"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        LogitAdjust(make_net("resnet_bn"), **{"source_prior": SOURCE, **settings})
