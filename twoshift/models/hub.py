"""Backbones of other libraries: ``timm:NAME`` and ``hf:NAME`` (transformers image classifiers).

Their normalisation of the input moves into the model, their weights stay where they are until
`twoshift.models.weights.load_weights` asks for them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twoshift.errors import MissingExtra, ModelError, SettingError, UnknownName
from twoshift.models.base import Normalize
from twoshift.models.head import find_head
from twoshift.models.norm import batch_norms, use_iabn
from twoshift.registry import check_settings, near_miss


class HubModel(nn.Module):
    """A classifier of another library, taking images in [0, 1] and giving a tensor of logits.

    Args:
        name: What the other library calls it.
        classes: Number of classes.
        norm: None leaves the layers as they are, ``"iabn"`` makes batch norms instance-aware,
            ``"bn"`` only insists that there are batch norms.
        k: Width of IABN's soft shrinkage.
        channels: Channels of the images.
        mean: Mean of the training images per channel, in [0, 1]; the library knows it.
        std: Their standard deviation per channel; likewise.
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
        if norm not in (None, "bn", "iabn"):
            raise SettingError("norm", must_be="'bn', 'iabn' or nothing", got=repr(norm))
        if norm is not None and not any(batch_norms(self.net)):
            raise SettingError(
                f"norm of {name}", must_be="left out: it has no batch norm", got=norm
            )
        if norm == "iabn":
            use_iabn(self.net, k)
        if mean is None or std is None:
            own_mean, own_std = self.statistics()
            mean, std = mean or own_mean, std or own_std
        self.normalize = Normalize(mean, std, channels)

    def build(self, classes: int) -> nn.Module:
        """The other library's module, as initialised."""
        raise TypeError(f"{type(self).__name__} must define build")

    def statistics(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation of the images that it was trained on."""
        raise TypeError(f"{type(self).__name__} must define statistics")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1], (B, channels, H, W)."""
        out = self.net(self.normalize(x))
        return out if isinstance(out, Tensor) else out.logits

    def get_classifier(self) -> nn.Module:
        """The head, where `find_head` looks for it."""
        return find_head(self.net)[1]


class TimmModel(HubModel):
    """A model of timm, by the name that ``timm.list_models()`` gives."""

    def build(self, classes: int) -> nn.Module:
        """As initialised."""
        return self._create(pretrained=False, num_classes=classes)

    def statistics(self) -> tuple[Sequence[float], Sequence[float]]:
        """From timm's configuration of the model."""
        known: dict[str, Any] = self.net.pretrained_cfg  # type: ignore[assignment]
        return known["mean"], known["std"]

    def packaged_weights(self) -> dict[str, Tensor]:
        """The weights that timm has, downloaded by it."""
        with torch.random.fork_rng():  # what is built here is thrown away
            return self._create(pretrained=True).state_dict()

    def _create(self, **settings: Any) -> nn.Module:
        timm = _library("timm")
        try:
            return timm.create_model(self.name, in_chans=self.channels, **settings)
        except (RuntimeError, OSError) as e:
            raise ModelError(
                f"timm does not make {self.name!r}: {e}", cure="See timm.list_models()."
            ) from e


class TransformersModel(HubModel):
    """An image classifier of transformers: a name on the Hugging Face hub, or a folder."""

    def build(self, classes: int) -> nn.Module:
        """As initialised, from its configuration."""
        library = _library("transformers")
        # new names of classes: those in the configuration are the hub's
        names = {
            "id2label": {i: str(i) for i in range(classes)},
            "label2id": {str(i): i for i in range(classes)},
        }
        config = self._fetch(library.AutoConfig, num_channels=self.channels, **names)
        return library.AutoModelForImageClassification.from_config(config)

    def statistics(self) -> tuple[Sequence[float], Sequence[float]]:
        """From its ``preprocessor_config.json``."""
        try:
            known, _ = _library("transformers").ImageProcessingMixin.get_image_processor_dict(
                self.name
            )
            return known["image_mean"], known["image_std"]
        except (OSError, KeyError) as e:
            raise ModelError(
                f"{self.name} does not tell how its images are normalised",
                cure="Give mean and std.",
            ) from e

    def packaged_weights(self) -> dict[str, Tensor]:
        """The weights on the hub, or in the folder; safetensors only."""
        kind = _library("transformers").AutoModelForImageClassification
        with torch.random.fork_rng():
            return self._fetch(kind, use_safetensors=True).state_dict()

    def _fetch(self, kind: Any, **settings: Any) -> Any:
        try:
            return kind.from_pretrained(self.name, **settings)
        except (OSError, ValueError) as e:
            raise ModelError(
                f"transformers does not make {self.name!r}: {e}",
                cure="Name an image classifier on the hub, or a folder with its config.json.",
            ) from e


LIBRARIES: dict[str, type[HubModel]] = {"timm": TimmModel, "hf": TransformersModel}


def create(name: str, **settings: Any) -> HubModel:
    """Build ``timm:NAME`` or ``hf:NAME``."""
    library, _, model = name.partition(":")
    if library not in LIBRARIES or not model:
        raise UnknownName(f"unknown model {name!r}", cure=near_miss(f"{library}:NAME", SPELLED))
    check_settings(f"model {name!r}", LIBRARIES[library], settings)
    return LIBRARIES[library](model, **settings)


SPELLED = [f"{library}:NAME" for library in LIBRARIES]


def _library(name: str) -> Any:
    """Import timm or transformers; a broken torchvision beside it is reported, too."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError, AttributeError) as e:
        raise MissingExtra(
            f"{name} does not import here ({e})",
            cure=f"pip install 'twoshift[{name}]', with a torchvision made for your torch.",
        ) from e
