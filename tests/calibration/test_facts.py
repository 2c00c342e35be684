"""Every fact against plain loops, and the rule by which facts are handed out."""

import copy
import inspect
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import nn

from tests.calibration.same import same
from tests.train import toy
from twoshift import adapters, estimators, methods
from twoshift.calibration import Predictions, calibration_from, hand_out
from twoshift.calibration._windows import SIZE, WINDOWS, draw_windows
from twoshift.calibration.facts import (
    FROM_CARD,
    FROM_IMAGES,
    FROM_PREDICTIONS,
    FROM_SHIFTS,
    ON_DEMAND,
    fact,
    fact_names,
    fisher,
    moments,
)
from twoshift.data.stream import to_float
from twoshift.errors import BatchError, DataError, ModelError, SettingError
from twoshift.estimators import BBSE, EM, EMA, RLLS, Readout, Tilt
from twoshift.estimators.readout import fit_readout
from twoshift.methods import CoTTA
from twoshift.train.adapter import source_images

CLASSES, IMAGES = 3, 60


def noisy_logits(images=IMAGES, classes=CLASSES, seed=0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    return torch.randn(images, classes, generator=g) + 2 * torch.eye(classes)[labels], labels


@pytest.fixture(scope="module")
def facts():
    return calibration_from(*noisy_logits())


@pytest.fixture(scope="module")
def rows():
    """The probabilities of every image, with its label, without tensors."""
    logits, labels = noisy_logits()
    return [
        (np.exp(row) / np.exp(row).sum(), label)
        for row, label in zip(logits.double().numpy(), labels.tolist(), strict=True)
    ]


def test_confusions_are_counted_image_by_image(facts, rows):
    soft, hard = np.zeros((CLASSES, CLASSES)), np.zeros((CLASSES, CLASSES))
    for probs, label in rows:
        soft[:, label] += probs / IMAGES
        hard[probs.argmax(), label] += 1 / IMAGES
    np.testing.assert_allclose(facts["confusion"], soft, atol=1e-7)
    np.testing.assert_allclose(facts["hard_confusion"], hard, atol=1e-7)


def test_accuracies_are_counted_image_by_image(facts, rows):
    correct = [[] for _ in range(CLASSES)]
    for probs, label in rows:
        correct[label].append(probs.argmax() == label)
    assert facts["accuracy"] == pytest.approx(np.mean([*itertools.chain(*correct)]))
    assert facts["balanced_accuracy"] == pytest.approx(np.mean([np.mean(c) for c in correct]))
    assert facts["samples"] == IMAGES


def test_balanced_accuracy_weighs_classes_equally():
    logits = torch.tensor([[2.0, 0], [2, 0], [2, 0], [2, 0], [0, 2], [2, 0]])
    facts = calibration_from(logits, torch.tensor([0, 0, 0, 0, 1, 1]))
    assert facts["accuracy"] == pytest.approx(5 / 6)
    assert facts["balanced_accuracy"] == pytest.approx(3 / 4)


def test_temperature_and_bias_are_the_likeliest(facts):
    logits, labels = noisy_logits()
    z, y = logits.double().numpy(), labels.numpy()
    log_prior = np.log(np.bincount(y) / len(y))

    def likelihood(x):
        """Negative; x is the temperature and all biases but the last, which makes the sum 0."""
        scores = z / x[0] + np.append(x[1:], -x[1:].sum()) + log_prior
        return -np.mean([s[k] - np.log(np.exp(s).sum()) for s, k in zip(scores, y, strict=True)])

    best = minimize(likelihood, [1.0, 0, 0], method="Nelder-Mead", tol=1e-12).x
    assert facts["temperature"] == pytest.approx(best[0], rel=1e-3)
    assert facts["bias"].tolist() == pytest.approx([*best[1:], -best[1:].sum()], abs=1e-3)
    assert facts["bias"].dtype == torch.float64


def test_the_threshold_is_a_margin_below_the_least_sure_images(facts, rows):
    confidence = sorted(probs.max() for probs, _ in rows)  # 5 % of 59 gaps is 2.95
    low = 0.05 * confidence[2] + 0.95 * confidence[3]
    assert facts["confidence_threshold"] == pytest.approx(low - 0.05)


def test_the_threshold_is_not_negative():
    logits, labels = noisy_logits(images=100, classes=50)
    assert calibration_from(logits * 0, labels)["confidence_threshold"] == 0


def test_the_regression_is_fitted_to_shifted_windows(facts, rows):
    labels = np.array([label for _, label in rows])
    means, shares = [], []
    for window in draw_windows(labels, CLASSES, WINDOWS, rng=np.random.default_rng(0)):
        mean, count = np.zeros(CLASSES), np.zeros(CLASSES)
        for row in window:
            probs, label = rows[row]
            mean += probs / SIZE
            count[label] += 1
        means.append(mean)
        shares.append(count / SIZE)
    expected = fit_readout(np.array(means), np.array(shares))
    torch.testing.assert_close(facts["regression"], expected, atol=1e-4, rtol=1e-4)


def test_or_to_windows_of_the_callers(facts):
    rng = np.random.default_rng(0)
    shares = torch.from_numpy(rng.dirichlet(np.ones(CLASSES), 30))
    windows = (0.5 * shares + 0.5 / CLASSES, shares)
    other = calibration_from(*noisy_logits(), windows)
    assert torch.equal(other["regression"], fit_readout(*(w.numpy() for w in windows)))
    assert same({**other, "regression": 0}, {**facts, "regression": 0})


@pytest.mark.parametrize("shapes", [[(5, 3), (4, 3)], [(5, 2), (5, 2)], [(5,), (5,)]])
def test_windows_of_other_shapes_are_refused(shapes):
    with pytest.raises(BatchError, match=r"windows to calibrate on.*both \(windows, 3\)"):
        calibration_from(*noisy_logits(), tuple(torch.zeros(shape) for shape in shapes))


def test_it_does_not_matter_how_labels_and_logits_are_stored(facts):
    logits, labels = noisy_logits()
    other = calibration_from(logits.double().requires_grad_(), labels.to(torch.uint8))
    assert same(other, facts)


@pytest.mark.parametrize(
    ("logits", "labels", "error"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=int), BatchError),
        (torch.zeros(4, 2), torch.zeros(3, dtype=int), BatchError),
        (torch.zeros(0, 2), torch.zeros(0, dtype=int), BatchError),
        (torch.full((2, 2), torch.nan), torch.arange(2), BatchError),
        (torch.zeros(4, 2), torch.zeros(4, dtype=int), DataError),
        (torch.zeros(3, 2), torch.arange(3), DataError),
        (torch.zeros(3, 2), torch.arange(3) - 1, DataError),
        (torch.zeros(3, 2), torch.tensor([0, 0.5, 1]), DataError),
    ],
    ids=["vector", "lengths", "empty", "nan", "absent", "too many", "negative", "fraction"],
)
def test_what_cannot_be_calibrated_on_is_refused(logits, labels, error):
    with pytest.raises(error, match="to calibrate on"):
        calibration_from(logits, labels)


@pytest.mark.parametrize(
    ("strategy", "contains"),
    [
        ("cross_entropy", True),
        ("balanced_softmax", False),
        ("balanced_sampling", False),
        ("classifier_retraining", False),
    ],
)
def test_what_a_card_says(source, strategy, contains):
    card = copy.copy(source.card)
    object.__setattr__(card, "strategy", strategy)
    facts = {name: read(card) for name, read in FROM_CARD.items()}
    shares = [count / sum(toy.COUNTS) for count in toy.COUNTS]
    assert facts["class_counts"] == toy.COUNTS
    assert facts["source_prior"] == pytest.approx(shares)
    assert facts["assumes"] == (pytest.approx(shares) if contains else None)


def test_the_fisher_information_is_the_mean_square_gradient(source):
    images = source_images(source)
    order = np.random.default_rng(0).permutation(len(images))
    model = copy.deepcopy(source.model)
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for layer in layers:
        layer.train()
        layer.momentum = 0
    total = {}
    batches = [order[:64], order[64:128], order[128:]]  # 212 images; the last 20 are not alone
    for batch in batches:
        model.zero_grad()
        logits = model(to_float(images.images[batch]))
        F.cross_entropy(logits, logits.detach().argmax(1)).backward()
        for name, parameter in model.named_parameters():
            if name.startswith(("body.1.", "body.4.")):
                total[name] = total.get(name, 0) + parameter.grad.square() / len(batches)
    computed = fisher(source.model, images)
    assert computed.keys() == total.keys()
    for name, expected in total.items():
        torch.testing.assert_close(computed[name], expected)


def test_moments_are_those_before_every_batch_normalisation(source):
    images = source_images(source)
    labels = torch.from_numpy(images.labels)
    body, computed = source.model.body, moments(source.model, images)
    assert computed.keys() == {"body.1", "body.4"}
    with torch.no_grad():
        x = source.model.normalize(to_float(images.images))
        for end, name in ((1, "body.1"), (4, "body.4")):
            inputs = body[:end](x)
            for c in range(toy.CLASSES):
                pixels = inputs[labels == c].transpose(0, 1).flatten(1)
                expected = torch.stack([pixels.mean(1), pixels.var(1, correction=0)])
                torch.testing.assert_close(computed[name][:, c], expected, atol=1e-4, rtol=1e-4)


def test_a_network_without_batch_normalisation_has_no_moments(source):
    with pytest.raises(ModelError):
        moments(toy.ToyNet(norm="gn"), source_images(source))


def test_every_fact_says_what_it_is_and_is_defined_once():
    tables = (FROM_CARD, FROM_PREDICTIONS, FROM_IMAGES, FROM_SHIFTS, ON_DEMAND)
    assert len(fact_names()) == sum(map(len, tables))
    for table in tables:
        assert all(inspect.getdoc(function) for function in table.values())
    for table in tables:
        with pytest.raises(ValueError, match="'bias' is defined twice"):
            fact(table)(FROM_PREDICTIONS["bias"])


class Machine:
    """Names two facts, of which it needs one."""

    def __init__(self, classes, temperature, window=5, moments=None):
        self.arguments = (classes, temperature, window, moments)


def test_facts_are_handed_out_by_the_names_of_parameters():
    known = {"temperature": 2.0, "moments": {}, "bias": [1.0], "window": 7, "classes": 9}
    arguments = hand_out(known, Machine)
    assert arguments == {"temperature": 2.0, "moments": {}}  # window and classes are no facts
    assert Machine(3, **arguments).arguments == (3, 2.0, 5, {})


def test_chosen_settings_go_before_facts_and_stay_as_they_are():
    chosen = {"temperature": 3.0, "window": 1, "other": None}
    arguments = hand_out({"temperature": 2.0, "moments": {}}, Machine, chosen)
    assert arguments == {"temperature": 3.0, "window": 1, "other": None, "moments": {}}
    assert chosen == {"temperature": 3.0, "window": 1, "other": None}
    assert hand_out({}, Machine, {"temperature": None}) == {"temperature": None}  # a choice, too


def test_a_fact_that_the_model_does_not_have_is_not_handed_out():
    assert hand_out({"temperature": 2.0, "moments": None}, Machine) == {"temperature": 2.0}


@pytest.mark.parametrize("known", [{}, {"temperature": None}])
def test_a_needed_fact_that_is_not_known_is_an_error_with_the_cure(known):
    with pytest.raises(SettingError) as error:
        hand_out(known, Machine)
    assert str(error.value) == (
        "'temperature' of the source model, which Machine needs, must be known. "
        "Calibrate the model: twoshift calibrate --source DIR. Or pass temperature=..."
    )


def test_no_calibration_computes_what_is_on_the_card(facts):
    with pytest.raises(SettingError, match=r"'source_prior' .* must be known\. Pass source_prior="):
        hand_out(facts, Tilt)
    assert set(hand_out(facts, Tilt, {"source_prior": [0.5, 0.3, 0.2]})) == {
        "source_prior",
        "temperature",
        "bias",
    }


def test_a_default_is_no_substitute_where_calibration_is_asked_for():
    assert hand_out({}, EM) == {}
    with pytest.raises(SettingError, match=r"'temperature' .* twoshift calibrate"):
        hand_out({}, EM, calibrated=True)
    with pytest.raises(SettingError, match=r"'bias' .* twoshift calibrate"):
        hand_out({"temperature": 2.0}, EM, calibrated=True)
    assert hand_out({}, EMA, calibrated=True) == {}
    chosen = {"temperature": 2.0, "bias": None}
    assert hand_out({}, EM, chosen, calibrated=True) == chosen


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        (EM, {"temperature", "bias"}),
        (BBSE, {"confusion", "hard_confusion"}),
        (RLLS, {"confusion", "hard_confusion", "samples"}),
        (Readout, {"regression"}),
        (EMA, set()),
        (CoTTA, {"confidence_threshold"}),
        (adapters.CalibratedAdapter, {"temperature"}),
        (adapters.LogitAdapter, set()),
    ],
)
def test_who_gets_what(facts, entry, names):
    arguments = hand_out(facts, entry)
    assert set(arguments) == names
    assert all(arguments[name] is facts[name] for name in names)


@pytest.mark.parametrize("name", list(estimators.estimators))
def test_estimators_work_with_the_facts_they_get(facts, name):
    chosen = {
        "oracle": {"prior": [0.2, 0.3, 0.5]},
        "batch_oracle": {"batch_priors": [[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]},
        "tilt": {"source_prior": [0.5, 0.3, 0.2]},
    }.get(name, {})
    entry = estimators.estimators[name]
    arguments = hand_out(facts, entry, chosen, calibrated=True)
    estimator = estimators.create(name, CLASSES, **arguments)
    estimator.update(noisy_logits()[0].softmax(1))
    assert float(estimator.prior.sum()) == pytest.approx(1)
    # an estimator that models the source head must know it
    assert (arguments.keys() > chosen.keys()) == entry.reads_unadjusted


@pytest.mark.parametrize("registry", [methods.methods, estimators.estimators, adapters.adapters])
def test_a_parameter_with_the_name_of_a_fact_means_the_fact(registry):
    """All parameters that facts are handed to: a new one is either meant, or needs another name."""
    named = {
        "cotta": {"confidence_threshold"},
        "dart": {"dart", "fisher", "moments", "confidence_threshold"},  # of the method it refines
        "eata": {"fisher"},
        "hybrid_ttn": {"moments"},
        "matched": {"moments"},
        "streamed": {"moments"},
        "em": {"temperature", "bias"},
        "fmapls": {"temperature", "bias"},
        "mapls": {"temperature", "bias", "source_prior"},
        "online_fmapls": {"temperature", "bias"},
        "paced": {"temperature", "bias", "assumes"},
        "tilt": {"temperature", "bias", "source_prior"},
        "bbse": {"confusion", "hard_confusion"},
        "rlls": {"confusion", "hard_confusion", "samples"},
        "readout": {"regression"},
        "calibrated": {"class_counts", "assumes", "temperature"},
        "classwise": {"class_counts", "assumes"},
        "identity": {"class_counts"},
        "label_shift": {"class_counts"},
        "logit": {"class_counts", "assumes"},
    }
    for name in registry:
        parameters = inspect.signature(registry[name]).parameters.keys()
        assert parameters & fact_names() == named.get(name, set()), name


def test_predictions_are_fitted_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "twoshift.calibration.facts.fit_bcts", lambda *_: calls.append(1) or (math.e, None)
    )
    predictions = Predictions(*noisy_logits())
    assert FROM_PREDICTIONS["temperature"](predictions) == math.e
    assert FROM_PREDICTIONS["bias"](predictions) is None
    assert calls == [1]
