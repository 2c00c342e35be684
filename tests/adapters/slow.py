"""Slow, obvious references for the formulas of adapters."""

import copy
import itertools

import numpy as np
import torch

D, C = 6, 4  # features and classes of the adapters in these tests
PRIOR = torch.tensor([0.1, 0.2, 0.3, 0.4])


def network(net, inputs):
    """FC-ReLU-FC, one output at a time."""
    first, _, last = copy.deepcopy(net).requires_grad_(False)
    hidden = [
        max(0.0, sum(float(w) * float(v) for w, v in zip(row, inputs, strict=True)) + float(b))
        for row, b in zip(first.weight, first.bias, strict=True)
    ]
    return [
        sum(float(w) * h for w, h in zip(row, hidden, strict=True)) + float(b)
        for row, b in zip(last.weight, last.bias, strict=True)
    ]


def label_shift_logits(adapter, prior, h, weight, bias):
    """(gamma * h + beta)(W + dW) + b + db, with the whole matrix built by hand."""
    d, c, order = adapter.features, adapter.classes, list(range(adapter.classes))
    if adapter.class_counts is not None:
        order = sorted(order, key=lambda i: -adapter.class_counts[i])
    m = {k: 1 - 2 * rank / (c - 1) for rank, k in enumerate(order)}
    degree = sum(m[k] * float(prior[k]) for k in range(c))
    inputs = [degree] if adapter.condition == "scalar" else [float(p) for p in prior]
    gamma, beta, delta, db = [1.0] * d, [0.0] * d, np.zeros((c, d)), [0.0] * c
    if adapter.gamma or adapter.beta:
        out = network(adapter.feature_net, inputs)
        if adapter.gamma:
            gamma, out = [1 + o for o in out[:d]], out[d:]
        if adapter.beta:
            beta = out
    if adapter.db or adapter.dw != "none":
        out = network(adapter.head_net, inputs)
        if adapter.db:
            out, db = out[:-c], out[-c:]
        for k, j in itertools.product(range(c), range(d)):
            if adapter.dw == "class":
                delta[k, j] = out[k] / d
            elif adapter.dw == "rank1":
                delta[k, j] = out[k] * out[c + j]
            elif adapter.dw == "full":
                delta[k, j] = out[k * d + j]
    logits = np.zeros((len(h), c))
    for i, k in itertools.product(range(len(h)), range(c)):
        logits[i, k] = db[k] + (0.0 if bias is None else float(bias[k]))
        for j in range(d):
            feature = gamma[j] * float(h[i, j]) + beta[j]
            logits[i, k] += feature * (float(weight[k, j]) + delta[k, j])
    return torch.from_numpy(logits).float()


def classwise_logits(adapter, prior, h, weight, bias):
    """Logit adjustment, and what one network makes of the two numbers of each class."""
    d, c = adapter.features, adapter.classes
    counts = adapter.class_counts or list(range(c, 0, -1))
    assumes = adapter.assumes or [1 / c] * c
    logits = np.zeros((len(h), c))
    for k in range(c):
        log_prior = np.log(max(float(prior[k]), 1e-6))
        inputs = [log_prior + np.log(c), np.log(counts[k] * c / sum(counts))]
        *delta, db = network(adapter.head_net, inputs)
        for i in range(len(h)):
            logits[i, k] = log_prior - np.log(assumes[k]) + db
            logits[i, k] += 0.0 if bias is None else float(bias[k])
            for j in range(d):
                dw = delta[0] / d if delta else 0.0
                logits[i, k] += float(h[i, j]) * (float(weight[k, j]) + dw)
    return torch.from_numpy(logits).float()


def logit_logits(adapter, prior, h, weight, bias):
    """(W h + b) / T + log pi, minus the log of the distribution that the logits contain."""
    temperature = getattr(adapter, "temperature", 1.0)
    logits = np.zeros((len(h), adapter.classes))
    for i, k in itertools.product(range(len(h)), range(adapter.classes)):
        own = sum(float(h[i, j]) * float(weight[k, j]) for j in range(adapter.features))
        own += 0.0 if bias is None else float(bias[k])
        logits[i, k] = own / temperature + np.log(max(float(prior[k]), 1e-6))
        if adapter.assumes is not None:
            logits[i, k] -= np.log(adapter.assumes[k])
    return torch.from_numpy(logits).float()
