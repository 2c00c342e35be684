import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
)

from twoshift import metrics, priors
from twoshift.data.label_shift import wanted_counts
from twoshift.errors import BatchError, InputError, PriorError
from twoshift.metrics import Recorder

C = 7
COUNTS = [100, 10, 1000, 50, 5, 500, 250]
ORDER = [2, 5, 6, 0, 3, 1, 4]  # the classes by falling count, by eye


def sample(seed, n=200, classes=C, sharpness=2.0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    logits = sharpness * torch.randn(n, classes, generator=g)
    logits[torch.arange(n), labels] += 1.5
    return logits, labels


def slow_recall(predicted, labels, c):
    of_class = [p for p, y in zip(predicted, labels, strict=True) if y == c]
    return sum(p == c for p in of_class) / len(of_class) if of_class else None


def slow_mean(values):
    numbers = [v for v in values if v is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def slow_ece(probs, labels, bins=15):
    total = 0.0
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = [(max(p), p.index(max(p)) == y) for p, y in zip(probs, labels, strict=True)]
        inside = [(conf, right) for conf, right in inside if low < conf <= high]
        if inside:
            conf = math.fsum(c for c, _ in inside) / len(inside)
            acc = sum(right for _, right in inside) / len(inside)
            total += len(inside) / len(labels) * abs(acc - conf)
    return total


def slow_nll(logits, labels):
    terms = []
    for z, y in zip(logits, labels, strict=True):
        top = max(z)
        terms.append(top + math.log(math.fsum(math.exp(v - top) for v in z)) - z[y])
    return math.fsum(terms) / len(terms)


# -- predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_against_torchmetrics(seed):
    logits, labels = sample(seed)
    probs, predicted = logits.double().softmax(1), logits.argmax(1)
    assert metrics.accuracy(predicted, labels) == pytest.approx(
        float(multiclass_accuracy(predicted, labels, C, average="micro"))
    )
    assert metrics.balanced_accuracy(predicted, labels) == pytest.approx(
        float(multiclass_accuracy(predicted, labels, C, average="macro"))
    )
    assert metrics.ece(probs, labels) == pytest.approx(
        float(multiclass_calibration_error(probs, labels, C, n_bins=15, norm="l1")), abs=1e-6
    )


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 9), st.floats(0.1, 30))
def test_against_slow_loops(seed, n, classes, sharpness):
    logits, labels = sample(seed, n, classes, sharpness)
    probs, predicted = logits.double().softmax(1), logits.argmax(1)
    p, y = predicted.tolist(), labels.tolist()
    assert metrics.accuracy(predicted, labels) == pytest.approx(
        sum(a == b for a, b in zip(p, y, strict=True)) / n
    )
    assert metrics.balanced_accuracy(predicted, labels) == pytest.approx(
        slow_mean([slow_recall(p, y, c) for c in range(classes)])
    )
    assert metrics.ece(probs, labels) == pytest.approx(slow_ece(probs.tolist(), y), abs=1e-12)
    assert metrics.nll(logits, labels) == pytest.approx(slow_nll(logits.tolist(), y))


def test_arrays_and_lists_do_as_well_as_tensors():
    logits, labels = sample(0)
    predicted, probs = logits.argmax(1), logits.softmax(1)
    assert metrics.accuracy(predicted.numpy(), labels.tolist()) == metrics.accuracy(
        predicted, labels
    )
    assert metrics.ece(probs.numpy(), labels.numpy()) == metrics.ece(probs, labels)
    assert metrics.nll(logits.numpy(), labels.numpy()) == metrics.nll(logits, labels)


def test_balanced_accuracy_ignores_classes_that_do_not_occur():
    assert metrics.accuracy([0, 0, 0, 0], [0, 0, 0, 5]) == 0.75
    assert metrics.balanced_accuracy([0, 0, 0, 0], [0, 0, 0, 5]) == 0.5


def test_ece_of_known_cases():
    assert metrics.ece([[1.0, 0.0]] * 4, [0, 0, 0, 0]) == 0
    assert metrics.ece([[1.0, 0.0]] * 4, [1, 1, 1, 1]) == 1
    assert metrics.ece([[0.75, 0.25]] * 4, [0, 0, 0, 1]) == pytest.approx(0)
    assert metrics.ece([[0.5, 0.5], [1.0, 0.0]], [1, 0]) == pytest.approx(0.25)


def test_ece_bins_close_at_their_upper_edge():
    # 0.5 is the edge between two bins: apart from 0.75, together with 0.25
    probs = [[0.5, 0.3, 0.2], [0.75, 0.25, 0.0]]
    assert metrics.ece(probs, [0, 1], bins=2) == pytest.approx((0.5 + 0.75) / 2)
    assert metrics.ece(probs, [0, 1], bins=1) == pytest.approx(abs(0.5 - 0.625))


def test_nll_stays_finite_where_softmax_underflows():
    assert metrics.nll(torch.tensor([[1000.0, 0.0]]), torch.tensor([1])) == pytest.approx(1000)


def test_groups_are_thirds_by_training_rank():
    groups = metrics.class_groups(COUNTS)
    assert groups["head"].tolist() == ORDER[:3]
    assert groups["medium"].tolist() == ORDER[3:5]
    assert groups["tail"].tolist() == ORDER[5:]
    cifar10 = metrics.class_groups(1000 * priors.longtail(10, 100))
    assert [g.tolist() for g in cifar10.values()] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize("seed", range(5))
def test_recall_by_group_against_a_slow_loop(seed):
    logits, labels = sample(seed, n=12)
    predicted = logits.argmax(1)
    thirds = {"head": ORDER[:3], "medium": ORDER[3:5], "tail": ORDER[5:]}
    expected = {
        name: slow_mean([slow_recall(predicted.tolist(), labels.tolist(), c) for c in group])
        for name, group in thirds.items()
    }
    assert metrics.recall_by_group(predicted, labels, COUNTS) == pytest.approx(expected)


def test_a_group_without_labels_is_none():
    recall = metrics.recall_by_group([2, 0, 4], [2, 5, 2], COUNTS)
    assert recall == {"head": pytest.approx(0.25), "medium": None, "tail": None}
    assert metrics.recall_by_group([0, 0], [0, 1], [9, 1])["tail"] is None  # two classes only


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.accuracy([], []),
        lambda: metrics.accuracy([1, 2], [1]),
        lambda: metrics.accuracy([[1]], [[1]]),
        lambda: metrics.ece([[0.5, 0.5]], [0, 1]),
        lambda: metrics.ece([0.5, 0.5], [0, 1]),
        lambda: metrics.recall_by_group([0], [7], COUNTS),
        lambda: metrics.recall_by_group([0], [-1], COUNTS),
    ],
)
def test_refusals(call):
    with pytest.raises(InputError):
        call()


# -- label estimates ----------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 20))
def test_prior_error_against_a_slow_loop(seed, classes):
    rng = np.random.default_rng(seed)
    truth, estimate = rng.dirichlet(np.ones(classes), size=2)
    error = metrics.prior_error(torch.from_numpy(estimate), truth)
    assert error.l1 == pytest.approx(
        math.fsum(abs(a - b) for a, b in zip(estimate, truth, strict=True)), abs=1e-12
    )
    assert error.kl == pytest.approx(
        math.fsum(b * math.log(b / a) for a, b in zip(estimate, truth, strict=True)), abs=1e-6
    )
    assert metrics.prior_error(truth, truth) == (0, 0)


def test_prior_error_with_zeros():
    assert metrics.prior_error([0.5, 0.5], [1.0, 0.0]) == pytest.approx((1.0, math.log(2)))
    # the never predicted class costs much, yet JSON can hold it
    assert metrics.prior_error([1.0, 0.0], [0.5, 0.5]).kl == pytest.approx(
        0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-8)
    )
    with pytest.raises(PriorError, match="label estimate"):
        metrics.prior_error([0.5, 0.6], [0.5, 0.5])


@given(st.integers(0, 10**6))
def test_imbalance_against_a_slow_loop(seed):
    p = np.random.default_rng(seed).dirichlet(np.ones(C))
    s = math.fsum((1 - 2 * rank / (C - 1)) * p[c] for rank, c in enumerate(ORDER))
    assert metrics.imbalance(p, COUNTS) == pytest.approx(s)


@pytest.mark.parametrize(
    ("classes", "ratio", "pool", "s"),
    [
        (10, 100, None, 0.681),
        (100, 100, None, 0.595),
        (10, 50, 1000, 0.622),  # of the images really drawn: whole numbers cut the tail
        (100, 50, 100, 0.549),
    ],
)
def test_imbalance_of_the_usual_streams(classes, ratio, pool, s):
    counts = 1000 * priors.longtail(classes, 100)
    forward, backward = (priors.named(f"{d}-{ratio}", classes) for d in ("forward", "backward"))
    if pool:
        forward, backward = (
            priors.from_counts(wanted_counts(p, pool)) for p in (forward, backward)
        )
    assert metrics.imbalance(forward, counts) == pytest.approx(s, abs=6e-4)
    assert metrics.imbalance(backward, counts) == pytest.approx(-s, abs=6e-4)
    assert metrics.imbalance(priors.uniform(classes), counts) == pytest.approx(0, abs=1e-12)


def test_the_error_of_s_has_a_sign():
    head, tail = np.eye(C)[2], np.eye(C)[4]
    assert metrics.imbalance_error(head, tail, COUNTS) == pytest.approx(2)
    assert metrics.imbalance_error(tail, head, COUNTS) == pytest.approx(-2)


# -- intervals ----------------------------------------------------------------------------------


def test_bootstrap_against_a_slow_loop():
    values = [0.1, 0.5, 0.3, 0.9]
    rng = np.random.default_rng(7)
    means = sorted(
        math.fsum(values[int(i)] for i in rng.integers(4, size=4)) / 4 for _ in range(4000)
    )
    low, high = metrics.bootstrap_interval(values, level=0.9)
    assert low == pytest.approx(means[200], abs=0.03)
    assert high == pytest.approx(means[3800], abs=0.03)


def test_bootstrap_repeats_and_contains_the_mean():
    values = np.random.default_rng(0).normal(size=9)
    low, high = metrics.bootstrap_interval(values)
    assert (low, high) == metrics.bootstrap_interval(values)
    assert low < values.mean() < high
    narrow = metrics.bootstrap_interval(values, level=0.5)
    assert low < narrow[0] < narrow[1] < high
    assert metrics.bootstrap_interval([0.3, 0.3, 0.3]) == pytest.approx((0.3, 0.3))


def test_pairing_removes_what_the_streams_have_in_common():
    rng = np.random.default_rng(0)
    stream = rng.normal(0, 10, size=9)
    b = stream + rng.normal(0, 0.1, size=9)
    difference = metrics.paired_difference(stream + 1, b)
    assert difference.mean == pytest.approx((stream + 1 - b).mean())
    assert difference.low < difference.mean < difference.high
    assert difference.high - difference.low < 0.5
    back = metrics.paired_difference(b, stream + 1)
    assert back.mean == pytest.approx(-difference.mean)


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.bootstrap_interval([]),
        lambda: metrics.bootstrap_interval([0.5]),
        lambda: metrics.bootstrap_interval([0.5, math.nan]),
        lambda: metrics.bootstrap_interval([0.1, 0.2], level=1.0),
        lambda: metrics.paired_difference([1, 2], [1, 2, 3]),
    ],
)
def test_intervals_need_two_finite_values(call):
    with pytest.raises(InputError):
        call()


# -- recorder -----------------------------------------------------------------------------------

KEYS = {
    *("images", "batches", "accuracy", "balanced_accuracy"),
    *("head_recall", "medium_recall", "tail_recall", "ece", "nll"),
    *("prior_l1", "prior_kl", "prior_l1_mean", "prior_kl_mean", "s_error_final", "s_error_mean"),
    *("accuracy_first10", "accuracy_last10", "ms_per_batch_p50", "ms_per_batch_p95"),
}


def record(batches, estimates=None):
    recorder = Recorder(COUNTS)
    for i, (logits, labels) in enumerate(batches):
        recorder.update(
            logits, labels, None if estimates is None else estimates[i], 0.001 * (i + 1)
        )
    return recorder


@pytest.fixture(scope="module")
def batches():
    return [sample(seed, n=8 if seed < 24 else 3) for seed in range(25)]


@pytest.fixture(scope="module")
def estimates():
    rng = np.random.default_rng(0)
    return [torch.from_numpy(p).float() for p in rng.dirichlet(np.ones(C), size=25)]


def test_summary_equals_the_functions_on_everything_at_once(batches, estimates):
    summary = record(batches, estimates).summary()
    logits, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    predicted = logits.argmax(1)
    assert set(summary) == KEYS
    assert (summary["images"], summary["batches"]) == (24 * 8 + 3, 25)
    assert summary["accuracy"] == pytest.approx(metrics.accuracy(predicted, labels))
    assert summary["balanced_accuracy"] == pytest.approx(
        metrics.balanced_accuracy(predicted, labels)
    )
    groups = metrics.recall_by_group(predicted, labels, COUNTS)
    assert {k: summary[f"{k}_recall"] for k in groups} == pytest.approx(groups)
    assert summary["ece"] == pytest.approx(metrics.ece(logits.double().softmax(1), labels))
    assert summary["nll"] == pytest.approx(metrics.nll(logits, labels))


def test_estimates_are_held_against_the_realised_labels(batches, estimates):
    summary = record(batches, estimates).summary()
    labels = torch.cat([y for _, y in batches]).tolist()
    truth = [labels.count(c) / len(labels) for c in range(C)]
    errors = [metrics.prior_error(e, truth) for e in estimates]
    s_errors = [metrics.imbalance_error(e, truth, COUNTS) for e in estimates]
    assert summary["prior_l1"] == pytest.approx(errors[-1].l1)
    assert summary["prior_kl"] == pytest.approx(errors[-1].kl)
    assert summary["prior_l1_mean"] == pytest.approx(sum(e.l1 for e in errors) / 25)
    assert summary["prior_kl_mean"] == pytest.approx(sum(e.kl for e in errors) / 25)
    assert summary["s_error_final"] == pytest.approx(s_errors[-1])
    assert summary["s_error_mean"] == pytest.approx(sum(s_errors) / 25)


def test_both_ends_and_the_time(batches):
    summary = record(batches).summary()

    def over(part):
        right = [bool(r) for z, y in part for r in z.argmax(1) == y]
        return sum(right) / len(right)

    assert summary["accuracy_first10"] == pytest.approx(over(batches[:10]))
    assert summary["accuracy_last10"] == pytest.approx(over(batches[15:]))
    assert summary["ms_per_batch_p50"] == pytest.approx(13)
    assert summary["ms_per_batch_p95"] == pytest.approx(23.8)


def test_without_estimates_there_is_nothing_to_compare(batches):
    recorder = record(batches)
    summary = recorder.summary()
    assert set(summary) == KEYS
    assert all((summary[k] is None) == k.startswith(("prior_", "s_")) for k in KEYS)
    assert recorder.trace()["prior"] == recorder.trace()["s"] == []


def test_a_stream_shorter_than_an_edge(batches):
    summary = record(batches[:3]).summary()
    assert summary["accuracy_first10"] == summary["accuracy_last10"] == summary["accuracy"]


def test_trace_has_one_entry_per_batch(batches, estimates):
    trace = record(batches, estimates).trace()
    assert [len(trace[k]) for k in ("accuracy", "prior", "s")] == [25, 25, 25]
    for i, (logits, labels) in enumerate(batches):
        assert trace["accuracy"][i] == pytest.approx(
            float((logits.argmax(1) == labels).float().mean())
        )
        assert trace["prior"][i] == pytest.approx(estimates[i].tolist(), abs=1e-6)
        assert trace["s"][i] == pytest.approx(metrics.imbalance(estimates[i], COUNTS))


def test_everything_is_json(batches, estimates):
    for recorder in (record(batches, estimates), record(batches)):
        text = json.dumps([recorder.summary(), recorder.trace()], allow_nan=False)
        assert json.loads(text) == [recorder.summary(), recorder.trace()]


def test_a_recorder_keeps_nothing_that_can_change(batches, estimates):
    logits, labels = (t.clone() for t in batches[0])
    estimate = estimates[0].clone()
    recorder = Recorder(COUNTS)
    recorder.update(logits.requires_grad_(), labels, estimate)
    before = recorder.summary(), recorder.trace()
    labels.zero_()
    estimate.zero_()
    with torch.no_grad():
        logits.zero_()
    assert (recorder.summary(), recorder.trace()) == before


def test_bad_batches_are_refused_and_not_counted(batches, estimates):
    logits, labels = batches[0]
    recorder = record(batches[:2])
    before = recorder.summary()
    for bad in (logits[:, :-1], logits[:-1], logits[0], torch.full_like(logits, torch.nan)):
        with pytest.raises(BatchError, match="logits"):
            recorder.update(bad, labels)
    with pytest.raises(BatchError, match="logits"):
        recorder.update(logits[:0], labels[:0])
    with pytest.raises(InputError, match="every batch or with none"):
        recorder.update(logits, labels, estimates[0])
    assert recorder.summary() == before
    with pytest.raises(PriorError):
        Recorder(COUNTS).update(logits, labels, torch.ones(C))
    with pytest.raises(InputError, match="at least one batch"):
        Recorder(COUNTS).summary()


def test_few_seeds_get_students_interval():
    values = [0.1, 0.4, 0.7]
    low, high = metrics.mean_interval(values)
    reach = 4.302652729696142 * 0.3 / math.sqrt(3)  # the 97.5 % quantile of t with 2 degrees
    assert (low, high) == pytest.approx((0.4 - reach, 0.4 + reach))
    many = list(np.linspace(0, 1, 12))
    assert metrics.mean_interval(many) == metrics.bootstrap_interval(many)
    with pytest.raises(InputError):
        metrics.mean_interval([0.5])


def test_an_interval_over_three_seeds_is_seldom_wrong():
    rng = np.random.default_rng(0)
    intervals = [metrics.mean_interval(rng.normal(size=3)) for _ in range(400)]
    wrong = sum(not low <= 0 <= high for low, high in intervals)
    assert wrong / 400 < 0.09  # 5 % in truth; a bootstrap is wrong one time in four
