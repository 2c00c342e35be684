"""A small vision transformer. Dosovitskiy et al., https://arxiv.org/abs/2010.11929.

As in the simple ViT of Beyer et al., https://arxiv.org/abs/2205.01580, positions are sines and
cosines, so that images may have any size that patches divide, and the classifier reads the mean of
all tokens instead of a class token, which they found to train better. A stem of convolutions trains
faster, too: Xiao et al., https://arxiv.org/abs/2106.14881. Images are in [0, 1]; the model
normalises them itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.errors import BatchError, SettingError
from twoshift.models.base import Normalize, models
from twoshift.models.convnext import ChannelNorm
from twoshift.registry import check_choice, check_numbers

PATCH = 4  # edge in pixels


class Attention(nn.Module):
    """Self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens of shape (B, tokens, width)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a perceptron of two layers, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of the same shape."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def positions(rows: int, columns: int, width: int, like: Tensor) -> Tensor:
    """Sines and cosines that tell the places of a grid apart, (rows * columns, width).

    A quarter of the width each: sine of the column, cosine of the column, and both of the row, at
    frequencies that fall geometrically from 1 to 1/10,000.

    Args:
        rows: Of the grid.
        columns: Of the grid.
        width: Length of a token, a multiple of 4.
        like: A tensor of the wanted type and device.
    """
    steps = torch.arange(width // 4, dtype=torch.float32, device=like.device)
    frequencies = 10_000 ** (-steps / max(width // 4 - 1, 1))
    y = torch.arange(rows, device=like.device)[:, None] * frequencies
    x = torch.arange(columns, device=like.device)[:, None] * frequencies
    along_y = torch.cat([y.sin(), y.cos()], 1)[:, None].expand(-1, columns, -1)
    along_x = torch.cat([x.sin(), x.cos()], 1)[None].expand(rows, -1, -1)
    return torch.cat([along_x, along_y], 2).flatten(0, 1).to(like.dtype)


def _cut(channels: int, width: int) -> nn.Module:
    return nn.Conv2d(channels, width, PATCH, PATCH)


def _convolve(channels: int, width: int) -> nn.Module:
    half = width // 2
    first = nn.Conv2d(channels, half, 3, 2, 1, bias=False)
    return nn.Sequential(first, ChannelNorm(half), nn.GELU(), nn.Conv2d(half, width, 3, 2, 1))


STEMS = {"patch": _cut, "conv": _convolve}


@models.register("vit_cifar")
class CifarViT(nn.Module):
    """Vision transformer for images of 28 to 64 pixels; LayerNorm, mean of all tokens.

    Args:
        classes: Number of classes.
        width: Length of a token, a multiple of 4 and of ``heads``.
        blocks: Number of transformer blocks.
        heads: Attention heads of a block.
        stem: How patches of 4x4 pixels become tokens: ``"patch"``, each on its own, or ``"conv"``,
            two strided convolutions that overlap.
        channels: Channels of the images.
        mean: Mean of the training images per channel, in [0, 1].
        std: Standard deviation of the training images per channel, in [0, 1].
    """

    def __init__(
        self,
        classes: int = 10,
        width: int = 128,
        blocks: int = 5,
        heads: int = 4,
        stem: str = "patch",
        channels: int = 3,
        mean: Sequence[float] = (0.4914, 0.4822, 0.4465),
        std: Sequence[float] = (0.2470, 0.2435, 0.2616),
    ) -> None:
        super().__init__()
        check_numbers("the network", "a whole number from 2", classes=classes)
        check_numbers("the network", "a whole number from 1", blocks=blocks, heads=heads)
        check_numbers("the network", "a whole number from 1", width=width)
        check_choice("the network", STEMS, stem=stem)
        if width % 4 or width % heads:
            must_be = f"a multiple of 4 and of heads, {heads}"
            raise SettingError("width of the network", must_be=must_be, got=width)
        self.normalize = Normalize(mean, std, channels)
        self.stem = STEMS[stem](channels, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1], (B, channels, H, W)."""
        height, width = x.shape[-2:]
        if height % PATCH or width % PATCH:
            must_be, got = f"multiples of {PATCH}, the edge of a patch", (height, width)
            raise BatchError("height and width of images", must_be=must_be, got=got)
        tokens = self.stem(self.normalize(x)).flatten(2).transpose(1, 2)
        places = positions(height // PATCH, width // PATCH, tokens.shape[2], tokens)
        return self.head(self.norm(self.blocks(tokens + places)).mean(1))
