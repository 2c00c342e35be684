"""Features of an adapted model over a stream, and their map in the plane (t-SNE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from twoshift.adapters import Adapter
from twoshift.bench.cell import TRAINED, Cell
from twoshift.bench.images import ImageCache
from twoshift.bench.measure import Images, prepare
from twoshift.bench.workshop import Workshop
from twoshift.errors import InputError, MissingExtra, ModelError
from twoshift.metrics import accuracy
from twoshift.models.head import capture_features, find_head
from twoshift.train.checkpoint import SourceModel

PERPLEXITY = 30


class StreamFeatures(NamedTuple):
    """Features and predictions of a model over a stream, image by image.

    Attributes:
        features: The input of the classifier head when the image was predicted, (N, d).
        labels: The true labels, (N,).
        predicted: The predicted labels, (N,).
    """

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]


class FeatureMaps(NamedTuple):
    """Maps of features.

    Attributes:
        panels: Places, (N, 2), and true labels, (N,), by title.
        classes: Names of the classes, in the order of the labels.
    """

    panels: dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]]
    classes: list[str]


def stream_features(
    cell: Cell, source: SourceModel, adapter: Adapter | None, images: Images | ImageCache
) -> StreamFeatures:
    """Run a cell and keep the features of every image, at the moment it is predicted."""
    method, stream = prepare(cell, source, adapter, images)
    h, predicted = [], []
    with capture_features(find_head(method.model)[1]) as captured:
        for batch in stream:
            captured.clear()
            predicted.append(method(batch.x).argmax(1).cpu())
            h.append(captured[0].detach().cpu())  # the first pass predicts, later ones learn
    return StreamFeatures(torch.cat(h).numpy(), stream.labels, torch.cat(predicted).numpy())


def feature_maps(
    cells: Mapping[str, Cell], workshop: Workshop, images: int, cure: str
) -> FeatureMaps:
    """Maps of the features of adapted models, over the last images of their streams.

    Args:
        cells: The cells to run, by the name of their map.
        workshop: Has the models.
        images: How many images to show.
        cure: The command that trains the models, for an error message.
    """
    tsne_package()  # before minutes of adapting
    for cell in cells.values():
        assert cell.model is not None
        if workshop.missing(cell.model, cell.adapter == TRAINED):
            raise ModelError(f"the models of the figure are not in {workshop.models}", cure=cure)
    maps, classes = {}, list[str]()
    for name, cell in cells.items():
        source, adapter = workshop.models_of(cell)
        features, labels, predicted = stream_features(cell, source, adapter, workshop.images)
        features, labels, predicted = features[-images:], labels[-images:], predicted[-images:]
        right = 100 * accuracy(predicted, labels)
        title = f"{name}: {right:.1f} % right in the last {len(labels):,} images"
        maps[title] = tsne(features), labels
        classes = source.card.classes
    return FeatureMaps(maps, classes)


def tsne_package() -> Any:
    """Import the package that makes the maps; an error says how to install it."""
    try:
        import openTSNE
    except ImportError as e:
        raise MissingExtra("t-SNE needs openTSNE", cure="pip install 'twoshift[tsne]'") from e
    return openTSNE


def tsne(features: NDArray[Any], seed: int = 0) -> NDArray[np.float64]:
    """Places in the plane where neighbours stay neighbours, (N, 2); the same seed, the same map."""
    if len(features) <= 3 * PERPLEXITY:
        must_be = f"more than {3 * PERPLEXITY}"
        raise InputError("images of a t-SNE map", must_be=must_be, got=len(features))
    embedding = tsne_package().TSNE(
        perplexity=PERPLEXITY, initialization="pca", random_state=seed, n_jobs=1
    )
    return np.asarray(embedding.fit(np.asarray(features, dtype=np.float64)))
