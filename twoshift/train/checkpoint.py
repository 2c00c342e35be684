"""Source models on disk: weights in safetensors, everything else in a readable card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt
from torch import Tensor, nn

from twoshift import __version__, models, priors
from twoshift.errors import CheckpointError
from twoshift.priors import Prior
from twoshift.storage import build_to_fit, card_of, misfits, read_folder, save_folder

KIND = "source model"
WEIGHTS = "model"
# settings of backbones that decide their size
SIZES = ("classes", "channels", "width", "blocks", "heads", "kernel")


@card_of(KIND)
@dataclass(frozen=True)
class SourceCard:
    """How a source model was trained.

    Attributes:
        architecture: Registered name of the backbone.
        settings: Settings of the backbone, input normalisation included.
        classes: Names of the classes.
        class_counts: Number of training images of every class.
        dataset: Name of the training data.
        subset: Which images were used, for example ``{"profile": "exponential", "ratio": 100}``.
        strategy: How the training dealt with the long tail; it decides which label distribution
            the logits contain.
        recipe: Every setting of the training.
        seed: Seed of initialisation, order and augmentation.
        measured: Results at the end of the training, for example accuracy on held-out images.
        pretrained: SHA-256 of the weights that the training started from.
        version: Version of twoshift that trained it.
    """

    architecture: str
    settings: dict[str, Any]
    classes: list[str]
    class_counts: list[NonNegativeInt]
    dataset: str
    subset: dict[str, Any]
    strategy: str
    recipe: dict[str, Any]
    seed: int
    measured: dict[str, float] = field(default_factory=dict)
    pretrained: str | None = None
    version: str = __version__

    @property
    def prior(self) -> Prior:
        """Label distribution of the training images."""
        return priors.from_counts(self.class_counts)


@dataclass(frozen=True)
class SourceModel:
    """A trained classifier with its card.

    Attributes:
        model: The network, in evaluation mode.
        card: How it was trained.
        weights: SHA-256 of its weights.
        folder: Where it is saved, with its calibration; None for a model in memory only.
    """

    model: nn.Module
    card: SourceCard
    weights: str
    folder: Path | None = None


def save_source(folder: str | Path, model: nn.Module, card: SourceCard) -> None:
    """Write ``model`` and ``card`` to ``folder``, in one step; an existing one is replaced."""
    content = {**asdict(card), "source_prior": list(map(float, card.prior))}
    save_folder(folder, KIND, content, {WEIGHTS: model.state_dict()})


def load_source(folder: str | Path) -> SourceModel:
    """Read a source model back, in evaluation mode; a damaged one is refused."""
    saved = read_folder(folder, KIND)
    with misfits(folder):
        fields = SourceCard.__dataclass_fields__  # cards of older versions lack the newer ones
        card = SourceCard(**{name: saved.card[name] for name in fields if name in saved.card})
        weights = saved.file(WEIGHTS)
        _check_sizes(card, weights)
        model = build_to_fit(lambda: models.create(card.architecture, **card.settings), weights)
    return SourceModel(model.eval(), card, saved.digests[WEIGHTS], saved.folder)


def _check_sizes(card: SourceCard, weights: dict[str, Tensor]) -> None:
    """Refuse numbers that no tensor has, before a backbone of that size is built."""
    if len(card.classes) != len(card.class_counts):
        must_be, got = f"one for each of {len(card.classes)} classes", len(card.class_counts)
        raise CheckpointError("class counts", must_be=must_be, got=got)
    largest = max([len(weights), *(size for tensor in weights.values() for size in tensor.shape)])
    for name in SIZES:
        value = card.settings.get(name, 0)
        if isinstance(value, int) and value > largest:
            must_be = f"at most {largest}, the largest size in its weights"
            raise CheckpointError(f"{name} of {card.architecture}", must_be=must_be, got=value)
