"""Models from the words of a command line: the user's own function, and our names."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from twoshift import models
from twoshift.errors import CheckpointError, MismatchError, ModelError, SettingError, UnknownName
from twoshift.models.given import open_model

NET = """
from torch import nn

def make_model(classes=3, width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(width, classes))
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "net.py") -> str:
        (tmp_path / name).write_text(text)
        return f"{tmp_path / name}:make_model"

    return write


@pytest.fixture
def weights(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    torch.save({"state_dict": net.state_dict()}, tmp_path / "w.pth")
    return tmp_path / "w.pth", net.eval()


def test_a_function_of_a_file(write, weights):
    path, net = weights
    model = open_model(write(NET), path, classes=3)
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(model(x), net(x))
    assert not model.training


def test_a_function_may_load_its_own_weights_and_takes_settings(write):
    model = open_model(write(NET), settings={"classes": 6, "width": 2})
    assert model[-1].weight.shape == (6, 2)


def test_a_file_may_import_its_neighbours_and_leaves_no_path_behind(write, tmp_path):
    write(NET, "neighbour_of_given.py")
    before = list(sys.path)
    name = write(
        "import sys\nsys.path.insert(0, 'mine')\nfrom neighbour_of_given import make_model"
    )
    assert isinstance(open_model(name), nn.Sequential)
    assert "mine" in sys.path
    sys.path.remove("mine")
    assert sys.path == before


def test_a_file_with_a_dataclass(write):
    """They look their module up among the imported ones."""
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    settings = "\n@dataclass\nclass Settings:\n    width: int = 4\n"
    assert isinstance(open_model(write(head + settings + NET)), nn.Sequential)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            NET.replace("make_model", "make_modell"),
            r"no function 'make_model'.*Did you mean 'make_modell'\?",
        ),
        ("make_model = 3", "no function 'make_model'"),
        ("def make_model(classes): pass", r"TypeError: .*'classes'.*--set NAME=VALUE"),
        ("def make_model(): raise OSError('no disk')", "failed with OSError: no disk"),
        ("def make_model(): return 1 / 0", "failed with ZeroDivisionError"),
        ("def make_model(:", "failed with SyntaxError"),
        ("import a_package_that_is_not_there", "failed with ModuleNotFoundError"),
        ("import sys\nsys.exit(3)", "failed with SystemExit: 3"),
        ("def make_model(): return {}", "must be an nn.Module, got dict"),
        (NET + "\nmake_model = lambda: nn.Linear", "must be an nn.Module, got type"),
    ],
)
def test_functions_that_give_no_model(write, text, message):
    with pytest.raises((ModelError, SettingError), match=f"(?s){message}"):
        open_model(write(text))


def test_names_that_are_no_model(tmp_path, write):
    with pytest.raises(SettingError, match=r"no file .*absent\.py\. Write FILE\.py:FUNCTION"):
        open_model(f"{tmp_path / 'absent.py'}:make_model")
    with pytest.raises(SettingError, match=r"net\.py, must be .*net\.py:FUNCTION"):
        open_model(write(NET).removesuffix(":make_model"))
    with pytest.raises(UnknownName, match="Did you mean 'resnet18'"):
        open_model("resnet81", "w.pth")


def test_one_of_our_names_needs_weights(tmp_path):
    with pytest.raises(SettingError, match=r"weights of resnet18, must be given.*--weights FILE"):
        open_model("resnet18", classes=3, settings={"width": 4})
    donor = models.create("resnet18", classes=3, width=4).eval()
    torch.save(donor.state_dict(), tmp_path / "w.pth")
    model = open_model("resnet18", tmp_path / "w.pth", 3, {"width": 4})
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(model(x), donor(x))


def test_weights_that_do_not_fit(write, weights, tmp_path):
    path, _ = weights
    with pytest.raises(SettingError, match=r"must be 5, as in the data, got another number: 3\."):
        open_model(write(NET), path, 5, {"classes": 5})
    with pytest.raises(MismatchError, match="weights do not fit Sequential"):
        open_model(write(NET), path, 3, {"width": 8})
    path.write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="is damaged"):
        open_model(write(NET), path, 3)
