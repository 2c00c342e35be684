"""Images to choose settings on: none that the source model was trained on, but where it must be."""

import numpy as np
import pytest

from tests.bench.test_six_benchmarks import tiny_cifar
from twoshift.data import cifar, load, outside
from twoshift.data.long_tail import long_tailed_indices
from twoshift.errors import SettingError


def test_they_are_outside_of_the_subset(tmp_path, monkeypatch):
    tiny_cifar(cifar.CIFAR10, tmp_path, monkeypatch, per_class=20)  # 100 of a class in five files
    monkeypatch.setattr(outside, "CIFAR10", cifar.CIFAR10)
    full = load("cifar10", "train", tmp_path)
    used = set(map(bytes, full.images[long_tailed_indices(full.labels, 100)]))
    found = outside._outside(cifar.CIFAR10, "test", tmp_path, 20)
    assert found.counts.tolist() == [20] * 10
    own = np.array([bytes(image) in used for image in found.images])
    assert own[found.labels == 0].all()
    assert not own[found.labels > 1].any()
    assert "in part the model's own of airplane" in found.origin
    assert len({bytes(image) for image in found.images}) == 200


def test_nobody_trains_on_them(tmp_path):
    with pytest.raises(SettingError, match="give it away"):
        load("cifar10_outside", "train", tmp_path)
