"""The oracle that is told the labels of every batch."""

import numpy as np
import pytest
import torch

from twoshift.data import load
from twoshift.data.stream import Stream
from twoshift.errors import PriorError
from twoshift.estimators import BatchOracle

TOLD = [[1.0, 0.0], [0.25, 0.75]]
BATCH = torch.tensor([[0.5, 0.5]])


def test_it_tells_the_labels_of_the_batch_just_taken_in():
    oracle = BatchOracle(2, TOLD)
    assert oracle.counts_batch
    for expected in (TOLD[0], TOLD[1], TOLD[1]):  # the last one stays
        oracle.update(BATCH)
        assert oracle.present.tolist() == expected
    oracle.reset()
    oracle.update(BATCH)
    assert oracle.present.tolist() == TOLD[0]


@pytest.mark.parametrize("wrong", [[], [0.5, 0.5], [[0.5, 0.6]], [[0.5, 0.25, 0.25]]])
def test_what_it_is_told_must_be_distributions(wrong):
    with pytest.raises(PriorError):
        BatchOracle(2, wrong)


def test_a_stream_knows_the_labels_of_its_batches():
    stream = Stream(load("digits8x8", "test"), batch_size=32, order="bursts-0.1")
    rows = [np.bincount(batch.y, minlength=10) / len(batch.y) for batch in stream]
    assert np.allclose(stream.batch_priors, rows)
