"""The adaptation state on disk: what is refused, and what comes back."""

import json

import pytest
import torch

from tests.adapters import cases
from tests.saved import as_first_version, card_in, names, refit
from tests.toys import (
    CLASSES,
    make_adapter,
    make_batches,
    make_method,
    make_moments,
    make_net,
    same,
)
from twoshift import estimators, storage
from twoshift.adapters import attach, condition, logit_adapter
from twoshift.errors import CheckpointError, MismatchError, StorageError
from twoshift.estimators import EMA, Fixed
from twoshift.methods import IABN, BNStats, LabelAware, Matched, Method, Source, Tent
from twoshift.methods.eata import fisher_information
from twoshift.priors import dirichlet, longtail
from twoshift.storage import _folders


@pytest.fixture
def live():
    """TENT with adapter and estimate, four batches in."""
    live = make_method("tent", make_net("resnet_bn"), True, freeze=["layer4"])
    for x in make_batches("resnet_bn"):
        live(x)
    return live


def test_loading_by_the_right_class(live, tmp_path):
    live.save(tmp_path / "s")
    net = make_net("resnet_bn")
    restored = LabelAware.load(tmp_path / "s", net)
    assert type(restored.method) is Tent
    assert type(restored.estimator) is EMA
    assert restored.estimator.settings() == live.estimator.settings()
    assert restored.settings() == live.settings()
    assert restored.settings()["freeze"] == ["layer4"]
    assert isinstance(Method.load(tmp_path / "s", net), LabelAware)
    for wrong in (Tent, IABN):
        with pytest.raises(CheckpointError, match=f"must be a saved {wrong.__name__}, got Label"):
            wrong.load(tmp_path / "s", net)


def test_the_card_is_readable_and_there_is_no_pickle(live, tmp_path):
    live.save(str(tmp_path / "s"))
    files = storage.saved_files(tmp_path / "s")
    assert files.keys() == {"adapter", "initial", "state"}
    assert names(tmp_path / "s") == sorted(["card.json", *(p.name for p in files.values())])
    for name, path in files.items():
        assert path.name == f"{name}-{storage.sha256(path)[:12]}.safetensors"
    card = json.loads((tmp_path / "s" / "card.json").read_text())
    assert card["method"] == "tent"
    assert card["estimator"]["name"] == "ema"
    assert card["adapter"]["head"] == "fc"


CONFUSION = (torch.eye(CLASSES) + 0.1) / (CLASSES * (1 + 0.1 * CLASSES))
FACTS = {
    "bbse": {"confusion": CONFUSION},
    "em": {"temperature": 1.5, "bias": torch.linspace(-1, 1, CLASSES)},
    "readout": {"regression": torch.linspace(-0.1, 0.2, CLASSES * (1 + 2 * CLASSES)).view(-1, 5)},
    "fixed": {"prior": torch.tensor(cases.SHARES)},
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_are_tensors_on_disk_and_not_in_the_card(name, tmp_path):
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn")
    method = Matched(attach(net, logit_adapter(net)), make_moments(net))
    live = LabelAware(method, estimators.create(name, CLASSES, **FACTS[name]))
    for x in batches[:3]:
        live(x)
    live.save(tmp_path / "s")
    text = (tmp_path / "s" / "card.json").read_text()
    assert len(text) < 3000
    assert "moments" not in text
    facts = storage.read_tensors(storage.saved_files(tmp_path / "s")["facts"])
    moments = {n.removeprefix("method/moments/"): t for n, t in facts.items() if "moments" in n}
    assert same(moments, method.moments)
    for fact, value in FACTS[name].items():
        assert (f"estimator/{fact}" in facts) == isinstance(value, torch.Tensor)
        assert (f'"{fact}"' in json.dumps(json.loads(text)["estimator"])) == (fact == "temperature")
    restored = LabelAware.load(tmp_path / "s", net)
    assert same(restored.state(), live.state())
    assert same(restored.method.moments, method.moments)
    assert same(restored.estimator.settings(), live.estimator.settings())
    assert torch.equal(restored(batches[3]), live(batches[3]))
    assert same(restored.state(), live.state())


def test_fisher_information_comes_back(tmp_path):
    net, batches = make_net("mlp"), make_batches("mlp")
    live = make_method("eata", net, False, fisher=fisher_information(net, batches[:2]))
    live(batches[0])
    live.save(tmp_path / "s")
    restored = Method.load(tmp_path / "s", net)
    assert same(restored.fisher, live.fisher)
    assert torch.equal(restored(batches[1]), live(batches[1]))


def rewrite_as_first_version(folder):
    """How 0.1.0 wrote it: fixed names of files, no names of adapters, tensors as lists."""
    as_first_version(folder)
    card = card_in(folder)
    if card["files"].pop("facts.safetensors", None):
        for path, tensor in storage.read_tensors(folder / "facts.safetensors").items():
            whose, name, *part = path.split("/")
            settings = (card if whose == "method" else card["estimator"])["settings"]
            if part:
                settings.setdefault(name, {})[part[0]] = tensor.tolist()
            else:
                settings[name] = tensor.tolist()
        (folder / "facts.safetensors").unlink()
    if card["method"] == "cotta":
        card["settings"]["threshold"] = card["settings"].pop("confidence_threshold")
    if card.get("adapter", {}).pop("name", None) == "classwise":
        parts = {"condition": "classwise", "gamma": False, "beta": False, "db": True}
        card["adapter"]["settings"] |= {**parts, "lambdas": [1.0, 0.0, -2.0]}
    refit(folder, card)


@pytest.mark.parametrize(
    ("method", "adapter", "estimator"),
    [
        ("tent", "label_shift", "ema"),
        ("tent", "classwise", "em"),
        ("matched", "label_shift", "bbse"),
        ("matched", "classwise", "readout"),
        ("cotta", "label_shift", "fixed"),
        ("eata", "label_shift", "em"),
    ],
)
def test_a_state_of_the_first_version(method, adapter, estimator, tmp_path):
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn")
    fisher = {"fisher": fisher_information(net, batches[:1])} if method == "eata" else {}
    inner = make_method(method, attach(net, cases.make(adapter, net)), False, **fisher)
    live = LabelAware(inner, estimators.create(estimator, CLASSES, **FACTS.get(estimator, {})))
    for x in batches[:3]:
        live(x)
    live.save(tmp_path / "s")
    rewrite_as_first_version(tmp_path / "s")
    restored = LabelAware.load(tmp_path / "s", net)
    assert same(restored.state(), live.state())
    assert torch.equal(restored(batches[3]), live(batches[3]))
    restored.reset()
    live.reset()
    assert same(restored.state(), live.state())


def test_saving_disturbs_nothing(live, tmp_path):
    before = live.state()
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "notes").write_text("somebody else's")
    live.save(tmp_path / "s")
    live.save(tmp_path / "s")
    assert (tmp_path / "s" / "notes").read_text() == "somebody else's"
    assert same(live.state(), before)
    live(make_batches("resnet_bn")[0])


def test_loading_leaves_the_given_model_untouched(live, tmp_path):
    live.save(tmp_path / "s")
    net = make_net("resnet_bn")
    before = {n: t.clone() for n, t in net.state_dict().items()}
    restored = Method.load(tmp_path / "s", net)
    restored(make_batches("resnet_bn")[0])
    assert same(dict(net.state_dict()), before)


@pytest.mark.parametrize("optim", ["adam", "sgd"])
def test_before_the_first_batch(optim, tmp_path):
    fresh = Tent(make_net("mlp"), optim=optim)
    fresh.save(tmp_path / "s")
    restored = Tent.load(tmp_path / "s", make_net("mlp"))
    for x in make_batches("mlp"):
        assert torch.equal(restored(x), fresh(x))


def test_two_hops(tmp_path):
    """Saved, loaded, run, saved again, loaded again."""
    plain = make_method("iabn", make_net("resnet_iabn"), True)
    hopping = make_method("iabn", make_net("resnet_iabn"), True)
    for i, x in enumerate(make_batches("resnet_iabn")):
        assert torch.equal(hopping(x), plain(x))
        hopping.save(tmp_path / str(i % 2))
        hopping = Method.load(tmp_path / str(i % 2), make_net("resnet_iabn"))
    assert same(hopping.state(), plain.state())


def test_a_prior_that_was_set_before_the_method_was_built(tmp_path):
    """No estimator: the label distribution is known."""
    net = make_net("mlp")
    adapted = attach(net, make_adapter(net))
    condition(adapted, longtail(CLASSES, 20))
    live, batches = Tent(adapted), make_batches("mlp")
    first = live(batches[0])
    live.save(tmp_path / "s")
    restored = Tent.load(tmp_path / "s", make_net("mlp"))
    assert torch.equal(restored(batches[1]), live(batches[1]))
    restored.reset()
    assert torch.equal(restored(batches[0]), first)


def test_a_prior_that_was_set_midstream(tmp_path):
    net, batches = make_net("mlp"), make_batches("mlp")
    live = Tent(attach(net, make_adapter(net)))
    live(batches[0])
    condition(live, longtail(CLASSES, 20))
    live.save(tmp_path / "s")
    restored = Tent.load(tmp_path / "s", make_net("mlp"))
    assert torch.equal(restored(batches[1]), live(batches[1]))


@pytest.mark.parametrize("seed", range(8))
def test_a_fixed_estimate_comes_back_exactly(seed, tmp_path):
    import numpy as np

    net = make_net("mlp")
    prior = dirichlet(CLASSES, 1.0, np.random.default_rng(seed))
    live = LabelAware(Source(attach(net, make_adapter(net))), Fixed(CLASSES, prior))
    live.save(tmp_path / "s")
    restored = Method.load(tmp_path / "s", net)
    for x in make_batches("mlp"):
        assert torch.equal(restored(x), live(x))
    restored.reset()
    live.reset()
    assert same(restored.state(), live.state())


def other_head():
    net = make_net("resnet_bn")
    with torch.no_grad():
        net.fc.bias[0] += 1e-6
    return net


def other_statistics():
    net = make_net("resnet_bn")
    net.bn1.running_mean[0] += 1e-6
    return net


@pytest.mark.parametrize(
    "model",
    [
        lambda: make_net("resnet_bn", seed=1),
        lambda: make_net("resnet_gn"),
        other_head,
        other_statistics,
    ],
    ids=["other seed", "other norm", "other head", "other statistics"],
)
def test_another_model_is_refused(live, model, tmp_path):
    live.save(tmp_path / "s")
    with pytest.raises(MismatchError, match="belongs to another model"):
        Method.load(tmp_path / "s", model())


def test_the_model_must_be_the_bare_one(live, tmp_path):
    live.save(tmp_path / "s")
    with pytest.raises(MismatchError, match="must be the bare classifier"):
        Method.load(tmp_path / "s", live.model)
    Tent(make_net("resnet_bn")).save(tmp_path / "plain")
    with pytest.raises(MismatchError):
        Method.load(tmp_path / "plain", live.model)


@pytest.mark.parametrize("file", ["state", "initial", "adapter", "card"])
@pytest.mark.parametrize("harm", ["edit", "truncate", "remove"])
def test_damage_is_refused(live, file, harm, tmp_path):
    live.save(tmp_path / "s")
    path = {**storage.saved_files(tmp_path / "s"), "card": tmp_path / "s" / "card.json"}[file]
    content = path.read_bytes()
    middle = len(content) // 2
    if harm == "remove":
        path.unlink()
    elif harm == "truncate":
        path.write_bytes(content[:middle])
    else:
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(CheckpointError):
        Method.load(tmp_path / "s", make_net("resnet_bn"))


def test_another_kind_of_folder_is_refused(tmp_path):
    from twoshift.adapters import save_adapter

    save_adapter(tmp_path / "a", make_adapter(make_net("mlp")))
    with pytest.raises(CheckpointError, match="a saved adaptation state, got adapter"):
        Method.load(tmp_path / "a", make_net("mlp"))
    with pytest.raises(CheckpointError, match="no adaptation state in"):
        Method.load(tmp_path / "nothing", make_net("mlp"))


def test_a_failed_save_leaves_the_old_one(live, tmp_path, monkeypatch):
    live.save(tmp_path / "s")
    saved = live.state()
    live(make_batches("resnet_bn")[0])

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    before = names(tmp_path / "s")
    monkeypatch.setattr(_folders, "make_card", full_disk)
    with pytest.raises(StorageError, match="No space left"):
        live.save(tmp_path / "s")
    monkeypatch.undo()
    assert same(Method.load(tmp_path / "s", make_net("resnet_bn")).state(), saved)
    assert names(tmp_path / "s") == before


def test_a_state_that_does_not_fit_is_refused_whole():
    live = Tent(make_net("mlp"))
    for x in make_batches("mlp"):
        live(x)
    before = live.state()
    first = next(iter(before))
    for broken in (
        {n: t for n, t in before.items() if n != first},
        {n: t for n, t in before.items() if n != "generator"},
        {**before, first: before[first][:-1]},
        {**before, first: before[first].long()},
    ):
        with pytest.raises(MismatchError, match="state of"):
            live.load_state(broken)
        assert same(live.state(), before)


def test_reset_after_loading_goes_back_to_the_same_first_day(tmp_path):
    """Also where estimator and method were in use before they were joined."""
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn")
    method, estimator = Tent(attach(net, make_adapter(net))), EMA(CLASSES)
    method(batches[0])
    estimator.update(torch.eye(CLASSES)[:1])
    live = LabelAware(method, estimator)
    live(batches[1])
    live.save(tmp_path / "s")
    restored = LabelAware.load(tmp_path / "s", net)
    live.reset()
    restored.reset()
    assert same(live.state(), restored.state())
    assert not torch.equal(live.prior, EMA(CLASSES).prior)
    assert torch.equal(live(batches[2]), restored(batches[2]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_come_back_exactly(dtype, tmp_path):
    """A uniform distribution over five classes does not sum to 1 in all of them."""
    net = make_net("mlp").to(dtype)
    live = LabelAware(BNStats(attach(net, make_adapter(net))), EMA(CLASSES))
    first, second, third = (x.to(dtype) for x in make_batches("mlp", (8, 5, 7)))
    live(first)
    live.save(tmp_path / "s")
    restored = LabelAware.load(tmp_path / "s", net)
    assert torch.equal(restored(second), live(second))
    restored.save(tmp_path / "again")
    again = LabelAware.load(tmp_path / "again", net)
    assert torch.equal(again(third), live(third))
    assert same(again.state(), live.state())


def test_to_a_link_again_and_again(live, tmp_path):
    (tmp_path / "volume").mkdir()
    (tmp_path / "s").symlink_to("volume")
    for x in make_batches("resnet_bn"):
        live(x)
        live.save(tmp_path / "s")
        assert same(Method.load(tmp_path / "s", make_net("resnet_bn")).state(), live.state())
