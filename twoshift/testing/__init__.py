"""The contract of methods, to be checked by whoever writes one: ``check_method(MyMethod)``.

Needs no pytest. With it, every check on every case is a test of its own::

    @pytest.mark.parametrize("case", method_cases(MyMethod), ids=str)
    @pytest.mark.parametrize("check", method_checks(), ids=lambda check: check.__name__)
    def test_contract(check, case):
        check(case)
"""

from __future__ import annotations

from twoshift.testing._case import MethodCase
from twoshift.testing._compare import same, snapshot
from twoshift.testing.contract import CheckResult, check_method, method_cases, method_checks
from twoshift.testing.networks import (
    CLASSES,
    MLP,
    NETWORKS,
    make_adapter,
    make_batches,
    make_network,
    randomise,
)

__all__ = [
    "CLASSES",
    "MLP",
    "NETWORKS",
    "CheckResult",
    "MethodCase",
    "check_method",
    "make_adapter",
    "make_batches",
    "make_network",
    "method_cases",
    "method_checks",
    "randomise",
    "same",
    "snapshot",
]
