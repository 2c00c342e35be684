"""A small ConvNeXt. Liu et al., "A ConvNet for the 2020s", https://arxiv.org/abs/2201.03545.

For small images: the stem halves the resolution instead of quartering it, and there are three
stages. So shallow a network needs no layer scale. Images are in [0, 1]; the model normalises them
itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from twoshift.errors import SettingError
from twoshift.models.base import Normalize, models
from twoshift.registry import check_numbers


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of (B, C, H, W), at every position by itself.

    With channels last in memory, as in training, both permutations are views: nothing is copied.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``; the result has channels last in memory."""
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A depthwise convolution, then a perceptron of two layers at every position; a shortcut."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, kernel, 1, kernel // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Residual block."""
        h = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        h = self.pwconv2(self.act(self.pwconv1(h)))
        return x + h.permute(0, 3, 1, 2)


@models.register("convnext_cifar")
class CifarConvNeXt(nn.Module):
    """ConvNeXt with a 2x2 stem and three stages, for images of 28 to 64 pixels; LayerNorm.

    Args:
        classes: Number of classes.
        width: Channels of the first stage; every later stage has twice as many.
        blocks: Residual blocks per stage.
        kernel: Edge of the depthwise convolutions, an odd number; 7 in the paper.
        channels: Channels of the images.
        mean: Mean of the training images per channel, in [0, 1].
        std: Standard deviation of the training images per channel, in [0, 1].
    """

    def __init__(
        self,
        classes: int = 10,
        width: int = 48,
        blocks: int = 2,
        kernel: int = 7,
        channels: int = 3,
        mean: Sequence[float] = (0.4914, 0.4822, 0.4465),
        std: Sequence[float] = (0.2470, 0.2435, 0.2616),
    ) -> None:
        super().__init__()
        check_numbers("the network", "a whole number from 2", width=width, classes=classes)
        check_numbers("the network", "a whole number from 1", blocks=blocks, kernel=kernel)
        if kernel % 2 == 0:
            raise SettingError("kernel of the network", must_be="an odd number", got=kernel)
        self.normalize = Normalize(mean, std, channels)
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 2, 2), ChannelNorm(width))
        self.stages = nn.Sequential()
        for outputs in (width, 2 * width, 4 * width):
            stage = nn.Sequential()
            if outputs > width:
                half = outputs // 2
                stage.extend([ChannelNorm(half), nn.Conv2d(half, outputs, 2, 2)])
            stage.extend(Block(outputs, kernel) for _ in range(blocks))
            self.stages.append(stage)
        self.norm = nn.LayerNorm(4 * width)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1], (B, channels, H, W)."""
        x = self.stages(self.stem(self.normalize(x)))
        return self.head(self.norm(x.mean((2, 3))))
