"""The names and signatures that users were promised."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import twoshift
from twoshift import (
    EMA,
    LabelAware,
    LabelShiftAdapter,
    Method,
    TwoshiftError,
    attach,
    condition,
    detach,
    estimators,
    methods,
    models,
)

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [name for name, home in twoshift._HOMES.items() if home == "twoshift"]


@pytest.mark.parametrize("name", twoshift.__all__)
def test_a_public_name_is_there_and_documented(name):
    entry = getattr(twoshift, name)
    assert entry.__name__ == name
    assert len((inspect.getdoc(entry) or "").splitlines()[0]) > 10
    if inspect.isclass(entry):
        own = [m for n, m in vars(entry).items() if not n.startswith("_") and callable(m)]
        assert all(inspect.getdoc(m) for m in own)


def test_the_reference_has_the_public_names_and_no_others():
    page = (ROOT / "docs" / "api.md").read_text()
    documented = re.findall(r"^\.\. auto(?:class|function):: twoshift\.(\w+)$", page, re.MULTILINE)
    assert sorted(documented) == sorted(twoshift.__all__)


def test_all_is_all():
    assert len(twoshift.__all__) > 30
    assert len(twoshift.__all__) == len(set(twoshift.__all__))
    assert set(dir(twoshift)) == {*twoshift.__all__, *ROOMS, "__version__"}
    space: dict[str, object] = {}
    exec("from twoshift import *", space)
    assert set(twoshift.__all__) <= set(space)


def test_every_name_in_the_stub_is_exported_under_its_own_name():
    stub = (ROOT / "twoshift" / "__init__.pyi").read_text()
    lines = re.findall(r"^from (\S+) import (\w+) as (\w+)$", stub, re.MULTILINE)
    assert {name: home for home, name, _ in lines} == twoshift._HOMES
    assert all(name == public for _, name, public in lines)


def test_every_folder_of_the_package_is_an_attribute():
    folders = {path.parent.name for path in (ROOT / "twoshift").glob("*/__init__.py")}
    assert folders - {"cli", "storage"} <= set(ROOMS)  # machinery


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_attributes(room):
    assert getattr(twoshift, room).__name__ == f"twoshift.{room}"


def test_importing_is_light():
    program = (
        "import sys, twoshift\n"
        "dir(twoshift), twoshift.__version__, twoshift.TwoshiftError\n"
        "sys.exit(', '.join({'torch', 'numpy', 'scipy', 'typer'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_estimators_are_imported_when_one_of_them_is_used():
    program = (
        "import sys, twoshift.estimators as e\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'EMA', 'Paced', 'PriorEstimator', 'create', 'estimators'} <= set(dir(e))\n"
        "assert e.EMA.__module__ == 'twoshift.estimators.ema'\n"
        "assert 'rlls' in e.estimators._entries\n"  # all are registered then
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match=r"'twoshift.estimators' has no attribute 'EMB'"):
        estimators.EMB  # noqa: B018


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'twoshift' has no attribute 'Tend'"):
        twoshift.Tend  # noqa: B018
    with pytest.raises(ImportError, match="Tend"):
        from twoshift import Tend  # noqa: F401


def test_the_promised_calls():
    model = models.create("resnet18_cifar", classes=10, width=16, norm="iabn").eval()
    adapter = LabelShiftAdapter(features=128, classes=10)
    adapted = attach(model, adapter)
    condition(adapted, torch.full((10,), 0.1))
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        assert torch.allclose(adapted(x), expected, atol=1e-5)
        assert torch.equal(detach(adapted)(x), expected)
    live = LabelAware(method=methods.create("tent", adapted, lr=1e-3), estimator=EMA(classes=10))
    assert isinstance(live, Method)
    assert live(x).shape == (2, 10)


@pytest.mark.parametrize(
    ("entry", "call"),
    [
        (LabelShiftAdapter, {"features": 512, "classes": 100}),
        (attach, {"model": None, "adapter": None, "head": "fc"}),
        (detach, {"model": None}),
        (condition, {"module": None, "prior": None}),
        (LabelAware, {"method": None, "estimator": None}),
        (LabelAware.load, {"folder": "state", "model": None}),
        (twoshift.load_adapter, {"folder": "adapter"}),
        (twoshift.save_adapter, {"folder": "adapter", "adapter": None}),
        (twoshift.Tent, {"model": None, "lr": 1e-3, "optim": "adam", "freeze": ()}),
        (twoshift.IABN, {"model": None, "lr": 1e-4, "momentum": 0.01}),
        (twoshift.BNStats, {"model": None}),
        (EMA, {"classes": 10, "alpha": 0.1}),
        (twoshift.Fixed, {"classes": 10, "prior": None}),
        (twoshift.Oracle, {"classes": 10, "prior": None}),
        (methods.create, {"name": "tent", "model": None, "lr": 1e-3}),
        (estimators.create, {"name": "ema", "classes": 10}),
        (models.create, {"name": "resnet18_cifar", "classes": 10}),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),
)
def test_the_promised_arguments(entry, call):
    taken = inspect.signature(entry).bind(**call)
    assert {**taken.arguments, **taken.kwargs}.keys() >= call.keys()


def test_the_promised_methods():
    assert list(inspect.signature(LabelAware.save).parameters) == ["self", "folder"]
    for name in ("forward", "reset", "save", "load", "settings"):
        assert callable(getattr(Method, name))


def test_one_error_catches_all():
    with pytest.raises(TwoshiftError):
        methods.create("tend", None)
    with pytest.raises(TwoshiftError):
        EMA(classes=0)
