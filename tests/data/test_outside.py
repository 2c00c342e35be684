"""Images for choosing settings: outside the training subset, except for its largest class."""

import numpy as np
import pytest

from tests.bench.test_six_benchmarks import tiny_cifar
from twoshift.data import cifar, load, outside
from twoshift.data.long_tail import long_tailed_indices
from twoshift.errors import SettingError


def test_images_are_outside_the_long_tailed_subset(tmp_path, monkeypatch):
    tiny_cifar(cifar.CIFAR10, tmp_path, monkeypatch, per_class=20)  # 100 per class in five files
    monkeypatch.setattr(outside, "CIFAR10", cifar.CIFAR10)
    full = load("cifar10", "train", tmp_path)
    training = set(map(bytes, full.images[long_tailed_indices(full.labels, 100)]))
    data = outside._outside(cifar.CIFAR10, "test", tmp_path, 20)
    assert data.counts.tolist() == [20] * 10
    is_training = np.array([bytes(image) in training for image in data.images])
    assert is_training[data.labels == 0].all()
    assert not is_training[data.labels > 1].any()
    assert "and inside of it for airplane" in data.origin
    assert len({bytes(image) for image in data.images}) == 200


def test_they_cannot_be_trained_on(tmp_path):
    with pytest.raises(SettingError, match="must be 'test'"):
        load("cifar10_outside", "train", tmp_path)
