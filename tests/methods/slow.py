"""Slow, obvious references that the methods are compared with."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from twoshift.models.norm import NORMS


def affine(net, frozen=()):
    """Weights and biases of the norm layers by name, those below the frozen paths left out."""
    return {
        f"{path}.{kind}": getattr(layer, kind)
        for path, layer in net.named_modules()
        if isinstance(layer, NORMS) and not any(f"{path}.".startswith(f"{f}.") for f in frozen)
        for kind in ("weight", "bias")
    }


def batch_norms_in_training(net, on=True):
    for layer in net.modules():
        if isinstance(layer, _BatchNorm):
            layer.train(on)


def mean_entropy(logits):
    """Of softmax written out, averaged over the batch."""
    e = (logits - logits.detach().max()).exp()
    p = e / e.sum(1, keepdim=True)
    return -(p * p.log()).sum() / len(logits)


class Adam:
    """Kingma & Ba, algorithm 1, one tensor at a time."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr, self.t = parameters, lr, 0
        self.m = [torch.zeros_like(p) for p in parameters]
        self.v = [torch.zeros_like(p) for p in parameters]

    def step(self, grads):
        self.t += 1
        for i, (p, g) in enumerate(zip(self.parameters, grads, strict=True)):
            self.m[i] = 0.9 * self.m[i] + 0.1 * g
            self.v[i] = 0.999 * self.v[i] + 0.001 * g * g
            m, v = self.m[i] / (1 - 0.9**self.t), self.v[i] / (1 - 0.999**self.t)
            p.data = p.data - self.lr * m / (v.sqrt() + 1e-8)


class SGD:
    """Momentum 0.9, as torch has it: the velocity is of gradients, not of steps."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr = parameters, lr
        self.velocity = [torch.zeros_like(p) for p in parameters]

    def step(self, grads):
        for i, (p, g) in enumerate(zip(self.parameters, grads, strict=True)):
            self.velocity[i] = 0.9 * self.velocity[i] + g
            p.data = p.data - self.lr * self.velocity[i]


class FullMatrixHead(nn.Module):
    """An adapted head of the ``class`` form with the whole W + dW built, told ``prior``."""

    def __init__(self, head, adapter, classes):
        super().__init__()
        self.weight, self.bias = head.weight.detach(), head.bias.detach()
        self.networks = adapter.feature_net, adapter.head_net
        self.prior = torch.full((classes,), 1 / classes)

    def forward(self, h):
        c, d = self.weight.shape
        m = torch.tensor([1 - 2 * k / (c - 1) for k in range(c)])
        degree = (m * self.prior).sum().reshape(1)
        with torch.no_grad():
            features, head = (net(degree) for net in self.networks)
        gamma, beta, delta, db = 1 + features[:d], features[d:], head[:c], head[c:]
        weight = self.weight + torch.stack([delta] * d, 1) / d
        return (gamma * h + beta) @ weight.T + self.bias + db


def step(net, x, parameters, optimizer):
    """One entropy step; returns the logits before it."""
    logits = net(x)
    optimizer.step(torch.autograd.grad(mean_entropy(logits), parameters))
    return logits.detach()
