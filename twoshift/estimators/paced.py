"""A label estimate for any pace: one image at a time or batches, steady labels or bursts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from twoshift.errors import SettingError
from twoshift.estimators._bcts import scaled
from twoshift.estimators._pace import (
    FEATURES,
    FULL,
    RELATIVE,
    WINDOWS,
    Array,
    Kept,
    Pace,
    trust_features,
)
from twoshift.estimators._window import numbers
from twoshift.estimators.base import PriorEstimator, State, estimators
from twoshift.priors import check_prior, uniform
from twoshift.registry import check_choice, check_numbers

FLOOR = 1e-6  # smallest share of a class that the logits may contain
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
    favours cancel, and only changes of the labels adjust: without any, predictions stay as the
    model makes them. ``label_trust`` decides between both.

    Args:
        classes: Number of classes.
        model_prior: Label distribution that the (calibrated) probabilities assume; uniform by
            default, as for ``em``.
        temperature: T of the calibrated probabilities softmax(log p / T + bias).
        bias: Bias of the calibrated probabilities, one number per class; none by default.
        assumes: The label distribution that the logits contain, which an adapter takes out: the
            relative estimate puts it back. None, the default, for uniform.
        label_trust: One row per view: six weights of `trust_features`, an intercept and a margin
            above 0. They foretell by how much the full estimate is better than the relative one.
            Trust begins above the margin and ends below 0.
        relative: Whether the relative estimate adjusts. None leaves it to ``label_trust``;
            without that, the full one does.
        pseudo_count: Images of every class to add to each past: a Dirichlet prior.
        own: Images of the mix to add to the batch.
        long: Half-life of the long past, in images.
        kappa: Images of uniform labels to add to the mean prediction.
        steps: EM steps per batch; each batch goes on from the last solution.
        judged: Half-life of the mean of the features, in images.
    """

    reads_unadjusted: ClassVar[bool] = True
    counts_batch: ClassVar[bool] = True

    def __init__(
        self,
        classes: int,
        model_prior: Sequence[float] | None = None,
        temperature: float = 1.0,
        bias: ArrayLike | Tensor | None = None,
        assumes: Sequence[float] | None = None,
        label_trust: ArrayLike | Tensor | None = None,
        relative: bool | None = None,
        pseudo_count: float = 1.0,
        own: float = 64.0,
        long: float = 2048.0,
        kappa: float = 64.0,
        steps: int = 3,
        judged: float = 256.0,
    ) -> None:
        super().__init__(classes)
        prior = uniform(classes) if model_prior is None else check_prior(model_prior, classes)
        if (prior == 0).any():
            raise SettingError("model_prior of paced", must_be="above 0 for every class")
        positive = {"temperature": temperature, "pseudo_count": pseudo_count, "kappa": kappa}
        check_numbers("paced", "above 0 and finite", **positive, long=long, judged=judged)
        check_numbers("paced", "at least 0 and finite", own=own)
        check_numbers("paced", "a whole number from 1", steps=steps)
        check_choice("paced", (True, False, None), relative=relative)
        contained = uniform(classes) if assumes is None else check_prior(assumes, classes)
        self.assumes = None if assumes is None else [float(p) for p in assumes]
        self._contained = np.maximum(contained, FLOOR)
        self.model_prior = None if model_prior is None else [float(p) for p in model_prior]
        self.temperature = temperature
        self.bias = None if bias is None else numbers("bias", bias, (classes,))
        self.label_trust = None if label_trust is None else _trust(label_trust)
        self.relative, self.pseudo_count, self.own = relative, pseudo_count, own
        self.long, self.kappa, self.steps, self.judged = long, kappa, steps, judged
        self._model_prior = prior
        self._pace = Pace(classes, pseudo_count, own, long, kappa, steps)
        self.reset()

    def start(self) -> State:
        """Nothing seen, uniform estimates, no trust."""
        kept = {name: torch.from_numpy(array) for name, array in self._pace.start().items()}
        return {
            **kept,
            "prior": kept["prior"].clone(),
            "present": kept["prior"].clone(),
            "judgement": torch.zeros(FEATURES + 1),  # decayed sums, and their images
            "trusted": torch.zeros((), dtype=torch.bool),
        }

    def step(self, state: State, probs: Tensor) -> State:
        """Take in the batch, and decide which estimate adjusts it."""
        # in double precision on the CPU: small problems, many steps
        rows = scaled(probs, self.temperature, self.bias).double().cpu().numpy()
        rows = rows / self._model_prior
        rows /= rows.sum(1, keepdims=True)
        old = _arrays(state)
        new, present, mean = self._pace.advance(old, rows)
        judgement, trusted = old["judgement"], True
        if self.label_trust is not None:
            features = trust_features(rows, present[FULL], present[RELATIVE], mean)
            decay = 0.5 ** (len(rows) / self.judged)
            judgement = decay * judgement + len(rows) * np.append(features, 1.0)
            trusted = self._trusts(judgement, bool(old["trusted"]))
        full = trusted if self.relative is None else not self.relative
        relative = present[RELATIVE] * self._contained
        new["present"] = present[FULL] if full else relative / relative.sum()
        new["judgement"], new["trusted"] = judgement, np.array(trusted)
        return _tensors(new, old, probs.device)

    def _trusts(self, judgement: Array, before: bool) -> bool:
        """Whether the mean features speak for the full estimate."""
        assert self.label_trust is not None
        if not 0 <= self.view < len(self.label_trust):
            must_be = f"from 0 to {len(self.label_trust) - 1}, a row of label_trust"
            raise SettingError("view of paced", must_be=must_be, got=self.view)
        row = self.label_trust[self.view].numpy()
        value = judgement[:-1] @ row[:FEATURES] / judgement[-1] + row[FEATURES]
        return bool(value > (0 if before else row[-1]))

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
        decay = 0.5 ** (int(later["seen"]) / self.judged)
        new["judgement"] = decay * earlier["judgement"].cpu().numpy() + last["judgement"]
        new["present"] = last["present"]
        new["trusted"] = np.array(bool(earlier["trusted"]) or bool(later["trusted"]))
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
        if any(float(s.double().sum()) > most for s in [*sums.values(), state["judgement"][-1]]):
            return "one with sums over the images seen"
        filled = min(seen, WINDOWS[-1])
        rows = state["rows"][WINDOWS[-1] - filled :].float()
        for name in ("estimates", "prior", "present"):
            if (state[name] < 0).any():
                return f"one with {name} of at least 0"
        parts = [rows, state["estimates"], state["prior"], state["present"]]
        if any(((p.sum(-1) - 1).abs() > 1e-2).any() for p in parts):
            return "one of rows and estimates with sum 1"
        if state["judgement"][-1] < 0 or (state["scores"] > 0).any():
            return "one with a judgement of at least 0 images and scores of at most 0"
        classes = state.get("classes")
        if classes is None:
            return None
        if (classes < 0).any() or (classes >= self.classes).any():
            return f"one with classes from 0 to {self.classes - 1}"
        ordered = classes[WINDOWS[-1] - filled :].sort(1).values
        return "one with different classes in a row" if (ordered.diff() == 0).any() else None


def _trust(values: ArrayLike | Tensor) -> Tensor:
    views = len(values) if isinstance(values, Sized) and len(values) else 1
    trust = numbers("label_trust", values, (views, FEATURES + 2))
    if (trust[:, -1] < 0).any():
        raise SettingError("margin in label_trust, its last column", must_be="at least 0")
    return trust


def _arrays(state: Mapping[str, Tensor]) -> Kept:
    return {name: tensor.cpu().numpy() for name, tensor in state.items()}


def _tensors(arrays: Kept, like: Kept, device: torch.device) -> State:
    """Copies of arrays as tensors, each with the number format of its namesake."""
    copies = {name: arrays[name].astype(old.dtype) for name, old in like.items()}
    return {name: torch.from_numpy(array).to(device) for name, array in copies.items()}
