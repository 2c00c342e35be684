"""ResNets and ResNeXt. He et al., https://arxiv.org/abs/1512.03385; Xie et al., 1611.05431.

Parameters have the names and shapes of torchvision's, so that its weights fit. As in torchvision,
the stride of a bottleneck is in its 3x3 convolution. Images are in [0, 1]; the model normalises
them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.errors import SettingError
from twoshift.models.base import IMAGENET_MEAN, IMAGENET_STD, Normalize, models
from twoshift.models.norm import Norm, norm_maker
from twoshift.registry import check_numbers


class SubsampledConv(nn.Conv2d):
    """A strided 1x1 convolution that drops the skipped positions first, with the same result.

    It avoids a bug: with few channels and channels last, oneDNN's weight gradient of a strided 1x1
    convolution writes out of bounds (uxlfoundation/oneDNN issue 6035).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve every ``stride``-th position."""
        rows, columns = self.stride
        return F.conv2d(input[..., ::rows, ::columns], self.weight, self.bias)


def _downsample(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Sequential | None:
    """Shortcut of a block that changes the shape; None if the block does not."""
    if stride == 1 and inputs == outputs:
        return None
    conv = nn.Conv2d if inputs >= 16 else SubsampledConv
    return nn.Sequential(conv(inputs, outputs, 1, stride, bias=False), norm(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1 = norm(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = norm(planes)
        self.downsample = _downsample(inputs, planes, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Residual block."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + shortcut)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions, and a shortcut."""

    expansion = 4
    groups = 1
    inner = 1  # channels of the 3x3 convolution, per plane

    def __init__(self, inputs: int, planes: int, stride: int, norm: Norm) -> None:
        super().__init__()
        inner, outputs = planes * self.inner, planes * self.expansion
        if inner % self.groups:
            must_be = f"a multiple of {self.groups // self.inner}"
            raise SettingError("width", must_be=must_be, got=planes)
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = norm(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=self.groups, bias=False)
        self.bn2 = norm(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Residual block."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + shortcut)


class GroupedBottleneck(Bottleneck):
    """The bottleneck of ResNeXt: 32 groups, with four channels each at the usual width of 64."""

    groups = 32
    inner = 2


class ResNet(nn.Module):
    """Base of all networks here: a stem, four stages, and a linear classifier on mean features."""

    block: ClassVar[type[BasicBlock] | type[Bottleneck]] = BasicBlock

    def __init__(
        self,
        depths: Sequence[int],
        small: bool,
        classes: int,
        width: int,
        norm: str,
        k: float,
        channels: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        check_numbers("the network", "a whole number from 2", width=width, classes=classes)
        layer = norm_maker(norm, k)

        def stage(inputs: int, planes: int, stride: int, depth: int) -> nn.Sequential:
            first = self.block(inputs, planes, stride, layer)
            outputs = planes * self.block.expansion
            others = (self.block(outputs, planes, 1, layer) for _ in range(depth - 1))
            return nn.Sequential(first, *others)

        outputs = width * self.block.expansion  # of the first stage
        self.normalize = Normalize(mean, std, channels)
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
        self.bn1 = layer(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        self.layer1 = stage(width, width, 1, depths[0])
        self.layer2 = stage(outputs, 2 * width, 2, depths[1])
        self.layer3 = stage(2 * outputs, 4 * width, 2, depths[2])
        self.layer4 = stage(4 * outputs, 8 * width, 2, depths[3])
        self.fc = nn.Linear(8 * outputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1], (B, channels, H, W)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(self.normalize(x)))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(x.mean((2, 3)), 1))


class ImageNetResNet(ResNet):
    """A residual network for photographs: a 7x7 stem with stride 2, and max-pooling.

    Args:
        classes: Number of classes.
        width: Channels of the first stage; 64 is the published width.
        norm: ``"bn"``, ``"iabn"`` or ``"gn"``.
        k: Width of IABN's soft shrinkage.
        channels: Channels of the images.
        mean: Mean of the training images per channel, in [0, 1].
        std: Standard deviation of the training images per channel, in [0, 1].
    """

    depths: ClassVar[Sequence[int]] = (2, 2, 2, 2)

    def __init__(
        self,
        classes: int = 1000,
        width: int = 64,
        norm: str = "bn",
        k: float = 4.0,
        channels: int = 3,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__(self.depths, False, classes, width, norm, k, channels, mean, std)


@models.register("resnet18")
class ResNet18(ImageNetResNet):
    """ResNet-18: 11.69M parameters, 1.81G multiply-adds at 224 pixels."""


@models.register("resnet34")
class ResNet34(ImageNetResNet):
    """ResNet-34: 21.80M parameters, 3.66G multiply-adds at 224 pixels."""

    depths = (3, 4, 6, 3)


@models.register("resnet50")
class ResNet50(ImageNetResNet):
    """ResNet-50: 25.56M parameters, 4.09G multiply-adds at 224 pixels."""

    block, depths = Bottleneck, (3, 4, 6, 3)


@models.register("resnet101")
class ResNet101(ImageNetResNet):
    """ResNet-101: 44.55M parameters, 7.80G multiply-adds at 224 pixels."""

    block, depths = Bottleneck, (3, 4, 23, 3)


@models.register("resnext50_32x4d")
class ResNeXt50(ImageNetResNet):
    """ResNeXt-50 32x4d: 25.03M parameters, 4.23G multiply-adds at 224 pixels."""

    block, depths = GroupedBottleneck, (3, 4, 6, 3)


@models.register("resnet18_cifar")
class CifarResNet18(ResNet):
    """ResNet-18 with a 3x3 stem, for images of 28 to 64 pixels; BN, IABN or GN.

    Args:
        classes: Number of classes.
        width: Channels of the first stage: 64 in the paper (11.2M parameters); 16 suits CPUs.
        norm: ``"bn"``, ``"iabn"`` or ``"gn"``.
        k: Width of IABN's soft shrinkage.
        channels: Channels of the images.
        mean: Mean of the training images per channel, in [0, 1].
        std: Standard deviation of the training images per channel, in [0, 1].
        blocks: Residual blocks per stage; 1 makes it a ResNet-10, which suits small digits.
    """

    def __init__(
        self,
        classes: int = 10,
        width: int = 64,
        norm: str = "bn",
        k: float = 4.0,
        channels: int = 3,
        mean: Sequence[float] = (0.4914, 0.4822, 0.4465),
        std: Sequence[float] = (0.2470, 0.2435, 0.2616),
        blocks: int = 2,
    ) -> None:
        check_numbers("the network", "a whole number from 1", blocks=blocks)
        super().__init__([blocks] * 4, True, classes, width, norm, k, channels, mean, std)
