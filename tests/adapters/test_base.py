"""Adapters in general: the shift of a head, attaching, conditioning, scores, the registry."""

import copy
import inspect
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.adapters import cases
from tests.adapters.slow import PRIOR, C, D
from tests.models.zoo import Convolutional, Cosine
from tests.toys import (
    CLASSES,
    NETS,
    make_adapter,
    make_batches,
    make_net,
    randomise,
    same,
    snapshot,
)
from twoshift import adapters
from twoshift.adapters import (
    ANSWER,
    AdaptedHead,
    Adapter,
    HeadShift,
    LabelShiftAdapter,
    LogitAdapter,
    Scores,
    adapted_heads,
    attach,
    condition,
    detach,
    mapping_vector,
    score,
    shifted_logits,
    unbiased,
)
from twoshift.adapters.label_shift import FORMS
from twoshift.errors import HeadError, MismatchError, PriorError, SettingError, UnknownName
from twoshift.methods import Tent
from twoshift.priors import from_counts, longtail, reverse, uniform


def settings_of(name):
    return list(inspect.signature(adapters.adapters[name]).parameters)


def test_the_shift_of_a_head():
    """Every part at once, by the formula; dW whole and as factors of an outer product."""
    g = torch.Generator().manual_seed(0)
    h, weight, bias, dw = (
        torch.randn(shape, generator=g) for shape in ((3, D), (C, D), (C,), (C, D))
    )
    per_class, per_feature = torch.randn(C, generator=g), torch.randn(D, generator=g)
    gamma, beta, db, logits = (torch.randn(n, generator=g) for n in (D, D, C, C))
    for part, whole in ((dw, dw), ((per_class, per_feature), torch.outer(per_class, per_feature))):
        shift = HeadShift(gamma, beta, part, db, logits, temperature=1.7)
        expected = (gamma * h + beta) @ (weight / 1.7 + whole).T + bias / 1.7 + db + logits
        torch.testing.assert_close(shifted_logits(h, weight, bias, shift), expected)
        expected = (gamma * h + beta) @ (weight / 1.7 + whole).T + db + logits
        torch.testing.assert_close(shifted_logits(h, weight, None, shift), expected)


def test_what_is_added_to_the_logits_does_not_change_the_bits_of_the_linear_layer():
    head, h, log = nn.Linear(D, C), torch.randn(8, D), PRIOR.log()
    shifted = shifted_logits(h, head.weight, head.bias, HeadShift(logits=log))
    assert torch.equal(shifted, head(h) + log)


@pytest.mark.parametrize("dw", FORMS)
def test_shifted_logits_of_any_batch_shape(dw):
    """Tokens, and no batch at all, as nn.Linear takes them."""
    adapter, h = randomise(LabelShiftAdapter(D, C, dw=dw)), torch.randn(2, 3, D)
    weight, bias, shift = torch.randn(C, D), torch.randn(C), adapter(PRIOR)
    whole = shifted_logits(h, weight, bias, shift)
    assert whole.shape == (2, 3, C)
    torch.testing.assert_close(whole[1, 2], shifted_logits(h[1, 2], weight, bias, shift))


def test_an_empty_shift_is_the_head():
    h, weight, bias = torch.randn(2, D), torch.randn(C, D), torch.randn(C)
    nothing = HeadShift()
    assert torch.equal(shifted_logits(h, weight, bias, nothing), h @ weight.T + bias)
    torch.testing.assert_close(shifted_logits(h, weight, None, nothing), h @ weight.T)


@settings(deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=20, unique=True))
def test_mapping_follows_the_counts_in_any_class_order(counts):
    m = mapping_vector(counts)
    ranks = sorted(range(len(counts)), key=lambda k: -counts[k])
    for rank, k in enumerate(ranks):
        assert float(m[k]) == pytest.approx(1 - 2 * rank / (len(counts) - 1), abs=1e-6)
    prior = from_counts(counts)
    s = float(torch.from_numpy(prior).float() @ m)
    mirrored = float(torch.from_numpy(reverse(prior, ranks)).float() @ m)
    assert s == pytest.approx(-mirrored, abs=1e-5)
    assert s > -1e-6


def test_equal_counts_keep_the_class_order():
    assert torch.equal(mapping_vector([5, 5, 5]), torch.tensor([1.0, 0.0, -1.0]))


@pytest.mark.parametrize("name", NETS)
def test_attach_leaves_both_untouched_and_detach_restores(name):
    net, x = make_net(name).train(), make_batches(name)[0]
    adapter = make_adapter(net)
    before = snapshot(net), snapshot(adapter)
    adapted = attach(net, adapter)
    condition(adapted, longtail(CLASSES, 10))
    assert adapted.training
    restored = detach(adapted)
    assert same(snapshot(net), before[0])
    assert same(snapshot(adapter), before[1])
    assert list(restored.state_dict()) == list(net.state_dict())
    assert not torch.allclose(adapted.eval()(x), net.eval()(x), atol=1e-2)
    assert torch.equal(restored.eval()(x), net(x))
    assert next(adapted_heads(adapted), None) is not None  # detach made a copy
    assert next(adapted_heads(restored), None) is None


def test_attach_to_a_named_head():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, D), nn.ReLU(), nn.Linear(D, C))
    net.add_module("fc", nn.Linear(C, C))
    adapted = attach(net, randomise(LabelShiftAdapter(D, C)), head="3")
    assert isinstance(adapted[3], AdaptedHead)
    assert isinstance(adapted.fc, nn.Linear)


def test_refused_attachments():
    net = make_net("mlp")
    adapter = make_adapter(net)
    with pytest.raises(HeadError, match="has an adapter already"):
        attach(attach(net, adapter), adapter)
    with pytest.raises(HeadError, match="its own head"):
        attach(nn.Linear(D, C), LabelShiftAdapter(D, C))
    with pytest.raises(HeadError, match="no adapter to detach"):
        detach(net)
    with pytest.raises(HeadError, match="no adapter to condition"):
        condition(net, uniform(CLASSES))


@pytest.mark.parametrize(("features", "classes"), [(13, CLASSES), (12, CLASSES + 1)])
def test_an_adapter_of_another_model(features, classes):
    message = f"must be for 12 features and {CLASSES} classes, got one for {features}"
    with pytest.raises(MismatchError, match=message):
        attach(make_net("mlp"), LabelShiftAdapter(features, classes))


def test_conditioning_reaches_copies():
    class Pair(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.student, self.teacher = net, copy.deepcopy(net)

    net = make_net("mlp")
    pair = Pair(attach(net, make_adapter(net)))
    wrapped = nn.Sequential(pair)
    condition(wrapped, torch.from_numpy(longtail(CLASSES, 10)))
    heads = [head for _, head in adapted_heads(wrapped)]
    assert len(heads) == 2
    for head in heads:
        np.testing.assert_allclose(head.prior.numpy(), longtail(CLASSES, 10), rtol=1e-6)


def test_the_prior_is_not_part_of_the_model():
    net = make_net("mlp")
    adapted = attach(net, make_adapter(net))
    assert not [n for n in adapted.state_dict() if "prior" in n]
    assert "head.prior" in dict(adapted.named_buffers())
    assert torch.equal(adapted.head.prior, torch.full((CLASSES,), 1 / CLASSES))


@pytest.mark.parametrize("form", [list, tuple, np.asarray, torch.tensor])
def test_any_form_of_prior(form):
    net, given = make_net("mlp"), form([0.5, 0.125, 0.125, 0.125, 0.125])
    adapted = attach(net, make_adapter(net))
    condition(adapted, given)
    assert adapted.head.prior.tolist() == list(given)
    condition(adapted, [0.2] * 5)
    assert given[0] == 0.5  # copied, not shared


@pytest.mark.parametrize("make", [list, torch.tensor], ids=["list", "tensor"])
@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ([1.2, -0.2, 0.0, 0.0, 0.0], "non-negative, got -0.2 for class 1"),
        ([0.3] * 5, r"sum 1\), got sum 1.5"),
        ([0.25] * 4, "of length 5, the number of classes, got length 4"),
        ([float("nan"), 0.25, 0.25, 0.25, 0.25], "finite"),
        ([float("inf"), 0.0, 0.0, 0.0, 0.0], "finite"),
        ([[0.2] * 5], "a vector"),
        ([], "a vector"),
    ],
)
def test_bad_priors(prior, message, make):
    net = make_net("mlp")
    adapted = attach(net, make_adapter(net))
    condition(adapted, [0.6, 0.1, 0.1, 0.1, 0.1])
    before = adapted.head.prior.clone()
    with pytest.raises(PriorError, match=message):
        condition(adapted, make(prior))
    assert torch.equal(adapted.head.prior, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_adapter_takes_the_precision_of_its_model(dtype):
    net = nn.Sequential(nn.Linear(4, D), nn.LayerNorm(D), nn.Linear(D, C)).to(dtype)
    live = Tent(attach(net, LabelShiftAdapter(D, C)))
    logits = live(torch.rand(3, 4, dtype=dtype))
    assert logits.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("net", ["resnet_bn", "vit"])
def test_scores_hold_the_logits_of_the_original_head(name, net):
    """Bit for bit those of the detached model, without a gradient."""
    plain, x = make_net(net), make_batches(net)[0]
    adapted = attach(plain, cases.make(name, plain))
    condition(adapted, longtail(CLASSES, 10))
    scores = score(adapted, x)
    assert torch.equal(scores.logits, adapted(x))
    assert scores.logits.requires_grad
    assert torch.equal(scores.raw, detach(adapted)(x))
    assert not scores.raw.requires_grad
    assert torch.equal(scores.raw, scores.logits) == (name == "identity")
    assert not [m for m in adapted.modules() if m._forward_pre_hooks]


def test_without_an_adapter_raw_logits_are_the_logits():
    net, x = make_net("mlp"), make_batches("mlp")[0]
    scores = score(net, x)
    assert scores.raw is scores.logits
    assert torch.equal(scores.logits, net(x))


def test_scores_are_joined_in_order():
    parts = [Scores(torch.full((n, 2), n), torch.full((n, 2), -n)) for n in (1, 2)]
    logits, raw, features, apart = Scores.cat(parts)
    assert not apart
    assert Scores.cat([parts[0], parts[1]._replace(apart=True)]).apart
    assert logits[:, 0].tolist() == [1, 2, 2]
    assert torch.equal(raw, -logits)
    assert features is None
    known = [part._replace(features=2.0 * part.logits) for part in parts]
    assert torch.equal(Scores.cat(known).features, 2.0 * logits)
    assert Scores.cat([known[0], parts[1]]).features is None  # not all of them are known


@pytest.mark.parametrize("name", cases.NAMES)
def test_unbiased_asks_the_adapter_of_the_model(name):
    net, raw = make_net("mlp"), torch.randn(3, CLASSES)
    assert unbiased(net, raw) is raw
    adapter = cases.make(name, net)
    assert torch.equal(unbiased(attach(net, adapter), raw), adapter.unbiased(raw))


def test_every_adapter_is_registered_by_name():
    assert list(adapters.adapters) == cases.NAMES
    for name in cases.NAMES:
        adapter = adapters.create(name, D, CLASSES, **cases.SETTINGS[name])
        assert adapters.adapters.name_of(type(adapter)) == name
        assert adapter.needs_training == bool(list(adapter.parameters()))
    with pytest.raises(UnknownName, match="Did you mean 'logit'"):
        adapters.create("logits", D, C)
    with pytest.raises(SettingError, match="adapter 'logit' has no setting 'temperature'"):
        adapters.create("logit", D, C, temperature=2.0)
    with pytest.raises(TypeError, match="abstract"):
        Adapter(D, C)


def test_temperature_is_a_setting_of_the_calibrated_adapter_only():
    with_temperature = [n for n in cases.NAMES if "temperature" in settings_of(n)]
    assert with_temperature == ["calibrated"]


@pytest.mark.parametrize("name", cases.NAMES)
def test_settings_build_it_again(name):
    adapter = cases.make(name, make_net("mlp"))
    given = json.loads(json.dumps(adapter.settings()))
    assert list(given) == settings_of(name)
    again = adapters.create(name, **given)
    assert again.settings() == given
    again.load_state_dict(adapter.state_dict())
    assert again.fingerprint() == adapter.fingerprint()


@pytest.mark.parametrize("name", cases.NAMES)
def test_a_convolution_before_a_mean_is_adapted_exactly(name):
    """All of gamma, beta, dW, db, T and the logits' shift are affine in the features."""
    net = Convolutional(pool_first=False).eval()
    head = nn.Linear(6, CLASSES)
    with torch.no_grad():
        head.weight.copy_(net.classifier.weight.flatten(1))
        head.bias.copy_(net.classifier.bias)
    pooled_first = nn.Sequential(net.body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()
    adapter = cases.make(name, pooled_first)
    adapted, expected = attach(net, adapter, "classifier"), attach(pooled_first, adapter, "3")
    x, prior = torch.rand(5, 3, 8, 8), longtail(CLASSES, 10)
    for model in (adapted, expected):
        condition(model, prior)
    for ours, theirs in zip(score(adapted, x), score(expected, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(detach(adapted)(x), net(x))


def test_a_convolution_whose_output_is_not_the_answer():
    """Its rectified output is."""
    net = Convolutional(pool_first=False, rectified=True).eval()
    adapted = attach(net, randomise(LabelShiftAdapter(6, CLASSES)))
    assert next(adapted_heads(adapted))[0] == "classifier"
    with pytest.raises(HeadError, match="output of the adapted head, must be the model's answer"):
        score(adapted, torch.rand(5, 3, 8, 8))


def test_a_head_over_tokens_is_not_the_answer():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, CLASSES)

        def forward(self, x):
            return self.fc(x).mean(1)

    with pytest.raises(HeadError, match="must be the model's answer"):
        score(attach(Tokens(), LabelShiftAdapter(6, CLASSES)), torch.rand(5, 3, 6))


def test_behind_the_model_only_logits_can_be_shifted():
    net = Convolutional(pool_first=True)
    with pytest.raises(HeadError, match="head of LabelShiftAdapter, must be a layer"):
        attach(net, LabelShiftAdapter(6, CLASSES), ANSWER)
    with pytest.raises(MismatchError, match="the adapter, must be for 5 classes, as the model"):
        attach(net, LogitAdapter(3, 3), ANSWER)(torch.rand(2, 3, 8, 8))
    adapted = attach(net, LogitAdapter(CLASSES, CLASSES), ANSWER)
    with pytest.raises(HeadError, match="has an adapter already"):
        attach(adapted, LogitAdapter(CLASSES, CLASSES), ANSWER)
    with pytest.raises(HeadError, match="has an adapter already"):
        attach(adapted, LogitAdapter(CLASSES, CLASSES))


@pytest.mark.parametrize("adapter", [LogitAdapter(6, CLASSES), LogitAdapter(CLASSES, CLASSES)])
def test_where_a_logit_adapter_goes_by_itself(adapter):
    """To a linear head, as ever; behind a model that has none."""
    for net in (Convolutional(pool_first=True), Cosine(), nn.Linear(6, CLASSES)):
        assert next(adapted_heads(attach(net, adapter)))[0] == ANSWER
    if adapter.features == 6:
        assert next(adapted_heads(attach(nn.Sequential(nn.Linear(6, CLASSES)), adapter)))[0] == "0"


def test_a_model_that_is_its_own_head_is_adapted_behind():
    net, x = nn.Linear(6, CLASSES), torch.rand(3, 6)
    adapted = attach(net, LogitAdapter(6, CLASSES))
    condition(adapted, longtail(CLASSES, 10))
    logs = torch.as_tensor(longtail(CLASSES, 10)).float().log()
    torch.testing.assert_close(adapted(x), net(x) + logs)
    assert torch.equal(score(adapted, x).raw, net(x))
