"""The training of DART's network, against a plain loop, and what it learns."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.calibration.same import same
from tests.calibration.trained import batches, trained
from tests.methods import slow
from tests.toys import CLASSES, make_batches, make_net
from twoshift.calibration import calibrate, calibration_of, crossfit, fit_dart, known_facts
from twoshift.calibration import dart as module
from twoshift.calibration.dart import _first_weights
from twoshift.calibration.facts import hand_out
from twoshift.data.stream import to_float
from twoshift.errors import BatchError, DataError, ModelError, SettingError
from twoshift.methods import Dart
from twoshift.train.adapter import source_images

SMALL = {"epochs": 2, "batches": 3, "batch_size": 8, "hidden": 6, "lr": 0.01}


def pairs(name="resnet_bn", images=40, seed=0):
    (x,) = make_batches(name, (images,), seed)
    return [*zip(x.split(10), (torch.arange(images) % CLASSES).split(10), strict=True)]


def slow_fit(net, images, seed, epochs, batches, batch_size, hidden, lr):
    """One batch at a time; the drawn rows are those of the same random generator."""
    x, y = (torch.cat(part) for part in zip(*images, strict=True))
    slow.batch_norms_in_training(net)
    rng, cpu = np.random.default_rng(seed), torch.device("cpu")
    members = [np.flatnonzero(y.numpy() == c) for c in range(CLASSES)]
    weights = _first_weights(CLASSES, hidden, seed, cpu)
    optimizer = slow.Adam(list(weights.values()), lr)

    def read(logits):
        p = logits.softmax(1)
        deviation = sum(-(row.log() / CLASSES).sum() for row in p) / len(p)
        inputs = torch.cat([p.mean(0), deviation[None]])
        units = torch.relu(weights["hidden_weight"] @ inputs + weights["hidden_bias"])
        out = weights["out_weight"] @ units + weights["out_bias"]
        return out[: CLASSES**2].reshape(CLASSES, CLASSES), out[CLASSES**2 :]

    usual = [rng.integers(len(y), size=batch_size) for _ in range(batches)]
    for _ in range(epochs):
        shares = [rng.dirichlet(np.full(CLASSES, 1.0)) for _ in range(batches)]
        rows = []
        for share in shares:
            drawn = rng.choice(CLASSES, batch_size, p=share)
            places = rng.integers([len(members[c]) for c in drawn])
            rows.append([members[c][i] for c, i in zip(drawn, places, strict=True)])
        for calm, shifted in zip(usual, rows, strict=True):
            with torch.no_grad():
                logits, usually = net(x[shifted]), net(x[calm])
            change, bias = read(logits)
            loss = F.cross_entropy(logits + logits @ change + bias, y[shifted])
            change, bias = read(usually)
            loss = loss + 0.1 * ((change**2).sum() + (bias**2).sum())
            optimizer.step(torch.autograd.grad(loss, list(weights.values())))
    return weights


def test_against_a_plain_loop():
    net = make_net("resnet_bn")
    before = {n: t.clone() for n, t in net.state_dict().items()}
    got = fit_dart(net, pairs(), seed=3, **SMALL)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    expected = slow_fit(net, pairs(), seed=3, **SMALL)
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-3, atol=1e-5)
    assert got["out_weight"].abs().max() > 0
    assert same(fit_dart(net, iter(pairs()), seed=3, **SMALL), got)
    assert not same(fit_dart(net, pairs(), seed=4, **SMALL), got)
    assert Dart(net, got)(make_batches("resnet_bn")[0]).isfinite().all()


def test_a_set_of_images_is_read_as_its_batches_are():
    known = trained("balanced_softmax")
    few = known.train.subset(np.arange(0, len(known.train), 5))
    images = [(to_float(few.images), torch.from_numpy(few.labels))]
    assert same(fit_dart(known.net, few, **SMALL), fit_dart(known.net, images, **SMALL))


def test_it_learns_to_undo_what_few_classes_do_to_batch_statistics():
    known = trained("balanced_softmax")
    steps = {"epochs": 4, "batches": 40, "hidden": 200, "lr": 5e-3, "concentration": 0.1}
    told = []
    fact = fit_dart(known.net, known.train, **steps, progress=lambda *d: told.append(d))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    shifted, usual = [], batches(known.held_out)
    for label in range(10):  # nine in ten images of a batch are of one class
        rng = np.random.default_rng(label)
        own, all_rows = np.flatnonzero(known.held_out.labels == label), len(known.held_out)
        rows = np.concatenate([rng.choice(own, 58), rng.integers(all_rows, size=6)])
        x, y = known.held_out.images[rows], known.held_out.labels[rows]
        shifted.append((to_float(x), torch.from_numpy(y)))

    def right(method, stream):
        return np.mean([float((method(x).argmax(1) == y).float().mean()) for x, y in stream])

    refined = Dart(known.net, fact)
    assert right(refined, shifted) > right(refined.inner, shifted) + 0.06
    assert right(refined, usual) > right(refined.inner, usual) - 0.05


def test_only_so_much_is_kept_in_memory(monkeypatch):
    images = pairs()
    monkeypatch.setattr(module, "BYTES", images[0][0].nbytes + 1)
    net = make_net("resnet_bn")
    assert same(fit_dart(net, images, **SMALL), fit_dart(net, images[:2], **SMALL))


def test_what_it_cannot_do_is_refused():
    net = make_net("resnet_bn")
    wrong = {"epochs": 0, "batches": 1.5, "batch_size": 1, "hidden": 0, "lr": 0, "pull": -1}
    for setting in ({name: value} for name, value in {**wrong, "concentration": 0}.items()):
        with pytest.raises(SettingError, match=next(iter(setting))):
            fit_dart(net, pairs(), **setting)
    with pytest.raises(BatchError, match="at least one"):
        fit_dart(net, [])
    with pytest.raises(DataError, match="none of class 4"):
        fit_dart(net, [(x[y < 4], y[y < 4]) for x, y in pairs()], **SMALL)
    with pytest.raises(ModelError, match="at most 100"):
        fit_dart(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 101)), pairs())
    with pytest.raises(ModelError, match="finite"):
        fit_dart(net, pairs(), **{**SMALL, "lr": 1e30})


@pytest.fixture
def quick(monkeypatch):
    """The same training, of a moment; returns how often it was started."""
    calls = []

    def fit(model, images, progress):
        calls.append(1)
        return fit_dart(model, images, **SMALL, progress=progress)

    monkeypatch.setattr("twoshift.calibration.facts.fit_dart", fit)
    return calls


def test_a_calibration_computes_it_on_demand_and_once(calibrated, quick, no_training):
    before, told = calibration_of(calibrated), []
    assert crossfit(calibrated, folds=before.folds).facts.keys() == before.facts.keys()
    assert not quick
    with pytest.raises(SettingError, match="dart of dart"):
        Dart(calibrated.model, **hand_out(known_facts(calibrated, "batch"), Dart))
    for _ in range(2):
        crossfit(calibrated, folds=before.folds, also=["dart"], progress=lambda *d: told.append(d))
    assert len(quick) == 1
    assert told == [(1, 2, "dart"), (2, 2, "dart")]
    after = calibration_of(calibrated)
    assert same({n: f for n, f in after.facts.items() if n != "dart"}, dict(before.facts))
    live = Dart(calibrated.model, **hand_out(known_facts(calibrated, "batch"), Dart))
    assert live(to_float(source_images(calibrated).images[:16])).isfinite().all()
    with pytest.raises(SettingError, match="also of a calibration"):
        crossfit(calibrated, also=["moments"])


def test_the_function_computes_it_on_demand(quick):
    known = trained("balanced_softmax")
    stream, options = batches(known.train), {"held_out": batches(known.held_out)}
    options |= {"source_prior": "uniform", "simulate": False}
    assert "dart" not in calibrate(known.net, stream, **options).facts
    told = []
    report = lambda done, total: told.append((done, total))  # noqa: E731
    facts = calibrate(known.net, stream, also="dart", progress=report, **options)
    assert told[-2:] == [(1, 2), (2, 2)]
    assert same(facts.facts["dart"], fit_dart(known.net, stream, **SMALL))
    with pytest.raises(SettingError, match="readable twice"):
        calibrate(known.net, iter(stream), also=["dart"], **options)


def test_it_is_saved_with_the_other_facts(quick, tmp_path):
    known = trained("balanced_softmax")
    options = {"source_prior": "uniform", "simulate": False, "also": ["dart"]}
    facts = calibrate(known.net, batches(known.held_out), **options)
    facts.save(tmp_path / "facts")
    assert same(type(facts).load(tmp_path / "facts").facts["dart"], facts.facts["dart"])
