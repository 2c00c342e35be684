"""What every registered estimator promises."""

import json
import operator

import pytest
import torch

from twoshift import estimators
from twoshift.errors import BatchError, MismatchError, SettingError, UnknownName
from twoshift.estimators import PriorEstimator, create
from twoshift.storage import read_tensors, write_tensors

C = 6
TRUE = [0.5, 0.2, 0.1, 0.1, 0.05, 0.05]
SETTINGS = {"oracle": [{"prior": TRUE}], "fixed": [{}, {"prior": TRUE}]}
SETTINGS["batch_oracle"] = [{"batch_priors": [TRUE, TRUE[::-1]]}]
CONFUSION = (torch.eye(C).mul(4) + 1).div(10 * C).tolist()
SETTINGS["bbse"] = [{"confusion": CONFUSION}, {"confusion": CONFUSION, "hard": True, "window": 10}]
SETTINGS["bbse"] += [{"confusion": CONFUSION, "hard": True, "hard_confusion": CONFUSION}]
SETTINGS["rlls"] = [{"confusion": CONFUSION, "samples": 100}]
SETTINGS["em"] = [{}, {"model_prior": TRUE, "window": 10}, {"temperature": 2, "bias": [*range(C)]}]
SETTINGS["mapls"] = [{}, {"source_prior": TRUE, "window": 10}, {"weight": 0.5, "bias": [*range(C)]}]
SETTINGS["fmapls"] = [{}, {"model_prior": TRUE, "window": 10}, {"temperature": 2}]
SETTINGS["online_fmapls"] = [{}, {"model_prior": TRUE, "softness": 1}, {"bias": [*range(C)]}]
SETTINGS["ema"] = [{}, {"alpha": 0.3}, {"top_k": 2}, {"bias_correction": True}]
SETTINGS["decayed_counts"] = [{}, {"half_life": 3, "pseudo_count": 0.1}]
SETTINGS["paced"] = [{}, {"relative": True}, {"assumes": TRUE}, {"temperature": 2}]
SETTINGS["tilt"] = [{"source_prior": TRUE}, {"source_prior": TRUE, "temperature": 2, "window": 10}]
READOUT = torch.cat([torch.zeros(1, C), torch.eye(C), 0.1 * torch.eye(C)]).tolist()
SETTINGS["readout"] = [{"regression": READOUT}, {"regression": READOUT, "window": 10}]
CASES = [(name, s) for name in estimators.estimators for s in SETTINGS.get(name, [{}])]


def batches(n=5, size=7, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(size, C, generator=g).mul(3).softmax(1) for _ in range(n)]


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0]}-{'-'.join(c[1]) or 'default'}")
def estimator(request):
    name, settings = request.param
    return create(name, C, **settings)


def name_of(estimator):
    return estimators.estimators.name_of(type(estimator))


def is_distribution(prior):
    return bool((prior >= 0).all()) and abs(float(prior.double().sum()) - 1) < 1e-5


def test_the_estimate_is_a_distribution_at_every_moment(estimator):
    assert isinstance(estimator, PriorEstimator)
    assert estimator.prior.dtype == torch.float32
    for probs in [None, *batches()]:
        if probs is not None:
            estimator.update(probs)
        for prior in (estimator.prior, estimator.present):
            assert prior.shape == (C,)
            assert is_distribution(prior)
        assert estimator.counts_batch or torch.equal(estimator.present, estimator.prior)


def test_an_estimate_once_taken_does_not_change(estimator):
    before, copy = estimator.prior, estimator.prior.clone()
    for probs in batches():
        estimator.update(probs)
    assert torch.equal(before, copy)


def test_writing_into_the_estimate_does_not_reach_the_state(estimator):
    twin = create(name_of(estimator), **estimator.settings())
    estimator.prior.zero_()
    estimator.present.zero_()
    estimator.state().popitem()[1].zero_()
    for e in (estimator, twin):
        e.update(batches()[0])
    assert torch.equal(estimator.prior, twin.prior)
    estimator.prior.zero_()
    estimator.reset()
    assert is_distribution(estimator.prior)


def test_reset_is_exact(estimator):
    def run():
        seen = [estimator.prior]
        for probs in batches():
            estimator.update(probs)
            seen.append(estimator.prior)
        return torch.stack(seen)

    first = run()
    estimator.reset()
    assert torch.equal(run(), first)


def test_saved_and_loaded_it_goes_on_bit_for_bit(estimator, tmp_path):
    first, second = batches()[:3], batches()[3:]
    for probs in first:
        estimator.update(probs)
    write_tensors(tmp_path / "e.safetensors", estimator.state())
    twin = create(name_of(estimator), **estimator.settings())
    twin.load_state(read_tensors(tmp_path / "e.safetensors"))
    assert torch.equal(twin.prior, estimator.prior)
    for probs in second:
        for e in (estimator, twin):
            e.update(probs)
        assert torch.equal(twin.prior, estimator.prior)
        assert torch.equal(twin.present, estimator.present)
    assert all(torch.equal(v, twin.state()[k]) for k, v in estimator.state().items())


def test_a_loaded_state_is_a_copy(estimator):
    estimator.update(batches()[0])
    saved = estimator.state()
    estimator.load_state(saved)
    before = estimator.prior.clone()
    for v in saved.values():
        v.zero_()
    estimator.load_state(estimator.state())
    assert torch.equal(estimator.prior, before)


@pytest.mark.parametrize(
    "bad",
    [
        torch.full((4, C + 1), 1 / (C + 1)),
        torch.full((C,), 1 / C),
        torch.empty(0, C),
        torch.full((4, C), torch.nan),
        torch.full((4, C), torch.inf),
        torch.cat([torch.full((3, C), 1 / C), torch.full((1, C), torch.nan)]),
        torch.randn(4, C, generator=torch.Generator().manual_seed(0)),
        torch.ones(4, C),
        torch.tensor([[1.5, -0.5, 0, 0, 0, 0]]),
        torch.ones(4, C, dtype=torch.int64),
    ],
    ids=[
        "wide",
        "vector",
        "empty",
        "nan",
        "inf",
        "one-nan",
        "logits",
        "ones",
        "negative",
        "integer",
    ],
)
def test_a_refused_batch_changes_nothing(estimator, bad):
    estimator.update(batches()[0])
    state, prior = estimator.state(), estimator.prior.clone()
    with pytest.raises(BatchError, match="predicted probabilities"):
        estimator.update(bad)
    assert torch.equal(estimator.prior, prior)
    assert all(torch.equal(v, estimator.state()[k]) for k, v in state.items())


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "type", "nan"])
def test_a_foreign_state_is_refused_and_changes_nothing(estimator, change):
    estimator.update(batches()[0])
    prior = estimator.prior.clone()
    state = estimator.state()
    name = sorted(state)[0]
    if change == "missing":
        del state[name]
    elif change == "extra":
        state["more"] = torch.zeros(1)
    elif change == "shape":
        state[name] = torch.zeros(C + 1)
    elif change == "type":
        state[name] = state[name].double()
    else:
        state[name] = torch.full_like(state[name], torch.nan)
    with pytest.raises(MismatchError, match="state of"):
        estimator.load_state(state)
    assert torch.equal(estimator.prior, prior)


def test_no_gradient_flows_and_the_batch_is_untouched(estimator):
    logits = torch.randn(5, C, requires_grad=True)
    probs = logits.softmax(1)
    before = probs.detach().clone()
    estimator.update(probs)
    assert not estimator.prior.requires_grad
    assert not any(v.requires_grad for v in estimator.state().values())
    assert torch.equal(probs, before)
    probs.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_taken(estimator, dtype):
    twin = create(name_of(estimator), **estimator.settings())
    estimator.update(batches()[0].to(dtype))
    twin.update(batches()[0])
    assert estimator.prior.dtype == torch.float32
    torch.testing.assert_close(estimator.prior, twin.prior, atol=4e-3, rtol=0)


def test_an_estimate_made_under_inference_mode_can_be_trained_through(estimator):
    with torch.inference_mode():
        estimator.reset()
        estimator.update(torch.randn(5, C).softmax(1))
    weight = torch.ones(C, requires_grad=True)
    (weight * estimator.prior).sum().backward()
    torch.testing.assert_close(weight.grad, estimator.prior)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_the_device_follows_the_batch(estimator):
    for device in ("cuda", "cpu"):
        estimator.update(batches()[0].to(device))
        assert estimator.prior.device.type == device


def test_settings_are_the_constructors_arguments(estimator):
    settings = estimator.settings()
    assert settings["classes"] == C
    twin = create(name_of(estimator), **settings)
    for name, value in twin.settings().items():
        same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        assert same(value, settings[name]), name
    assert torch.equal(twin.prior, estimator.prior)
    plain = {k: v for k, v in settings.items() if not isinstance(v, torch.Tensor)}
    json.dumps(plain, allow_nan=False)  # what is not a tensor goes into a card


def test_settings_that_are_tensors_are_copies(estimator):
    """Facts of a source model are handed to several estimators: none may change another."""
    shared = {k: v.clone() for k, v in estimator.settings().items() if isinstance(v, torch.Tensor)}
    one = create(name_of(estimator), **{**estimator.settings(), **shared})
    for tensor in shared.values():
        tensor.zero_()
    for e in (estimator, one):
        e.reset()
        e.update(batches()[0])
    assert torch.equal(one.prior, estimator.prior)


def test_only_oracles_say_so(estimator):
    assert estimator.is_oracle == (name_of(estimator) in ("oracle", "batch_oracle"))


def test_the_names():
    assert list(estimators.estimators) == [
        "batch_oracle",
        "bbse",
        "decayed_counts",
        "em",
        "ema",
        "fixed",
        "fmapls",
        "mapls",
        "online_fmapls",
        "oracle",
        "paced",
        "readout",
        "rlls",
        "tilt",
    ]
    kinds = [estimators.estimators[name] for name in estimators.estimators]
    assert all(hasattr(estimators, kind.__name__) for kind in kinds)


def test_unknown_names_and_settings_are_refused_with_a_hint():
    with pytest.raises(UnknownName, match="Did you mean 'ema'"):
        create("emma", C)
    with pytest.raises(SettingError, match="Did you mean 'alpha'"):
        create("ema", C, alpa=0.2)


@pytest.mark.parametrize("classes", [0, -1])
def test_classes_must_be_positive(classes):
    with pytest.raises(SettingError, match="classes"):
        create("ema", classes)
