"""A forward pass with an adapter: logits of the adapted head beside those of the original one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from twoshift.adapters.base import AdaptedAnswer, adapted_head
from twoshift.errors import HeadError
from twoshift.models.head import capture_features, close, is_convolution


class Scores(NamedTuple):
    """The result of a forward pass.

    Attributes:
        logits: Logits of the model, (B, C).
        raw: Logits of its original head, which estimators of the label distribution may read; the
            same tensor where no adapter is attached.
        features: Input of the adapted head, from which `rescore` predicts again; None where the
            logits are not simply those of the head.
        apart: Whether ``raw`` is of another pass than ``logits`` and ``features``.
    """

    logits: Tensor
    raw: Tensor
    features: Tensor | None = None
    apart: bool = False

    def split(self, images: int) -> list[Scores]:
        """Parts of so many images, in order."""
        if len(self.raw) <= images:
            return [self]
        logits, raw = self.logits.split(images), self.raw.split(images)
        features = [None] * len(raw) if self.features is None else self.features.split(images)
        parts = zip(logits, raw, features, strict=True)
        return [Scores(*part, self.apart) for part in parts]

    @staticmethod
    def cat(parts: Sequence[Scores]) -> Scores:
        """The scores of several passes, one after the other."""
        logits, raw, features, apart = zip(*parts, strict=True)
        whole = None if any(f is None for f in features) else torch.cat(features)
        return Scores(torch.cat(logits), torch.cat(raw), whole, any(apart))


def score(model: nn.Module, x: Tensor) -> Scores:
    """A forward pass; the logits of the original head carry no gradient."""
    head = adapted_head(model)
    if head is None:
        logits = model(x)
        return Scores(logits, logits)
    with capture_features(head) as features:
        logits = model(x)
    with torch.no_grad():
        raw = head.raw(features[-1]).to(logits.dtype)
        pooled = not is_convolution(head) or close(logits, head.shifted(features[-1]))
    if raw.shape != logits.shape or not (pooled or logits.isnan().any()):
        raise HeadError(
            "the output of the adapted head",
            must_be="the model's answer, or its mean over positions the answer",
            got="another answer",
            cure="Find it by trace_head(model, images), or use a LogitAdapter with head=ANSWER.",
        )
    return Scores(logits, raw, features[-1].detach())


@torch.no_grad()
def rescore(model: nn.Module, scores: Scores) -> Scores:
    """The scores of the same pass under the label distribution that the adapter has now."""
    head = adapted_head(model)
    if head is None or scores.features is None:
        return scores
    if isinstance(head, AdaptedAnswer):
        logits = head.moved(scores.features)
    elif head.adapter.shifts_only_logits and not scores.apart:
        logits = head.moved(scores.raw)
    else:
        logits = head.shifted(scores.features)
    return scores._replace(logits=logits.to(scores.logits.dtype))


def unbiased(model: nn.Module, raw: Tensor) -> Tensor:
    """Raw logits of a model without the label distribution that its adapter knows they contain."""
    head = adapted_head(model)
    return raw if head is None else head.adapter.unbiased(raw)
