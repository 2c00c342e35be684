"""The fixture over every method x network x adapter on/off."""

import pytest

from tests.methods.cases import CASES

SLOW = ("resnet_stem",)  # larger images, and the kinds of layers that resnet_bn has
PARAMS = [pytest.param(c, marks=pytest.mark.slow if c[1] in SLOW else ()) for c in CASES]


@pytest.fixture(params=PARAMS, ids=lambda c: f"{c[0]}-{c[1]}-{'adapter' if c[2] else 'plain'}")
def case(request):
    return request.param
