"""Decayed counts against counting image by image."""

import pytest
import torch

from twoshift.errors import SettingError
from twoshift.estimators import create

C = 4


def rows(n, seed=0):
    return torch.randn(n, C, generator=torch.Generator().manual_seed(seed)).mul(2).softmax(1)


@pytest.mark.parametrize("sizes", [[5], [3, 1, 8, 2], [1] * 10])
def test_every_image_counts_by_its_age(sizes):
    estimator = create("decayed_counts", C, half_life=6, pseudo_count=0.5)
    batches = [rows(n, seed) for seed, n in enumerate(sizes)]
    for batch in batches:
        estimator.update(batch)
    counts, later = [0.5] * C, 0
    for batch in reversed(batches):  # images of a batch are of one age
        for row in batch.tolist():
            for c in range(C):
                counts[c] += row[c] * 0.5 ** (later / 6)
        later += len(batch)
    expected = torch.tensor(counts) / sum(counts)
    torch.testing.assert_close(estimator.prior, expected)


def test_nothing_is_left_of_the_start():
    estimator = create("decayed_counts", C, half_life=1e9, pseudo_count=1e-6)
    batch = rows(64)
    estimator.update(batch)
    torch.testing.assert_close(estimator.prior, batch.mean(0))


def test_batches_of_any_size_forget_at_the_same_pace():
    whole, halves = (create("decayed_counts", 2, half_life=10) for _ in range(2))
    old, new = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    for estimator in (whole, halves):
        estimator.update(old.repeat(40, 1))
    whole.update(new.repeat(20, 1))
    for _ in range(2):
        halves.update(new.repeat(10, 1))
    # the old counts faded alike; of the new ones the first half has faded a little
    assert abs(float(whole.state()["counts"][0]) - float(halves.state()["counts"][0])) < 1e-5


def test_no_class_is_ever_impossible():
    estimator = create("decayed_counts", C)
    for _ in range(100):
        estimator.update(torch.eye(C)[:1].repeat(64, 1))
    assert float(estimator.prior.min()) > 1e-4


@pytest.mark.parametrize(
    "wrong", [{"half_life": 0}, {"pseudo_count": 0}, {"half_life": float("inf")}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(SettingError):
        create("decayed_counts", C, **wrong)
