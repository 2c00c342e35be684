"""Toy networks, batches and adapters, small enough to run every method on every kind of network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoshift import methods, models
from twoshift.adapters import LabelShiftAdapter, attach
from twoshift.estimators import EMA
from twoshift.methods import LabelAware, Method
from twoshift.models.head import find_head
from twoshift.models.norm import NORMS, batch_norms
from twoshift.registry import signature_settings

CLASSES = 5


class SmallViT(nn.Module):
    """Patches, two attention blocks with LayerNorm, mean pooling; takes 16 x 16 images only."""

    def __init__(self, size: int = 8, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (16 // patch) ** 2, size) * 0.1)
        self.blocks = nn.Sequential(_Block(size), _Block(size))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.project = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        attention = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.project(attention @ v)
        return x + self.mlp(self.norm2(x))


class MLP(nn.Module):
    """Flattened 8 x 8 images, BatchNorm1d, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * 8 * 8, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(12, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
        )
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _resnet(norm: str) -> nn.Module:
    return models.create("resnet18_cifar", classes=CLASSES, width=4, norm=norm)


NETS = {
    "resnet_bn": lambda: _resnet("bn"),
    "resnet_iabn": lambda: _resnet("iabn"),
    "resnet_gn": lambda: _resnet("gn"),
    "resnet_stem": lambda: models.create("resnet18", classes=CLASSES, width=4),
    "vit": SmallViT,
    "mlp": MLP,
}
SHAPES = {"mlp": (3, 8, 8), "resnet_stem": (3, 64, 64)}

# settings without a default, for methods that need facts about the source
REQUIRED: dict[str, dict[str, object]] = {
    "cotta": {"views": 2},
    "rotta": {"capacity": 6, "update_every": 4},
    "note": {"capacity": 6, "update_every": 4},
    "onda": {"update_every": 4},
    "eata": {"margin": 1.0, "redundancy": 1.0, "fisher_weight": 0.0},  # everything passes
    "sar": {"margin": 1.0},
    "logit_adjust": {"source_prior": [0.4, 0.3, 0.15, 0.1, 0.05]},
}


def make_net(name: str, seed: int = 0) -> nn.Module:
    """A network with nothing at its initial value, in evaluation mode."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        net = NETS[name]()
        for layer in net.modules():
            if isinstance(layer, NORMS):
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.normal_(0, 0.2)
                if getattr(layer, "running_mean", None) is not None:
                    layer.running_mean.normal_(0, 0.3)
                    layer.running_var.uniform_(0.5, 2)
        for parameter in find_head(net)[1].parameters():
            parameter.mul_(3)  # confident enough for entropy to have a slope
    return net.eval()


def make_batches(net: str, sizes: tuple[int, ...] = (8, 5, 1, 7), seed: int = 1) -> list[Tensor]:
    """Images in [0, 1] whose brightness drifts."""
    shape, g = SHAPES.get(net, (3, 16, 16)), torch.Generator().manual_seed(seed)
    return [torch.rand(b, *shape, generator=g) * (0.5 + 0.1 * (i % 5)) for i, b in enumerate(sizes)]


def make_adapter(net: nn.Module, seed: int = 2, **settings: object) -> LabelShiftAdapter:
    """An adapter that is far from the identity."""
    head = find_head(net)[1]
    with torch.random.fork_rng():  # a new linear layer draws from the global generator
        adapter = LabelShiftAdapter(head.in_features, CLASSES, **{"hidden": 7, **settings})
    return randomise(adapter, seed)


def randomise(adapter: LabelShiftAdapter, seed: int = 2) -> LabelShiftAdapter:
    """Give every parameter of an adapter a random value."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.4)
    return adapter.eval()


def make_moments(net: nn.Module, seed: int = 3) -> dict[str, list[list[list[float]]]]:
    """Mean and variance of every class before each batch normalisation, at random."""
    g, moments = torch.Generator().manual_seed(seed), {}
    for name, layer in batch_norms(net):
        shape = (CLASSES, layer.num_features)
        means, variances = torch.randn(shape, generator=g), torch.rand(shape, generator=g) + 0.5
        moments[name] = torch.stack([0.3 * means, variances]).tolist()
    return moments


def make_method(name: str, net: nn.Module, adapted: bool, **settings: object) -> Method:
    """The method called ``name``, with large steps; with an adapter and an estimate if wanted."""
    known = signature_settings(methods.methods[name])
    settings = {**({"lr": 0.02} if "lr" in known else {}), **REQUIRED.get(name, {}), **settings}
    if name == "matched":
        settings = {"moments": make_moments(net), **settings}
    if not adapted:
        return methods.create(name, net, **settings)
    inner = methods.create(name, attach(net, make_adapter(net)), **settings)
    return LabelAware(inner, EMA(CLASSES, alpha=0.3))


def snapshot(module: nn.Module) -> dict[str, object]:
    """Everything a caller can see of a module: tensors, gradients, modes, what is trained."""
    seen: dict[str, object] = {n: m.training for n, m in module.named_modules()}
    seen |= {f"{n} trains": p.requires_grad for n, p in module.named_parameters()}
    seen |= {f"{n} grad": p.grad is None for n, p in module.named_parameters()}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return seen | {f"{n} value": t.detach().clone() for n, t in tensors}


def same(a: dict[str, object], b: dict[str, object]) -> bool:
    """Whether two dictionaries of tensors and plain values are equal, bit for bit."""
    return a.keys() == b.keys() and all(
        torch.equal(v, b[k]) if isinstance(v, Tensor) else v == b[k] for k, v in a.items()
    )
