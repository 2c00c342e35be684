"""Train DART's refinement of predictions on source images whose labels are drawn to shift."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift import priors
from twoshift.calibration._collect import check_labels, labelled
from twoshift.calibration._windows import ByClass
from twoshift.data.base import ImageSet
from twoshift.data.stream import Stream
from twoshift.errors import BatchError, ModelError
from twoshift.estimators._bcts import class_shares
from twoshift.methods._learning import make_optimizer
from twoshift.methods.dart import batch_summary, check_classes, refinement, source_network
from twoshift.registry import check_numbers
from twoshift.train import reading

Rows = NDArray[np.int64]
BYTES = 2**29  # of images that are kept in memory, where they come as batches


def fit_dart(
    model: nn.Module,
    images: Iterable[tuple[Tensor, Tensor]] | ImageSet | Stream,
    *,
    epochs: int = 50,
    batches: int = 100,
    batch_size: int = 64,
    hidden: int = 1000,
    lr: float = 1e-3,
    concentration: float = 1.0,
    pull: float = 0.1,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Tensor]:
    """The fact that `Dart` needs: a network that reads from a batch how to refine its predictions.

    It costs one forward pass of ``model`` for every batch.

    Args:
        model: The classifier, of at most 100 classes; it is not changed.
        images: Clean labelled source images of every class: a set of images, or pairs of images and
            labels, the first of which are kept in memory, up to half a gigabyte.
        epochs: Parts of the training; progress is told after each.
        batches: Batches of an epoch, each with labels of its own.
        batch_size: Images of a batch, best as many as later.
        hidden: Hidden units.
        lr: Learning rate of Adam.
        concentration: Of the Dirichlet distribution of the labels; small for few classes at a time.
        pull: Weight of the pull to no refinement where labels are those of the images.
        seed: Decides labels, images and first weights.
        progress: Called after every epoch with the number of epochs so far, and of all.
    """
    numbers = {"epochs": epochs, "batches": batches, "hidden": hidden}
    check_numbers("fit_dart", "a whole number from 1", **numbers)
    check_numbers("fit_dart", "a whole number from 2", batch_size=batch_size)
    check_numbers("fit_dart", "above 0 and finite", lr=lr, concentration=concentration)
    check_numbers("fit_dart", "at least 0 and finite", pull=pull)
    with torch.inference_mode(False):
        net, classes = source_network(model), check_classes(model)
        labels, read = _source(images, classes)
        class_shares(labels, classes)  # refuses a set that lacks a class
        rng, by_class = np.random.default_rng(seed), ByClass(labels, classes)
        like = next(net.parameters())

        def predicted(parts: list[Rows]) -> Iterator[tuple[Tensor, Tensor]]:
            for rows, x in zip(parts, read(parts), strict=True):
                with torch.no_grad():
                    y = torch.from_numpy(labels[rows]).to(like.device)
                    yield net(x.to(like)).float(), y

        usual = [rng.integers(len(labels), size=batch_size) for _ in range(batches)]
        calm = [batch_summary(logits) for logits, _ in predicted(usual)]  # once: they hardly differ
        dart = _first_weights(classes, hidden, seed, like.device)
        optimizer = make_optimizer("adam", [*dart.values()], lr)
        for epoch in range(epochs):
            drawn = [priors.dirichlet(classes, concentration, rng) for _ in range(batches)]
            shifted = [by_class.draw(prior, batch_size, rng) for prior in drawn]
            for (logits, y), summary in zip(predicted(shifted), calm, strict=True):
                with torch.enable_grad():
                    weight, bias = refinement(dart, batch_summary(logits))
                    loss = F.cross_entropy(logits @ weight + bias, y)
                    loss = loss + pull * _distance(*refinement(dart, summary))
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                optimizer.step()
            progress(epoch + 1, epochs)
    if not all(t.isfinite().all() for t in dart.values()):
        what = f"the refinement of {type(model).__name__} after training"
        raise ModelError(what, must_be="finite", got="NaN or infinity", cure="Lower lr.")
    return {name: tensor.detach().cpu() for name, tensor in dart.items()}


def _distance(weight: Tensor, bias: Tensor) -> Tensor:
    """Squared distance from no refinement."""
    identity = torch.eye(len(bias), dtype=weight.dtype, device=weight.device)
    return (weight - identity).square().sum() + bias.square().sum()


def _first_weights(
    classes: int, hidden: int, seed: int, device: torch.device
) -> dict[str, nn.Parameter]:
    """Random hidden units, none of which counts yet: no refinement."""
    g, reach = torch.Generator().manual_seed(seed), 1 / math.sqrt(classes + 1)
    out = classes**2 + classes
    dart = {
        "hidden_weight": torch.rand(hidden, classes + 1, generator=g) * 2 * reach - reach,
        "hidden_bias": torch.rand(hidden, generator=g) * 2 * reach - reach,
        "out_weight": torch.zeros(out, hidden),
        "out_bias": torch.zeros(out),
    }
    return {name: nn.Parameter(tensor.to(device)) for name, tensor in dart.items()}


def _source(images: Any, classes: int) -> tuple[Rows, Callable[[list[Rows]], Iterator[Tensor]]]:
    """Labels, and a function that reads the images of some rows after the other."""
    if isinstance(images, ImageSet):
        pictures = images.images
        return images.labels, lambda parts: reading.tensors(pictures, parts)
    kept: list[tuple[Tensor, Tensor]] = []
    size = 0
    for x, y in labelled(images):
        kept.append((x.detach().cpu(), check_labels(y, len(x), classes)))
        size += x.nbytes
        if size >= BYTES:
            break
    if not kept:
        raise BatchError("images for fit_dart", must_be="at least one batch", got="none")
    whole, labels = (torch.cat(part) for part in zip(*kept, strict=True))
    return labels.numpy(), lambda parts: (whole[torch.from_numpy(rows)] for rows in parts)
