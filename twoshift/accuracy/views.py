"""Choosing between views of the same images by the accuracy that their predictions promise."""

from __future__ import annotations

import torch
from torch import Tensor

from twoshift.accuracy.signals import NAMES, read_signals
from twoshift.errors import SettingError

VIEWS = ("matched", "plain", "source")  # statistics of `twoshift.methods.Streamed`
READ = [NAMES.index(name) for name in ("confidence", "entropy", "diversity")]
MARGIN = 0.02  # a view is left for one that promises so much more
FAVOUR = 0.05  # promised on top to the first view, under which label estimates can be trusted most
LEAST = 100.0  # images that a view must have seen: the first ones say little


class ViewJudge:
    """A regression from signals of unadjusted predictions to accuracy, with an offset by view.

    Args:
        weights: Weights of confidence, entropy and diversity, then the offset of each view, (6,).
    """

    def __init__(self, weights: Tensor) -> None:
        weights = torch.as_tensor(weights).detach().cpu().double()
        shape = (len(READ) + len(VIEWS),)
        if weights.shape != shape or not weights.isfinite().all():
            got = tuple(weights.shape) if weights.shape != shape else "NaN or infinity"
            raise SettingError("view_judge", must_be=f"finite numbers of shape {shape}", got=got)
        self.weights = weights

    def expected(self, sums: Tensor) -> Tensor:
        """The accuracy that each view promises, (views,).

        Args:
            sums: Sums of `signals_of` for each view, (views, 4 + classes).
        """
        signals = read_signals(sums).cpu()[:, READ]
        return signals @ self.weights[: len(READ)] + self.weights[len(READ) :]

    def choose(self, in_use: int, others: Tensor, same: Tensor) -> int:
        """The view to use: another one only if it promises clearly more.

        Args:
            in_use: The view in use.
            others: Sums of `signals_of` for each other view, (views, 4 + classes).
            same: The sums of the view in use for the same images, (views, 4 + classes).
        """
        offset = self.weights[len(READ) :]
        promised = self.expected(others) - (self.expected(same) - offset + offset[in_use])
        promised[0] += FAVOUR
        if in_use == 0:
            promised -= FAVOUR
        promised = promised.where(others[:, 0].cpu() >= LEAST, -torch.inf)
        best = int(promised.argmax())
        return best if promised[best] > MARGIN else in_use
