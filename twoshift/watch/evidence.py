"""Evidence that may be looked at after every image: bets against a bounded mean.

Observed are numbers x_1, x_2, ... from 0 to 1. As long as all is well, the mean of each one, given
those before it, is at most m. Whoever bets a share of their capital on larger numbers, and
multiplies it by

    1 + b (x_i - m),   0 <= b <= 1 / m,

does not gain on average: the capital is a nonnegative supermartingale, and by Ville's inequality it
ever reaches 1 / alpha with a probability of at most alpha, however long the stream is and whenever
somebody looks. A capital of 1 / alpha is therefore evidence at level alpha that something has
changed; there is no need to fix the number of images beforehand.

Neither the size b of good bets nor the moment j of the change is known. So the capital is divided:
equally among several b, and among the batches at which betting begins in shares 1 / (j (j + 1)),
which add up to 1. The sum

    M_t = sum_b sum_j  w_b / (j (j + 1))  prod_{i after j} (1 + b (x_i - m))

is a nonnegative supermartingale again, with M_0 <= 1, and takes constant time and memory:
M_t = (M_{t-1} + w_b / (t (t + 1))) * (the factors of batch t), for each b. A change after j batches
is found almost as soon as one at the first: the evidence must grow by 2 log j more.

- Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, JRSS B 2024,
  https://arxiv.org/abs/2010.09686
- Shin, Ramdas and Rinaldo, E-detectors, 2022, https://arxiv.org/abs/2203.03532 (sums over the
  moment of the change)
- Schirmer et al., Monitoring risks in test-time adaptation, NeurIPS 2025,
  https://arxiv.org/abs/2507.08721 (confidence sequences to watch an adapting model)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twoshift.errors import BatchError
from twoshift.registry import check_numbers

Array = NDArray[np.float64]
BETS = np.array([0.02, 0.05, 0.1, 0.2, 0.4, 0.8])  # shares of the largest possible bet, 1 / m
LOSSES = np.log1p(-BETS)


class Evidence:
    """The evidence that numbers from 0 to 1 have a larger mean than they should have.

    Attributes:
        observed: Number of observations so far.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all evidence."""
        self._total = np.full(len(BETS), -np.inf)  # log of the capital of every bet
        self._best = np.full(len(BETS), -np.inf)  # and of the largest part of it
        self._begun = np.zeros(len(BETS), np.int64)  # and where in the stream that was begun
        self._batches = self.observed = 0

    def add(self, values: ArrayLike, bound: float, at: int | None = None) -> None:
        """Take in the observations of a batch.

        Args:
            values: Numbers from 0 to 1, (B,).
            bound: What their mean is at most if all is well, above 0; it may depend on everything
                that was observed before.
            at: Where in the stream the batch begins; by default the number of observations so far.
        """
        x, m = _checked(values), float(bound)
        check_numbers("evidence", "above 0", bound=m)
        if not len(x):
            return
        at = self.observed if at is None else at
        self._batches += 1
        share = -np.log(len(BETS)) - np.log(self._batches) - np.log1p(self._batches)
        # what is lost if nothing is seen needs no logarithm of every observation
        seen = x[x > 0]
        gains = (len(x) - len(seen)) * LOSSES
        if len(seen):
            gains = gains + np.log1p(BETS[:, None] * (seen / m - 1)).sum(1)
        fresh = share >= self._best
        self._begun = np.where(fresh, at, self._begun)
        self._best = np.where(fresh, share, self._best) + gains
        self._total = np.logaddexp(self._total, share) + gains
        self.observed += len(x)

    @property
    def log_capital(self) -> float:
        """Logarithm of M_t; minus infinity before the first batch."""
        return float(np.logaddexp.reduce(self._total))

    @property
    def since(self) -> int:
        """Where in the stream the change was, as the bets that gained most tell."""
        return int(self._begun[self._best.argmax()])

    def state(self) -> dict[str, Any]:
        """What `load` needs to go on."""
        rows = {"total": self._total, "best": self._best, "begun": self._begun.astype(np.float64)}
        numbers = {"batches": float(self._batches), "observed": float(self.observed)}
        return {**{name: row.copy() for name, row in rows.items()}, **numbers}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        rows = [np.array(state[name], np.float64) for name in ("total", "best", "begun")]
        if any(row.shape != BETS.shape or np.isnan(row).any() for row in rows):
            raise BatchError("a state of evidence", must_be=f"rows of {len(BETS)} numbers")
        self._total, self._best, self._begun = rows[0], rows[1], rows[2].astype(np.int64)
        self._batches, self.observed = int(state["batches"]), int(state["observed"])


def _checked(values: ArrayLike) -> Array:
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or not ((x >= 0) & (x <= 1)).all():
        raise BatchError("observations", must_be="(B,), from 0 to 1", got=f"{x.shape}")
    return x
