"""The judge of views: what it promises, and when it leaves one view for another."""

import pytest
import torch

from twoshift.accuracy import VIEWS, ViewJudge, read_signals, signals_of
from twoshift.accuracy.views import FAVOUR, LEAST, MARGIN
from twoshift.errors import SettingError

MATCHED, PLAIN, SOURCE = range(3)


def offsets(*values):
    """A judge that reads nothing but which view it is."""
    return ViewJudge(torch.tensor([0.0, 0.0, 0.0, *values]))


def sums(*images, classes=4):
    """Sums of views that saw so many images."""
    one = signals_of(torch.full((1, classes), 1 / classes))
    return torch.stack([n * one[0] * one for n in images])


def test_it_promises_a_weighted_sum_of_signals():
    generator = torch.Generator().manual_seed(0)
    views = torch.stack(
        [signals_of(torch.randn(9, 5, generator=generator).softmax(1)) for _ in VIEWS]
    )
    weights = [0.5, -0.3, 0.2, 0.1, 0.4, 0.7]
    for view, promised in enumerate(ViewJudge(torch.tensor(weights)).expected(views).tolist()):
        confidence, entropy, _, diversity = read_signals(views[view]).tolist()
        expected = 0.5 * confidence - 0.3 * entropy + 0.2 * diversity + weights[3 + view]
        assert promised == pytest.approx(expected)


@pytest.mark.parametrize("more", [-1e-3, 1e-3])
def test_a_view_is_left_for_one_that_promises_more_by_a_margin(more):
    enough = sums(LEAST, LEAST, LEAST)
    better = offsets(-1.0, 0.0, MARGIN + more)
    assert better.choose(PLAIN, enough, enough) == (SOURCE if more > 0 else PLAIN)
    assert better.choose(SOURCE, enough, enough) == SOURCE


@pytest.mark.parametrize("more", [-1e-3, 1e-3])
def test_the_first_view_is_favoured(more):
    enough = sums(LEAST, LEAST, LEAST)
    judge = offsets(0.0, MARGIN + FAVOUR + more, -1.0)
    assert judge.choose(MATCHED, enough, enough) == (PLAIN if more > 0 else MATCHED)
    back = offsets(MARGIN - FAVOUR + more, 0.0, -1.0)
    assert back.choose(PLAIN, enough, enough) == (MATCHED if more > 0 else PLAIN)


def test_views_of_few_images_say_nothing():
    judge, few = offsets(0.0, 1.0, 2.0), LEAST - 1
    for images, chosen in (
        ((0, LEAST, few), PLAIN),
        ((0, few, few), MATCHED),
        ((0, LEAST, LEAST), SOURCE),
        ((0, 0, 0), MATCHED),
    ):
        seen = sums(*images)
        assert judge.choose(MATCHED, seen, seen) == chosen


def test_views_are_compared_on_the_same_images():
    judge = ViewJudge(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    hard, easy = (LEAST * signals_of(torch.tensor([[p, 1 - p]])) for p in (0.6, 0.9))
    others = torch.stack([torch.zeros_like(hard), hard, easy])
    # the view in use is as sure on the same images, so neither is better
    assert judge.choose(MATCHED, others, others) == MATCHED
    same = torch.stack([torch.zeros_like(hard), hard, hard])
    assert judge.choose(MATCHED, others, same) == SOURCE


@pytest.mark.parametrize("wrong", [torch.zeros(5), torch.zeros(1, 6), torch.full((6,), torch.nan)])
def test_other_weights_are_refused(wrong):
    with pytest.raises(SettingError, match="view_judge"):
        ViewJudge(wrong)
