"""LabelAware: condition on the estimate so far, predict and adapt, then estimate."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests.methods import slow
from tests.toys import CLASSES, make_adapter, make_batches, make_moments, make_net, same
from twoshift.accuracy import ExpectedAccuracy
from twoshift.adapters import adapted_heads, attach, condition, logit_adapter
from twoshift.errors import HeadError, MismatchError
from twoshift.estimators import EMA, BatchOracle, Fixed, Paced
from twoshift.methods import IABN, LAME, CoTTA, LabelAware, Source, Streamed, Tent
from twoshift.models.head import find_head
from twoshift.models.norm import batch_norms, replace_module
from twoshift.priors import longtail

SIZES = (8, 5, 8, 3, 8, 8, 6, 8, 2, 8, 7)


def with_adapter(name):
    net = make_net(name)
    return attach(net, make_adapter(net))


@pytest.mark.parametrize("name", ["resnet_bn", "vit", "mlp"])
def test_against_a_plain_loop(name):
    """TENT, the full W + dW, and a moving average in numpy."""
    lr, alpha, net = 2e-3, 0.2, make_net(name)
    path, head = find_head(net)
    slow_head = slow.FullMatrixHead(head, make_adapter(net), CLASSES)
    replace_module(net, path, slow_head)
    slow.batch_norms_in_training(net)
    parameters = list(slow.affine(net).values())
    optimizer, estimate = slow.Adam(parameters, lr), np.full(CLASSES, 1 / CLASSES)
    live = LabelAware(Tent(with_adapter(name), lr=lr), EMA(CLASSES, alpha=alpha))
    for x in make_batches(name, SIZES):
        slow_head.prior = torch.from_numpy(estimate).float()
        expected = slow.step(net, x, parameters, optimizer)
        estimate = alpha * expected.softmax(1).mean(0).numpy() + (1 - alpha) * estimate
        torch.testing.assert_close(live(x), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(live.prior.numpy(), estimate, atol=1e-6)
    moved = slow.affine(live.model)
    for place, wanted in slow.affine(net).items():
        torch.testing.assert_close(moved[place], wanted, rtol=1e-5, atol=1e-5)
    assert np.abs(estimate - 1 / CLASSES).max() > 0.02


SHARES = [0.4, 0.3, 0.15, 0.1, 0.05]


def adjusted_by_hand(logits, prior, assumes):
    shift = [math.log(max(float(p), 1e-6)) for p in prior]
    if assumes is not None:
        shift = [s - math.log(p) for s, p in zip(shift, assumes, strict=True)]
    return torch.stack([row + torch.tensor(shift, dtype=row.dtype) for row in logits])


def run_by_hand(net, statistics, batches, assumes, lr, momentum, alpha, raw):
    """Logits, and the estimate after each batch: a moving average from uniform.

    Without a learning rate nothing but the estimate moves.
    """
    prior = [1 / CLASSES] * CLASSES
    parameters = list(slow.affine(net).values())
    optimizer, outputs, priors = slow.Adam(parameters, lr), [], []
    for _, layer in batch_norms(net):
        layer.momentum, layer.track_running_stats = momentum, statistics == "running"
    for x in batches:
        slow.batch_norms_in_training(net, statistics == "batch")
        plain = net(x).detach()
        if lr:
            slow.batch_norms_in_training(net, True)
            loss = slow.mean_entropy(adjusted_by_hand(net(x), prior, assumes))
            optimizer.step(torch.autograd.grad(loss, parameters))
        outputs.append(adjusted_by_hand(plain, prior, assumes))
        probs = (plain if raw else outputs[-1]).softmax(1)
        prior = [(1 - alpha) * p + alpha * float(probs[:, c].mean()) for c, p in enumerate(prior)]
        priors.append(prior)
    return outputs, priors


@pytest.mark.parametrize(
    ("kind", "name", "assumes", "raw"),
    [
        (Tent, "resnet_bn", SHARES, False),
        (Tent, "resnet_bn", None, True),
        (IABN, "resnet_iabn", None, False),
        (IABN, "resnet_iabn", SHARES, True),
        (Source, "resnet_bn", SHARES, False),
        (Source, "vit", None, True),
    ],
)
def test_with_a_logit_adapter_it_is_logit_adjustment(kind, name, assumes, raw, monkeypatch):
    """A plain loop that adds logarithms to logits, and takes entropy steps on the sum."""
    monkeypatch.setattr(EMA, "reads_unadjusted", raw)
    batches = [x.double() for x in make_batches(name, SIZES)]
    net, by_hand = make_net(name).double(), make_net(name).double()
    settings = {Tent: {"lr": 2e-3}, IABN: {"lr": 2e-3, "momentum": 0.1}, Source: {}}[kind]
    method = kind(attach(net, logit_adapter(net, assumes)), **settings)
    live = LabelAware(method, EMA(CLASSES, alpha=0.3))
    logits, priors = [], []
    for x in batches:
        logits.append(live(x))
        priors.append(live.prior.tolist())
    lr = settings.get("lr", 0.0)
    expected, estimates = run_by_hand(by_hand, kind.statistics, batches, assumes, lr, 0.1, 0.3, raw)
    # the estimate is kept in single precision
    torch.testing.assert_close(torch.cat(logits), torch.cat(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(priors), torch.tensor(estimates), rtol=1e-5, atol=1e-6)
    moved = slow.affine(live.model)
    for path, wanted in slow.affine(by_hand).items():
        torch.testing.assert_close(moved[path], wanted, rtol=1e-5, atol=1e-5)
    for path, layer in batch_norms(live.model):
        torch.testing.assert_close(layer.running_mean, by_hand.get_buffer(f"{path}.running_mean"))
    assert np.abs(np.array(estimates[-1]) - 1 / CLASSES).max() > 0.02


def test_logit_adjustment_without_a_step_moves_the_estimate_only():
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn")
    live = LabelAware(Source(attach(net, logit_adapter(net))), EMA(CLASSES))
    before = live.state()
    with torch.no_grad():
        expected = net(batches[0]) - math.log(CLASSES)
    torch.testing.assert_close(live(batches[0]), expected)
    for x in batches[1:]:
        live(x)
    changed = {n for n, t in live.state().items() if not torch.equal(t, before[n])}
    assert changed == {"model.fc.prior", "estimator.seen", "estimator.weight"}
    assert not any(p.requires_grad for p in live.parameters())


def test_an_estimate_of_zero_is_not_infinite():
    net = make_net("resnet_bn")
    adapted = attach(net, logit_adapter(net))
    live = LabelAware(Tent(adapted, lr=0.1), Fixed(CLASSES, [1, 0, 0, 0, 0]))
    for x in make_batches("resnet_bn", (8, 1, 8)):
        assert live(x).isfinite().all()


@pytest.mark.parametrize(("kind", "name"), [(Source, "vit"), (IABN, "resnet_iabn")])
def test_any_method_is_conditioned_before_and_estimated_after(kind, name):
    live, by_hand = LabelAware(kind(with_adapter(name)), EMA(CLASSES)), kind(with_adapter(name))
    estimator = EMA(CLASSES)
    for x in make_batches(name):
        condition(by_hand, estimator.prior)
        logits = by_hand(x)
        estimator.update(logits.softmax(1))
        assert torch.equal(live(x), logits)
        assert torch.equal(live.prior, estimator.prior)


def test_a_fixed_estimate_holds_from_the_first_batch_on():
    prior, x = longtail(CLASSES, 20), make_batches("mlp")[0]
    live = LabelAware(Source(with_adapter("mlp")), Fixed(CLASSES, prior))
    by_hand = with_adapter("mlp").eval()
    uniform = by_hand(x)
    condition(by_hand, prior)
    assert torch.equal(live(x), by_hand(x))
    assert not torch.allclose(uniform, by_hand(x), atol=1e-3)
    live.reset()
    np.testing.assert_allclose(live.method.model.head.prior.numpy(), prior, rtol=1e-6)


def test_a_fresh_adapter_changes_nothing():
    net = make_net("resnet_bn")
    adapter = make_adapter(net)
    for network in (adapter.feature_net, adapter.head_net):
        for parameter in network[-1].parameters():
            parameter.data.zero_()
    live = LabelAware(Tent(attach(net, adapter)), EMA(CLASSES))
    plain = Tent(net)
    for x in make_batches("resnet_bn"):
        torch.testing.assert_close(live(x), plain(x), rtol=1e-4, atol=1e-4)


def test_no_second_copy_of_the_model():
    inner = Tent(with_adapter("mlp"))
    live = LabelAware(inner, EMA(CLASSES))
    assert live.model is inner.model
    assert sum(1 for _ in adapted_heads(live)) == 1


def test_reset_takes_the_estimate_and_the_moments_along():
    live = LabelAware(Tent(with_adapter("mlp")), EMA(CLASSES))
    first = live.state()
    for x in make_batches("mlp"):
        live(x)
    assert live.method.optimizer.state
    live.reset()
    assert same(live.state(), first)
    assert not live.method.optimizer.state
    assert torch.equal(live.prior, torch.full((CLASSES,), 1 / CLASSES))
    assert torch.equal(live.model.head.prior, live.prior)


def test_no_gradient_flows_through_the_estimate():
    live = LabelAware(Tent(with_adapter("mlp")), EMA(CLASSES))
    live(make_batches("mlp")[0])
    assert not live.prior.requires_grad
    assert not live.model.head.prior.requires_grad


def test_a_model_without_an_adapter():
    with pytest.raises(HeadError, match=r"no adapter.*before building the method"):
        LabelAware(Tent(make_net("mlp")), EMA(CLASSES))


def test_an_estimator_of_another_number_of_classes():
    with pytest.raises(MismatchError, match=f"for {CLASSES} classes, got {CLASSES + 1}"):
        LabelAware(Tent(with_adapter("mlp")), EMA(CLASSES + 1))


def test_a_state_of_another_method_is_refused_and_changes_nothing():
    live = LabelAware(Tent(with_adapter("mlp")), EMA(CLASSES))
    for x in make_batches("mlp"):
        live(x)
    before = live.state()
    other = LabelAware(Tent(with_adapter("resnet_bn")), EMA(CLASSES))
    for state in (other.state(), {}, Tent(with_adapter("mlp")).state()):
        with pytest.raises(MismatchError):
            live.load_state(state)
        assert same(live.state(), before)


def test_a_batch_is_adjusted_by_the_labels_that_it_shows_itself():
    net, temperature = make_net("resnet_bn"), 1.7
    adapter = logit_adapter(net, SHARES, temperature=temperature)
    live = LabelAware(Source(attach(net, adapter)), Paced(CLASSES, relative=False))
    source, by_hand = Source(net), Paced(CLASSES, relative=False)
    for x in make_batches("resnet_bn", SIZES):
        raw = source(x)
        by_hand.update(raw.softmax(1))
        expected = adjusted_by_hand(raw / temperature, by_hand.present, SHARES)
        torch.testing.assert_close(live(x), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(live.prior, by_hand.prior)
    assert float((by_hand.present - 1 / CLASSES).abs().max()) > 0.05


@pytest.mark.parametrize("name", ["resnet_bn", "vit", "mlp"])
def test_so_it_is_by_the_papers_adapter(name):
    """The whole W + dW, told the labels of the batch."""
    net = make_net(name)
    path, head = find_head(net)
    slow_head, source = slow.FullMatrixHead(head, make_adapter(net), CLASSES), Source(net)
    shifted, by_hand = make_net(name), Paced(CLASSES, relative=False)
    replace_module(shifted, path, slow_head)
    live = LabelAware(Source(with_adapter(name)), Paced(CLASSES, relative=False))
    for x in make_batches(name, SIZES):
        by_hand.update(source(x).softmax(1))
        slow_head.prior = by_hand.present
        with torch.no_grad():
            expected = shifted(x)
        torch.testing.assert_close(live(x), expected, rtol=1e-4, atol=1e-4)


def together(net, relative=None):
    """The parts of `recommended`."""
    adapted = attach(net, logit_adapter(net, SHARES, temperature=1.5))
    method = Streamed(adapted, make_moments(net))
    return LabelAware(method, Paced(CLASSES, assumes=SHARES, relative=relative), JUDGE)


def stream_of(name, images):
    return torch.cat(make_batches(name, (images,)))


@pytest.mark.parametrize("relative", [None, True])
def test_batches_of_256_are_predicted_as_batches_of_64(relative):
    net, x, found = make_net("mlp"), stream_of("mlp", 768), []
    for size in (64, 256, 768):
        live = together(net, relative)
        logits = torch.cat([live(part) for part in x.split(size)])
        found.append((logits, live.state(), live.expected_accuracy))
    for logits, state, accuracy in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert same(state, found[0][1])
        assert accuracy == found[0][2]


def test_labels_of_a_large_batch_are_estimated_by_parts():
    """One pass, since other methods read the whole batch; then 64 images after the other."""
    net, x = make_net("mlp"), stream_of("mlp", 200)
    adapted = attach(net, logit_adapter(net))
    live, by_hand = (LabelAware(Source(adapted), Paced(CLASSES, relative=False)) for _ in range(2))
    expected = torch.cat([by_hand(part) for part in x.split(64)])
    passes = []
    live.model.get_submodule("head").register_forward_hook(lambda *_: passes.append(1))
    torch.testing.assert_close(live(x), expected)
    torch.testing.assert_close(live.prior, by_hand.prior)
    assert len(passes) == 1
    assert int(live.estimator.state()["seen"]) == 200


@pytest.mark.parametrize("kind", [Source, Streamed])
def test_what_is_told_of_a_batch_is_for_all_of_it(kind):
    """An oracle of batches counts batches, however large they are."""
    net, told = make_net("mlp"), torch.eye(CLASSES)[[3, 1, 0]] * 0.9 + 0.02
    moments = {"moments": make_moments(net)} if kind is Streamed else {}
    plain = kind(net, **moments)
    method = kind(attach(net, logit_adapter(net)), **moments)
    live = LabelAware(method, BatchOracle(CLASSES, told))
    for x, prior in zip(make_batches("mlp", (150, 64, 200)), told, strict=True):
        torch.testing.assert_close(live(x), plain(x) + prior.log(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(live.prior, prior)


def test_a_stream_tells_its_view():
    live = together(make_net("mlp"))
    assert live.stream("a").view_in_use == live.view_in_use == 0
    source = LabelAware(Source(with_adapter("mlp")), EMA(CLASSES))
    assert source.stream("a").view_in_use == source.view_in_use == 2


def test_steady_labels_leave_the_predictions_of_the_model_as_they_are():
    """With the source's statistics, once the mean prediction is known."""
    net, temperature = make_net("mlp"), 1.5
    adapter = logit_adapter(net, SHARES, temperature=temperature)
    live = LabelAware(Source(attach(net, adapter)), Paced(CLASSES, assumes=SHARES))
    x = stream_of("mlp", 2048)
    for part in x.split(64):  # until the mean prediction is known
        live(part)
    x = x[:512]
    answers = Source(net)(x)
    for part, raw in zip(x.split(64), answers.split(64), strict=True):
        torch.testing.assert_close(live(part), raw / temperature, rtol=1e-4, atol=1e-4)


class Recorded(Paced):
    """Does not adjust the batch at hand."""

    counts_batch = False


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(LAME, {}), (CoTTA, {"views": 2}), (CoTTA, {"confidence_threshold": 0.0})],
)
def test_logits_that_are_not_those_of_the_head_are_not_adjusted_again(kind, settings):
    """Neighbours' agreement, and a teacher, are more than a head: they wait for the next batch."""
    ways = [
        LabelAware(kind(with_adapter("resnet_bn"), **settings), estimator(CLASSES))
        for estimator in (Paced, Recorded)
    ]
    for x in make_batches("resnet_bn"):
        one, other = (live(x) for live in ways)
        assert torch.equal(one, other)


JUDGE = torch.tensor([[0.7, -0.1, 0.1, 0.1, 0.05 * v, -0.1, 0.1, 0.5] for v in range(3)])


def judged(net):
    return LabelAware(Source(attach(net, logit_adapter(net))), Paced(CLASSES), JUDGE)


def test_the_expected_accuracy_is_that_of_the_adjusted_predictions():
    live, by_hand = judged(make_net("resnet_bn")), ExpectedAccuracy(CLASSES, JUDGE)
    assert live.expected_accuracy is None
    for x in make_batches("resnet_bn", SIZES):
        by_hand.update(live(x).softmax(1), live.view_in_use)
        assert live.expected_accuracy == pytest.approx(by_hand.read())
    live.reset()
    assert live.expected_accuracy is None
    assert LabelAware(Source(with_adapter("vit")), EMA(CLASSES)).expected_accuracy is None


def test_the_expected_accuracy_is_saved_and_goes_on(tmp_path):
    net = make_net("resnet_bn")
    live, (*first, last) = judged(net), make_batches("resnet_bn", SIZES)
    for x in first:
        live(x)
    live.save(tmp_path)
    again = LabelAware.load(tmp_path, net)
    assert again.expected_accuracy == live.expected_accuracy
    assert torch.equal(again(last), live(last))
    assert again.expected_accuracy == live.expected_accuracy
    again.reset()
    assert again.expected_accuracy is None
    other = judged(net)
    other.load_state(live.state())
    assert other.expected_accuracy == live.expected_accuracy


def test_every_stream_has_an_expected_accuracy_of_its_own():
    live, alone = judged(make_net("resnet_bn")), judged(make_net("resnet_bn"))
    camera = live.stream("camera")
    for x, y in itertools.pairwise(make_batches("resnet_bn", SIZES)):
        live(x)
        camera(y)
        alone(x)
        assert live.expected_accuracy == alone.expected_accuracy
    assert camera.state()["accuracy.sums"][0] != live.state()["accuracy.sums"][0]
