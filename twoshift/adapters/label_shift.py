"""The label shift adapter of the paper: two small networks that shift the features and the head.

Park et al., "Label Shift Adapter for Test-Time Adaptation under Covariate and Label Shifts",
ICCV 2023. The networks read the label distribution and produce (gamma, beta) for the features and
(dW, db) for the linear head: logits = (gamma * h + beta)(W + dW) + b + db.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from twoshift.adapters.base import Adapter, HeadShift, adapters
from twoshift.errors import SettingError
from twoshift.registry import check_choice

FORMS = ("class", "rank1", "full", "none")
CONDITIONS = ("scalar", "full")


@adapters.register("label_shift")
class LabelShiftAdapter(Adapter):
    """The paper's hypernetwork from a label distribution to (gamma, beta, dW, db).

    A fresh one is the identity: its last layers start at zero and gamma is 1 + output.

    Args:
        features: d, the input size of the head.
        classes: C, the number of classes.
        class_counts: Training images per class (or their shares), for the mapping vector; without
            them class 0 counts as the most frequent, as in the long-tailed CIFAR sets.
        dw: Form of dW: ``"class"`` (one number per class, spread evenly over the features),
            ``"rank1"``, ``"full"`` or ``"none"``.
        gamma: Whether to scale the features.
        beta: Whether to shift them.
        db: Whether to shift the bias.
        condition: ``"scalar"`` reads m'pi, the degree of imbalance; ``"full"`` reads pi itself.
        hidden: Size of the hidden layers.
        lambdas: The exponents of the source prior that the outputs model at (source, uniform,
            reversed) labels: pi_s ** lambda; tau of the training loss is 1 - lambda.
    """

    needs_training = True

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        class_counts: Sequence[float] | None = None,
        dw: str = "class",
        gamma: bool = True,
        beta: bool = True,
        db: bool = True,
        condition: str = "scalar",
        hidden: int = 100,
        lambdas: Sequence[float] = (1.0, 0.0, -2.0),
    ) -> None:
        super().__init__(features, classes, class_counts)
        check_choice("the adapter", FORMS, dw=dw)
        if condition not in CONDITIONS:
            cure = "Use ClasswiseAdapter." if condition == "classwise" else None
            must_be = f"one of {CONDITIONS}"
            raise SettingError("condition", must_be=must_be, got=repr(condition), cure=cure)
        if not (gamma or beta or db or dw != "none"):
            raise SettingError("the adapter", must_be="given at least one of gamma, beta, dw, db")
        if len(lambdas) != 3:
            raise SettingError("lambdas", must_be="three numbers", got=lambdas)
        self.dw, self.gamma, self.beta, self.db = dw, gamma, beta, db
        self.condition, self.hidden = condition, hidden
        self.lambdas = tuple(float(value) for value in lambdas)
        inputs = 1 if condition == "scalar" else classes
        weight_size = {"class": classes, "rank1": classes + features, "full": classes * features}
        self._sizes = [weight_size.get(dw, 0), classes if db else 0]
        self.feature_net = network(inputs, hidden, features * (gamma + beta))
        self.head_net = network(inputs, hidden, sum(self._sizes))
        if dw == "rank1" and self.head_net is not None:
            # both factors zero would be a saddle that no gradient leaves
            last = self.head_net[-1]
            assert isinstance(last, nn.Linear)
            nn.init.constant_(last.bias[classes : classes + features], 1 / features)

    def forward(self, prior: Tensor) -> HeadShift:
        """The shift of the head for a label distribution of shape (C,)."""
        inputs = self.degree(prior).unsqueeze(0) if self.condition == "scalar" else prior
        scale = shift = weight = bias = None
        if self.feature_net is not None:
            outputs = iter(self.feature_net(inputs).split(self.features))
            scale = 1 + next(outputs) if self.gamma else None
            shift = next(outputs) if self.beta else None
        if self.head_net is not None:
            raw, bias = self.head_net(inputs).split(self._sizes)
            bias = bias if self.db else None
            weight = self._weight(raw)
        return HeadShift(scale, shift, weight, bias)

    def _weight(self, raw: Tensor) -> tuple[Tensor, Tensor] | Tensor | None:
        if self.dw == "class":
            return spread_evenly(raw, self.features)
        if self.dw == "rank1":
            per_class, per_feature = raw.split([self.classes, self.features])
            return per_class, per_feature
        return raw.view(self.classes, self.features) if self.dw == "full" else None


def network(inputs: int, hidden: int, outputs: int) -> nn.Sequential | None:
    """Two layers, the last of which starts at zero; None if there are no outputs."""
    if outputs == 0:
        return None
    last = nn.Linear(hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), last)


def spread_evenly(per_class: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """The dW of one number per class, as the factors of an outer product."""
    return per_class, per_class.new_full((features,), 1 / features)
