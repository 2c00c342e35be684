"""The label estimate of an exported snapshot, where there is no torch: numpy only.

The arithmetic is that of the estimator ``paced`` itself. All that it needs is in the metadata of
the ONNX file: settings, the adapter, and what was kept of the stream so far.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twoshift.errors import BatchError, MismatchError, SettingError
from twoshift.estimators._pace import PER, Array, Kept, Pace, adjusting, normalised

ESTIMATE, KEPT = "twoshift.label_estimate", "twoshift.label_state"  # names in the metadata
FLOOR = 1e-6  # smallest share of a class, as in the adapters
SMALLEST = float(np.log(np.finfo(np.float32).tiny))  # of a logarithm of a probability
CURE = "Export a snapshot of twoshift.recommended: twoshift export onnx --state DIR -o model.onnx."


class LabelEstimate:
    """Follows the label distribution of a stream that an exported network predicts.

    It goes on where the snapshot stopped, and adjusts logits by it as the snapshot would have: the
    images of a batch count for the batch itself.

    Args:
        metadata: That of the ONNX file: ``session.get_modelmeta().custom_metadata_map``.

    Attributes:
        classes: Number of classes.
    """

    def __init__(self, metadata: Mapping[str, str]) -> None:
        if ESTIMATE not in metadata or KEPT not in metadata:
            raise SettingError(
                "metadata of an exported model",
                must_be="of a snapshot whose labels were estimated by paced",
                got=f"no entry {ESTIMATE if ESTIMATE not in metadata else KEPT!r}",
                cure=CURE,
            )
        self._lock = threading.Lock()
        try:
            told = json.loads(metadata[ESTIMATE])
            self.classes = int(told["classes"])
            numbers = {name: float(told[name]) for name in PACE}
            self._pace = Pace(self.classes, **numbers, steps=int(told["steps"]))
            self._slope, self._bias = 1 / float(told["temperature"]), self._vector(told, "bias")
            self._model_prior = self._vector(told, "model_prior")
            self._contained = self._vector(told, "contained") if told["relative"] else None
            self._adjusts = bool(told["adjusts"])
            self._divisor, self._assumed = float(told["divisor"]), self._vector(told, "assumed_log")
            self._kept = self._fitting(unpacked(metadata[KEPT]))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as e:
            what = f"the label estimate in the metadata of an exported model: {e}"
            raise SettingError(what, must_be="as twoshift export onnx wrote it", cure=CURE) from e

    def __call__(self, raw_logits: ArrayLike) -> NDArray[np.float32]:
        """Count a batch, and adjust its logits by the labels of the stream and its own.

        Args:
            raw_logits: The output ``raw_logits`` of the network, (B, classes).
        """
        raw = self._checked(raw_logits)
        with self._lock:  # labels may change within a large batch: parts of it are taken in
            parts = [self._take_in(raw[i : i + PER]) for i in range(0, len(raw), PER)]
        return np.concatenate(parts).astype(np.float32)

    @property
    def prior(self) -> Array:
        """The label distribution of the stream, (classes,)."""
        return self._kept["prior"].astype(np.float64)

    @property
    def log_prior(self) -> NDArray[np.float32]:
        """The input ``log_prior`` of the network, for images that are not to be counted."""
        ahead = adjusting(self._pace.ahead(self._kept), self._contained)
        return np.log(np.maximum(ahead, FLOOR)).astype(np.float32)

    def state(self) -> dict[str, NDArray[Any]]:
        """A copy of everything that batches change, by name, as ``np.savez`` takes it."""
        return {name: array.copy() for name, array in self._kept.items()}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a state; one that does not fit changes nothing."""
        self._kept = self._fitting(state)

    def _take_in(self, raw: Array) -> Array:
        log_p = np.maximum(_log_softmax(raw), SMALLEST)
        scaled = np.exp(_log_softmax(self._slope * log_p + self._bias))
        kept, present = self._pace.advance(self._kept, normalised(scaled / self._model_prior))
        self._kept = {name: kept[name].astype(old.dtype) for name, old in self._kept.items()}
        if not self._adjusts:
            return raw
        prior = np.maximum(adjusting(present, self._contained), FLOOR)
        return raw / self._divisor + np.log(prior) - self._assumed

    def _checked(self, raw_logits: ArrayLike) -> Array:
        raw = np.asarray(raw_logits, np.float64)
        if raw.ndim != 2 or raw.shape[1] != self.classes or not len(raw):
            raise BatchError("raw logits", must_be=f"(B, {self.classes})", got=raw.shape)
        if not np.isfinite(raw).all():
            raise BatchError("raw logits", must_be="finite", got="NaN or infinity")
        return raw

    def _vector(self, told: Mapping[str, Any], name: str) -> Array:
        values = np.asarray(told[name], np.float64)
        if values.shape != (self.classes,) or not np.isfinite(values).all():
            raise ValueError(f"{name} is not {self.classes} numbers")
        return values

    def _fitting(self, state: Mapping[str, NDArray[Any]]) -> Kept:
        """A copy of a state that is like a new one in names, shapes and types."""
        expected = {n: (a.shape, a.dtype.str) for n, a in self._pace.start().items()}
        got = {n: (np.shape(a), np.asarray(a).dtype.str) for n, a in state.items()}
        if got != expected:
            raise MismatchError("state of a label estimate", must_be=expected, got=got)
        if not all(np.isfinite(array).all() for array in state.values()):
            raise MismatchError("state of a label estimate", must_be="finite")
        return {name: np.array(state[name]) for name in expected}


PACE = ("pseudo_count", "own", "long", "kappa", "evidence")  # settings of `Pace`, beside steps


def packed(kept: Kept) -> str:
    """Arrays as text, for the metadata of a file."""
    content = io.BytesIO()
    np.savez_compressed(content, **kept)  # type: ignore[arg-type]
    return base64.b64encode(content.getvalue()).decode()


def unpacked(text: str) -> Kept:
    """What `packed` made a text of."""
    try:
        content = io.BytesIO(base64.b64decode(text, validate=True))
        with np.load(content, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as e:  # of base64, zip, zlib or numpy, whatever is damaged
        raise ValueError(f"arrays that cannot be read: {e}") from e


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return found
