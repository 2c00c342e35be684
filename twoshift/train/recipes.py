"""Recipes: settings of a training as data, checked on reading, named after their file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from twoshift.errors import SettingError, UnknownName
from twoshift.registry import near_miss

Strategy = Literal[
    "balanced_softmax", "cross_entropy", "balanced_sampling", "classifier_retraining"
]


class Optimiser(BaseModel):
    """SGD with momentum and a learning-rate schedule."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: int = Field(200, ge=1)
    batch_size: int = Field(128, ge=2)  # batch statistics need two images
    lr: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = True
    weight_decay: float = Field(5e-4, ge=0)
    schedule: Literal["cosine", "one_cycle", "constant"] = "cosine"
    augment: Literal["crop_flip", "crop", "none"] = "crop_flip"


class SourceRecipe(Optimiser):
    """How a source model is trained.

    Attributes:
        dataset: Registered data set.
        ratio: Imbalance ratio of the long-tailed subset; 1 takes every image.
        profile: Shape of the tail.
        architecture: Registered backbone.
        settings: Settings of the backbone.
        strategy: How the long tail is met.
        retrain_epochs: Epochs of the second phase of classifier re-training.
    """

    dataset: str = "cifar10"
    ratio: float = Field(100, ge=1)
    profile: Literal["exponential", "pareto", "step"] = "exponential"
    architecture: str = "resnet18_cifar"
    settings: dict[str, Any] = Field(default_factory=dict)
    strategy: Strategy = "balanced_softmax"
    retrain_epochs: int = Field(10, ge=1)


class AdapterRecipe(Optimiser):
    """How an adapter is trained on a frozen source model.

    Attributes:
        adapter: Settings of the adapter (dW form, parts, condition, lambdas).
        points: Label distributions to draw from: 3, 5, 7, or ``inf`` (kept as 0), a continuum.
        views: Augmented passes whose features are kept and reused; 0 makes a new one per epoch.
    """

    lr: float = Field(1e-3, gt=0)
    adapter: dict[str, Any] = Field(default_factory=dict)
    points: Literal[0, 3, 5, 7] = 3
    views: int = Field(0, ge=0)

    @field_validator("points", mode="before")
    @classmethod
    def _continuum(cls, value: Any) -> Any:
        return 0 if value in ("inf", float("inf")) else value


R = TypeVar("R", SourceRecipe, AdapterRecipe)


def recipe_names(kind: type[BaseModel]) -> dict[str, Path]:
    """Names and files of the recipes that come with the package."""
    folder = "source" if kind is SourceRecipe else "adapter"
    with resources.as_file(resources.files("twoshift.train") / "recipe_files" / folder) as path:
        return {f.stem: f for f in sorted(path.glob("*.yaml"))}


def load_recipe(kind: type[R], name: str | Path, **changes: Any) -> R:
    """Read a recipe by name or file; ``changes`` that are not None replace its settings."""
    known = recipe_names(kind)
    path = Path(name) if str(name).endswith((".yaml", ".yml")) else known.get(str(name))
    if path is None or not path.exists():
        raise UnknownName(f"unknown recipe {str(name)!r}", cure=near_miss(str(name), known))
    try:
        content = yaml.safe_load(path.read_text()) or {}
        if not isinstance(content, dict):
            raise SettingError(f"recipe {path}", must_be="a mapping", got=type(content).__name__)
        merged = dict(content)
        for key, value in changes.items():
            if isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] = {**merged[key], **value}
            elif value is not None:
                merged[key] = value
        return kind.model_validate(merged)
    except yaml.YAMLError as e:
        raise SettingError(f"recipe {path} is not YAML: {e}") from e
    except ValidationError as e:
        wrong = e.errors()[0]
        field = ".".join(str(part) for part in wrong["loc"])
        cure = near_miss(field, kind.model_fields) if wrong["type"] == "extra_forbidden" else None
        raise SettingError(
            f"setting {field!r} of recipe {name}: {wrong['msg']}", got=wrong["input"], cure=cure
        ) from e
