"""A cell: everything that decides a number. Running it gives that number and how it came about."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from twoshift import estimators, methods
from twoshift.errors import InputError
from twoshift.registry import signature_settings

IDENTITY, LOGIT, CALIBRATED = UNTRAINED = ("identity", "logit", "calibrated")
TRAINED, CLEAN = "trained", "clean"
NATURAL = "natural"  # labels as the data set has them: for sets with a label shift of their own
PROTOCOL = 1  # how numbers are measured; a change that moves them makes other keys


@dataclass(frozen=True)
class Model:
    """A source model and its adapter, by recipe: known before either is trained.

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
        """Names the source model."""
        return digest([self.source, self.seed])

    @property
    def adapter_key(self) -> str:
        """Names the adapter, which belongs to one source model."""
        return digest([self.source, self.adapter, self.seed])


@dataclass(frozen=True)
class Cell:
    """One method on one stream.

    Attributes:
        model: Whose weights; None where the caller brings them.
        target: The data set whose test images are the stream; by default the source's.
        method: Registered name.
        settings: Settings of the method; the others have their defaults.
        adapter: ``None``, ``"identity"`` (the control: attached, but changes nothing), ``"logit"``
            (adds the logarithm of the estimate), ``"calibrated"`` (adds it to calibrated logits) or
            ``"trained"``.
        estimator: What tells the adapter, or logit adjustment, the label distribution; ignored by
            methods without either.
        estimator_settings: Its settings; the oracle's prior comes from the stream.
        corruption: Registered corruption, or ``"clean"``.
        severity: 1 to 5.
        labels: Name of the label distribution; ``"natural"`` takes all images as they are.
        seed: Of the stream: which images, in which order; of a random distribution, too.
        batch_size: Images per batch.
        order: ``"shuffled"`` or ``"correlated"``.
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

    @property
    def uses_estimator(self) -> bool:
        """Whether predictions may depend on the estimator."""
        return self.adapter is not None

    @property
    def key(self) -> str:
        """Hash of everything that decides the number, defaults of the method included.

        Neither data nor weights are needed for it.
        """
        chosen = {**signature_settings(methods.methods[self.method]), **self.settings}
        told: list[Any] | None = None
        if self.uses_estimator:
            defaults = signature_settings(estimators.estimators[self.estimator])
            told = [self.estimator, {**defaults, **self.estimator_settings}]
        model = self.model and {**vars(self.model)}  # not asdict, which copies every leaf
        if model and self.adapter != TRAINED:
            model["adapter"] = None  # it is not used
        content = {**vars(self), "settings": chosen, "model": model, "protocol": PROTOCOL}
        del content["estimator"]
        return digest({**content, "estimator_settings": told})


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
