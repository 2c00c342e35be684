"""A callable from dictionaries of arrays to dictionaries of arrays, as data engines want it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twoshift.calibration import Calibration
from twoshift.errors import BatchError, DataError, SettingError
from twoshift.predict.answers import rows_of
from twoshift.predict.build import RECOMMENDED, make_ready
from twoshift.predict.inputs import DEFAULT, Gallery, Raw
from twoshift.predict.plan import Batch
from twoshift.predict.reading import Decoding, Seen, as_type
from twoshift.predict.table import TEXT, Shape
from twoshift.registry import check_numbers

Columns = dict[str, NDArray[Any]]


class Predictor:
    """Predicts batches that are dictionaries of arrays, and adapts to them.

    It has the shape that ``map_batches`` of Ray Data and ``mapInPandas`` of Spark want. Each
    instance has a state of its own, which follows the batches that it is called with. It may be
    called from several threads.

    Args:
        model: The classifier that was calibrated, or a function that returns it, which a worker
            calls by itself.
        facts: What `calibrate` found, or the folder where it was saved.
        image: Name of the images in a batch: encoded ones (bytes), paths, or pixels, either uint8
            (B, H, W, C) or floating point (B, C, H, W).
        stream: Name of a column that says which stream an image belongs to; by default all images
            are of one stream.
        top: How many of the likeliest classes to answer.
        probabilities: Whether to answer the probabilities of all classes, (B, classes).
        method: ``"recommended"``, or the name of a method.
        method_settings: Its settings.
        adapter: Folder of an adapter, or the name of one that needs no training.
        estimator: Name of an estimator, for a method with an adapter.
        decoding: How images are made of files, where it is not as calibrated: ``size``, ``frame``,
            ``squash``.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        facts: Calibration | str | Path,
        *,
        image: str = "image",
        stream: str | None = None,
        top: int = 1,
        probabilities: bool = False,
        method: str = RECOMMENDED,
        method_settings: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        estimator: str | None = None,
        decoding: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(facts, Calibration):
            facts = Calibration.load(facts)
        self._ready = make_ready(
            model if isinstance(model, nn.Module) else model(),
            facts,
            method=method,
            method_settings=method_settings,
            adapter=adapter,
            estimator=estimator,
            decoding=decoding,
        )
        check_numbers("a predictor", "a whole number from 1", top=top)
        if top > len(self._ready.classes):
            raise SettingError("top", must_be=f"at most {len(self._ready.classes)}", got=top)
        self.live = self._ready.live
        self.classes = self._ready.classes
        self._image, self._column, self._probabilities = image, stream, probabilities
        self._shape = Shape(self.classes, False, False, top)
        self._versions, self._lock = Counter[str](), threading.Lock()

    def __call__(self, batch: Mapping[str, Any]) -> Columns:
        """Predict a batch, and adapt to it.

        Args:
            batch: Arrays of the same length by name, the images among them.

        Returns:
            All that the batch has besides the images, and ``class``, ``probability``, ``entropy``,
            ``state_version`` and ``error``, which is None unless an image could not be read.
        """
        columns = {name: np.asarray(v) for name, v in batch.items() if name != self._image}
        images, count = self._images(batch), len(batch[self._image])
        for name, values in columns.items():
            if values.shape[:1] != (count,):
                must_be = f"of {count} values, as there are images"
                raise BatchError(f"column {name!r}", must_be=must_be, got=values.shape)
        answers: Columns = {}
        for stream, rows in self._rows(columns, count).items():
            for name, part in self._answer(stream, rows, images).items():
                shape, kind = (count, *part.shape[1:]), part.dtype
                answers.setdefault(name, np.empty(shape, kind))[rows] = part
        return {**columns, **answers}

    def _rows(self, columns: Columns, count: int) -> dict[str, list[int]]:
        """The rows of every stream, in order."""
        if not count:
            raise BatchError("a batch", must_be="of at least one image")
        if self._column is None:
            return {DEFAULT: list(range(count))}
        if self._column not in columns:
            cure = f"It has: {', '.join(columns)}."
            raise BatchError(f"a batch without a column {self._column!r}", cure=cure)
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(columns[self._column].tolist()):
            rows.setdefault(str(name), []).append(row)
        return rows

    def _images(self, batch: Mapping[str, Any]) -> Sequence[Any] | NDArray[Any]:
        if self._image not in batch:
            cure = f"It has: {', '.join(batch)}. Name the images: Predictor(..., image=...)."
            raise BatchError(f"a batch without images in {self._image!r}", cure=cure)
        images = batch[self._image]
        if isinstance(images, np.ndarray) and images.ndim == 4:
            return images
        return list(images)

    def _answer(self, stream: str, rows: list[int], images: Any) -> Columns:
        names = [f"image {row}" for row in rows]
        x, good, errors = _pixels([images[row] for row in rows], names, self._ready.decoding)
        logits: Tensor | None = None
        with self._lock:  # a version belongs to the batch that made it
            if x is not None:
                logits = self.live.stream(stream)(as_type(x, self.live.dtype))
                self._versions[stream] += 1
            version = self._versions[stream]
        gallery = Gallery(
            "a batch", names, [stream] * len(rows), np.arange(len(rows)), lambda _: []
        )
        seen = Seen(Batch(stream, 0, 0, len(rows)), x, good, errors)
        values = rows_of(gallery, seen, logits, None, version, self._shape)
        kinds = {c.name: c.kind for c in self._shape.columns() if c.name not in ("path", "stream")}
        found = {n: np.array(values[n], object if k == TEXT else None) for n, k in kinds.items()}
        if self._probabilities:
            p = np.full((len(rows), len(self.classes)), np.nan, np.float32)
            if logits is not None:
                p[good] = logits.float().softmax(1).cpu().numpy()
            found["probabilities"] = p
        return found


def _pixels(
    images: Sequence[Any], names: Sequence[str], decoding: Decoding
) -> tuple[Tensor | None, list[int], dict[int, str]]:
    """Images as a model takes them, which rows they are, and why the others could not be read."""
    found, good, errors = list[Tensor](), list[int](), dict[int, str]()
    for i, (image, name) in enumerate(zip(images, names, strict=True)):
        try:
            found.append(_one(image, name, decoding))
            good.append(i)
        except DataError as e:
            errors[i] = e.what
    if len({x.shape for x in found}) > 1:
        sizes = ", ".join(sorted({str(tuple(x.shape)) for x in found}))
        raise BatchError("images of a batch", must_be="of one size", got=sizes)
    return (torch.stack(found) if found else None), good, errors


def _one(image: Any, name: str, decoding: Decoding) -> Tensor:
    """One image, (C, H, W) in [0, 1] if it was encoded or has bytes as pixels."""
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.dtype.kind == "f":
        return torch.from_numpy(np.ascontiguousarray(image))
    raw: Raw
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.dtype == np.uint8:
        raw = image
    elif isinstance(image, bytes | bytearray | memoryview):
        raw = bytes(image)
    elif isinstance(image, str | Path):
        raw, name = Path(image), str(image)
    else:
        got = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image)
        must_be = "bytes, a path, uint8 (H, W, C) or floating point (C, H, W)"
        raise BatchError(name, must_be=must_be, got=got)
    pixels = np.array(decoding.pixels(raw, name))  # a copy that can be written
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div(255)
