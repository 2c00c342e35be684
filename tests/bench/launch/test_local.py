from __future__ import annotations

import sys

import pytest

from tests.bench.launch.toys import asks, make_cells, make_model, numbers
from twoshift.bench import launch
from twoshift.bench.cell import Cell, Model
from twoshift.bench.launch.base import pixels_of, seldom
from twoshift.bench.launch.local import launch_local
from twoshift.errors import MissingExtra, SettingError, UnknownName


def test_every_cell_is_run_once(local):
    assert numbers(local).keys() == {cell.key for cell in make_cells()}


def test_cells_of_a_model_and_a_corruption_come_together(workshop, monkeypatch):
    monkeypatch.setattr(type(workshop), "run", lambda self, cell, progress: {})
    cells = [
        Cell("source", corruption=corruption, seed=seed, model=make_model(seed % 2))
        for seed in range(4)
        for corruption in ("fog", "clean")
    ]
    order = [(o.cell.model.seed, o.cell.corruption) for o in launch_local(workshop, cells)]
    assert len(order) == 8
    assert order[::2] == order[1::2]
    assert len(set(order[::2])) == 4
    assert order[0][0] == order[3][0]


def test_an_error_is_told_and_the_rest_goes_on(workshop, local):
    cells = [asks(error="it hurts"), make_cells()[0], Cell("source")]
    outcomes = {o.cell.key: o for o in launch_local(workshop, cells)}
    wrong, right, bare = (outcomes[cell.key] for cell in cells)
    assert wrong.result is None
    assert wrong.error.startswith("Traceback")
    assert "ValueError: it hurts" in wrong.error
    assert "must be given by recipe" in bare.error
    assert numbers([right]).items() <= numbers(local).items()


def test_ctrl_c_passes(workshop, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(workshop), "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(launch_local(workshop, make_cells()))


def test_progress_names_the_cell(workshop, local):
    cell, seen = make_cells()[0], []
    list(launch_local(workshop, [cell], progress=lambda *told: seen.append(told)))
    batches = local[0].result.metrics["batches"]
    assert seen == [(cell, done + 1, batches) for done in range(batches)]


def test_reports_are_seldom_but_the_last_one_comes():
    seen = []
    tell = seldom(lambda *told: seen.append(told), seconds=60)
    for done in range(1, 6):
        tell(done, 5)
    assert seen == [(1, 5), (5, 5)]


def test_launchers_by_name():
    assert launch.launcher("local", {}).func is launch_local
    assert launch.launcher("processes", {"workers": 3}).keywords == {"workers": 3}
    with pytest.raises(UnknownName, match="Did you mean 'local'"):
        launch.launcher("locale")
    with pytest.raises(SettingError, match="launcher 'local' has no option 'workers'"):
        launch.launcher("local", {"workers": 2})


@pytest.mark.parametrize("name", ["dask", "slurm"])
def test_a_missing_extra_names_its_install_line(name, workshop, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtra, match=r"pip install 'twoshift\[dask\]'"):
        next(launch.launchers[name](workshop, make_cells()))


def test_images_are_shared_only_where_pixels_and_classes_are_the_same():
    def pixels(target="pacs:sketch", **source):
        recipe = {"dataset": "pacs:photo", "decoding": {"size": 32, "frame": 36}, **source}
        return pixels_of(Cell("source", model=Model(recipe), target=target))

    assert pixels() == pixels(epochs=3)
    others = [
        pixels(target="pacs:cartoon"),
        pixels(dataset="pacs:cartoon"),  # other classes, perhaps
        pixels(decoding={"size": 48, "frame": 56}),
    ]
    assert len({pixels(), *others}) == 4
