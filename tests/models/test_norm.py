"""Normalisation layers against slow loops and against torch's own."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from twoshift.errors import ModelError
from twoshift.models.norm import (
    BatchStatNorm,
    InstanceAwareBatchNorm,
    MatchedNorm,
    MixedNorm,
    batch_norms,
    replace_module,
    use_batch_statistics,
    use_iabn,
)
from twoshift.models.statistics import batch_statistics, fused_statistics

SHAPES = [(6, 3, 4, 5), (6, 3, 7), (6, 3), (6, 3, 1, 1), (6, 3, 1), (1, 3, 4, 5), (2, 3, 2, 3, 2)]
double = torch.float64


def slow_iabn(x, weight, bias, centre, spread, k, eps):
    """The definition, one sample and channel at a time; centre and spread are per channel."""
    out = torch.empty_like(x)
    for b, c in itertools.product(range(x.shape[0]), range(x.shape[1])):
        values, mean, var = x[b, c].reshape(-1), centre[c], spread[c]
        n = values.numel()
        if n > 1:
            own_mean = sum(values) / n
            own_var = sum((v - own_mean) ** 2 for v in values) / (n - 1)
            mean = mean + shrink(own_mean - centre[c], k * math.sqrt((spread[c] + eps) / n))
            width = k * (spread[c] + eps) * math.sqrt(2 / (n - 1))
            var = max(spread[c] + shrink(own_var - spread[c], width), torch.zeros((), dtype=double))
        out[b, c] = (x[b, c] - mean) / math.sqrt(var + eps) * weight[c] + bias[c]
    return out


def shrink(deviation, width):
    if abs(deviation) <= width:
        return torch.zeros((), dtype=double)
    return deviation - width if deviation > 0 else deviation + width


def batch_moments(x):
    """Mean and unbiased variance per channel, by the textbook."""
    values = [x[:, c].reshape(-1) for c in range(x.shape[1])]
    means = torch.stack([sum(v) / v.numel() for v in values])
    pairs = zip(values, means, strict=True)
    return means, torch.stack([((v - m) ** 2).sum() / (v.numel() - 1) for v, m in pairs])


def make_layer(k=1.0, channels=3, dtype=double, **settings):
    g = torch.Generator().manual_seed(5)
    layer = InstanceAwareBatchNorm(channels, k=k, **settings).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(channels, generator=g) + 0.5)
        layer.bias.copy_(torch.randn(channels, generator=g))
        layer.running_mean.copy_(torch.randn(channels, generator=g))
        layer.running_var.copy_(torch.rand(channels, generator=g) + 0.5)
    return layer


def make_input(shape, seed=0, dtype=double):
    """Samples and channels that differ in mean and spread, so that some stand out."""
    g = torch.Generator().manual_seed(seed)
    per_sample = [*shape[:2], *[1] * (len(shape) - 2)]
    x = torch.randn(shape, generator=g, dtype=dtype)
    spread = torch.rand(per_sample, generator=g, dtype=dtype) * 3
    return x * spread + torch.randn(per_sample, generator=g, dtype=dtype)


@pytest.mark.parametrize("k", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_iabn_by_running_statistics_is_its_definition(shape, k):
    layer, x = make_layer(k).eval(), make_input(shape)
    before = {n: b.clone() for n, b in layer.named_buffers()}
    expected = slow_iabn(
        x, layer.weight, layer.bias, layer.running_mean, layer.running_var, k, layer.eps
    )
    torch.testing.assert_close(layer(x), expected.detach(), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(b, before[n]) for n, b in layer.named_buffers())


@pytest.mark.parametrize("k", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_iabn_in_training_is_its_definition_and_moves_the_running_statistics(shape, k):
    layer = make_layer(k, momentum=0.3).train()
    mean, var = layer.running_mean.clone(), layer.running_var.clone()
    for step in range(3):
        x = make_input(shape, seed=step)
        m, v = batch_moments(x)
        expected = slow_iabn(x, layer.weight, layer.bias, m, v, k, layer.eps).detach()
        torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-9, atol=1e-9)
        mean, var = 0.7 * mean + 0.3 * m, 0.7 * var + 0.3 * v
        torch.testing.assert_close(layer.running_mean, mean)
        torch.testing.assert_close(layer.running_var, var)
        assert layer.num_batches_tracked == step + 1


def test_the_inputs_have_samples_that_stand_out_and_samples_that_do_not():
    """Else the tests above would not see the soft shrinkage."""
    x, layer = make_input((6, 3, 4, 5)), make_layer(4.0)
    near = nn.functional.batch_norm(
        x, layer.running_mean, layer.running_var, layer.weight, layer.bias
    )
    alike = torch.isclose(layer.eval()(x), near).flatten(2).all(2)
    assert alike.any()
    assert not alike.all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(2, 2, 2, 2), (3, 2, 3), (4, 2), (4, 2, 1, 1), (1, 2, 2, 3)])
def test_iabn_gradients(shape, training):
    """Of the input, the weight and the bias, by finite differences."""

    def run(x, weight, bias):
        layer = make_layer(0.7, channels=2).train(training)
        layer.track_running_stats = False
        del layer.weight, layer.bias
        layer.weight, layer.bias = weight, bias
        return layer(x)

    inputs = (make_input(shape, seed=3), torch.tensor([0.7, 1.3]), torch.tensor([0.1, -0.4]))
    assert torch.autograd.gradcheck(run, [t.to(double).requires_grad_() for t in inputs])


@pytest.mark.parametrize("training", [True, False])
def test_iabn_parameter_gradients_without_an_input_gradient(training):
    layer, x = make_layer(0.7).train(training), make_input((5, 3, 4, 4))
    centre, spread = batch_moments(x) if training else (layer.running_mean, layer.running_var)
    centre, spread = centre.clone(), spread.clone()
    out = layer(x)
    target = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=double)
    (out * target).sum().backward()
    ones, zeros = torch.ones(3, dtype=double), torch.zeros(3, dtype=double)
    normalised = slow_iabn(x, ones, zeros, centre, spread, 0.7, layer.eps)
    torch.testing.assert_close(layer.weight.grad, (normalised * target).sum((0, 2, 3)))
    torch.testing.assert_close(layer.bias.grad, target.sum((0, 2, 3)))


@pytest.mark.parametrize("training", [True, False])
def test_memory_format_does_not_matter(training):
    x = make_input((4, 3, 6, 5), dtype=torch.float32)
    results = []
    for form in (torch.contiguous_format, torch.channels_last):
        layer = make_layer(1.0, dtype=torch.float32).train(training)
        leaf = x.clone().contiguous(memory_format=form).requires_grad_()
        out = layer(leaf)
        out.square().sum().backward()
        results.append([out.detach(), leaf.grad, layer.weight.grad, layer.running_var])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_float32_stays_close_to_the_definition_far_from_zero():
    layer = make_layer(4.0, dtype=torch.float32).train()
    x = make_input((8, 3, 8, 8), dtype=torch.float32) + 100  # E[x^2] - E[x]^2 would be off
    exact = x.double()
    expected = slow_iabn(exact, layer.weight, layer.bias, *batch_moments(exact), 4.0, layer.eps)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-3, atol=1e-3)


def test_infinite_k_is_batch_normalisation_up_to_the_unbiased_variance():
    x = make_input((4, 3, 5, 5)).requires_grad_()
    layer = make_layer(math.inf)
    plain = nn.BatchNorm2d(3).to(double)
    plain.load_state_dict(layer.state_dict())
    assert torch.allclose(layer.eval()(x), plain.eval()(x))
    n = 4 * 5 * 5
    biased = x.transpose(0, 1).reshape(3, -1).var(1, correction=0).view(1, 3, 1, 1)
    ratio = ((biased + plain.eps) / (biased * n / (n - 1) + plain.eps)).sqrt()
    bias = layer.bias.view(1, 3, 1, 1)
    expected = (plain.train()(x) - bias) * ratio + bias
    out = layer.train()(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(layer.running_mean, plain.running_mean)
    torch.testing.assert_close(layer.running_var, plain.running_var)
    weights = torch.arange(x.numel(), dtype=double).view(x.shape).sin()
    (grad,) = torch.autograd.grad((out * weights).sum(), x)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), x)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)])
def test_a_single_value_per_channel_is_left_to_the_running_statistics(shape):
    layer, x = make_layer(4.0).train(), make_input(shape)
    before = [b.clone() for b in layer.buffers()]
    out = layer(x)
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), before, strict=True))
    torch.testing.assert_close(out, layer.eval()(x))


def test_cumulative_average_without_momentum():
    layer, plain = make_layer(1.0, momentum=None), nn.BatchNorm2d(3, momentum=None).to(double)
    plain.load_state_dict(layer.state_dict())
    for seed in range(3):
        x = make_input((4, 3, 3, 3), seed)
        layer(x), plain(x)
    torch.testing.assert_close(layer.running_mean, plain.running_mean)
    torch.testing.assert_close(layer.running_var, plain.running_var)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 4),
    positions=st.integers(2, 6),
    k=st.floats(0, 6),
    scale=st.floats(0.01, 100),
    seed=st.integers(0, 10_000),
)
def test_iabn_property(batch, positions, k, scale, seed):
    layer = make_layer(k).train()
    layer.track_running_stats = False
    x = make_input((batch, 3, positions), seed) * scale
    expected = slow_iabn(x, layer.weight, layer.bias, *batch_moments(x), k, layer.eps)
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


def test_one_dimension_is_refused():
    for kind in (InstanceAwareBatchNorm, BatchStatNorm):
        with pytest.raises(ValueError, match="at least 2 dimensions"):
            kind(3)(torch.zeros(3))


@pytest.mark.parametrize(
    ("plain", "shape"), [(nn.BatchNorm2d, (5, 3, 4, 4)), (nn.BatchNorm1d, (5, 3))]
)
def test_batch_statistics_equal_torchs_training_mode_and_keep_the_running_ones(plain, shape):
    reference = plain(3).to(double)
    reference.load_state_dict(make_layer().state_dict())
    layer = BatchStatNorm(3).to(double)
    layer.load_state_dict(reference.state_dict())
    before = [b.clone() for b in layer.buffers()]
    for training in (True, False):
        for seed in range(2):
            a, b = (make_input(shape, seed).requires_grad_() for _ in range(2))
            out, expected = layer.train(training)(a), reference.train()(b)
            torch.testing.assert_close(out, expected)
            for result in (out, expected):
                result.pow(3).sum().backward()
            torch.testing.assert_close(a.grad, b.grad)
            torch.testing.assert_close(layer.weight.grad, reference.weight.grad)
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), before, strict=True))


def test_one_vector_falls_to_the_running_statistics():
    layer = BatchStatNorm(3).to(double)
    layer.load_state_dict(make_layer().state_dict())
    x = make_input((1, 3))
    expected = (x - layer.running_mean) / (layer.running_var + layer.eps).sqrt()
    torch.testing.assert_close(layer(x), expected * layer.weight + layer.bias)


def small_net():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), InstanceAwareBatchNorm(4), nn.GroupNorm(2, 4)
    )
    net.add_module("inner", nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16, affine=False)))
    return net.eval()


def test_use_batch_statistics_keeps_names_tensors_and_other_layers():
    net = small_net()
    before = dict(net.state_dict(keep_vars=True))
    group = net[3]
    use_batch_statistics(net)
    after = dict(net.state_dict(keep_vars=True))
    assert list(after) == list(before)
    assert all(after[n] is before[n] for n in before)
    assert [type(m) for _, m in batch_norms(net)] == [
        BatchStatNorm,
        InstanceAwareBatchNorm,
        BatchStatNorm,
    ]
    assert net[3] is group
    use_batch_statistics(net)  # again: no change
    assert list(net.state_dict()) == list(before)


def test_use_batch_statistics_reads_the_batch_and_moves_nothing():
    net, x = small_net(), torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    reference = small_net().train()
    reference.load_state_dict(net.state_dict())
    use_batch_statistics(net)
    before = {n: b.clone() for n, b in net.named_buffers()}
    torch.testing.assert_close(net(x), reference(x))
    assert all(torch.equal(b, before[n]) for n, b in net.named_buffers())


def test_batch_statistics_without_running_ones():
    net = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False))
    x = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    expected = net(x)
    use_batch_statistics(net)
    torch.testing.assert_close(net(x), expected)


def test_replace_module_at_any_depth():
    net = small_net()
    new = nn.Identity()
    replace_module(net, "inner.1", new)
    assert net.inner[1] is new
    replace_module(net, "0", new)
    assert net[0] is new


class NormAndAct(nn.BatchNorm2d):
    """As other libraries have them: the activation is inside."""

    def forward(self, input):
        return super().forward(input).relu()


def test_batch_statistics_of_a_layer_that_does_more_than_normalise():
    g = torch.Generator().manual_seed(0)
    net = nn.Sequential(NormAndAct(3), nn.Conv2d(3, 3, 1)).eval()
    x = torch.randn(6, 3, 4, 4, generator=g) * 3 + 1
    use_batch_statistics(net)
    expected = nn.functional.batch_norm(x, None, None, training=True).relu()
    torch.testing.assert_close(net[0](x), expected)
    assert net[0].running_mean.eq(0).all()
    assert net[0].running_var.eq(1).all()
    assert net[0].num_batches_tracked == 0


def test_a_layer_that_does_more_than_normalise_is_not_replaced():
    with pytest.raises(ModelError, match="NormAndAct cannot be replaced"):
        use_iabn(nn.Sequential(NormAndAct(3)))


def test_use_iabn_keeps_tensors_settings_and_modes():
    net = nn.Sequential(nn.BatchNorm2d(3, eps=1e-3, momentum=0.2), nn.ReLU(), nn.BatchNorm1d(4))
    net[0].eval()
    before = dict(net.state_dict(keep_vars=True))
    use_iabn(net, k=2.0)
    assert all(net.state_dict(keep_vars=True)[n] is t for n, t in before.items())
    first, last = net[0], net[2]
    assert type(first) is type(last) is InstanceAwareBatchNorm
    assert (first.k, first.eps, first.momentum) == (2.0, 1e-3, 0.2)
    assert (first.training, last.training) == (False, True)
    use_iabn(net)  # again: no change
    assert net[0] is first


@pytest.mark.parametrize("kind", [MixedNorm, MatchedNorm])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("whole", [True, False], ids=["whole network", "only activations"])
def test_low_precision_is_near_full_precision(kind, dtype, whole):
    """A value far from the mean, whose square float16 cannot hold; statistics may be of float32."""
    x = 50 * torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0] = 400
    outputs = []
    for of_layer, of_input in ((torch.float32, torch.float32), (dtype if whole else None, dtype)):
        layer = kind(3).eval()
        layer.share, layer.expected = 0.5, torch.tensor([[1.0, 2.0, 0.0], [900.0, 1600.0, 2500.0]])
        layer.running_var.fill_(1600.0)
        if of_layer is not None:
            layer = layer.to(of_layer)
            layer.expected = layer.expected.to(of_layer)
        outputs.append(layer(x.to(of_input)).float())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.02, atol=0.05)


def test_a_layer_of_two_names_is_replaced_under_both():
    net = small_net()
    net.also = net.inner[1]
    new = nn.Identity()
    replace_module(net, "inner.1", new)
    assert net.inner[1] is new
    assert net.also is new


def exact_statistics(x):
    """Mean and biased variance in double precision, channel by channel."""
    channels = [x[:, c].double().flatten() for c in range(x.shape[1])]
    means = [sum(values) / len(values) for values in channels]
    squares = [((v - m) ** 2).sum() / len(v) for v, m in zip(channels, means, strict=True)]
    return torch.stack(means), torch.stack(squares)


LAYOUTS = [torch.contiguous_format, torch.channels_last]


def spread_out(*shape, dtype=torch.float32, layout=torch.contiguous_format):
    """Channels of means and spreads of their own."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=g)
    of_channel = torch.linspace(-3, 3, shape[1]).view(1, -1, *[1] * (len(shape) - 2))
    return (x * (1 + of_channel.abs()) + of_channel).to(dtype).contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 16, 7, 6), (5, 3, 4, 4), (1, 32, 1, 1), (70, 16, 8, 9)])
@pytest.mark.parametrize(
    ("dtype", "close"),
    [(torch.float32, 1e-5), (double, 1e-12), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)],
)
def test_fused_statistics_are_those_of_double_precision(shape, layout, dtype, close):
    x = spread_out(*shape, dtype=dtype, layout=layout)
    mean, var = fused_statistics(x)
    assert mean.dtype == var.dtype == torch.promote_types(dtype, torch.float32)
    exact = exact_statistics(x)
    for got, expected, plain in zip((mean, var), exact, batch_statistics(x), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=close, atol=close)
        assert got.shape == plain.shape
        assert got.dtype == plain.dtype


@pytest.mark.parametrize("shape", [(9, 16), (5000, 16), (3, 16, 5), (2, 16, 3, 4, 5)])
def test_fused_statistics_of_other_dimensions(shape):
    x = spread_out(*shape)
    for got, expected in zip(fused_statistics(x), exact_statistics(x), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_fused_statistics_of_very_many_positions_keep_their_digits():
    """One sum in float32 over so many rows would be wrong by 1e-5 and more."""
    x = (spread_out(40, 4, 80, 80) + 5).contiguous(memory_format=torch.channels_last)
    mean, var = fused_statistics(x)
    exact_mean, exact_var = exact_statistics(x)
    assert ((mean - exact_mean).abs() / exact_var.sqrt()).max() < 3e-6
    assert ((var - exact_var).abs() / exact_var).max() < 3e-6


def test_one_kernel_reads_channels_last_and_nothing_else(monkeypatch):
    calls, whole = [], torch.batch_norm_update_stats
    monkeypatch.setattr(
        torch, "batch_norm_update_stats", lambda x, *rest: calls.append(x.shape) or whole(x, *rest)
    )
    last = spread_out(3, 16, 4, 4, layout=torch.channels_last)
    fused_statistics(last)
    assert calls == [(3, 16, 4, 4)]
    for other in (last.contiguous(), last[:, :8], last[:, :, ::2], last.half()):
        fused_statistics(other)
    assert len(calls) == 1
    with torch.enable_grad():
        mean, var = fused_statistics(last.requires_grad_())
    assert len(calls) == 1
    (grad,) = torch.autograd.grad(mean.sum() + var.sum(), last)
    expected = 1 / 48 + 2 * (last - mean[:, None, None]) / 48
    torch.testing.assert_close(grad, expected)
    with torch.no_grad():
        fused_statistics(last)
    assert len(calls) == 2
