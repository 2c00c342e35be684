"""Features of an adapted model over a stream, and their map in the plane (t-SNE)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from twoshift.adapters import Adapter
from twoshift.bench.cell import Cell
from twoshift.bench.images import ImageCache
from twoshift.bench.measure import prepare
from twoshift.data.base import ImageSet
from twoshift.errors import InputError, MissingExtra
from twoshift.models.head import capture_features, find_head
from twoshift.train.checkpoint import SourceModel

PERPLEXITY = 30


class StreamFeatures(NamedTuple):
    """What a model made of a stream, image by image.

    Attributes:
        features: What went into the classifier head when the image was scored, (N, d).
        labels: The truth, (N,).
        predicted: What was scored, (N,).
    """

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]


def stream_features(
    cell: Cell,
    source: SourceModel,
    adapter: Adapter | None,
    images: ImageSet | ImageCache,
) -> StreamFeatures:
    """Run a cell and keep the features of every image, at the moment it is predicted."""
    method, stream = prepare(cell, source, adapter, images)
    h, predicted = [], []
    with capture_features(find_head(method.model)[1]) as captured:
        for batch in stream:
            captured.clear()
            predicted.append(method(batch.x).argmax(1).cpu())
            h.append(captured[0].detach().cpu())  # the first pass is scored, later ones learn
    return StreamFeatures(
        np.concatenate([part.numpy() for part in h]),
        stream.labels,
        np.concatenate([part.numpy() for part in predicted]),
    )


def tsne_package() -> Any:
    """The package that makes the maps; asked for before the work begins."""
    try:
        import openTSNE
    except ImportError as e:
        raise MissingExtra("t-SNE needs openTSNE", cure="pip install 'twoshift[tsne]'") from e
    return openTSNE


def tsne(features: NDArray[Any], seed: int = 0) -> NDArray[np.float64]:
    """Places in the plane where neighbours stay neighbours, (N, 2); the same seed, the same map."""
    if len(features) <= 3 * PERPLEXITY:
        raise InputError(
            "images of a t-SNE map", must_be=f"more than {3 * PERPLEXITY}", got=len(features)
        )
    made = tsne_package().TSNE(
        perplexity=PERPLEXITY, initialization="pca", random_state=seed, n_jobs=1
    )
    return np.asarray(made.fit(np.asarray(features, dtype=np.float64)))
