import copy
import inspect
import pickle
import re

import pytest

from twoshift import errors
from twoshift.errors import TwoshiftError

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, TwoshiftError)
]


def drawn_tree() -> dict[str, str | None]:
    """Class -> parent, read from the drawing in the module's docstring."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        entry = re.match(r"^([│├└─ ]*)([A-Z]\w+)(\s{2,}.*)?$", line)
        if not entry:
            continue
        depth = len(entry[1]) // 4
        path[depth:] = [entry[2]]
        parents[entry[2]] = path[depth - 1] if depth else None
    return parents


def test_the_drawing_is_the_tree():
    real = {
        kind.__name__: next(
            (b.__name__ for b in kind.__bases__ if issubclass(b, TwoshiftError)), None
        )
        for kind in KINDS
    }
    assert drawn_tree() == real
    assert len(real) > 10


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_message_survives_pickling_and_copying(kind):
    error = kind("alpha of ema", must_be="positive", got=-1, cure="Choose another.")
    assert str(error) == "alpha of ema, must be positive, got -1. Choose another."
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert str(twin) == str(error)
        assert (twin.what, twin.must_be, twin.got, twin.cure) == (
            "alpha of ema",
            "positive",
            -1,
            "Choose another.",
        )


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_kind_has_a_docstring_and_is_caught_at_the_root(kind):
    assert "__doc__" in vars(kind)
    assert kind.__doc__
    with pytest.raises(TwoshiftError, match=r"^broken$"):
        raise kind("broken")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.SettingError, ValueError),
        (errors.PriorError, ValueError),
        (errors.BatchError, ValueError),
        (errors.UnknownName, KeyError),
        (errors.DataMissing, FileNotFoundError),
        (errors.MissingExtra, ImportError),
    ],
)
def test_builtin_handlers_catch_them_too(kind, builtin):
    with pytest.raises(builtin, match="what"):
        raise kind("what")


def test_falsy_values_are_shown():
    assert str(TwoshiftError("n", must_be="positive", got=0)) == "n, must be positive, got 0"
