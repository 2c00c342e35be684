"""Slow, obvious references that the methods are compared with."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from twoshift.models.norm import NORMS, replace_module


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


class BalancedNorm(nn.Module):
    """One mean and variance per class and channel; with ``labels``, they move image by image."""

    def __init__(self, layer, classes, eta, gamma):
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.eta, self.gamma, self.labels = eta, gamma, None
        self.mean = [layer.running_mean.tolist() for _ in range(classes)]
        self.var = [layer.running_var.tolist() for _ in range(classes)]

    def move(self, images, c):
        """Statistics of channel ``c``, from the values of each image."""
        classes = len(self.mean)
        steps, spreads = [0.0] * classes, [0.0] * classes
        for k in range(classes):
            mine = [v for v, label in zip(images, self.labels, strict=True) if label == k]
            if not mine:
                continue
            weight = 1 / len(mine) if len(mine) > 1 / self.eta else self.eta
            apart = [[v - self.mean[k][c] for v in values] for values in mine]
            steps[k] = weight * sum(sum(d) / len(d) for d in apart)
            squares = sum(sum(v * v for v in d) / len(d) for d in apart)
            spreads[k] = weight * (squares - len(mine) * self.var[k][c]) - steps[k] ** 2
        for k in range(classes):
            for statistic, change in ((self.mean, steps), (self.var, spreads)):
                shared = sum(change) / len(set(self.labels))
                statistic[k][c] += (1 - self.gamma) * change[k] + self.gamma * shared

    def used(self, c):
        """Mean and variance of channel ``c``, every class counted once."""
        means, classes = [m[c] for m in self.mean], len(self.mean)
        mean = sum(means) / classes
        between = sum((m - mean) ** 2 for m in means) / max(classes - 1, 1)
        return mean, sum(v[c] for v in self.var) / classes + between

    def forward(self, x):
        channels = []
        for c in range(x.shape[1]):
            if self.labels is not None:
                self.move(x[:, c].detach().reshape(len(x), -1).tolist(), c)
            mean, var = self.used(c)
            normal = (x[:, c] - mean) / (var + self.eps) ** 0.5
            channels.append(normal * self.weight[c] + self.bias[c])
        return torch.stack(channels, 1)


def balance(net, classes, eta, gamma):
    """Make all batch norms balanced, in place; returns the new layers by path."""
    old = {n: m for n, m in net.named_modules() if isinstance(m, _BatchNorm)}
    new = {n: BalancedNorm(m, classes, eta, gamma) for n, m in old.items()}
    for name, layer in new.items():
        replace_module(net, name, layer)
    return new


def same_balance(ours, theirs):
    """Whether a network has the statistics of the slow layers ``theirs``, by path."""
    for path, layer in theirs.items():
        got = ours.get_submodule(path)
        used = list(zip(*(layer.used(c) for c in range(len(layer.mean[0]))), strict=True))
        pairs = (
            (got.class_mean, layer.mean),
            (got.class_var, layer.var),
            (got.running_mean, used[0]),
            (got.running_var, used[1]),
        )
        for mine, wanted in pairs:
            wanted = torch.tensor(wanted, dtype=torch.float64)
            torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6, msg=path)


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
