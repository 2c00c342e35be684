"""Each check fails for a method that breaks its promise, and passes for one that keeps it."""

import random
from typing import ClassVar
from unittest import SkipTest

import pytest
import torch
from torch import nn

from twoshift.adapters import adapted_heads
from twoshift.errors import InputError, SettingError
from twoshift.methods import IABN, Method, Source, Tent, methods
from twoshift.testing import (
    NETWORKS,
    MethodCase,
    check_method,
    checks,
    make_adapter,
    make_batches,
    make_network,
    method_cases,
    method_checks,
)

BATCHES = make_batches((3, 8, 8))


class OneClassLess(Tent):
    def forward(self, x):
        return super().forward(x)[:, 1:]


class KeepsTheGraph(Tent):
    def forward(self, x):
        return super().forward(x).requires_grad_()


class NotANumber(Tent):
    def forward(self, x):
        return super().forward(x) * float("nan")


class DoublePrecision(Tent):
    def forward(self, x):
        return super().forward(x).double()


class FailsOnOneImage(Tent):
    def forward(self, x):
        return super().forward(x) / (len(x) - 1)


class ReadsRawMemory(Tent):
    def forward(self, x):
        return super().forward(x if x.is_contiguous() else x.flip(0))


class WakesTheModel(Tent):
    def __init__(self, model, lr=1e-3):
        super().__init__(model, lr)
        model.requires_grad_(True)


class UsesTheGivenModel(Source):
    def __init__(self, model):
        super().__init__(model)
        self.model = model
        self.ready()


class WritesToTheBatch(Tent):
    def forward(self, x):
        logits = super().forward(x)
        x.detach().mul_(0.5)
        return logits


class ReachesIntoTheGraph(Tent):
    def forward(self, x):
        if x.requires_grad:
            x.sum().backward()
        return super().forward(x)


class FreesTheGraph(Tent):
    def forward(self, x):
        if x.requires_grad:
            torch.autograd.grad(x.sum(), x.grad_fn.next_functions[0][0].variable)
        return super().forward(x)


class ForgetsReady(Method):
    def adapt(self, x):
        return self.predict(x)


class Counts(Tent):
    """Counts batches outside of its state."""

    count = 0

    def forward(self, x):
        self.count += 1
        return super().forward(x) + 0.1 * self.count


class CountsAndResets(Counts):
    def reset(self):
        super().reset()
        self.count = 0


class CountsTogether(Tent):
    """All instances count in one place."""

    count: ClassVar[list[int]] = [0]

    def __init__(self, model, lr=1e-3):
        super().__init__(model, lr)
        self.count[0] = 0

    def forward(self, x):
        self.count[0] += 1
        return super().forward(x) + 0.1 * self.count[0]


class MovesTheAdapter(Tent):
    def adapt(self, x):
        scores = super().adapt(x)
        for _, head in adapted_heads(self):
            for parameter in head.adapter.parameters():
                parameter.data.add_(1e-3)
        return scores


class RestsUnderNoGrad(Tent):
    def forward(self, x):
        return super().forward(x) if torch.is_grad_enabled() else self.model(x)


class RestsInInferenceMode(Tent):
    def forward(self, x):
        return self.model(x) if torch.is_inference_mode_enabled() else super().forward(x)


class CannotBeBuiltInInferenceMode(Tent):
    def __init__(self, model, lr=1e-3):
        super().__init__(model, lr)
        self.register_buffer("images", torch.tensor(0))  # an inference tensor, never to be written
        self.ready()

    def adapt(self, x):
        self.images += len(x)
        return super().adapt(x)


class DrawsGlobally(Tent):
    def forward(self, x):
        return super().forward(x) + torch.rand(())


class DrawsElsewhere(Tent):
    def forward(self, x):
        return super().forward(x) + random.random()


class ObeysTrain(Tent):
    def train(self, mode=True):
        self.model.train(mode)
        return self


class ForgetsASetting(Tent):
    def __init__(self, model, lr=1e-3, scale=1.0):
        super().__init__(model, lr * scale)


class ChangesASetting(Tent):
    def __init__(self, model, lr=1e-3):
        super().__init__(model, 2 * lr)


class HidesASetting(Tent):
    def settings(self):
        return {"lr": self.lr}


class NotJSON(Tent):
    def __init__(self, model, classes=frozenset({1})):
        super().__init__(model)
        self.classes = classes


class WritesIntoMemory(Tent):
    remembers: ClassVar = {"count": torch.float32}

    def adapt(self, x):
        count = self.memory.setdefault("count", torch.zeros(1))
        count += 1
        return super().adapt(x)


class RepairsBadImages(Tent):
    def forward(self, x):
        return super().forward(x.nan_to_num())


class Elsewhere(Tent):
    def __init__(self, model, lr=1e-3):
        super().__init__(model, lr)
        self.register_buffer("far", torch.zeros(1, device="meta"))
        self.ready()


class TakesLabels(Tent):
    def adapt(self, x, labels=None):
        return super().adapt(x)


BROKEN = [
    ("check_logits", OneClassLess, r"logits must be \(8, 5\), got \(8, 4\)"),
    ("check_logits", KeepsTheGraph, "detached"),
    ("check_logits", NotANumber, "finite"),
    ("check_logits", DoublePrecision, r"must be torch\.float32, got torch\.float64"),
    ("check_batch_sizes", FailsOnOneImage, r"a batch of 1 must give \(1, 5\) finite logits"),
    ("check_memory_layout", ReadsRawMemory, "channels-last images must give the same prediction"),
    ("check_given_model_untouched", WakesTheModel, r"changed: \['body.1.weight requires_grad'"),
    ("check_given_model_not_shared", UsesTheGivenModel, "own a copy of the model; batch 0 differs"),
    ("check_batch_untouched", WritesToTheBatch, "must not be written to"),
    ("check_no_gradient_reaches_the_caller", ReachesIntoTheGraph, "no gradient may reach"),
    ("check_no_gradient_reaches_the_caller", FreesTheGraph, "graph must stay usable"),
    ("check_reset", ForgetsReady, r"must end with self\.ready\(\)"),
    ("check_reset", Counts, "after reset, the stream must give the same logits again; batch 0"),
    ("check_save_and_load", CountsAndResets, "must go on where it was saved; batch 0 differs"),
    ("check_adapter_stays", MovesTheAdapter, r"must never move, changed: \['feature_net.0.weight'"),
    ("check_no_grad_caller", RestsUnderNoGrad, "under torch.no_grad, the logits"),
    ("check_inference_mode_caller", RestsInInferenceMode, "under torch.inference_mode, the logits"),
    (
        "check_built_in_inference_mode",
        CannotBeBuiltInInferenceMode,
        r"inside torch.inference_mode\(False\)",
    ),
    ("check_runs_repeat", DrawsGlobally, r"take random numbers from self\.generator"),
    ("check_runs_repeat", DrawsElsewhere, "under another global seed, the logits"),
    ("check_train_and_eval", ObeysTrain, "train and eval must change nothing"),
    ("check_settings", ForgetsASetting, "stored under its name: .*'scale'"),
    ("check_settings", ChangesASetting, r"stored as they are, changed: \['lr'\]"),
    ("check_settings", HidesASetting, r"settings must hold .*'freeze'.*, got \['lr'\]"),
    ("check_settings", NotJSON, "must fit into JSON: .*frozenset"),
    ("check_refused_batch", WritesIntoMemory, "leave the state as it was; differs in memory.count"),
    ("check_refused_batch", RepairsBadImages, "bad batch of shape .* must raise a BatchError"),
    ("check_device", Elsewhere, r"elsewhere: \['far'\]"),
    ("check_adapt_takes_images_only", TakesLabels, "takes .*'labels'"),
    ("check_two_methods", CountsTogether, "a second method around the same network"),
    ("check_two_streams", CountsAndResets, "must hold all that a stream depends on"),
    ("check_shared_network", CountsAndResets, "streams over one network must not feel each other"),
]


def make_case(method, adapted=False):
    model = make_network("mlp")
    return MethodCase(method, model, {}, make_adapter(model) if adapted else None, BATCHES)


@pytest.fixture
def registry(monkeypatch):
    """What a test registers is forgotten again."""
    list(methods)  # imports all of them, so that the copy is whole
    monkeypatch.setattr(methods, "_entries", dict(methods._entries))
    return methods


@pytest.mark.parametrize(
    ("check", "method", "message"), BROKEN, ids=[method.__name__ for _, method, _ in BROKEN]
)
def test_a_broken_promise_is_noticed(check, method, message, registry):
    if check == "check_save_and_load":
        registry.register("broken")(method)
    case = make_case(method, adapted=check == "check_adapter_stays")
    with pytest.raises(AssertionError, match=message):
        getattr(checks, check)(case)


def test_every_check_can_fail():
    assert {check for check, _, _ in BROKEN} == {check.__name__ for check in method_checks()}


def test_a_state_that_is_not_restored_is_noticed(registry):
    """Even where the logits do not show it."""

    class LosesMomentum(Tent):
        remembers: ClassVar = {"last": torch.float32}

        def load_state(self, state):
            super().load_state(state)
            self.memory = {}

        def adapt(self, x):
            self.memory = {"last": x.mean()}
            return super().adapt(x)

    registry.register("loses-momentum")(LosesMomentum)
    case = make_case(LosesMomentum)
    with pytest.raises(AssertionError, match=r"must have the saved state; differs in memory\.last"):
        checks.check_save_and_load(case)


def test_a_kept_contract():
    results = check_method(Tent, make_network("mlp"), batches=BATCHES)
    assert {result.case for result in results} == {"MLP-plain", "MLP-adapter"}
    assert {result.check for result in results} == {check.__name__ for check in method_checks()}
    skipped = [result for result in results if result.skipped]
    assert skipped == [("check_adapter_stays", "MLP-plain", "the case has no adapter")]


def test_all_broken_promises_are_listed():
    with pytest.raises(AssertionError) as error:
        check_method(CountsAndResets, make_network("mlp"), batches=BATCHES)
    message = str(error.value)
    assert message.startswith("CountsAndResets breaks its contract:\n  check_")
    for check in ("check_two_streams", "check_refused_batch"):
        for case in ("MLP-plain", "MLP-adapter"):
            assert (f"{check} [{case}]: " in message) == (case == "MLP-plain")  # forward is unused
    assert "check_reset" not in message


def test_an_error_inside_a_check_is_a_broken_promise_too():
    class NeedsTwoImages(Tent):
        def forward(self, x):
            return super().forward(x) + 1 // (len(x) - 1)

    with pytest.raises(
        AssertionError, match=r"check_batch_sizes \[MLP-plain\]: ZeroDivisionError:"
    ):
        check_method(
            NeedsTwoImages, make_network("mlp"), batches=make_batches((3, 8, 8), (4, 3, 5))
        )


def test_saving_is_skipped_visibly_where_the_class_is_not_registered():
    class Unregistered(Tent):
        pass

    results = check_method(Unregistered, make_network("mlp"), batches=BATCHES)
    reasons = {r.case: r.skipped for r in results if r.check == "check_save_and_load"}
    assert reasons.keys() == {"MLP-plain", "MLP-adapter"}
    assert all('@methods.register("name")' in reason for reason in reasons.values())
    with pytest.raises(SkipTest, match="Unregistered is not registered"):
        checks.check_save_and_load(make_case(Unregistered))


def test_networks_that_a_method_refuses_are_left_out():
    assert [str(case) for case in method_cases(IABN)] == [
        "resnet_iabn-plain",
        "resnet_iabn-adapter",
    ]
    assert len(method_cases(Tent)) == 2 * len(NETWORKS)
    with pytest.raises(AssertionError, match=r"IABN accepts no network:\nMLP: .*IABN layers"):
        method_cases(IABN, make_network("mlp"))


def test_a_model_and_a_stream_of_ones_own():
    """Features rather than images: they have no layout, and no channels to leave out."""

    def build():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    results = check_method(Tent, make_network(build), batches=make_batches((6,), (4, 3, 5)))
    skipped = {result.check for result in results if result.skipped}
    assert skipped == {"check_memory_layout", "check_adapter_stays"}


def test_an_adapter_of_ones_own():
    model = make_network("mlp")
    adapter = make_adapter(model, seed=5, dw="full")
    plain, adapted = method_cases(Tent, model, adapter=adapter, batches=BATCHES)
    assert plain.adapter is None
    assert adapted.adapter is adapter


def test_settings_are_handed_on():
    (case, _) = method_cases(Tent, make_network("mlp"), settings={"lr": 0.5}, batches=BATCHES)
    assert case.build().lr == 0.5
    assert case.build(lr=0.25).lr == 0.25
    with pytest.raises(SettingError, match="lr of the optimiser, must be above 0"):
        method_cases(Tent, make_network("mlp"), settings={"lr": -1}, batches=BATCHES)


@pytest.mark.parametrize("wrong", [Tent(make_network("mlp")), nn.Linear, "tent"], ids=type)
def test_only_methods_can_be_checked(wrong):
    with pytest.raises(InputError, match=r"cls, must be a subclass of twoshift\.Method"):
        check_method(wrong)
