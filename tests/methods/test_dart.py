"""DART around other methods, against its formula written out."""

import copy

import pytest
import torch

from tests.methods import slow
from tests.toys import CLASSES, make_adapter, make_batches, make_dart, make_method, make_net
from twoshift import estimators
from twoshift.adapters import attach, condition
from twoshift.errors import MismatchError, ModelError, SettingError, UnknownName
from twoshift.methods import Dart, Inputs, LabelAware, Method, base, create, dart
from twoshift.methods.dart import PARTS
from twoshift.testing import check_method

SIZES = (8, 5, 1, 8, 3, 9, 8, 4, 7, 6)


def by_hand(module, logits):
    """Matrix and vector for a batch, one number at a time."""
    probs = []
    for row in logits.tolist():
        e = [2.718281828459045**v for v in row]
        probs.append([v / sum(e) for v in e])
    values = [sum(p[c] for p in probs) / len(probs) for c in range(CLASSES)]
    distances = [-sum(torch.tensor(v).double().log().item() / CLASSES for v in p) for p in probs]
    values.append(sum(distances) / len(distances))
    hidden = []
    for weights, bias in zip(
        module["hidden_weight"].tolist(), module["hidden_bias"].tolist(), strict=True
    ):
        hidden.append(max(0.0, bias + sum(w * v for w, v in zip(weights, values, strict=True))))
    out = [
        bias + sum(w * h for w, h in zip(weights, hidden, strict=True))
        for weights, bias in zip(
            module["out_weight"].tolist(), module["out_bias"].tolist(), strict=True
        )
    ]
    matrix = torch.tensor(out[: CLASSES**2], dtype=torch.float64).reshape(CLASSES, CLASSES)
    return matrix + torch.eye(CLASSES), torch.tensor(out[CLASSES**2 :], dtype=torch.float64)


def refined(module, seen, logits):
    matrix, vector = by_hand(module, seen)
    return torch.stack([row.double() @ matrix + vector for row in logits]).float()


@pytest.mark.parametrize("method", ["bn_stats", "source", "tent", "lame", "rotta"])
def test_against_the_formula(method):
    net, module = make_net("resnet_bn"), make_dart()
    settings = {"lr": 0.01, "capacity": 6, "update_every": 4} if method == "rotta" else {}
    live = Dart(net, module, method, settings)
    alone, seen = create(method, net, **settings), copy.deepcopy(net)
    slow.batch_norms_in_training(seen)
    for x in make_batches("resnet_bn", SIZES):
        with torch.no_grad():
            expected = refined(module, seen(x), alone(x))
        torch.testing.assert_close(live(x), expected, rtol=1e-5, atol=1e-4)
    assert live.statistics == alone.statistics
    assert live.describe() == f"DART after {alone.title}"


def test_a_module_of_zeros_changes_nothing():
    net, nothing = make_net("resnet_bn"), {n: 0 * t for n, t in make_dart().items()}
    live, alone = Dart(net, nothing, "tent"), create("tent", net)
    for x in make_batches("resnet_bn"):
        assert torch.equal(live(x), alone(x))


def test_the_labels_of_the_batch_change_the_refinement():
    module = make_dart()
    few, many = torch.tensor([[9.0, 0, 0, 0, 0]] * 4), torch.eye(5) * 9
    assert not torch.allclose(
        dart.refinement(module, dart.batch_summary(few))[0],
        dart.refinement(module, dart.batch_summary(many))[0],
        atol=0.01,
    )


@pytest.mark.parametrize(("method", "passes"), [("bn_stats", 1), ("source", 2), ("tent", 2)])
def test_one_more_pass_unless_it_was_made_already(method, passes):
    live, calls = Dart(make_net("resnet_bn"), make_dart(), method), []
    for net in filter(None, (live.model, live.network)):
        net.register_forward_hook(lambda *_: calls.append(1))
    live(make_batches("resnet_bn")[0])
    assert len(calls) == passes


@pytest.mark.parametrize("method", ["bn_stats", "source"])
def test_with_an_adapter_raw_logits_stay_and_the_module_reads_the_original_head(method):
    net, (x,), module = make_net("resnet_bn"), make_batches("resnet_bn", (8,)), make_dart()
    adapted = attach(net, make_adapter(net))
    live, alone = Dart(adapted, module, method), create(method, adapted)
    for part in (live, alone):
        condition(part, [0.4, 0.3, 0.1, 0.1, 0.1])
    scores, expected = live.adapt(x), alone.adapt(x)
    torch.testing.assert_close(scores.raw, expected.raw)
    assert scores.features is None
    slow.batch_norms_in_training(net)
    with torch.no_grad():
        wanted = refined(module, net(x), expected.logits)
    torch.testing.assert_close(scores.logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("resnet_bn", {"method": "bn_stats"}),
        ("mlp", {"method": "cotta", "method_settings": {"views": 2}}),
        ("mlp", {"method": "rotta", "method_settings": {"capacity": 6, "update_every": 4}}),
    ],
    ids=["bn_stats", "cotta", "rotta"],
)
def test_the_contract_holds_around_other_methods(name, settings):
    settings = {"dart": make_dart(), **settings}
    check_method(Dart, make_net(name), settings=settings, batches=make_batches(name))


def test_facts_of_the_method_are_passed_on_and_saved(tmp_path):
    net, x = make_net("resnet_bn"), make_batches("resnet_bn")[0]
    inner = make_method("matched", net, False)
    facts = {"moments": inner.moments, "confidence_threshold": 0.5}
    live = Dart(net, make_dart(), "matched", **facts)
    assert live.inner.moments.keys() == inner.moments.keys()
    assert live.settings()["confidence_threshold"] is None  # matched has none
    first = live(x)
    live.save(tmp_path / "state")
    again = Method.load(tmp_path / "state", net)
    again.reset()
    assert torch.equal(again(x), first)
    assert Dart(net, make_dart(), **facts).moments is None  # nor does bn_stats
    chosen = Dart(net, make_dart(), "cotta", {"confidence_threshold": 0.9}, **facts)
    assert chosen.inner.confidence_threshold == 0.9


def test_inputs_reach_the_method():
    live = Dart(make_net("resnet_bn"), make_dart(), "rotta")
    inputs = Inputs(channels=3, size=(16, 16))
    assert live.expect(inputs) is live
    assert live.inputs is live.inner.inputs is inputs


def test_the_view_in_use_is_the_methods():
    net = make_net("resnet_bn")
    views = {Dart(net, make_dart(), name).view_in_use for name in ("source", "tent")}
    assert len(views) == 2


def test_an_estimator_reads_what_the_method_predicts_without_it():
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn", SIZES)
    adapted = attach(net, make_adapter(net))
    live, alone = (
        LabelAware(method, estimators.create("em", CLASSES))
        for method in (Dart(adapted, make_dart(), "bn_stats"), create("bn_stats", adapted))
    )
    for x in batches:
        live(x), alone(x)
    torch.testing.assert_close(live.prior, alone.prior)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype):
    live = Dart(make_net("resnet_bn").to(dtype), make_dart(), "tent")
    for x in make_batches("resnet_bn"):
        assert live(x.to(dtype)).isfinite().all()
    assert live.dart["out_bias"].dtype == torch.promote_types(dtype, torch.float32)


def test_a_state_of_another_method_is_refused():
    net = make_net("resnet_bn")
    with pytest.raises(MismatchError):
        Dart(net, make_dart(), "bn_stats").load_state(Dart(net, make_dart(), "rotta").state())


def test_both_networks_are_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(base, "compile_networks", lambda nets, *_, **__: compiled.extend(nets))
    live = Dart(make_net("resnet_bn"), make_dart(), "tent")
    monkeypatch.setattr(live.network, "compile", lambda **_: compiled.append(live.network))
    live.compile()
    assert compiled == [live.model, live.network]


def test_what_it_cannot_do_is_refused():
    net, module = make_net("resnet_bn"), make_dart()
    with pytest.raises(SettingError, match="fit_dart"):
        Dart(net)
    with pytest.raises(SettingError, match="another method"):
        Dart(net, module, "dart")
    with pytest.raises(UnknownName, match="tent"):
        Dart(net, module, "tend")
    with pytest.raises(SettingError, match="no setting 'views'"):
        Dart(net, module, "tent", {"views": 3})
    with pytest.raises(SettingError, match="settings by name"):
        Dart(net, module, "tent", 0.1)
    for name in PARTS:
        for wrong in (module[name][:-1], module[name] * float("nan")):
            with pytest.raises(SettingError, match=r"(hidden|out)_\w+ of dart"):
                Dart(net, {**module, name: wrong})
    with pytest.raises(SettingError, match="hidden_weight of dart"):
        Dart(net, make_dart(classes=4))
    with pytest.raises(ModelError, match="normalisation layers"):
        Dart(make_net("resnet_gn"), module)
    big = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 101))
    with pytest.raises(ModelError, match="at most 100"):
        Dart(big, make_dart(classes=101, hidden=1), "source")
