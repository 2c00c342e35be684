"""The adapter: identity when fresh, its formula by loops, attaching, conditioning, saving."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

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
from twoshift.adapters import (
    FORMS,
    AdaptedHead,
    HeadShift,
    LabelShiftAdapter,
    adapted_heads,
    attach,
    condition,
    detach,
    load_adapter,
    mapping_vector,
    save_adapter,
    shifted_logits,
)
from twoshift.errors import CheckpointError, HeadError, MismatchError, PriorError, SettingError
from twoshift.methods import Tent
from twoshift.models.head import find_head
from twoshift.priors import from_counts, longtail, reverse, uniform

D, C = 6, 4
PARTS = [
    (dw, gamma, beta, db)
    for dw, gamma, beta, db in itertools.product(FORMS, *[(True, False)] * 3)
    if gamma or beta or db or dw != "none"
]
PRIOR = torch.tensor([0.1, 0.2, 0.3, 0.4])


def slow_network(net, read):
    """FC-ReLU-FC, one output at a time."""
    first, _, last = copy.deepcopy(net).requires_grad_(False)
    hidden = [
        max(0.0, sum(float(w) * float(r) for w, r in zip(row, read, strict=True)) + float(b))
        for row, b in zip(first.weight, first.bias, strict=True)
    ]
    return [
        sum(float(w) * h for w, h in zip(row, hidden, strict=True)) + float(b)
        for row, b in zip(last.weight, last.bias, strict=True)
    ]


def slow_logits(adapter, prior, h, weight, bias):
    """(gamma * h + beta)(W / T + dW) + b / T + db, with the whole matrix built by hand."""
    d, c, order = adapter.features, adapter.classes, list(range(adapter.classes))
    if adapter.class_counts is not None:
        order = sorted(order, key=lambda i: -adapter.class_counts[i])
    m = {k: 1 - 2 * rank / (c - 1) for rank, k in enumerate(order)}
    degree = sum(m[k] * float(prior[k]) for k in range(c))
    read = [degree] if adapter.condition == "scalar" else [float(p) for p in prior]
    gamma, beta, delta, db = [1.0] * d, [0.0] * d, np.zeros((c, d)), [0.0] * c
    if adapter.gamma or adapter.beta:
        out = slow_network(adapter.feature_net, read)
        if adapter.gamma:
            gamma, out = [1 + o for o in out[:d]], out[d:]
        if adapter.beta:
            beta = out
    if adapter.db or adapter.dw != "none":
        out = slow_network(adapter.head_net, read)
        if adapter.db:
            out, db = out[:-c], out[-c:]
        for k, j in itertools.product(range(c), range(d)):
            if adapter.dw == "class":
                delta[k, j] = out[k] / d
            elif adapter.dw == "rank1":
                delta[k, j] = out[k] * out[c + j]
            elif adapter.dw == "full":
                delta[k, j] = out[k * d + j]
    logits = np.zeros((len(h), c))
    for i, k in itertools.product(range(len(h)), range(c)):
        logits[i, k] = db[k] + (0.0 if bias is None else float(bias[k]) / adapter.temperature)
        for j in range(d):
            feature = gamma[j] * float(h[i, j]) + beta[j]
            logits[i, k] += feature * (float(weight[k, j]) / adapter.temperature + delta[k, j])
    return torch.from_numpy(logits).float()


@pytest.mark.parametrize(("dw", "gamma", "beta", "db"), PARTS)
@pytest.mark.parametrize("condition_on", ["scalar", "full"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_the_formula(dw, gamma, beta, db, condition_on, bias, temperature):
    parts = {"dw": dw, "gamma": gamma, "beta": beta, "db": db, "temperature": temperature}
    counts = [3, 40, 10, 7]
    adapter = LabelShiftAdapter(
        D, C, hidden=5, condition=condition_on, class_counts=counts, **parts
    )
    randomise(adapter)
    g = torch.Generator().manual_seed(0)
    head = nn.Linear(D, C, bias=bias)
    h = torch.randn(3, D, generator=g)
    adapted = AdaptedHead(head, adapter)
    condition(adapted, PRIOR)
    head.requires_grad_(False)
    expected = slow_logits(adapter, PRIOR, h, head.weight, head.bias)
    torch.testing.assert_close(adapted(h).detach(), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, head(h), atol=1e-2)


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
    nothing = HeadShift(None, None, None, None)
    assert torch.equal(shifted_logits(h, weight, bias, nothing), h @ weight.T + bias)
    torch.testing.assert_close(shifted_logits(h, weight, None, nothing), h @ weight.T)


@pytest.mark.parametrize(("dw", "gamma", "beta", "db"), PARTS)
@pytest.mark.parametrize("condition_on", ["scalar", "full"])
def test_a_fresh_adapter_is_the_identity(dw, gamma, beta, db, condition_on):
    settings = {"dw": dw, "gamma": gamma, "beta": beta, "db": db, "condition": condition_on}
    head = nn.Linear(D, C)
    adapted = AdaptedHead(head, LabelShiftAdapter(D, C, **settings))
    h = torch.randn(8, D)
    for prior in (longtail(C, 100), uniform(C), reverse(longtail(C, 100))):
        condition(adapted, prior)
        torch.testing.assert_close(adapted(h), head(h), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NETS)
def test_a_fresh_adapter_leaves_every_network_as_it_is(name):
    net, x = make_net(name), make_batches(name)[0]
    fresh = LabelShiftAdapter(find_head(net)[1].in_features, CLASSES)
    torch.testing.assert_close(attach(net, fresh)(x), net(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dw", FORMS)
def test_a_fresh_adapter_can_learn(dw):
    """Zero is no saddle: every part of the last layers moves under some gradient."""
    adapter, h = LabelShiftAdapter(D, C, dw=dw), torch.randn(8, D)
    labels = torch.randint(C, (8,))
    optimizer = torch.optim.SGD(adapter.parameters(), lr=1.0)
    shapes = (torch.randn(C, D), torch.randn(C))
    for _ in range(3):
        loss = nn.functional.cross_entropy(shifted_logits(h, *shapes, adapter(PRIOR)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    shift = adapter(PRIOR)
    assert (shift.scale - 1).abs().max() > 1e-3
    assert shift.bias.abs().max() > 1e-3
    parts = shift.weight if isinstance(shift.weight, tuple) else (shift.weight,)
    assert dw == "none" or all(p.abs().max() > 1e-3 for p in parts)


def count(adapter):
    return sum(p.numel() for p in adapter.parameters())


def test_size():
    assert count(LabelShiftAdapter(512, 100)) == pytest.approx(0.124e6, rel=0.01)
    assert count(LabelShiftAdapter(2048, 1000)) < 1e6
    assert count(LabelShiftAdapter(512, 100, dw="full")) > 5e6


@pytest.mark.parametrize(
    ("classes", "ratio", "images", "degree"),
    [(10, 100, 5000, 0.681), (100, 100, 500, 0.595), (10, 50, 1000, 0.622), (100, 50, 100, 0.549)],
)
def test_degree_of_imbalance(classes, ratio, images, degree):
    """The values of the CIFAR sets; the last ones are of whole test images, cut off."""
    counts = [
        int(images * p / longtail(classes, ratio)[0] + 1e-9) for p in longtail(classes, ratio)
    ]
    prior = longtail(classes, ratio) if ratio == 100 else from_counts(counts)
    adapter = LabelShiftAdapter(D, classes)
    for sign, p in ((1, prior), (0, uniform(classes)), (-1, reverse(prior))):
        s = float(adapter.degree(torch.from_numpy(p).float()))
        assert s == pytest.approx(sign * degree, abs=6e-4)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dw": "rank2"}, "dw of the adapter, must be one of"),
        ({"condition": "none"}, "condition, must be one of"),
        ({"dw": "none", "gamma": False, "beta": False, "db": False}, "at least one of gamma"),
        ({"lambdas": (1, 0)}, "lambdas, must be three numbers"),
        ({"temperature": 0.0}, "temperature of the adapter, must be above 0"),
        ({"temperature": float("nan")}, "temperature of the adapter, must be above 0"),
        ({"class_counts": [1, 2]}, "class_counts, must be of length 4, got length 2"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        LabelShiftAdapter(D, C, **settings)


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


ROUND_TRIPS = [{"dw": dw} for dw in FORMS] + [
    {"class_counts": [3, 40, 10, 7], "lambdas": (1, -1.5, -3), "hidden": 9},
    {"gamma": False, "db": False, "condition": "full"},
    {"temperature": 1.7},
]


@pytest.mark.parametrize("settings", ROUND_TRIPS, ids=str)
def test_saved_and_loaded(settings, tmp_path):
    adapter = randomise(LabelShiftAdapter(D, C, **settings))
    save_adapter(tmp_path / "a", adapter, {"source": "a toy"})
    loaded = load_adapter(tmp_path / "a")
    assert loaded.settings() == adapter.settings()
    assert same(dict(loaded.state_dict()), dict(adapter.state_dict()))
    assert not loaded.training
    for a, b in zip(loaded(PRIOR), adapter(PRIOR), strict=True):
        pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
        assert all(torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in pairs)


@pytest.mark.parametrize("file", ["adapter.safetensors", "card.json"])
@pytest.mark.parametrize("harm", ["edit", "truncate", "remove", "extend"])
def test_a_damaged_adapter_is_refused(file, harm, tmp_path):
    save_adapter(tmp_path / "a", randomise(LabelShiftAdapter(D, C)))
    path = tmp_path / "a" / file
    content = path.read_bytes()
    middle = len(content) // 2
    if harm == "remove":
        path.unlink()
    else:
        flipped = bytes([content[middle] ^ 1])
        path.write_bytes(
            {
                "edit": content[:middle] + flipped + content[middle + 1 :],
                "truncate": content[:middle],
                "extend": content + b"x",
            }[harm]
        )
    with pytest.raises(CheckpointError):
        load_adapter(tmp_path / "a")


def test_a_changed_setting_is_refused(tmp_path):
    save_adapter(tmp_path / "a", randomise(LabelShiftAdapter(D, C)))
    card = tmp_path / "a" / "card.json"
    text = card.read_text()
    assert '"dw": "class"' in text
    card.write_text(text.replace('"dw": "class"', '"dw": "none"'))
    with pytest.raises(CheckpointError, match="was edited"):
        load_adapter(tmp_path / "a")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_adapter_takes_the_precision_of_its_model(dtype):
    net = nn.Sequential(nn.Linear(4, D), nn.LayerNorm(D), nn.Linear(D, C)).to(dtype)
    live = Tent(attach(net, LabelShiftAdapter(D, C)))
    assert live(torch.rand(3, 4, dtype=dtype)).dtype == dtype


def classwise(**changes):
    settings = {"condition": "classwise", "gamma": False, "beta": False, **changes}
    return LabelShiftAdapter(D, C, class_counts=[8, 4, 2, 1], **settings)


@pytest.mark.parametrize("assumes", [None, [0.4, 0.3, 0.2, 0.1]])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_a_fresh_classwise_adapter_is_logit_adjustment(assumes, temperature):
    h, weight, bias = torch.randn(5, D), torch.randn(C, D), torch.randn(C)
    shift = classwise(assumes=assumes, temperature=temperature)(PRIOR)
    with torch.no_grad():
        assumed = torch.full((C,), 1 / C) if assumes is None else torch.tensor(assumes)
        expected = (h @ weight.T + bias) / temperature + PRIOR.log() - assumed.log()
        torch.testing.assert_close(shifted_logits(h, weight, bias, shift), expected)


@pytest.mark.parametrize("dw", ["class", "none"])
def test_a_classwise_adapter_knows_no_class_from_another(dw):
    """Its formula by loops, and: who permutes priors and counts permutes what it does."""
    torch.manual_seed(0)
    counts, order = [8, 4, 2, 1], [2, 0, 3, 1]
    adapter = classwise(dw=dw)
    randomise(adapter)
    with torch.no_grad():
        shift = adapter(PRIOR)
    mean = sum(counts) / C
    for c in range(C):
        read = [float(PRIOR[c].log()) + np.log(C), np.log(counts[c] / mean)]
        *delta, bias = slow_network(adapter.head_net, read)
        assert float(shift.bias[c]) == pytest.approx(
            bias + float(PRIOR[c].log()) + np.log(C), abs=1e-5
        )
        if delta:
            assert float(shift.weight[0][c]) == pytest.approx(delta[0], abs=1e-5)
    other = LabelShiftAdapter(
        D,
        C,
        class_counts=[counts[i] for i in order],
        condition="classwise",
        gamma=False,
        beta=False,
        dw=dw,
    )
    other.head_net.load_state_dict(adapter.head_net.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(other(PRIOR[order]).bias, shift.bias[order])


def test_a_classwise_adapter_survives_a_prior_of_zero_and_saving(tmp_path):
    adapter = classwise(assumes=[0.4, 0.3, 0.2, 0.1])
    randomise(adapter)
    save_adapter(tmp_path / "a", adapter)
    again, prior = load_adapter(tmp_path / "a"), torch.tensor([1.0, 0, 0, 0])
    assert again(prior).bias.isfinite().all()
    assert torch.equal(again(prior).bias, adapter(prior).bias)


@pytest.mark.parametrize("wrong", [{"gamma": True}, {"db": False}, {"dw": "full"}])
def test_a_classwise_adapter_only_shifts_logits(wrong):
    with pytest.raises(SettingError, match="classwise"):
        classwise(**wrong)
