"""Which batches a method takes: everything else is refused before anything moves."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from twoshift.errors import BatchError, TwoshiftError
from twoshift.methods._inputs import Inputs
from twoshift.tensors import PLAIN, oddity

# raised by networks for inputs of the wrong shape; vision transformers often use assertions
MODEL_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError)


def checked(x: Tensor, model: nn.Module, inputs: Inputs | None) -> Tensor:
    """``x`` on the device of ``model``, or an error that says why it is no batch for it."""
    try:
        return _checked(x, model, inputs)
    except TwoshiftError:
        raise
    except MODEL_REFUSALS as e:  # of torch, for a tensor of a kind that is not known here
        raise BatchError(f"a batch cannot be read: {e}", must_be=PLAIN) from e


def _checked(x: Tensor, model: nn.Module, inputs: Inputs | None) -> Tensor:
    if not isinstance(x, Tensor):
        raise BatchError("a batch", must_be="a torch.Tensor", got=type(x).__name__)
    if odd := oddity(x):
        cure = "Pass a plain one, for example x.to_dense() or x.as_subclass(torch.Tensor)."
        raise BatchError("a batch", must_be=PLAIN, got=odd, cure=cure)
    if x.dim() < 2 or x.shape[0] == 0 or x.numel() == 0:
        must_be = f"{expected_input(model)}, not empty"
        raise BatchError("a batch", must_be=must_be, got=f"{tuple(x.shape)}")
    parameter = next(model.parameters())
    if x.dtype != parameter.dtype:
        cure = "images.float() / 255." if x.dtype == torch.uint8 else f"x.to({parameter.dtype})."
        raise BatchError("a batch", must_be=parameter.dtype, got=x.dtype, cure=f"Convert: {cure}")
    if not _may_take(model, x):
        raise BatchError("a batch", must_be=expected_input(model), got=f"{tuple(x.shape)}")
    low, high = (float(limit) for limit in x.detach().aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):  # NaN is both the least and the greatest
        raise BatchError("a batch", must_be="finite", got="NaN or infinite pixels")
    if inputs is not None:
        inputs.check(x, low, high)
    return x.to(parameter.device)


def _first_layer(model: nn.Module) -> nn.Module | None:
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    return next((m for m in model.modules() if isinstance(m, kinds)), None)


def _may_take(model: nn.Module, x: Tensor) -> bool:
    """Whether the channels of ``x`` suit a network that begins with a convolution.

    The first convolution may see k x k pixels of each channel as channels. Where it is not the
    first that is used, another one has these channels. The network itself may say more.
    """
    first = _first_layer(model)
    if not isinstance(first, nn.Conv2d):
        return True
    if x.dim() != 4:
        return False
    channels, expected = x.shape[1], first.in_channels
    if expected % channels == 0 and math.isqrt(expected // channels) ** 2 * channels == expected:
        return True
    return any(m.in_channels == channels for m in model.modules() if isinstance(m, nn.Conv2d))


def expected_input(model: nn.Module) -> str:
    """The shape of a batch for ``model``, as far as its first layer tells."""
    first = _first_layer(model)
    if isinstance(first, nn.Conv2d):
        return f"(B, {first.in_channels}, H, W)"
    if isinstance(first, nn.Linear):
        return f"(B, ...) with {first.in_features} values per sample"
    return "(B, ...)"


def check_finite(what: str, values: Tensor) -> None:
    """Refuse a batch that leads to NaN or infinity."""
    if not all(math.isfinite(limit) for limit in values.detach().aminmax()):
        raise BatchError(
            what,
            must_be="finite",
            got="NaN or infinity",
            cure="Check the range of the images (usually [0, 1]) and the model's weights.",
        )
