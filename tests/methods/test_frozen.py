"""The network of a method in its present state, against statistics computed layer by layer."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.toys import CLASSES, make_batches, make_moments, make_net
from twoshift import IdentityAdapter, LabelAware, Paced, attach, frozen, logit_adapter, methods
from twoshift.errors import ModelError
from twoshift.methods import Source, Streamed
from twoshift.models.norm import batch_norms, is_plain

SETTINGS = {"share": 0.5, "far": 0.7, "start": 20.0, "pseudo_count": 4.0, "doubt": 3.0}


def moved(net, seed=1, **settings):
    """Streamed statistics that have seen some batches."""
    live = Streamed(net, make_moments(net), **settings)
    for x in make_batches("resnet_bn", (20, 30, 7), seed):
        live(x.to(live.dtype))
    return live


def test_the_statistics_are_those_of_the_stream_under_its_labels():
    net = make_net("resnet_bn").double()
    live = moved(net, **SETTINGS)
    votes = live.counts + 4.0 * (1 + 3.0 * live.distance) / CLASSES
    prior, start = votes / votes.sum(), 0
    for name, layer in batch_norms(net):
        mean, var = live.followed[:, start : start + layer.num_features]
        means, variances = torch.tensor(make_moments(net)[name], dtype=torch.float64)
        expected = prior @ means
        wide = prior @ variances + prior @ (means - expected) ** 2 + layer.eps
        narrower = ((var + layer.eps) / wide).log()
        distance = ((mean - expected) ** 2 / wide + narrower**2).mean()
        lost = distance**2 / (distance**2 + 0.7**2)
        share = (0.5 + 0.5 * lost) * live.images / (live.images + 20 * (1 - lost))
        ratio = (var + layer.eps) / wide
        folded = frozen(live).get_submodule(name)
        start += layer.num_features
        moved_mean = mean + ratio.sqrt() * (layer.running_mean - expected)
        torch.testing.assert_close(folded.running_mean, layer.running_mean.lerp(moved_mean, share))
        torch.testing.assert_close(folded.running_var, layer.running_var * ratio**share)


def test_it_predicts_by_them_and_each_image_alone():
    live = moved(make_net("resnet_bn"))
    net = frozen(live)
    assert all(is_plain(layer) and not layer.training for _, layer in batch_norms(net))
    (x,) = make_batches("resnet_bn", (9,))
    together = net(x)
    torch.testing.assert_close(torch.cat([net(image[None]) for image in x]), together)
    torch.testing.assert_close(net(x), together, rtol=0, atol=0)  # nothing was adapted


def test_a_frame_that_is_repeated_is_predicted_so_by_the_method_itself():
    net = make_net("resnet_bn").double()
    live = moved(net)
    last = make_batches("resnet_bn", (20, 30, 7))[-1][-1:].double()
    expected = frozen(live)(last)
    torch.testing.assert_close(live(last), expected)  # nothing is new in it


def test_the_method_is_not_touched():
    net = make_net("resnet_bn")
    live, twin = moved(net), moved(net)
    looks = [layer.look for layer in live._layers]
    frozen(live)(make_batches("resnet_bn", (5,))[0])
    assert [layer.look for layer in live._layers] == looks
    x = make_batches("resnet_bn", (3,), seed=5)[0]
    assert torch.equal(live(x), twin(x))
    states = live.state(), twin.state()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


@pytest.mark.parametrize("start", [32.0, 0.0])
def test_before_the_first_image_it_is_the_source_model(start):
    net = make_net("resnet_bn")
    (x,) = make_batches("resnet_bn", (4,))
    live = Streamed(net, make_moments(net), start=start)
    torch.testing.assert_close(frozen(live)(x), net(x))


def label_aware(net, assumes, relative):
    adapter = logit_adapter(net, assumes, temperature=1.7)
    estimator = Paced(CLASSES, temperature=0.5, assumes=assumes, evidence=1e9)
    core = Source if relative else lambda m: Streamed(m, make_moments(net))
    return LabelAware(core(attach(net, adapter)), estimator)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("assumes", [None, (0.4, 0.3, 0.15, 0.1, 0.05)])
def test_the_adapter_has_the_estimate_for_images_to_come(relative, assumes):
    net = make_net("resnet_bn")
    live = label_aware(net, assumes, relative)
    for x in make_batches("resnet_bn", (20, 30, 7)):
        live(x)
    (x,) = make_batches("resnet_bn", (4,), seed=6)
    ahead = live.prior_ahead
    if relative:  # without evidence of a change, predictions stay as the model makes them
        torch.testing.assert_close(ahead, torch.tensor(assumes or [1 / CLASSES] * CLASSES))
    else:
        torch.testing.assert_close(ahead, live.prior)
    bare = copy.deepcopy(frozen(live))
    raw = bare.fc.head(bare_features(bare, x))
    contained = torch.tensor(assumes).log() if assumes else torch.zeros(CLASSES)
    torch.testing.assert_close(frozen(live)(x), raw / 1.7 + ahead.log() - contained)


def bare_features(net, x):
    seen = []
    handle = net.fc.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    net(x)
    handle.remove()
    return seen[0]


def test_every_stream_has_its_own():
    net = make_net("resnet_bn")
    live = label_aware(net, None, relative=False)
    first, second = live.stream("first"), live.stream("second")
    bright, dark = make_batches("resnet_bn", (12,))[0], make_batches("resnet_bn", (12,), 9)[0] / 4
    first(bright)
    second(dark)
    x = make_batches("resnet_bn", (4,), seed=6)[0]
    alone = label_aware(net, None, relative=False)
    alone(bright)
    torch.testing.assert_close(frozen(first)(x), frozen(alone)(x))
    assert not torch.allclose(frozen(second)(x), frozen(alone)(x), atol=1e-3)
    fresh = label_aware(net, None, relative=False)
    torch.testing.assert_close(frozen(live)(x), frozen(fresh)(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_have_the_type_of_the_model(dtype):
    net = make_net("resnet_bn").to(dtype)
    live = Streamed(net, make_moments(net))
    (x,) = make_batches("resnet_bn", (6,))
    live(x.to(dtype))
    assert {t.dtype for t in frozen(live).state_dict().values()} <= {dtype, torch.int64}
    assert frozen(live)(x.to(dtype)).isfinite().all()


@pytest.mark.parametrize("name", ["tent", "bn_stats", "lame"])
def test_methods_that_predict_by_the_batch_are_refused(name):
    net = make_net("resnet_bn")
    with pytest.raises(ModelError, match=f"source or streamed.*got {name}.*recommended"):
        frozen(methods.create(name, net))
    adapted = attach(net, IdentityAdapter(net.fc.in_features, CLASSES))
    with pytest.raises(ModelError, match=f"got {name}"):
        frozen(LabelAware(methods.create(name, adapted), Paced(CLASSES)))
