"""Two processes under torchrun end with the weights of one that has the same global batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.train import toy
from twoshift.adapters import load_adapter
from twoshift.errors import SettingError, TwoshiftError
from twoshift.storage import saved_files
from twoshift.train import devices
from twoshift.train.adapter import train_adapter
from twoshift.train.checkpoint import load_source
from twoshift.train.source import train_source

ROOT = Path(__file__).resolve().parents[2]
TOGETHER = """
import json, sys
from pathlib import Path

import numpy as np
import torch

torch.set_num_threads(1)
from tests.train import test_devices, toy
from twoshift.train import devices

toy.register()
root = Path(sys.argv[1])
record = test_devices.train_all(root)
accelerator = devices.make_accelerator()
rank = accelerator.process_index
rows = torch.full((3 * (1 - rank), 2), float(rank))  # three rows and none
record["gathered"] = devices.gather(rows, accelerator).tolist()
real, shares = devices.share, []
devices.share = lambda *arguments: shares.append(real(*arguments)) or shares[-1]
test_devices.train_source(toy.source_recipe(epochs=1, batch_size=30), root / "batch norm")
record["shares"] = [len(rows) for rows, _ in shares]
record["own"] = devices.own_generator(np.random.default_rng(0), accelerator).random()
(root / f"record-{rank}.json").write_text(json.dumps(record))
accelerator.end_training()
"""


def train_all(root: Path) -> dict[str, object]:
    """Sources and an adapter in ``root``; what was reported."""
    reports = []

    def progress(done, total, facts):
        reports.append([done, facts])

    # 212 images: nine batches of 23 and one of 5, none of which two processes can halve
    same = {"batch_size": 23, "augment": "none", "settings": {"norm": "gn"}}
    plain = toy.source_recipe(epochs=2, **same)
    source = train_source(plain, root / "source", progress=progress)
    both = toy.source_recipe(epochs=1, retrain_epochs=1, strategy="classifier_retraining", **same)
    train_source(both, root / "retrained", progress=progress)
    recipe = toy.adapter_recipe(epochs=2, batch_size=23, points=0)
    train_adapter(source, recipe, root / "adapter", progress=progress)
    return {"reports": reports}


def torchrun(*arguments: object, processes: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, f"--nproc-per-node={processes}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The folder of two processes, and what each of them recorded."""
    folder = tmp_path_factory.mktemp("together")
    (folder / "driver.py").write_text(TOGETHER)
    done = torchrun(folder / "driver.py", folder)
    assert done.returncode == 0, done.stderr
    return folder, [json.loads((folder / f"record-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(registered_toys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, train_all(folder)


@pytest.mark.parametrize("name", ["source", "retrained", "adapter"])
def test_two_processes_end_with_the_weights_of_one(together, alone, name):
    def weights(folder):
        place = folder / name
        return (load_adapter(place) if name == "adapter" else load_source(place).model).state_dict()

    expected, trained = weights(alone[0]), weights(together[0])
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, rtol=0, atol=1e-4, msg=key)


def test_only_the_first_reports_and_its_losses_are_those_of_whole_batches(together, alone):
    first, second = (record["reports"] for record in together[1])
    assert second == []
    expected = alone[1]["reports"]
    assert [done for done, _ in first] == [done for done, _ in expected]
    losses = [[float(facts.split()[1]) for _, facts in r] for r in (first, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_cards_are_alike_and_nothing_is_left_behind(together, alone):
    for name in ("source", "retrained"):
        one, two = (load_source(folder / name).card for folder in (alone[0], together[0]))
        assert two.measured == pytest.approx(one.measured, abs=0.02)
        assert (one.settings, one.subset, one.recipe) == (two.settings, two.subset, two.recipe)
        left = {p.name for p in (together[0] / name).iterdir()}
        assert left == {"card.json", saved_files(together[0] / name)["model"].name}


def test_rows_of_all_processes_come_together_in_order(together):
    for record in together[1]:
        assert record["gathered"] == [[0.0, 0.0]] * 3


def test_batch_norms_never_see_a_single_image(together):
    for record in together[1]:
        assert record["shares"] == [15] * 7  # 212 images: the last two are left out


def test_batches_too_small_for_batch_norms_are_refused():
    three = SimpleNamespace(num_processes=3)
    assert devices.smallest_batch(toy.ToyNet(), 6, three) == 6
    assert devices.smallest_batch(toy.ToyNet(norm="gn"), 5, three) == 2
    assert devices.smallest_batch(toy.ToyNet(), 2, SimpleNamespace(num_processes=1)) == 2
    with pytest.raises(SettingError, match="3 processes, must be at least 6, got 5"):
        devices.smallest_batch(toy.ToyNet(), 5, three)


def test_processes_draw_different_numbers(together):
    first, second = (record["own"] for record in together[1])
    assert first != second


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 9))
def test_weighted_shares_average_to_the_mean_of_the_batch(size, processes, seed):
    losses = np.random.default_rng(seed).random(100)
    batch = np.random.default_rng(seed).permutation(100)[:size]
    weighted, taken = [], []
    for rank in range(processes):
        place = SimpleNamespace(process_index=rank, num_processes=processes)
        rows, weight = devices.share(batch, place)
        weighted.append(weight * losses[rows].mean())
        taken += rows.tolist() if weight else []
    assert np.mean(weighted) == pytest.approx(losses[batch].mean())
    assert sorted(taken) == sorted(batch.tolist())


def test_one_process_has_the_generator_and_the_whole_batch_itself():
    alone = SimpleNamespace(process_index=0, num_processes=1)
    rng, rows = np.random.default_rng(0), np.arange(5)
    assert devices.own_generator(rng, alone) is rng
    own_rows, weight = devices.share(rows, alone)
    assert (own_rows.tolist(), weight) == (rows.tolist(), 1.0)


def test_processes_that_do_not_know_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")  # of a launcher that accelerate does not join
    monkeypatch.setattr(
        devices, "Accelerator", lambda **_: SimpleNamespace(num_processes=1, process_index=0)
    )
    with pytest.raises(TwoshiftError, match=r"train together, must be 3, got 1.*torchrun"):
        devices.make_accelerator()


def test_devices_other_than_torchruns_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match="must be 2, as many as torchrun started, got 4"):
        devices.launch(4, ["train", "source"])


def test_more_devices_than_there_are_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingError, match="at most 1, the number of GPUs, got 2"):
        devices.launch(2, ["train", "source"])
