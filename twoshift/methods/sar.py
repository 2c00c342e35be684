"""SAR: entropy minimisation on sure samples, towards flat minima, with recovery from collapse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from twoshift.adapters import AdaptedHead, Scores, adapted_heads
from twoshift.methods._learning import entropy, make_optimizer, norm_affine, paths
from twoshift.methods.base import Method, methods
from twoshift.models.norm import NORMS, use_batch_statistics
from twoshift.registry import check_numbers

KEEP = 0.9  # weight of the old value in the moving average of the loss


@methods.register("sar")
class SAR(Method):
    """Sharpness-aware entropy steps on sure samples; starts over when the loss collapses.

    The weights are first moved to where the entropy is highest nearby, and the gradient is taken at
    that point. Late layers stay as they are. The logits of the first forward pass are the
    prediction.

    Args:
        model: The classifier.
        lr: Learning rate.
        optim: ``"adam"`` or ``"sgd"``.
        rho: How far the weights are moved before the gradient is taken.
        margin: Samples below this share of the highest possible entropy are sure.
        recover_below: Moving average of the loss below which the method starts over; None for
            never.
        freeze: Paths of modules whose weights stay; None for the late ones, see `late_norms`.
    """

    title = "SAR"
    reference = (
        "Niu et al., Towards stable test-time adaptation in dynamic wild world, ICLR 2023, "
        "https://arxiv.org/abs/2302.12400"
    )
    statistics = "batch"
    average: Tensor

    def __init__(
        self,
        model: nn.Module,
        lr: float = 2.5e-4,
        optim: str = "sgd",
        rho: float = 0.05,
        margin: float = 0.4,
        recover_below: float | None = 0.2,
        freeze: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model)
        limits = {} if recover_below is None else {"recover_below": recover_below}
        check_numbers("sar", "above 0", rho=rho, margin=margin, **limits)
        self.lr, self.optim, self.rho, self.margin = lr, optim, rho, margin
        self.recover_below = recover_below
        self.freeze = None if freeze is None else paths(freeze)
        use_batch_statistics(self.model)
        frozen = late_norms(self.model) if self.freeze is None else self.freeze
        self.optimizer = make_optimizer(optim, norm_affine(self.model, frozen), lr)
        with torch.inference_mode(False):  # a buffer that can be written later
            # infinite while there is nothing to average
            self.register_buffer("average", torch.tensor(math.inf, device=self.device))
        self.ready()

    def adapt(self, x: Tensor) -> Scores:
        """Predict, then step by the gradient at the worst weights nearby."""
        scores = self.predict(x)
        logits = scores.logits
        limit = self.margin * math.log(logits.shape[1])
        first = entropy(logits)
        sure = first.detach() < limit
        if not sure.any():
            return scores
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        first[sure].mean().backward()
        before = self._climb()
        second = entropy(self.model(x))[sure]
        second = second[second.detach() < limit]
        self.optimizer.zero_grad(set_to_none=True)
        if len(second):
            loss = second.mean()
            loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(tuple(self._optimised()), before)
        if len(second):
            self.optimizer.step()
            self._watch(loss.detach())
        return scores

    @torch.no_grad()
    def _climb(self) -> list[Tensor]:
        """Move the weights up the gradient by ``rho``; return their values before."""
        parameters = self._optimised()
        before = [p.clone() for p in parameters]
        pairs = [(p, p.grad) for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([grad for _, grad in pairs])
        for parameter, grad in pairs:
            parameter.add_(grad * (self.rho / (norm + 1e-12)))
        return before

    def _watch(self, loss: Tensor) -> None:
        """Update the average loss, and start over if the model has collapsed to nearly none."""
        average = KEEP * self.average + (1 - KEEP) * loss if self.average.isfinite() else loss
        self.average.copy_(average)
        if self.recover_below is not None and average < self.recover_below:
            now = self.state()
            # except the label distribution of the adapter, whose estimate is still good
            priors = {f"{path}.prior" for path, _ in adapted_heads(self)}
            self.load_state({**self._initial, **{name: now[name] for name in priors}})


def late_norms(model: nn.Module) -> list[str]:
    """Paths of the norm layers that SAR does not train, by type and depth.

    A stage is an outermost sequence of blocks with norm layers inside. The last of several stages
    is late, or the last quarter of the blocks of a single one, and all layers after it. A model
    without stages has no late layers.
    """
    start = _late_part(model)
    modules = list(model.named_modules())
    first = next((i for i, (_, m) in enumerate(modules) if m is start), len(modules))
    early, late = (
        [n for n, m in part if isinstance(m, NORMS) and list(m.parameters(recurse=False))]
        for part in (modules[:first], modules[first:])
    )
    return late if early else []  # something must be left to adapt


def _late_part(module: nn.Module) -> nn.Module | None:
    stages = _stages(module)
    if len(stages) != 1:
        return stages[-1] if stages else None
    blocks = _blocks(stages[0])
    if len(blocks) == 1:  # a wrapper around the model proper
        return _late_part(blocks[0])
    return blocks[-max(1, len(blocks) // 4)]


def _stages(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, AdaptedHead):
        return []
    if isinstance(module, nn.Sequential | nn.ModuleList) and _blocks(module):
        return [module]
    return [stage for child in module.children() for stage in _stages(child)]


def _blocks(sequence: nn.Module) -> list[nn.Module]:
    return [
        child
        for child in sequence.children()
        if not isinstance(child, NORMS) and any(isinstance(m, NORMS) for m in child.modules())
    ]
