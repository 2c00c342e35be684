"""Backbones of other libraries: ``timm:NAME`` and ``hf:NAME`` (transformers image classifiers).

The normalisation of their input becomes a part of the model. Their pretrained weights are fetched
only when `twoshift.models.weights.load_weights` asks for them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twoshift.errors import MissingExtra, ModelError, SettingError, UnknownName
from twoshift.models._plain_norm import plain_batch_norms
from twoshift.models.base import Normalize
from twoshift.models.head import find_head
from twoshift.models.norm import batch_norms, use_iabn
from twoshift.registry import check_choice, check_settings, near_miss


class HubModel(nn.Module):
    """A classifier of another library that takes images in [0, 1] and returns a tensor of logits.

    Args:
        name: Name of the model in the other library.
        classes: Number of classes.
        norm: Kind of its batch norms: ``"iabn"`` makes them instance-aware, ``"bn"`` only checks
            that there are any, None leaves all layers as they are.
        k: Width of IABN's soft shrinkage.
        channels: Channels of the images.
        mean: Mean of the training images per channel, in [0, 1]; by default the library's.
        std: Standard deviation of the training images per channel; by default the library's.
    """

    def __init__(
        self,
        name: str,
        classes: int = 1000,
        norm: str | None = None,
        k: float = 4.0,
        channels: int = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.name, self.channels = name, channels
        self.net = self.build(classes)
        check_choice(name, (None, "bn", "iabn"), norm=norm)
        if norm is not None and not any(batch_norms(self.net)):
            must_be = "left out, as there is no batch norm"
            raise SettingError(f"norm of {name}", must_be=must_be, got=norm)
        if norm == "iabn":
            plain_batch_norms(self.net)  # some of timm's include the activation
            use_iabn(self.net, k)
        if mean is None or std is None:
            own_mean, own_std = self.statistics()
            mean, std = mean or own_mean, std or own_std
        self.normalize = Normalize(mean, std, channels)

    def build(self, classes: int) -> nn.Module:
        """Build the module of the other library with random weights."""
        raise TypeError(f"{type(self).__name__} must define build")

    def statistics(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation of the images that the model was trained on."""
        raise TypeError(f"{type(self).__name__} must define statistics")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1], (B, channels, H, W)."""
        out = self.net(self.normalize(x))
        return out if isinstance(out, Tensor) else out.logits

    def get_classifier(self) -> nn.Module:
        """The classifier head, for `find_head`."""
        return find_head(self.net)[1]


class TimmModel(HubModel):
    """A model of timm, by its name in ``timm.list_models()``."""

    def build(self, classes: int) -> nn.Module:
        """Build the timm model with random weights."""
        return self._create(pretrained=False, num_classes=classes)

    def statistics(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation in timm's configuration of the model."""
        config: dict[str, Any] = self.net.pretrained_cfg  # type: ignore[assignment]
        return config["mean"], config["std"]

    def packaged_weights(self) -> dict[str, Tensor]:
        """Pretrained weights, downloaded by timm."""
        with torch.random.fork_rng():  # building a model draws random weights
            return self._create(pretrained=True).state_dict()

    def _create(self, **settings: Any) -> nn.Module:
        timm = _library("timm")
        try:
            return timm.create_model(self.name, in_chans=self.channels, **settings)
        except (RuntimeError, OSError) as e:
            what = f"timm cannot build {self.name!r}: {e}"
            raise ModelError(what, cure="See timm.list_models().") from e


class TransformersModel(HubModel):
    """An image classifier of transformers, by its name on the Hugging Face hub or its folder."""

    def build(self, classes: int) -> nn.Module:
        """Build the transformers model from its configuration, with random weights."""
        library = _library("transformers")
        # classes are numbered: the names in the configuration are those of the pretrained ones
        numbers = {str(i): i for i in range(classes)}
        names = {"id2label": {i: name for name, i in numbers.items()}, "label2id": numbers}
        config = self._fetch(library.AutoConfig, num_channels=self.channels, **names)
        return library.AutoModelForImageClassification.from_config(config)

    def statistics(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation in the model's ``preprocessor_config.json``."""
        library = _library("transformers")
        try:
            config, _ = library.ImageProcessingMixin.get_image_processor_dict(self.name)
            return config["image_mean"], config["image_std"]
        except (OSError, KeyError) as e:
            what = f"{self.name} does not say how its images are normalised"
            raise ModelError(what, cure="Set mean and std.") from e

    def packaged_weights(self) -> dict[str, Tensor]:
        """Pretrained weights from the hub or the folder; safetensors only."""
        kind = _library("transformers").AutoModelForImageClassification
        with torch.random.fork_rng():
            return self._fetch(kind, use_safetensors=True).state_dict()

    def _fetch(self, kind: Any, **settings: Any) -> Any:
        try:
            return kind.from_pretrained(self.name, **settings)
        except (OSError, ValueError) as e:
            cure = "Name an image classifier on the hub, or a folder with its config.json."
            raise ModelError(f"transformers cannot build {self.name!r}: {e}", cure=cure) from e


LIBRARIES: dict[str, type[HubModel]] = {"timm": TimmModel, "hf": TransformersModel}


def create(name: str, **settings: Any) -> HubModel:
    """Build ``timm:NAME`` or ``hf:NAME``."""
    library, _, model = name.partition(":")
    if library not in LIBRARIES or not model:
        forms = [f"{known}:NAME" for known in LIBRARIES]
        raise UnknownName(f"unknown model {name!r}", cure=near_miss(f"{library}:NAME", forms))
    check_settings(f"model {name!r}", LIBRARIES[library], settings)
    return LIBRARIES[library](model, **settings)


def _library(name: str) -> Any:
    """Import timm or transformers; an incompatible torchvision is reported, too."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError, AttributeError) as e:
        cure = f"pip install 'twoshift[{name}]', with a torchvision that matches your torch."
        raise MissingExtra(f"cannot import {name} ({e})", cure=cure) from e
