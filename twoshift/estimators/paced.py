"""A label estimate for any pace: one image at a time or batches, steady labels or bursts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.estimators._bcts import scaled
from twoshift.estimators._pace import PER, WINDOWS, Array, Kept, Pace, adjusting, em, normalised
from twoshift.estimators._window import numbers, shares
from twoshift.estimators.base import PriorEstimator, State, check_probs, estimators
from twoshift.priors import check_prior, uniform
from twoshift.registry import check_choice, check_numbers

FLOOR = 1e-6  # smallest share of a class that the logits may contain
MOST_STEPS, STILL = 300, 1e-7  # of EM on a whole: steps, and the change of a share that is none
MOST_IMAGES = 2**53  # far beyond any stream, far below where a count overflows


@estimators.register("paced")
class Paced(PriorEstimator):
    """Maximum likelihood over several pasts at once, weighted by how well each foretells.

    EM estimates the labels of the last 64 images, of the last 256 and of a long past. Each of the
    three is scored by the likelihood of every batch before it has seen it; ``prior`` is their mix.
    ``present`` adds the labels of the batch itself, by EM on the batch with ``own`` images of the
    mix: it is the label distribution by which to adjust this very batch.

    A corruption that favours some classes looks like a shift to these labels. The *relative*
    estimate takes the long-run mean prediction as the labels that predictions assume: constant
    favours cancel, and only clear changes of the labels adjust; without any, predictions stay as
    the model makes them. Statistics that are matched to the labels undo a corruption first, and
    the full estimate can be trusted; under all others, the relative one is safe.

    Args:
        classes: Number of classes.
        model_prior: Label distribution that the (calibrated) probabilities assume; uniform by
            default, as for ``em``.
        temperature: T of the calibrated probabilities softmax(log p / T + bias).
        bias: Bias of the calibrated probabilities, one number per class; none by default.
        assumes: The label distribution that the logits contain, which an adapter takes out: the
            relative estimate puts it back. None, the default, for uniform.
        relative: Whether the relative estimate adjusts. By default it does unless ``view`` is 0,
            that of matched statistics.
        pseudo_count: Images to add to each past, the same share of every class: a Dirichlet prior.
        own: Images of the mix to add to the batch.
        long: Half-life of the long past, in images.
        kappa: Images of uniform labels to add to the mean prediction.
        steps: EM steps per batch; each batch goes on from the last solution.
        evidence: Log-likelihood by which a change of labels must have foretold the last images
            better than none, before the relative estimate adjusts.
    """

    reads_unadjusted: ClassVar[bool] = True
    counts_batch: ClassVar[bool] = True
    part: ClassVar[int | None] = PER  # labels may change within a large batch

    def __init__(
        self,
        classes: int,
        model_prior: Sequence[float] | None = None,
        temperature: float = 1.0,
        bias: ArrayLike | Tensor | None = None,
        assumes: Sequence[float] | None = None,
        relative: bool | None = None,
        pseudo_count: float = 10.0,
        own: float = 64.0,
        long: float = 2048.0,
        kappa: float = 64.0,
        steps: int = 3,
        evidence: float = 4.0,
    ) -> None:
        super().__init__(classes)
        self._model_prior, self.model_prior = shares("model_prior of paced", model_prior, classes)
        positive = {"temperature": temperature, "pseudo_count": pseudo_count, "kappa": kappa}
        check_numbers("paced", "above 0 and finite", **positive, long=long)
        check_numbers("paced", "at least 0 and finite", own=own, evidence=evidence)
        check_numbers("paced", "a whole number from 1", steps=steps)
        check_choice("paced", (True, False, None), relative=relative)
        contained = uniform(classes) if assumes is None else check_prior(assumes, classes)
        self.assumes = None if assumes is None else [float(p) for p in assumes]
        self.contained = np.maximum(contained, FLOOR)
        self.temperature = temperature
        self.bias = None if bias is None else numbers("bias", bias, (classes,))
        self.relative, self.pseudo_count, self.own = relative, pseudo_count, own
        self.long, self.kappa, self.steps, self.evidence = long, kappa, steps, evidence
        self._pace = Pace(classes, pseudo_count / classes, own, long, kappa, steps, evidence)
        self.reset()

    def start(self) -> State:
        """Nothing seen, uniform estimates."""
        kept = {name: torch.from_numpy(array) for name, array in self._pace.start().items()}
        return {
            **kept,
            "prior": kept["prior"].clone(),
            "present": kept["prior"].clone(),
        }

    def step(self, state: State, probs: Tensor) -> State:
        """Take in the batch, and decide which estimate adjusts it."""
        old = _arrays(state)
        new, present = self._pace.advance(old, self._rows(probs))
        new["present"] = self._adjusting(present)
        return _tensors(new, old, probs.device)

    def _rows(self, probs: Tensor) -> Array:
        """Calibrated probabilities that assume equally frequent classes."""
        # in double precision on the CPU: small problems, many steps
        rows = scaled(probs, self.temperature, self.bias).double().cpu().numpy()
        rows = rows / self._model_prior
        return normalised(rows)

    def whole(self, probs: Tensor) -> Tensor:
        """The label distribution by which to adjust images that are all known at once, (classes,).

        EM over all of them until it stands still: their order does not matter. The relative
        estimate adjusts by changes, and a whole has none: then predictions stay as they are.

        Args:
            probs: Predicted probabilities, (N, classes), read as `update` reads them.
        """
        if self.uses_relative:
            return torch.from_numpy(normalised(self.contained))
        rows = self._rows(check_probs(probs, self.classes).float())
        everything, assumed = np.ones((len(rows), 1)), uniform(self.classes)[None]
        pseudo, found = self.pseudo_count * assumed, assumed
        for _ in range(MOST_STEPS):
            last, found = found, em(rows, everything, found, assumed, pseudo, 1)
            if np.abs(found - last).max() < STILL:
                break
        return torch.from_numpy(found[0])

    @property
    def ahead(self) -> Tensor:
        """The mix of the estimates: without the labels of the last batch itself."""
        adjusts = self._adjusting(self._pace.ahead(_arrays(self._state)))
        return torch.from_numpy(adjusts).to(self.prior)

    @property
    def uses_relative(self) -> bool:
        """Whether the relative estimate adjusts, under the statistics of ``view``."""
        return self.view != 0 if self.relative is None else self.relative

    def _adjusting(self, both: Array) -> Array:
        """The estimate that adjusts, of the full and the relative one."""
        return adjusting(both, self.contained if self.uses_relative else None)

    def read(self, state: State) -> Tensor:
        """The mix of the full estimates."""
        return state["prior"].clone()

    def read_present(self, state: State) -> Tensor:
        """The label distribution that adjusts the last batch."""
        return state["present"].clone()

    def merge(self, earlier: Mapping[str, Tensor], later: Mapping[str, Tensor]) -> State:
        """The state of one stream, from those of two of its parts.

        Args:
            earlier: State after the first part of the stream.
            later: State after the rest, which began with a reset; or that of another replica.
        """
        for state in (earlier, later):
            self.check_state(state)
        if not (earlier["seen"] and later["seen"]):
            return {k: v.clone() for k, v in (later if later["seen"] else earlier).items()}
        last = _arrays(later)
        new = self._pace.merge(_arrays(earlier), last)
        new["present"] = last["present"]
        return _tensors(new, last, later["seen"].device)

    def problem(self, state: State) -> str | None:
        """Counts, probabilities and sums that a stream can have."""
        seen = int(state["seen"])
        if not 0 <= seen <= MOST_IMAGES:
            return f"one with a number of images seen from 0 to {MOST_IMAGES}"
        sums = {name: state[name] for name in ("label_sums", "prediction_sums")}
        for name, tensor in {**sums, "rows": state["rows"]}.items():
            if (tensor < 0).any():
                return f"one with {name} of at least 0"
        most = seen * (1 + 1e-3)
        if any(float(s.double().sum()) > most for s in sums.values()):
            return "one with sums over the images seen"
        filled = min(seen, WINDOWS[-1])
        rows = state["rows"][WINDOWS[-1] - filled :].float()
        for name in ("estimates", "prior", "present"):
            if (state[name] < 0).any():
                return f"one with {name} of at least 0"
        parts = [rows, state["estimates"], state["prior"], state["present"]]
        if any(((p.sum(-1) - 1).abs() > 1e-2).any() for p in parts):
            return "one of rows and estimates with sum 1"
        if (state["scores"] > 0).any():
            return "one with scores of at most 0"
        classes = state.get("classes")
        if classes is None:
            return None
        if (classes < 0).any() or (classes >= self.classes).any():
            return f"one with classes from 0 to {self.classes - 1}"
        ordered = classes[WINDOWS[-1] - filled :].sort(1).values
        return "one with different classes in a row" if (ordered.diff() == 0).any() else None


def _arrays(state: Mapping[str, Tensor]) -> Kept:
    return {name: tensor.cpu().numpy() for name, tensor in state.items()}


def _tensors(arrays: Kept, like: Kept, device: torch.device) -> State:
    """Copies of arrays as tensors, each with the number format of its namesake."""
    copies = {name: arrays[name].astype(old.dtype) for name, old in like.items()}
    return {name: torch.from_numpy(array).to(device) for name, array in copies.items()}
