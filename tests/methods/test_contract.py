"""What every registered method promises, on every kind of network, with and without an adapter."""

import itertools

import pytest

from tests.methods.cases import INCOMPATIBLE, PARAMS
from tests.toys import NETS, make_net
from twoshift.errors import ModelError
from twoshift.methods import create, methods
from twoshift.testing import method_checks, same


def _pairs():
    """Every check on every case; a check of the adapter only where there is one."""
    for check, param in itertools.product(method_checks(), PARAMS):
        if check.__name__ != "check_adapter_stays" or param.values[0].adapter is not None:
            name = check.__name__.removeprefix("check_")
            yield pytest.param(check, *param.values, id=f"{name}-{param.id}", marks=param.marks)


@pytest.mark.parametrize(("check", "case"), list(_pairs()))
def test_contract(check, case):
    check(case)


def test_what_adapts_does_move(case):
    """Otherwise the checks would prove nothing."""
    if case.build().optimizer is not None or case.adapter is not None:
        assert not any(same(a, b) for a, b in itertools.pairwise(case.reference.states))


@pytest.mark.parametrize(("method", "net"), INCOMPATIBLE)
def test_incompatible_pairs_are_refused(method, net):
    with pytest.raises(ModelError, match=r"normalisation layers|IABN layers"):
        create(method, make_net(net))


def test_the_incompatible_pairs_exist():
    assert all(method in methods and net in NETS for method, net in INCOMPATIBLE)
