"""EATA: entropy minimisation on sure and novel samples, held back by Fisher information."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoshift.adapters import Scores
from twoshift.errors import BatchError, SettingError
from twoshift.methods._learning import entropy, make_optimizer, norm_affine, paths
from twoshift.methods.base import Method, methods
from twoshift.models.head import class_count
from twoshift.models.norm import use_batch_statistics
from twoshift.registry import check_numbers

KEEP = 0.9  # weight of the old value in the moving average of the predictions


@methods.register("eata")
class EATA(Method):
    """Entropy steps on sure samples unlike earlier ones; important weights stay near the source.

    With ``fisher_weight=0`` nothing holds the weights back: this is ETA. The logits of the forward
    pass before the step are the prediction.

    Args:
        model: The classifier.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"``.
        margin: Samples below this share of the highest possible entropy are sure.
        redundancy: Samples whose prediction has at least this cosine with the average are ignored.
        fisher: Importance of the weights by name, as `fisher_information` computes it.
        fisher_weight: Weight of the penalty on moving important weights.
        freeze: Paths of modules whose weights stay, for example ``["layer4"]``.
    """

    title = "EATA"
    reference = (
        "Niu et al., Efficient test-time model adaptation without forgetting, ICML 2022, "
        "https://arxiv.org/abs/2204.02610"
    )
    needs = frozenset({"source images (for the Fisher information)"})
    statistics = "batch"
    fixed_buffers = frozenset({"importance", "source"})
    average: Tensor
    importance: Tensor
    source: Tensor

    def __init__(
        self,
        model: nn.Module,
        lr: float = 2.5e-4,
        optim: str = "sgd",
        margin: float = 0.4,
        redundancy: float = 0.05,
        fisher: Mapping[str, Tensor] | None = None,
        fisher_weight: float = 2000.0,
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__(model)
        check_numbers("eata", "above 0", margin=margin, redundancy=redundancy)
        check_numbers("eata", "at least 0", fisher_weight=fisher_weight)
        if fisher is None and fisher_weight > 0:
            raise SettingError(
                "fisher of eata",
                must_be="given",
                got="None",
                cure="Compute it with fisher_information(model, source_batches) or `twoshift "
                "calibrate`, or set fisher_weight=0: this is ETA, which needs none.",
            )
        self.lr, self.optim, self.margin, self.redundancy = lr, optim, margin, redundancy
        self.fisher_weight, self.freeze = fisher_weight, paths(freeze)
        self.fisher = None if fisher is None else {n: torch.as_tensor(fisher[n]) for n in fisher}
        use_batch_statistics(self.model)
        affine = norm_affine(self.model, self.freeze)
        self.optimizer = make_optimizer(optim, affine, lr)
        with torch.inference_mode(False):  # buffers that can be written later
            # zero while there is nothing to average: no prediction is similar to it
            self.register_buffer("average", affine[0].new_zeros(class_count(self.model)))
            if self.fisher is not None:
                self.register_buffer("importance", self._flat(self.fisher))
                self.register_buffer("source", _joined(affine).detach())
        self.ready()

    def adapt(self, x: Tensor) -> Scores:
        """Predict, then step on the sure and novel samples."""
        scores = self.predict(x)
        logits = scores.logits
        unsure, p = entropy(logits), logits.detach().softmax(1)
        limit = self.margin * math.log(logits.shape[1])
        novel = F.cosine_similarity(p, self.average[None]).abs() < self.redundancy
        chosen = (unsure.detach() < limit) & novel
        if not chosen.any():
            return scores
        unsure = unsure[chosen]
        loss = ((limit - unsure.detach()).exp() * unsure).mean()
        if self.fisher is not None:
            moved = _joined(self._optimised()) - self.source
            loss = loss + self.fisher_weight * (self.importance * moved.square()).sum()
        self.minimise(loss)
        mean = p[chosen].mean(0)
        self.average.copy_(KEEP * self.average + (1 - KEEP) * mean if self.average.any() else mean)
        return scores

    def _flat(self, fisher: Mapping[str, Tensor]) -> Tensor:
        """The importance of all trained weights, in the optimiser's order."""
        names = {p: n for n, p in self.model.named_parameters()}
        parts = []
        for parameter in self._optimised():
            name = names[parameter]
            if name not in fisher:
                raise SettingError(
                    f"fisher of {name}",
                    must_be="given, as for every trained weight",
                    got="nothing",
                    cure="Compute it with fisher_information(model, batches).",
                )
            part = fisher[name].to(parameter)
            if len(part) != parameter.numel() or not (part >= 0).all() or part.isinf().any():
                raise SettingError(
                    f"fisher of {name}", must_be=f"{parameter.numel()} finite numbers of at least 0"
                )
            parts.append(part)
        return torch.cat(parts)


def fisher_information(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """How much the source predictions depend on each weight of the normalisation layers.

    The square of each batch's mean gradient, averaged over batches; the model's own predictions
    serve as labels. The paper takes 2000 source images. The given model is untouched.

    Args:
        model: The classifier, with or without an adapter.
        batches: Batches of source images.
    """
    # its copy normalises by batch statistics and has gradients where they are needed
    live = EATA(model, fisher_weight=0)
    trained = {n: p for n, p in live.model.named_parameters() if p.requires_grad}
    with torch.inference_mode(False), torch.enable_grad():
        total, count = {n: torch.zeros_like(p) for n, p in trained.items()}, 0
        for x in batches:
            # a copy is no inference tensor; without a gradient of its input, group normalisation of
            # images that are channels last crashes in torch 2.13
            images = x.to(live.device).clone().requires_grad_()
            logits = live.model(images.clone())
            loss = F.cross_entropy(logits, logits.detach().argmax(1))
            inputs = [*trained.values(), images]
            *grads, _ = torch.autograd.grad(loss, inputs, materialize_grads=True)
            for name, grad in zip(trained, grads, strict=True):
                total[name] += grad.square()
            count += 1
    if not count:
        raise BatchError("batches", must_be="at least one", got="none")
    return {n: (t / count).flatten().cpu() for n, t in total.items()}


def _joined(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.flatten() for p in parameters])
