"""Odd classifiers, as users have them: whatever they return, end in, or are wrapped in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.toys import CLASSES
from twoshift.models.norm import batch_norms

WIDTH, SHAPE = 6, (3, 8, 8)


class Body(nn.Module):
    """A convolution, batch normalisation and a rectifier."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, WIDTH, 3), norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu()


class Plain(nn.Module):
    """The body, its mean over positions, and a linear layer."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.body, self.fc = Body(norm), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.body(x).mean((2, 3)))


class ModelOutput(OrderedDict):
    """As in transformers: a dictionary whose entries are attributes, too."""

    __getattr__ = OrderedDict.__getitem__


class Answers(NamedTuple):
    """As torchvision's GoogLeNet."""

    logits: Tensor
    aux_logits: Tensor


class Dictionary(Plain):
    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        return {"loss": features.mean(), "map": features, "scores": self.fc(features.mean((2, 3)))}


class Tuple(Plain):
    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        return features, self.fc(features.mean((2, 3))), None


class Transformers(Plain):
    def forward(self, x: Tensor) -> Any:
        h = self.body(x).mean((2, 3))
        return ModelOutput(loss=None, pooled=h, logits=self.fc(h), hidden_states=(h,))


class Auxiliary(Plain):
    """A named tuple with a second head, whose name is a usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).mean((2, 3))
        return Answers(self.fc(h), self.head(h))


class Unused(nn.Module):
    """The last linear layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scores = Body(), nn.Linear(WIDTH, CLASSES)
        self.projection = nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.body(x).mean((2, 3)))


class Convolutional(nn.Module):
    """Ends in a 1x1 convolution, over one position or over many with their mean afterwards."""

    def __init__(self, pool_first: bool, rectified: bool = False) -> None:
        super().__init__()
        self.body, self.classifier = Body(), nn.Conv2d(WIDTH, CLASSES, 1)
        self.pool_first, self.rectified = pool_first, rectified

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.pool_first:
            return self.classifier(F.adaptive_avg_pool2d(h, 1))  # (B, C, 1, 1)
        scores = self.classifier(h)
        scores = scores.relu() if self.rectified else scores
        return F.adaptive_avg_pool2d(scores, 1).flatten(1)


class Cosine(nn.Module):
    """Similarity to a direction for each class: no layer's output is the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.directions = Body(), nn.Parameter(torch.randn(CLASSES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = F.normalize(self.body(x).mean((2, 3)), dim=1)
        return 8 * h @ F.normalize(self.directions, dim=1).T


class Scaled(Plain):
    """A temperature after the head."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 1.5


class NormAct(nn.BatchNorm2d):
    """Batch normalisation with dropout and activation, as timm's BatchNormAct2d."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(0.3), nn.PReLU(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )
        return self.act(self.drop(x))


class Vectors(nn.Module):
    """Takes vectors, not images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


class Layered(nn.Module):
    """No batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, WIDTH, 3), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x).mean((2, 3))))


class Inside(nn.Module):
    """A wrapped module inside another one."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.backbone, self.fc = wrap(Body()), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.backbone(x).mean((2, 3)))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


@dataclass(frozen=True)
class Odd:
    """A classifier, what it is the same as, and where its head is.

    Args:
        make: Builds it.
        head: Path of the layer whose output is the answer, or None.
        read: The logits in what it returns.
        wrap: What is put around it; the bare one has the same weights.
        shape: Of one image.
        dtype: Of its weights.
    """

    make: Callable[[], nn.Module]
    head: str | None = "fc"
    read: Callable[[Any], Tensor] = field(default=lambda out: out)
    wrap: Callable[[nn.Module], nn.Module] = field(default=lambda net: net)
    shape: tuple[int, ...] = SHAPE
    dtype: torch.dtype = torch.float32

    def bare(self, seed: int = 0) -> nn.Module:
        """The classifier in evaluation mode, with random weights and statistics."""
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            net = self.make()
            for _, layer in batch_norms(net):
                layer.running_mean.normal_(0, 0.3)
                layer.running_var.uniform_(0.5, 2)
                layer.weight.uniform_(0.5, 1.5)
        return net.eval().to(self.dtype)

    def given(self, seed: int = 0) -> nn.Module:
        """The classifier as a user gives it."""
        return self.wrap(self.bare(seed)).eval()

    def batches(self, sizes: tuple[int, ...] = (8, 5, 6), seed: int = 1) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        return [torch.rand(b, *self.shape, generator=g).to(self.dtype) for b in sizes]


ZOO = {
    "plain": Odd(Plain),
    "dictionary": Odd(Dictionary, read=lambda out: out["scores"]),
    "tuple": Odd(Tuple, read=lambda out: out[1]),
    "transformers": Odd(Transformers, read=lambda out: out.logits),
    "auxiliary": Odd(Auxiliary, read=lambda out: out.logits),
    "unused": Odd(Unused, "scores"),
    "conv": Odd(lambda: Convolutional(True), "classifier", read=lambda out: out.flatten(1)),
    "conv_pool": Odd(lambda: Convolutional(False), "classifier"),
    "squeeze": Odd(lambda: Convolutional(False, rectified=True), None),
    "cosine": Odd(Cosine, None),
    "scaled": Odd(Scaled, None),
    "parallel": Odd(Plain, wrap=nn.DataParallel),
    "compiled": Odd(Plain, wrap=compiled),
    "compiled_parallel": Odd(Plain, wrap=lambda net: compiled(nn.DataParallel(net))),
    "parallel_inside": Odd(lambda: Inside(nn.DataParallel)),
    "compiled_inside": Odd(lambda: Inside(compiled)),
    "synchronised": Odd(lambda: Plain(nn.SyncBatchNorm)),
    "norm_act": Odd(lambda: Plain(NormAct)),
    "half": Odd(Plain, dtype=torch.float16),
    "bfloat16": Odd(Plain, dtype=torch.bfloat16),
    "vectors": Odd(Vectors, "out", shape=(10,)),
    "layered": Odd(Layered, "head"),
    "sequential": Odd(
        lambda: nn.Sequential(
            Body(), nn.Conv2d(WIDTH, CLASSES, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ),
        "1",
    ),
}
