"""What predicts: a classifier with its calibration, and a method around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from twoshift import adapters, estimators, methods
from twoshift.adapters import ANSWER, Adapter, attach, load_adapter
from twoshift.adapters.base import bare_head
from twoshift.calibration import Calibration, hand_out
from twoshift.calibration.classifier import Classifier
from twoshift.data._lists import text_of
from twoshift.data.files import frame_of
from twoshift.errors import MismatchError, SettingError
from twoshift.methods import LabelAware, Method
from twoshift.models.classifier import prepare
from twoshift.models.given import open_model
from twoshift.models.head import size_of
from twoshift.predict.reading import Decoding
from twoshift.recommend import recommended
from twoshift.train.checkpoint import load_source

RECOMMENDED = "recommended"
ESTIMATOR = "ema"  # beside an adapter, as in `twoshift run`
SIZE = 224


@dataclass(frozen=True)
class Ready:
    """A classifier that is ready to predict.

    Attributes:
        live: The method; its own stream is not used.
        plain: The classifier without adaptation, for comparison.
        classes: Names of the classes.
        facts: What is known of the classifier.
        temperature: That of its calibrated probabilities.
        decoding: How its images are made of files.
    """

    live: Method
    plain: nn.Module
    classes: tuple[str, ...]
    facts: Calibration
    temperature: float
    decoding: Decoding

    @property
    def training_labels(self) -> list[float] | None:
        """Label distribution of the training images, where it is known."""
        labels: list[float] | None = self.facts.of("running").get("source_prior")
        return labels


@dataclass(frozen=True)
class Recipe:
    """How to build what predicts, from files: in this process, or on a worker elsewhere.

    Attributes:
        model: The network, as `open_model` takes it.
        weights: Its weights.
        calibration: Folder of its facts.
        source: Instead of these three: folder of a model that twoshift trained and calibrated.
        settings: Settings of the network.
        method: ``"recommended"``, or the name of a method.
        adapter: Folder of an adapter, or the name of one that needs no training.
        estimator: Name of an estimator, for a method with an adapter.
        method_settings: Settings of the method.
        estimator_settings: Settings of the estimator.
        classes: File with the names of the classes, one per line.
        decoding: How images are made of files, where it is not as the facts say.
        device: Where to compute.
    """

    model: str | None = None
    weights: str | None = None
    calibration: str | None = None
    source: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    method: str = RECOMMENDED
    adapter: str | None = None
    estimator: str | None = None
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    estimator_settings: Mapping[str, Any] = field(default_factory=dict)
    classes: str | None = None
    decoding: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None

    def open(self) -> Ready:
        """Build it."""
        decoding: dict[str, Any] = {}
        if self.source is not None:
            loaded = load_source(self.source)
            model, facts = loaded.model, Calibration.load(self.source)
            decoding = loaded.card.recipe.get("decoding") or {}
        else:
            assert self.calibration is not None
            assert self.model is not None
            facts = Calibration.load(self.calibration)
            count = len(facts.of("running")["bias"])
            model = open_model(self.model, self.weights, count, self.settings)
        if self.device is not None:
            model = model.to(self.device)
        names = None if self.classes is None else _names(Path(self.classes))
        return make_ready(
            model,
            facts,
            method=self.method,
            adapter=self.adapter,
            estimator=self.estimator,
            method_settings=self.method_settings,
            estimator_settings=self.estimator_settings,
            classes=names,
            decoding={**decoding, **self.decoding},
        )


def make_ready(
    model: nn.Module,
    facts: Calibration,
    *,
    method: str = RECOMMENDED,
    adapter: str | None = None,
    estimator: str | None = None,
    method_settings: Mapping[str, Any] | None = None,
    estimator_settings: Mapping[str, Any] | None = None,
    classes: tuple[str, ...] | None = None,
    decoding: Mapping[str, Any] | None = None,
) -> Ready:
    """Put a classifier and its facts together; see `Recipe`."""
    if method == RECOMMENDED:
        if adapter or estimator or estimator_settings:
            cure = "Choose another method: --method NAME, see: twoshift ls methods"
            what = "an adapter or estimator of one's own"
            raise SettingError(f"{what} with the recommended method", cure=cure)
        live: Method = recommended(model, facts, **(method_settings or {}))
    else:
        live = _built(model, facts, method, adapter, estimator, method_settings, estimator_settings)
    known = _classifier(facts)
    plain = prepare(model, **known.prepared).eval()
    running = facts.of("running")
    names = _class_names(len(running["bias"]), known, classes)
    expected = _decoding(known, decoding or {})
    return Ready(live, plain, names, facts, float(running["temperature"]), expected)


def _classifier(facts: Calibration) -> Classifier:
    if facts.classifier is None:
        cure = "Calibrate the model: twoshift calibrate --model ... --out DIR."
        raise SettingError("the calibration", must_be="one that names its classifier", cure=cure)
    return facts.classifier


def _built(
    model: nn.Module,
    facts: Calibration,
    method: str,
    adapter: str | None,
    estimator: str | None,
    method_settings: Mapping[str, Any] | None,
    estimator_settings: Mapping[str, Any] | None,
) -> Method:
    """Any method; with an adapter, it follows the labels by an estimator."""
    known, kind = _classifier(facts), methods.methods[method]
    net, chosen = prepare(model, **known.prepared), dict(method_settings or {})
    known.check(net)
    predicts = methods.methods[chosen.get("method", method)]  # another one, for dart
    values = facts.of(predicts.statistics_on(net))
    arguments = hand_out(values, kind, chosen)
    if adapter is None:
        if estimator or estimator_settings:
            raise SettingError("an estimator", must_be="used with an adapter", cure="--adapter DIR")
        live: Method = methods.create(method, net, **arguments)
        return live if known.inputs is None else live.expect(known.inputs)
    part = _adapter(adapter, net, known.head, len(values["bias"]), values)
    live = methods.create(method, attach(net, part, known.head), **arguments)
    name = estimator or ESTIMATOR
    follows = hand_out(
        values, estimators.estimators[name], estimator_settings or {}, calibrated=True
    )
    judge = values.get("accuracy_judge") if facts.held_out else None
    aware = LabelAware(live, estimators.create(name, part.classes, **follows), judge)
    return aware if known.inputs is None else aware.expect(known.inputs)


def _adapter(
    name: str, net: nn.Module, head: str, classes: int, facts: Mapping[str, Any]
) -> Adapter:
    if name not in adapters.adapters or Path(name).exists():
        return load_adapter(name)
    kind = adapters.adapters[name]
    if kind.needs_training:
        raise SettingError(f"adapter {name!r}", must_be="a trained one", cure="--adapter FOLDER")
    sizes = (classes, classes) if head == ANSWER else size_of(bare_head(net, head)[1])
    return adapters.create(name, *sizes, **hand_out(facts, kind))


def _names(file: Path) -> tuple[str, ...]:
    return tuple(line.strip() for line in text_of(file).splitlines() if line.strip())


def _class_names(count: int, known: Classifier, given: tuple[str, ...] | None) -> tuple[str, ...]:
    """Names of the classes: those of the calibration, the given ones, or numbers."""
    calibrated = known.classes
    if given is not None and len(given) != count:
        raise MismatchError("names of the classes", must_be=f"{count} of them", got=len(given))
    if calibrated is not None and given is not None and calibrated != given:
        first = next(i for i, (a, b) in enumerate(zip(calibrated, given, strict=True)) if a != b)
        raise MismatchError(
            f"name of class {first}",
            must_be=f"{calibrated[first]!r}, as in the calibration",
            got=repr(given[first]),
        )
    names = given or calibrated or tuple(map(str, range(count)))
    if len({*names}) < count:  # columns and counts go by name
        names = tuple(f"{name} ({i})" for i, name in enumerate(names))
    return names


def _decoding(known: Classifier, chosen: Mapping[str, Any]) -> Decoding:
    inputs = known.inputs
    size = chosen.get("size")
    if size is None:
        size = SIZE if inputs is None or inputs.size is None else inputs.size[0]
    frame = chosen.get("frame")
    if frame is None:
        frame = frame_of(size)
    channels = 1 if inputs is not None and inputs.channels == 1 else 3
    return Decoding(size, frame, bool(chosen.get("squash")), channels)
