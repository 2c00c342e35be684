"""Preparing any classifier: its logits, its normalisation, its wrappers, and what is refused."""

import copy
import json
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.models.zoo import ZOO, Answers, Body, Cosine, NormAct, Plain
from tests.toys import CLASSES, same, snapshot
from twoshift import methods
from twoshift.adapters import ANSWER, AdaptedHead, LogitAdapter, attach
from twoshift.errors import ModelError, SettingError
from twoshift.methods import Method
from twoshift.models.classifier import prepare, spec_of, unwrap
from twoshift.models.norm import AnyBatchNorm, batch_norms

ODD = ZOO["plain"]


class Returns(nn.Module):
    """A network whose output is made of its logits and features by a function."""

    def __init__(self, make):
        super().__init__()
        self.body, self.fc = nn.Linear(4, 6), nn.Linear(6, 3)
        self.make = make

    def forward(self, x):
        h = self.body(x)
        return self.make(self.fc(h), h)


def x4(rows=5):
    return torch.rand(rows, 4, generator=torch.Generator().manual_seed(0))


def logits_of(net):
    return net.fc(net.body(x4()))


FOUND = {
    "tensor": lambda z, h: z,
    "one position": lambda z, h: z[:, :, None, None],
    "list": lambda z, h: [z, h.sum(), "text", None],
    "key": lambda z, h: {"features": h, "logits": z},
    "only one fits": lambda z, h: {"loss": z.sum(), "tokens": h[:, None].expand(-1, 2, -1), "y": z},
    "integers": lambda z, h: (z.argmax(1), z, z.round().long()),
    "a number for each image": lambda z, h: (z, h[:, :1]),
    "another batch": lambda z, h: (z, h[:2]),
    "named tuple": lambda z, h: Answers(z, h),
    "attributes": lambda z, h: SimpleNamespace(logits=z, features=h),
}


@pytest.mark.parametrize("name", FOUND)
def test_logits_are_found(name):
    net = Returns(FOUND[name])
    assert torch.equal(prepare(net)(x4()), logits_of(net))
    assert spec_of(prepare(net)) == {}


@pytest.mark.parametrize(
    ("output", "make"),
    [
        (1, lambda z, h: (h, z)),
        (-1, lambda z, h: (h, z)),
        (0, lambda z, h: {"y": z, "logits": h}),
        ("y", lambda z, h: {"y": z, "logits": h}),
        ("aux_logits", lambda z, h: Answers(h, z)),
        (1, lambda z, h: Answers(h, z)),
        ("features", lambda z, h: SimpleNamespace(logits=h, features=z)),
    ],
)
def test_logits_are_named(output, make):
    net = prepare(Returns(make), output=output)
    assert torch.equal(net(x4()), logits_of(net))
    assert spec_of(net) == {"output": output}


def test_several_candidates_are_listed():
    net = prepare(Returns(lambda z, h: (h, z)))
    with pytest.raises(
        ModelError,
        match=r"may be the logits: 0: float32 \(5, 6\), 1: float32 \(5, 3\)\. .*output=0",
    ):
        net(x4())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda z, h: {"loss": z.sum()}, r"must be a tensor of logits.*got 'loss': float32 \(\)"),
        (lambda z, h: "text", r"must be a tensor of logits, or contain one, got str"),
        (lambda z, h: z[:, 0], r"logits of two classes or more, \(5, C\), got float32 \(5,\)"),
        (lambda z, h: z[:, :1], r"two classes or more, \(5, C\), got float32 \(5, 1\)"),
        (lambda z, h: z[:3], r"two classes or more, \(5, C\), got float32 \(3, 3\)"),
        (lambda z, h: z.argmax(1), r"got int64 \(5,\)"),
        (lambda z, h: z[:, :, None].expand(-1, -1, 2), r"got float32 \(5, 3, 2\)"),
        (lambda z, h: {"logits": z.sum()}, r"got float32 \(\)"),
    ],
)
def test_no_logits(make, message):
    with pytest.raises(ModelError, match=message):
        methods.create("source", Returns(make))(x4())


def test_an_entry_that_is_not_there():
    with pytest.raises(ModelError, match=r"no entry 'scores'.*got 0: float32 \(5, 3\)"):
        prepare(Returns(lambda z, h: (z,)), output="scores")(x4())
    with pytest.raises(ModelError, match=r"no entry 3"):
        prepare(Returns(lambda z, h: (z,)), output=3)(x4())
    with pytest.raises(ModelError, match=r"no entry 'logits'.*Leave output out"):
        prepare(Returns(lambda z, h: z), output="logits")(x4())


@pytest.mark.parametrize("output", [True, 1.5, ["logits"]])
def test_what_output_may_be(output):
    with pytest.raises(SettingError, match="must be a key, an attribute or a position"):
        prepare(ODD.bare(), output=output)


def test_images_are_normalised_before_the_users_own_hooks():
    net, seen = ODD.bare(), []
    net.register_forward_pre_hook(lambda _module, args: seen.append(args[0].clone()))
    x = ODD.batches()[0]
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    expected = torch.stack([(x[:, c] - mean[c]) / std[c] for c in range(3)], 1)
    prepared = prepare(net, mean=mean, std=std)
    assert torch.equal(prepared(x), net(expected))
    assert torch.equal(seen[0], expected)
    assert spec_of(prepared) == {"mean": mean, "std": std}
    assert json.loads(json.dumps(spec_of(prepared))) == spec_of(prepared)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_normalisation_keeps_the_type_of_the_images(dtype):
    seen = []
    net = prepare(ODD.bare().to(dtype), mean=0.5, std=0.25)
    net.register_forward_pre_hook(lambda _module, args: seen.append(args[0].dtype))
    net(ODD.batches()[0].to(dtype))
    assert seen == [dtype]


def test_one_number_for_all_channels():
    x = ODD.batches()[0]
    net = ODD.bare()
    assert torch.equal(prepare(net, mean=0.5)(x), net((x - 0.5) / 1))
    assert spec_of(prepare(net, std=[0.1, 0.2, 0.3])) == {"mean": [0.0] * 3, "std": [0.1, 0.2, 0.3]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean": [0.1, 0.2], "std": [1, 1, 1]}, "of the same length, got 2 and 3"),
        ({"std": 0.0}, "std of the images, must be positive"),
        ({"mean": [0.1, float("nan"), 0.1]}, "mean of the images, must be a finite number"),
        ({"mean": "white"}, "mean of the images, must be a finite number"),
        ({"mean": []}, "mean of the images, must be a finite number"),
    ],
)
def test_bad_normalisation(settings, message):
    with pytest.raises(SettingError, match=message):
        prepare(ODD.bare(), **settings)


def test_normalisation_of_other_channels():
    with pytest.raises(SettingError, match="must be one value, or 3 as the images have channels"):
        prepare(ODD.bare(), mean=[0.1, 0.2])(ODD.batches()[0])


def test_preparing_again_keeps_what_was_asked_for():
    net = Returns(lambda z, h: (h, z))
    once = prepare(net, output=1, mean=0.5)
    twice = prepare(prepare(prepare(once), output=1), mean=0.5, std=1.0)
    assert spec_of(twice) == spec_of(once) == {"output": 1, "mean": [0.5], "std": [1.0]}
    assert torch.equal(twice(x4()), once(x4()))
    assert spec_of(prepare(nn.DataParallel(once))) == spec_of(once)
    assert spec_of(prepare(prepare(net), output=1)) == {"output": 1}
    with pytest.raises(SettingError, match=r"output of a prepared .*must be 1, as before, got 0"):
        prepare(once, output=0)
    with pytest.raises(SettingError, match="mean and std of a prepared"):
        prepare(once, mean=0.4)


def test_a_saved_state_knows_what_the_classifier_was_prepared_for(tmp_path):
    net = Returns(lambda z, h: (h, z))
    net.norm = nn.BatchNorm1d(6)
    net.body = nn.Sequential(net.body, net.norm)
    live = methods.create("bn_stats", prepare(net.eval(), output=1, mean=0.5))
    live.save(tmp_path / "s")
    assert torch.equal(Method.load(tmp_path / "s", net)(x4()), live(x4()))
    assert torch.equal(Method.load(tmp_path / "s", prepare(net, mean=0.5))(x4()), live(x4()))
    with pytest.raises(SettingError, match="as before"):
        Method.load(tmp_path / "s", prepare(net, output=0))
    methods.create("bn_stats", prepare(net, output=1)).save(tmp_path / "t")
    with pytest.raises(ModelError, match=r"must be prepared for \{'output': 1\}"):
        Method.load(tmp_path / "t", prepare(net, mean=0.5))


def test_the_copy_and_the_given_model_are_apart():
    net = ODD.bare().train()
    net.body.eval()
    before = snapshot(net)
    prepared = prepare(net, output=None, mean=0.5)
    assert [m.training for m in prepared.modules()] == [m.training for m in net.modules()]
    with torch.no_grad():
        for p in prepared.parameters():
            p.zero_()
    assert same(snapshot(net), before)
    assert not net._forward_hooks
    assert not net._forward_pre_hooks


def test_our_own_backbones_stay_as_they_are():
    net = ODD.bare()
    prepared = prepare(net)
    assert [type(m) for m in prepared.modules()] == [type(m) for m in net.modules()]
    assert unwrap(net) is net


def test_a_module_compiled_in_place():
    net = ODD.bare()
    x = ODD.batches()[0]
    expected = net(x)
    net.compile(backend="eager")
    net.body.compile(backend="eager")
    assert torch.equal(prepare(net)(x), expected)


def test_norm_and_activation_become_plain():
    net = Plain(NormAct).train()
    (layer,) = [layer for _, layer in batch_norms(prepare(net))]
    assert type(layer) is AnyBatchNorm
    assert layer.training
    assert list(layer.state_dict()) == list(net.body.bn.state_dict())
    net.body.bn.track_running_stats = False
    x = ODD.batches()[0]
    assert torch.equal(prepare(net.eval())(x), net(x))


def test_a_norm_that_computes_something_else_is_left_alone():
    class Louder(NormAct):
        def forward(self, x):
            return 2 * super().forward(x)

    class ShiftsInTraining(NormAct):
        def forward(self, x):
            return super().forward(x) + self.training

    class Picky(NormAct):
        def forward(self, x):
            if x.shape[2] != 6:
                raise RuntimeError("six positions, please")
            return super().forward(x)

    for kind in (Louder, ShiftsInTraining, Picky):
        net = Plain(kind).eval()
        (layer,) = [layer for _, layer in batch_norms(prepare(net))]
        assert type(layer) is kind
        x = ODD.batches()[0]
        assert torch.equal(methods.create("source", net)(x), net(x))
        assert methods.create("tent", net)(x).isfinite().all()
        with pytest.raises(ModelError, match="cannot be replaced"):
            methods.create("onda", net)


def test_hooks_of_the_user_stay_when_a_layer_is_replaced():
    net = ODD.bare()
    net.body.bn.register_forward_hook(lambda _module, _args, out: out * 2)
    x = ODD.batches()[0]
    live = methods.create("decoupled", net, share=0.0)
    torch.testing.assert_close(live(x), net(x))


def test_preparing_draws_nothing_from_the_global_generator():
    state = torch.get_rng_state()
    prepare(Plain(NormAct))
    state_after = torch.get_rng_state()
    torch.set_rng_state(state)
    Plain(NormAct)
    assert torch.equal(torch.get_rng_state(), state_after)


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))


def traced():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), x4())


def exported():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(nn.Sequential(nn.Linear(4, 3)), (x4(),)).module()


def lazy():
    return nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(6, 3))


def meta():
    with torch.device("meta"):
        return nn.Linear(4, 3)


def sparse():
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    net[0].weight = nn.Parameter(net[0].weight.detach().to_sparse())
    return net


def integers():
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    net[0].weight = nn.Parameter(torch.ones(6, 4, dtype=torch.int8), requires_grad=False)
    return net


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
        return torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)


def mixed():
    return nn.Sequential(nn.Linear(4, 6).half(), nn.Linear(6, 3))


def two_devices():
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, device="meta"))


def locked():
    net = nn.Sequential(nn.Linear(4, 3))
    net[0].guard = threading.Lock()
    return net


def cached_in_a_list():
    net = nn.Sequential(nn.Linear(4, 3))
    net.kept = [net[0].weight * 2]
    return net


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (scripted, r"is TorchScript.*cannot be replaced or hooked.*load_weights"),
        (traced, r"is TorchScript.*cannot be replaced or hooked.*load_weights"),
        (lambda: nn.Sequential(scripted()), r"is TorchScript or an exported program \(0\)"),
        (exported, r"is TorchScript or an exported program.*load_weights"),
        (lambda: lambda x: x, r"must be an nn\.Module, got function"),
        (lazy, r"0\.weight of Sequential, must be .*not initialised.*Call the model once"),
        (meta, r"weight of Linear.*without values \(meta\)"),
        (sparse, r"0\.weight of Sequential.*sparse.*to_dense"),
        (integers, r"0\.weight of Sequential.*int8 \(quantised\)"),
        (quantised, r"0 is quantised: it cannot learn\. Give the model before"),
        (mixed, r"of one type, got torch\.float16 and torch\.float32\. .*model\.float\(\)"),
        (two_devices, r"1\.weight of Sequential.*meta"),
        (nn.Flatten, "weights of Flatten, must be at least one parameter, got none"),
        (locked, r"cannot be copied, because of 0\.guard: .*lock"),
        (cached_in_a_list, r"cannot be copied, because of kept: "),
    ],
)
def test_what_cannot_be_used(make, message):
    for use in (prepare, lambda net: methods.create("source", net)):
        with pytest.raises(ModelError, match=message):
            use(make())
    with pytest.raises(ModelError, match=message):
        attach(make(), LogitAdapter(3, 3), ANSWER)


def test_scripted_functions_without_weights_are_fine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        activation = torch.jit.script(nn.ReLU())
    net = nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3))
    assert torch.equal(prepare(net)(x4()), net(x4()))


def test_a_traced_graph_still_has_layers():
    net = ODD.bare()
    graph = torch.fx.symbolic_trace(net)
    x = ODD.batches()[0]
    assert torch.equal(methods.create("tent", graph)(x), methods.create("tent", net)(x))


def test_a_result_that_a_module_keeps():
    net = ODD.bare()
    net.body.last = net.fc(torch.rand(2, 6)) * 1
    x = ODD.batches()[0]
    prepared = prepare(net)
    assert torch.equal(prepared(x), net(x))
    assert not prepared.body.last.requires_grad


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("where", ["fc", "body.conv"])
@pytest.mark.parametrize(
    "norm",
    [
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.spectral_norm,
    ],
)
def test_weights_that_are_computed(norm, where, tmp_path):
    net = ODD.bare()
    norm(net.get_submodule(where))
    net.eval()
    x, other, _ = ODD.batches()
    expected = net(x)
    assert torch.equal(methods.create("source", net)(x), expected)
    adapted = attach(net, LogitAdapter(6, CLASSES), "fc")
    torch.testing.assert_close(adapted(x).log_softmax(1), expected.log_softmax(1))
    live = methods.create("cotta", adapted, views=2, lr=0.01)
    live(x)
    live.save(tmp_path / "s")
    assert torch.equal(Method.load(tmp_path / "s", net)(other), live(other))


def test_the_weights_of_a_head_that_are_computed_follow_their_training():
    """The head is not called by its adapter, which reads its weights."""
    net = ODD.bare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(net.fc)
    adapted = attach(net, LogitAdapter(6, CLASSES), "fc")
    x = ODD.batches()[0]
    before = adapted(x).detach()
    with torch.no_grad():
        adapted.fc.head.weight_g.mul_(2)
    assert not torch.allclose(adapted(x), before)


def test_batch_norms_with_computed_weights_are_not_replaced():
    net = ODD.bare()
    nn.utils.parametrize.register_parametrization(net.body.bn, "weight", nn.Softplus())
    x = ODD.batches()[0]
    assert methods.create("tent", net)(x).isfinite().all()
    with pytest.raises(ModelError, match="cannot be replaced"):
        methods.create("decoupled", net)


def test_shared_modules_stay_shared():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.SyncBatchNorm(4)
            self.second, self.fc = self.first, nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(self.second(self.first(x).relu()))

    prepared = prepare(Twice())
    assert prepared.first is prepared.second
    assert type(prepared.first) is AnyBatchNorm


def test_a_second_stage_that_was_prepared_alone():
    """Hooks of an inner module are its own."""
    inner = prepare(Returns(lambda z, h: (h, z)), output=1)
    outer = nn.Sequential(inner, nn.ReLU())
    assert spec_of(prepare(outer)) == {}
    assert torch.equal(prepare(outer)(x4()), inner(x4()).relu())


def test_an_adapter_behind_a_model_that_has_such_an_attribute():
    net = ODD.bare()
    net.answer = 42
    with pytest.raises(ModelError, match="attribute of its own called 'answer'"):
        attach(net, LogitAdapter(CLASSES, CLASSES), ANSWER)
    net = Cosine()
    net.answer = nn.Linear(6, CLASSES)  # a layer of that name is what the name means
    assert isinstance(attach(net, LogitAdapter(6, CLASSES), ANSWER).answer, AdaptedHead)


def test_copies_of_a_prepared_model_are_independent():
    prepared = prepare(Returns(lambda z, h: (h, z)))
    other = copy.deepcopy(prepared)
    assert spec_of(prepare(other, output=1)) == {"output": 1}
    assert spec_of(other) == spec_of(prepared) == {}


def test_a_body_alone_is_no_classifier():
    with pytest.raises(ModelError, match=r"the answer of Body, must be logits"):
        methods.create("source", Body().eval())(ODD.batches()[0])
