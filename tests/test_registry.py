import math
import sys

import numpy as np
import pytest

from twoshift.errors import SettingError, UnknownName
from twoshift.registry import (
    RANGES,
    Registry,
    check_choice,
    check_numbers,
    check_settings,
    did_you_mean,
    documented,
    near_miss,
    signature_settings,
)


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A package on disk with two entries in two modules; yields the name of the package."""
    package = tmp_path / "toyroom"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text(
        "from twoshift.registry import Registry\ntoys = Registry('toy', 'toyroom')\n"
    )
    for name in ("ball", "kite"):
        (package / f"{name}.py").write_text(
            f"from toyroom.base import toys\n"
            f"@toys.register('{name}')\n"
            f"class Toy:\n"
            f"    '''A {name}.\n\n    More.\n    '''\n"
            f"    def __init__(self, owner, size=1):\n"
            f"        self.owner, self.size = owner, size\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    yield "toyroom"
    for module in [m for m in sys.modules if m.partition(".")[0] == "toyroom"]:
        del sys.modules[module]


@pytest.fixture
def toys(room):
    from toyroom.base import toys

    return toys


def test_entries_are_found_only_when_asked(toys):
    assert "toyroom.kite" not in sys.modules
    assert list(toys) == ["ball", "kite"]
    assert "toyroom.kite" in sys.modules


def test_lookup_description_and_name(toys):
    assert "ball" in toys
    assert "boat" not in toys
    assert toys.describe("kite") == "A kite."
    assert toys.name_of(toys["kite"]) == "kite"
    with pytest.raises(UnknownName, match="not a registered toy"):
        toys.name_of(int)


def test_unknown_name_proposes_the_nearest(toys):
    with pytest.raises(UnknownName) as caught:
        toys["kit"]
    assert str(caught.value) == "unknown toy 'kit'. Did you mean 'kite'? Known: ball, kite."


def test_create_passes_arguments_and_refuses_unknown_settings(toys):
    toy = toys.create("ball", "Ann", size=3)
    assert (toy.owner, toy.size) == ("Ann", 3)
    with pytest.raises(SettingError, match=r"toy 'ball' has no setting 'siz'. Did you mean 'size'"):
        toys.create("ball", "Ann", siz=3)


def test_an_entry_may_ask_the_registry_while_it_is_imported(room, toys):
    base = sys.modules["toyroom.base"]
    path = base.__file__.replace("base.py", "asking.py")
    with open(path, "w") as f:
        f.write("from toyroom.base import toys\nknown = list(toys)\n")
    assert list(toys) == ["ball", "kite"]


@pytest.mark.parametrize("name", ["Ball", "two words", "", "a/b"])
def test_bad_names_are_refused(name):
    with pytest.raises(ValueError, match="lower case"):
        Registry("toy", "json").register(name)


@pytest.mark.parametrize("name", ["ball", "cifar10-c", "top_k", "3d"])
def test_good_names_are_taken(name):
    registry = Registry("toy", "json")

    @registry.register(name)
    def entry():
        """An entry."""

    assert registry[name] is entry


def test_a_name_is_registered_once():
    registry = Registry("toy", "json")

    @registry.register("ball")
    def first():
        """An entry."""

    with pytest.raises(ValueError, match="twice"):
        registry.register("ball")
    assert registry["ball"] is first


def test_an_entry_needs_a_docstring():
    registry = Registry("toy", "json")
    with pytest.raises(ValueError, match="needs a docstring"):

        @registry.register("ball")
        def entry():
            pass

    assert "ball" not in registry


def test_settings_are_the_parameters_with_defaults():
    def entry(model, lr=0.1, *, steps=1):
        """An entry."""

    assert signature_settings(entry) == {"lr": 0.1, "steps": 1}
    check_settings("entry", entry, {"lr": 1, "model": None})
    with pytest.raises(SettingError, match="Known: lr, steps"):
        check_settings("entry", entry, {"momentum": 1})


def test_an_entry_with_open_keywords_takes_any_setting():
    def entry(**anything):
        """An entry."""

    check_settings("entry", entry, {"momentum": 1})


def test_near_miss_without_anything_near():
    assert near_miss("zzz", ["b", "a"]) == "Known: a, b."


ALLOWED = {
    "from 0 to 1": {0, 0.5, 1},
    "at least 0": {0, 0.5, 1, 2, math.inf},
    "at least 0 and finite": {0, 0.5, 1, 2},
    "at least 1": {1, 2, math.inf},
    "at least 3": {math.inf},
    "above 0": {0.5, 1, 2, math.inf},
    "above 0, at most 1": {0.5, 1},
    "above 0 and finite": {0.5, 1, 2},
    "a whole number from 0": {0, 1, 2},
    "a whole number from 1": {1, 2},
    "a whole number from 2": {2},
}


@pytest.mark.parametrize("must_be", RANGES)
def test_numbers_out_of_range_are_refused(must_be):
    for value in (-math.inf, -1, 0, 0.5, 1, 2, math.inf, math.nan, None, "1", [1]):
        if isinstance(value, int | float) and value in ALLOWED[must_be]:
            check_numbers("toy", must_be, size=value)
        else:
            with pytest.raises(SettingError, match=f"^size of toy, must be {must_be}, got"):
                check_numbers("toy", must_be, weight=max(ALLOWED[must_be]), size=value)


def test_numbers_of_numpy_are_numbers():
    check_numbers("toy", "from 0 to 1", size=np.float32(0.5), weight=np.int64(1))


def test_a_choice_is_one_of_those_listed():
    check_choice("toy", ("red", None), colour="red", lining=None)
    with pytest.raises(SettingError, match=r"colour of toy, must be one of 'red', None, got 'blu'"):
        check_choice("toy", ("red", None), lining=None, colour="blu")


def test_a_hint_is_the_nearest_name_however_it_is_spelt():
    known = ["tent", "gaussian_noise", "JPEG"]
    assert did_you_mean("tnet", known) == "Did you mean 'tent'?"
    assert did_you_mean("TENT", known) == "Did you mean 'tent'?"
    assert did_you_mean("jpg", known) == "Did you mean 'JPEG'?"
    assert did_you_mean("gauss", known) == "Did you mean 'gaussian_noise'?"
    assert did_you_mean("zzz", known) == ""
    assert did_you_mean("", known) == ""
    assert near_miss("zzz", ["b", "a", "b"]) == "Known: a, b."


def test_a_choice_that_is_nearly_right_is_named():
    with pytest.raises(SettingError, match=r"got 'adma'. Did you mean 'adam'\?"):
        check_choice("x", ("adam", "sgd"), optim="adma")
    with pytest.raises(SettingError, match=r"must be one of 3, None, got 4$"):
        check_choice("x", (3, None), size=4)


def test_what_a_docstring_says_about_arguments():
    def function(size, low, high):
        """Do it.

        Not an argument: this.

        Args:
            size: How large it is; a long
                explanation.
            low, high: Its ends.

        Returns:
            something: else
        """

    ends = dict.fromkeys(("low", "high"), "Its ends.")
    assert documented(function) == {"size": "How large it is; a long explanation.", **ends}
    assert documented(lambda: None) == {}
