"""What a check of the contract runs on: a method, a network and a stream."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoshift.adapters import Adapter, attach
from twoshift.estimators import EMA
from twoshift.methods._state import State
from twoshift.methods.base import Method
from twoshift.methods.label_aware import LabelAware
from twoshift.models.head import class_count
from twoshift.testing.networks import make_batches


class Run(NamedTuple):
    """What a method did on a stream.

    Attributes:
        logits: Of each batch.
        states: Before each batch, and after the last.
    """

    logits: list[Tensor]
    states: list[State]


@dataclass(frozen=True, eq=False)
class MethodCase:
    """A method on a network, with or without an adapter. Checks build fresh methods from it.

    With an adapter, the method runs inside `LabelAware` with a moving average as the estimator.

    Args:
        method: The class.
        model: The classifier. Every method that is built gets a copy of it.
        settings: Arguments of the method's constructor, besides the model.
        adapter: The adapter to attach to the model, or None.
        batches: The stream; at least three batches.
        name: What reports and test ids call the case.
    """

    method: type[Method]
    model: nn.Module
    settings: Mapping[str, Any] = field(default_factory=dict)
    adapter: Adapter | None = None
    batches: Sequence[Tensor] = field(default_factory=make_batches)
    name: str = ""

    def __str__(self) -> str:
        return self.name or type(self.model).__name__

    def network(self) -> nn.Module:
        """A copy of the model."""
        return copy.deepcopy(self.model)

    def build(self, model: nn.Module | None = None, **settings: Any) -> Method:
        """A new method around ``model``, by default a copy of the case's own.

        Args:
            model: The bare classifier.
            **settings: What differs from the settings of the case.
        """
        model = self.network() if model is None else model
        if self.adapter is None:
            return self._construct(model, settings)
        inner = self._construct(attach(model, self.adapter), settings)
        return LabelAware(inner, EMA(class_count(model), alpha=0.3))

    def _construct(self, model: nn.Module, settings: Mapping[str, Any]) -> Method:
        return self.method(model, **{**self.settings, **settings})

    def run(self, live: Method) -> list[Tensor]:
        """The logits of every batch; each batch is a copy."""
        return [live(x.clone()) for x in self.batches]

    @cached_property
    def reference(self) -> Run:
        """A plain run over the stream, which the other runs are compared with."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            live = self.build()
            run = Run([], [live.state()])
            for x in self.batches:
                run.logits.append(live(x.clone()))
                run.states.append(live.state())
        return run
