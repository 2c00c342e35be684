import numpy as np
import pytest
import torch

from twoshift.errors import PriorError
from twoshift.estimators import Fixed, Oracle, create

TRUE = [0.7, 0.2, 0.1]


@pytest.mark.parametrize("kind", [Fixed, Oracle])
@pytest.mark.parametrize(
    "given",
    [TRUE, np.array(TRUE), torch.tensor(TRUE), torch.tensor(TRUE, requires_grad=True)],
    ids=["list", "array", "tensor", "parameter"],
)
def test_it_never_moves(kind, given):
    estimator = kind(3, given)
    for _ in range(5):
        estimator.update(torch.tensor([[0.0, 0.0, 1.0]]))
        torch.testing.assert_close(estimator.prior, torch.tensor(TRUE))
        assert not estimator.prior.requires_grad


def test_the_given_array_can_change_later():
    given = np.array(TRUE)
    estimator = Fixed(3, given)
    given[:] = 0
    estimator.reset()
    torch.testing.assert_close(estimator.prior, torch.tensor(TRUE))


def test_fixed_is_uniform_unless_told_and_no_oracle():
    assert Fixed(4).prior.tolist() == [0.25] * 4
    assert not Fixed(3, TRUE).is_oracle
    assert Oracle(3, TRUE).is_oracle


def test_an_oracle_must_be_told():
    with pytest.raises(PriorError, match="prior of oracle"):
        create("oracle", 3, prior=None)


@pytest.mark.parametrize("kind", [Fixed, Oracle])
@pytest.mark.parametrize("bad", [[0.5, 0.5], [0.5, 0.4, 0.3], [1.5, -0.5, 0], [float("nan")] * 3])
def test_what_is_no_distribution_is_refused(kind, bad):
    with pytest.raises(PriorError):
        kind(3, bad)
