"""Logit adjustment as an adapter: it adds the logarithm of the label distribution to the logits.

Menon et al., "Long-tail learning via logit adjustment", ICLR 2021, https://arxiv.org/abs/2007.07314;
Hong et al., "Disentangling label distribution for long-tailed visual recognition", CVPR 2021,
https://arxiv.org/abs/2012.00321.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from twoshift import priors
from twoshift.adapters.base import (
    FLOOR,
    Adapter,
    HeadShift,
    adapters,
    bare_head,
    goes_to_answer,
)
from twoshift.errors import SettingError
from twoshift.models.classifier import unwrap
from twoshift.models.head import size_of
from twoshift.registry import check_numbers


@adapters.register("logit")
class LogitAdapter(Adapter):
    """Adds log pi to the logits, minus the log of the label distribution that they contain.

    Args:
        features: d, the input size of the head.
        classes: C, the number of classes.
        class_counts: Training images per class (or their shares); only `degree` reads them.
        assumes: The label distribution that the head's logits contain: that of the training images
            after plain cross-entropy, none (the default) after balanced softmax.
    """

    assumed_log: Tensor
    shifts_only_logits = True

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        class_counts: Sequence[float] | None = None,
        assumes: Sequence[float] | None = None,
    ) -> None:
        super().__init__(features, classes, class_counts)
        self.assumes = None if assumes is None else [float(p) for p in assumes]
        assumed = priors.uniform(classes) if assumes is None else assumes
        assumed = priors.check_prior(assumed, classes, "assumes of the adapter")
        logs = torch.from_numpy(assumed).float().clamp_min(FLOOR).log()
        self.register_buffer("assumed_log", logs, persistent=False)

    def forward(self, prior: Tensor) -> HeadShift:
        """The logarithm of the label distribution, added to the logits."""
        logs = prior.clamp_min(FLOOR).log()
        return HeadShift(logits=logs if self.assumes is None else logs - self.assumed_log)

    def unbiased(self, raw: Tensor) -> Tensor:
        """The logits without the assumed label distribution."""
        return raw if self.assumes is None else raw - self.assumed_log


@adapters.register("calibrated")
class CalibratedAdapter(LogitAdapter):
    """Logit adjustment of calibrated logits: the head's logits are divided by a temperature first.

    The logarithm of a label distribution has the right weight only beside calibrated logits.

    Args:
        features: d, the input size of the head.
        classes: C, the number of classes.
        class_counts: Training images per class (or their shares); only `degree` reads them.
        assumes: The label distribution that the head's calibrated logits contain; none by default.
        temperature: T, which calibrates the logits; `twoshift calibrate` fits it.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        class_counts: Sequence[float] | None = None,
        assumes: Sequence[float] | None = None,
        temperature: float,
    ) -> None:
        super().__init__(features, classes, class_counts=class_counts, assumes=assumes)
        check_numbers("the adapter", "above 0 and finite", temperature=temperature)
        self.temperature = temperature

    def forward(self, prior: Tensor) -> HeadShift:
        """The logarithm of the label distribution, added to the calibrated logits."""
        return super().forward(prior)._replace(temperature=self.temperature)

    def unbiased(self, raw: Tensor) -> Tensor:
        """The calibrated logits without the assumed label distribution."""
        return super().unbiased(raw / self.temperature)


def logit_adapter(
    model: nn.Module,
    assumes: Sequence[float] | None = None,
    class_counts: Sequence[float] | None = None,
    temperature: float | None = None,
    head: str | None = None,
    classes: int | None = None,
) -> LogitAdapter:
    """The adapter for logit adjustment of a classifier, of the size of its head.

    Args:
        model: The classifier.
        assumes: The label distribution that its logits contain; none by default.
        class_counts: Training images per class (or their shares); only `degree` reads them.
        temperature: The temperature that calibrates its logits, if it is known.
        head: Path of the head, or `ANSWER`, as `attach` takes it.
        classes: Number of classes; needed only where no layer tells.
    """
    size = _size(model, head, classes)
    if temperature is None:
        return LogitAdapter(*size, class_counts=class_counts, assumes=assumes)
    return CalibratedAdapter(
        *size, class_counts=class_counts, assumes=assumes, temperature=temperature
    )


def _size(model: nn.Module, head: str | None, classes: int | None) -> tuple[int, int]:
    if not goes_to_answer(unwrap(model), LogitAdapter, head):
        features, found = size_of(bare_head(model, head)[1])
        if classes not in (None, found):
            must_be = f"{found}, the size of the model's head"
            raise SettingError("classes of the adapter", must_be=must_be, got=classes)
        return features, found
    if classes is None:
        raise SettingError(
            "classes of the adapter",
            must_be="given, since no layer of the model tells",
            got="None",
            cure="logit_adapter(model, classes=10).",
        )
    return classes, classes
