"""Networks compiled in place by torch.compile: names, states and hooks stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from twoshift.errors import ModelError

COMPILERS = ("torch._dynamo", "torch._inductor")  # whose errors are not the batch's
CURE = "Go on without live.compile(), or give it other options, for example backend='aot_eager'."


def compile_networks(networks: Iterable[nn.Module], device: torch.device, **options: Any) -> None:
    """Compile networks at their next pass; where nothing can be compiled, say so now.

    From then on torch looks at hooks, in the whole process, before it takes a compiled pass for one
    that fits: passes that capture features differ from others by a hook only.

    Args:
        networks: The networks.
        device: Their device.
        options: Options of `torch.compile`.
    """
    try:  # the same tools on a function of one line: a missing compiler shows here
        with torch.inference_mode(False), torch.no_grad():
            torch.compile(_line, **options)(torch.zeros(2, device=device))
    except Exception as e:
        raise ModelError(
            f"torch.compile cannot compile anything here: {_told(e)}",
            cure="Install a C++ compiler such as g++ if there is none on the PATH, or go on "
            "without live.compile(): nothing was changed.",
        ) from e
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    for network in networks:
        network.compile(**options)


def compiler_refusal(error: BaseException) -> ModelError | None:
    """The error to raise instead if ``error`` is a compiler's; None if it is not."""
    if not type(error).__module__.startswith(COMPILERS):
        return None
    return ModelError(f"torch.compile cannot compile this model: {_told(error)}", cure=CURE)


def _line(x: Tensor) -> Tensor:
    return x.sin() + 1


def _told(error: BaseException) -> str:
    """The beginning of an error: who raised it, and what; pages of advice follow."""
    return f"{type(error).__name__}: {' '.join(str(error).split(chr(10))[:2])}".rstrip(".")
