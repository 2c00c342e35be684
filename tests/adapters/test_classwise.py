"""The classwise adapter against its formula by loops; logit adjustment when fresh."""

import pytest
import torch

from tests.adapters import slow
from tests.adapters.slow import PRIOR, C, D
from tests.toys import randomise
from twoshift.adapters import ClasswiseAdapter, shifted_logits
from twoshift.errors import PriorError, SettingError

COUNTS, SHARES = [8, 4, 2, 1], [0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize("dw", ["class", "none"])
@pytest.mark.parametrize("assumes", [None, SHARES])
@pytest.mark.parametrize("counts", [None, COUNTS])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_the_formula(dw, assumes, counts, bias):
    adapter = randomise(ClasswiseAdapter(D, C, class_counts=counts, assumes=assumes, dw=dw))
    h, weight = torch.randn(3, D), torch.randn(C, D)
    own_bias = torch.randn(C) if bias else None
    with torch.no_grad():
        logits = shifted_logits(h, weight, own_bias, adapter(PRIOR))
    expected = slow.classwise_logits(adapter, PRIOR, h, weight, own_bias)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("assumes", [None, SHARES])
def test_a_fresh_one_is_logit_adjustment(assumes):
    h, weight, bias = torch.randn(5, D), torch.randn(C, D), torch.randn(C)
    shift = ClasswiseAdapter(D, C, class_counts=COUNTS, assumes=assumes)(PRIOR)
    assumed = torch.full((C,), 1 / C) if assumes is None else torch.tensor(assumes)
    with torch.no_grad():
        logits = shifted_logits(h, weight, bias, shift)
    torch.testing.assert_close(logits, h @ weight.T + bias + PRIOR.log() - assumed.log())


@pytest.mark.parametrize("dw", ["class", "none"])
def test_it_treats_all_classes_alike(dw):
    """Permuted priors and counts give permuted shifts."""
    order = [2, 0, 3, 1]
    adapter = randomise(ClasswiseAdapter(D, C, class_counts=COUNTS, dw=dw))
    other = ClasswiseAdapter(D, C, class_counts=[COUNTS[i] for i in order], dw=dw)
    other.head_net.load_state_dict(adapter.head_net.state_dict())
    with torch.no_grad():
        one, two = adapter(PRIOR), other(PRIOR[order])
    torch.testing.assert_close(two.bias, one.bias[order])
    if dw == "class":
        torch.testing.assert_close(two.weight[0], one.weight[0][order])


def test_a_share_of_zero_is_not_infinite():
    adapter = randomise(ClasswiseAdapter(D, C, class_counts=[9, 3, 1, 0], assumes=SHARES))
    assert adapter(torch.tensor([1.0, 0, 0, 0])).bias.isfinite().all()


@pytest.mark.parametrize("assumes", [None, SHARES])
def test_unbiased_removes_what_the_logits_contain(assumes):
    raw = torch.randn(3, C)
    expected = raw if assumes is None else raw - torch.tensor(SHARES).log()
    torch.testing.assert_close(ClasswiseAdapter(D, C, assumes=assumes).unbiased(raw), expected)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dw": "full"}, SettingError, "dw of the adapter, must be one of 'class', 'none'"),
        ({"assumes": [0.5, 0.5]}, PriorError, "assumes of the adapter, must be of length 4"),
        ({"class_counts": [1, 2]}, SettingError, "class_counts, must be of length 4"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        ClasswiseAdapter(D, C, **settings)
