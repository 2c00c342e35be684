from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.predict.small import pixels, write_images
from tests.predict.test_online import Killed, rows_in
from twoshift import recommended
from twoshift.data.stream import to_float
from twoshift.errors import SettingError
from twoshift.estimators import Paced
from twoshift.methods._passes import Passes, Sums
from twoshift.predict import offline
from twoshift.predict.inputs import open_gallery
from twoshift.predict.plan import cut, parts_of
from twoshift.predict.run import Options, predict
from twoshift.predict.shards import do


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("twoshift.predict.plan.CHUNK", 32)


OPTIONS = {"batch_size": 16, "part": 64, "passes": 2}


def test_sums_are_those_of_all_images_at_once(known):
    """Mean and variance of every channel, over all images, in another spelling."""
    live = recommended(known.net, known.facts)
    passes, images = Passes(live), to_float(pixels(40, 5, 0.6)[0])
    sums = passes.new()
    with passes.frozen(None):
        parts = [passes.look(x, sums, range(len(x))) for x in images.split(16)]
    plain = known.net(images)
    assert torch.allclose(torch.cat(parts).argmax(1), plain.argmax(1))  # the source model
    seen = {}
    for name, layer in known.net.named_modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name, i[0]))
    known.net(images)
    for layer in known.net.modules():
        layer._forward_hooks.clear()
    mean = torch.cat([x.double().mean((0, 2, 3)) for x in seen.values()])
    var = torch.cat([x.double().var((0, 2, 3), correction=0) for x in seen.values()])
    whole = passes.whole(sums)
    assert torch.allclose(whole.followed[0], mean, atol=1e-6)
    assert torch.allclose(whole.followed[1], var, atol=1e-6)
    assert whole.votes.sum() == whole.images == 40
    restored = Sums.of(sums.tensors())
    assert torch.equal(passes.whole(restored).followed, whole.followed)


def test_the_first_pass_adapts_as_a_stream_does(known):
    # so long a half-life that all images count alike
    live, stream = (recommended(known.net, known.facts, half_life=1e7) for _ in range(2))
    passes, images = Passes(live), to_float(pixels(80, 5, 0.6)[0])
    before, sums = live.state(), passes.new()
    with passes.afresh():
        for x in images.split(40):
            passes.follow(x, sums, [0, 39])
    for x in images.split(40):
        stream(x)
    assert sums.votes.sum() == sums.images == 80
    assert torch.cat(sums.rows).shape == (4, 3)
    followed = stream.method.followed.double()
    assert torch.allclose(
        passes.whole(sums).followed, followed, atol=0.01
    )  # images that look alike count less there
    after = live.state()
    assert all(torch.equal(after[name], before[name]) for name in before)  # and no trace is left


def test_frozen_predictions_do_not_depend_on_each_other(known):
    passes = Passes(recommended(known.net, known.facts))
    images, sums = to_float(pixels(60, 6, 0.6)[0]), passes.new()
    with passes.afresh():
        passes.follow(images, sums, range(60))
    whole = passes.whole(sums)
    with passes.frozen(whole):
        together = passes.look(images)
        alone = torch.cat([passes.look(x) for x in images.flip(0).split(1)]).flip(0)
    assert torch.allclose(together, alone, atol=1e-5)


def test_labels_of_a_whole_have_the_greatest_likelihood():
    rng = np.random.default_rng(0)
    true = np.array([0.7, 0.2, 0.1])
    labels = rng.choice(3, 4000, p=true)
    scores = rng.normal(0, 1, (4000, 3)) + 2 * np.eye(3)[labels]
    p = torch.from_numpy(scores * 2).softmax(1).float()  # exact posteriors for uniform labels
    found = Paced(3, pseudo_count=1e-6).whole(p).numpy()
    assert found == pytest.approx(true, abs=0.03)

    def likelihood(q):
        return np.log(p.double().numpy() @ q).mean()

    for _ in range(30):  # no other one near it is likelier
        other = np.abs(found + rng.normal(0, 0.01, 3))
        assert likelihood(other / other.sum()) <= likelihood(found) + 1e-9
    order = torch.randperm(4000)
    assert Paced(3, pseudo_count=1e-6).whole(p[order]).numpy() == pytest.approx(found, abs=1e-9)
    relative = Paced(3, relative=True, assumes=[0.5, 0.3, 0.2]).whole(p)
    assert relative.tolist() == pytest.approx([0.5, 0.3, 0.2])


def by_hand(known, images, batch_size=16, chunk=2):
    """An offline run with two passes, by the plainest loop."""
    from PIL import Image

    passes = Passes(recommended(known.net, known.facts))
    paths = sorted(images.rglob("*.png"))
    edges = [*range(0, len(paths), batch_size)]
    if len(paths) - edges[-1] < batch_size / 2:
        edges.pop()
    batches = []
    for start, stop in zip(edges, [*edges[1:], len(paths)], strict=True):
        good = [p for p in paths[start:stop] if p.name != "0020.png"]
        batches.append((good, to_float(np.stack([np.array(Image.open(p)) for p in good]))))
    sums = passes.new()
    for first in range(0, len(batches), chunk):
        with passes.afresh():
            for _, x in batches[first : first + chunk]:
                passes.follow(x, sums, range(len(x)))
    found = {}
    with passes.frozen(passes.whole(sums)):
        for good, x in batches:
            for path, p in zip(good, passes.look(x).softmax(1), strict=True):
                found[str(path)] = p.numpy()
    return found


def test_the_table_is_what_a_loop_by_hand_finds(known, ready, images, tmp_path):
    options = Options(tmp_path / "out.csv", probabilities=True, **OPTIONS)
    summary = predict(ready, open_gallery(str(images)), options)
    expected, rows = by_hand(known, images), rows_in(options.out)
    assert len(rows) == 150
    for row in rows:
        if row["path"] in expected:
            p = [float(row[f"p_{name}"]) for name in ready.classes]
            assert p == pytest.approx(expected[row["path"]], abs=1e-5)
            assert row["state_version"] == "1"
        else:
            assert "cannot decode" in row["error"]
    assert "batch" not in rows[0]
    assert (summary["images"], summary["errors"]) == (150, 1)
    assert sum(summary["labels"]) == pytest.approx(1)
    assert summary["accuracy"] is not None


def in_any_order(seed):
    def launch(self, tasks):
        tasks = list(tasks)
        random.Random(seed).shuffle(tasks)
        return (do(self._ready, self._gallery, task) for task in tasks)

    return launch


def test_who_runs_which_part_does_not_matter(ready, images, tmp_path, monkeypatch):
    gallery = open_gallery(str(images), group_by="folder")
    settings = {**OPTIONS, "passes": 3, "probabilities": True}
    predict(ready, gallery, Options(tmp_path / "out.csv", **settings))
    for seed in range(3):
        monkeypatch.setattr(offline.Offline, "_here", in_any_order(seed))
        predict(ready, gallery, Options(tmp_path / f"{seed}.csv", **settings))
        assert (tmp_path / f"{seed}.csv").read_bytes() == (tmp_path / "out.csv").read_bytes()
    for part in (1, 100, 1000):  # other parts: the same classes, and probabilities up to rounding
        other = Options(tmp_path / f"part{part}.csv", **{**settings, "part": part})
        predict(ready, gallery, other)
        for a, b in zip(rows_in(tmp_path / "out.csv"), rows_in(other.out), strict=True):
            for name, text in a.items():
                if name.startswith(("p_", "probability", "entropy")) and text:
                    assert float(text) == pytest.approx(float(b[name]), abs=1e-5)
                else:
                    assert text == b[name]


def test_parts_have_whole_chunks(images):
    batches = cut(open_gallery(str(images), group_by="folder"), 16)
    for images_per_part in (1, 40, 70):
        for part in parts_of(batches, images_per_part, 2)[1:]:
            assert part[0].number % 2 == 0


def test_streams_have_wholes_of_their_own(ready, images, tmp_path):
    both = Options(tmp_path / "out.csv", **OPTIONS)
    predict(ready, open_gallery(str(images), group_by="folder"), both)
    rows = rows_in(both.out)
    for half in "xy":
        alone = Options(tmp_path / f"{half}.csv", **OPTIONS)
        predict(ready, open_gallery(str(images / half)), alone)
        own = [row for row in rows if row["stream"] == half]
        for a, b in zip(own, rows_in(alone.out), strict=True):
            assert a["class"] == b["class"]
            assert a["probability"] == b["probability"]


def steps(patch, at: int) -> list[str]:
    """Stop the process before step number ``at``; returns the steps so far."""
    log: list[str] = []

    def counted(name, real):
        def step(*args):
            log.append(name)
            if len(log) == at:
                raise Killed
            return real(*args)

        return step

    for name in ("_save_sums", "_save_wholes", "do"):
        patch.setattr(offline, name, counted(name, getattr(offline, name)))
    return log


def test_a_run_that_is_killed_anywhere_goes_on(ready, images, tmp_path, monkeypatch):
    gallery = open_gallery(str(images))
    with monkeypatch.context() as patch:
        log = steps(patch, 0)
        predict(ready, gallery, Options(tmp_path / "whole.csv", **OPTIONS))
    assert log.count("do") == 6  # three parts, two passes
    for at in range(1, len(log) + 1):
        options = Options(tmp_path / f"{at}.csv", **OPTIONS)
        with monkeypatch.context() as patch:
            before = steps(patch, at)
            with pytest.raises(Killed):
                predict(ready, gallery, options)
        with monkeypatch.context() as patch:
            after = steps(patch, 0)
            predict(ready, gallery, options)
        lost = before[-2:-1] == ["do"] and before[-1] == "_save_sums"
        assert after.count("do") == 6 - log[: at - 1].count("do") + lost  # no part twice
        assert options.out.read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_a_network_without_batch_normalisation_needs_one_pass(known_groups, images, tmp_path):
    ready = known_groups.ready()
    summary = predict(ready, open_gallery(str(images)), Options(tmp_path / "out.csv", **OPTIONS))
    assert summary["changed"] == 0
    assert {row["state_version"] for row in rows_in(tmp_path / "out.csv")} == {"0"}


def test_one_pass_is_the_source_model(ready, images, tmp_path):
    options = Options(tmp_path / "out.csv", **{**OPTIONS, "passes": 1})
    assert predict(ready, open_gallery(str(images)), options)["changed"] == 0


def test_it_gains_on_darker_images(known, tmp_path):
    labels = write_images(tmp_path / "dark", 400, 11, 0.4)
    names = np.array(known.ready().classes)
    right = {}
    for name, passes in (("online", None), ("source", 1), ("offline", 2)):
        options = Options(tmp_path / f"{name}.csv", passes=passes, part=128)
        predict(known.ready(), open_gallery(str(tmp_path / "dark")), options)
        found = np.array([row["class"] for row in rows_in(options.out)])
        right[name] = (found == names[labels]).mean()
    assert right["offline"] > right["source"] + 0.1
    assert right["offline"] > right["online"] - 0.03


def test_a_large_stream_is_sampled_for_its_labels(known):
    passes = Passes(recommended(known.net, known.facts))
    assert passes.stride(100) == 1
    assert passes.stride(1 << 16) == 1
    assert passes.stride((1 << 16) + 1) == 2


def test_names_that_are_no_text(ready, tmp_path):
    folder = tmp_path / "images" / os.fsdecode(b"caf\xe9, % /\n")
    write_images(folder, 40)
    gallery = open_gallery(str(tmp_path / "images"), group_by="folder")
    assert any("\udce9" in name for name in gallery.streams)
    for name, more in (("on", {"state": tmp_path / "state"}), ("off", {"passes": 2})):
        options = Options(tmp_path / f"{name}.csv", batch_size=16, part=16, **more)
        assert predict(ready, gallery, options)["images"] == 40
    pytest.importorskip("pyarrow")
    assert predict(ready, gallery, Options(tmp_path / "out.parquet"))["images"] == 40


def test_an_unreadable_stream_is_no_obstacle(ready, tmp_path):
    write_images(tmp_path / "images", 40)
    for path in (tmp_path / "images" / "x").iterdir():
        path.write_bytes(b"")
    gallery = open_gallery(str(tmp_path / "images"), group_by="folder")
    assert predict(ready, gallery, Options(tmp_path / "out.csv", **OPTIONS))["errors"] == 20


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ({"method": "tent"}, "TENT learns from every batch, so that their order matters"),
        ({"method": "bn_stats"}, "follows its batches"),
        ({"method": "source", "adapter": "logit", "estimator": "em"}, "estimator EM follows"),
    ],
    ids=str,
)
def test_methods_that_only_run_online(known, images, tmp_path, method, says):
    with pytest.raises(SettingError, match=says):
        predict(
            known.ready(**method),
            open_gallery(str(images)),
            Options(tmp_path / "out.csv", **OPTIONS),
        )
    assert not (tmp_path / "out.csv.parts").exists()


def test_mistakes(ready, images, tmp_path):
    with pytest.raises(SettingError, match="--state, must be used with an online run"):
        Options(tmp_path / "out.csv", state=tmp_path / "state", passes=2)
    with pytest.raises(SettingError, match="passes"):
        Options(tmp_path / "out.csv", passes=0)
    gallery = open_gallery(str(images))
    online = replace(Options(tmp_path / "out.csv"), passes=None)
    with pytest.raises(SettingError, match="must be used with an offline run"):
        predict(ready, gallery, online, launch=lambda tasks: iter(()))
