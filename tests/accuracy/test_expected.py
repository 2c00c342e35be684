"""The expected accuracy of a stream: exact posteriors, forgetting, and states."""

import math

import pytest
import torch

from tests.toys import same
from twoshift.accuracy import Expected, ExpectedAccuracy, read_signals, signals_of
from twoshift.accuracy.expected import HALF_LIFE
from twoshift.errors import MismatchError, SettingError

CLASSES = 5
# by calibrated confidence alone; errors of 5 points; a threshold
CONFIDENCE = torch.tensor([[1.0, 0, 0, 0, 0, -0.05, 0.05, 0.6]] * 3)


def posteriors(prior, images=3000, seed=0):
    """Exact posteriors of Gaussian classes, and the true classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = 1.5 * torch.eye(CLASSES)
    prior = torch.tensor(prior)
    y = torch.multinomial(prior, images, replacement=True, generator=generator)
    x = centres[y] + torch.randn(images, CLASSES, generator=generator)
    logits = -(x[:, None] - centres).square().sum(2) / 2 + prior.log()
    return logits.softmax(1), y


@pytest.mark.parametrize(
    "prior", [[0.2] * 5, [0.6, 0.2, 0.1, 0.06, 0.04], [0.01, 0.01, 0.01, 0.01, 0.96]]
)
def test_exact_posteriors_are_right_as_often_as_they_are_sure(prior):
    probs, y = posteriors(prior)
    live, last = ExpectedAccuracy(CLASSES, CONFIDENCE), 600
    for part in probs.split(50):
        live.update(part, 0)
    expected = live.read()
    assert abs(expected.value - float((probs.argmax(1) == y).float().mean())) < 0.03
    assert abs(expected.value - float((probs.argmax(1) == y)[-last:].float().mean())) < 0.05
    assert expected.high - expected.low == pytest.approx(0.1) or expected.high == 1


def test_older_batches_count_less():
    live, total = ExpectedAccuracy(CLASSES, CONFIDENCE), torch.zeros(4 + CLASSES).double()
    for part in posteriors([0.2] * 5, 300)[0].split([1, 64, 35, 100, 100]):
        live.update(part, 1)
        total = 0.5 ** (len(part) / HALF_LIFE) * total + signals_of(part, 0.6)
    assert live.read().value == pytest.approx(float(read_signals(total)[0]))


@pytest.mark.parametrize("sizes", [[1], [16, 16], [64] * 4, [64] * 20])
def test_the_interval_is_wider_while_few_images_were_seen(sizes):
    judge = CONFIDENCE.clone()
    judge[:, 4:7] = torch.tensor([-0.3, -0.01, 0.02])  # far from 0 and 1
    live, seen = ExpectedAccuracy(CLASSES, judge), 0.0
    for part in posteriors([0.2] * 5, sum(sizes))[0].split(sizes):
        live.update(part, 0)
        seen = seen * 2 ** (-len(part) / 256) + len(part)
    wider = math.sqrt(256 / seen) if seen < 256 else 1.0
    assert (wider == 1) == (len(sizes) == 20)
    expected = live.read()
    assert expected.low == pytest.approx(max(expected.value - 0.01 * wider, 0))
    assert expected.high == pytest.approx(expected.value + 0.02 * wider)


def test_another_view_starts_anew():
    judge = CONFIDENCE.clone()
    judge[1, 4] = 0.1
    live = ExpectedAccuracy(CLASSES, judge)
    first, second = posteriors([0.2] * 5, 80)[0].split(40)
    live.update(first, 0)
    live.update(second, 1)
    assert live.read().value == pytest.approx(float(second.amax(1).mean()) + 0.1)


def test_before_the_first_batch_nothing_is_known():
    assert ExpectedAccuracy(CLASSES, CONFIDENCE).read() is None


def test_it_is_a_share():
    judge = CONFIDENCE.clone()
    judge[:, 4] = 5.0
    live = ExpectedAccuracy(CLASSES, judge)
    live.update(torch.eye(CLASSES), 0)
    assert live.read() == (1, 1, 1)
    assert str(Expected(0.5, 0.25, 0.875)) == "50.0% (25.0% to 87.5%)"


def test_the_order_of_classes_does_not_matter():
    judge = torch.tensor([[0.5, -0.2, 0.2, 0.1, 0.1, -0.1, 0.1, 0.6]] * 3)
    probs, order = posteriors([0.6, 0.2, 0.1, 0.06, 0.04])[0], torch.tensor([3, 0, 4, 2, 1])
    one, other = ExpectedAccuracy(CLASSES, judge), ExpectedAccuracy(CLASSES, judge)
    one.update(probs, 2)
    other.update(probs[:, order], 2)
    assert one.read() == pytest.approx(other.read())


def test_a_state_goes_on_exactly():
    live, other = (ExpectedAccuracy(CLASSES, CONFIDENCE) for _ in range(2))
    first, second = posteriors([0.2] * 5, 80)[0].split(40)
    live.update(first, 2)
    state = live.state()
    other.check_state(state)
    other.hold(state)
    for one in (live, other):
        one.update(second, 2)
    assert other.read() == live.read()
    assert same(other.state(), live.state())
    live.hold(live.start())
    assert live.read() is None


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"sums": torch.zeros(9)},
        {"sums": torch.zeros(9), "view": torch.zeros(()), "more": torch.zeros(())},
        {"sums": torch.zeros(8), "view": torch.zeros(())},
        {"sums": torch.full((9,), torch.nan), "view": torch.zeros(())},
        {"sums": torch.full((9,), -1.0), "view": torch.zeros(())},
        {"sums": torch.zeros(9), "view": torch.zeros(1)},
        {"sums": torch.zeros(9), "view": torch.tensor(3.0)},
        {"sums": torch.zeros(9), "view": torch.tensor(0.5)},
        {"sums": torch.zeros(9), "view": torch.tensor(torch.nan)},
        {"sums": torch.zeros(9), "view": torch.tensor(-1)},
        {"sums": torch.zeros(9, dtype=torch.complex64), "view": torch.zeros(())},
        {"sums": torch.zeros(9).to_sparse(), "view": torch.zeros(())},
        {"sums": [0.0] * 9, "view": torch.zeros(())},
        {"sums": torch.zeros(9), "view": 0},
    ],
)
def test_a_strange_state_is_refused(wrong):
    with pytest.raises(MismatchError, match="of the accuracy"):
        ExpectedAccuracy(CLASSES, CONFIDENCE).check_state(wrong)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(8), torch.zeros(3, 7), torch.zeros(2, 8), torch.full((3, 8), torch.inf)]
)
def test_other_judges_are_refused(wrong):
    with pytest.raises(SettingError, match="accuracy_judge"):
        ExpectedAccuracy(CLASSES, wrong)
