"""Recipes: the settings of a training, read from a YAML file and checked; named after the file."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from twoshift.errors import SettingError, UnknownName
from twoshift.registry import did_you_mean, near_miss
from twoshift.train._yaml import read_yaml

Strategy = Literal[
    "balanced_softmax", "cross_entropy", "balanced_sampling", "classifier_retraining"
]
Augmentation = Literal["crop_flip", "crop", "none", "resized_crop_flip"]


class Decoding(TypedDict, total=False):
    """How image files are decoded; the data set has defaults for missing settings.

    Attributes:
        size: Side of the images that the model sees.
        frame: Side of the frame that these images are cut from.
        squash: Whether the whole image is resized to the frame, changing its proportions.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    size: Annotated[int, Field(ge=1)]
    frame: Annotated[int, Field(ge=1)]
    squash: bool


class Optimiser(BaseModel):
    """An optimiser, SGD with momentum by default, and a learning-rate schedule.

    A setting that is None was not chosen: it is left out of dumps, and so of keys, cards and jobs.
    The default optimiser is left out, too, since older ones do not name it.

    Attributes:
        momentum: Of SGD; for AdamW the decay of the mean gradient.
        nesterov: Only for SGD, and so False for AdamW.
        optimizer: ``"adamw"`` suits networks without batch normalisation.
        schedule: Learning rate over the training; ``"steps"`` divides it by 10 at each milestone.
        milestones: Numbers of epochs after which the rate is divided.
        augment: Random views of the images. ``"crop_flip"`` and ``"crop"`` are cut from the frame,
            or after zero padding if there is no frame; ``"resized_crop_flip"`` is a part of the
            frame of any size.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    epochs: int = Field(200, ge=1)
    batch_size: int = Field(128, ge=2)  # batch statistics need two images
    lr: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = True
    weight_decay: float = Field(5e-4, ge=0)
    schedule: Literal["cosine", "one_cycle", "constant", "steps"] = "cosine"
    augment: Augmentation = "crop_flip"
    milestones: list[Annotated[int, Field(ge=1)]] | None = None
    optimizer: Literal["sgd", "adamw"] = "sgd"

    @pydantic.model_validator(mode="after")
    def _steps_have_milestones(self) -> Self:
        if (self.schedule == "steps") != bool(self.milestones):
            raise ValueError("milestones must be given with the schedule 'steps', and only then")
        return self

    @pydantic.model_validator(mode="after")
    def _adamw_has_no_nesterov(self) -> Self:
        if self.optimizer == "adamw" and self.nesterov:
            raise ValueError("nesterov must be false with the optimizer 'adamw'")
        return self

    @pydantic.model_serializer(mode="wrap")
    def _as_chosen(self, handler: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        chosen = {name: value for name, value in handler(self).items() if value is not None}
        if self.optimizer == "sgd":
            del chosen["optimizer"]
        return chosen


class SourceRecipe(Optimiser):
    """How a source model is trained.

    Attributes:
        dataset: Registered name of the data set.
        ratio: Imbalance ratio of the long-tailed subset; 1 takes every image.
        profile: Shape of the tail.
        architecture: Registered name of the backbone.
        settings: Settings of the backbone.
        strategy: How the training compensates for the long tail.
        retrain_epochs: Epochs of the second phase of classifier re-training.
        decoding: Decoding of image files; test images are decoded in the same way.
        pretrained: Weights to start from: a file, which may be in the data folder, or ``"package"``
            for a backbone whose package provides weights.
        backbone_lr: Factor on the learning rate of everything but the head.
        order: Order of the classes from head to tail: ``"index"`` (the default), or ``"size"``,
            which keeps more images if the classes differ in size.
    """

    dataset: str = "cifar10"
    ratio: float = Field(100, ge=1)
    profile: Literal["exponential", "pareto", "step"] = "exponential"
    architecture: str = "resnet18_cifar"
    settings: dict[str, Any] = Field(default_factory=dict)
    strategy: Strategy = "balanced_softmax"
    retrain_epochs: int = Field(10, ge=1)
    decoding: Decoding | None = None
    pretrained: str | None = None
    backbone_lr: float | None = Field(None, gt=0)
    order: Literal["index", "size"] | None = None


class AdapterRecipe(Optimiser):
    """How an adapter is trained on a frozen source model.

    Attributes:
        adapter: Settings of the adapter (dW form, parts, condition, lambdas); ``name`` is the
            registered one, the paper's by default.
        points: Number of label distributions to draw from: 3, 5, 7, or ``inf`` for a continuum,
            which is stored as 0.
        views: Augmented passes whose features are kept and reused; 0 makes a new one per epoch.
    """

    lr: float = Field(1e-3, gt=0)
    adapter: dict[str, Any] = Field(default_factory=dict)
    points: Literal[0, 3, 5, 7] = 3
    views: int = Field(0, ge=0)

    @property
    def named_adapter(self) -> tuple[str, dict[str, Any]]:
        """Registered name and settings of the adapter."""
        settings = {k: v for k, v in self.adapter.items() if k != "name"}
        return self.adapter.get("name", "label_shift"), settings

    @pydantic.field_validator("adapter")
    @classmethod
    def _classwise(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """In 0.1.0 a classwise adapter was spelt as a condition of the paper's."""
        if settings.get("condition") != "classwise":
            return settings
        from twoshift.adapters._files import current_spelling  # recipes do without torch

        name, settings = current_spelling(settings)
        return {"name": name, **settings}

    @pydantic.field_validator("points", mode="before")
    @classmethod
    def _infinity_as_zero(cls, value: Any) -> Any:
        return 0 if value in ("inf", float("inf")) else value


R = TypeVar("R", bound=Optimiser)


def recipe_names(kind: type[BaseModel]) -> dict[str, Path]:
    """Names and files of the recipes that come with the package."""
    folder = "source" if kind is SourceRecipe else "adapter"
    with resources.as_file(resources.files("twoshift.train") / "recipe_files" / folder) as path:
        return {f.stem: f for f in sorted(path.glob("*.yaml"))}


def merged(*settings: dict[str, Any]) -> dict[str, Any]:
    """Later settings replace earlier ones; groups of settings are merged."""
    result: dict[str, Any] = {}
    for key, value in (item for part in settings for item in part.items()):
        # an adapter of another name does not inherit settings
        both = isinstance(value, dict) and isinstance(result.get(key), dict) and "name" not in value
        result[key] = {**result[key], **value} if both else value
    return result


def load_recipe(kind: type[R], name: str | Path, **changes: Any) -> R:
    """Read a recipe by name or file, and change some of its settings.

    A change to None is ignored, except for a setting that may be None, such as ``pretrained``.
    """
    files = recipe_names(kind)
    path = Path(name) if str(name).endswith((".yaml", ".yml")) else files.get(str(name))
    if path is None or not path.exists():
        raise UnknownName(f"unknown recipe {str(name)!r}", cure=near_miss(str(name), files))
    try:
        content = read_yaml(path, f"recipe {path}") or {}
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            must_be, kind_of = "a mapping of names to values", type(content).__name__
            raise SettingError(f"recipe {path}", must_be=must_be, got=kind_of)
        optional = [key for key, field in kind.model_fields.items() if field.default is None]
        chosen = {k: v for k, v in changes.items() if v is not None or k in optional}
        recipe = kind.model_validate(merged(content, chosen))
        json.dumps(recipe.model_dump(), allow_nan=False)  # as keys and cards will
        return recipe
    except ValidationError as e:
        raise _explained(str(name), kind, e) from e
    except SettingError:  # a ValueError, too
        raise
    except (TypeError, ValueError) as e:  # a date or NaN among the settings
        must_be = "numbers, text, lists and groups"
        raise SettingError(f"settings of recipe {name}", must_be=must_be, got=e) from e


def _explained(recipe: str, kind: type[Optimiser], error: ValidationError) -> SettingError:
    """What is wrong with a recipe, and which setting or value may have been meant."""
    first = error.errors()[0]
    *group, field = map(str, first["loc"] or [""])
    cure = None
    if first["type"] == "extra_forbidden":
        known = Decoding.__annotations__ if group == ["decoding"] else kind.model_fields
        cure = near_miss(field, known)
    elif first["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        cure = did_you_mean(str(first["input"]), choices) or None
    place = ".".join([*group, field])
    whose = f"setting {place!r} of recipe {recipe}" if place else f"recipe {recipe}"
    got = str(first["input"])[:200] if place else None
    return SettingError(f"{whose}: {first['msg']}", got=got, cure=cure)
