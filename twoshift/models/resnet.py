"""ResNet-18 for small images: 3x3 stem, no max-pooling. He et al., https://arxiv.org/abs/1512.03385.

Parameter names are torchvision's. Images come in as [0, 1]; their normalisation is part of the
model, so nobody has to remember it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.errors import SettingError
from twoshift.models.base import Normalize, models
from twoshift.models.norm import InstanceAwareBatchNorm

NORM_LAYERS: dict[str, Callable[[int, float], nn.Module]] = {
    "bn": lambda channels, k: nn.BatchNorm2d(channels),
    "iabn": lambda channels, k: InstanceAwareBatchNorm(channels, k=k),
    "gn": lambda channels, k: nn.GroupNorm(min(32, channels // 2), channels),
}


class SubsampledConv(nn.Conv2d):
    """A strided 1x1 convolution that leaves the positions out first: the same numbers.

    With few channels, last in memory, oneDNN's weight gradient of a strided 1x1 convolution
    writes out of bounds (uxlfoundation/oneDNN issue 6035).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve every ``stride``-th position."""
        rows, columns = self.stride
        return F.conv2d(input[..., ::rows, ::columns], self.weight, self.bias)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d if inputs >= 16 else SubsampledConv
            self.downsample = nn.Sequential(
                shortcut(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Residual block."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + shortcut)


@models.register("resnet18_cifar")
class CifarResNet18(nn.Module):
    """ResNet-18 with a 3x3 stem for images of 28 to 64 pixels, BN, IABN or GN.

    Args:
        classes: Number of classes.
        width: Channels of the first stage; 64 is the paper's (11.2M parameters), 16 suits CPUs.
        norm: ``"bn"``, ``"iabn"`` or ``"gn"``.
        k: Width of IABN's soft shrinkage.
        channels: Channels of the images.
        mean: Mean of the training images per channel, in [0, 1].
        std: Their standard deviation per channel.
        blocks: Residual blocks per stage; 1 makes it a ResNet-10, for small digits.
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
        super().__init__()
        if norm not in NORM_LAYERS:
            raise SettingError("norm of resnet18_cifar", must_be=list(NORM_LAYERS), got=repr(norm))
        if width < 2 or classes < 2:
            raise SettingError("width and classes", must_be="at least 2", got=(width, classes))
        if blocks < 1:
            raise SettingError("blocks", must_be="at least 1", got=blocks)

        def layer(outputs: int) -> nn.Module:
            return NORM_LAYERS[norm](outputs, k)

        def stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            others = (BasicBlock(outputs, outputs, 1, layer) for _ in range(blocks - 1))
            return nn.Sequential(BasicBlock(inputs, outputs, stride, layer), *others)

        self.normalize = Normalize(mean, std, channels)
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = layer(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = stage(width, width, 1)
        self.layer2 = stage(width, 2 * width, 2)
        self.layer3 = stage(2 * width, 4 * width, 2)
        self.layer4 = stage(4 * width, 8 * width, 2)
        self.fc = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1], (B, channels, H, W)."""
        x = self.relu(self.bn1(self.conv1(self.normalize(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(x.mean((2, 3)), 1))
