import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.estimators.gaussians import SOURCE, TARGET, batches, draw, error, joint, one_hot
from twoshift.errors import SettingError
from twoshift.estimators import BBSE

HELD_OUT, LABELS = draw(SOURCE, 200_000, 0)
SOFT, HARD = joint(HELD_OUT, LABELS), joint(one_hot(HELD_OUT), LABELS)


def reference(rows, confusion):
    """w = C^-1 mu by Cramer's rule, q = w * pi_s."""
    mu = [sum(row[c] for row in rows) / len(rows) for c in range(4)]
    q = []
    for c in range(4):
        replaced = confusion.copy()
        replaced[:, c] = mu
        w = np.linalg.det(replaced) / np.linalg.det(confusion)
        q.append(max(w, 0) * confusion[:, c].sum())
    return np.array(q) / sum(q)


@pytest.mark.parametrize("hard", [False, True])
def test_every_estimate_is_that_of_the_window(hard):
    probs = draw(TARGET, 200, 1)[0]
    confusion = HARD if hard else SOFT
    bbse = BBSE(4, confusion, hard=hard, window=60)
    for i, batch in enumerate(batches(probs, 20), 1):
        bbse.update(torch.tensor(batch))
        rows = (one_hot(probs) if hard else probs)[: 20 * i][-60:].tolist()
        np.testing.assert_allclose(bbse.prior, reference(rows, confusion), atol=1e-5)


@pytest.mark.parametrize("hard", [False, True])
def test_the_prior_of_a_simulated_stream_is_found(hard):
    bbse = BBSE(4, HARD if hard else SOFT, hard=hard, window=8192)
    for batch in batches(draw(TARGET, 8192, 2)[0]):
        bbse.update(torch.tensor(batch))
    assert error(bbse) < 0.1


def test_the_source_itself_is_no_shift():
    bbse = BBSE(4, SOFT, window=len(LABELS))
    bbse.update(torch.tensor(HELD_OUT))
    np.testing.assert_allclose(bbse.prior, np.bincount(LABELS) / len(LABELS), atol=1e-5)


def test_classes_that_look_the_same_share_evenly():
    """A singular matrix: the last two classes are told apart by nothing."""
    given_class = np.array([[0.9, 0.1, 0.1], [0.05, 0.45, 0.45], [0.05, 0.45, 0.45]])
    confusion = given_class * [0.6, 0.3, 0.1]
    bbse = BBSE(3, confusion, window=100)
    bbse.update(torch.tensor(np.tile(given_class @ [0.2, 0.5, 0.3], (10, 1))))
    np.testing.assert_allclose(bbse.prior, [0.2, 0.4, 0.4], atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_it_is_always_a_distribution(classes, n, hard, degenerate, seed):
    rng = np.random.default_rng(seed)
    confusion = rng.dirichlet(np.full(classes**2, 0.2)).reshape(classes, classes)
    if degenerate:  # everything is predicted as one class
        confusion[:] = 0
        confusion[rng.integers(classes)] = 1 / classes
    confusion = np.maximum(confusion, 0 if degenerate else 1e-9)
    bbse = BBSE(classes, confusion / confusion.sum(), hard=hard, window=7)
    for _ in range(3):
        bbse.update(torch.eye(classes)[torch.from_numpy(rng.integers(classes, size=n))])
        assert bbse.prior.isfinite().all()
        assert (bbse.prior >= 0).all()
        assert abs(float(bbse.prior.double().sum()) - 1) < 1e-5


@pytest.mark.parametrize(
    "confusion",
    [
        np.eye(3) / 3,
        np.eye(4),
        np.full((4, 4), np.nan),
        np.eye(4) / 4 + [[0.1, -0.1, 0, 0]] + 0,
        np.diag([0.5, 0.5, 0, 0]),
        "none",
        [[1.0], [1.0, 2.0]],
    ],
    ids=["shape", "conditional", "nan", "negative", "absent", "text", "ragged"],
)
def test_what_is_no_confusion_matrix_is_refused(confusion):
    with pytest.raises(SettingError, match="confusion"):
        BBSE(4, confusion)


def test_a_tensor_is_taken_and_may_change_later():
    confusion = torch.tensor(SOFT)
    bbse = BBSE(4, confusion)
    confusion.zero_()
    assert bbse.confusion.tolist() == SOFT.tolist()


def test_most_likely_classes_are_explained_by_their_own_confusion():
    """A calibration knows both matrices and hands out both."""
    probs = torch.tensor(draw(TARGET, 500, 3)[0])
    for hard, matrix in ((False, SOFT), (True, HARD)):
        both, one = BBSE(4, SOFT, hard, hard_confusion=HARD), BBSE(4, matrix, hard)
        for bbse in (both, one):
            bbse.update(probs)
        assert torch.equal(both.prior, one.prior)
    with pytest.raises(SettingError, match="confusion"):
        BBSE(4, SOFT, hard_confusion=np.eye(3) / 3)


def test_the_window_must_hold_something():
    with pytest.raises(SettingError, match="window"):
        BBSE(4, SOFT, window=0)


@pytest.mark.slow
@pytest.mark.parametrize("hard", [False, True])
def test_quapy_agrees(hard):
    functional = pytest.importorskip("quapy.functional")
    from quapy.method.aggregative import ACC, PACC

    probs = draw(TARGET, 500, 3)[0]
    if hard:
        rates = ACC.getPteCondEstim(range(4), LABELS, HELD_OUT.argmax(1))
        mean = one_hot(probs).mean(0)
    else:
        rates = PACC.getPteCondEstim(range(4), LABELS, HELD_OUT)
        mean = probs.mean(0)
    solution = ACC.solve_adjustment(rates, mean, method="inversion", solver="exact-raise")
    bbse = BBSE(4, HARD if hard else SOFT, hard=hard, window=500)
    bbse.update(torch.tensor(probs))
    expected = functional.normalize_prevalence(solution, method="clip")
    np.testing.assert_allclose(bbse.prior, expected, atol=1e-5)
