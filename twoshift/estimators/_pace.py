"""The arithmetic of the estimator ``paced``, in numpy: what is kept of a stream, and how it grows.

Two estimates are followed side by side. The *full* one asks which label distribution makes the
predictions most likely. The *relative* one asks the same with the long-run mean prediction as the
label distribution that predictions assume: it finds changes, and a constant bias cancels. Where no
window foretells the stream clearly better than "no change", there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kept = dict[str, NDArray[Any]]

WINDOWS = (64, 256)  # images that the quick and the steady estimate look back on
KEPT = 64  # largest probabilities of an image that are kept; all, with fewer classes
FRESH = 0.01  # share of the assumed labels in a warm start: a class at zero could not come back
DECAY, PER = 0.8, 64  # what a score is worth after so many images
FULL, RELATIVE = 0, 1
TINY = np.finfo(np.float64).tiny
# which of the last rows are in which window, of both estimates
INSIDE = np.tile(np.arange(WINDOWS[-1], 0, -1)[:, None] <= np.array(WINDOWS), 2).astype(np.float64)


@dataclass(frozen=True)
class Pace:
    """The settings, as `Paced` describes them, and what follows from them.

    What is kept of a stream, by name:
        rows, classes: The last images, see `compress`.
        seen: Number of images so far.
        estimates: Label distributions of the windows, (2, windows, C): the full ones, and the
            relative ones over the mean prediction, normalised.
        scores: How well each candidate foretold the stream; 0 for the best, (2, windows + 1).
        label_sums: Decayed sums of the posteriors under the long estimate, (C,).
        prediction_sums: Decayed sums of the predictions, (C,).
        prior: The mix of the full candidates, (C,).
    """

    classes: int
    pseudo_count: float
    own: float
    long: float
    kappa: float
    steps: int
    evidence: float

    def start(self) -> Kept:
        """What is kept before the first image."""
        uniform = np.full(self.classes, 1 / self.classes, np.float32)
        return {
            **compress(np.zeros((WINDOWS[-1], self.classes))),
            "seen": np.zeros((), np.int64),
            "estimates": np.tile(uniform, (2, len(WINDOWS), 1)),
            "scores": np.zeros((2, len(WINDOWS) + 1), np.float32),
            "label_sums": np.zeros(self.classes, np.float32),
            "prediction_sums": np.zeros(self.classes, np.float32),
            "prior": uniform,
        }

    def advance(self, kept: Kept, batch: Array) -> tuple[Kept, Array]:
        """What is kept after a batch, and what adjusts the batch.

        Args:
            kept: What was kept before.
            batch: Probabilities that assume equally frequent classes, (B, C), rows with sum 1.

        Returns:
            What is kept; and the label distribution of the batch, full and relative, (2, C), where
            the relative one is divided by the mean prediction and normalised: it adjusts as it is.
        """
        decay = 0.5 ** (len(batch) / self.long)
        prediction_sums = decay * kept["prediction_sums"] + batch.sum(0)
        assumed = self.assumed(prediction_sums)
        candidates = self.candidates(kept["estimates"], kept["label_sums"], assumed)
        told = likelihood(batch, candidates, assumed)
        scores = DECAY ** (len(batch) / PER) * kept["scores"] + told
        posteriors = batch * candidates[FULL, -1]
        posteriors /= posteriors.sum(1, keepdims=True)
        new: Kept = {
            **join(kept, compress(batch[-WINDOWS[-1] :]), len(batch)),
            "seen": np.array(kept["seen"] + len(batch)),
            "scores": scores - scores.max(1, keepdims=True),
            "label_sums": decay * kept["label_sums"] + posteriors.sum(0),
            "prediction_sums": prediction_sums,
        }
        new["estimates"] = self.windows(new, candidates[:, :-1], assumed)
        mixes = self.mixes(new, assumed)
        new["prior"] = mixes[FULL]
        everything = np.ones((len(batch), 2))
        present = em(batch, everything, mixes, assumed, self.own * mixes, self.steps)
        if not self.changed(new["scores"]):
            present[RELATIVE] = assumed[RELATIVE]
        return new, normalised(present / assumed)

    def ahead(self, kept: Kept) -> Array:
        """What adjusts images to come, if they are not counted, (2, C); see `advance`."""
        assumed = self.assumed(kept["prediction_sums"])
        mixes = self.mixes(kept, assumed)
        if not self.changed(kept["scores"]):
            mixes[RELATIVE] = assumed[RELATIVE]
        return normalised(mixes / assumed)

    def merge(self, earlier: Kept, later: Kept) -> Kept:
        """What one stream would have kept, of two of its parts, neither of them empty."""
        images = int(later["seen"])
        if images <= WINDOWS[-1]:  # its rows are all there: the earlier part goes on with them
            rows = normalised(expand(later, self.classes)[-images:])
            for start in range(0, images, PER):
                earlier, _ = self.advance(earlier, rows[start : start + PER])
            return earlier
        new = {**later, "seen": np.array(earlier["seen"] + images)}  # with all the windows
        for name in ("label_sums", "prediction_sums"):
            new[name] = 0.5 ** (images / self.long) * earlier[name] + later[name]
        scores = DECAY ** (images / PER) * earlier["scores"] + later["scores"]
        scores = scores + self.foretold(new, later) - self.foretold(later, later)
        new["scores"] = scores - scores.max(1, keepdims=True)
        new["prior"] = self.mixes(new, self.assumed(new["prediction_sums"]))[FULL]
        return new

    def foretold(self, past: Kept, part: Kept) -> Array:
        """Scores of a part of a stream, if the long past had been that of ``past``.

        Only the last rows can be scored again; they stand for the whole part. From the newest
        rows to older ones, each is taken out of the past before it is scored.
        """
        rows = normalised(expand(part, self.classes))
        posteriors = normalised(rows * normalised(part["label_sums"] + self.pseudo_count))
        labels, predictions = past["label_sums"], past["prediction_sums"]
        share = (1 - DECAY ** (int(part["seen"]) / PER)) / (1 - DECAY ** (len(rows) / PER))
        scores = np.zeros(part["scores"].shape)
        oldest = min(len(rows), int(part["seen"]) - len(rows))  # before, it had no long past itself
        for age in range(0, oldest, PER):
            chunk = slice(len(rows) - age - PER, len(rows) - age)
            aged = 0.5 ** (age / self.long)
            labels = np.maximum(labels - aged * posteriors[chunk].sum(0), 0)
            predictions = np.maximum(predictions - aged * rows[chunk].sum(0), 0)
            assumed = self.assumed(predictions)
            candidates = self.candidates(part["estimates"], labels, assumed)
            scores += share * DECAY ** (age / PER) * likelihood(rows[chunk], candidates, assumed)
        return scores

    def windows(self, kept: Kept, start: Array, assumed: Array) -> Array:
        """The estimates of the windows over what is assumed, normalised, (2, windows, C)."""
        rows = expand(kept, self.classes)[-int(kept["seen"]) :]
        each = np.repeat(assumed, len(WINDOWS), 0)
        fresh = (1 - FRESH) * start.reshape(each.shape) + FRESH * each
        pseudo = self.classes * self.pseudo_count * each
        solved = em(rows, INSIDE[-len(rows) :], fresh, each, pseudo, self.steps)
        return normalised(solved / each).reshape(start.shape)

    def mixes(self, kept: Kept, assumed: Array) -> Array:
        """The candidates weighted by their scores, (2, C)."""
        weights = normalised(np.exp(kept["scores"]))
        candidates = self.candidates(kept["estimates"], kept["label_sums"], assumed)
        mixed: Array = (weights[:, None] @ candidates)[:, 0]
        return mixed

    def changed(self, scores: NDArray[Any]) -> bool:
        """Whether a window foretold the stream clearly better than no change of the labels."""
        *windows, none = scores[RELATIVE].tolist()
        return bool(max(windows) > none + self.evidence)

    def assumed(self, prediction_sums: NDArray[Any]) -> Array:
        """The label distributions that predictions are taken to assume, (2, C)."""
        assumed = np.full((2, self.classes), 1 / self.classes)
        assumed[RELATIVE] = normalised(prediction_sums + self.kappa / self.classes)
        return assumed

    def candidates(
        self, estimates: NDArray[Any], label_sums: NDArray[Any], assumed: Array
    ) -> Array:
        """Label distributions of the windows and of the long run, (2, windows + 1, C).

        In the long run, the relative estimate is the mean prediction itself: no change.
        """
        found = np.empty((2, len(WINDOWS) + 1, self.classes))
        found[:, :-1] = estimates * assumed[:, None]
        found[FULL, -1] = label_sums + self.pseudo_count
        found[RELATIVE, -1] = assumed[RELATIVE]
        return normalised(found)


def em(
    rows: Array, inside: Array, start: Array, assumed: Array, pseudo: Array, steps: int
) -> Array:
    """EM steps for several label distributions of the same rows at once, (K, C).

    Args:
        rows: Probabilities, (N, C).
        inside: Which rows count for which distribution, (N, K).
        start: Where to begin, (K, C).
        assumed: The label distributions that the rows assume, (K, C).
        pseudo: Images of every class to add, (K, C).
        steps: Number of steps.
    """
    total = (inside.sum(0) + pseudo.sum(1))[:, None]
    q = start
    for _ in range(steps):
        ratio = q / assumed
        shares = (inside / np.maximum(rows @ ratio.T, TINY)).T @ rows
        q = (ratio * shares + pseudo) / total
    return q


def likelihood(rows: Array, candidates: Array, assumed: Array) -> Array:
    """Log-likelihood of rows under every candidate, up to a constant, (2, candidates)."""
    ratios = (candidates / assumed[:, None]).reshape(-1, rows.shape[1])
    found: Array = np.log(np.maximum(rows @ ratios.T, TINY)).sum(0)
    return found.reshape(candidates.shape[:2])


def adjusting(both: Array, contained: Array | None) -> Array:
    """The label distribution to adjust by, of the full and the relative one.

    Args:
        both: What `Pace.advance` or `Pace.ahead` returns, (2, C).
        contained: The label distribution in the logits, which the relative estimate puts back;
            None for the full estimate.
    """
    return normalised(both[FULL] if contained is None else both[RELATIVE] * contained)


def normalised(values: Array) -> Array:
    """The same, with sum 1 along the last axis."""
    return values / values.sum(-1, keepdims=True)


def compress(rows: Array) -> Kept:
    """What is kept of probabilities: all; of more than `KEPT` classes, the largest ones.

    Then ``rows`` holds the largest, as float16, and in its last column what is left for all other
    classes together; ``classes`` says which ones are the largest.
    """
    classes = rows.shape[1]
    if classes <= KEPT:
        return {"rows": rows.astype(np.float32)}
    largest = np.argpartition(rows, -KEPT, axis=1)[:, -KEPT:]
    values = np.take_along_axis(rows, largest, 1)
    rest = np.maximum(rows.sum(1) - values.sum(1), 0)
    kind = np.int16 if classes <= np.iinfo(np.int16).max else np.int32
    return {
        "rows": np.column_stack([values, rest]).astype(np.float16),
        "classes": largest.astype(kind),
    }


def expand(kept: Kept, classes: int) -> Array:
    """The probabilities of which `compress` has kept the largest."""
    rows = kept["rows"].astype(np.float64)
    if classes <= KEPT:
        return rows
    rest = rows[:, -1:] / (classes - KEPT)
    dense = np.repeat(rest, classes, 1)
    # a value that float16 rounds to zero is still one of the largest
    np.put_along_axis(dense, kept["classes"].astype(np.int64), np.maximum(rows[:, :-1], rest), 1)
    return dense


def join(earlier: Kept, later: Kept, images: int) -> Kept:
    """The last rows of both; ``images`` is the number of later ones."""
    new = min(images, WINDOWS[-1])
    return {
        name: np.concatenate([earlier[name][new:], later[name][-new:]])
        for name in ("rows", "classes")
        if name in earlier
    }
