from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from tests.data.trees import IMAGENET, make_imagenet_c_tree, make_imagenet_tree
from tests.toys import same, snapshot
from twoshift import methods
from twoshift.adapters import LabelShiftAdapter
from twoshift.bench import Cell, Result, evaluate, run_cell
from twoshift.bench.build import build
from twoshift.bench.images import ImageCache
from twoshift.bench.measure import stream_of
from twoshift.data.base import ImageSet
from twoshift.data.stream import Batch, Stream
from twoshift.errors import MismatchError, PriorError, SettingError, UnknownName
from twoshift.methods import LabelAware, Method
from twoshift.train.checkpoint import SourceCard, SourceModel

CLASSES, PER_CLASS = 4, 30
COUNTS = [40, 20, 10, 5]


def make_images() -> ImageSet:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(CLASSES), PER_CLASS))
    pixels = rng.normal(60 + 40 * labels[:, None, None, None], 50, (len(labels), 6, 6, 1))
    return ImageSet("toy", "test", pixels.clip(0, 255).astype(np.uint8), labels, tuple("abcd"))


def make_source(strategy: str = "balanced_softmax") -> SourceModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, CLASSES),
        ).eval()
    card = SourceCard(
        architecture="toy",
        settings={"norm": "bn", "width": 8},
        classes=list("abcd"),
        class_counts=COUNTS,
        dataset="toy",
        subset={},
        strategy=strategy,
        recipe={},
        seed=7,
    )
    return SourceModel(model, card, "weights")


@pytest.fixture
def source() -> SourceModel:
    return make_source()


@pytest.fixture
def images() -> ImageSet:
    return make_images()


@pytest.fixture
def spy(monkeypatch):
    """A registered method that keeps all it is given."""

    class Spy(Method):
        """Looks at what it gets."""

        got: ClassVar[list[tuple]] = []
        logits: ClassVar[list[torch.Tensor]] = []

        def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
            super().__init__(model)
            self.lr = lr
            self.ready()

        def __call__(self, *arguments, **named):
            self.got.append((arguments, named))
            return super().__call__(*arguments, **named)

        def adapt(self, x):
            with torch.no_grad():
                scores = self.predict(x)
            self.logits.append(scores.logits)
            return scores

    known = methods.methods
    assert "spy" not in known  # has imported all, so the copy below is whole
    monkeypatch.setattr(known, "_entries", {**known._entries, "spy": Spy})
    return Spy


def untimed(result: Result) -> Result:
    metrics = {k: v for k, v in result.metrics.items() if not k.startswith("ms_")}
    return replace(result, metrics=metrics, facts={})


def test_a_result_is_json_and_says_what_was_measured(source, images):
    cell = Cell("tent", {"lr": 1e-3}, corruption="contrast", labels="backward-10", batch_size=16)
    result = run_cell(cell, source, images=images)
    assert Result.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result
    assert result.cell == cell
    assert result.source.weights == "weights"
    assert (result.source.seed, result.source.norm) == (7, "bn")
    assert set(result.facts) >= {"pixels", "twoshift", "torch", "threads", "peak_memory_mb"}
    batches = result.metrics["batches"]
    assert len(result.trace["prior"]) == len(result.trace["accuracy"]) == batches > 1


def test_a_cell_repeats(source, images):
    cell = Cell("tent", adapter="identity", labels="permuted-10", batch_size=16, seed=3)
    first, second = (run_cell(cell, source, images=images) for _ in range(2))
    assert untimed(first) == untimed(second)


def test_the_source_model_is_not_changed(source, images):
    before = copy.deepcopy(snapshot(source.model))
    run_cell(Cell("tent", {"lr": 0.1}, batch_size=16), source, images=images)
    assert same(before, snapshot(source.model))


def test_a_method_gets_the_images_and_nothing_else(source, images, spy):
    result = run_cell(Cell("spy", batch_size=16, seed=5), source, images=images)
    stream = Stream(images, np.full(CLASSES, 0.25), batch_size=16, seed=5)
    assert len(spy.got) == result.metrics["batches"] == len(stream)
    for ((x, *others), named), batch in zip(spy.got, stream, strict=True):
        assert (others, named) == ([], {})
        assert torch.equal(x, batch.x)


def test_other_labels_change_the_scores_but_no_prediction(source, images, spy):
    stream = list(Stream(images, np.full(CLASSES, 0.25), batch_size=16))
    lies = [Batch(b.x, (b.y + 1) % CLASSES, b.step) for b in stream]
    scores = []
    for batches in (stream, lies):
        recorder = evaluate(methods.create("spy", source.model), batches, COUNTS)
        scores.append(recorder.summary()["nll"])
    truth, told_lies = spy.logits[: len(stream)], spy.logits[len(stream) :]
    assert all(torch.equal(a, b) for a, b in zip(truth, told_lies, strict=True))
    assert scores[0] != scores[1]


def test_the_oracle_is_told_what_is_in_the_stream(source, images):
    cell = Cell("source", adapter="identity", estimator="oracle", labels="backward-7", seed=2)
    result = run_cell(cell, source, images=images)
    # 7 ** (-i / 3) of 30 images, rounded down: not the wanted distribution but what there is
    shares = np.array([4, 8, 15, 30]) / 57
    assert result.trace["true_prior"] == pytest.approx(shares)
    for estimate in result.trace["prior"]:
        assert estimate == pytest.approx(shares, abs=1e-6)


def test_forward_follows_the_training_counts_not_the_class_numbers(source, images):
    counts = [5, 40, 10, 20]
    turned = SourceModel(
        source.model, SourceCard(**{**vars(source.card), "class_counts": counts}), ""
    )
    prior = run_cell(Cell("source", labels="forward-10"), turned, images=images).trace
    assert np.argsort(prior["true_prior"]).tolist() == np.argsort(counts).tolist()


def test_a_method_without_an_adapter_is_watched(source, images):
    result = run_cell(Cell("source", batch_size=16), source, images=images)
    estimate = np.full(CLASSES, 0.25)
    for batch, seen in zip(
        Stream(images, np.full(CLASSES, 0.25), batch_size=16), result.trace["prior"], strict=True
    ):
        with torch.no_grad():
            probs = source.model(batch.x).softmax(1).numpy()
        estimate = 0.1 * probs.mean(0) + 0.9 * estimate
        assert seen == pytest.approx(estimate, abs=1e-6)


def test_an_identity_adapter_changes_nothing(source, images):
    results = [
        run_cell(Cell("tent", {"lr": 0.01}, adapter=adapter, batch_size=16), source, images=images)
        for adapter in (None, "identity")
    ]
    plain, control = (untimed(r) for r in results)
    assert control.metrics["accuracy"] == plain.metrics["accuracy"]
    assert control.metrics["nll"] == pytest.approx(plain.metrics["nll"], abs=1e-4)
    for a, b in zip(plain.trace["prior"], control.trace["prior"], strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_a_trained_adapter_changes_something(source, images):
    adapter = LabelShiftAdapter(8, CLASSES)
    nn.init.constant_(adapter.head_net[-1].bias[-1:], 50.0)  # always the last class
    cell = Cell("source", adapter="trained", labels="uniform")
    result = run_cell(cell, source, adapter, images=images)
    assert result.metrics["accuracy"] == pytest.approx(1 / CLASSES)
    assert result.metrics["tail_recall"] == 1


def test_estimator_settings_reach_the_estimator(source, images):
    cell = Cell("source", adapter="identity", estimator_settings={"alpha": 0.5, "top_k": 2})
    method = build(cell, source, None, Stream(images, np.full(CLASSES, 0.25)))
    assert isinstance(method, LabelAware)
    assert (method.estimator.alpha, method.estimator.top_k) == (0.5, 2)


@pytest.mark.parametrize("corruption", ["fog", "contrast"])  # published, and generated
def test_bad_images_are_left_out_before_and_after_the_corruption(source, tmp_path, corruption):
    make_imagenet_tree(tmp_path)
    make_imagenet_c_tree(tmp_path, {"fog": "weather"})
    bad = ["imagenet/val/n01440764/ILSVRC2012_val_00000000.JPEG"]
    bad += ["ImageNet-C/weather/fog/3/n01484850/ILSVRC2012_val_00000207.JPEG"]
    for file in bad:
        (tmp_path / file).write_bytes(b"no image")
    facts = {"dataset": "imagenet_lt", "classes": list(IMAGENET)}
    recipe = {"decoding": {"size": 32, "frame": 36}}
    trained = replace(source, card=replace(source.card, **facts, recipe=recipe))
    cell = Cell("source", corruption=corruption, severity=3)
    images = ImageCache(tmp_path, skip_bad=True).of(cell, trained)
    skipped = 2 if corruption == "fog" else 1
    assert (images.skipped, len(images)) == (skipped, 24 - skipped)
    assert images.images[:].shape == (24 - skipped, 32, 32, 3)


def test_progress_counts_batches(source, images):
    seen = []
    cell = Cell("source", batch_size=16)
    run_cell(cell, source, images=images, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("cell", "error", "says"),
    [
        (Cell("tend"), UnknownName, "Did you mean 'tent'"),
        (Cell("tent", {"lrr": 1}), SettingError, "Did you mean 'lr'"),
        (Cell("tent", labels="uniforn"), PriorError, "Did you mean 'uniform'"),
        (Cell("tent", order="random"), SettingError, "order 'random' is unknown. Known: "),
        (Cell("tent", adapter="trained"), SettingError, "given that adapter"),
        (Cell("tent", adapter="identity", estimator="emma"), UnknownName, "Did you mean 'ema'"),
        (Cell("tent", adapter="identiti"), UnknownName, "Did you mean 'identity'"),
        (Cell("tent", estimator_settings={"alfa": 1}), SettingError, "Did you mean 'alpha'"),
        (Cell("tent", corruption="frog"), UnknownName, "Did you mean 'fog'"),
    ],
)
def test_bad_cells(source, images, cell, error, says):
    with pytest.raises(error, match=says):
        run_cell(cell, source, images=images)


def test_an_adapter_of_another_model_is_refused(source, images):
    with pytest.raises(MismatchError, match="8 features and 4 classes"):
        run_cell(Cell("tent", adapter="trained"), source, LabelShiftAdapter(9, 4), images=images)


def test_an_adapter_trained_for_other_weights_is_refused_before_images_are_read(source):
    adapter = LabelShiftAdapter(8, CLASSES)
    adapter.trained_for = "other weights"
    with pytest.raises(MismatchError, match=r"other source weights.*twoshift train adapter"):
        run_cell(Cell("tent", adapter="trained"), source, adapter)
    adapter.trained_for = source.weights
    run_cell(Cell("tent", adapter="trained"), source, adapter, images=make_images())


@pytest.mark.parametrize("strategy", ["balanced_softmax", "cross_entropy"])
def test_a_logit_adapter_is_logit_adjustment(strategy):
    """The logarithm of the true labels is added, and that of the training taken out if need be."""
    source, images = make_source(strategy=strategy), make_images()
    cell = Cell("source", adapter="logit", labels="backward-10", batch_size=16, estimator="oracle")
    result, stream = run_cell(cell, source, images=images), stream_of(cell, images, COUNTS)
    shift = torch.tensor(stream.prior).log()
    if strategy == "cross_entropy":
        shift = shift - torch.tensor(COUNTS).div(sum(COUNTS)).log()
    nll, images_seen = 0.0, 0
    for batch in stream:
        log_p = (source.model(batch.x).detach() + shift).log_softmax(1)
        nll -= float(log_p[torch.arange(len(batch.y)), batch.y].sum())
        images_seen += len(batch.y)
    assert result.metrics["nll"] == pytest.approx(nll / images_seen, rel=1e-5)
    assert result.adapter is None  # nothing trained was used
