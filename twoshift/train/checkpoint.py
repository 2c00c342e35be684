"""Source models on disk: weights in safetensors, everything else in a readable card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from twoshift import __version__, models, priors
from twoshift.errors import CheckpointError, TwoshiftError
from twoshift.priors import Prior
from twoshift.storage import atomic_folder, read_card, read_tensors, write_card, write_tensors

KIND = "source model"
WEIGHTS = "model.safetensors"


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
    class_counts: list[int]
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
    """Write ``model`` and ``card`` to ``folder``, atomically; an existing one is replaced."""
    with atomic_folder(Path(folder)) as temporary:
        write_tensors(temporary / WEIGHTS, model.state_dict())
        write_card(
            temporary, {"kind": KIND, **asdict(card), "source_prior": list(map(float, card.prior))}
        )


def load_source(folder: str | Path) -> SourceModel:
    """Read a source model back, in evaluation mode; a damaged one is refused."""
    content = read_card(Path(folder), KIND)
    weights = read_tensors(content["folder"] / WEIGHTS)
    try:
        fields = SourceCard.__dataclass_fields__  # cards of older versions lack the newer ones
        card = SourceCard(**{name: content[name] for name in fields if name in content})
        model = models.create(card.architecture, **card.settings)
        model.load_state_dict(weights)
    except (KeyError, TypeError, RuntimeError, TwoshiftError) as e:
        raise CheckpointError(f"{folder} does not fit its own card: {e}") from e
    digest = content["files"][WEIGHTS]
    return SourceModel(model.eval(), card, digest, content["folder"])
