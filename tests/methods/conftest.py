"""The fixture over every method x network x adapter on/off."""

import pytest

from tests.methods.cases import PARAMS


@pytest.fixture(params=PARAMS)
def case(request):
    return request.param
