"""A cell: all settings that decide one number, and the key that names them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from twoshift import estimators, methods
from twoshift.bench.keys import keyed_adapter, keyed_fields, keyed_settings, keyed_source
from twoshift.errors import InputError

IDENTITY, TRAINED, CLEAN = "identity", "trained", "clean"
JOINED = "+"  # between corruptions that follow one another
NATURAL = "natural"  # keep the labels of the data set: for sets that have a label shift
PROTOCOL = 1  # of measuring; to be raised, which changes all keys, when numbers change


@dataclass(frozen=True)
class Model:
    """A source model and its adapter, described by recipes: neither need be trained yet.

    Attributes:
        source: All settings of the source recipe.
        adapter: All settings of the adapter recipe; None where no adapter is trained.
        seed: Seed of both trainings.
    """

    source: dict[str, Any]
    adapter: dict[str, Any] | None = None
    seed: int = 0

    @property
    def source_key(self) -> str:
        """Name of the source model."""
        return digest([keyed_source(self.source), self.seed])

    @property
    def adapter_key(self) -> str:
        """Name of the adapter, which belongs to one source model."""
        content = self.content(with_adapter=True)
        return digest([content["source"], content["adapter"], self.seed])

    def content(self, with_adapter: bool) -> dict[str, Any]:
        """What is in the key of a cell with this model.

        Args:
            with_adapter: Whether the cell uses the adapter.
        """
        content = keyed_fields("model", self)
        content |= {"source": keyed_source(self.source), "adapter": None}
        if with_adapter and self.adapter is not None:
            content["adapter"] = keyed_adapter(self.adapter)
        return content


@dataclass(frozen=True)
class Cell:
    """One method on one stream.

    Attributes:
        model: Recipes of the source model and the adapter; None where the caller provides both.
        target: Data set of the test images; by default the one that the source was trained on.
        method: Registered name of the method.
        settings: Settings of the method; those not named have their defaults.
        adapter: None, ``"trained"``, or the registered name of one that needs no training:
            ``"identity"`` (the control: attached, but changes nothing), ``"logit"`` (adds the
            logarithm of the estimate), ``"calibrated"`` (adds it to calibrated logits).
        estimator: Registered name of the estimator of the label distribution, which an adapter
            needs.
        estimator_settings: Settings of the estimator; the oracle's prior comes from the stream.
        corruption: Registered corruption, or ``"clean"``; joined by plus, each of them in one of as
            many equal parts of the stream, one after another: ``"fog+clean+snow"``.
        severity: 1 to 5.
        labels: Name of the label distribution, or of a schedule of a changing one; ``"natural"``
            takes all images of the data set.
        seed: Seed of the stream: which images, in which order, which random label distribution.
        batch_size: Images per batch.
        order: Name of the order in which images arrive, for example ``"bursts-0.1"``.
        images: At most so many images, drawn in proportion; None takes as many as there are.
    """

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    estimator: str = "ema"
    estimator_settings: dict[str, Any] = field(default_factory=dict)
    corruption: str = "clean"
    severity: int = 5
    labels: str = "uniform"
    seed: int = 0
    batch_size: int = 64
    order: str = "shuffled"
    model: Model | None = None
    target: str | None = None
    images: int | None = None

    @property
    def corruptions(self) -> tuple[str, ...]:
        """Its corruptions, one after another; nearly always a single one."""
        return tuple(self.corruption.split(JOINED))

    @property
    def sequence(self) -> str:
        """Order and number of the images, where they are not the default; for people."""
        order = "" if self.order == "shuffled" else self.order
        images = "" if self.images is None else f"at most {self.images} images"
        return ", ".join(part for part in (order, images) if part)

    @property
    def arrival(self) -> str:
        """How the images of the stream arrive, where that is not the default; for people."""
        batches = "" if self.batch_size == 64 else f"batches of {self.batch_size}"
        return ", ".join(part for part in (self.sequence, batches) if part)

    @property
    def uses_estimator(self) -> bool:
        """Whether predictions may depend on the estimator."""
        return self.adapter is not None

    @property
    def key(self) -> str:
        """Hash of all settings that decide the number; `twoshift.bench.keys` has the rules.

        It can be computed without data and weights.
        """
        content = keyed_fields("cell", self) | {"protocol": PROTOCOL}
        method = methods.methods[self.method]
        content["settings"] = keyed_settings("methods", self.method, method, self.settings)
        name = content.pop("estimator")
        content["estimator_settings"] = None
        if self.uses_estimator:
            kind, given = estimators.estimators[name], self.estimator_settings
            settings = keyed_settings("estimators", name, kind, given)
            content["estimator_settings"] = [name, settings]
        if self.model is not None:
            content["model"] = self.model.content(with_adapter=self.adapter == TRAINED)
        return digest(content)


def digest(content: Any) -> str:
    """Hash of plain data, the same on every machine."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cell_from(content: dict[str, Any]) -> Cell:
    """A cell from the plain data of a record.

    Raises:
        InputError: The data have a field that a cell does not have.
    """
    try:
        model = content.get("model")
        return Cell(**{**content, "model": None if model is None else Model(**model)})
    except (TypeError, AttributeError) as e:
        raise InputError("the cell of a record", must_be="fields of a cell", got=e) from e
