"""The fixture over every method x network x adapter on/off."""

import pytest

from tests.methods.cases import CASES


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0]}-{c[1]}-{'adapter' if c[2] else 'plain'}")
def case(request):
    return request.param
