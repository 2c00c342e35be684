"""The readings of a stream in bounded memory: recent ones as they are, older ones thinned."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from twoshift.errors import BatchError
from twoshift.registry import check_numbers

IMAGES = "images"  # the reading that counts the images so far
Row = dict[str, float | None]


class History:
    """Numbers by name, batch after batch.

    The last ``recent`` rows are kept as they are. Older rows are kept, too, but at most as many:
    whenever there are more, each becomes the mean of two neighbours. So a row of the distant past
    stands for many batches, and memory stays the same however long the stream is.

    Args:
        names: Names of the numbers; one of them is ``"images"``, the number of images so far.
        recent: Number of rows that are kept as they are.
    """

    def __init__(self, names: Sequence[str], recent: int = 256) -> None:
        check_numbers("history", "a whole number from 1", recent=recent)
        if IMAGES not in names:
            raise BatchError("names of a history", must_be=f"with {IMAGES!r}", got=list(names))
        self.names, self.recent = tuple(names), recent
        self._at = self.names.index(IMAGES)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._recent: deque[NDArray[np.float64]] = deque()
        self._older: list[NDArray[np.float64]] = []
        self._each = 1  # batches that a row of the older ones stands for
        self._wait()

    def _wait(self) -> None:
        """Nothing is waiting to become a row of the older ones."""
        self._sums, self._known = np.zeros(len(self.names)), np.zeros(len(self.names))
        self._waiting = 0

    def add(self, readings: Mapping[str, float | None]) -> None:
        """Take in the readings of a batch; names that it does not keep are left out."""
        values = (readings.get(name) for name in self.names)
        self._recent.append(np.array([np.nan if v is None else v for v in values], np.float64))
        if len(self._recent) > self.recent:
            self._retire(self._recent.popleft())

    def _retire(self, row: NDArray[np.float64]) -> None:
        self._sums += np.nan_to_num(row)
        self._known += ~np.isnan(row)
        self._sums[self._at] = row[self._at]
        self._waiting += 1
        if self._waiting < self._each:
            return
        self._older.append(self._partial())
        self._wait()
        if len(self._older) > self.recent and len(self._older) % 2 == 0:
            pairs = np.stack(self._older).reshape(-1, 2, len(self.names))
            self._older = [self._mean(pair) for pair in pairs]
            self._each *= 2

    def _partial(self) -> NDArray[np.float64]:
        """The mean of what is waiting, of what is known; the number of images is the last one."""
        mean = np.full(len(self.names), np.nan)
        np.divide(self._sums, self._known, out=mean, where=self._known > 0)
        mean[self._at] = self._sums[self._at]
        return mean

    def _mean(self, pair: NDArray[np.float64]) -> NDArray[np.float64]:
        first, second = pair
        mean = np.where(np.isnan(first), second, np.where(np.isnan(second), first, pair.mean(0)))
        mean[self._at] = second[self._at]
        return mean

    def table(self) -> NDArray[np.float64]:
        """All rows from the oldest to the newest, (rows, names); NaN for what was not known."""
        waiting = [self._partial()] if self._waiting else []
        rows = [*self._older, *waiting, *self._recent]
        return np.stack(rows) if rows else np.empty((0, len(self.names)))

    def column(self, name: str) -> NDArray[np.float64]:
        """One number over time."""
        return self.table()[:, self.names.index(name)]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._older) + bool(self._waiting) + len(self._recent)

    def __iter__(self) -> Iterator[Row]:
        for row in self.table():
            yield {
                n: None if np.isnan(v) else float(v) for n, v in zip(self.names, row, strict=True)
            }

    def state(self) -> dict[str, NDArray[np.float64]]:
        """All that `load` needs to go on."""
        parts = {
            "recent": self._recent,
            "older": self._older,
            "waiting": [self._sums, self._known],
        }
        empty = np.empty((0, len(self.names)))
        rows = {name: np.stack([*part]) if part else empty for name, part in parts.items()}
        return {**rows, "counts": np.array([self._each, self._waiting], np.float64)}

    def load(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Go on from a `state`."""
        rows = {n: np.array(state[n], np.float64) for n in ("recent", "older", "waiting")}
        fits = all(part.ndim == 2 and part.shape[1] == len(self.names) for part in rows.values())
        short = len(rows["recent"]) <= self.recent and len(rows["older"]) <= self.recent + 1
        if not (fits and short and len(rows["waiting"]) == 2):
            got = {name: part.shape for name, part in rows.items()}
            raise BatchError("state of a history", must_be=f"rows of {self.names}", got=got)
        self._recent, self._older = deque(rows["recent"]), list(rows["older"])
        self._sums, self._known = rows["waiting"]
        self._each, self._waiting = (int(number) for number in state["counts"])
